"""Draw figures with matplotlib: memory over the step, and the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sacplan.core.budget import format_bytes
from sacplan.errors import PlanError
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.report.palette import (
    DASHES,
    FAINT,
    INK,
    MARK,
    PAGE,
    SERIES,
    STACK,
    kind_colour,
)
from sacplan.report.panels import Panel, buckets_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Size = tuple[float, float]

GIB, MIB = 2**30, 2**20
BUCKETS = 480
"""The number of moments of a step that a small chart shows."""

_FRONTIER_COLUMNS = ("solver", "peak_bytes", "recompute_share", "added_share", "lower_bound_ms", "status")
_THIN = 1 / 400  # share of the highest peak below which an area is under a pixel high and not in the legend
_LETTER = 0.62  # approximate width of a letter, in font sizes
_FONT = 8.5
_MARKS = ("x", "^", "s", "v", "D", "P", "*", "<", ">")  # of policies
_HANDLE = 7  # width, in letters, of the line or mark next to a name in a legend
_ABOVE = 10.0  # points from a peak up to its name, since the line of a budget may touch the peak


def check_frontier(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with a column ``cost_share``: recomputation and chunks as a share of the step's time.

    Raises:
        PlanError: ``sacplan.frontier`` has not returned this frame.
    """
    missing = [c for c in _FRONTIER_COLUMNS if c not in getattr(frame, "columns", ())]
    if missing or not len(frame):
        what = f"has no column {', '.join(map(repr, missing))}" if missing else "has no rows"
        raise PlanError(f"the frontier {what}. Give the frame that sacplan.frontier(profile) returns.")
    return frame.assign(cost_share=frame["recompute_share"] + frame["added_share"])


def has_chunks(frame: pd.DataFrame) -> bool:
    """Return whether any plan of a frontier runs something in slices."""
    return bool(frame["added_share"].any())


def draw_memory(
    panels: Sequence[Panel],
    scale: Sequence[Panel],
    size: Size,
    *,
    columns: int | None = None,
    sampled: bool = False,
) -> Figure:
    """Draw panels side by side, or in rows.

    Args:
        panels: what is drawn.
        scale: the panels that have to fit the axes, so that charts can be compared.
        size: of the figure, in inches.
        columns: how many stand side by side; by default all.
        sampled: draw only as many moments as can be told apart, for a small file.
    """
    x_ms = max(p.end_ms for p in scale) or 1.0
    highest = max(max(p.peak_bytes, p.budget_bytes or 0) for p in scale)
    unit, unit_bytes = _unit(highest)
    with _style() as new_figure:
        figure = new_figure(figsize=size, layout="constrained")
        columns = columns or len(panels)
        grid = figure.subplots(-(-len(panels) // columns), columns, sharey=True, sharex=True, squeeze=False)
        axes = grid.ravel()[: len(panels)]
        for unused in grid.ravel()[len(panels) :]:
            unused.set_axis_off()
        # Axes are shared, so that panels can be compared: this sets the limits of all.
        axes[0].set_xlim(0, x_ms)
        axes[0].set_ylim(0, highest / unit_bytes * 1.25)
        for i, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
            if i % columns == 0:
                axis.set_ylabel(f"alive, {unit}")
            if i + columns >= len(panels):
                axis.set_xlabel("time of the step (predicted), ms")
            axis.set_title(f"{panel.title}: {panel.end_ms:.1f} ms")
            _stack(axis, panel, unit_bytes, highest * _THIN, x_ms / BUCKETS if sampled else None)
            if panel.budget_bytes is not None:
                # Named in the legend only: next to the line, the name would cover the areas.
                axis.axhline(
                    panel.budget_bytes / unit_bytes,
                    color=MARK,
                    linestyle=(0, (5, 3)),
                    linewidth=1,
                    label=f"budget {format_bytes(panel.budget_bytes)}",
                )
        budgets = {
            label: line
            for axis in axes
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
            if label.startswith("budget ")
        }
        kinds = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
        kinds = {name: kinds[name] for name in STACK.values() if name in kinds} | budgets
        figure.legend(
            kinds.values(), kinds, loc="outside lower center", ncols=max(2, 3 * columns - 1), handlelength=1.2
        )
        # The layout is only known after this: names are placed by the sizes of the axes.
        figure.draw_without_rendering()
        for axis, panel in zip(axes, panels, strict=True):
            _name_phases(axis, panel)
            highest_row = panel.timeline["total_bytes"].idxmax()
            at, top = panel.timeline["start_ms"][highest_row], panel.peak_bytes / unit_bytes
            axis.plot([at], [top], "o", color=INK, markersize=4, label="peak")
            # To the left of a point in the right part of the figure, so that the text stays inside.
            side, across = ("right", -7) if at > 0.6 * x_ms else ("left", 7)
            axis.annotate(
                f"peak {top:.2f} {unit}", (at, top), (across, _ABOVE), textcoords="offset points", ha=side, va="center",
                color=INK, bbox={"facecolor": PAGE, "alpha": 0.72, "linewidth": 0, "pad": 0.5},
            )  # fmt: skip
    return figure


def draw_frontier(profile: Profile, frame: pd.DataFrame, plan: Plan | None, size: Size) -> Figure:
    """Draw a frontier that ``check_frontier`` returned, in a size in inches."""
    unit, unit_bytes = _unit(int(frame["peak_bytes"].max()))
    step_ms = profile.step_ms or 1.0
    chunks = has_chunks(frame)
    frame = frame.assign(peak=frame["peak_bytes"] / unit_bytes, share=frame["cost_share"] * 100)
    is_policy = frame["status"] == "policy"
    solved, policies = frame[~is_policy], frame[is_policy]
    bound = solved.groupby("peak")["lower_bound_ms"].max()
    with _style() as new_figure:
        figure = new_figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        if plan is not None:
            peak, share = plan.peak_bytes / unit_bytes, (plan.recompute_ms + plan.added_ms) / step_ms * 100
            # The plan's own bound is one more point of the curve.
            bound.loc[peak] = plan.lower_bound_ms
            axis.plot(
                peak,
                share,
                "o",
                markersize=11,
                fillstyle="none",
                color=MARK,
                label="this plan",
                linestyle="",
                zorder=3,
            )
        bound = bound.sort_index() / step_ms * 100
        # The bound falls with the peak, so between two points that of the larger peak still holds. With chunks
        # it is not drawn, since it holds for the slices of one plan only.
        if not chunks:
            axis.plot(
                bound.index,
                bound,
                color=FAINT,
                linestyle=":",
                linewidth=1.4,
                label="lower bound",
                drawstyle="steps",
            )
        for i, (solver, rows) in enumerate(solved.groupby("solver", sort=False)):
            colour, dashes = SERIES[i % len(SERIES)], [float(x) for x in DASHES[i % len(DASHES)].split()]
            rows = rows.sort_values("peak")
            axis.plot(  # nothing was planned between two budgets; the plan of the smaller one holds there
                rows["peak"], rows["share"], "o", color=colour, markersize=4, linewidth=1.4,
                linestyle=(0, dashes) if dashes else "-", label=str(solver), drawstyle="steps-post",
            )  # fmt: skip
        # Named in the legend only: there is no room between the lines.
        for i, row in enumerate(policies.itertuples()):
            mark = _MARKS[i % len(_MARKS)]
            axis.plot(row.peak, row.share, mark, color=INK, markersize=6, label=row.solver, linestyle="")
        axis.set_ylim(bottom=min(0.0, float(frame["share"].min())))
        axis.set_xlabel(f"peak of the step, {unit}")
        axis.set_ylabel(f"recomputation{' and chunks' if chunks else ''}, % of the step's time")
        widest = max(len(str(line.get_label())) for line in axis.lines) + _HANDLE
        columns = max(1, min(4, int(size[0] * 72 / (widest * _LETTER * _FONT))))
        figure.legend(handles=axis.lines, loc="outside lower center", ncols=columns)
    return figure


def need_matplotlib() -> None:
    """Raise ``PlanError`` if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlanError("figures and the HTML page need matplotlib: pip install 'sacplan[plot]'") from error


@contextmanager
def _style() -> Iterator[type[Figure]]:
    """Yield matplotlib's class of figures, with our style in force."""
    need_matplotlib()
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(Path(__file__).with_name("figures.mplstyle")):
        yield Figure


def _unit(largest_bytes: int) -> tuple[str, int]:
    return ("GiB", GIB) if largest_bytes >= GIB else ("MiB", MIB)


def _stack(axis: Axes, panel: Panel, unit_bytes: int, least_bytes: float, bucket_ms: float | None) -> None:
    """Draw areas with vertical steps: a value holds from the start of its op to its end.

    Each area goes down to zero. The kinds below it are drawn over it. Areas that are thin everywhere get no label.
    """
    rows = panel.timeline[[kind.name.lower() for kind in STACK]].to_numpy()
    edges = np.append(panel.timeline["start_ms"], panel.end_ms)
    if bucket_ms is not None:
        entries = list(buckets_of(panel, bucket_ms))
        rows, edges = rows[entries], np.append(np.arange(len(entries)) * bucket_ms, panel.end_ms)
    tops = rows.cumsum(axis=1) / unit_bytes
    if bucket_ms is not None:
        visible = least_bytes / unit_bytes / 4
        # Steps too small to be seen are rounded away, so that fewer points remain in the file.
        tops = np.round(tops / visible) * visible
    # From the top down: each lower area is drawn over the one before.
    for i, (kind, name) in reversed(list(enumerate(STACK.items()))):
        column = rows[:, i]
        if column.any():
            # Only where the height changes; -1 makes the first entry a change.
            changes = np.flatnonzero(np.diff(tops[:, i], prepend=-1.0))
            axis.stairs(
                tops[changes, i], np.append(edges[changes], edges[-1]), fill=True, color=kind_colour(kind), linewidth=0,
                label=name if column.max() >= least_bytes else f"_{name}",
            )  # fmt: skip
    alive = tops[:, -1]
    axis.plot(
        edges, np.append(alive, alive[-1]), drawstyle="steps-post", color=FAINT, linewidth=0.5, label="alive"
    )


def _name_phases(axis: Axes, panel: Panel) -> None:
    """Draw a line where a phase of the step begins, and write its name if there is room."""
    _, x_ms = axis.get_xlim()
    for phase, start, end in panel.phase_spans():
        if phase != "forward" and start:
            axis.axvline(start, color=FAINT, linewidth=0.8, alpha=0.6)
        points = axis.bbox.width * 72 / axis.figure.dpi
        if (end - start) / x_ms * points > len(phase) * _LETTER * _FONT:
            axis.text((start + end) / 2, 0.96, phase, color=FAINT, ha="center", va="center",
                      transform=axis.get_xaxis_transform())  # fmt: skip
