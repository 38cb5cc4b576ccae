"""``fit``: whether a step fits a device, by how much it does not, and what to do about it.

    print(sacplan.fit(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="rtx-4090"))

The answer is a table of optimizers times *ways* to run the step (as it is, with a plan, with a chunked loss, ...).
A step with an optimizer is a ``Case``, which makes the rows of all ways (``cases.py``). Cases share recordings and
plans. The step is recorded at two sizes for each axis (batch, sequence); other sizes are computed from these
(``scaled.py``).

Without a budget, a row fits a GPU if what the allocator reserves fits (``limits.py``). Reserved bytes do not follow
from peaks, so each row plays the allocator once or twice, on the step with the row's plan and optimizer.

The peak and time of a row that fits are those of the plan that ``plan`` finds. If none fits, the row has the smallest
peak that a quick search finds. The largest batch and sequence are lower bounds: they hold with the decisions that have
the smallest peak at the asked size, and planning at each size might find larger ones.

A compiled step is run with each plan, dry. Techniques that work only on what is not compiled have rows if anything is
not. At another size the compiler makes another program, so no size is computed: about four are run for each largest
size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader

from sacplan.core.arguments import checked
from sacplan.core.budget import format_bytes, format_difference, parse_budget
from sacplan.core.derived import derived
from sacplan.core.progress import begins
from sacplan.core.setup import Routing
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec, devices, resolve_device
from sacplan.device.outside_allocator import outside_allocator
from sacplan.distributed.ranks.ranks import FSDP2
from sacplan.errors import PlanError, SacplanWarning
from sacplan.planning.compiled import works_nowhere
from sacplan.planning.infeasible import looking_for_plans
from sacplan.planning.limits import OF_DEVICE, limit_of_device
from sacplan.profiling.optimizer_names import COMPARED_ON_HOST, named_optimizer
from sacplan.profiling.optimizers import with_optimizer
from sacplan.questions.batch_sizes import Recordings, batches_of
from sacplan.questions.cases import Case, SizeAxis
from sacplan.questions.fit_question import Asked
from sacplan.questions.on_ranks import RankRows, read_devices
from sacplan.questions.verdict import FitRow, Verdict, cheapest_of, is_same_training, recommended
from sacplan.questions.ways import AS_IT_IS, Way, host_ways, long_ways, quick_ways
from sacplan.record.compiled import CompileModules
from sacplan.record.fake_rules import CHOICES
from sacplan.record.fake_values import is_rule
from sacplan.record.longest import LongestBatch
from sacplan.record.step import LossFn

_COMPUTED = "Peaks follow from recordings of the step and of the optimizers, largest sizes from the step at two sizes."
_RUN = (
    "Peaks and largest sizes follow from dry runs of the compiled step at these sizes, and of the optimizers."
)
_TOKENS = 128  # sequences are tried in multiples of this, since kernels pad others


@checked(PlanError, "model", "make_batch", "optimizer", "budget", "host_budget")
def fit(
    model: torch.nn.Module,
    make_batch: Callable[..., Any] | DataLoader[Any],
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    loss_fn: LossFn | None = None,
    optimizer: Any = "adamw",
    budget: float | str | None = None,
    *,
    devices: int | str = 1,
    batch: int | None = None,
    seq: int | None = None,
    accumulation_steps: int = 1,
    routing: Routing = "balanced",
    longest: int | None = None,
    host_budget: float | str | None = None,
    name: str | None = None,
    sizes: bool = True,
    compile: CompileModules = None,
) -> Verdict:
    """Say whether a training step fits a device; if it does not, by how much, and what to do.

        found = sacplan.fit(model, lambda n: torch.empty(n, 3, 224, 224, device="meta"), device="rtx-4090", batch=64)
        print(found)
        found = sacplan.fit(model, lambda n, seq: torch.zeros(n, seq, dtype=torch.long), seq=4096)

    Args:
        model: As for ``sacplan.profile``. On the meta device it takes no memory here.
        make_batch: A function: ``make_batch(n)`` returns a batch of n samples. If ``seq`` is given, it is called as
            ``make_batch(n, seq)`` and returns samples of ``seq`` tokens each. Or a ``DataLoader``, whose longest
            samples are taken.
        device: The target device, see ``sacplan.devices()``. ``"8xh100"`` means eight of them.
        loss_fn: As for ``profile``.
        optimizer: A name as on the command line (``"adamw"``, ``"paged-adamw-8bit"``, ``"muon"``), a function
            ``params -> optimizer``, or None.
        budget: Limit for the peak of the step, as for ``max_batch``. Without one, the step has to fit the device, as
            for ``plan``.
        devices: How many devices there are. With several, rows are for DDP, FSDP2 and meshes with tensor parallelism;
            ``batch`` is that of each device, and peaks are those of a rank.
        batch, seq: The size of the step: samples (by default 1, or those of the loader), and tokens in each. If batches
            differ, the size of the largest.
        accumulation_steps: As for ``profile``; ``batch`` is one micro-batch. Times are those of all of them.
        routing: As for ``profile``. With balanced routing, a sentence says what the worst would need.
        longest: The longest sequence to try, for models that have a limit.
        host_budget: Limit for the memory of the host that a step takes, as for ``plan``: what waits there, the
            optimizer's state and gradients, and shards. By default the host's share of common machines with the device.
        name: Name of the model in the answer.
        sizes: Whether to compute the largest batches and sequences. Without them, it takes about half as long.
        compile: As for ``profile``. The largest sizes of a compiled step take dry runs at some four sizes each.

    Returns:
        The verdict: peaks in bytes, times in ms. Peaks are exact, as those of ``plan`` are. The largest batches and
        sequences hold with the plan that has the smallest peak at the size that was asked for. ``max_batch``, which
        plans at each size, may find somewhat larger ones.

    Raises:
        PlanError: ``make_batch`` is not callable or makes batches of one size; the optimizer's name is unknown; a
            size is below 1; or a compiled step is to be spread over devices.
        BudgetError: The budget cannot be read, is a share, or is more than the device has.
        TraceError, DeviceError: As for ``profile``.
    """
    batches = batches_of(make_batch)
    if batch is None:
        batch = (batches.rows if isinstance(batches, LongestBatch) else None) or 1
    for what, value in (("batch", batch), ("seq", seq)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise PlanError(f"{what}={value!r} must be 1 or more.")
    if isinstance(optimizer, str):
        try:
            optimizer = named_optimizer(optimizer).name
        except ValueError as error:
            raise PlanError(f"{error} Or give a callable `params -> optimizer`.") from error
    elif isinstance(optimizer, (list, tuple)):
        raise PlanError("optimizer=[...]: fit puts one optimizer behind the backward pass. Use sacplan.plan.")
    device, n_devices = read_devices(device, devices)
    spec = resolve_device(device)
    if n_devices > 1 and compile not in (None, False):
        raise PlanError(
            f"compile={compile!r} with {n_devices} devices: of a compiled step, fit answers for one device."
        )
    how = {"loss_fn": loss_fn, "accumulation_steps": accumulation_steps, "routing": routing}
    sweep = Sweep(
        Recordings(model, batches, spec, {**how, "compile": False if n_devices > 1 else compile}), optimizer,
        limit_of_device(budget, spec), batch, seq, longest,
        spec.host_memory_bytes if host_budget is None else parse_budget(host_budget, spec.host_memory_bytes),
        n_devices,
    )  # fmt: skip
    with looking_for_plans():
        return sweep.found(name or type(model).__name__, sizes)


@dataclass
class Sweep(Asked):
    """Makes the table of optimizers and ways. Plans are made when they are first needed, and kept."""

    remarks: list[str] = field(default_factory=list)

    @cached_property
    def cases(self) -> dict[str, Case]:
        """The step with each optimizer, by name of the optimizer."""
        return {name: self._case(name) for name in self.makes}

    @derived
    def _case(self, name: str) -> Case:
        step = self.at(self.batch, self.seq, self.whole(name))
        return Case(name, step, self.step_of(name), self.limit, self.host_budget_bytes)

    # --- ways

    @cached_property
    def ways(self) -> list[Way]:
        """The ways to try with each optimizer, without long searches and without memory of the host."""
        any_case = self._case(next(iter(self.makes)))
        return quick_ways(lambda way: self._has_place(way) and bool(any_case.smallest(way).decisions))

    def _has_place(self, way: Way) -> bool:
        return not works_nowhere(way.techniques, self.base)

    def _could_fit(self, way: Way) -> bool:
        """Whether some plan could hold the budget: whether the memory that no plan reduces is within the budget."""
        return self._has_place(way) and any(case.may_fit(way) for case in self.cases.values())

    # --- sizes

    @derived
    def axes(self, whole: str | None) -> tuple[SizeAxis, SizeAxis | None]:
        """Return the axes of batch sizes and of sequence lengths (None for models without); ``whole`` is for ``at``."""
        by_batch = self.batch_axis(lambda n: self.at(n, self.seq, whole))
        if self.seq is None:
            return by_batch, None
        # Half the length is quicker to record, if it is a multiple of ``_TOKENS`` as well: padding bends the line.
        # Else take twice the length, if the model has positions for that.
        other = self.seq // 2 if self.seq % (2 * _TOKENS) == 0 else 2 * self.seq
        if self.longest is not None and other > self.longest:
            other = max(1, self.seq // 2)
        # If only a sequence of one token is allowed, there is no second size.
        sizes = None if other == self.seq else (self.seq, other)
        # The answer is in multiples of 128 tokens if the length that was asked about is.
        unit = _TOKENS if self.seq % _TOKENS == 0 else 1
        most = {} if self.longest is None else {"most": self.longest // unit}
        return by_batch, SizeAxis(
            "sequence", self.seq, sizes, lambda n: self.at(self.batch, n, whole), self.notes, unit, **most
        )

    def with_sizes(self, row: FitRow) -> FitRow:
        """Return a copy of the row with its largest batch and sequence."""
        begins(f"largest sizes: {row.optimizer}, {row.way}")
        case, (by_batch, by_seq) = self.cases[row.optimizer], self.axes(self.whole(row.optimizer))
        longest = None if by_seq is None else case.largest(row, by_seq)
        return replace(row, largest_batch=case.largest(row, by_batch), longest_seq=longest)

    # --- the answer

    def found(self, name: str, sizes: bool) -> Verdict:
        """Return the verdict with all rows; ``sizes``: with the largest sizes."""
        rows, with_sizes = self._rows_on_ranks() if self.devices > 1 else (self._rows(), self.with_sizes)
        verdict = self._verdict(name, rows)
        if not sizes:
            return verdict
        competing = verdict.competing
        return self._verdict(name, [with_sizes(row) if row in competing else row for row in rows])

    def _rows(self) -> list[FitRow]:
        """Return the rows on one device."""
        # The step as it is comes first, since finding the other ways takes a search.
        rows = [row for name in self.makes for row in self._rows_with(name)]
        self._say_worst_routing()
        # Long searches come last, and only if nothing fits and they could help. For a compiled step there are none.
        done = self.base.runs_compiled or any(row.fits for row in rows)
        ways = () if done else filter(self._could_fit, long_ways())
        rows += [case.row(way) for way in ways for case in self.cases.values()]
        return rows + self._on_the_host(rows)

    def _rows_with(self, name: str) -> Iterator[FitRow]:
        yield self._case(name).row(AS_IT_IS)
        yield from map(self._case(name).row, self.ways[1:])

    def _on_the_host(self, rows: list[FitRow]) -> list[FitRow]:
        """Return rows that take memory of the host; [] if the asked optimizer fits without, at a low cost."""
        if self.spec.kind == "cpu":  # the memory of a CPU is the host's
            return []
        cheapest = cheapest_of(rows)
        if cheapest is not None and not cheapest.is_dear:
            return []
        # Another optimizer changes the training, so it is tried only if no row fits.
        asked = rows[0].optimizer
        names = [
            name for name in self.cases if is_same_training(name, asked) or not any(row.fits for row in rows)
        ]
        found = []
        for way in filter(self._could_fit, host_ways(self.ways)):
            found += self._on_the_host_with(way, names, rows, cheapest)
        # State on the host is a last resort: moving it over the link takes time that is not predicted.
        if cheapest is not None or any(row.fits for row in found):
            return found
        found += self._with_state_on_host()
        if not any(row.fits for row in found):
            self.notes.append(
                f"Plans and optimizers may take {format_bytes(self.host_budget_bytes)} of the host's memory. If there "
                "is more, say so: host_budget (--host-budget)."
            )
        return found

    def _on_the_host_with(
        self, way: Way, names: list[str], rows: list[FitRow], cheapest: FitRow | None
    ) -> list[FitRow]:
        """Return the rows of a way up to the first optimizer that fits, without rows that gain nothing."""
        found = []
        for name in names:
            row = self.cases[name].row(way)
            others = [other.over_bytes for other in rows if other.optimizer == name]
            # If another plan fits, this one has to be quicker; if none does, it has to be over by less. Plans that
            # take no host memory are in the table already.
            gains = row.is_quicker(cheapest) if cheapest is not None else row.over_bytes < min(others)
            if gains and row.host_bytes:
                found.append(row)
            # The first optimizer that fits is enough; if another plan fits already, only the first one is tried.
            if row.fits or cheapest is not None:
                break
        return found

    def _with_state_on_host(self) -> list[FitRow]:
        """Return rows of optimizers whose state is on the host, each up to the first way that fits."""
        found: list[FitRow] = []
        accumulates = self.recordings.options["accumulation_steps"] > 1
        # Optimizers with state on the host are variants of Adam, so compared with no other optimizer.
        is_adam = next(iter(self.makes)).startswith("adam")
        for name in (one for one in COMPARED_ON_HOST if is_adam and one not in self.makes):
            # An optimizer that frees gradients during backward cannot accumulate, and is tried only if nothing fits.
            if self.whole(name) and (accumulates or any(row.fits for row in found)):
                continue
            case = self._case(name)
            if case.host_bytes > self.host_budget_bytes:
                # The default budget is only that of common machines, and the note says so.
                is_default = self.host_budget_bytes == self.spec.host_memory_bytes
                kind = "common machines have" if is_default else "there are"
                self.notes.append(
                    f"{name} would take {format_bytes(case.host_bytes)} of the host's memory, of which {kind} "
                    f"{format_bytes(self.host_budget_bytes)} for each {self.spec.name}."
                )
                continue
            self.cases[name] = case
            # With gradients there as well, weights on the host may help.
            more = host_ways(self.ways) if self.whole(name) else ()
            for way in (*self.ways, *filter(case.may_fit, more)):
                found.append(case.row(way))
                if found[-1].fits:
                    break
        untimed = dict.fromkeys(row.optimizer for row in found if not self.whole(row.optimizer))
        if untimed:
            self.notes.append(
                f"Times are not predicted for {', '.join(untimed)}: their state or parameters cross the link."
            )
        return found

    def _rows_on_ranks(self) -> tuple[list[FitRow], Callable[[FitRow], FitRow]]:
        """Return the rows on several devices, and the function that adds the largest batch to a row."""
        ranks = RankRows(self)
        rows = ranks.rows()
        if not rows:
            raise PlanError(f"the step cannot be spread over {self.devices} devices. {' '.join(self.notes)}")
        if any(op.name in CHOICES for op in ranks.any_step.recorded.ops):  # else no router's rule was used
            self._say_worst_routing()
        return rows, ranks.with_sizes

    def _say_worst_routing(self) -> None:
        """Add a remark on what the step as it is needs if routers send all tokens to the same experts."""
        # No rule of balanced routing: there is no router, or all rows have the worst routing already.
        if not any(is_rule("balanced", rule) for rule in self.base.rules):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SacplanWarning)  # the sentence below says what is assumed
            worst = self.recordings.at(self.batch, self.seq, routing="worst")
        step = self.step_of(next(iter(self.makes)))
        whole = [one if step is None else with_optimizer(one, step) for one in (worst, self.base)]
        where = "the step as it is"
        if self.devices > 1:
            whole, where = [one.on_ranks(FSDP2(self.devices)) for one in whole], "a rank of FSDP2"
        peak, balanced = (one.peak_bytes for one in whole)
        more = f"{format_difference(peak, balanced)} more" if peak > balanced else "no more"
        self.remarks.append(
            f"routing is taken to be balanced. If all tokens go to the same experts, {where} needs "
            f'{format_bytes(peak)}, {more}: routing="worst" (--routing worst) counts that'
        )

    def _verdict(self, name: str, rows: list[FitRow]) -> Verdict:
        best, asked = recommended(rows), self.recordings.options
        return Verdict(
            model=name, parameters=sum(p.numel() for p in self.recordings.model.parameters()), batch=self.batch,
            seq=self.seq, optimizer=rows[0].optimizer, device=self.spec.name, memory_bytes=self.spec.memory_bytes,
            budget_bytes=self.room.n_bytes, budget=None if self.limit == OF_DEVICE else f"{self.room.n_bytes}B",
            outside=outside_allocator(self.spec, int(self.devices > 1)) if self.room.is_reserved else (),
            rows=tuple(rows), recommended=best,
            larger_devices=() if best is not None or self.devices > 1 else self._larger_devices(rows),
            computed=(*self.notes, _RUN if self.devices == 1 and self.base.runs_compiled else _COMPUTED),
            remarks=tuple(f"{said[0].upper()}{said[1:]}." for said in self.remarks),
            accumulation_steps=asked["accumulation_steps"], devices=self.devices,
            compiled=f", compile={asked['compile']!r}" if asked["compile"] else "",
        )  # fmt: skip

    def _larger_devices(self, rows: list[FitRow]) -> tuple[str, ...]:
        """Return the known GPUs that should hold the smallest row, the smallest first: a guess, as kernels differ."""
        smallest = min(rows, key=lambda row: row.peak_bytes)
        needs = self.cases[smallest.optimizer].needs(smallest)
        named = [resolve_device(name) for name in devices().index]
        able = [spec for spec in named if spec.kind != "cpu" and OF_DEVICE.room(spec).n_bytes >= needs]
        return tuple(spec.name for spec in sorted(able, key=lambda spec: spec.memory_bytes))
