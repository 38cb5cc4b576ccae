"""Lower bounds for any schedule, and optima of classes of schedules: programs over an ``OpGraph``, solved with HiGHS.

- ``checkmate``: the least recomputation of any schedule in program order (Jain et al., MLSys 2020, with its exact
  model of memory), for about 40 ops.
- ``backward_bound``: a lower bound, from what is alive at an op of the backward pass, for schedules that run the
  backward ops once and in this order. Where the exact optimum is known, it is mostly equal.
- ``selective_contexts``: the optimum of ``torch.utils.checkpoint`` with selective contexts on layers.
- ``whole_regions``: checkpointing the first k regions as a whole, with the smallest k that fits.

Budgets are bytes of the whole step. Results are recompute time over forward time. HiGHS runs on one thread: it
refuses another number of threads within one process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import highspy
import numpy as np

from benchmarks.graphs.opgraph import OpGraph


def layer_of(module: str) -> str:
    """Make whole layers the regions: ``layers.0.attn`` is in ``layers.0``."""
    return ".".join(module.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Optimum:
    """The outcome of one program.

    Attributes:
        recompute_ratio: recompute time over forward time of the best solution; None where there is none.
        bound: no solution of the program has a smaller ratio; None where nothing was proved.
        status: of HiGHS, ``"Optimal"``, ``"Infeasible"`` or ``"Time limit reached"``.
        seconds: that it ran for.
        rerun: the forward ops that run again in the best solution (of the bounds by moments only).
    """

    recompute_ratio: float | None
    bound: float | None
    status: str
    seconds: float
    rerun: tuple[int, ...] = ()


class _Program:
    """A mixed-integer linear program, row by row; its objective is minimised."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts = [0]
        self._columns: list[int] = []
        self._values: list[float] = []
        self.solution: list[float] | None = None

    def variable(
        self, cost: float = 0.0, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False
    ) -> int:
        self._costs.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._costs) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, at_least: float = -np.inf, at_most: float = np.inf
    ) -> None:
        """``at_least <= sum of coefficient * variable <= at_most``; a variable may occur twice."""
        added: dict[int, float] = {}
        for column, value in terms:
            added[column] = added.get(column, 0.0) + value
        for column, value in added.items():
            if value:
                self._columns.append(column)
                self._values.append(value)
        self._starts.append(len(self._columns))
        self._row_lower.append(at_least)
        self._row_upper.append(at_most)

    def solve(self, *, time_limit: float, gap: float) -> Optimum:
        """Solve the program."""
        began = time.perf_counter()
        highs = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            ("time_limit", time_limit),
            ("mip_rel_gap", gap),
        ):
            highs.setOptionValue(option, value)
        highs.passModel(self._model())
        highs.run()
        status = highs.modelStatusToString(highs.getModelStatus())
        info = highs.getInfo()
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        objective = info.objective_function_value if feasible else None
        self.solution = list(highs.getSolution().col_value) if feasible else None
        bound = info.mip_dual_bound
        return Optimum(
            recompute_ratio=objective,
            bound=bound if np.isfinite(bound) else None,
            status=status,
            seconds=time.perf_counter() - began,
        )

    def _model(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._row_lower)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_, lp.col_upper_ = np.array(self._lower), np.array(self._upper)
        lp.row_lower_, lp.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts, np.int32)
        lp.a_matrix_.index_ = np.array(self._columns, np.int32)
        lp.a_matrix_.value_ = np.array(self._values)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if i else kinds.kContinuous for i in self._integer]
        return lp


def checkmate(graph: OpGraph, budget_bytes: int, *, time_limit: float = 300.0, gap: float = 1e-4) -> Optimum:
    """Find the least recomputation over frontier-advancing schedules: Checkmate's program.

    Stage ``t`` computes op ``t`` for the first time, and before it, in program order, whatever is to run again.
    ``run[t, i]``: op ``i`` runs in stage ``t``; ``kept[t, i]``: its tensor is alive as the stage begins;
    ``freed[t, i, k]``: it goes in stage ``t`` right after op ``k``; ``used[t, i]``: bytes alive after op ``i``.
    The program has about ``ops²`` integers.
    """
    ops = graph.ops
    reads, count = graph.joint_reads, len(ops)
    scale = max(op.nbytes for op in ops)
    size = [op.nbytes / scale for op in ops]
    budget = budget_bytes / scale
    readers: list[list[int]] = [[] for _ in ops]
    for v, tensors in enumerate(reads):
        for u in tensors:
            readers[u].append(v)
    program = _Program()
    run: dict[tuple[int, int], int] = {}
    kept: dict[tuple[int, int], int] = {}
    used: dict[tuple[int, int], int] = {}
    for t in range(count):
        for i in range(t + 1):
            first = 1.0 if i == t else 0.0
            run[t, i] = program.variable(ops[i].time_ms / graph.step_ms, lower=first, integer=True)
            if i < t:
                kept[t, i] = program.variable(integer=True)
            used[t, i] = program.variable(upper=budget)

    def available(t: int, i: int, factor: float) -> list[tuple[int, float]]:
        """Return the terms of "the tensor of ``i`` is there in stage ``t``"."""
        return [(run[t, i], factor), *([(kept[t, i], factor)] if i < t else [])]

    # What is kept into the next stage is there in this one; what runs finds what it reads.
    for t in range(count):
        if t + 1 < count:
            for i in range(t + 1):
                program.row([(kept[t + 1, i], 1.0), *available(t, i, -1.0)], at_most=0.0)
        for v in range(t + 1):
            for u in reads[v]:
                program.row([(run[t, v], 1.0), *available(t, u, -1.0)], at_most=0.0)
    after: dict[tuple[int, int], list[tuple[int, float]]] = {}  # (stage, op) to what goes right after it
    for t in range(count):
        for i in range(t + 1):
            users = [k for k in readers[i] if k <= t]
            choices = []
            for k in sorted({i, *users}):
                # Op k of this stage may free tensor i: it runs, i is not kept, and nobody later in the stage reads i.
                # With the others integer only the last op that runs can free it, and less than 1 would only take
                # memory: the variable may be continuous.
                freed = program.variable()
                choices.append((freed, 1.0))
                program.row([(freed, 1.0), (run[t, k], -1.0)], at_most=0.0)
                if t + 1 < count:
                    program.row([(freed, 1.0), (kept[t + 1, i], 1.0)], at_most=1.0)
                for later in users:
                    if later > k:
                        program.row([(freed, 1.0), (run[t, later], 1.0)], at_most=1.0)
                program.row([(freed, 1.0), *available(t, i, -1.0)], at_most=0.0)
                after.setdefault((t, k), []).append((freed, size[i]))
            if len(choices) > 1:
                program.row(choices, at_most=1.0)
    # used[t, k + 1] = used[t, k] + what op k + 1 makes - what goes right after op k
    for t in range(count):
        before = [(kept[t, i], -size[i]) for i in range(t)]
        program.row([(used[t, 0], 1.0), (run[t, 0], -size[0]), *before], at_least=0.0, at_most=0.0)
        for k in range(t):
            step = [(used[t, k + 1], 1.0), (used[t, k], -1.0), (run[t, k + 1], -size[k + 1])]
            program.row([*step, *after.get((t, k), ())], at_least=0.0, at_most=0.0)
    found = program.solve(time_limit=time_limit, gap=gap)
    share = graph.forward_ms / graph.step_ms
    ratio, bound = (
        (x - 1.0) / share if x is not None else None for x in (found.recompute_ratio, found.bound)
    )
    return Optimum(ratio, bound, found.status, found.seconds)


def backward_bound(
    graph: OpGraph, budget_bytes: int, *, moments: int = 8, time_limit: float = 60.0, gap: float = 1e-4
) -> Optimum:
    """Bound schedules that run the backward ops in this order, and each of them once, from below.

    While backward op ``j`` runs, the gradients that it and later ops read are alive, and so is what it takes from
    the forward pass. Whatever later ops take is alive too, or its op runs after ``j``. So each ``j`` gives a
    knapsack over what is alive.
    The outcome is that of the ``j`` with the largest bound. If its status is ``"Infeasible"``, nothing fits. Where
    the schedule that reruns exactly ``rerun``, each op once and as late as possible, holds the budget at the other
    moments too (a replay tells), it is optimal.

    Args:
        graph, budget_bytes, gap: as elsewhere.
        moments: how many ops to try besides the first: those with the most alive if everything is kept.
        time_limit: seconds for each of them.
    """
    gradient_bytes = _gradient_bytes(graph)
    last_saved = {i: j for j, op in enumerate(graph.backward) for i in op.saved}
    kept_bytes = [
        gradients + sum(graph.forward[i].nbytes for i, last in last_saved.items() if last >= j)
        for j, gradients in enumerate(gradient_bytes)
    ]
    # Each moment gives a valid bound, so a few are enough: those where keeping everything takes most.
    fullest = sorted(range(len(kept_bytes)), key=lambda j: -kept_bytes[j])[:moments]
    best: Optimum | None = None
    for j in dict.fromkeys((0, *fullest)):
        now = frozenset(graph.backward[j].saved)
        later = frozenset(i for i, last in last_saved.items() if last > j)
        found = _knapsack(graph, budget_bytes - gradient_bytes[j], now, later, time_limit, gap)
        if found.status == "Infeasible":  # no schedule gets past this op
            return found
        if best is None or (found.bound or 0.0) > (best.bound or 0.0):
            best = found
    assert best is not None  # j = 0 was tried
    return best


def _gradient_bytes(graph: OpGraph) -> list[int]:
    """Return, by backward op, the bytes of gradients alive while it runs, its own included."""
    last_read = list(range(len(graph.backward)))
    for j, op in enumerate(graph.backward):
        for p in op.reads:
            last_read[p] = j
    live = 0
    found = []
    dying: dict[int, int] = {}
    for j, op in enumerate(graph.backward):
        live += op.nbytes
        found.append(live)
        dying[last_read[j]] = dying.get(last_read[j], 0) + op.nbytes
        live -= dying.pop(j, 0)
    return found


def _knapsack(
    graph: OpGraph,
    room_bytes: int,
    now: Collection[int],
    later: Collection[int],
    time_limit: float,
    gap: float,
) -> Optimum:
    """Find the least time of forward ops that run after a moment at which ``now`` is alive; ``later`` is read after it.

    ``x_i``: the tensor is alive at that moment; ``z_i``: its op runs after it. What is read later is either,
    and so is what an op reads that runs again.
    """
    program = _Program()
    forward = graph.forward
    scale = max(op.nbytes for op in forward)
    x = [program.variable(lower=1.0 if i in now else 0.0, integer=True) for i, op in enumerate(forward)]
    z = [program.variable(op.time_ms / graph.forward_ms) for op in forward]
    for i in sorted(later):
        program.row([(x[i], 1.0), (z[i], 1.0)], at_least=1.0)
    for i, op in enumerate(forward):
        for u in op.reads:
            program.row([(x[u], 1.0), (z[u], 1.0), (z[i], -1.0)], at_least=0.0)
    room = room_bytes / scale
    program.row([(x[i], op.nbytes / scale) for i, op in enumerate(forward)], at_most=room)
    found = program.solve(time_limit=time_limit, gap=gap)
    if program.solution is None:
        return found
    return replace(found, rerun=tuple(i for i, column in enumerate(z) if program.solution[column] > 0.5))


class _Regions:
    """A graph cut into its layers, the regions.

    Attributes:
        of: the region of each forward op.
        names: the regions, in order; "", which is outside any, is not among them.
        ops, saved: by region, its forward ops, and those of them that the backward pass reads.
        boundary: forward ops whose tensors another region reads: checkpointing cannot drop them.
        gradient_bytes: by region, the most gradients that are alive at one of its backward ops.
        outside_bytes: of saved tensors outside any region.
        last_needed: by region, the last op that recomputing it has to run; -1: none.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.of = [layer_of(op.module) for op in graph.forward]
        self.names = tuple(dict.fromkeys(name for name in self.of if name))
        self.ops: dict[str, list[int]] = {name: [] for name in ("", *self.names)}
        for i, name in enumerate(self.of):
            self.ops[name].append(i)
        self.saved = {name: [i for i in ops if i in graph.saved] for name, ops in self.ops.items()}
        # An output that another region reads is where a checkpointed region begins or ends: it stays.
        self.boundary = {
            u for i, op in enumerate(graph.forward) for u in op.reads if self.of[u] != self.of[i]
        }
        self.gradient_bytes = dict.fromkeys(self.ops, 0)
        for backward in graph.backward:
            name = layer_of(backward.module)
            self.boundary.update(i for i in backward.saved if self.of[i] != name)
            width = backward.nbytes + sum(graph.backward[p].nbytes for p in backward.reads)
            self.gradient_bytes[name] = max(self.gradient_bytes[name], width)
        self.outside_bytes = sum(graph.forward[i].nbytes for i in self.saved[""])
        self.last_needed = {
            name: max((i for i in saved if i not in self.boundary), default=-1)
            for name, saved in self.saved.items()
        }


def selective_contexts(
    graph: OpGraph, budget_bytes: int, *, time_limit: float = 60.0, gap: float = 1e-4
) -> Optimum:
    """Find the optimum of ``torch.utils.checkpoint`` on layers, with selective contexts.

    Within a checkpointed region every op that is not saved runs again, up to the last one that the backward
    pass asks for; a region is recomputed as a whole when its backward begins. Memory: what the regions before
    keep, plus all that the backward of this one reads, plus its largest gradients.
    """
    regions = _Regions(graph)
    forward = graph.forward
    program = _Program()
    scale = max(op.nbytes for op in forward)
    checkpointed = {name: program.variable(integer=True) for name in regions.names}
    inside = [i for i, name in enumerate(regions.of) if name]
    x = {i: program.variable(lower=1.0 if i in regions.boundary else 0.0, integer=True) for i in inside}
    z = {
        i: program.variable(
            forward[i].time_ms / graph.forward_ms, upper=0.0 if i in regions.boundary else 1.0
        )
        for i in inside
    }
    for name in regions.names:
        y = checkpointed[name]
        for i in regions.ops[name]:
            if i in regions.boundary:  # kept anyway: nothing to decide
                continue
            if i in graph.saved:
                program.row([(x[i], 1.0), (z[i], 1.0)], at_least=1.0)
            program.row([(z[i], 1.0), (y, -1.0)], at_most=0.0)
            if i <= regions.last_needed[name]:
                program.row([(z[i], 1.0), (y, -1.0), (x[i], 1.0)], at_least=0.0)
            for u in forward[i].reads:
                if regions.of[u] == name and u not in regions.boundary:
                    program.row([(x[u], 1.0), (z[u], 1.0), (z[i], -1.0)], at_least=0.0)
    room = budget_bytes - regions.outside_bytes
    kept: list[tuple[int, float]] = []
    for name in regions.names:
        kept.extend((x[i], forward[i].nbytes / scale) for i in regions.ops[name])
        saved = regions.saved[name]
        recomputed = [(x[i], -forward[i].nbytes / scale) for i in saved]
        whole = sum(forward[i].nbytes for i in saved)
        limit = (room - regions.gradient_bytes[name] - whole) / scale
        program.row([*kept, *recomputed], at_most=limit)
    program.row(kept, at_most=(room - regions.gradient_bytes[""]) / scale)
    return program.solve(time_limit=time_limit, gap=gap)


def whole_regions(graph: OpGraph, budget_bytes: int) -> tuple[float, int] | None:
    """Checkpoint the first ``k`` regions as a whole, with the smallest ``k`` that fits: (ratio, ``k``) or None."""
    regions = _Regions(graph)

    def saved_bytes(name: str, *, only_boundary: bool) -> int:
        kept = (i for i in regions.saved[name] if not only_boundary or i in regions.boundary)
        return sum(graph.forward[i].nbytes for i in kept)

    for k in range(len(regions.names) + 1):
        chosen = set(regions.names[:k])
        live = regions.outside_bytes
        peaks = []
        for name in regions.names:
            live += saved_bytes(name, only_boundary=name in chosen)
            again = saved_bytes(name, only_boundary=False) - saved_bytes(name, only_boundary=True)
            peaks.append(live + regions.gradient_bytes[name] + (again if name in chosen else 0))
        peaks.append(live + regions.gradient_bytes[""])
        if max(peaks) <= budget_bytes:
            again_ms = sum(
                graph.forward[i].time_ms
                for name in chosen
                for i in regions.ops[name]
                if i <= regions.last_needed[name]
            )
            return again_ms / graph.forward_ms, k
    return None
