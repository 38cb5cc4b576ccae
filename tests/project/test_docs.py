"""The documentation: every code block runs and shows what it says.

How a page is run, from top to bottom, in a directory of its own:

- ``python`` blocks run in one namespace. One with ``title="FILE.py"`` is written to that file instead, for the
  commands that follow. So are ``bash`` and ``yaml`` blocks with a title: files for another machine, whose commands
  ``tests/project/test_ci.py`` runs.
- In ``bash`` blocks each line that begins with ``sacplan``, ``python`` or ``torchrun`` runs as a command. A comment
  ``# exits with N`` names the exit code, where it is not 0.
- A ``text`` block right after one of these is its output. Words are compared exactly, numbers to 2 %, and ``...``
  stands for anything. ``SACPLAN_WRITE_DOCS=1 pytest tests/project/test_docs.py`` writes new numbers into the pages.
- A block after a comment ``<!-- not run by the tests: REASON -->`` does not run. ``NOT_RUN`` counts these.

The README and CONTRIBUTING.md are pages, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import sacplan
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = "../README.md"
PAGES = [README, "../CONTRIBUTING.md", *sorted(path.name for path in DOCS.glob("*.md"))]
SLOW = {
    "ci.md", "cli.md", "compiled.md", "fit.md", "fsdp.md", "how.md", "huggingface.md", "index.md", "loop.md",
    "lora.md", "no_gpu.md", "offload.md", "reports.md", "start.md", "testing.md", "trainers.md", "which-parallelism.md",
}  # fmt: skip
"""Pages that take more than a few seconds."""

NOT_RUN = 18
"""Blocks whose comment says why they do not run; whoever adds one raises this."""

NOT_RUN_COMMENT = re.compile(r"<!-- not run by the tests: ([^>]*) -->\s*$")

NEEDS = {
    "huggingface.md": ("transformers", "accelerate", "trl", "datasets"),
    "lora.md": ("peft", "bitsandbytes"),
    "trainers.md": ("accelerate", "lightning"),
}
"""What a page needs besides ``transformers``, ``matplotlib`` and the command line."""

NUMBER = re.compile(r"\d[\d,_]*\.?\d*(?:e[+-]?\d+)?")
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    options: dict[str, str] = field(default_factory=dict)
    follows: bool = False  # nothing but empty lines between it and the block before
    not_run: str | None = None  # why it is not run; None if it is

    @property
    def where(self) -> str:
        return f"{Path('docs', self.page)}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        comment = NOT_RUN_COMMENT.search(text, end, match.start())
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                match["language"],
                textwrap.dedent(match["code"]),
                dict(re.findall(r'(\w+)="([^"]*)"', match["options"])),
                bool(found) and not text[end : match.start()].strip(),
                None if comment is None else comment[1],
            )
        )
        end = match.end()
    return found


class Page:
    """One page as a reader works through it."""

    def __init__(self, name: str) -> None:
        self.module = types.ModuleType(f"docs_{Path(name).stem}")
        self.module.__file__ = str(DOCS / name)
        sys.modules[self.module.__name__] = self.module
        self.output = ""

    def run(self, block: Block) -> None:
        if block.language == "text":
            assert block.follows, f"{block.where}: no block before it whose output this could be"
            if os.environ.get("SACPLAN_WRITE_DOCS"):
                replace(block, with_new_numbers(block, self.output))
            else:
                check_output(block, self.output)
        elif "title" in block.options:
            if block.language == "python":
                compile(block.code, block.where, "exec")
            Path(block.options["title"]).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.code, block.where, "exec"), self.module.__dict__)
            self.output = out.getvalue()
        else:
            self.output = "".join(run_command(block, line) for line in commands(block.code))


def replace(block: Block, code: str) -> None:
    path = DOCS / block.page
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(block.code, code, 1), encoding="utf-8")


def commands(code: str) -> list[str]:
    return [
        line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")
    ]


def run_command(block: Block, line: str) -> str:
    from typer.testing import CliRunner

    from sacplan.cli.app import app

    expected = re.search(r"# exits with (\d+)", line)
    words = shlex.split(line, comments=True)
    if words[0] == "sacplan":
        done = CliRunner().invoke(app, words[1:])
        code, output, said = done.exit_code, done.stdout, done.stderr
    else:
        python = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
        assert words[0] in python, f"{block.where}: nobody knows how to run {line!r}"
        done = run_python(*python[words[0]], *words[1:])
        code, output, said = done.returncode, done.stdout, done.stderr
    wanted = int(expected[1]) if expected else 0
    assert code == wanted, f"{block.where}: {line!r} ended with {code}, not {wanted}\n{output}\n{said}"
    return output


def check_output(block: Block, output: str) -> None:
    """Raise unless the lines of the block are those of the output, in that order."""
    seen = said_lines(output)
    shown = [(line, hit) for line, hit in beside(block, seen, alike) if line.strip()]
    for line, hit in shown:
        assert hit is not None or line.strip() == "...", (
            f"{block.where}: {line!r} is not what is said. If it is numbers that have changed, SACPLAN_WRITE_DOCS=1 "
            f"puts the new ones in. This is said:\n{output}"
        )
    more = f"{block.where}: there is more to be shown, or say `...`:\n{output}"
    assert shown[-1][1] in (None, len(seen) - 1), more


def with_new_numbers(block: Block, output: str) -> str:
    """The block with the numbers of the output."""
    lines, seen = [], said_lines(output)
    for line, hit in beside(block, seen, alike, same_text):
        new = line if hit is None else seen[hit]
        if hit is not None and line.rstrip().endswith("..."):
            new = " ".join([*new.split(" ")[: len(line.rstrip().split(" ")) - 1], "..."])
        lines.append(f"{new}\n")
    return "".join(lines)


def said_lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.splitlines() if line.strip()]


def beside(
    block: Block, seen: list[str], *tests: Callable[[str, str], bool]
) -> Iterator[tuple[str, int | None]]:
    """The lines of a block, each with the place in the output of what it shows."""
    at, gap = 0, False
    for line in block.code.splitlines():
        gap |= line.strip() == "..."
        near_by = range(at, len(seen) if gap else min(at + 1, len(seen)))
        tried = tests if line.strip() not in ("", "...") else ()
        hit = next((i for test in tried for i in near_by if test(line, seen[i])), None)
        yield line, hit
        if hit is not None:
            at, gap = hit + 1, False


def alike(shown: str, said: str) -> bool:
    return same_text(shown, said) and all(map(same_word, *trimmed(shown, said)))


def same_text(shown: str, said: str) -> bool:
    a, b = trimmed(shown, said)
    return [NUMBER.sub("#", word) for word in a] == [NUMBER.sub("#", word) for word in b]


def trimmed(shown: str, said: str) -> tuple[list[str], list[str]]:
    """Words of both; up to the ``...`` at the end of what is shown."""
    a, b = shown.split(), said.split()
    return (a[:-1], b[: len(a) - 1]) if a and a[-1] == "..." else (a, b)


def same_word(shown: str, said: str) -> bool:
    if NUMBER.sub("#", shown) != NUMBER.sub("#", said):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(said), strict=True)
    return all(near(number(a), number(b)) for a, b in pairs)


def number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def near(shown: float, said: float) -> bool:
    return abs(shown - said) <= max(0.02 * abs(said), 0.0051)


@pytest.fixture
def as_it_was(tmp_path: Path) -> Iterator[None]:
    """What a page may change in this process."""
    modules, path = set(sys.modules), list(sys.path)
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        yield
    for name in set(sys.modules) - modules:  # the page, and files that it wrote
        if name.startswith("docs_") or (tmp_path / f"{name}.py").is_file():
            del sys.modules[name]
    sys.path[:] = path
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == default


@pytest.mark.filterwarnings("ignore", "error::sacplan.errors.SumOfOutputsWarning")
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [
        # .ci/newcomer runs the README, which shows no outputs, from the wheel and with the newest torch.
        pytest.param(README, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        *(pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PAGES[1:]),
    ],
)
def test_a_page_does_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(name)
    if blocks:
        for library in ("transformers", "matplotlib", "typer", "rich", *NEEDS.get(name, ())):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")  # no table is cut
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # else the workspaces are of other sizes
    torch.manual_seed(0)
    if "accelerate" in NEEDS.get(name, ()):  # what another page has told it, it tells to all of a process
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    page = Page(name)
    for block in blocks:
        if block.not_run is None:
            page.run(block)


def test_no_more_blocks_are_left_out() -> None:
    assert sum(block.not_run is not None for name in PAGES for block in blocks_of(name)) == NOT_RUN


def test_a_block_that_says_something_else_is_noticed() -> None:
    """The checks above can fail."""
    said = "peak 12.69 GiB (13627902464 bytes)\nsecond line\nthird line 3\n"
    for shown in (said, "peak 12.70 GiB ...\n...\nthird line 3\n", "...\nsecond line\n..."):
        check_output(Block("x.md", 1, "text", shown), said)
    for shown in (
        "peak 13.69 GiB (13627902464 bytes)\nsecond line\nthird line 3\n",
        "peak 12.69 MiB ...\n...",
        "peak 12.69 GiB (13627902464 bytes)\nsecond line\n",
        "second line\n...",
        "...\nthird line 3\nsecond line\n",
    ):
        with pytest.raises(AssertionError):
            check_output(Block("x.md", 1, "text", shown), said)
    with pytest.raises(AssertionError, match="ended with 2"):
        run_command(Block("x.md", 1, "bash", ""), "sacplan plan no-such-file.py --budget 70%")


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^::: sacplan\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(named) == sorted(sacplan.__all__)


def test_every_command_has_an_example() -> None:
    pytest.importorskip("typer")
    import typer

    from sacplan.cli.app import app
    from sacplan.cli.exits import MEANING

    names = typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined]
    run = [line for b in blocks_of("cli.md") if b.language == "bash" for line in commands(b.code)]
    assert {line.split()[1] for line in run if line.startswith("sacplan")} >= set(names)
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    for code in MEANING:
        assert f"| {code} |" in page, f"exit code {code}"
