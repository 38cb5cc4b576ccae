"""The torch that runs has every private name that sacplan uses, and one that lacks a name is refused in words."""

from __future__ import annotations

import ast
import pkgutil
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sacplan
from sacplan.torch_compat import versions
from sacplan.torch_compat.versions import LATE, NEEDED, NEWEST, OLDEST, check_torch, torch_names

ROOT = Path(__file__).parents[2]


def private_names() -> Iterator[tuple[str, str]]:
    """Private names of torch in the package outside ``with torch_names()``, each with the file that has it."""
    for path in sorted((ROOT / "sacplan").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for block in ast.walk(tree):
            if isinstance(block, ast.With) and "torch_names()" in ast.unparse(block.items[0]):
                block.body = []
        inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and id(node) not in inner:
                names = [ast.unparse(node)]
            else:
                continue
            for name in names:
                if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name):
                    yield re.sub(r"\.__\w+__(\.\w+)*$", "", name), str(path.relative_to(ROOT))


def test_every_private_name_is_listed() -> None:
    listed = {*NEEDED, *LATE}
    found = dict(private_names())
    assert len(found) > 50
    unknown = {
        name: path
        for name, path in found.items()
        if not any(one == name or one.startswith(f"{name}.") or name.startswith(f"{one}.") for one in listed)
    }
    assert not unknown


def test_the_torch_that_runs_has_them() -> None:
    check_torch()
    for name in LATE:
        pkgutil.resolve_name(name)


def test_a_missing_name_is_an_error_that_names_it_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "NEEDED", (*NEEDED, "torch._C._gone", "torch._gone.name"))
    with pytest.raises(
        sacplan.errors.UnsupportedTorch, match=r"lacks .*: torch\._C\._gone, torch\._gone\.name\."
    ) as e:
        check_torch()
    assert f"torch {torch.__version__}" in str(e.value)
    assert "torch 2.11 to 2.15: pip install 'torch>=2.11,<2.16'" in str(e.value)
    with pytest.raises(sacplan.SacplanError, match="_gone"), torch_names():
        from torch.utils._pytree import _gone  # noqa: F401


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0a0+git1"])
def test_another_version_is_said_in_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(
        sacplan.SacplanWarning, match=rf"tried with torch 2.11 to 2.15, and this is {version[:4]}"
    ):
        check_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.15.3+cu132", "2.13.0+cpu"])
def test_a_version_that_was_tried_says_nothing(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch()


def test_the_range_is_the_same_everywhere() -> None:
    span = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    assert f'"{span}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for page in ("README.md", "docs/versions.md"):
        said = (ROOT / page).read_text(encoding="utf-8")
        assert f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}" in said
    jobs = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    lists = re.findall(r"^ +torch: \[(.*)\]$", jobs, flags=re.MULTILINE)
    tried = {tuple(map(int, one)) for one in re.findall(r"(\d+)\.(\d+)", " ".join(lists))}
    assert tried == {(2, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)}
