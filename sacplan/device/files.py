"""Devices as files: JSON that people may write too, checked against types when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sacplan.core import files
from sacplan.core.files import Count, Name, Positive
from sacplan.device.kernel_rates import KernelRates
from sacplan.device.links import Link
from sacplan.errors import DeviceError

SCHEMA_VERSION = 1

Rate = Annotated[float, Meta(gt=0, le=1e30)]
Duration = Annotated[float, Meta(ge=0, le=1e30)]
Efficiency = Annotated[float, Meta(gt=0, le=1)]


class LinkFields(Struct, frozen=True, forbid_unknown_fields=True):
    """A link between ranks, see ``sacplan.Link``."""

    name: str
    bandwidth_bytes_per_s: Rate
    latency_s: Duration


class DeviceFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of a device, see ``sacplan.DeviceSpec``, which also has the defaults of those left out."""

    name: Name
    kind: Literal["cpu", "cuda"]
    memory_bytes: Positive
    bandwidth_bytes_per_s: Rate
    flops: Mapping[Name, Rate]
    capability: tuple[Count, Count] | UnsetType | None = UNSET
    sm_count: Positive | UnsetType = UNSET
    allocation_round_bytes: Positive | UnsetType = UNSET
    compute_efficiency: Efficiency | UnsetType = UNSET
    sustained_share: Efficiency | UnsetType = UNSET
    bandwidth_efficiency: Efficiency | UnsetType = UNSET
    kernel_launch_us: Duration | UnsetType = UNSET
    clock_ghz: Rate | UnsetType | None = UNSET
    rates: Mapping[Name, Rate] | UnsetType | None = UNSET
    matmul_workspace_bytes: Count | UnsetType | None = UNSET
    inner_link: LinkFields | UnsetType = UNSET
    outer_link: LinkFields | UnsetType = UNSET
    ranks_per_node: Positive | UnsetType = UNSET
    host_link: LinkFields | UnsetType = UNSET
    host_memory_bytes: Positive | UnsetType = UNSET
    host_bandwidth_bytes_per_s: Rate | UnsetType = UNSET
    source: str | UnsetType = UNSET


class DeviceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a device."""

    what: Literal["device"]
    schema_version: Literal[1]
    spec: DeviceFields


def save(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a device; compressed where the name ends in ``.gz``."""
    files.write(path, {"what": "device", "schema_version": SCHEMA_VERSION, "spec": fields})


def load(path: str | Path) -> dict[str, Any]:
    """Return the fields of a device that the file states.

    Raises:
        DeviceError: the file is damaged, of another version, or holds something else.
    """
    spec = files.load(path, DeviceFile, "device", SCHEMA_VERSION, DeviceError).spec
    given = {name: value for name in spec.__struct_fields__ if (value := getattr(spec, name)) is not UNSET}
    links = {
        name: Link(**msgspec.structs.asdict(v)) for name, v in given.items() if isinstance(v, LinkFields)
    }
    if given.get("rates") is not None:
        try:
            given["rates"] = KernelRates.of(given["rates"])
        except DeviceError as error:
            raise DeviceError(f"{path}: {error}.") from error
    return {**given, **links}


def schema() -> dict[str, Any]:
    """The JSON schema of these files."""
    return files.schema_of(DeviceFile, "A device of sacplan")
