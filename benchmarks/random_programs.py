"""Does any plan change a bit of what a step gives, and is a plan of the planner ever refused? Random programs try it.

    python -m benchmarks.random_programs [--programs N] [--seed N] [--only N] [--offload] [--frozen] [--json FILE]

Each program is a small model of random blocks (``models/random_blocks.py``) and a random way to step it, made from a
seed. Blocks write in place, into views, through .data and under no_grad, draw random numbers, keep buffers and caches
that the first call fills, call custom autograd functions (one overwrites what it saved), share modules, take inner
gradients, and return tensors, tuples or dicts. Steps 2 and 3 of five differ from the recorded one: another batch size,
ops that ran in no recorded step, or another branch.

Every program is trained with five kinds of decisions. Those of the planner at some budget, and those of its policy
"full"; random ones; everything that can be discarded; and adversarial ones: every call site of every unit, whether it
can be discarded or not. After each step, the loss, all gradients, weights, buffers and the state of the generator are
compared, bit for bit, with those of the model without a plan. A refusal (a SacplanError while training) is counted, and
is a failure of the planner's own decisions in a step like the recorded one. Nor may such a step be said to differ from
it, but for the first, which may fill caches.

One program in four is then trained with the planner's decisions on two threads at once. What each drew is noted, and
the model without a plan computes the same step with these numbers. Both draw from the default generator, so they may
be refused.

With ``--offload`` the decisions are others (``harness/mixed_plans.py``), and the file is ``offload_programs.json``:
random options of recompute and offload; of these and chunk, which are compared with the chunks alone, since slices may
round otherwise; and copies of random tensors to the host at random places. Where the profile is of a fake step, both
peaks, of the device and of the host, must be those of a fake step with the plan, to the byte. With ``--frozen`` two
thirds of the parameters are frozen, so that these may wait on the host as well; the file is ``frozen_programs.json``.

A row is a failure; the file also has how many programs and steps were tried, and how many steps were refused.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

import sacplan
from benchmarks.harness.command import Parser
from benchmarks.harness.mixed_plans import mixed_plan, plan_with, scattered_plan
from benchmarks.harness.plans import as_budget, budget_at
from benchmarks.harness.results import RESULTS, Row, write_results
from benchmarks.harness.steps import same_bits
from benchmarks.harness.streams import fake_step
from benchmarks.models.cases import Case
from benchmarks.models.random_blocks import DIM, FORMS, INSTRUCTIONS, Block, Code, Net, tape
from sacplan.core.decisions import as_decisions
from sacplan.core.elements import CallSite
from sacplan.core.program import Phase, Program
from sacplan.planning.units import unit_plans
from sacplan.torch_compat.ops import is_computation

BATCH, LENGTH = 3, 3
STEPS = 5
OWN = ("planned", "full")
"""Decisions that the planner made."""
KINDS = (*OWN, "random", "everything", "adversarial")
OFFLOADING = ("mixed", "with chunks", "scattered")
"""Decisions that offload."""


# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomProgram:
    """A model and how its steps go.

    Attributes:
        seed: it is made from.
        modes, sizes: of each step, the blocks' ``mode`` and the batch size.
        twice: whether a step has two forward passes before its backward pass.
        trace: how it is profiled.
    """

    seed: int
    net: Net
    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    twice: bool
    trace: str
    train: bool

    def batch(self, i: int) -> Tensor:
        """Make the batch of step ``i``; equal each time."""
        return torch.randn(self.sizes[i], LENGTH, DIM, generator=torch.Generator().manual_seed(self.seed + i))

    def for_threads(self) -> bool:
        """Whether threads may run it at once: autocast's cache of weights is shared by all, and emptied by any."""
        codes = [c for b in self.net.blocks for c in (*b.code, *b.extra, *b.branch)]  # type: ignore[misc]
        return not any(name == "autocast" and number % 2 for name, _, _, number in codes)

    def like_recorded(self, i: int) -> bool:
        """Whether step ``i`` is the one that was profiled."""
        return self.modes[i] == "plain" and self.sizes[i] == BATCH

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Compute the loss of one step."""
        loss: Tensor = model(batch)
        return loss + model(batch.flip(0)) if self.twice else loss

    def __str__(self) -> str:
        lines = [
            f"program {self.seed}: {len(self.net.order)} calls of blocks {self.net.order}, trace {self.trace}, "
            f"modes {self.modes}, sizes {self.sizes}{', two forward passes' if self.twice else ''}"
        ]
        for i, block in enumerate(self.net.blocks):
            assert isinstance(block, Block)
            lines.append(
                f"  block {i} ({block.form}): {block.code} extra {block.extra} branch {block.branch}"
            )
        return "\n".join(lines)


def make_program(seed: int, *, frozen: bool = False) -> RandomProgram:
    """Make the program of a seed; ``frozen``: two thirds of its parameters are."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    names = list(INSTRUCTIONS)

    def code(least: int, most: int) -> list[Code]:
        return [
            (rng.choice(names), rng.randrange(3), rng.randrange(4), rng.randrange(100))
            for _ in range(rng.randint(least, most))
        ]

    blocks = [Block(code(1, 4), code(1, 2), code(1, 3), rng.choice(FORMS)) for _ in range(rng.randint(1, 3))]
    order = list(range(len(blocks))) + [rng.randrange(len(blocks)) for _ in range(rng.randint(0, 1))]
    net = Net(blocks, order, rng.random() < 0.3)
    train = rng.random() < 0.9
    net.train(train)
    differ = [rng.choice([("plain", 2), ("plain", 5), ("extra", BATCH), ("branch", BATCH)]) for _ in range(2)]
    steps = [("plain", BATCH)] * 2 + differ + [("plain", BATCH)] * (STEPS - 4)
    modes, sizes = zip(*steps, strict=True)
    draw = random.Random(seed)
    for p in net.blocks.parameters() if frozen else ():
        p.requires_grad_(draw.random() < 1 / 3)
    return RandomProgram(
        seed, net, modes, sizes, rng.random() < 0.15, rng.choice(["fake", "real", "real"]), train
    )


# --- decisions ------------------------------------------------------------------------------------


def decisions(
    program: RandomProgram, profile: sacplan.Profile, kinds: Collection[str] = KINDS
) -> Iterator[tuple[str, sacplan.Plan]]:
    """Yield plans of the kinds that the module's docstring names."""
    rng = random.Random(program.seed)
    at, share, whole = rng.choice([0.0, 0.2, 0.5, 0.8]), rng.choice([0.3, 0.6, 0.9]), rng.random() < 0.3
    if "planned" in kinds:
        smallest = sacplan.plan(profile, "smallest", "greedy")
        budget = as_budget(budget_at(at, smallest.peak_bytes, profile.peak_bytes))
        yield "planned", sacplan.plan(profile, budget, "greedy") if at else smallest
    if "full" in kinds:
        with contextlib.suppress(sacplan.errors.PlanError):  # the blocks keep nothing that could be discarded
            yield "full", sacplan.policy("full", profile=profile, layers="blocks.*")
    units = [""] if whole else [f"blocks.{i}" for i in range(len(program.net.blocks))]
    recorded, anything = profile.program, sacplan.plan(profile, "200%")
    fitting: dict[str, list[Any]] = {}
    every: dict[str, list[Any]] = {}
    for unit in units:
        sites: dict[Any, bool] = {}
        for scope in recorded.calls.get(unit, ()):
            for op, site in recorded.sites(scope).items():
                if not is_computation(recorded.ops[op].name):
                    continue
                fits = recorded.ops[op].recomputable and recorded.ops[op].phase == Phase.FORWARD
                sites[site] = sites.get(site, True) and fits
        every[unit] = list(sites)
        fitting[unit] = [site for site, fits in sites.items() if fits]
    if "random" in kinds:
        times = {
            unit: {site: rng.choice([1, 1, 1, 2]) for site in sites if rng.random() < share}
            for unit, sites in fitting.items()
        }
        yield "random", _deciding(anything, recorded, times)
    if "everything" in kinds:
        once = {unit: dict.fromkeys(sites, 1) for unit, sites in fitting.items()}
        yield "everything", _deciding(anything, recorded, once)
    if "adversarial" in kinds:
        once = {unit: dict.fromkeys(sites, 1) for unit, sites in every.items()}
        yield "adversarial", _deciding(anything, recorded, once)


def offloading(
    program: RandomProgram, profile: sacplan.Profile, kinds: Collection[str] = OFFLOADING
) -> Iterator[tuple[str, sacplan.Plan]]:
    """Yield plans that offload, of the kinds that the module's docstring names."""
    rng = random.Random(program.seed)
    if "mixed" in kinds:
        yield "mixed", mixed_plan(profile, rng, ("recompute", "offload"))
    if "with chunks" in kinds:
        yield "with chunks", mixed_plan(profile, rng)
    if "scattered" in kinds:
        units = [f"blocks.{i}" for i in range(len(program.net.blocks))]
        yield "scattered", scattered_plan(profile, rng, units)


def _deciding(
    plan: sacplan.Plan, recorded: Program, times: Mapping[str, Mapping[CallSite, int]]
) -> sacplan.Plan:
    times = {unit: sites for unit, sites in times.items() if sites}
    units, sequences = unit_plans(recorded, times, times)
    return structs.replace(plan, decisions=as_decisions(times), units=units, sequences=sequences)


# --- steps ----------------------------------------------------------------------------------------


def _step(program: RandomProgram, model: Net, i: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Run step ``i``; return the loss, gradients, and after the optimizer weights and buffers."""
    for block in model.blocks:
        block.mode = program.modes[i]  # type: ignore[assignment]
    optimizer.zero_grad(set_to_none=True)
    loss = program.loss(model, program.batch(i))
    loss.backward()  # type: ignore[no-untyped-call]
    found = [loss.detach()]
    found += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return found + [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@dataclass
class Outcome:
    """The outcome of one program.

    Attributes:
        steps: that were compared.
        discarded, offloaded, weights: call sites of decisions, and parameters that wait on the host.
        predicted: plans whose peaks are those of a fake step.
        skipped: why the program was not tried, if it was not.
        refused: kind of decisions, and of step ("recorded" or "differs"), to how many steps were refused.
        failures: wrong bits, and refusals and differences that should not be.
    """

    seed: int
    steps: int = 0
    discarded: int = 0
    offloaded: int = 0
    weights: int = 0
    predicted: int = 0
    threaded: int = 0
    skipped: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(
    seed: int, *, kinds: Collection[str] = KINDS, threads: bool | None = None, frozen: bool = False
) -> Outcome:
    """Make the program of a seed, and try decisions on it.

    Args:
        seed: of the program.
        kinds: of decisions.
        threads: whether it also runs on several threads; by default one program in four does.
        frozen: see ``make_program``.
    """
    program, outcome = make_program(seed, frozen=frozen), Outcome(seed)
    plain = copy.deepcopy(program.net)
    optimizer = _optimizer(plain)
    expected: list[list[Tensor]] = []
    states: list[Tensor] = []
    try:
        for i in range(STEPS):
            torch.manual_seed(seed + i)
            expected.append(_step(program, plain, i, optimizer))
            states.append(torch.get_rng_state())
    except RuntimeError as error:  # autograd's own rules: the program is not one that trains
        outcome.skipped = f"step {len(expected)} without a plan: {str(error)[:100]}"
        if len(expected) < 2:
            return outcome
    profiled = copy.deepcopy(program.net)
    try:
        profile = sacplan.profile(profiled, program.batch(0), program.loss, device="cpu", trace=program.trace)
    except sacplan.errors.TraceError:
        if program.trace == "real":
            raise
        profile = sacplan.profile(profiled, program.batch(0), program.loss, device="cpu", trace="real")
    own: list[sacplan.Plan] = []
    plain_steps = expected, states
    for kind, plan in (*decisions(program, profile, kinds), *offloading(program, profile, kinds)):
        if kind in (*OWN, "mixed"):
            own.append(plan)  # and on several threads
        outcome.discarded += sum(map(len, plan.discarded.values()))
        outcome.offloaded += len(plan.offloaded)
        outcome.weights += len(plan.offloaded_weights)
        expected, states = plain_steps
        if kind == "with chunks" and plan.chunks:
            expected, states = _steps_with(program, plan_with(profile, plan.chunks), len(expected))
        if kind in OFFLOADING and profile.trace == "fake":
            _compare_peaks(program, kind, plan, outcome)
        model = copy.deepcopy(program.net)
        optimizer = _optimizer(model)
        handle = sacplan.apply(model, plan, check=kind in OWN or seed % 2 == 0)
        for i, wanted in enumerate(expected):
            torch.manual_seed(seed + i)
            handle.forget_differences()
            try:
                with _differences_expected():
                    found = _step(program, model, i, optimizer)
            except sacplan.SacplanError as error:
                like = program.like_recorded(i)
                outcome.refused[f"{kind}, {'recorded' if like else 'differs'}"] += 1
                if kind in OWN and like:
                    outcome.failures.append(f"{kind}: step {i} refused: {error}")
                break
            outcome.steps += 1
            if i and program.like_recorded(i) and handle.differences:  # the first step may fill caches
                outcome.failures.append(f"{kind}: step {i} is said to differ: {handle.differences[0]}")
            if not _same(found, wanted) or not torch.equal(torch.get_rng_state(), states[i]):
                outcome.failures.append(f"{kind}: wrong bits in step {i}")
                break
    if (seed % 4 == 0 if threads is None else threads) and program.for_threads():
        for plan in own:
            _run_on_threads(program, plan, len(expected), outcome)
    return outcome


def _steps_with(
    program: RandomProgram, plan: sacplan.Plan, steps: int
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return what the steps give with a plan, and the states of the generator after them; up to a refusal."""
    model = copy.deepcopy(program.net)
    optimizer = _optimizer(model)
    sacplan.apply(model, plan)
    found: list[list[Tensor]] = []
    states: list[Tensor] = []
    with _differences_expected(), contextlib.suppress(sacplan.SacplanError):
        for i in range(steps):
            torch.manual_seed(program.seed + i)
            found.append(_step(program, model, i, optimizer))
            states.append(torch.get_rng_state())
    return found, states


def _compare_peaks(program: RandomProgram, kind: str, plan: sacplan.Plan, outcome: Outcome) -> None:
    """Note a failure if the peaks of a plan are not those of a fake step with it."""
    found, said = peaks_of_fake_step(program, plan), (plan.peak_bytes, plan.host_bytes)
    outcome.predicted += found == said
    if found != said:
        outcome.failures.append(f"{kind}: device and host take {found} bytes, {said} were predicted")


def peaks_of_fake_step(program: RandomProgram, plan: sacplan.Plan) -> tuple[int, int]:
    """Return the peaks of the device and of the host in a fake step with a plan."""
    case = Case(copy.deepcopy(program.net), program.batch(0), program.loss)
    seen = fake_step(case, plan, "cpu").program.footprint
    return seen.peak_bytes, seen.host_peak_bytes


@contextlib.contextmanager
def _differences_expected() -> Iterator[None]:
    """Hide the warning that a step is not the recorded one; ``Handle.differences`` says it, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step is not the one", sacplan.SacplanWarning)
        yield


def _run_on_threads(program: RandomProgram, plan: sacplan.Plan, steps: int, outcome: Outcome) -> None:
    """Train two models with the plan at once; a model without it computes what each should have got."""
    planned = [copy.deepcopy(program.net) for _ in range(2)]
    tapes: list[list[list[Tensor]]] = [[], []]
    found: list[list[list[Tensor]]] = [[], []]
    errors: list[tuple[int, BaseException]] = []

    def train(which: int) -> None:
        model = planned[which]
        optimizer = _optimizer(model)
        try:
            for i in range(steps):
                tape.drawn = []
                found[which].append(_step(program, model, i, optimizer))
                tapes[which].append(tape.drawn)
        except BaseException as error:
            errors.append((len(found[which]), error))  # told below
        finally:
            tape.drawn = None

    for model in planned:
        sacplan.apply(model, plan)
    workers = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    with _differences_expected():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for i, error in errors:
        if not isinstance(error, sacplan.SacplanError):
            raise error
        like = program.like_recorded(i)
        outcome.refused[f"threads, {'recorded' if like else 'differs'}"] += 1
        if like and "another thread drew" not in str(error):  # both draw from the default generator
            outcome.failures.append(f"threads: step {i} refused: {error}")
    for results, drawn in zip(found, tapes, strict=True):
        plain = copy.deepcopy(program.net)
        optimizer = _optimizer(plain)
        for i, (result, numbers) in enumerate(zip(results, drawn, strict=False)):
            tape.given = list(numbers)
            try:
                wanted = _step(program, plain, i, optimizer)
            finally:
                tape.given = None
            outcome.threaded += 1
            if not _same(result, wanted):
                outcome.failures.append(f"threads: wrong bits in step {i}")
                break


def main() -> None:
    parser = Parser(__doc__, "random_programs.json")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--only", type=int, help="one program, shown; no figures are written")
    parser.add_argument("--offload", action="store_true", help="decisions that offload")
    parser.add_argument("--frozen", action="store_true", help="most parameters are frozen")
    torch.set_num_threads(1)
    arguments = parser.begin()
    kinds = OFFLOADING if arguments.offload else KINDS
    if arguments.offload and arguments.json == RESULTS / "random_programs.json":
        arguments.json = RESULTS / f"{'frozen' if arguments.frozen else 'offload'}_programs.json"
    if arguments.only is not None:
        print(make_program(arguments.only))
        print(run(arguments.only, kinds=kinds, threads=True, frozen=arguments.frozen))
        return
    began = time.monotonic()
    total, refused = Counter[str](), Counter[str]()
    rows: list[Row] = []

    def write() -> None:
        more = {"first_seed": arguments.seed, "frozen": arguments.frozen, "total": total, "refused": refused}
        write_results(arguments.json, rows, **more)

    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        outcome = run(seed, kinds=kinds, frozen=arguments.frozen)
        total.update(
            programs=1, tried=outcome.discarded + outcome.offloaded > 0, steps=outcome.steps,
            threaded_steps=outcome.threaded, discarded_call_sites=outcome.discarded,
            offloaded_tensors=outcome.offloaded, offloaded_weights=outcome.weights, peaks_predicted=outcome.predicted,
            failed=bool(outcome.failures),
        )  # fmt: skip
        refused.update(outcome.refused)
        for failure in outcome.failures:
            rows.append({"seed": seed, "failure": failure})
            print(f"program {seed}: {failure}", flush=True)
        if total["programs"] % 50 == 0:
            print(
                f"{total['programs']} programs, {total['steps']} steps, {total['failed']} failed", flush=True
            )
            write()  # an interrupted run leaves what it has
    print(f"{dict(total)}, refused steps: {dict(refused)}, {time.monotonic() - began:.0f} s")
    write()


if __name__ == "__main__":
    main()
