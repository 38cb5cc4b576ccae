"""Devices: one frozen :class:`DeviceSpec` for each, a table of them, and the lookup by name.

To add a device, add a row to ``devices.csv`` next to this file; nothing else names the device.

Sources of the table: ``torch/_inductor/analysis/device_info.py`` (peaks; its L4 bandwidth is wrong and not
used), the vendors' datasheets (dense figures, halved where only the sparse one is printed), and reports of
``torch.cuda.get_device_properties(...).total_memory`` for the capacities. Peaks are those of the datasheet. For links
see ``links.py``.
How much of these peaks kernels reach is said in two steps. ``compute_efficiency`` and ``bandwidth_efficiency`` are what
the best kernels reach; the table's comment says which of them are fitted and which are assumed. ``kernel_rates.py``
says how the other kinds of kernels compare with these.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sacplan.core.budget import parse_budget
from sacplan.core.files import Count, Name, Positive, table_of, write
from sacplan.core.near import did_you_mean
from sacplan.device import files
from sacplan.device.files import Duration, Efficiency, Rate
from sacplan.device.links import LINKS, Link
from sacplan.errors import BudgetError, DeviceError

if TYPE_CHECKING:
    import pandas as pd
    import torch

GIB = 2**30
_THREADS_PER_SM = {(7, 5): 1024} | dict.fromkeys(((8, 6), (8, 7), (8, 9), (11, 0), (12, 0), (12, 1)), 1536)
_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
_EFFICIENCIES = ("compute_efficiency", "sustained_share", "bandwidth_efficiency")
_OF_MACHINE = ("inner_link", "outer_link", "ranks_per_node", "host_link", "host_memory_bytes",
               "host_bandwidth_bytes_per_s")  # fmt: skip
"""Fields of a device that depend on the machine that it is in."""
WITHOUT_WORKSPACES = " without workspaces"
"""Suffix of a device's name, for a device whose cuBLAS workspaces do not count."""


def torch_version() -> tuple[int, int]:
    """Major and minor of the torch that is running; its kernels are the ones that are emulated."""
    from sacplan.torch_compat.versions import torch_release  # torch takes seconds to import

    return torch_release()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device, as far as the kernel table, the allocator and the cost model depend on it.

    Raises:
        DeviceError: a figure out of the range that its type states, such as one that is not positive and finite.
    """

    name: Name
    kind: Literal["cpu", "cuda"]
    """``"cuda"`` stands for ROCm devices too, as in torch."""
    memory_bytes: Positive
    """The total that torch reports, in bytes; the CUDA context comes out of it (``outside_allocator.py``)."""
    bandwidth_bytes_per_s: Rate
    flops: Mapping[Name, Rate] = field(hash=False)
    """Dense peaks in FLOP/s by dtype name: ``float32``, ``tf32``, ``bfloat16``, ``float16``, ``float8``."""
    capability: tuple[Count, Count] | None = None
    """CUDA compute capability; None on CPUs and on ROCm devices."""
    sm_count: Positive = 1
    """Streaming multiprocessors, compute units, or cores."""
    allocation_round_bytes: Positive = 1
    """Every allocation counts as a multiple of this: 512 in the CUDA caching allocator, 1 on a CPU."""
    compute_efficiency: Efficiency = 0.7
    """Share of the peak that large matrix products reach. The default is an assumption. Another value scales all
    kernels that are bound by FLOPs."""
    sustained_share: Efficiency = 1.0
    """Share of ``compute_efficiency`` that is left in a step: under long load the clock falls to what the power limit
    allows, which timing single products does not show."""
    bandwidth_efficiency: Efficiency = 0.8
    """Share of the bandwidth that contiguous elementwise kernels reach. The default is an assumption. Another value
    scales all kernels that are bound by bytes."""
    kernel_launch_us: Duration = 3.0
    """Time that each kernel takes in addition to its work, in microseconds. An assumption."""
    clock_ghz: Rate | None = None
    """Boost clock of the multiprocessors. If it is left out, that of the device of this name in the table, else the one
    that the float32 peak implies. A CPU has none."""
    matrix_shares: Mapping[Name, Rate] | None = field(default=None, hash=False)
    """Shares of ``compute_efficiency`` that kernels of some kinds reach, such as ``{"flash_attention": 0.6}``, where
    they differ from ``sacplan/device/kernel_kinds.csv``."""
    matmul_workspace_bytes: Count | None = None
    """Bytes that the matrix library (cuBLAS) keeps for each thread that multiplies. ``profile`` counts them. None:
    torch's default for the architecture and release, see ``library_workspace_bytes``. 0: nothing."""
    inner_link: Link = None  # type: ignore[assignment]
    """The link between the ranks of a node. If it is left out, as in files from before there were links, it is that of
    the device of this name in the table, else shared memory on a CPU and PCIe 4.0 elsewhere."""
    outer_link: Link = None  # type: ignore[assignment]
    """The link between nodes, as one rank's share of it. If it is left out: as above, else Ethernet with 10 Gbit/s."""
    ranks_per_node: Positive = None  # type: ignore[assignment]
    """How many ranks share a node. If it is left out: as above, else 8."""
    host_link: Link = None  # type: ignore[assignment]
    """The link between the device and the memory of its host, in one direction. If it is left out: as above, else PCIe
    4.0."""
    host_memory_bytes: Positive = None  # type: ignore[assignment]
    """The memory of the host, as one device's share of it. If it is left out: as above, else 64 GiB."""
    host_bandwidth_bytes_per_s: Rate = None  # type: ignore[assignment]
    """Bandwidth of the memory of one of the host's processors, which bounds an optimizer on the host. Up to four
    devices share it. If it is left out: as above, else 100 GB/s."""
    source: str = ""

    def __post_init__(self) -> None:
        # A copy, so that the caller's dictionary can change. Frozen instances are written through ``object``.
        object.__setattr__(self, "flops", dict(self.flops))
        missing = [what for what in _OF_MACHINE if getattr(self, what) is None]
        if missing:
            machine = _machine_of(self.name, self.kind)
            for what in missing:
                object.__setattr__(self, what, machine[what])
        if self.kind == "cuda" and self.clock_ghz is None and "float32" in self.flops:
            object.__setattr__(self, "clock_ghz", self._clock_ghz())
        if "float32" not in self.flops:
            raise DeviceError(f"DeviceSpec {self.name!r}: flops needs at least a peak for 'float32'")
        try:
            given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            msgspec.convert(given, device_fields())
        except msgspec.ValidationError as error:
            raise DeviceError(f"DeviceSpec {self.name!r}: {error}") from error

    def sharers(self, n: int) -> int:
        """Return how many of ``n`` ranks share a processor of their host: a node of eight has two processors."""
        return min(n, self.ranks_per_node, 4)

    @property
    def cycles_per_s(self) -> float:
        """Return the cycles of all multiprocessors of a CUDA device together, in a second."""
        assert self.clock_ghz is not None, "only a CPU has no clock"
        return self.sm_count * self.clock_ghz * 1e9

    def _clock_ghz(self) -> float:
        """Return the clock of the table, or the one at which all lanes together reach the float32 peak.

        A lane does two FLOPs a cycle. A multiprocessor has 128 lanes, but 64 on Volta, Turing and A100.
        """
        # Reading the table does not come here, and so does not recurse: its rows state their clocks.
        row = _table().get(self.name.removesuffix(WITHOUT_WORKSPACES))
        if row is not None and row.spec.clock_ghz is not None:
            return row.spec.clock_ghz
        few = self.capability is not None and self.capability <= (8, 0)
        return self.flops["float32"] / (2 * (64 if few else 128) * self.sm_count) * 1e-9

    @property
    def threads_per_sm(self) -> int:
        """Threads that a multiprocessor holds at most (CUDA programming guide, by compute capability)."""
        return _THREADS_PER_SM.get(self.capability or (0, 0), 2048)

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16: of CUDA devices, those from compute capability 8.0 on."""
        if self.capability is not None:
            return self.capability >= (8, 0)
        return self.kind == "cpu" or "bfloat16" in self.flops

    def peak_flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Dense peak in FLOP/s for matrix products on ``dtype``.

        float8 without a figure runs as bfloat16, half types without one as float32, float64 at half of
        float32 (true of data-center GPUs, far too high for others), all the rest as float32.
        """
        name = str(dtype).removeprefix("torch.")
        single = self.flops["float32"]
        if name == "float32" and tf32:
            return self.flops.get("tf32", single)
        if name in self.flops:
            return self.flops[name]
        if name.startswith("float8"):
            return self.flops.get("float8", self.flops.get("bfloat16", single))
        return single / 2 if name == "float64" else single

    def reached_flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """What large matrix products on ``dtype`` reach in a step, in FLOP/s."""
        return self.peak_flops(dtype, tf32=tf32) * self.compute_efficiency * self.sustained_share

    def round_up(self, nbytes: int) -> int:
        """Return ``nbytes`` as the allocator of this device counts them."""
        step = self.allocation_round_bytes
        return -(-nbytes // step) * step

    def host_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` as torch's allocator of the host's memory counts them.

        Pinned memory is handed out in powers of two (``c10/core/CachingDeviceAllocator.h`` and
        ``aten/src/ATen/core/CachingHostAllocator.h``), unless ``pinned_max_round_threshold_mb`` is set. A CPU needs
        no pinned memory: its copies are like any other tensor.
        """
        return self.round_up(nbytes) if self.kind == "cpu" else 1 << max(0, nbytes - 1).bit_length()

    def without_workspaces(self) -> DeviceSpec:
        """Return the same device without cuBLAS workspaces, which PyTorch's MemTracker does not count either.

        By name it is ``"h100 without workspaces"``.
        """
        return replace(self, name=self.name + WITHOUT_WORKSPACES, matmul_workspace_bytes=0)

    @classmethod
    def of(cls, device: str | torch.device) -> DeviceSpec:
        """Return the spec of a name in the table (``sacplan.devices()``), of ``"cuda"`` (the local GPU) or ``"cpu"``.

        Raises:
            DeviceError: an unknown name, or ``"cuda"`` where there is none.
        """
        return resolve_device(device)

    def save(self, path: str | Path) -> None:
        """Write to a file (JSON, see ``docs/files.md``; compressed where the name ends in ``.gz``)."""
        spec = msgspec.to_builtins(self)
        write(path, {"what": "device", "schema_version": files.SCHEMA_VERSION, "spec": spec})

    @classmethod
    def load(cls, path: str | Path) -> DeviceSpec:
        """Read what ``save`` or a person wrote.

        Raises:
            DeviceError: the file is something else, damaged, or has figures that no device has.
        """
        fields = files.load(path, device_fields())
        try:
            return cls(**fields)
        except DeviceError as error:
            raise DeviceError(f"{path}: {error}.") from error


@functools.cache
def device_fields() -> type[msgspec.Struct]:
    """Return a Struct with the types of a device's fields, which checks devices that are made and that are read."""
    return files.fields_of(DeviceSpec)


@dataclass(frozen=True, slots=True)
class _DeviceRow:
    """One row of the table."""

    spec: DeviceSpec
    aliases: tuple[str, ...]
    board: str
    """Regular expression for ``torch.cuda.get_device_name``; empty for none."""


def _read_row(fields: Mapping[str, str]) -> _DeviceRow:
    major_minor = fields["capability"].split(".")
    efficiencies: dict[str, Any] = {name: float(fields[name]) for name in _EFFICIENCIES if fields[name]}
    spec = DeviceSpec(
        name=fields["name"],
        kind="cuda",
        memory_bytes=int(float(fields["memory_gib"]) * GIB),
        bandwidth_bytes_per_s=float(fields["bandwidth_gb_per_s"]) * 1e9,
        flops={dtype: float(fields[dtype]) * 1e12 for dtype in _DTYPES if fields[dtype]},
        capability=(int(major_minor[0]), int(major_minor[1])) if fields["capability"] else None,
        sm_count=int(fields["sm_count"]),
        clock_ghz=float(fields["clock_ghz"]),
        **efficiencies,
        allocation_round_bytes=512,
        inner_link=LINKS[fields["inner_link"]],
        outer_link=LINKS[fields["outer_link"]],
        ranks_per_node=int(fields["ranks_per_node"]),
        host_link=LINKS[fields["host_link"]],
        host_memory_bytes=int(float(fields["host_memory_gib"]) * GIB),
        host_bandwidth_bytes_per_s=float(fields["host_memory_gb_per_s"]) * 1e9,
        source=fields["source"],
    )
    return _DeviceRow(spec, tuple(fields["aliases"].split()), fields["board"])


def _machine_of(name: str, kind: str) -> dict[str, Any]:
    """Return links, ranks and host of a device that states none: those of its row in the table, or a guess."""
    row = _table().get(name.removesuffix(WITHOUT_WORKSPACES))
    if row is not None:
        return {what: getattr(row.spec, what) for what in _OF_MACHINE}
    near = LINKS["shared memory" if kind == "cpu" else "PCIe 4.0"]
    return dict(zip(_OF_MACHINE, (near, LINKS["Ethernet 10 Gbit"], 8, near, 64 * GIB, 100e9), strict=True))


@functools.cache
def _table() -> dict[str, _DeviceRow]:
    """Read the rows of ``devices.csv``, by name."""
    rows = map(_read_row, table_of(Path(__file__).with_name("devices.csv")))
    return {row.spec.name: row for row in rows}


def _cpu() -> DeviceSpec:
    cores = os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 16 * GIB
    # 2.5 GHz with two 8-wide fused multiply-adds a cycle (AVX2), half types at the same rate; 10 GB/s that
    # one core can draw, up to the 100 GB/s of a socket.
    peak = cores * 2.5e9 * 32
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        memory_bytes=memory,
        bandwidth_bytes_per_s=min(10e9 * cores, 100e9),
        flops={"float32": peak, "bfloat16": peak, "float16": peak},
        sm_count=cores,
        allocation_round_bytes=1,
        kernel_launch_us=2.0,
        source="assumed: AVX2 at 2.5 GHz, 10 GB/s a core up to 100 GB/s; use runtime='benchmark' to measure",
    )


def _here(index: int | None) -> DeviceSpec:
    """Return the local GPU: its row in the table, else a spec scaled from the nearest older capability.

    Peaks are scaled by the number of multiprocessors. Bandwidth is 2 * memory clock * bus width / 8, since memory
    transfers twice a cycle. Both are rough, and ``source`` says so.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "device 'cuda' means the GPU that is here, and torch.cuda.is_available() is False. Name the GPU "
            f"to plan for instead, for example device='h100'. Known: {', '.join(known_devices())}"
        )
    props = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    measured: dict[str, Any] = {
        "memory_bytes": props.total_memory,
        "sm_count": props.multi_processor_count,
    }
    if clock_khz := getattr(props, "clock_rate", 0):
        measured["clock_ghz"] = clock_khz * 1e-6
    # A board of the table: peaks and links from there, memory and multiprocessors as reported (MIG slices have fewer).
    for row in _table().values():
        if row.board and re.search(row.board, props.name, re.IGNORECASE):
            return replace(row.spec, **measured)
    # Any other board is scaled from the newest in the table that is not newer than it, the smallest of several.
    rocm = getattr(torch.version, "hip", None) is not None
    capability = None if rocm else (props.major, props.minor)
    if capability is None:
        like = _table()["mi250x"].spec
    else:
        specs = [row.spec for row in _table().values() if row.spec.capability is not None]
        older = [s for s in specs if s.capability is not None and s.capability <= capability] or specs
        like = max(older, key=lambda s: (s.capability or (0, 0), -s.sm_count))
    share = props.multi_processor_count / like.sm_count
    bandwidth = like.bandwidth_bytes_per_s
    memory_khz, bus_bits = getattr(props, "memory_clock_rate", 0), getattr(props, "memory_bus_width", 0)
    if memory_khz and bus_bits:
        bandwidth = 2 * memory_khz * 1e3 * bus_bits / 8
    return replace(
        like,
        name=props.name,
        capability=capability,
        bandwidth_bytes_per_s=bandwidth,
        flops={name: peak * share for name, peak in like.flops.items()},
        source=f"not in the table: peaks of {like.name} scaled by multiprocessors, memory as reported",
        **measured,
    )


def known_devices() -> list[str]:
    """Return the names that :func:`resolve_device` accepts, without ``"cuda"``."""
    return ["cpu", *_table()]


def _compact(name: str) -> str:
    # Vendors and families are left out, however many lead the name: "NVIDIA GeForce RTX 4090".
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd|instinct|geforce|tesla)+", "", key)


DEFAULT_DEVICE = "h100"
"""The device that a step is planned for where none is named, in Python and on the command line."""

device_around: ContextVar[DeviceSpec | None] = ContextVar("device_around", default=None)
"""The device of the ranks that the code runs as (``sacplan.ranks``)."""

_SHORT = {
    row["name"]: (row["device"], row["note"]) for row in table_of(Path(__file__).with_name("short_names.csv"))
}
"""Names that people type for a device of the table, and what they should know about it."""

_SIZED = ((50, "rtx-4090"), (math.inf, DEFAULT_DEVICE))
"""For a device given as a memory size: up to how many GiB it gets the kernels and times of which device."""

_SIZE = re.compile(r"\d+(\.\d+)?\s*(g|gb|gib|m|mb|mib)", re.IGNORECASE)


def meant_by(name: str) -> str:
    """Return in words what a memory size, or a short name with a note, stands for; "" for all other names."""
    if _SIZE.fullmatch(name.strip()):
        spec = _of_size(name)
        return f"{spec.name} of memory ({spec.memory_bytes / GIB:.2f} GiB), with {spec.source}"
    short, why = _SHORT.get(_compact(name), ("", ""))
    return f"{name} is {short}: {why}" if why else ""


def _of_size(name: str) -> DeviceSpec:
    """Return a device with memory of a size, ``"24GB"``, and kernels and times of one of the table.

    Raises:
        DeviceError: The size cannot be read.
    """
    text = re.sub(r"\s", "", name)
    text = f"{text}B" if text[-1] in "gGmM" else text
    try:
        n_bytes = parse_budget(text, 0)
    except BudgetError as error:
        raise DeviceError(f"device {name!r}: {error}") from error
    like = next(like for most, like in _SIZED if n_bytes <= most * GIB)
    return replace(
        _table()[like].spec,
        name=text.upper().replace("IB", "iB"),
        memory_bytes=n_bytes,
        source=f"the kernels and times of {like}",
    )


def resolve_device(device: str | DeviceSpec | torch.device | None) -> DeviceSpec:
    """Return the spec for ``"cpu"``, ``"cuda"`` (the local GPU), ``"cuda:1"``, a name of the table, or a memory size.

    Case, spaces, hyphens and underscores do not matter: ``"A100 80GB"`` is ``"a100-80gb"``. Short names stand for the
    common variant: ``"a100"``, ``"4090"``. A size, such as ``"24GB"``, has the kernels and times of a device of the
    table (``meant_by`` says which). Any of them may end in ``" without workspaces"``, see
    :meth:`DeviceSpec.without_workspaces`. None is the device of ``sacplan.ranks`` around the call, else the default.

    Raises:
        DeviceError: an unknown name (the message lists the known ones and the near ones), or ``"cuda"``
            where there is none.
    """
    # In this order: a spec; a name with the suffix, which the rest would not know; the CPU and the GPU that are here; a
    # size; the table; and last the full name of a local board, since asking CUDA is slow.
    if isinstance(device, DeviceSpec):
        return device
    if device is None:
        return device_around.get() or resolve_device(DEFAULT_DEVICE)
    import torch  # takes seconds, and the table is of use without torch

    if isinstance(device, torch.device):
        name = str(device)
    elif isinstance(device, str):
        name = device.strip()
    else:
        raise DeviceError(f"device must be a name, a torch.device or a DeviceSpec, got {device!r}")
    if name.lower().endswith(WITHOUT_WORKSPACES):
        return resolve_device(name[: -len(WITHOUT_WORKSPACES)]).without_workspaces()
    if name.lower() == "cpu":
        return _cpu()
    if match := re.fullmatch(r"cuda(?::(\d+))?", name.lower()):
        return _here(None if match[1] is None else int(match[1]))
    if _SIZE.fullmatch(name):
        return _of_size(name)
    key = _compact(name)
    if key in _SHORT:
        return _table()[_SHORT[key][0]].spec
    names = {compact: row.spec.name for row in _table().values() for compact in row.aliases}
    names |= {_compact(name): name for name in _table()}
    if key in names:
        return _table()[names[key]].spec
    if torch.cuda.is_available():  # the full name of the board, which plans for device="cuda" may carry
        for index in range(torch.cuda.device_count()):
            if _compact(torch.cuda.get_device_name(index)) == key:
                return _here(index)
    near = did_you_mean(key, names, names.__getitem__)
    raise DeviceError(
        f"unknown device {device!r}.{near} Known: 'cuda' (the GPU that is here), "
        f"{', '.join(repr(n) for n in known_devices())}; or pass a DeviceSpec of your own."
    )


def devices() -> pd.DataFrame:
    """Return the device table, one row per device: GiB, GB/s, dense TFLOP/s by dtype, clock, links, source.

    GB/s of links are what collectives reach in one direction, for each rank.
    """
    import pandas as pd

    rows = [
        {
            "name": spec.name,
            "kind": spec.kind,
            "memory_gib": spec.memory_bytes / GIB,
            "bandwidth_gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
            **{f"{d}_tflops": spec.flops[d] / 1e12 if d in spec.flops else None for d in _DTYPES},
            "sm_count": spec.sm_count,
            "clock_ghz": spec.clock_ghz,
            "compute_efficiency": spec.compute_efficiency,
            "bandwidth_efficiency": spec.bandwidth_efficiency,
            "capability": None if spec.capability is None else "{}.{}".format(*spec.capability),
            "ranks_per_node": spec.ranks_per_node,
            "inner_link": spec.inner_link.name,
            "inner_gb_per_s": spec.inner_link.bandwidth_bytes_per_s / 1e9,
            "outer_link": spec.outer_link.name,
            "outer_gb_per_s": spec.outer_link.bandwidth_bytes_per_s / 1e9,
            "host_link": spec.host_link.name,
            "host_gb_per_s": spec.host_link.bandwidth_bytes_per_s / 1e9,
            "host_memory_gib": spec.host_memory_bytes / GIB,
            "host_memory_gb_per_s": spec.host_bandwidth_bytes_per_s / 1e9,
            "source": spec.source,
        }
        for spec in (_cpu(), *(row.spec for row in _table().values()))
    ]
    return pd.DataFrame(rows).set_index("name")
