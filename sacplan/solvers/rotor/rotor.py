"""Rotor: the cheapest persistent checkpointing of a chain of unlike stages, by dynamic programming.

O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory", https://hal.inria.fr/hal-02352969.

A schedule is persistent if a value that it keeps stays until the backward that it was kept for. Among these the result
is optimal if each stage's ``saved_bytes`` is at least its ``output_bytes``, up to two things: sizes are rounded up to
slots, and room is charged for gradients (see ``rotor``).

Known inefficiencies: the table has a cell for every pair of stages and every number of slots. Schedules that are not
persistent may be faster, but no polynomial algorithm for them is known.

    tables_of      fill in the recurrence
    _operations    read the sequence off the choices
    peak           replay the sequence, in slots or in bytes
    _least_slots   the same recurrence for the smallest memory, without a memory axis
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from sacplan.core.budget import format_bytes
from sacplan.errors import BudgetError, InfeasibleBudget, PlanError
from sacplan.solvers.rotor.chain import Chain, ChainSizes

KEEP_ALL = 0
"""In ``RotorResult.choices``: run the first stage keeping everything. A choice j > 0 keeps only ``x_j``."""
INFEASIBLE = -1
"""In ``RotorResult.choices``: that much memory is not enough."""


class OperationKind(str, Enum):
    """The kind of an ``Operation``; the value is its text in messages."""

    FORWARD_KEEP_INPUT = "forward keeping the input"
    FORWARD_KEEP_NOTHING = "forward keeping nothing"
    FORWARD_KEEP_ALL = "forward keeping all"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of the sequence.

    Attributes:
        kind: "keeping the input" keeps ``x_stage`` and the output; "keeping nothing" drops ``x_stage`` and keeps
            only the output; "keeping all" keeps ``x_stage`` and everything that the stage saves.
        stage: from 0; the loss is the stage after the last.
    """

    kind: OperationKind
    stage: int

    def __str__(self) -> str:
        return (
            self.kind.value if self.kind is OperationKind.LOSS else f"{self.kind.value}, stage {self.stage}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RotorResult:
    """The sequence that ``rotor`` found, and the tables that it was read from.

    Attributes:
        total_ms: of one step, recomputation included: ``table[slots - x_0, 0, L]``.
        peak_bytes: the largest memory of the sequence in the chain's own bytes, the input included.
        table: ``table[m, i, l]``, float64, shape (slots + 1, L + 1, L + 1): the least time for forward and backward
            of stages i to l with m slots in addition to ``x_i``; inf where m is not enough, and where i > l.
        choices: for each cell of the table, how: j > 0 (run to j keeping only ``x_j``), ``KEEP_ALL`` (0; each
            feasible cell i = l too) or ``INFEASIBLE`` (-1). Integers, of the same shape.
        operations: the sequence to run.
        strict: whether the table counts the gradient of a segment's output in choice (b); see ``rotor``.
        chain, budget_bytes, slots: the arguments of ``rotor``.
    """

    total_ms: float
    peak_bytes: int
    table: npt.NDArray[np.float64] = field(repr=False)
    choices: npt.NDArray[np.integer] = field(repr=False)
    operations: tuple[Operation, ...] = field(repr=False)
    strict: bool
    chain: Chain = field(repr=False)
    budget_bytes: int
    slots: int


Tables = tuple[npt.NDArray[np.float64], npt.NDArray[np.integer]]


MAX_SLOTS = 10**6  # the tables take slots * stages^2 entries; more is a slip


def rotor(chain: Chain, budget_bytes: int, slots: int = 500) -> RotorResult:
    """Return the fastest sequence of operations that trains the chain within a budget.

    Sizes become slots of ``budget_bytes / slots`` bytes, rounded up, under the names of ``ChainSizes``.
    ``C[m][i][l]`` is the least time for forward and backward of stages i to l with m slots, where ``x_i`` is there and
    not counted:

    - ``C[m][i][i] = f_i + b_i`` if ``m >= x_{i+1} + xbar_{i+1} + max(ftmp_i, btmp_i)``, else inf;
    - for i < l, inf if ``m < x_{l+1} + max(x_{i+1} + ftmp_i, x_j + x_{j+1} + ftmp_j for i < j < l)``, since forward
      must get to l; else the least of

      (a) over j from i + 1 to l: ``((f_i + f_{i+1} + ... + f_{j-1}) + C[m][i][j-1]) + C[m - x_j][j][l]``,
      (b) ``C[m][i][i] + C[m - xbar_{i+1}][i+1][l]``.

    The least j wins a tie in (a), and (a) wins one with (b). Floats are added as the parentheses say, and times in a
    row from left to right. The input stays throughout: the answer is at ``C[slots - x_0][0][L]``.

    In (b), forward of stage i with everything kept is charged room for the gradient of its own output, ``x_{i+1}``,
    through ``C[m][i][i]``. The paper charges the gradient that does wait then, that of the segment's output: ``m >=
    x_{l+1} + xbar_{i+1} + ftmp_i``. Where ``x_{l+1}`` is smaller than ``x_{i+1}``, the recurrence is careful. Where it
    is larger and ``ftmp_i`` is large too, the sequence could go over the budget: then (seldom) the tables are made
    again with the paper's condition as well, and ``strict`` is True.

    Args:
        chain: the stages.
        budget_bytes: for all that the chain's sizes count, the input included.
        slots: memory is counted in so many parts of the budget. More are finer and take proportionally longer.

    Time is O(slots L^3), memory O(slots L^2).

    Raises:
        InfeasibleBudget: no sequence fits, or the budget is 0 or negative. ``smallest_feasible_bytes`` is the
            smallest budget that works with this number of slots, to the byte; with more slots a little less may
            work, since less is rounded up.
        BudgetError: a budget that is not a number of bytes.
        PlanError: not a chain, no slots, or too few for any budget.
    """
    if not isinstance(chain, Chain):
        raise PlanError(f"rotor: chain is a {type(chain).__name__}; give a sacplan.Chain")
    if isinstance(slots, bool) or not isinstance(slots, numbers.Integral) or not 1 <= slots <= MAX_SLOTS:
        raise PlanError(f"rotor: slots is {slots!r}; give a whole number from 1 to {MAX_SLOTS} (default 500)")
    real = isinstance(budget_bytes, numbers.Real) and not isinstance(budget_bytes, bool)
    if not real or not math.isfinite(budget_bytes):
        raise BudgetError(f"rotor: budget_bytes is {budget_bytes!r}; give a finite number of bytes")
    slots, budget_bytes = int(slots), math.floor(budget_bytes)
    if not _fits(chain, budget_bytes, slots):
        raise _infeasible(chain, budget_bytes, slots)
    return _solve(chain, budget_bytes, slots)


def _solve(chain: Chain, budget_bytes: int, slots: int) -> RotorResult:
    """Solve for a budget that is feasible."""
    sizes = chain.in_slots(budget_bytes, slots)
    for strict in (False, True):  # the second time only if the sequence of the first is over the budget
        table, choices = tables_of(chain, sizes, slots, strict)
        operations = _operations(sizes, choices, len(chain), slots)
        if strict or peak(sizes, operations)[0] <= slots:
            break
    for array in (table, choices):
        array.flags.writeable = False
    total_ms = float(table[slots - sizes.x[0], 0, len(chain)])
    peak_bytes, _ = peak(chain.sizes(), operations)
    return RotorResult(total_ms, peak_bytes, table, choices, operations, strict, chain, budget_bytes, slots)


def tables_of(chain: Chain, sizes: ChainSizes, slots: int, strict: bool) -> Tables:
    """Fill in the recurrence of ``rotor``, for all memory sizes of one (i, l) at once, from the last i to the first.

    ``tests/support/rotor_reference.py`` fills in cell by cell; every float here is the sum of the same two floats as
    there. Two parts of the memory axis of a cell (i, l) need no work:

    - memory below the forward sweep's need: inf by the formula;
    - memory from the point on where everything that (a) and (b) look up has stopped changing (each cell remembers
      where it stopped): there the same sums give the same minimum and the same choice, so they are copied.
      Where a segment fits without recomputation at all, that is most of the axis.

    Peak memory is that of the two returned tables, 10 bytes a cell, and O(slots L) more.
    """
    f, b = (*chain.forward_ms, 0.0), chain.backward_ms
    x, xbar, ftmp, btmp = sizes.x, sizes.xbar, sizes.ftmp, sizes.btmp
    n, ms = len(b), slots + 1
    C = np.full((n, n, ms), np.inf)  # [l, i, m]: the memory axis is the contiguous one
    choices = np.full((n, n, ms), INFEASIBLE, dtype=choice_type(n))
    # held[l][j - 1, m] = C[m - x_j][j][l], inf for m < x_j. Cells with i > l belong to no segment, and for each l
    # there are just as many rows of them at n - 1 - l as held[l] has: it lives there until the end.
    held = [C[n - 1 - l, n - l :] for l in range(n)]  # noqa: E741
    run = np.empty((n, ms))  # run[j - i - 1, m] = (f_i + ... + f_{j-1}) + C[m][i][j-1]
    sums, column = np.empty(n * ms), np.arange(ms)
    still_held = [0] * n  # by l: from this m on no held[l] changes
    below: list[int] = []  # by l: from this m on C[:, i + 1, l] does not change
    # (i, l) needs (i, j - 1) and (j, l) for j > i: rows from the last i on, and within a row by rising l.
    for i in reversed(range(n)):
        own = x[i + 1] + xbar[i + 1] + max(ftmp[i], btmp[i])
        step = x[i + 1] + ftmp[i]
        still, still_run, run_ms = [0] * n, 0, 0.0
        for l in range(i, n):  # noqa: E741
            cell, how = C[l, i], choices[l, i]
            # ``step`` is the maximum in the condition of the forward sweep; each l adds one term to it.
            if l > i + 1:
                step = max(step, x[l - 1] + x[l] + ftmp[l - 1])
            low = own if l == i else x[l + 1] + step
            if low <= slots and l == i:
                cell[low:], how[low:], still[l] = f[i] + b[i], KEEP_ALL, low
            elif low <= slots:
                low_b = max(low, own, xbar[i + 1], x[l + 1] + xbar[i + 1] + ftmp[i] if strict else 0)
                high = 1 + min(slots, max(low_b, still_run, still_held[l], xbar[i + 1] + below[l]))
                width = high - low
                both = sums[: (l - i) * width].reshape(l - i, width)
                np.add(run[: l - i, low:high], held[l][i:l, low:high], out=both)
                which = both.argmin(axis=0)  # the first one, so the least j
                best = sums[which * width + column[:width]]
                which += i + 1
                # Where nothing fits, ``argmin`` has answered 0.
                which[best == np.inf] = INFEASIBLE
                if low_b < high:
                    keep_all = (f[i] + b[i]) + C[l, i + 1, low_b - xbar[i + 1] : high - xbar[i + 1]]
                    # Strictly less: (a) wins a tie.
                    better = keep_all < best[low_b - low :]
                    np.copyto(best[low_b - low :], keep_all, where=better)
                    which[low_b - low :][better] = KEEP_ALL
                cell[low:high], how[low:high] = best, which
                # From ``high - 1`` on nothing that was looked up changes any more.
                cell[high:], how[high:] = best[-1], which[-1]
                still[l] = low + int(np.count_nonzero(best != best[-1]))  # a cell never rises with m
            run_ms += f[l]
            np.add(run_ms, cell, out=run[l - i])
            # Shifted by ``x_i`` once here, so that the sums above are plain additions of rows.
            if i > 0 and x[i] <= slots:
                held[l][i - 1, x[i] :] = cell[: ms - x[i]]
            still_run = max(still_run, still[l])
            still_held[l] = max(still_held[l], x[i] + still[l])
        below = still
    # What was stored in the unused half goes: a cell with i > l is infeasible.
    for rows in held:
        rows.fill(np.inf)
    return C.transpose(2, 1, 0), choices.transpose(2, 1, 0)


def choice_type(n: int) -> type[np.signedinteger]:
    """Return the integer type of ``RotorResult.choices`` for n stages, the loss included."""
    return np.int16 if n <= 2**15 else np.int32


def _operations(
    sizes: ChainSizes, choices: npt.NDArray[np.integer], stages: int, slots: int
) -> tuple[Operation, ...]:
    """Read the sequence off the choices. The table at the entry is finite."""
    kinds = OperationKind
    operations: list[Operation] = []
    todo: list[Operation | tuple[int, int, int]] = [(slots - sizes.x[0], 0, stages)]  # the last comes first
    while todo:
        item = todo.pop()
        if isinstance(item, Operation):
            operations.append(item)
            continue
        m, i, last = item
        if i == stages:
            operations.append(Operation(kinds.LOSS, i))
        elif choices[m, i, last] == KEEP_ALL:
            operations.append(Operation(kinds.FORWARD_KEEP_ALL, i))
            # Pushed first, so that it comes after all that lies between forward and backward of the stage.
            todo.append(Operation(kinds.BACKWARD, i))
            if i < last:
                todo.append((m - sizes.xbar[i + 1], i + 1, last))
        else:
            j = int(choices[m, i, last])
            operations.append(Operation(kinds.FORWARD_KEEP_INPUT, i))
            operations.extend(Operation(kinds.FORWARD_KEEP_NOTHING, k) for k in range(i + 1, j))
            todo.append((m, i, j - 1))
            # A stack: stages j to the last run first, then stages i to j - 1 again from ``x_i``.
            todo.append((m - sizes.x[j], j, last))
    return tuple(operations)


def peak(sizes: ChainSizes, operations: Sequence[Operation]) -> tuple[int, int]:
    """Return the largest memory of a sequence from ``rotor``, in the unit of the sizes, and the operation that has it.

    A gradient takes the place of the value that it belongs to, or comes on top if that value is part of what a
    stage saved. The gradient of the input is never counted, the input always.
    """
    x, xbar, ftmp, btmp = sizes.x, sizes.xbar, sizes.ftmp, sizes.btmp
    saved = [False] * len(x)  # by i: whether x_i is part of what stage i - 1 saved in its last forward
    now = x[0]
    largest, where = now, 0
    for at, operation in enumerate(operations):
        i = operation.stage
        extra = ftmp[i]
        if operation.kind is OperationKind.FORWARD_KEEP_ALL:
            saved[i + 1] = True
            now += xbar[i + 1]
        elif operation.kind in (OperationKind.FORWARD_KEEP_INPUT, OperationKind.FORWARD_KEEP_NOTHING):
            now += x[i + 1]
        else:
            extra = btmp[i]
        if now + extra > largest:
            largest, where = now + extra, at
        if operation.kind is OperationKind.FORWARD_KEEP_NOTHING:
            now -= x[i]
        elif operation.kind in (OperationKind.BACKWARD, OperationKind.LOSS):
            # Backward of stage i drops what the stage saved, and the gradient of its output (``x_{i+1}``). The
            # gradient that it makes takes the place of ``x_i``; where that is part of what stage i - 1 saved,
            # it comes on top.
            now += (x[i] if saved[i] else 0) - x[i + 1] - xbar[i + 1]
    return largest, where


def _fits(chain: Chain, budget_bytes: int, slots: int) -> bool:
    return budget_bytes > 0 and _least_slots(chain.in_slots(budget_bytes, slots)) <= slots


def _least_slots(sizes: ChainSizes) -> int:
    """Return the least number of slots with which ``C[m][0][L]`` is finite, plus the input's; the same if strict.

    The same recurrence with (max, min) for (sum, min), and no memory axis: a cell is finite from some m on. One
    diagonal l - i at a time, O(L^3). The strict condition changes nothing here: where ``xbar_{i+1} <= x_{i+1}`` the
    forward sweep needs as much anyway, and elsewhere (a) with j = i + 1 needs no more than (b).
    """
    x, xbar, ftmp, btmp = (np.array(a, dtype=np.int64) for a in (sizes.x, sizes.xbar, sizes.ftmp, sizes.btmp))
    n = len(btmp)
    need = np.empty((n, n), dtype=np.int64)  # [i, l - i]
    held = np.empty((n, n), dtype=np.int64)  # [l, l - i]: the need of (i, l), plus x_i
    need[:, 0] = x[1:] + xbar[1:] + np.maximum(ftmp, btmp)
    held[:, 0] = x[:-1] + need[:, 0]
    step = x[1:] + ftmp
    for d in range(1, n):
        i, last = np.arange(n - d), np.arange(d, n)
        if d > 1:
            step[i] = np.maximum(step[i], x[last - 1] + x[last] + ftmp[last - 1])
        # By (i, j): the larger of segment (i, j - 1), and of (j, l) with ``x_j`` held. The columns are reversed
        # since those of ``held`` count from l down.
        a = np.maximum(need[: n - d, :d], held[d:, :d][:, ::-1]).min(axis=1)
        b = np.maximum(need[i, 0], xbar[i + 1] + need[i + 1, d - 1])
        need[i, d] = np.maximum(x[last + 1] + step[i], np.minimum(a, b))
        held[last, d] = x[i] + need[i, d]
    return int(x[0] + need[0, n - 1])


def _infeasible(chain: Chain, budget_bytes: int, slots: int) -> InfeasibleBudget:
    """Return the error that names the smallest feasible budget.

    Bisection finds it, since feasibility is monotone: with a larger budget no size takes more slots.
    """
    sizes = chain.sizes()
    roomy = max(1, slots * max(*sizes.x, *sizes.xbar, *sizes.ftmp, *sizes.btmp))  # nothing takes two slots
    fewest = _least_slots(chain.in_slots(roomy, slots))
    if fewest > slots:
        raise PlanError(
            f"rotor: slots={slots} is too few for this chain of {len(chain)} stages, whatever the budget: "
            f"rounded up, what must be there together takes {fewest} or more; use the default of 500"
        )
    low, high = max(0, budget_bytes), roomy  # low does not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(chain, middle, slots) else (middle, high)
    solved = _solve(chain, high, slots)
    binding = str(solved.operations[peak(chain.in_slots(high, slots), solved.operations)[1]])
    return InfeasibleBudget(
        f"rotor: no sequence runs this chain of {len(chain)} stages in {format_bytes(budget_bytes)} ({budget_bytes} "
        f"bytes). The smallest budget that works with {slots} slots is {format_bytes(high)} ({high} bytes; "
        f"{solved.total_ms:.6g} ms, {chain.step_ms:.6g} ms without recomputation), bound by: {binding}. Give at least "
        f"budget_bytes={high}, cut the largest stages in two, or make the batch smaller.",
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=high,
        binding=binding,
    )
