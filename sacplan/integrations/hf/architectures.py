"""Published configurations of well-known models, so that ``hf:NAME`` needs no network and no weights.

``architectures.json`` beside this file holds them. A family is an architecture with the fields that set its sizes and
the values that its models share; a dotted field, such as ``text_config.hidden_size``, is one of a nested
configuration. A model gives its sizes in this order, and what else its published ``config.json`` has that shapes it.
Other values are the defaults of the configuration class. ``parameters`` is the count of the published checkpoint,
with tied weights counted once. The tests compare it with the model that is built from the row.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacplan.core.near import near_names


@dataclass(frozen=True, slots=True)
class Architecture:
    """A published model: its name on the hub, its number of parameters, and the values of its configuration."""

    name: str
    parameters: int
    model_type: str
    architecture: str
    values: Mapping[str, Any]
    short: tuple[str, ...]


def _read(family: Mapping[str, Any], model: Mapping[str, Any]) -> Architecture:
    """Return the model of a row. Its values take the place of those of its family."""
    values = copy.deepcopy(family["values"])
    for field, size in zip(family["sizes"], model["sizes"], strict=True):
        *outer, name = field.split(".")
        functools.reduce(dict.__getitem__, outer, values)[name] = size
    values |= model.get("values", {})
    short = tuple(model.get("short", ()))
    return Architecture(
        model["name"], model["parameters"], family["model_type"], family["architecture"], values, short
    )


@functools.cache
def table() -> Sequence[Architecture]:
    """Return the models of ``architectures.json``, in its order."""
    found = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
    return tuple(_read(found["families"][model["family"]], model) for model in found["models"])


def _by_name() -> dict[str, Architecture]:
    # Three names for each row: with its owner, without it, and short forms. Case does not matter on the hub
    # either.
    return {
        name.lower(): row for row in table() for name in (row.name, row.name.rpartition("/")[2], *row.short)
    }


def find(name: str) -> Architecture | None:
    """Return the row with this name on the hub, last part of it, or short form. Case does not matter."""
    return _by_name().get(name.lower())


def by_owner() -> list[str]:
    """Return one line per owner on the hub, with the names that are known."""
    found: dict[str, list[str]] = {}
    for row in table():
        owner, _, name = row.name.partition("/")
        found.setdefault(owner, []).append(name)
    return [f"{owner}: {', '.join(names)}" for owner, names in found.items()]


def near(name: str) -> list[str]:
    """Return the names of rows that are spelled alike, for "Did you mean"."""
    return near_names(name, _by_name(), lambda spelled: _by_name()[spelled].name)
