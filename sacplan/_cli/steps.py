"""Commands about one step: ``profile``, ``plan`` and ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sacplan._cli import options as o
from sacplan._cli import show, sources
from sacplan._cli.exits import TargetError, VerificationFailed
from sacplan._cli.files import check_output, replacing
from sacplan._cli.origin import save
from sacplan._cli.output import print_json, stage
from sacplan._cli.targets import is_json_file, load_target
from sacplan.errors import PlanMismatch, RecipeError, SacplanError

if TYPE_CHECKING:
    from sacplan import Plan, Verification


def profile_command(
    target: o.TargetArgument,
    output: Annotated[Path | None, o.output_option("Where to save the profile (.json, .json.gz).")] = None,
    device: o.TargetDeviceOption = None,
    runtime: o.RuntimeOption = None,
    trace: o.TraceModeOption = None,
    batch: o.BatchOption = None,
    seq: o.SeqOption = None,
    dtype: o.DtypeOption = None,
    optimizer: o.OptimizerOption = None,
    attn: o.AttnOption = None,
    world_size: o.TargetWorldSizeOption = None,
    fsdp_unit: o.FsdpUnitOption = None,
    force: o.ForceOption = False,
    as_json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Record one training step: its peak, its time, and what plans are made from."""
    if output is not None:
        check_output(output, "profile", force)
    if is_json_file(target):
        raise TargetError(
            f"{target} is a file of JSON; profile needs the model itself, for example train.py:make."
        )
    how = sources.TraceOptions(device, runtime, trace, world_size, fsdp_unit)
    read = sources.profile_of(target, how, sources.hf_options(batch, seq, dtype, optimizer, attn))
    profile = read.profile
    if output is not None:
        with stage("writing"), replacing(output) as part:
            save(profile, part, read.origin)
    if as_json:
        print_json(
            {
                "command": "profile",
                **show.target_facts(read.target),
                **show.profile_facts(profile),
                **show.output_fact(output),
            }
        )
        return
    show.show_profile(profile, read.facts)
    show.saved({"profile": output})


def plan_command(
    source: o.SourceArgument,
    budget: Annotated[str, typer.Option(metavar="SIZE", help=o.BudgetHelp, show_default=False)],
    output: Annotated[Path | None, o.output_option("Where to save the plan (.json).")] = None,
    device: o.DeviceOption = None,
    solver: o.SolverOption = "best",
    objective: o.ObjectiveOption = o.Objective.TIME,
    keep: o.KeepOption = None,
    never: o.NeverOption = None,
    runtime: o.RuntimeOption = None,
    trace: o.TraceModeOption = None,
    batch: o.BatchOption = None,
    seq: o.SeqOption = None,
    dtype: o.DtypeOption = None,
    optimizer: o.OptimizerOption = None,
    attn: o.AttnOption = None,
    world_size: o.WorldSizeOption = None,
    fsdp_unit: o.FsdpUnitOption = None,
    force: o.ForceOption = False,
    as_json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Choose what each module discards and recomputes, so that the whole step stays under a budget."""
    if output is not None:
        check_output(output, "plan", force)
    sources.check_early(budget, solver)
    how = sources.TraceOptions(device, runtime, trace, world_size, fsdp_unit)
    read = sources.profile_of(source, how, sources.hf_options(batch, seq, dtype, optimizer, attn))
    plan = sources.planned(read, budget, solver, objective, keep, never)
    if output is not None:
        with replacing(output) as part:
            save(plan, part, read.origin)
    if as_json:
        facts = show.plan_facts(plan) | {"assumptions": list(read.profile.assumptions)}
        print_json({"command": "plan", **show.target_facts(read.target), **facts, **show.output_fact(output)})
        return
    show.show_plan(plan, read.profile, read.facts)
    show.saved({"plan": output})


def verify_command(
    target: o.TargetArgument,
    plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="A saved plan.", show_default=False)],
    run: Annotated[
        o.Mode, typer.Option(help="A fake step, which needs no hardware, or a real one here, measured.")
    ] = o.Mode.FAKE,
    batch: o.PlansBatchOption = None,
    seq: o.PlansSeqOption = None,
    dtype: o.PlansDtypeOption = None,
    optimizer: o.PlansOptimizerOption = None,
    attn: o.PlansAttnOption = None,
    as_json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Run one step with a plan applied, and compare its peak with the plan and the budget.

    An hf: target is made as it was for the plan, whose file says how; options here go before that.
    """
    plan = sources.plan_from(plan_file)
    if run == o.Mode.REAL and plan.ranks.world_size > 1:
        raise TargetError(
            f"--run real: {plan_file} is for {show.ranks_text(plan.ranks)}, and here the whole model would run. A fake "
            "step (--run fake) is that of a rank."
        )
    asked = sources.hf_options(batch, seq, dtype, optimizer, attn)
    if target.startswith("hf:"):
        asked = sources.as_planned(asked, plan, plan_file)
    with stage("loading"):
        loaded = load_target(target, asked, _real_place() if run == o.Mode.REAL else "meta")
    try:
        seen = sources.verified(loaded, plan, run)
    except (PlanMismatch, RecipeError) as error:
        facts = {"command": "verify", **show.target_facts(loaded), "verified": False}
        raise VerificationFailed(str(error), facts) from error
    facts = {"command": "verify", **show.target_facts(loaded), **show.verification_facts(seen)}
    if not seen.within_budget:
        if not as_json:
            show.show_verification(seen, plan, loaded.facts)
        raise _over(seen, plan, facts)
    if as_json:
        print_json(facts)
        return
    show.show_verification(seen, plan, loaded.facts)


def _real_place() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _over(seen: Verification, plan: Plan, facts: dict[str, Any]) -> SacplanError:
    error = VerificationFailed(
        f"the step takes {show.size(seen.peak_bytes)}, over the budget of {show.size(seen.budget_bytes)}; the plan "
        f"says {show.size(seen.predicted_peak_bytes)}.",
        facts,
    )
    hints = ["the optimizer, the loss and all options must be those that the plan was made with"]
    if seen.run == "real":
        hints.append(f"the plan is for {plan.device}; other devices have other kernels")
    error.__notes__ = hints  # type: ignore[attr-defined]
    return error
