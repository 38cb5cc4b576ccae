"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_code_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert "within budget" in capsys.readouterr().out
    assert (tmp_path / "plan.json").exists()


def test_files_that_it_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:examples|notebooks)/[\w/.]+)`|\((docs/[\w/.]+)\)", text):
        assert (README.parent / (name[0] or name[1])).exists()
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (README.parent / (module.replace(".", "/") + ".py")).exists()
