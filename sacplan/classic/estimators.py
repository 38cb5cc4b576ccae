"""The classical interface: three context managers that watch a step, and ``aggregate_stats`` over them.

Each has a ``Recorder`` of its own. They work under ``fake_device``, on real CPU tensors and on CUDA::

    with sacplan.fake_device("h100"):
        ...
        with MemTracker() as mem_tracker: step()
        with RuntimeEstimator() as runtime_estimator: step()
        with SACEstimator() as sac_estimator: model(batch)
    graph = parse_module_info(aggregate_stats(model, mem_tracker, runtime_estimator, sac_estimator, dev))

Names and meanings follow PyTorch PR #137908.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from sacplan.classic.fit import FitKind
from sacplan.classic.graph import ModuleInfo, SACStats
from sacplan.classic.stats import module_info
from sacplan.classic.units import UnitTradeoff, unit_tradeoffs
from sacplan.core.arguments import checked
from sacplan.core.program import Phase, Program, StorageKind
from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.kernels import active_device
from sacplan.device.timing import MeasuredTimes
from sacplan.errors import TraceError
from sacplan.record.recorder import Recorder
from sacplan.record.saved_tensors import SavedMode
from sacplan.torch_compat.fake_tensors import active_fake_mode
from sacplan.torch_compat.ops import op_traits

if TYPE_CHECKING:
    import pandas as pd

# The prototype's name comes first, then a short one.
_COST_MODEL = ("operator-level-cost-model", "cost-model")
_BENCHMARK = ("operator-level-benchmark", "benchmark")


class _Estimator:
    """A context with one recorder, made when it is entered, for the device that is active then."""

    _saved: SavedMode = "observe"

    @checked(TraceError, "device")
    def __init__(self, device: str | DeviceSpec | torch.device | None = None) -> None:
        self._device = device
        self._mode = _COST_MODEL[0]
        self._recorder: Recorder | None = None
        self._program: Program | None = None
        self._tracked: list[Any] = []

    def __call__(self, estimate_mode_type: str = _COST_MODEL[0]) -> Any:
        """Choose where op times come from: ``"operator-level-cost-model"`` or ``"operator-level-benchmark"``."""
        if estimate_mode_type not in (*_COST_MODEL, *_BENCHMARK):
            raise TraceError(
                f"unknown estimate_mode_type {estimate_mode_type!r}; known are {_COST_MODEL + _BENCHMARK}."
            )
        self._mode = estimate_mode_type
        return self

    def __enter__(self) -> Any:
        if self._recorder is not None and self._recorder.is_active:
            raise TraceError(
                f"this {type(self).__name__} is recording already. Leave it first, or make another one to nest."
            )
        spec = self._spec()
        times = MeasuredTimes(spec) if self._mode in _BENCHMARK else CostModel(spec)
        fake = active_fake_mode() is not None
        # Empty handles have no values to give back, so on real tensors copies take their place.
        saved: SavedMode = self._saved
        if saved == "virtual" and not fake:
            saved = "clone"
        # If the step fails, the program of an earlier one must not be taken for its own.
        self._program = None
        self._recorder = Recorder(spec, times.cost, saved, tensors_only=True)
        self._track(self._recorder)
        self._recorder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is None or not self._recorder.is_active:
            raise TraceError(
                f"this {type(self).__name__} is not recording: it was left already, or never entered."
            )
        self._recorder.__exit__(kind, error, trace)
        # After an error the step is not complete, so there is no program of it.
        if kind is None:
            self._program = self._recorder.program()
        self._recorder.forget()

    def _spec(self) -> DeviceSpec:
        if self._device is not None:
            return resolve_device(self._device)
        return active_device() or resolve_device("cuda" if torch.cuda.is_available() else "cpu")

    def _track(self, recorder: Recorder) -> None:
        for thing in self._tracked:
            if isinstance(thing, torch.nn.Module):
                recorder.track_model(thing)
            elif isinstance(thing, torch.optim.Optimizer):
                recorder.training.track_optimizer(thing)
            else:
                recorder.track_tensors([thing])

    @property
    def program(self) -> Program:
        """The recorded program; ``TraceError`` before the context has ended."""
        if self._program is None:
            raise TraceError(
                f"{type(self).__name__} has recorded nothing yet: run a step inside `with`, and read it afterwards."
            )
        return self._program


class MemTracker(_Estimator):
    """Track the bytes that are alive during a step, by kind and module; autograd is left alone.

    As PyTorch's, it sees tensors only, and not what kernels allocate inside, which ``sacplan.profile`` counts.

    Args:
        device: whose allocator counts; by default that of ``fake_device``, else the local one.
    """

    def track_external(self, *external: torch.nn.Module | torch.optim.Optimizer | torch.Tensor) -> None:
        """Count what exists before the step: a model, an optimizer's state, tensors such as the batch."""
        for thing in external:
            if not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
                raise TraceError(
                    f"track_external takes modules, optimizers and tensors, not {type(thing).__name__}."
                )
        self._tracked.extend(external)

    def reset_mod_stats(self) -> None:
        """Forget what was recorded so far; the record starts over from what is alive now."""
        if self._recorder is None:
            raise TraceError(
                "reset_mod_stats was called outside the context: call it inside, between two steps."
            )
        self._recorder.restart()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at any op."""
        return self.program.footprint.peak_bytes

    def snapshot(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by kind and in total."""
        peak = self.program.liveness.peak
        return {k.name.lower(): peak.by_kind[k] for k in StorageKind} | {"total": peak.live_bytes}

    def to_frame(self) -> pd.DataFrame:
        """Return the bytes alive at each op, by kind."""
        import pandas as pd

        return pd.DataFrame(
            [
                # The state before the step has no op (-1), and is shown with the phase of the first one.
                {"phase": self.program.ops[max(m.op, 0)].phase.name.lower(), "total": m.live_bytes}
                | {k.name.lower(): m.by_kind[k] for k in StorageKind}
                for m in self.program.liveness.moments
            ]
        )


class RuntimeEstimator(_Estimator):
    """Estimate the time of a step, op by op, by the cost model or by timing each distinct op once."""

    @property
    def total_ms(self) -> float:
        """The time of all recorded ops, in milliseconds."""
        return self.program.step_ms

    @property
    def flops(self) -> int:
        """The floating-point operations of all recorded ops."""
        return self.program.flops

    @property
    def mod_runtimes(self) -> Mapping[str, Mapping[str, float]]:
        """The times of each module, ``{"fw": ms, "bw": ms}``."""
        info = module_info(self.program, self.program, {})
        return {s.fqn: {"fw": s.fw_runtime_per_module, "bw": s.bw_runtime_per_module} for s in info.stats}


class SACEstimator(_Estimator):
    """Find the trade-offs of each module between kept bytes and recompute time; one forward pass is enough.

    Under ``fake_device`` autograd saves empty handles instead of tensors; on real tensors it saves copies, so that a
    backward pass works inside or after the context.
    """

    _saved: SavedMode = "virtual"

    @property
    def tradeoffs(self) -> Mapping[str, UnitTradeoff]:
        """The reachable trade-offs of every module with children, by fqn."""
        return unit_tradeoffs(self.program)

    @property
    def sac_mod_stats(self) -> Mapping[str, SACStats]:
        """The ops of every module with children, as ``get_optimal_checkpointing_policy_per_module`` reads them."""
        return {fqn: sac_stats(self.program, fqn) for fqn in self.tradeoffs}


def sac_stats(program: Program, fqn: str) -> SACStats:
    """Return the ops of a module's first call: times, bytes of new outputs, and which must be treated alike."""
    calls = program.calls.get(fqn)
    if not calls:
        raise TraceError(f"module {fqn!r} was not called; called were {', '.join(map(repr, program.calls))}.")
    ops = [op for op in map(program.ops.__getitem__, program.ops_in(calls[0])) if op.phase == Phase.FORWARD]
    saved = set(program.handle_storages)
    # By storage, the op of the list that made it. Those that are missing were made outside of the module.
    place = {s: at for at, op in enumerate(ops) for s in op.writes}
    return SACStats(
        func_names=tuple(op.name for op in ops),
        runtimes=tuple(op.time_ms for op in ops),
        # An in-place version takes over the bytes of the version before, so it adds none.
        memory=tuple(sum(program.storage_bytes[s] for s in op.writes if op.replaces < 0) for op in ops),
        view_like_ops=tuple(at for at, op in enumerate(ops) if not op.writes and not op.mutates),
        rand_ops=tuple(at for at, op in enumerate(ops) if op.writes and _is_random(op.name)),
        saved_autograd_ops=tuple(at for at, op in enumerate(ops) if saved.intersection(op.writes)),
        # Either a new version of a storage (``replaces``) or a plain write in place. An op stands for itself where what
        # it writes was made outside of the module.
        inplace_ops=tuple(
            (at, place.get(op.replaces if op.replaces >= 0 else op.mutates[0], at))
            for at, op in enumerate(ops)
            if op.replaces >= 0 or (op.mutates and not op.writes)
        ),
    )


def _is_random(name: str) -> bool:
    _, op, overload = name.split(".", 2)
    # Looked up in aten whatever the namespace is. What aten does not have counts as not random.
    packet = getattr(torch.ops.aten, op, None)
    func = getattr(packet, overload, None)
    return func is not None and op_traits(func).random


@checked(TraceError)
def aggregate_stats(
    model: torch.nn.Module,
    mem_tracker: MemTracker,
    runtime_estimator: RuntimeEstimator,
    sac_estimator: SACEstimator,
    dev: torch.device | str | None = None,
    *,
    fit: FitKind = "hull",
    n_segments: int | None = None,
) -> ModuleInfo:
    """Collect memory, times and trade-offs of every module that ran, for ``parse_module_info``.

    Args:
        model: the model that was watched.
        mem_tracker, runtime_estimator, sac_estimator: after their contexts have ended.
        dev: ignored; accepted because the prototype takes it. A recording is of one device.
        fit: ``"hull"`` (never optimistic) or ``"pwlf"`` with ``n_segments`` 2 to 4.

    Raises:
        TraceError: an estimator recorded nothing, or another model.
    """
    # A shared module has several names, and a recording may have taken any of them.
    names = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
    for estimator in (mem_tracker, runtime_estimator, sac_estimator):
        if not estimator.program.scopes:
            raise TraceError(
                f"{type(estimator).__name__} saw no module being called; was the model run inside it?"
            )
        for scope in estimator.program.scopes:
            if scope.fqn not in names:
                raise TraceError(
                    f"{type(estimator).__name__} saw a module {scope.fqn!r} that this model does not have. Pass the "
                    "model that was run inside the estimators."
                )
    return module_info(
        mem_tracker.program,
        runtime_estimator.program,
        sac_estimator.tradeoffs,
        fit_kind=fit,
        segments=n_segments,
    )
