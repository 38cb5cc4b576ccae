"""Commands about one step: ``profile``, ``plan`` and ``verify``."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from sacplan.cli import options as o
from sacplan.cli import show, sources
from sacplan.cli.command import command
from sacplan.cli.exits import VerificationFailed
from sacplan.cli.files import check_output
from sacplan.cli.origin import save
from sacplan.cli.output import CommandResult, stage
from sacplan.cli.targets import is_json_file, load_target, not_a_model, users_code
from sacplan.errors import PlanMismatch, RecipeError
from sacplan.integrations.hf.target import NAMED, TargetError, hinted


@command(
    "profile",
    "Record one training step.",
    examples=[
        "sacplan profile train.py:make --device h100 -o profile.json.gz",
        "sacplan profile hf:gpt2 --batch 16 --seq 1024 -o profile.json.gz",
        "sacplan profile hf:config.json --dtype float32 --optimizer none --json",
    ],
)
def profile(
    target: o.Target,
    *,
    output: Annotated[Path | None, o.output("the profile (.json, .json.gz)")] = None,
    step: o.StepOptions,
    hf: o.HfOptions,
    force: o.Force = False,
) -> CommandResult:
    """Record one training step: its peak, its time, and everything that a plan is made from."""
    check_output(output, "profile", force=force)
    # A saved profile is a source of plans, but there is nothing in it to record.
    if is_json_file(target):
        raise not_a_model(target)
    read = sources.profile_of(target, step, hf)
    with stage("writing"):
        save(read.profile, output, read.origin)
    facts = {**show.target_facts(read.target, output), **show.profile_facts(read.profile)}
    shown = show.sections_shown([show.profile_section(read.profile)], facts.get("hf"))
    return CommandResult(
        {"command": "profile", **facts}, shown, show.remarks(read.profile, "profile", output)
    )


@command(
    "plan",
    "Choose what to discard, under a budget.",
    examples=[
        "sacplan plan train.py:make --device rtx-4090 -o plan.json",
        "sacplan plan profile.json.gz --budget 70% --objective flops --json",
        "sacplan plan train.py:make --budget 60% --technique recompute --technique chunk",
        "sacplan plan train.py --budget 90% --keep aten.gelu --never 'layers.0*'",
        "sacplan plan hf:meta-llama/Meta-Llama-3-8B --seq 4096 --optimizer adamw-fused --budget 70GiB -o llama.json",
        "sacplan plan hf:meta-llama/Meta-Llama-3-8B --device h100 --world-size 8 --fsdp-unit 'model.layers.*' "
        "--fsdp-unit '' --budget 60GiB --batch 1 --seq 8192",
        "sacplan plan hf:meta-llama/Meta-Llama-3-8B --batch 8 --seq 4096 --mesh dp=2,tp=4 --budget 60GiB",
    ],
)
def plan(
    source: o.Source,
    *,
    budget: o.Budget = None,
    host_budget: o.HostBudget = None,
    output: Annotated[Path | None, o.output("the plan (.json)")] = None,
    solver: o.Solver = "best",
    objective: o.Objective = "time",
    keep: o.Keep = None,
    never: o.Never = None,
    technique: o.Techniques = None,
    mesh: o.Mesh = None,
    step: o.StepOptions,
    hf: o.HfOptions,
    force: o.Force = False,
) -> CommandResult:
    """Choose what each module discards and recomputes, so that the whole step stays under a budget.

    Without one, what torch reserves on the GPU has to fit there, beside the CUDA context.
    """
    import sacplan
    from sacplan.planning.reading import plan_sections

    # What is wrong with the file or with options is reported before the recording, which may take minutes.
    check_output(output, "plan", force=force)
    allowed = sources.check_early(budget, solver, technique)
    read = sources.profile_of(source, step, hf)
    pins: dict[str, Any] = {"keep": tuple(keep or ()), "never": tuple(never or ())}
    how = {"host_budget": host_budget, **allowed, **sources.mesh_of(mesh, allowed)}
    with stage("planning"):
        made = sacplan.plan(read.profile, budget, solver, objective=objective, **pins, **how)
    save(made, output, read.origin)
    target = show.target_facts(read.target, output)
    # The plan may have chosen a mesh. Assumptions and figures are then those of a rank on it.
    profile = read.profile.on_ranks(made.ranks)
    facts = {
        "command": "plan",
        **target,
        **show.plan_facts(made),
        "device_memory_bytes": profile.device_memory_bytes,
        "assumptions": list(profile.assumptions),
    }
    shown = show.sections_shown(plan_sections(made), target.get("hf"))
    return CommandResult(facts, shown, show.remarks(profile, "plan", output))


@command(
    "verify",
    "Run one step with a plan applied.",
    examples=[
        "sacplan verify train.py:make plan.json",
        "sacplan verify train.py:make plan-cpu.json --run real",
        "sacplan verify hf:meta-llama/Meta-Llama-3-8B llama.json",
    ],
)
def verify(
    target: o.Target,
    plan_file: o.PlanFile,
    *,
    run: Annotated[o.Run, o.option("run", show_default=True)] = "fake",
    hf: o.PlannedHfOptions,
) -> CommandResult:
    """Run one step with a plan applied, and compare its peak with the plan and the budget.

    An hf: target is made as it was for the plan, whose file says how; options given here take precedence.
    """
    import sacplan
    from sacplan.planning.reading import ranks_text

    plan = sacplan.Plan.load(plan_file)
    if run == "real" and plan.ranks.devices > 1:
        raise TargetError(
            f"--run real: {plan_file} is for {ranks_text(plan.ranks)}, but the whole model would run here. Use "
            "--run fake, whose step is that of one rank."
        )
    options = sources.as_planned(hf, plan, plan_file) if target.startswith(NAMED) else hf
    # A real step needs weights on its device, though random ones will do. A fake step needs none.
    with stage("loading"):
        import torch

        here = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load_target(target, options, here if run == "real" else "meta")
    facts = {"command": "verify", **show.target_facts(loaded)}
    # A plan for inference was made from the forward pass alone.
    trains = plan.provenance.mode == "train"
    loss_fn, optimizer = (loaded.loss_fn, loaded.optimizer) if trains else (None, None)
    steps = "running three real steps: one without the plan, two with it" if run == "real" else "verifying"
    try:
        with (
            stage(steps, long=run == "real"),
            users_code(f"the step of {target}"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", sacplan.errors.SumOfOutputsWarning)  # the assumptions report it
            seen = sacplan.verify(loaded.model, loaded.batch, plan, loss_fn, optimizer, run=run)
    # The plan is not one of this step. That is a failed verification, and not bad input.
    except (PlanMismatch, RecipeError) as error:
        raise VerificationFailed(str(error), CommandResult({**facts, "verified": False}, ())) from error
    answer = CommandResult(
        {**facts, "verified": seen.within_budget, **asdict(seen)},
        show.sections_shown([seen.in_words()], loaded.facts),
    )
    if seen.within_budget:
        return answer
    hints = ["the optimizer, the loss and all options must be those that the plan was made with"]
    if run == "real":
        hints.append(f"the plan is for {plan.device}; other devices have other kernels")
    message = (
        f"the step takes {show.size(seen.peak_bytes)}, over the budget of {show.size(seen.budget_bytes)}; the plan "
        f"says {show.size(seen.predicted_peak_bytes)}."
    )
    # The figures are shown nevertheless: they say by how much the prediction was off.
    raise hinted(VerificationFailed(message, answer), *hints)
