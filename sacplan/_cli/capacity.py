"""What ``sacplan max-batch`` and ``sacplan throughput`` do: they differ in the question only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sacplan._cli import show, sources
from sacplan._cli.exits import TargetError
from sacplan._cli.files import check_output, replacing
from sacplan._cli.hf import HfOptions
from sacplan._cli.origin import Origin, save
from sacplan._cli.output import Column, print_json, print_pairs, print_table, stage
from sacplan._cli.targets import Target, load_target, users_code

if TYPE_CHECKING:
    from sacplan._plan.capacity import Capacity, CapacityPoint


Command = Literal["max-batch", "throughput"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as the command line puts it."""

    command: Command
    target: str
    device: str | None
    budget: str | None
    headroom: str | None
    at_most: int | None
    solver: str


def run(asked: Asked, options: HfOptions, output: Path | None, force: bool, as_json: bool) -> None:
    """Look for the batch, show it, and save its plan."""
    if output is not None:
        check_output(output, "plan", force)
    sources.check_early(asked.budget, asked.solver)
    spec = sources.resolved_device(asked.device)
    with stage("loading"):
        target = load_target(asked.target, options)
    hints = sources.with_hints(Origin.of(target), None)  # these commands look at one device
    with stage("tracing and solving") as say, users_code(f"the step of {target.name}"), hints:
        found = _search(asked, target, spec, lambda point: say(_words(point)))
    if output is not None:
        with replacing(output) as part:
            save(found.plan, part, Origin.of(target, batch=found.batch_size))
    # the facts are of the target as it was loaded, with its own batch
    facts = {k: v for k, v in target.facts.items() if k != "batch"}
    if as_json:
        named = {"command": asked.command, "target": target.name, **({"hf": facts} if facts else {})}
        print_json(named | _facts(found) | show.output_fact(output))
        return
    _show(found, facts)
    show.saved({"plan": output})


def _search(asked: Asked, target: Target, spec: Any, progress: Callable[[CapacityPoint], Any]) -> Capacity:
    from sacplan._plan.capacity import max_batch, throughput

    if target.make_batch is None:
        raise TargetError(
            f"{asked.command} looks at batches of many sizes, and {target.name} makes one. Return a mapping with the "
            "key make_batch as well, a function of the batch size: make_batch=lambda n: torch.randn(n, 512)."
        )
    ask = max_batch if asked.command == "max-batch" else throughput
    return ask(
        target.model,
        target.make_batch,
        asked.budget,
        spec,
        loss_fn=target.loss_fn,
        optimizer=target.optimizer,
        headroom=asked.headroom,
        solver=asked.solver,
        at_most=asked.at_most,
        progress=progress,
    )


def _words(point: CapacityPoint) -> str:
    return f"batch {point.batch_size} {'fits' if point.feasible else 'does not fit'}"


def _facts(found: Capacity) -> dict[str, Any]:
    return {
        "batch_size": found.batch_size,
        "samples_per_s": found.samples_per_s,
        "step_ms": found.step_ms,
        "budget_bytes": found.budget_bytes,
        "headroom_bytes": found.headroom_bytes,
        "unplanned_batch_size": found.unplanned_batch_size,
        "largest_batch_size": found.largest_batch_size,
        "bounded_by": found.bounded_by,
        "plan": show.plan_facts(found.plan),
        "points": [asdict(p) for p in found.points],
    }


def _show(found: Capacity, facts: dict[str, Any]) -> None:
    limit = " (--at-most)" if found.bounded_by == "at_most" else ""
    plan = found.plan
    print_pairs(
        [
            *(show.target_pairs(facts) or [("model", plan.fingerprint.model_class)]),
            ("device", f"{found.device}, {show.size(found.headroom_bytes)} left free"),
            ("budget", show.size(found.budget_bytes)),
            ("batch", str(found.batch_size)),
            (
                "largest",
                f"{found.unplanned_batch_size} without a plan, {found.largest_batch_size} with one{limit}",
            ),
            ("samples/s", f"{found.samples_per_s:.2f} (predicted)"),
            ("planned", show.size(plan.peak_bytes)),
            (
                "step",
                f"{found.step_ms:.2f} ms, {plan.recompute_ms:.2f} ms of it recomputation",
            ),
        ]
    )
    columns = [
        Column(t, numbers=True) for t in ("batch", "unplanned", "planned", "ms", "ms again", "samples/s")
    ]
    print_table([*columns, Column("")], [_row(p, found) for p in found.points])


def _row(point: CapacityPoint, found: Capacity) -> list[str]:
    from sacplan._program.budget import format_bytes

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    verdict = (
        "the answer" if point.batch_size == found.batch_size else "" if point.feasible else "does not fit"
    )
    return [
        str(point.batch_size),
        format_bytes(point.unplanned_peak_bytes),
        format_bytes(point.peak_bytes) if point.feasible and point.peak_bytes is not None else "",
        figure(point.step_ms),
        figure(point.recompute_ms),
        figure(point.samples_per_s),
        verdict,
    ]
