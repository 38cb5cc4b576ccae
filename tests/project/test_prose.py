"""Docstrings read as sentences (see ``CONTRIBUTING.md``)."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sacplan"


def test_no_docstring_is_a_question_that_nobody_asked() -> None:
    """A summary such as "What a plan does" has no verb of its own: one reads it twice."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                name = f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'the module')}"
                if not text:
                    continue
                summary = text.split("\n\n")[0].rstrip()
                is_sentence = summary.endswith((".", ":", "?"))
                if not is_sentence or summary.startswith(("What ", "Of ", "That ", "Those ")):
                    found.append(name)
    assert not found
