"""The documentation: every code block runs and shows what it says, every link leads somewhere, every name is there.

How a page is run, from top to bottom, in a directory of its own:

- ``python`` blocks run in one namespace. One with ``title="FILE.py"`` is written to that file instead, for the
  commands that follow.
- In ``bash`` blocks each ``sacplan`` line runs as a command, and so does each ``python`` and ``torchrun`` line. A comment
  ``# exits with N`` names the exit code, where it is not 0.
- A ``text`` block right after one of these is its output. Words are compared exactly, numbers to 2 %, and ``...`` stands
  for anything.
- A block with ``norun="reason"`` does not run. ``NOT_RUN`` lists all of these.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import sacplan

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))

NOT_RUN = {
    ("alternatives.md", "python -m benchmarks.frontier", "takes ten minutes"),
    ("alternatives.md", "python -m benchmarks.rotor", "takes minutes"),
    ("figures.md", "python -m benchmarks.gpu", "needs a CUDA device"),
    ("index.md", "git clone", "installs packages"),
    ("modes.md", "python -m benchmarks.modes", "takes minutes"),
    ("start.md", "git clone", "installs packages"),
}
"""Page, beginning of the block, reason."""

NEEDS = {"huggingface.md": ("transformers", "accelerate"), "lightning.md": ("lightning",)}
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

    @property
    def where(self) -> str:
        return f"docs/{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                match["language"],
                textwrap.dedent(match["code"]),
                dict(re.findall(r'(\w+)="([^"]*)"', match["options"])),
                bool(found) and not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


class Page:
    """One page as a reader works through it."""

    def __init__(self, name: str) -> None:
        self.module = types.ModuleType(f"docs_{name.removesuffix('.md')}")
        self.module.__file__ = str(DOCS / name)
        sys.modules[self.module.__name__] = self.module
        self.output = ""

    def run(self, block: Block) -> None:
        if block.language == "text":
            assert block.follows, f"{block.where}: no block before it whose output this could be"
            check_output(block, self.output)
        elif block.language == "python" and "title" in block.options:
            compile(block.code, block.where, "exec")
            Path(block.options["title"]).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.code, block.where, "exec"), self.module.__dict__)
            self.output = out.getvalue()
        else:
            self.output = "".join(run_command(block, line) for line in commands(block.code))


def commands(code: str) -> list[str]:
    return [
        line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")
    ]


def run_command(block: Block, line: str) -> str:
    expected = re.search(r"# exits with (\d+)", line)
    words = shlex.split(line, comments=True)
    if words[0] == "sacplan":
        from typer.testing import CliRunner

        from sacplan._cli.app import app

        result = CliRunner().invoke(app, words[1:])
        code, output, said = result.exit_code, result.stdout, result.stderr
    else:
        python = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
        assert words[0] in python, f"{block.where}: nobody knows how to run {line!r}"
        done = subprocess.run(
            [*python[words[0]], *words[1:]], capture_output=True, text=True, timeout=120, check=False
        )
        code, output, said = done.returncode, done.stdout, done.stderr
    wanted = int(expected[1]) if expected else 0
    assert code == wanted, f"{block.where}: {line!r} ended with {code}, not {wanted}\n{output}\n{said}"
    return output


def check_output(block: Block, output: str) -> None:
    """Lines of the block are lines of the output, in that order; ``...`` stands for lines, or for the rest of one."""
    seen = [normal(line) for line in output.splitlines() if line.strip()]
    at = 0
    gap = False
    for line in (normal(text) for text in block.code.splitlines() if text.strip()):
        if line == ["..."]:
            gap = True
            continue
        candidates = range(at, len(seen)) if gap else range(at, min(at + 1, len(seen)))
        hit = next((i for i in candidates if alike(line, seen[i])), None)
        assert hit is not None, f"{block.where}: {' '.join(line)!r} is not what is said. This is:\n{output}"
        at, gap = hit + 1, False
    assert gap or at == len(seen), f"{block.where}: there is more to be shown, or say `...`:\n{output}"


def normal(line: str) -> list[str]:
    return line.split()


def alike(shown: list[str], said: list[str]) -> bool:
    if shown and shown[-1] == "..." and len(shown) <= len(said) + 1:
        shown, said = shown[:-1], said[: len(shown) - 1]
    return len(shown) == len(said) and all(map(same_word, shown, said))


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
def as_it_was() -> Iterator[None]:
    """What a page may change in this process."""
    modules, path, random, threads = (
        set(sys.modules),
        list(sys.path),
        torch.get_rng_state(),
        torch.get_num_threads(),
    )
    default = torch.get_default_dtype()
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("docs_") or name == "train":
            del sys.modules[name]
    sys.path[:] = path
    torch.set_rng_state(random)
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == default


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(name)
    if blocks:
        for library in ("transformers", "matplotlib", "typer", "rich", *NEEDS.get(name, ())):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")  # no table is cut
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torch.manual_seed(0)
    page = Page(name)
    for block in blocks:
        if "norun" not in block.options:
            page.run(block)


def test_what_is_not_run_is_listed() -> None:
    found = {
        (block.page, block.code, block.options["norun"])
        for name in PAGES
        for block in blocks_of(name)
        if "norun" in block.options
    }
    assert len(found) == len(NOT_RUN)
    for page, beginning, reason in NOT_RUN:
        assert any(f[0] == page and f[1].startswith(beginning) and f[2] == reason for f in found), beginning


def test_every_block_is_of_a_language_that_is_run() -> None:
    for name in PAGES:
        blocks = blocks_of(name)
        assert {block.language for block in blocks} <= {"python", "bash", "text"}, name
        fences = re.findall(r"^ *```", (DOCS / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) == 2 * len(blocks), f"{name}: a fence without a language"
        for block in blocks:
            assert set(block.options) <= {"title", "norun"}, block.where
            if block.language == "python" and "title" in block.options:  # somebody has to use that file
                used = Path(block.options["title"]).stem
                assert any(used in b.code for b in blocks if b is not block), block.where


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


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_the_reference_has_the_names_of_the_integrations(library: str) -> None:
    pytest.importorskip(library)
    pytest.importorskip("accelerate")
    module = importlib.import_module(f"sacplan.integrations.{library}")
    public = [
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]  # fmt: skip
    text = (DOCS / "api" / "integrations.md").read_text(encoding="utf-8")
    named = re.findall(rf"^::: sacplan\.integrations\.{library}\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(public)


def test_commands_and_files_that_are_named_are_there() -> None:
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for module in re.findall(r"python -m (benchmarks\.\w+)", text):
            assert (ROOT / (module.replace(".", "/") + ".py")).exists(), f"{path.name}: {module}"
        for name in re.findall(r"`((?:benchmarks|docs|examples|notebooks|sacplan|tests)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_every_file_of_figures_is_explained() -> None:
    text = (DOCS / "figures.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"`benchmarks/results/{path.name}`" in text, path.name


def test_every_command_has_an_example() -> None:
    pytest.importorskip("typer")
    import typer

    from sacplan._cli.app import app
    from sacplan._cli.exits import MEANING

    names = typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined]
    run = [line for b in blocks_of("cli.md") if b.language == "bash" for line in commands(b.code)]
    assert {line.split()[1] for line in run if line.startswith("sacplan")} >= set(names)
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    for code in MEANING:
        assert f"| {code} |" in page, f"exit code {code}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """``--strict``: links, anchors, pages without a place in the navigation, names that do not exist."""
    for library in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(library)
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES)
    for path, text in pages.items():
        loaded = re.findall(r"<(?:link|script|img)[^>]+?(?:href|src)=\"?(https?://[^\">\s]+)", text)
        assert not loaded, f"{path.relative_to(tmp_path)} loads {loaded}"
    inventory = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(doc["location"].endswith("#sacplan.plan") for doc in inventory["docs"])
