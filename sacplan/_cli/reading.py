"""Commands that read files: ``show`` and ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sacplan._cli import options as o
from sacplan._cli import show, sources
from sacplan._cli.command import command
from sacplan._cli.files import is_ours
from sacplan._cli.output import CommandResult, table

_File = Annotated[
    str, typer.Argument(metavar="FILE", help="A saved plan, or a saved profile.", show_default=False)
]


@command(
    "show",
    "A saved plan or profile, in words.",
    examples=["sacplan show plan.json", "sacplan show profile.json.gz", "sacplan show plan.json --json"],
)
def show_file(file: _File) -> CommandResult:
    """Say what a plan does, layer by layer: what is kept, recomputed and runs in slices; or what a profile holds.

    Layers that do the same are shown once.
    """
    from sacplan._plan.layers import read_layers
    from sacplan._plan.reading import kept_sections, layer_facts, plan_sections
    from sacplan._plan.units import kept_by_layer

    # Anything else is read as a plan, whose loader says what is wrong with it.
    if is_ours(Path(file), "profile"):
        profile = sources.saved_profile(file)
        kept = kept_by_layer(profile.program)
        facts = {"what": "profile", **show.profile_facts(profile), "layers": layer_facts(kept)}
        sections = [profile.in_words(), *kept_sections(kept)]
    else:
        plan = sources.saved_plan(file)
        facts = {"what": "plan", **show.plan_facts(plan), "layers": layer_facts(read_layers(plan))}
        sections = plan_sections(plan)
    return CommandResult({"command": "show", **facts}, show.sections_shown(sections))


@command(
    "diff",
    "What two plans do otherwise.",
    examples=["sacplan diff plan.json plan-cpu.json", "sacplan diff plan.json plan-cpu.json --json"],
)
def diff(first: o.PlanFile, second: o.PlanFile) -> CommandResult:
    """Compare two plans: their figures, and by layer what one of them recomputes and the other does not.

    The exit code is 0 whether they differ or not.
    """
    from sacplan._plan.difference import difference, difference_facts, difference_sections

    found = difference(sources.saved_plan(first), sources.saved_plan(second))
    facts = {"command": "diff", "plans": [first, second], **difference_facts(found)}
    if found.equal:
        return CommandResult(facts, ["the plans are equal"])
    figures = table(["", first, second], [[label, *both] for label, both in found.figures.items()])
    shown = [figures, "", *show.sections_shown(difference_sections(found, (first, second)))]
    # Plans may differ in their figures alone, such as those for two devices.
    return CommandResult(facts, shown if found.layers else [figures, "", "what they recompute is the same"])
