"""What a step runs on: one frozen :class:`DeviceSpec` per device, a table of them, and the look-up by name.

Sources of the table: ``torch/_inductor/analysis/device_info.py`` (peaks; its L4 bandwidth is wrong and not
used), the vendors' datasheets (dense figures, halved where only the sparse one is printed), and reports of
``torch.cuda.get_device_properties(...).total_memory`` for the capacities. Peaks are those of the datasheet;
what a kernel reaches of them is ``compute_efficiency`` and ``bandwidth_efficiency``, which are assumptions;
``sacplan.calibrate`` measures them on a device that is here.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sacplan._program.files import read_json, write_json
from sacplan.errors import DeviceError

if TYPE_CHECKING:
    import pandas as pd
    import torch

GIB = 2**30
SCHEMA_VERSION = 1
WITHOUT_WORKSPACES = " without workspaces"
"""What the name of a device ends in where cuBLAS workspaces are not to count."""


def torch_version() -> tuple[int, int]:
    """Major and minor of the torch that is running; its kernels are the ones that are emulated."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What the kernel table, the allocator and the cost model need to know of a device.

    Raises:
        DeviceError: a figure that is not positive, or an efficiency outside (0, 1].
    """

    name: str
    kind: Literal["cpu", "cuda"]
    """``"cuda"`` stands for ROCm devices too, as in torch."""
    memory_bytes: int
    """What torch reports as the total, in bytes; the CUDA context comes out of it (see ``max_batch``'s headroom)."""
    bandwidth_bytes_per_s: float
    flops: Mapping[str, float] = field(hash=False)
    """Dense peaks in FLOP/s by dtype name: ``float32``, ``tf32``, ``bfloat16``, ``float16``, ``float8``."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on CPUs and on ROCm devices."""
    sm_count: int = 1
    """Streaming multiprocessors, compute units, or cores."""
    allocation_round_bytes: int = 1
    """Every allocation counts as a multiple of this: 512 in the CUDA caching allocator, 1 on a CPU."""
    compute_efficiency: float = 0.7
    """Share of the peak that large matrix products reach. An assumption, not a measurement."""
    bandwidth_efficiency: float = 0.8
    """Share of the bandwidth that elementwise kernels reach. An assumption, not a measurement."""
    kernel_launch_us: float = 3.0
    """Time that each kernel takes besides its work, in microseconds. An assumption."""
    matmul_workspace_bytes: int | None = None
    """What the matrix library (cuBLAS) keeps for each thread that multiplies, and ``profile`` counts. None:
    torch's default for the architecture and release, see ``library_workspace_bytes``. 0: nothing."""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", dict(self.flops))
        figures = {
            "memory_bytes": self.memory_bytes,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "sm_count": self.sm_count,
            "allocation_round_bytes": self.allocation_round_bytes,
            **{f"flops[{k!r}]": v for k, v in self.flops.items()},
        }
        for what, value in figures.items():
            if not value > 0:
                raise DeviceError(f"DeviceSpec {self.name!r}: {what} must be positive, got {value!r}")
        if "float32" not in self.flops:
            raise DeviceError(f"DeviceSpec {self.name!r}: flops needs at least a peak for 'float32'")
        for what in ("compute_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, what) <= 1:
                raise DeviceError(
                    f"DeviceSpec {self.name!r}: {what} must lie in (0, 1], got {getattr(self, what)!r}"
                )
        for what in ("kernel_launch_us", "matmul_workspace_bytes"):
            if (getattr(self, what) or 0) < 0:
                raise DeviceError(f"DeviceSpec {self.name!r}: {what} is negative")

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
        if name == "float64":
            return single / 2
        return single

    def round_up(self, nbytes: int) -> int:
        """``nbytes`` as the allocator of this device counts them."""
        step = self.allocation_round_bytes
        return -(-nbytes // step) * step

    def without_workspaces(self) -> DeviceSpec:
        """The same device where cuBLAS keeps nothing: what PyTorch's MemTracker counts.

        By name it is ``"h100 without workspaces"``.
        """
        return replace(self, name=self.name + WITHOUT_WORKSPACES, matmul_workspace_bytes=0)

    def save(self, path: str | Path) -> None:
        """Write to a file (JSON; compressed where the name ends in ``.gz``)."""
        write_json(
            path, {"what": "device", "schema_version": SCHEMA_VERSION, "spec": dataclasses.asdict(self)}
        )

    @classmethod
    def load(cls, path: str | Path) -> DeviceSpec:
        """Read what ``save`` wrote."""
        fields = read_json(path, "device", SCHEMA_VERSION).get("spec", {})
        if isinstance(fields.get("capability"), list):
            fields["capability"] = tuple(fields["capability"])
        try:
            return cls(**fields)
        except TypeError as error:
            raise DeviceError(f"{path} is not a whole DeviceSpec: {error}. Save it again.") from error


def _gpu(
    name: str,
    gib: float,
    gb_per_s: float,
    tflops: tuple[float, float | None, float | None, float | None, float | None],
    sms: int,
    capability: tuple[int, int] | None,
    source: str,
) -> DeviceSpec:
    names = ("float32", "tf32", "bfloat16", "float16", "float8")
    return DeviceSpec(
        name=name,
        kind="cuda",
        memory_bytes=int(gib * GIB),
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        flops={n: t * 1e12 for n, t in zip(names, tflops, strict=True) if t is not None},
        capability=capability,
        sm_count=sms,
        allocation_round_bytes=512,
        source=source,
    )


_NV = "NVIDIA datasheet"
_TORCH = "torch/_inductor/analysis/device_info.py"

# name, GiB, GB/s, TFLOP/s of (fp32, tf32, bf16, fp16, fp8), SMs, capability
_TABLE: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _gpu("t4", 14.7, 320, (8.1, None, None, 65, None), 40, (7, 5), f"{_NV} T4; no bf16 units"),
        _gpu("v100-32gb", 31.7, 900, (15.7, None, None, 125, None), 80, (7, 0), f"{_NV} V100; no bf16 units"),
        _gpu("l4", 22, 300, (30.3, 60, 121, 121, 242), 58, (8, 9), f"{_NV} L4; capacity rough"),
        _gpu("l40s", 44.4, 864, (91.6, 183, 362, 362, 733), 142, (8, 9), f"{_NV} L40S; capacity rough"),
        _gpu("a10", 22, 600, (31.2, 62.5, 125, 125, None), 72, (8, 6), f"{_NV} A10; capacity rough"),
        _gpu("rtx-a6000", 47.5, 768, (38.7, 77.4, 154.8, 154.8, None), 84, (8, 6), f"{_NV} RTX A6000"),
        _gpu("rtx-3090", 23.6, 936, (35.6, 35.6, 71, 71, None), 82, (8, 6), "NVIDIA GA102 white paper"),
        _gpu(
            "rtx-4090", 23.64, 1008, (82.6, 82.6, 165.2, 165.2, 330.3), 128, (8, 9), "NVIDIA Ada white paper"
        ),
        _gpu(
            "rtx-5090",
            31.37,
            1792,
            (104.8, 104.8, 209.5, 209.5, 419),
            170,
            (12, 0),
            "NVIDIA Blackwell white paper",
        ),
        _gpu("a100-40gb", 39.50, 1555, (19.5, 156, 312, 312, None), 108, (8, 0), f"{_NV} A100; {_TORCH}"),
        _gpu("a100-80gb", 79.25, 2039, (19.5, 156, 312, 312, None), 108, (8, 0), f"{_NV} A100; {_TORCH}"),
        _gpu("h100-pcie", 79.1, 2000, (51.2, 378, 756, 756, 1513), 114, (9, 0), f"{_NV} H100 PCIe"),
        _gpu("h100", 79.11, 3350, (67, 494.5, 989.5, 989.5, 1979), 132, (9, 0), f"{_NV} H100 SXM; {_TORCH}"),
        _gpu(
            "h200", 139, 4800, (67, 494.5, 989.5, 989.5, 1979), 132, (9, 0), f"{_NV} H200 SXM; capacity rough"
        ),
        _gpu("b200", 178, 7700, (75, 1125, 2250, 2250, 4500), 148, (10, 0), f"{_NV} B200; capacity rough"),
        _gpu(
            "mi250x",
            64,
            1600,
            (47.9, None, 191.5, 191.5, None),
            110,
            None,
            "AMD datasheet MI250X, one of its two dies",
        ),
        _gpu(
            "mi300x",
            192,
            5300,
            (163.4, 653.7, 1307.4, 1307.4, 2614.9),
            304,
            None,
            f"AMD datasheet MI300X; {_TORCH}",
        ),
        _gpu(
            "mi350x",
            288,
            8000,
            (144.2, None, 2309.6, 2309.6, 4614),
            256,
            None,
            f"AMD brochure MI350X; {_TORCH}",
        ),
    )
}

# Other names for the same row, compared without separators and case.
_ALIASES = {"h100sxm": "h100", "h100sxm5": "h100", "h10080gb": "h100", "h200sxm": "h200", "b200sxm": "b200"}

# What torch.cuda.get_device_name says, first match wins.
_BOARD_NAMES = (
    (r"H100.*PCIe", "h100-pcie"),
    (r"H100(?!.*NVL)", "h100"),
    (r"H200", "h200"),
    (r"\bB200", "b200"),
    (r"A100.*80GB", "a100-80gb"),
    (r"A100.*40GB", "a100-40gb"),
    (r"RTX 3090(?! Ti)", "rtx-3090"),
    (r"RTX 4090(?! D| Laptop)", "rtx-4090"),
    (r"RTX 5090(?! D| Laptop)", "rtx-5090"),
    (r"\bA10\b", "a10"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"RTX A6000\b", "rtx-a6000"),
    (r"V100.*32GB", "v100-32gb"),
    (r"\bT4\b", "t4"),
    (r"MI250X", "mi250x"),
    (r"MI300X", "mi300x"),
    (r"MI350X", "mi350x"),
)


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
    """The GPU that is here: its row in the table by name, else a spec by its capability."""
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
    for pattern, row in _BOARD_NAMES:
        if re.search(pattern, props.name, re.IGNORECASE):
            return replace(_TABLE[row], **measured)
    rocm = getattr(torch.version, "hip", None) is not None
    capability = None if rocm else (props.major, props.minor)
    rows = [s for s in _TABLE.values() if (s.capability is None) == rocm]
    if capability is None:
        like = _TABLE["mi250x"]
    else:
        older = [s for s in rows if s.capability is not None and s.capability <= capability] or rows
        like = max(older, key=lambda s: (s.capability or (0, 0), -s.sm_count))
    share = props.multi_processor_count / like.sm_count
    bandwidth = like.bandwidth_bytes_per_s
    clock_khz, bus_bits = getattr(props, "memory_clock_rate", 0), getattr(props, "memory_bus_width", 0)
    if clock_khz and bus_bits:
        bandwidth = 2 * clock_khz * 1e3 * bus_bits / 8
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
    """All names that :func:`resolve_device` accepts, ``"cuda"`` aside."""
    return ["cpu", *_TABLE]


def _compact(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd|instinct|geforce|tesla)+", "", key)


def resolve_device(device: str | DeviceSpec | torch.device) -> DeviceSpec:
    """The spec for ``"cpu"``, ``"cuda"`` (the GPU that is here), ``"cuda:1"``, or a name of the table.

    Case, spaces, hyphens and underscores do not matter: ``"A100 80GB"`` is ``"a100-80gb"``. Any of them may end in
    ``" without workspaces"``, see :meth:`DeviceSpec.without_workspaces`.

    Raises:
        DeviceError: an unknown name (the message lists the known ones and the near ones), or ``"cuda"``
            where there is none.
    """
    if isinstance(device, DeviceSpec):
        return device
    import torch  # the table is of use without it, and it takes seconds

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
    key = _compact(name)
    rows = {_compact(n): n for n in _TABLE} | _ALIASES
    if key in rows:
        return _TABLE[rows[key]]
    if torch.cuda.is_available():  # the full name of the board, which plans for device="cuda" may carry
        for index in range(torch.cuda.device_count()):
            if _compact(torch.cuda.get_device_name(index)) == key:
                return _here(index)
    near = [n for n in _TABLE if key and (key in _compact(n) or _compact(n) in key)]
    near += [rows[k] for k in difflib.get_close_matches(key, rows, n=3) if rows[k] not in near]
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    raise DeviceError(
        f"unknown device {device!r}.{hint} Known: 'cuda' (the GPU that is here), "
        f"{', '.join(repr(n) for n in known_devices())}; or pass a DeviceSpec of your own."
    )


def devices() -> pd.DataFrame:
    """The device table, one row a device: GiB, GB/s, dense TFLOP/s by dtype, multiprocessors, source."""
    import pandas as pd

    dtypes = ("float32", "tf32", "bfloat16", "float16", "float8")
    rows = []
    for spec in (_cpu(), *_TABLE.values()):
        peaks = {f"{d}_tflops": spec.flops[d] / 1e12 if d in spec.flops else None for d in dtypes}
        rows.append(
            {
                "name": spec.name,
                "kind": spec.kind,
                "memory_gib": spec.memory_bytes / GIB,
                "bandwidth_gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
                **peaks,
                "sm_count": spec.sm_count,
                "capability": None if spec.capability is None else "{}.{}".format(*spec.capability),
                "source": spec.source,
            }
        )
    return pd.DataFrame(rows).set_index("name")
