"""``calibrate``: the cost model of the local device, measured instead of taken from a datasheet.

Three figures are measured on every device: what a large square matrix product reaches in each type, the bandwidth of a
copy, and how long an op takes that has nothing to do. They are what kernels really get, so the shares of the peak
(``compute_efficiency``, ``bandwidth_efficiency``) become 1. On a CUDA device one op for each kind of kernel follows
(``probes.py``), which gives the ``rates``. Each figure is a median over a fraction of a second: a GPU that is cold or
busy gives other figures.

The spec keeps the device's name, so that plans made with it find the same kernels again.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from sacplan.core.arguments import checked
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.kernel_rates import FIGURES
from sacplan.device.probes import measured_rates
from sacplan.device.real_ops import RUN_ERRORS, outside_of_the_trace
from sacplan.device.timing import device_here, run_seconds
from sacplan.errors import DeviceError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
_SECONDS = 0.3  # for each figure
_OPS_AT_ONCE = {"cpu": 200, "cuda": 40}  # on CUDA as many as are issued while the stream sleeps


@checked(DeviceError)
def calibrate(
    device: str | torch.device = "cuda",
    *,
    matmul_size: int | None = None,
    copy_bytes: int | None = None,
) -> DeviceSpec:
    """Measure the local CUDA device or CPU; takes seconds, on CUDA some ten.

        spec = sacplan.calibrate("cuda")
        spec.save("my_gpu.json")
        profile = sacplan.profile(model, batch, device=spec)

    Args:
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``.
        matmul_size: rows and columns of the matrices; default: 8192 on CUDA (three of them in each type: 805 MB
            in float32), 1024 on a CPU.
        copy_bytes: size of the tensor that is copied; default: 1 GiB on CUDA, 128 MiB on a CPU. It should
            not fit any cache.

    Returns:
        The spec of that device with measured ``flops`` (a type that it cannot multiply is left out, float8 stays
        an estimate), ``bandwidth_bytes_per_s`` and ``kernel_launch_us``, and on CUDA with measured ``rates``. Its
        ``source`` names the rates that could not be measured.

    Raises:
        DeviceError: there is no such device in this machine, a size is not positive, or the memory does not suffice.
    """
    base = resolve_device(device)
    if isinstance(device, str) and device.strip().lower().split(":")[0] not in ("cpu", "cuda"):
        raise DeviceError(
            f"calibrate measures what is here: device must be 'cuda' or 'cpu', got {device!r}. For another "
            "device take its row of sacplan.devices()."
        )
    # "cuda" without a number is the current device, and the one that ``base`` describes.
    where = torch.device(device) if base.kind == "cuda" else torch.device("cpu")
    if base.kind == "cuda" and where.index is None:
        where = device_here(base)
    size = _MATMUL_SIZE[base.kind] if matmul_size is None else matmul_size
    nbytes = _COPY_BYTES[base.kind] if copy_bytes is None else copy_bytes
    for name, given, least, most in (("matmul_size", size, 1, 2**20), ("copy_bytes", nbytes, 4, 2**40)):
        if not least <= given <= most:
            raise DeviceError(f"calibrate: {name} is {given}; it must be from {least} to {most:,}.")
    try:
        with outside_of_the_trace(where):
            return _measured(base, where, size, nbytes)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"calibrate on {base.name}: {str(error).splitlines()[0]}. Free the device's memory, or choose a "
            "smaller matmul_size or copy_bytes."
        ) from error


def _measured(base: DeviceSpec, where: torch.device, size: int, nbytes: int) -> DeviceSpec:
    flops = _products(where, size)
    # Not measured: ``torch.mm`` has no float8. The estimate takes in the efficiency, which is 1 in the new spec.
    if "float8" in base.flops:
        flops["float8"] = base.flops["float8"] * base.compute_efficiency
    spec = replace(
        base,
        flops=flops,
        bandwidth_bytes_per_s=_bandwidth(where, nbytes),
        compute_efficiency=1.0,
        sustained_share=1.0,
        bandwidth_efficiency=1.0,
        kernel_launch_us=_launch_us(where),
        source=f"measured here by sacplan.calibrate, torch {torch.__version__}, products of {size} x {size}",
    )
    if base.kind == "cuda":
        spec = _with_rates(spec, where, nbytes)
    # What is timed here for a fraction of a second is not what a step reaches.
    return replace(spec, sustained_share=base.sustained_share)


def _with_rates(spec: DeviceSpec, where: torch.device, nbytes: int) -> DeviceSpec:
    clock = functools.partial(_seconds, where=where, launch_ahead=True)
    rates, measured = measured_rates(spec, where, nbytes, clock)
    missing = [name for name in FIGURES if name not in measured]
    source = spec.source + (f"; not measured: {', '.join(missing)}" if missing else "")
    return replace(spec, rates=rates, source=source)


def _products(where: torch.device, size: int) -> dict[str, float]:
    """Return FLOP/s of matrix products by name of the type."""
    found: dict[str, float] = {}
    with _matmul_precision("highest"):
        found["float32"] = _product(torch.float32, where, size)
    if where.type == "cuda":
        with _matmul_precision("high"):
            found["tf32"] = _product(torch.float32, where, size)
    for name, dtype in _DTYPES.items():
        try:
            found[name] = _product(dtype, where, size)
        except torch.OutOfMemoryError:  # a RuntimeError, too, but no statement about the type
            raise
        except RUN_ERRORS:  # the device has no product of this type
            continue
    return found


def _product(dtype: torch.dtype, where: torch.device, size: int) -> float:
    a = torch.randn(size, size, device=where).to(dtype)
    b = torch.randn(size, size, device=where).to(dtype)
    out = torch.empty(size, size, device=where, dtype=dtype)
    # 2 n^3 FLOPs: n^3 multiply-adds of two each.
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), where)


def _bandwidth(where: torch.device, nbytes: int) -> float:
    """Return bytes read and written per second. A copy does both, so its bytes count twice."""
    source = torch.zeros(nbytes // 4, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), where)


def _launch_us(where: torch.device) -> float:
    """Return the microseconds from one op to the next when there is nothing to compute.

    On CUDA that is the time of the device: ops are issued ahead, while the stream sleeps.
    """
    x = torch.zeros(1, device=where)
    count = _OPS_AT_ONCE[where.type]

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    return _seconds(many, where, launch_ahead=True) / count * 1e6


def _seconds(call: Callable[[], object], where: torch.device, launch_ahead: bool = False) -> float:
    """Return the median of as many runs as fit the time, at least three, after a warm-up."""
    runs: list[float] = []
    total = 0.0
    for seconds in run_seconds(call, where, launch_ahead=launch_ahead):
        runs.append(seconds)
        total += seconds
        if len(runs) >= 3 and total >= _SECONDS:
            break
    return statistics.median(runs)


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
