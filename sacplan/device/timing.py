"""``runtime="benchmark"``: each distinct op of a step is run and timed on the local device.

The ops run on made-up operands (``real_ops.py``). Where one cannot, the roofline's figure replaces the measurement,
with a warning that names the op: see :meth:`MeasuredTimes.cost`. The same goes, without a run, for kernels whose
operands hold another kernel's private data (``UNKNOWN_LAYOUT``).

On CUDA an op's time is that of the GPU: a short sleep on the stream lets the launches run ahead. A step whose
launches cannot keep up with the GPU takes longer than the sum. The memory for the operands is returned after each
op, so the caching allocator ends up with what it held before.

Known inefficiencies: operands stay in the cache between runs, so small ops look faster than in a step; every
distinct shape costs at least three runs of the op; on a CPU its time includes a few microseconds for the
dispatch from Python; on a machine that is busy with other things an op may look many times slower than it is.

Private PyTorch API, read, not tried: ``torch.cuda._sleep``.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sacplan.device.cost import CostModel, is_free, op_key, tf32_allowed
from sacplan.device.devices import WITHOUT_WORKSPACES, DeviceSpec, resolve_device
from sacplan.device.op_kernels import Call
from sacplan.device.real_ops import RUN_ERRORS, UNKNOWN_LAYOUT, first_line, run_for_real
from sacplan.errors import DeviceError, SacplanError

_BUDGET_S = (
    0.2  # quick ops never reach it; slow ones run at least twice, so that one interruption does no harm
)
_MOST_RUNS = 20  # in-place ops run again and again on the same operands, and must not reach denormals
_times: dict[Any, float] = {}
"""Milliseconds by (device, torch, settings, op key); for the life of the process."""


class MeasuredTimes:
    """FLOPs and time of ops; each distinct one is run on the local device.

    Args:
        spec: of kind ``"cpu"`` (any: the local CPU is used) or the local GPU.

    Raises:
        DeviceError: ``spec`` is a GPU that is not in this machine.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.not_timed: dict[str, str] = {}
        """Ops that could not be run, and their errors; the roofline's figure is used for them."""
        self._device = device_here(spec)
        self._roofline = CostModel(spec)
        self._name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def cost(self, call: Call) -> tuple[int, float]:
        """Return (FLOPs, milliseconds) of one call of an op; a view takes no time.

        An op that cannot be run with made-up operands, or does not fit the memory, gets the roofline's
        time, one warning, and an entry in ``not_timed``.
        """
        if is_free(call.func):
            return 0, 0.0
        key = (self._name, torch.__version__, _settings(self._device), op_key(call))
        ms = _times.get(key)
        if ms is None:
            try:
                if call.name in UNKNOWN_LAYOUT:
                    raise NotImplementedError("it takes another kernel's private data")
                ms = run_for_real(call, self._device, lambda op: _fastest_ms(op, self._device))
            except RUN_ERRORS as error:
                if self._device.type == "cuda":
                    _check_context(call.func, error)
                ms = self._stand_in(call, error)
            # The operands of a large op would stay cached, and those of the next might not fit then.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            _times[key] = ms
        return call.flops, ms

    def _stand_in(self, call: Call, error: Exception) -> float:
        if isinstance(error, SacplanError):  # not an op's refusal but ours, such as a lost context
            raise error
        name = str(call.func)
        if name not in self.not_timed:
            self.not_timed[name] = first_line(error)
            warnings.warn(
                f'runtime="benchmark": {name} could not be run on made-up operands ({self.not_timed[name]}); '
                "the roofline's figure stands in for its time.",
                stacklevel=2,
            )
        return self._roofline.cost(call)[1]


def _check_context(func: torch._ops.OpOverload, error: Exception) -> None:
    """Raise ``DeviceError`` if the op has ended the CUDA context, after which no op can run in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        raise DeviceError(
            f'runtime="benchmark": {func} on made-up operands ended the CUDA context ({first_line(error)}). Start '
            'the process again and use runtime="cost-model", or report the op.'
        ) from lost


def device_here(spec: DeviceSpec) -> torch.device:
    """Return the local device that ``spec`` describes.

    Raises:
        DeviceError: it describes a GPU, and this machine has none, or another.
    """
    if spec.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f'runtime="benchmark" times each op on {spec.name}, and there is no CUDA device here. Use '
            'runtime="cost-model", or profile on a machine with that GPU; device="cpu" is timed on this CPU.'
        )
    here = resolve_device("cuda")
    if spec.name.removesuffix(WITHOUT_WORKSPACES) != here.name:
        board = torch.cuda.get_device_name()
        raise DeviceError(
            f'runtime="benchmark" times each op on {spec.name}, and the GPU here is {board} ({here.name}). '
            'Use device="cuda" for the one that is here, or runtime="cost-model".'
        )
    return torch.device("cuda", torch.cuda.current_device())


def _settings(device: torch.device) -> Any:
    """Return the settings that choose among kernels of an op, for the key of a measurement."""
    common = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), tf32_allowed())
    if device.type == "cuda":
        return (*common, torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled)
    return (*common, torch.backends.mkldnn.enabled)


_SLEEP_CYCLES = 400_000  # a fifth of a millisecond or so: more than it takes to launch an op from Python


def run_seconds(call: Callable[[], object], device: torch.device) -> Iterator[float]:
    """Yield the seconds of one run after another, after a warm-up; on CUDA by events around each run.

    On CUDA the stream sleeps before each run, so that launches do not count.
    """
    call()
    while device.type == "cpu":
        start = time.perf_counter()
        call()
        yield time.perf_counter() - start
    cuda: Any = torch.cuda
    cuda.synchronize(device)
    while True:
        with cuda.device(device):
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(_SLEEP_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
        yield begin.elapsed_time(end) * 1e-3


def _fastest_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of the fastest of a few runs. The fastest one is disturbed least by other processes."""
    best, spent = math.inf, 0.0
    for run, seconds in enumerate(run_seconds(call, device), start=1):
        best = min(best, seconds)
        spent += seconds
        if run == _MOST_RUNS or (run >= 2 and spent > _BUDGET_S):
            break
    return best * 1e3
