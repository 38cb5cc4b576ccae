"""Module statistics from recorded steps, as ``parse_module_info`` and the mixed-integer program read them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sacplan.classic.fit import Fit, FitKind, fit_tradeoff
from sacplan.classic.graph import MemorySegment, ModuleInfo, ModuleStats
from sacplan.classic.units import UnitTradeoff
from sacplan.core.program import ROOT_SCOPE, Event, Phase, Program, StorageKind

_ACTIVATIONS = (StorageKind.ACTIVATION, StorageKind.TEMPORARY)
_SHARDED = (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)


def module_info(
    memory: Program,
    runtime: Program,
    tradeoffs: Mapping[str, UnitTradeoff],
    *,
    fit_kind: FitKind = "hull",
    segments: int | None = None,
) -> ModuleInfo:
    """Return the statistics of every module that ran.

    Args:
        memory: the step that bytes are read from.
        runtime: the step that times and orders are read from.
        tradeoffs: of the modules that may be units.
        fit_kind, segments: the fit of each trade-off curve, see ``sacplan.fit_tradeoff``.

    As in the prototype of PR #137908, the activations of a module are those at the end of its forward
    and the activation gradients those at the peak of its backward, which need not coincide.
    ``segments_of`` has what was alive at one moment.
    """
    boundaries = memory.liveness.at_boundaries
    spans = _backward_spans(memory)
    forward_ms, backward_ms = _times(runtime)
    fits: dict[tuple[object, ...], Fit] = {}
    # By storage, so that parameters which several modules share count once.
    root_parameters = sum(
        memory.storage_bytes[s] for s in memory.initial if memory.storage_kinds[s] == StorageKind.PARAMETER
    )
    own_parameters = memory.parameter_bytes
    stats = []
    for fqn in _with_root(pre_order(runtime)):
        scopes = memory.calls.get(fqn, ())
        # Of a module that is called several times, the end of its last call.
        at_end = boundaries.get((int(Event.EXIT), scopes[-1])) if scopes else None
        grad_total, act_bw, act_grad = _backward_peaks(memory, spans.get(fqn))
        parameters = root_parameters if fqn == "" else own_parameters.get(fqn, 0)
        tradeoff = tradeoffs.get(fqn)
        stats.append(
            ModuleStats(
                fqn=fqn,
                param_per_module=parameters,
                grad_per_module=parameters,
                grad_total=grad_total,
                act_fw_per_module=tradeoff.saved_bytes if tradeoff else 0,
                act_bw_per_module=act_bw,
                act_grad_per_module=act_grad,
                act_total=sum(at_end[k] for k in _ACTIVATIONS) if at_end else 0,
                input_per_module=sum(memory.scopes[s].input_bytes for s in scopes),
                output_per_module=sum(memory.scopes[s].output_bytes for s in scopes),
                fw_runtime_per_module=forward_ms[fqn],
                bw_runtime_per_module=backward_ms[fqn],
                is_leaf=fqn in memory.leaf_fqns,
                **_tradeoff_fields(tradeoff, fits, fit_kind, segments),
            )
        )
    return ModuleInfo(
        stats=tuple(stats),
        fw_pre_order=_with_root(pre_order(runtime)),
        fw_post_order=_with_root(post_order(runtime), last=True),
        bw_pre_order=backward_order(runtime),
    )


def _tradeoff_fields(
    tradeoff: UnitTradeoff | None,
    fits: dict[tuple[object, ...], Fit],
    kind: FitKind,
    segments: int | None,
) -> dict[str, Any]:
    # No unit, or one that can discard nothing: the fields keep their defaults.
    if tradeoff is None or not tradeoff.points:
        return {}
    # A forward pass that takes no time has shares of 0, and not of 0 / 0.
    whole = tradeoff.runtime_ms or 1.0
    curve = tuple((p.discard_ratio, p.recompute_ms / whole) for p in tradeoff.points)
    # Repeated layers have equal curves, and a fit by least squares takes long.
    fitted = fits.get(curve)
    if fitted is None:
        fitted = fits[curve] = fit_tradeoff(curve, kind, segments)
    return {
        "sac_runtime": whole,
        "sac_memory": tradeoff.saved_bytes,
        "n_segments": fitted.n_segments,
        "slopes": fitted.slopes,
        "intercepts": fitted.intercepts,
        "breakpoints": fitted.breakpoints,
        "tradeoff_curve": ((0.0, 0.0), *curve),
        "points": tradeoff.points,
    }


def pre_order(program: Program) -> tuple[str, ...]:
    """Return the modules by the beginning of their first forward."""
    return tuple(dict.fromkeys(scope.fqn for scope in program.scopes))


def post_order(program: Program) -> tuple[str, ...]:
    """Return the modules by the end of their last forward."""
    ended: dict[str, int] = {}
    for scope, position in zip(program.scopes, program.liveness.exited, strict=True):
        ended[scope.fqn] = max(position, ended.get(scope.fqn, -1))
    return tuple(sorted(ended, key=ended.__getitem__))


def backward_order(program: Program) -> tuple[str, ...]:
    """Return the modules by the beginning of their first backward."""
    return tuple(dict.fromkeys(program.scopes[s].fqn for s in program.backward_order))


def _with_root(order: tuple[str, ...], *, last: bool = False) -> tuple[str, ...]:
    if "" in order:
        return order
    return (*order, "") if last else ("", *order)


def _times(program: Program) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return, by module, the time of its forward and of its backward pass in ms."""
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    names = _names_around(program)
    # The model has no call of its own where only parts of it were called: its time is that of the passes.
    whole = () if "" in program.calls else ("",)
    for op in program.ops:
        if op.phase == Phase.OPTIMIZER:
            continue
        total = forward if op.phase == Phase.FORWARD else backward
        # The time of an op is in that of every module around it.
        for fqn in (*whole, *names[op.scope]):
            total[fqn] += op.time_ms
    return forward, backward


def _names_around(program: Program) -> dict[int, tuple[str, ...]]:
    """Return, by scope, the distinct modules that it is in, itself included."""
    names: dict[int, tuple[str, ...]] = {ROOT_SCOPE: ()}
    # A call comes after the one around it, whose names are known by then.
    for i, scope in enumerate(program.scopes):
        around = names[scope.parent]
        names[i] = around if scope.fqn in around else (*around, scope.fqn)
    return names


def _backward_spans(program: Program) -> dict[str, tuple[int, int]]:
    """Return, by module, its first and last op in the backward pass ("" is the whole of it)."""
    spans: dict[str, tuple[int, int]] = {}
    names = _names_around(program)
    for i, op in enumerate(program.ops):
        if op.phase == Phase.BACKWARD:
            for fqn in ("", *names[op.scope]):
                spans[fqn] = (spans.get(fqn, (i, i))[0], i)
    return spans


def _backward_peaks(program: Program, span: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return three figures in bytes for a module's backward.

    Gradients before it; activations at the peak within it; and what it has added by then: gradients of activations, and
    of the module's own parameters so far.
    """
    # No op of the backward pass runs for the module.
    if span is None:
        return 0, 0, 0
    moments = program.liveness.moments[1:]  # the first is the state before the step
    first, last = span
    op = program.ops[first]
    # ``moments[first]`` is that of the first op while it runs: less its workspace and its results, the state before.
    before = list(moments[first].by_kind)
    before[StorageKind.TEMPORARY] -= program.inside_bytes[first]
    for s in op.writes:
        before[program.storage_kinds[s]] -= program.storage_bytes[s]
    peak = max(moments[first : last + 1], key=lambda m: m.live_bytes).by_kind
    added = sum(peak[k] - before[k] for k in (StorageKind.TEMPORARY, StorageKind.GRADIENT))
    return before[StorageKind.GRADIENT], peak[StorageKind.ACTIVATION], max(0, added)


def segments_of(program: Program) -> tuple[MemorySegment, ...]:
    """Return the largest moment of the step for each position.

    The position is how many modules have ended their forward and not begun their backward. It rises in the forward pass
    when a module's last call ends, and falls when an op of a module's backward runs.
    """
    order = _with_root(post_order(program), last=True)
    place = {fqn: p for p, fqn in enumerate(order)}
    calls_left = Counter(scope.fqn for scope in program.scopes)
    names = _names_around(program)
    largest: dict[int, MemorySegment] = {}
    position = 0
    moments = iter(program.liveness.moments)

    def note(moment_kinds: Sequence[int], name: str) -> None:
        sharded = sum(moment_kinds[k] for k in _SHARDED)
        local = sum(moment_kinds) - sharded
        largest_yet = largest.get(position)
        if largest_yet is None or sharded + local > largest_yet.sharded_bytes + largest_yet.local_bytes:
            largest[position] = MemorySegment(position, sharded, local, name)

    note(next(moments).by_kind, "")
    for code, arg in program.events:
        if code == Event.EXIT:
            fqn = program.scopes[arg].fqn
            calls_left[fqn] -= 1
            # In the order of ends, so that position counts modules whose last call is over.
            while position < len(order) and calls_left[order[position]] <= 0:
                position += 1
        elif code == Event.OP:
            op = program.ops[arg]
            if op.phase == Phase.OPTIMIZER:
                # Every backward has begun by now.
                position = 0
            elif op.phase == Phase.BACKWARD:
                # What a module discarded is being computed again from its backward on, so it counts no longer.
                position = min([position, *(place[fqn] for fqn in names[op.scope])])
            name = program.scopes[op.scope].fqn if op.scope != ROOT_SCOPE else ""
            note(next(moments).by_kind, "optimizer step" if op.phase == Phase.OPTIMIZER else name)
    return tuple(largest[p] for p in sorted(largest))
