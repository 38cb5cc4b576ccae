"""The command ``certify``: whether every batch of a run fits, from the lengths of its samples."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sacplan.cli import options as o
from sacplan.cli import sources
from sacplan.cli.command import command
from sacplan.cli.exits import INFEASIBLE
from sacplan.cli.files import check_output
from sacplan.cli.fit import of_length
from sacplan.cli.origin import origin_of, save, seen_in
from sacplan.cli.output import CommandResult, stage
from sacplan.cli.show import facts_of, plan_facts, saved, target_facts
from sacplan.cli.targets import users_code
from sacplan.integrations.hf.target import NAMED, TargetError, given

_FACTS = ("device", "steps", "shapes", "fits", "largest", "advice")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How the loader makes batches, and how many plans there may be for them."""

    tokens: Annotated[int | None, o.option("tokens")] = None
    pad_to_multiple_of: Annotated[int, o.option("pad_to_multiple_of")] = 1
    pack: Annotated[int | None, o.option("pack")] = None
    epochs: Annotated[int, o.option("epochs")] = 1
    seed: Annotated[int, o.option("seed")] = 0
    accumulation_steps: Annotated[int, o.option("accumulation_steps")] = 1
    evaluation: Annotated[Path | None, o.option("evaluation")] = None
    evaluation_batch: Annotated[int | None, o.option("evaluation_batch")] = None
    evaluate_every: Annotated[int | None, o.option("evaluate_every")] = None
    buckets: Annotated[int, o.option("buckets")] = 1


_OUTPUT = o.output("the plan (.json). With --buckets, plan-1.json is the one for the shortest batches")


@command(
    "certify",
    "Does every batch of a run fit.",
    examples=["sacplan certify hf:gpt2 lengths.json --batch 8 --device rtx-4090 --buckets 3 -o plan.json"],
    omit=["solver", "seq"],
)
def certify(
    target: o.Target,
    lengths: Annotated[Path, o.argument("lengths")],
    *,
    asked: o.BudgetOptions,
    run: RunOptions,
    output: Annotated[Path | None, _OUTPUT] = None,
    hf: o.HfOptions,
    force: o.Force = False,
) -> CommandResult:
    """Whether a run on samples of these lengths ever runs out of memory, at which batch, and what to do.

    The exit code is 3 if it does. Of a target other than hf:, make_batch is called with samples and sizes.
    """
    import sacplan
    from sacplan.integrations.hf.models import positions

    paths = [] if output is None else [output]
    if output is not None and run.buckets > 1:
        paths = [output.with_stem(f"{output.stem}-{k}") for k in range(1, run.buckets + 1)]
    for path in paths:
        check_output(path, "plan", force=force)
    sizes = _read(lengths)
    spec = sources.device_of(asked.device)
    # A target's own make_batch takes sizes, too, so it is not called with a batch alone.
    options = hf if target.startswith(NAMED) else dataclasses.replace(hf, batch=None)
    loaded, make_batch = sources.sized_target("certify", target, spec, options)
    if loaded.facts:
        make_batch = functools.partial(of_length, make_batch, loaded.facts.get("seq"))
    with stage("recording and playing", long=True), users_code(f"the step of {target}"):
        answer = sacplan.certify(
            loaded.model, make_batch, sizes, spec, loaded.loss_fn, loaded.optimizer, **given(asked, "device", "solver"),
            batch=int(hf.batch or 1) if run.tokens is None else hf.batch,
            **dataclasses.asdict(run) | {"evaluation": run.evaluation and _read(run.evaluation)},
            longest=positions(loaded.model) if loaded.facts.get("seq") else None,
        )  # fmt: skip
    written = dict(zip(paths, (plan for _, plan in answer.plans), strict=False))
    for path, plan in written.items():
        made_for = seen_in(plan.fingerprint)
        save(plan, path, origin_of(loaded, batch=made_for.batch, seq=made_for.seq))
    facts = {
        "command": "certify",
        **target_facts(loaded),
        **facts_of(answer, _FACTS),
        "rows": [row.figures() for row in answer.rows],
        "plans": [{"shapes": shapes, "plan": plan_facts(plan)} for shapes, plan in answer.plans],
    }
    notes = [note for path in written for note in saved("plan", path)]
    if output is not None and not written:
        notes = [f"no plan {'is needed' if answer.fits else 'is enough'}: none is written"]
    return CommandResult(facts, [str(answer)], notes, exit_code=0 if answer.fits else INFEASIBLE)


def _read(path: Path) -> Any:
    """Return the lengths in a file; ``sacplan.certify`` checks them."""
    import numpy as np

    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else [int(word) for word in text.split()]
    except (OSError, ValueError) as error:
        raise TargetError(
            f"the lengths in {path} cannot be read: {error}. Give integers: .npy, a list as .json, or words as .txt."
        ) from error
