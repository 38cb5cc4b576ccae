"""Commands that compare or explain: ``frontier``, ``report``, ``layouts``, ``devices``, ``show`` and ``diff``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sacplan.cli import options as o
from sacplan.cli import show, sources
from sacplan.cli.command import command
from sacplan.cli.files import check_output, is_ours
from sacplan.cli.origin import origin_of, save
from sacplan.cli.output import CommandResult, rows_table, stage
from sacplan.cli.targets import is_json_file, load_target, users_code
from sacplan.core.writing import replacing
from sacplan.integrations.hf.target import NAMED, TargetError, given


@command(
    "frontier",
    "Peak against recomputation, all solvers and policies.",
    examples=[
        "sacplan frontier profile.json.gz -o curve.csv",
        "sacplan frontier train.py:make --points 4 --no-policies --json",
    ],
)
def frontier(
    source: o.Source,
    *,
    points: o.Points = 8,
    policies: Annotated[bool, o.option("policies", show_default=True)] = True,
    objective: o.Objective = "time",
    technique: o.Techniques = None,
    output: Annotated[Path | None, o.output("the table (.csv)")] = None,
    step: o.StepOptions,
    hf: o.HfOptions,
    force: o.Force = False,
) -> CommandResult:
    """Plans of every solver at several budgets, and the policies that people use by hand."""
    from sacplan.planning.reading import ranks_text

    check_output(output, "curve", force=force)
    # The frontier chooses budgets and solvers itself: of these options only the techniques are the user's.
    allowed = sources.check_early(None, "best", technique)
    read = sources.profile_of(source, step, hf)
    profile = read.profile
    frame = sources.curve(profile, points, objective=objective, policies=policies, **allowed)
    if output is not None:
        # Written next to the old file, which stays whole if writing fails.
        with replacing(output) as part:
            frame.to_csv(part, index=False)
    rows = frame.to_dict("records")
    facts = {
        "command": "frontier",
        **show.target_facts(read.target, output),
        "device": profile.device,
        "ranks": msgspec.to_builtins(profile.ranks),
        "rows": rows,
    }
    notes = show.saved("frontier", output)
    if profile.ranks.devices > 1:
        notes.insert(0, f"all figures are those of {ranks_text(profile.ranks, profile.program)}")
    return CommandResult(facts, [rows_table("frontier", rows)], notes)


@command(
    "report",
    "A page about a step and its plan.",
    examples=[
        "sacplan report profile.json.gz plan.json -o report.html",
        "sacplan report profile.json.gz -o report.html --no-frontier",
    ],
)
def report(
    profile_file: Annotated[str, o.argument("profile_file")],
    plan_file: Annotated[str | None, o.argument("plan_of_profile")] = None,
    *,
    output: Annotated[Path, o.output("the page (.html)")],
    frontier: Annotated[bool, o.option("frontier", show_default=True)] = True,
    points: o.Points = 8,
    force: o.Force = False,
) -> CommandResult:
    """Show what a plan does to a step: memory before and after, the frontier, chunks, and module by module."""
    import sacplan
    from sacplan.planning.reading import ranks_text

    check_output(output, "report", force=force)
    if not is_json_file(profile_file):
        raise TargetError(
            f"{profile_file} is no saved profile; make one: sacplan profile {profile_file} -o profile.json.gz."
        )
    profile = sacplan.Profile.load(profile_file)
    plan = None if plan_file is None else sacplan.Plan.load(plan_file)
    if plan is not None and plan.ranks != profile.ranks:
        raise TargetError(
            f"{plan_file} is for {ranks_text(plan.ranks)}, but {profile_file} is of {ranks_text(profile.ranks)}."
        )
    # The frontier shows what else this plan could have been, so its plans may do the same things.
    allowed = {} if plan is None else {"techniques": plan.provenance.techniques}
    curve = sources.curve(profile, points, **allowed) if frontier else None
    with stage("writing"):
        written = sacplan.Report(profile, plan, curve).write(output)
    facts = {
        "command": "report",
        **show.profile_facts(profile),
        "plan": plan and show.plan_facts(plan),
        "written": str(written),
    }
    return CommandResult(facts, [facts["written"]])


@command(
    "layouts",
    "Which parallelism to use: all meshes of some devices.",
    examples=[
        "sacplan layouts hf:meta-llama/Meta-Llama-3-8B --batch 8 --seq 4096 --devices 8 --device h100",
        "sacplan layouts train.py:make --devices 4 --device cpu --json",
    ],
)
def layouts(
    target: o.Target,
    *,
    devices: Annotated[int, o.option("devices")] = 8,
    asked: o.BudgetOptions,
    output: Annotated[Path | None, o.output("the plan of the fastest (.json)")] = None,
    hf: o.HfOptions,
    force: o.Force = False,
) -> CommandResult:
    """Peak and time of a step, per rank, on each mesh of a number of devices: data, sharded and tensor parallel.

    The batch is of all ranks together. By default an hf: target gets one sample for each of them.
    """
    import sacplan

    check_output(output, "plan", force=force)
    sources.check_early_of_device(asked)
    spec = sources.device_of(asked.device)
    with stage("loading"):
        if hf.batch is None and target.startswith(NAMED):
            hf = dataclasses.replace(hf, batch=devices)  # every rank needs a sample
        loaded = load_target(target, sources.dtype_for(spec, target, hf))
    with stage("tracing and planning", long=True), users_code(f"the step of {target}"):
        answer = sacplan.layouts(
            loaded.model, loaded.batch, devices, device=spec, loss_fn=loaded.loss_fn, optimizer=loaded.optimizer,
            **given(asked, "device"),
        )  # fmt: skip
    # ``best`` raises if no layout fits: there is no plan to save then, and one was asked for.
    if output is not None and answer.best.plan is not None:
        save(answer.best.plan, output, origin_of(loaded))
    frame = answer.to_frame()
    rows = frame.to_dict("records")
    facts = {
        "command": "layouts",
        **show.target_facts(loaded, output),
        **show.facts_of(answer, ("device", "devices", "batch_size", "budget_bytes", "refused")),
        "rows": rows,
    }
    notes = [f"not looked at: {reason}" for reason in answer.refused] + show.saved("plan", output)
    shown = show.sections_shown([answer.in_words()], loaded.facts)
    return CommandResult(facts, [*shown, "", rows_table("layouts", [_shown(row) for row in rows])], notes)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out the times of a step that does not fit, since it cannot run."""
    if row["fits"]:
        return row
    return {**row, "step_ms": None, "recompute_ms": None, "samples_per_s": "does not fit"}


@command("devices", "The devices that are known.", examples=["sacplan devices", "sacplan devices --json"])
def devices() -> CommandResult:
    """The devices that can be planned for: memory, bandwidth, dense TFLOP/s by type. More figures are in --json."""
    import sacplan

    frame = sacplan.devices()
    # A figure that a device does not have is NaN in the frame. JSON has no NaN, so it becomes null.
    rows = frame.astype(object).where(frame.notna(), None).reset_index().to_dict("records")
    cells = [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    return CommandResult({"command": "devices", "devices": rows}, [rows_table("devices", cells)])


@command(
    "show",
    "A saved plan or profile, in words.",
    examples=["sacplan show plan.json", "sacplan show profile.json.gz", "sacplan show plan.json --json"],
)
def show_file(file: Annotated[str, o.argument("saved_file")]) -> CommandResult:
    """Say what a plan does, layer by layer: what is kept, recomputed and runs in slices; or what a profile holds.

    Layers that do the same are shown once.
    """
    import sacplan
    from sacplan.planning.layers import read_layers
    from sacplan.planning.reading import kept_sections, layer_facts, plan_sections
    from sacplan.planning.units import kept_by_layer

    # Any file but a profile is read as a plan, whose loader says what is wrong with it.
    if is_ours(Path(file), "profile"):
        profile = sacplan.Profile.load(file)
        kept = kept_by_layer(profile.program)
        facts = {"what": "profile", **show.profile_facts(profile), "layers": layer_facts(kept)}
        sections = [profile.in_words(), *kept_sections(kept)]
    else:
        plan = sacplan.Plan.load(file)
        facts = {"what": "plan", **show.plan_facts(plan), "layers": layer_facts(read_layers(plan))}
        sections = plan_sections(plan)
    return CommandResult({"command": "show", **facts}, show.sections_shown(sections))
