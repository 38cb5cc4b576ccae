"""Profiles as files: JSON that is checked against the types when it is read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from sacplan.core import files
from sacplan.core.files import Checksum
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.program import Program
from sacplan.device.devices import DeviceSpec
from sacplan.distributed.ranks.ranks import Ranks
from sacplan.errors import TraceError
from sacplan.record.step import Mode

SCHEMA_VERSION = 6


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: Fingerprint
    spec: DeviceSpec
    trace: Literal["fake", "real"]
    runtime: Literal["cost-model", "benchmark"]
    mode: Mode
    rules: tuple[str, ...]
    ranks: Ranks
    recorded: Program


class ProfileFile(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a profile.

    Attributes:
        sha256: checksum of all other fields except ``what`` and ``schema_version``.
    """

    what: Literal["profile"]
    schema_version: Literal[6]
    sha256: Checksum

    def __post_init__(self) -> None:
        if self.sha256 != _digest(self):
            raise TraceError("its contents do not have the checksum in `sha256`: it was damaged or edited.")
        # Another version of torch, with other types, may have written the file.
        types = {tensor.dtype for tensor in self.recorded.tensors}
        types.update(dtype.rpartition(".")[2] for _, _, dtype in self.fingerprint.parameters)
        for name in types:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise TraceError(f"it has tensors of type {name[:40]!r}, which this torch does not have.")


def save(path: str | Path, **fields: Any) -> None:
    """Write the fields of a profile to a file, compressed if its name ends in ``.gz``.

    Raises:
        TraceError: a text in a field cannot be encoded as UTF-8.
    """
    try:
        digest = _digest(_Fields(**fields))
    except UnicodeEncodeError as error:
        raise TraceError(f"this profile cannot be saved: {error.object!r}, {error.reason}.") from error
    # Not laid out for people, unlike a plan: a program has many thousands of numbers.
    files.write_compact(
        path, {"what": "profile", "schema_version": SCHEMA_VERSION, "sha256": digest, **fields}
    )


def load(path: str | Path) -> dict[str, Any]:
    """Return the fields of the profile in a file, by name.

    Raises:
        TraceError: the file is damaged, of another version, or holds something else.
    """
    found = files.load(path, ProfileFile, "profile", SCHEMA_VERSION, TraceError)
    # ``what``, ``schema_version`` and ``sha256`` were checked when the file was read.
    return {name: getattr(found, name) for name in _Fields.__struct_fields__}


def _digest(fields: _Fields) -> str:
    """Hash the values, independently of the order of keys and of sets."""
    values = {name: getattr(fields, name) for name in _Fields.__struct_fields__}
    # Some mappings have numbers as keys, which JSON allows only as strings.
    plain = msgspec.to_builtins(values, str_keys=True, order="deterministic")
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
