"""Profiles as files: JSON that is checked against the types when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from sacplan._device.devices import DeviceSpec
from sacplan._program.files import load as load_file
from sacplan._program.files import write_compact
from sacplan._program.fingerprint import Fingerprint
from sacplan._program.program import SCHEMA_VERSION, Program
from sacplan._ranks.ranks import Ranks
from sacplan._record.step import Mode
from sacplan.errors import TraceError

if TYPE_CHECKING:
    from sacplan._profile.profile import Profile


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


_FIELDS = ("fingerprint", "spec", "trace", "runtime", "mode", "rules", "ranks", "recorded")


def save(profile: Profile, path: str | Path) -> None:
    """Write a profile; compressed where the name ends in ``.gz``."""
    values = {name: getattr(profile, name) for name in _FIELDS}
    write_compact(path, _File(what="profile", schema_version=SCHEMA_VERSION, **values))


def load(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        TraceError: the file is damaged, of another version, or holds something else.
    """
    from sacplan._profile.profile import Profile

    found = load_file(path, _File, "profile", SCHEMA_VERSION, TraceError)
    problem = found.recorded.first_problem()
    if problem:
        raise TraceError(f"{path} is damaged: {problem}. Make the profile again with sacplan.profile.")
    return Profile(**{name: getattr(found, name) for name in _FIELDS})
