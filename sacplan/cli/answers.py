"""The object that ``fit --json`` prints, and its JSON schema.

Both are made from the fields of a verdict and its rows, so a field that is added there is in the object and in the
schema. ``python -m sacplan.cli.answers`` writes the schema; ``docs/ci.md`` shows what it is for.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_type_hints

import msgspec

from sacplan.cli.show import target_facts
from sacplan.core import files
from sacplan.device.outside_allocator import Outside
from sacplan.integrations.hf.target import Target
from sacplan.questions.verdict import FitRow, Verdict

FIT_VERSION = 1
"""Raised where a field is removed or changes its meaning, not where one is added."""

FIT_PATH = files.schema_path("fit", FIT_VERSION)

_OWN_FORM = ("rows", "recommended", "outside")  # fields of a verdict that JSON shows in another form
_DERIVED = ("fits", "advice", "code")  # properties of a verdict that JSON shows as well


def fit_answer(found: Verdict, target: Target, run: str) -> dict[str, Any]:
    """Return the facts about a verdict.

    Args:
        found: The verdict.
        target: What was asked about.
        run: The command line that makes the recommended plan; ``""`` if there is none.
    """
    return {
        "command": "fit",
        "schema_version": FIT_VERSION,
        **target_facts(target),
        **{f.name: getattr(found, f.name) for f in fields(found) if f.name not in _OWN_FORM},
        **{name: getattr(found, name) for name in _DERIVED},
        "outside": [one._asdict() for one in found.outside],
        "verdict": found.sentence,
        "rows": [row.figures() for row in found.rows],
        "recommended": None if found.recommended is None else found.recommended.figures(),
        "run": run,
    }


def fit_schema() -> dict[str, Any]:
    """Return the JSON schema of what ``fit --json`` prints: a verdict, one for each of several devices, or an error."""
    row = _struct("FitRow", FitRow, FitRow.shown)
    outside = _struct("Outside", Outside, Outside._fields)
    # Types come from the annotations of the same fields and properties that ``fit_answer`` reads, so a new
    # field needs no change here.
    known = {f.name: _hint(Verdict, f.name) for f in fields(Verdict) if f.name not in _OWN_FORM}
    known |= {name: _hint(Verdict, name) for name in _DERIVED}
    known |= {
        "command": Literal["fit"],
        # A type checker takes no names in a ``Literal``: this changes together with ``FIT_VERSION``.
        "schema_version": Literal[1],
        "target": str,
        "verdict": str,
        "rows": list[row],  # type: ignore[valid-type]  # a type made here
        "recommended": row | None,
        "outside": list[outside],  # type: ignore[valid-type]
        "run": str,
    }
    # Only ``hf:`` targets have facts of their own, so the key may be missing (see ``target_facts``).
    optional: list[Any] = [("hf", dict[str, str | int | float | bool | None], msgspec.UNSET)]
    answer = msgspec.defstruct("Verdict", [*known.items(), *optional])
    several = msgspec.defstruct("Verdicts", [("command", Literal["fit"]), ("answers", list[answer])])  # type: ignore[valid-type]
    refs, definitions = msgspec.json.schema_components(
        (answer, several, Failed), ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The output of sacplan fit --json",
        "anyOf": list(refs),
        "$defs": definitions,
    }


class Error(msgspec.Struct):
    """What went wrong, in the place of an answer."""

    type: str
    message: str
    exit_code: int


class Failed(msgspec.Struct):
    """Printed where the command fails."""

    error: Error


def _struct(name: str, kind: type, names: Any) -> Any:
    """Return a type with some fields and properties of another one."""
    return msgspec.defstruct(name, [(each, _hint(kind, each)) for each in names])


def _hint(kind: type, name: str) -> Any:
    """Return the type of a field, or of what a property returns."""
    found = getattr(kind, name, None)
    # ``get_type_hints`` of a class knows its fields. The type of a property is that of the function behind it.
    if isinstance(found, property):
        assert found.fget is not None
        return get_type_hints(found.fget)["return"]
    return get_type_hints(kind)[name]


if __name__ == "__main__":
    files.write(FIT_PATH, fit_schema())
