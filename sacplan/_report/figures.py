"""Figures for papers and notebooks, with matplotlib: memory over the step, the frontier, trade-off curves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._report.curves import distinct_curves
from sacplan._report.inputs import check_frontier, check_plan, decisions_of_plan
from sacplan._report.palette import DASHES, FAINT, INK, KIND_COLOURS, MARK, SERIES, STACK, kind_name
from sacplan._report.timeline import Timeline, timeline_of
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MIB = 2**30, 2**20
_FORMATS = ("png", "svg", "pdf")
_THIN = 1 / 400  # of the highest peak: what is never more is under a pixel high, and left out of the legend


def save_figures(
    directory: str | Path,
    profile: Profile,
    plan: Plan | None = None,
    frontier: pd.DataFrame | None = None,
    formats: Iterable[str] = ("png", "svg"),
) -> list[Path]:
    """Write the figures to a directory, which is made if need be.

        sacplan.save_figures("figures", profile, plan, sacplan.frontier(profile))

    ``memory`` always, ``frontier`` if a frame is given, ``tradeoffs`` if any module has something to trade.

    Args:
        formats: of ``"png"``, ``"svg"`` and ``"pdf"``.

    Returns:
        The files that were written.

    Raises:
        PlanError: an unknown format, or a frame that is no frontier; matplotlib is not installed.
        PlanMismatch: the plan was made from another profile.
    """
    formats = [formats] if isinstance(formats, str) else list(formats)
    unknown = [f for f in formats if f not in _FORMATS]
    if unknown or not formats:
        raise PlanError(f"formats={formats!r}: give some of {', '.join(map(repr, _FORMATS))}.")
    figures = {"memory": memory_figure(profile, plan)}
    if frontier is not None:
        figures["frontier"] = frontier_figure(profile, frontier, plan)
    if any(tradeoff.points for tradeoff in profile.tradeoffs.values()):
        figures["tradeoffs"] = tradeoff_figure(profile)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        for suffix in formats:
            path = directory / f"{name}.{suffix}"
            figure.savefig(path, dpi=144)
            written.append(path)
    return written


def memory_figure(profile: Profile, plan: Plan | None = None) -> Figure:
    """Memory over the step, stacked by kind, without the plan and with it.

    The x axis is predicted time: a step that recomputes takes longer. Every op is drawn; nothing is averaged.

    Raises:
        PlanMismatch: the plan was made from another profile.
        PlanError: matplotlib is not installed.
    """
    before = timeline_of(profile.program, {})
    panels = [("without a plan", before)]
    if plan is not None:
        after = timeline_of(profile.program, decisions_of_plan(plan))
        check_plan(profile, plan, after.peak_bytes)
        panels.append(("with the plan", after))
    figure = _figure(5.6 * len(panels), 3.9)
    from matplotlib.patheffects import withStroke

    axes = figure.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    budget = None if plan is None else plan.budget_bytes
    highest = max(before.peak_bytes, budget or 0)
    unit, unit_bytes = _unit(highest)
    halo = withStroke(linewidth=2.5, foreground="white")  # the text may lie on the stack
    for axis, (title, timeline) in zip(axes, panels, strict=True):
        _stack(axis, timeline, unit_bytes, highest * _THIN)
        _plain(axis)
        if budget is not None:
            height = budget / unit_bytes
            axis.axhline(height, color=MARK, linestyle=(0, (5, 3)), linewidth=1, label="budget")
            axis.annotate(
                f"budget {height:.2f} {unit}", (0, height), (4, 3), textcoords="offset points", color=MARK,
                fontsize=8.5, path_effects=[halo],
            )  # fmt: skip
        top, at = timeline.peak_bytes / unit_bytes, float(timeline.start_ms[timeline.peak])
        axis.plot([at], [top], "o", color=INK, markersize=4, label="peak")
        right = at > 0.6 * max(t.end_ms for _, t in panels)
        axis.annotate(
            f"peak {top:.2f} {unit}", (at, top), (-5 if right else 5, 5), textcoords="offset points",
            ha="right" if right else "left", fontsize=8.5, color=INK, path_effects=[halo],
        )  # fmt: skip
        axis.set_title(f"{title}: {timeline.end_ms:.1f} ms", fontsize=10, loc="left", color=INK)
        axis.set_xlabel("time of the step (predicted), ms")
    axes[0].set_xlim(0, max(timeline.end_ms for _, timeline in panels) or 1.0)
    axes[0].set_ylim(0, highest / unit_bytes * 1.12)
    axes[0].set_ylabel(f"alive, {unit}")
    _kinds_legend(figure, axes[0], len(panels))
    return figure


def frontier_figure(profile: Profile, frame: pd.DataFrame, plan: Plan | None = None) -> Figure:
    """Peak of the step against recomputation: solvers as lines, named policies as crosses, the bound dotted.

    Args:
        frame: from ``sacplan.frontier(profile)``.
        plan: marked with a ring.

    Raises:
        PlanError: a frame that is no frontier; matplotlib is not installed.
    """
    frame = check_frontier(frame)
    unit, unit_bytes = _unit(int(frame["peak_bytes"].max()))
    figure = _figure(7.2, 4.3)
    axis = figure.subplots()
    solved = frame[frame["status"] != "policy"]
    for i, (solver, rows) in enumerate(solved.groupby("solver", sort=False)):
        rows = rows.sort_values("peak_bytes")
        dashes = [float(x) for x in DASHES[i % len(DASHES)].split()]
        axis.plot(
            rows["peak_bytes"] / unit_bytes, rows["recompute_share"] * 100, color=SERIES[i % len(SERIES)], marker="o",
            markersize=4, linewidth=1.4, linestyle=(0, dashes) if dashes else "-", label=str(solver),
        )  # fmt: skip
    bound = solved.sort_values("peak_bytes").groupby("peak_bytes")["lower_bound_ms"].max()
    axis.plot(
        bound.index / unit_bytes, bound / (profile.step_ms or 1.0) * 100, color=FAINT, linestyle=":", linewidth=1.4,
        label="no schedule is below",
    )  # fmt: skip
    for row in frame[frame["status"] == "policy"].itertuples():
        at = (row.peak_bytes / unit_bytes, row.recompute_share * 100)
        axis.plot(*at, "x", color=INK, markersize=5)
        axis.annotate(row.solver, at, (5, 3), textcoords="offset points", fontsize=8, color=FAINT)
    if plan is not None:
        share = plan.recompute_ms / plan.step_ms * 100 if plan.step_ms else 0.0
        at = (plan.peak_bytes / unit_bytes, share)
        axis.plot(*at, "o", markersize=11, fillstyle="none", color=MARK, label="the plan")
    _plain(axis)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"peak of the step, {unit}")
    axis.set_ylabel("recomputation, % of the step's time")
    axis.legend(frameon=False, fontsize=8.5)
    return figure


def tradeoff_figure(profile: Profile, most: int = 6) -> Figure:
    """What each distinct kind of module can discard and at what price, with the fits; equal layers once.

    Args:
        most: how many kinds of modules, those that keep the most first.

    Raises:
        PlanError: no module has anything to trade; matplotlib is not installed.
    """
    curves = distinct_curves(profile, most)
    if not curves:
        raise PlanError(
            "no module of this step has anything to trade: autograd keeps nothing that may run again."
        )
    columns = 2 if len(curves) == 4 else min(3, len(curves))
    n_rows = -(-len(curves) // columns)
    figure = _figure(3.7 * columns, 2.9 * n_rows)
    axes = figure.subplots(n_rows, columns, squeeze=False)
    for axis in list(axes.flat)[len(curves) :]:
        axis.set_axis_off()
    for axis, curve in zip(axes.flat, curves, strict=False):
        x, y = zip(*((100 * share, ms) for share, ms in curve.points), strict=True)
        axis.plot(x, y, "o", color=KIND_COLOURS[STACK[0]], markersize=3.5, label="reachable")
        for fit, colour, style in ((curve.hull, SERIES[0], "-"), (curve.pwlf, SERIES[1], (0, (4, 2)))):
            if fit.n_segments:
                x, y = zip(*((100 * share, ms) for share, ms in curve.line(fit)), strict=True)
                axis.plot(x, y, color=colour, linestyle=style, linewidth=1.3, label=fit.kind)
        count = f" ({len(curve.members)} alike)" if len(curve.members) > 1 else ""
        axis.set_title(f"{curve.name}{count}", fontsize=9, loc="left", color=INK)
        axis.set_xlabel(f"discarded, % of {curve.tradeoff.saved_bytes / 2**20:,.0f} MiB", fontsize=8.5)
        _plain(axis)
        axis.set_ylim(bottom=0)
    for row in axes:
        row[0].set_ylabel("recomputation, ms", fontsize=8.5)
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("figures need matplotlib: pip install 'sacplan[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _unit(largest_bytes: int) -> tuple[str, int]:
    return ("GiB", GIB) if largest_bytes >= GIB else ("MiB", MIB)


def _stack(axis: Axes, timeline: Timeline, unit_bytes: int, least_bytes: float) -> None:
    """Areas with vertical steps: a value holds from the start of its op to its end. Thin ones get no label."""
    import numpy as np

    x = np.append(timeline.start_ms, timeline.end_ms)
    base = np.zeros(len(x))
    for kind in STACK:
        column = timeline.kind_bytes[:, kind]
        if not column.any():
            continue
        values = np.append(column, column[-1]) / unit_bytes
        label = kind_name(kind) if column.max() >= least_bytes else f"_{kind_name(kind)}"
        axis.fill_between(
            x, base, base + values, step="post", color=KIND_COLOURS[kind], linewidth=0, label=label
        )
        base = base + values
    axis.plot(x, base, drawstyle="steps-post", color=INK, linewidth=0.5, label="alive")


def _kinds_legend(figure: Figure, axis: Axes, n_panels: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    names = {kind_name(kind) for kind in STACK}
    shown: list[tuple[Any, str]] = [(h, n) for h, n in zip(handles, labels, strict=True) if n in names]
    figure.legend(
        [h for h, _ in shown], [n for _, n in shown], loc="outside lower center", frameon=False, fontsize=8.5,
        ncols=min(len(shown), 4 * n_panels),
    )  # fmt: skip


def _plain(axis: Axes) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    axis.tick_params(colors=FAINT, labelsize=8.5)
    axis.xaxis.label.set_color(FAINT)
    axis.yaxis.label.set_color(FAINT)
