"""Profiles as files: JSON that is checked against the types when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from sacplan._device.devices import DeviceSpec
from sacplan._program.files import load as load_file
from sacplan._program.files import write_compact
from sacplan._program.fingerprint import Fingerprint
from sacplan._program.program import SCHEMA_VERSION, Program
from sacplan._ranks.ranks import Ranks
from sacplan._record.step import Mode
from sacplan.errors import TraceError


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: Literal["profile"]
    schema_version: int
    fingerprint: Fingerprint
    spec: DeviceSpec
    trace: Literal["fake", "real"]
    runtime: Literal["cost-model", "benchmark"]
    mode: Mode
    rules: tuple[str, ...]
    ranks: Ranks
    recorded: Program


def save(path: str | Path, **fields: Any) -> None:
    """Write the fields of a profile; compressed where the name ends in ``.gz``."""
    write_compact(path, _File(what="profile", schema_version=SCHEMA_VERSION, **fields))


def load(path: str | Path) -> dict[str, Any]:
    """The fields of a profile.

    Raises:
        TraceError: the file is damaged, of another version, or holds something else.
    """
    found = load_file(path, _File, "profile", SCHEMA_VERSION, TraceError)
    problem = found.recorded.first_problem()
    if problem:
        raise TraceError(f"{path} is damaged: {problem}. Make the profile again with sacplan.profile.")
    fields = {name: getattr(found, name) for name in _File.__struct_fields__}
    del fields["what"], fields["schema_version"]
    return fields
