"""What the README names is there. ``test_docs.py`` runs its code and commands with the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_files_that_it_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w/.-]+)\)", text)
    named = re.findall(r"`((?:examples|notebooks|docs)/[\w/.]*)`", text)
    assert len(links) > 10
    assert not [name for name in (*links, *named) if not (README.parent / name).exists()]


def test_targets_of_make_that_it_names_exist() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    )
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(encoding="utf-8"), flags=re.M))
    assert {"test", "demo"} <= named <= targets
