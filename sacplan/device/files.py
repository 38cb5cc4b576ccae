"""Devices as files: JSON that people may write too, checked against types when it is read.

What a file may hold follows from the fields of ``DeviceSpec``: the same types check a device that is made in Python.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sacplan.core import files
from sacplan.errors import DeviceError

SCHEMA_VERSION = 2

Rate = Annotated[float, Meta(gt=0, le=1e30)]
Duration = Annotated[float, Meta(ge=0, le=1e30)]
Efficiency = Annotated[float, Meta(gt=0, le=1)]


def fields_of(spec: type) -> type[Struct]:
    """Return the struct of a file's fields, made of the fields of a dataclass: those with a default may be left out."""
    hints = get_type_hints(spec, include_extras=True)
    fields = [
        (f.name, hints[f.name])
        if f.default is dataclasses.MISSING
        else (f.name, hints[f.name] | UnsetType, UNSET)
        for f in dataclasses.fields(spec)
    ]
    doc = (
        "The figures of a device, see ``sacplan.DeviceSpec``, which also has the defaults of those left out."
    )
    return msgspec.defstruct(
        "DeviceFields", fields, namespace={"__doc__": doc}, kw_only=True, forbid_unknown_fields=True
    )


def file_of(fields: type[Struct]) -> type[Struct]:
    """Return the struct of a whole file of a device."""
    head = [("what", Literal["device"]), ("schema_version", Literal[2]), ("spec", fields)]
    return msgspec.defstruct(
        "DeviceFile", head, namespace={"__doc__": "A file of a device."}, forbid_unknown_fields=True
    )


def load(path: str | Path, fields: type[Struct]) -> dict[str, Any]:
    """Return the fields of a device that the file states.

    Raises:
        DeviceError: the file is damaged, of another version, or holds something else.
    """
    spec = files.load(path, file_of(fields), "device", SCHEMA_VERSION, DeviceError).spec  # type: ignore[attr-defined]
    return {name: value for name in spec.__struct_fields__ if (value := getattr(spec, name)) is not UNSET}
