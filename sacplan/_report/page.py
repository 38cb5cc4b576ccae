"""``write_report``: one HTML page with everything that a profile and a plan say; it needs no network."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes
from sacplan._program.program import StorageKind
from sacplan._report.alive import WORKSPACE, AliveGroup, Snapshot, peak_groups, peak_snapshot
from sacplan._report.charts import css_of, frontier_chart, memory_chart, tradeoff_chart
from sacplan._report.curves import distinct_curves
from sacplan._report.inputs import check_frontier, check_plan, decisions_of_plan
from sacplan._report.modules import ModuleRow, RowGroup, grouped, module_rows, totals
from sacplan._report.names import numbers_of, pattern_of, short_op, shown_module
from sacplan._report.timeline import Timeline, timeline_of

if TYPE_CHECKING:
    import pandas as pd

_ALIVE_ROWS = 10
_MOST_ROWS = 250  # of the table of modules; those that matter least are summed up
_KIND_CSS = {kind.name.lower().replace("_", " "): css_of(kind) for kind in StorageKind} | {
    WORKSPACE: css_of(StorageKind.TEMPORARY)
}


def write_report(
    path: str | Path, profile: Profile, plan: Plan | None = None, frontier: pd.DataFrame | None = None
) -> Path:
    """Write a page about a step, and about a plan for it: one file, without anything from the network.

        sacplan.write_report("report.html", profile, plan, sacplan.frontier(profile))

    It shows the headline figures, memory over the step with what is alive at the peak, the frontier, what each
    module keeps and discards and why, and what each kind of module could trade.

    Args:
        path: of the HTML file; its directory must exist.
        profile: from ``sacplan.profile``.
        plan: made from that profile; without one, the step as it is.
        frontier: from ``sacplan.frontier(profile)``.

    Returns:
        The path.

    Raises:
        PlanMismatch: the plan was made from another profile.
        PlanError: a frame that is no frontier.
    """
    path = Path(path)
    path.write_text(report_html(profile, plan, frontier), encoding="utf-8")
    return path


def report_html(profile: Profile, plan: Plan | None = None, frontier: pd.DataFrame | None = None) -> str:
    """The page as text."""
    if frontier is not None:
        check_frontier(frontier)
    before = timeline_of(profile.program, {})
    after = None
    if plan is not None:
        after = timeline_of(profile.program, decisions_of_plan(plan))
        check_plan(profile, plan, after.peak_bytes)
    snapshot = peak_snapshot(profile, plan)
    model = profile.fingerprint.model_class
    sections = [
        _headline(profile, plan, before, after),
        _at_peak(profile, snapshot, after or before, plan),
        _assumptions(profile),
        _memory(profile, plan, before, after, snapshot),
        _frontier(profile, frontier, plan),
        _modules(profile, plan),
        _tradeoffs(profile),
    ]
    template = Template(files("sacplan._report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{model} on {profile.device}"),
        subtitle=_summary(profile, plan),
        sections="\n".join(s for s in sections if s),
    )


def _summary(profile: Profile, plan: Plan | None) -> str:
    peak = format_bytes(profile.peak_bytes)
    if plan is None:
        return f"One training step: {peak} at its peak, {profile.step_ms:.1f} ms (predicted). No plan."
    if not plan.units:
        return f"One training step: {peak} at its peak; the plan discards nothing."
    less = 1 - plan.peak_bytes / profile.peak_bytes
    return (
        f"The plan takes the peak of the step from {peak} to {format_bytes(plan.peak_bytes)} ({less:.0%} less) "
        f"and recomputes for {plan.recompute_ms:.2f} ms ({_share(plan.recompute_ms, plan.step_ms)} of the step)."
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


# --- headline ---------------------------------------------------------------------------------------------


def _headline(profile: Profile, plan: Plan | None, before: Timeline, after: Timeline | None) -> str:
    cards: list[tuple[str, str, str]] = []
    device = (profile.device, f"{profile.trace} trace, {profile.runtime} times")
    if plan is None or after is None:
        cards.append(("Peak", format_bytes(profile.peak_bytes), ""))
        cards.append(("Step", f"{before.end_ms:.2f} ms", f"forward {profile.forward_ms:.2f} ms; predicted"))
        cards.append(("Device", *device))
        return _cards(cards)
    cards.append(
        ("Peak", format_bytes(plan.peak_bytes), f"{format_bytes(profile.peak_bytes)} without the plan")
    )
    if plan.budget_bytes is not None:
        room = plan.budget_bytes - plan.peak_bytes
        note = f"{format_bytes(room)} to spare" if room >= 0 else f"exceeded by {format_bytes(-room)}"
        cards.append(("Budget", format_bytes(plan.budget_bytes), note))
    flops = _share(plan.recompute_flops, plan.step_flops)
    share = _share(plan.recompute_ms, plan.step_ms)
    cards.append(
        ("Recomputation", f"{plan.recompute_ms:.2f} ms", f"{share} of the step's time, {flops} of its FLOPs")
    )
    cards.append(
        ("Lower bound", f"{plan.lower_bound_ms:.2f} ms", "no schedule with this peak recomputes less")
    )
    cards.append(("Step", f"{after.end_ms:.2f} ms", f"{before.end_ms:.2f} ms without the plan; predicted"))
    gap = "" if plan.gap is None else f", gap {plan.gap:.2g}"
    cards.append(("Solver", plan.solver, f"{plan.status}{gap}"))
    cards.append(("Device", *device))
    return _cards(cards)


def _cards(cards: list[tuple[str, str, str]]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=note>{escape(note)}</dd></div>"
        for name, value, note in cards
    )
    return f"<dl class=cards>{items}</dl>"


def _at_peak(profile: Profile, snapshot: Snapshot, timeline: Timeline, plan: Plan | None) -> str:
    program, model = profile.program, profile.fingerprint.model_class
    op = program.ops[snapshot.op]
    at = timeline.peak
    where = shown_module(program, snapshot.op, model)
    waits = int(timeline.during[at])
    again = f", run again for {shown_module(program, waits, model)}" if snapshot.recomputed else ""
    largest = ", ".join(_named(g) for g in peak_groups(profile, snapshot)[:3])
    phase = op.phase.name.lower() if not snapshot.recomputed else "backward"
    what = "With the plan, the peak is" if plan is not None else "The peak is"
    return (
        f"<p>{what} in the {escape(phase)} pass, {timeline.start_ms[at]:.1f} ms into the step, at "
        f"<b>{escape(short_op(op.name))}</b> of <code>{escape(where)}</code>{escape(again)}. "
        f"The largest of what is alive then: {escape(largest)}.</p>"
    )


def _named(group: AliveGroup) -> str:
    size = format_bytes(group.each_bytes)
    times = f"{group.count} × {size}" if group.count > 1 else size
    what = f"{group.kind}s" if group.op == group.kind else group.op
    where = "" if group.module.startswith("(") else f" of {group.module}"
    return f"{what}{where} ({times})"


def _assumptions(profile: Profile) -> str:
    if not profile.assumptions:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in profile.assumptions)
    return f"<details open><summary>What the trace took for granted</summary><ul>{items}</ul></details>"


# --- memory -----------------------------------------------------------------------------------------------


def _memory(
    profile: Profile, plan: Plan | None, before: Timeline, after: Timeline | None, snapshot: Snapshot
) -> str:
    budget = None if plan is None else plan.budget_bytes
    y_bytes = max(before.peak_bytes, budget or 0)
    x_ms = max(before.end_ms, after.end_ms if after is not None else 0.0)
    panels = []
    shown = [("Without a plan", before, peak_snapshot(profile) if plan is not None else snapshot)]
    if after is not None:
        shown.append(("With the plan", after, snapshot))
    for title, timeline, alive in shown:
        said = f"{title}: memory over the step, peak {format_bytes(timeline.peak_bytes)}."
        chart = memory_chart(profile, timeline, budget_bytes=budget, y_bytes=y_bytes, x_ms=x_ms, said=said)
        table = _alive_table(peak_groups(profile, alive), timeline.peak_bytes)
        panels.append(f"<div><h3>{title}</h3>{chart}{table}</div>")
    return (
        f'<section id=memory><h2>Memory over the step</h2><div class="panels n{len(panels)}">'
        f"{''.join(panels)}</div></section>"
    )


def _alive_table(groups: list[AliveGroup], peak_bytes: int) -> str:
    rows = []
    largest = groups[0].n_bytes if groups else 1
    for g in groups[:_ALIVE_ROWS]:
        css = _KIND_CSS.get(g.kind, "k-other")
        made = "" if g.op in g.kind else f"{g.op}{' again' if g.recomputed else ''}, "
        times = f"{g.count} × {format_bytes(g.each_bytes)}" if g.count > 1 else ""
        rows.append(
            f"<tr><td><code>{escape(g.module)}</code><small>{escape(made + g.kind)}</small>"
            f'<i class="bar {css}" style="width:{g.n_bytes / largest:.1%}"></i></td>'
            f"<td class=n>{format_bytes(g.n_bytes)}<small>{times}</small></td></tr>"
        )
    rest = groups[_ALIVE_ROWS:]
    if rest:
        n_bytes, count = sum(g.n_bytes for g in rest), sum(g.count for g in rest)
        rows.append(f"<tr><td>{count:,} smaller ones</td><td class=n>{format_bytes(n_bytes)}</td></tr>")
    return (
        f"<table class=alive><caption>Alive at the peak</caption><tbody>{''.join(rows)}</tbody>"
        f"<tfoot><tr><td>all</td><td class=n>{format_bytes(peak_bytes)}</td></tr></tfoot></table>"
    )


# --- frontier ---------------------------------------------------------------------------------------------


def _frontier(profile: Profile, frame: pd.DataFrame | None, plan: Plan | None) -> str:
    if frame is None:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(row.solver))}</td><td class=n>{format_bytes(int(row.peak_bytes))}</td>"
        f"<td class=n>{row.recompute_share:.2%}</td><td class=n>{escape(str(row.status))}</td></tr>"
        for row in frame.sort_values(["solver", "peak_bytes"], kind="stable").itertuples()
    )
    head = "<tr><th>solver or policy</th><th class=n>peak</th><th class=n>of the step</th><th class=n>status</th></tr>"
    return (
        "<section id=frontier><h2>Frontier</h2><p>What each solver makes of a budget, and the modes that people use "
        "by hand (crosses). The dotted line joins what no schedule with such a peak undercuts.</p>"
        f"{frontier_chart(profile, frame, plan)}<details><summary>The figures</summary><table class=figures>"
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></details></section>"
    )


# --- modules ----------------------------------------------------------------------------------------------

_HEAD = (
    ("module", "text"),
    ("kept", "number"),
    ("discarded", "number"),
    ("recompute ms", "number"),
    ("share", "number"),
    ("why", "text"),
)


def _modules(profile: Profile, plan: Plan | None) -> str:
    rows = module_rows(profile, plan)
    groups = grouped(rows)
    patterns: dict[str, int] = {}
    for row in rows:
        patterns[pattern_of(row.module)] = patterns.get(pattern_of(row.module), 0) + 1
    left_out: list[RowGroup] = []
    if len(groups) > _MOST_ROWS:
        by_weight = sorted(groups, key=lambda g: -g.count * (g.row.kept_bytes + g.row.discarded_bytes))
        kept = {id(g) for g in by_weight[:_MOST_ROWS]}
        left_out = [g for g in groups if id(g) not in kept]
        groups = [g for g in groups if id(g) in kept]
    model = profile.fingerprint.model_class
    body = "".join(_module_row(g, patterns, model) for g in groups)
    head = "".join(
        f"<th data-sort={kind} aria-sort=none class={kind[0]}><button type=button>{name}</button></th>"
        for name, kind in _HEAD
    )
    more = (
        f"<p class=note>{len(left_out)} more rows are in the sum and not in the table.</p>"
        if left_out
        else ""
    )
    return (
        "<section id=modules><h2>Modules</h2><p>What a module's own ops make and autograd asks for; modules inside "
        "of it have rows of their own. Modules that are alike share a row.</p>"
        f'<table class="modules sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        f"<tfoot>{_total_row(rows)}</tfoot></table>{more}</section>"
    )


def _module_row(group: RowGroup, patterns: dict[str, int], model: str) -> str:
    row, count = group.row, group.count
    all_of_it = patterns[pattern_of(row.module)]
    which = ""
    if count > 1 and count == all_of_it:
        which = f"all {count}"
    elif all_of_it > 1 and any(c.isalpha() for c in pattern_of(row.module)):
        numbers = numbers_of(group.members)
        which = f"{count} of {all_of_it}" + (f": {numbers}" if numbers else "")
    title = f"<small>{which}</small>" if which else ""
    cells = [
        f"<td><code>{escape(group.module or model)}</code>{title}</td>",
        _bytes_cell("kept", row.kept_bytes, count),
        _bytes_cell("discarded", row.discarded_bytes, count),
        f'<td class=n data-label="recompute ms" data-v="{count * row.recompute_ms:.6f}">'
        f"{_figure(count * row.recompute_ms, '.2f')}</td>",
        f'<td class=n data-label=share data-v="{count * row.recompute_share:.6f}">'
        f"{_figure(count * row.recompute_share, '.1%')}</td>",
        f"<td class=why>{escape(row.why)}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _bytes_cell(label: str, each: int, count: int) -> str:
    times = f"<small>{count} × {format_bytes(each)}</small>" if count > 1 and each else ""
    value = format_bytes(each * count) if each else "–"
    return f'<td class=n data-label={label} data-v="{each * count}">{value}{times}</td>'


def _figure(value: float, how: str) -> str:
    return format(value, how) if value else "–"


def _total_row(rows: list[ModuleRow]) -> str:
    kept, discarded, ms, _ = totals(rows)
    return (
        f"<tr><td>all</td><td class=n data-label=kept>{format_bytes(kept)}</td>"
        f"<td class=n data-label=discarded>{format_bytes(discarded)}</td>"
        f'<td class=n data-label="recompute ms">{ms:.2f}</td><td class=n></td><td></td></tr>'
    )


# --- trade-offs -------------------------------------------------------------------------------------------


def _tradeoffs(profile: Profile) -> str:
    curves = distinct_curves(profile)
    if not curves:
        return ""
    return (
        "<section id=tradeoffs><h2>What each kind of module can trade</h2><p>Points can be reached exactly. "
        "<span class=swatch-hull>The solid line</span> is the hull through the lowest of them. "
        "<span class=swatch-pwlf>The dashed line</span> is a least-squares fit, which promises more than there is "
        "wherever it is below the hull.</p>"
        f"<div class=grid>{''.join(tradeoff_chart(c) for c in curves)}</div></section>"
    )
