"""Files that are written for a user: all of the old contents or all of the new ones, for whoever reads meanwhile."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan
from sacplan.core.writing import replacing, write_bytes


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    return sacplan.profile(model, torch.ones(4, 8), None, torch.optim.SGD, device="h100")


WRITERS: dict[str, Callable[[sacplan.Profile, Path], Any]] = {
    "plan.json": lambda profile, path: sacplan.plan(profile, 50).save(path),
    "plan.json.gz": lambda profile, path: sacplan.plan(profile, 50).save(path),
    "profile.json": lambda profile, path: profile.save(path),
    "device.json": lambda profile, path: profile.spec.save(path),
    "report.html": lambda profile, path: sacplan.Report(profile).write(path),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_whatever_is_written_replaces(name: str, profile: sacplan.Profile, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    with path.open("rb") as before:
        WRITERS[name](profile, path)
        assert before.read() == b"old"  # what a reader has open is still whole: the new one is another file
    assert path.read_bytes() != b"old"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]  # nothing is left beside


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as part:
            part.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    write_bytes(path, b"1")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask  # as `open` makes a new file
    path.chmod(0o640)
    link.symlink_to(path)
    write_bytes(link, b"2")
    assert link.is_symlink()
    assert path.read_bytes() == b"2"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_cannot_be_written_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "nothere" / "plan.json"))):
        write_bytes(tmp_path / "nothere" / "plan.json", b"1")
    with pytest.raises(IsADirectoryError):
        write_bytes(tmp_path, b"1")
    with pytest.raises(OSError, match=r"Invalid argument: 'a\\x00b'"):  # no file has such a name
        write_bytes("a\0b", b"1")
    if os.geteuid():  # root may write to everything
        path = tmp_path / "plan.json"
        path.touch(0o444)
        with pytest.raises(PermissionError, match=re.escape(str(path))):
            write_bytes(path, b"1")


def test_what_is_no_regular_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"through")
    reader.join()
    assert read == [b"through"]
