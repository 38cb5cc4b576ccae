"""Name and options of an ``hf:`` target, kept in the file of a profile or plan so that ``verify`` can make it again.

save(plan, Path("plan.json"), origin_of(target))
options_of(Plan.load("plan.json").fingerprint.target)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from sacplan.cli.output import note
from sacplan.integrations.hf.target import ModelOptions, Target

if TYPE_CHECKING:
    from sacplan import Plan, Profile
    from sacplan.core.fingerprint import Fingerprint


def origin_of(target: Target, **chosen: Any) -> dict[str, Any] | None:
    """Return name and options of a loaded target, as they are kept; None for a target that the user's code makes.

    ``chosen`` overrides the facts of the target.
    """
    # The user's own function makes the model: a name and options would not do.
    if not target.facts:
        return None
    facts = {**target.facts, **chosen}
    given = ModelOptions(**{f.name: facts.get(f.name) for f in fields(ModelOptions)}).given()
    # The schema has numbers and texts only: a flag becomes 1.
    return {"name": target.name, **{k: int(v) if isinstance(v, bool) else v for k, v in given.items()}}


def options_of(origin: Mapping[str, Any] | None) -> ModelOptions | None:
    """Return the options that an origin stands for; None for other targets, and for files saved from Python."""
    if origin is None:
        return None
    given = dict(origin)
    del given["name"]
    return msgspec.convert(given, ModelOptions, strict=False)


def save(made: Plan | Profile, path: Path | None, origin: Mapping[str, Any] | None) -> None:
    """Save a profile or a plan together with its origin. Do nothing without a path."""
    if path is None:
        return
    fingerprint = structs.replace(made.fingerprint, target=origin)
    # A profile is a dataclass, and a plan a msgspec struct.
    replace: Any = dataclasses.replace if dataclasses.is_dataclass(made) else structs.replace
    replace(made, fingerprint=fingerprint).save(path)
    # ``hf:`` targets have no cache. The user's own model, with which the file will be used, may have one.
    if origin is not None and made.fingerprint.setup.use_cache is False:
        note(
            "made with use_cache=False: a cache would be alive until the step is over. Switch it off where you train"
        )


def seen_in(fingerprint: Fingerprint) -> ModelOptions:
    """Read the options of an ``hf:`` target from a fingerprint, for plans that were saved from Python.

    A fingerprint has everything but the optimizer and the attention.
    """
    shapes = {path: shape for path, shape, _ in fingerprint.batch}
    tokens = shapes.get("batch['input_ids']")
    first = tokens or shapes.get("batch['pixel_values']")
    # The type of most parameters: some, such as those of norms, may be kept in another type.
    types = Counter(
        dtype.removeprefix("frozen ").removeprefix("torch.") for _, _, dtype in fingerprint.parameters
    )
    dtype: Any = types.most_common(1)[0][0] if types else None
    # The first dimension of a batch is its samples, and the second one of tokens is the sequence.
    return ModelOptions(first[0] if first else None, tokens[1] if tokens else None, dtype)
