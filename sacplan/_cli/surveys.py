"""Commands beyond one plan: ``frontier``, ``report``, ``max-batch``, ``throughput`` and ``devices``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sacplan._cli import capacity, reports, show, sources
from sacplan._cli import options as o
from sacplan._cli.exits import TargetError
from sacplan._cli.files import check_output, replacing
from sacplan._cli.output import print_json, stage


def frontier_command(
    source: o.SourceArgument,
    points: Annotated[int, typer.Option(min=2, metavar="N", help="How many budgets.")] = 8,
    policies: Annotated[
        bool, typer.Option("--policies/--no-policies", help="With the modes that people use by hand.")
    ] = True,
    objective: o.ObjectiveOption = o.Objective.TIME,
    output: Annotated[Path | None, o.output_option("Where to save the table (.csv).")] = None,
    device: o.DeviceOption = None,
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
    """Plans of every solver at several budgets, and the modes that people use by hand."""
    import sacplan

    if output is not None:
        check_output(output, "curve", force)
    how = sources.TraceOptions(device, runtime, trace, world_size, fsdp_unit)
    read = sources.profile_of(source, how, sources.hf_options(batch, seq, dtype, optimizer, attn))
    profile = read.profile
    with stage(f"solving at {points} budgets"):
        frame = sacplan.frontier(profile, points, objective=objective.value, policies=policies)
    if output is not None:
        with replacing(output) as part:
            frame.to_csv(part, index=False)
    if as_json:
        rows = frame.to_dict("records")
        print_json(
            {
                "command": "frontier",
                **show.target_facts(read.target),
                "device": profile.device,
                "ranks": profile.ranks.to_dict(),
                "rows": rows,
                **show.output_fact(output),
            }
        )
        return
    show.show_frontier(frame, profile)
    show.saved({"frontier": output})


def report_command(
    source: o.SourceArgument,
    plan_file: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="A saved plan of it.", show_default=False)
    ] = None,
    output: Annotated[Path | None, o.output_option("Where to save the page (.html).")] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A directory for the figures, PNG and SVG.", show_default=False),
    ] = None,
    memory_trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Where to save the memory timeline, for Perfetto or chrome://tracing.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help=f"Make a plan for it. {o.BudgetHelp}", show_default=False),
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier/--no-frontier", help="With all solvers at several budgets.")
    ] = True,
    points: Annotated[int, typer.Option(min=2, metavar="N", help="Budgets of the frontier.")] = 8,
    device: o.DeviceOption = None,
    runtime: o.RuntimeOption = None,
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
    """What a plan does to a step, to be looked at: memory before and after, the frontier, and module by module."""
    import sacplan

    wanted = reports.Wanted(output, png, memory_trace)
    reports.check(wanted, force)
    if plan_file is not None and budget is not None:
        raise TargetError(f"give a plan ({plan_file}) or a --budget to make one for, not both.")
    if budget is not None:
        sources.check_early(budget, "best")
    plan = None if plan_file is None else sources.plan_from(plan_file)
    how = sources.TraceOptions(device, runtime, None, world_size, fsdp_unit)
    read = sources.profile_of(source, how, sources.hf_options(batch, seq, dtype, optimizer, attn))
    profile = read.profile
    if plan is not None and plan.ranks != profile.ranks:
        raise TargetError(
            f"{plan_file} is for {show.ranks_text(plan.ranks)}, and {source} is of {show.ranks_text(profile.ranks)}."
        )
    if budget is not None:
        plan = sources.planned(read, budget, "best", o.Objective.TIME, None, None)
    curve = None
    if frontier and (output is not None or png is not None):
        with stage(f"solving at {points} budgets"):
            curve = sacplan.frontier(profile, points)
    with stage("writing"):
        written = reports.write(wanted, profile, plan, curve)
    if as_json:
        facts = {"command": "report", **show.target_facts(read.target), **show.profile_facts(profile)}
        print_json(facts | {"plan": plan and show.plan_facts(plan), "written": written})
        return
    for path in written:
        typer.echo(path)


_HeadroomOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Without a budget: what to leave free of the device's memory, 5% or 2GiB. Default: 15%.",
        show_default=False,
    ),
]
_CapacityBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Peak of the whole step: 22GiB, 24GB, or a share of the device's memory, 90%. "
        "Default: its memory less the headroom.",
        show_default=False,
    ),
]
_AtMostOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Look at no larger batch.", show_default=False)
]


def _capacity_command(command: capacity.Command, says: str) -> Callable[..., None]:
    """Both questions take the same options."""

    def run(
        target: o.TargetArgument,
        budget: _CapacityBudget = None,
        device: o.TargetDeviceOption = None,
        headroom: _HeadroomOption = None,
        at_most: _AtMostOption = None,
        solver: o.SolverOption = "best",
        output: Annotated[Path | None, o.output_option("Where to save the plan for it (.json).")] = None,
        seq: o.SeqOption = None,
        dtype: o.DtypeOption = None,
        optimizer: o.OptimizerOption = None,
        attn: o.AttnOption = None,
        force: o.ForceOption = False,
        as_json: o.JsonOption = False,
        debug: o.DebugOption = False,
    ) -> None:
        asked = capacity.Asked(command, target, device, budget, headroom, at_most, solver)
        options = sources.hf_options(None, seq, dtype, optimizer, attn)
        capacity.run(asked, options, output, force, as_json)

    run.__doc__ = f"{says} Other targets than hf: need make_batch."
    return run


max_batch_command = _capacity_command(
    "max-batch", "The largest batch for which a plan stays under the budget."
)
throughput_command = _capacity_command(
    "throughput",
    "The batch and the plan, together, with the most samples per second under the budget (predicted).",
)


def devices_command(as_json: o.JsonOption = False, debug: o.DebugOption = False) -> None:
    """The devices that can be planned for: memory, bandwidth, dense TFLOP/s by type, and where that is from."""
    from sacplan._device.devices import devices

    frame = devices()
    if as_json:
        plain = frame.astype(object).where(frame.notna(), None).reset_index()
        print_json({"command": "devices", "devices": plain.to_dict("records")})
        return
    show.show_devices(frame)
