"""The commands ``max-batch`` and ``throughput``. They search for a batch size, and differ only in the question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from sacplan.cli import options as o
from sacplan.cli import show, sources
from sacplan.cli.command import CommandEntry, command
from sacplan.cli.files import check_output
from sacplan.cli.origin import origin_of, save
from sacplan.cli.output import CommandResult, rows_table, stage
from sacplan.cli.targets import users_code
from sacplan.integrations.hf.target import ModelOptions, given

_FACTS = (
    "batch_size", "samples_per_s", "step_ms", "budget_bytes", "unplanned_batch_size", "largest_batch_size",
    "bounded_by",
)  # fmt: skip
_OUTPUT = o.output("the plan for it (.json)")


def _search_command(name: str, short: str, said: str, *examples: str) -> CommandEntry:
    """Return a command that searches for a batch size; ``said`` is its help."""

    def search(
        target: o.Target,
        *,
        asked: o.CapacityOptions,
        output: Annotated[Path | None, _OUTPUT] = None,
        hf: o.HfOptions,
        force: o.Force = False,
    ) -> CommandResult:
        return _search(name, target, asked, output, hf, force)

    search.__doc__ = f"{said} Other targets than hf: need make_batch."
    return command(name, short, examples=examples, omit=["batch"])(search)


max_batch = _search_command(
    "max-batch",
    "The largest batch that fits with a plan.",
    "The largest batch for which a plan stays under the budget.",
    "sacplan max-batch hf:gpt2 --seq 1024 --device rtx-4090 -o plan.json",
    "sacplan max-batch train.py:make --budget 2GiB --at-most 64",
)
throughput = _search_command(
    "throughput",
    "The batch with the most samples per second.",
    "The batch and the plan, together, with the most samples per second under the budget (predicted).",
    "sacplan throughput train.py:make --budget 2GiB --at-most 8 --json",
    "sacplan throughput hf:bert-base --seq 512 --device a100-40gb",
)


def _search(
    question: str, name: str, asked: o.CapacityOptions, output: Path | None, hf: ModelOptions, force: bool
) -> CommandResult:
    import sacplan

    # What can be refused without the model is refused first: loading takes seconds, and the search may take minutes.
    check_output(output, "plan", force=force)
    sources.check_early_of_device(asked)
    spec = sources.device_of(asked.device)
    target, make_batch = sources.sized_target(question, name, spec, hf)
    search = sacplan.max_batch if question == "max-batch" else sacplan.throughput
    with stage("tracing and planning", long=True), users_code(f"the step of {name}"):
        answer = search(
            target.model,
            make_batch,
            device=spec,
            loss_fn=target.loss_fn,
            optimizer=target.optimizer,
            **given(asked, "device"),
        )
    # ``verify`` reads the batch from the plan's file, and the plan is for the batch that was found.
    save(answer.plan, output, origin_of(target, batch=answer.batch_size))
    facts: dict[str, Any] = {"command": question, **show.target_facts(target, output)}
    facts.get("hf", {}).pop("batch", None)  # the target was loaded with this batch; the answer is another
    facts |= {
        **show.facts_of(answer, _FACTS),
        "fastest_batch_size": answer.fastest.batch_size,
        "outside": [one._asdict() for one in answer.outside],
        "plan": show.plan_facts(answer.plan),
        "points": [point.figures() for point in answer.points],
    }
    # The order matters: if the fastest size is also the answer, its row says "the answer".
    says = {answer.fastest.batch_size: "the fastest of these", answer.batch_size: "the answer"}
    rows = [
        point.figures()
        | {
            # If no plan fits, ``peak_bytes`` is the smallest peak that was reached, which no plan has.
            "peak_bytes": point.peak_bytes if point.fits else None,
            "says": says.get(point.batch_size, "") if point.fits else "does not fit",
        }
        for point in answer.points
    ]
    shown = show.sections_shown([answer.in_words()], facts.get("hf"))
    return CommandResult(facts, [*shown, "", rows_table("points", rows)], show.saved("plan", output))
