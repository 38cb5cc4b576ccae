"""The charts of the page: memory over the step, the frontier, trade-off curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes
from sacplan._program.program import Phase, StorageKind
from sacplan._report.curves import Curve
from sacplan._report.names import short_op, shown_module
from sacplan._report.palette import DASHES, SERIES, STACK, kind_name
from sacplan._report.plot import NARROW_PX, Plot, text_px
from sacplan._report.timeline import Timeline, buckets_of

if TYPE_CHECKING:
    import pandas as pd

GIB, MIB = 2**30, 2**20
_BUCKETS = 480
_HEADROOM = 1.13
_THICK = 0.075  # share of the height that a band needs for its name to stand in it


def css_of(kind: StorageKind) -> str:
    """Class of a kind's colour."""
    return "k-" + kind.name.lower().replace("_", "-")


def memory_chart(
    profile: Profile, timeline: Timeline, *, budget_bytes: int | None, y_bytes: int, x_ms: float, said: str
) -> str:
    """Memory over predicted time, stacked by kind, with the budget and the peak.

    Args:
        y_bytes, x_ms: what the axes have to hold; the same for all charts that are compared.
    """
    unit, unit_bytes = ("GiB", GIB) if y_bytes >= GIB else ("MiB", MIB)
    plot = Plot(
        x_max=x_ms or 1.0,
        y_max=y_bytes * _HEADROOM / unit_bytes,
        height_px=300,
        x_title="time of the step (predicted), ms",
        y_title=f"alive, {unit}",
        said=said,
        css="memory",
    )
    buckets = buckets_of(timeline, _BUCKETS, x_ms / _BUCKETS if x_ms else None)
    entries = list(buckets.entries)
    xs = [min(i * buckets.width_ms, timeline.end_ms) for i in range(len(entries))] + [timeline.end_ms]
    base = [0.0] * len(entries)
    names = []
    for kind in STACK:
        values = [float(v) / unit_bytes for v in timeline.kind_bytes[entries, kind].tolist()]
        if not any(values):
            continue
        tops = [b + v for b, v in zip(base, values, strict=True)]
        plot.area(xs, tops, base, css_of(kind))
        if label := _in_band(values, kind_name(kind), _THICK * plot.y_max):
            at, css = label
            names.append((xs[at], base[at] + values[at] / 2, kind, css))
        base = tops
    for phase, start, end in timeline.phase_spans():
        if phase != Phase.FORWARD and start:
            plot.line([(start, 0), (start, plot.y_max)], "phase")
        if end - start > 0.12 * x_ms:
            plot.text((start + end) / 2, plot.y_max * 0.965, phase.name.lower(), "phase-name", inside=True)
    for x, y, kind, css in names:
        plot.text(x, y, kind_name(kind), f"in-{css_of(kind)} {css}", inside=True)
    if budget_bytes is not None:
        y = budget_bytes / unit_bytes
        plot.line([(0, y), (x_ms, y)], "budget", "6 4")
    at_ms = float(timeline.start_ms[timeline.peak])
    top = timeline.peak_bytes / unit_bytes
    if budget_bytes is not None:
        far = 0.0 if at_ms > 0.45 * x_ms else x_ms
        y = budget_bytes / unit_bytes + 0.035 * plot.y_max
        plot.text(far, y, f"budget {format_bytes(budget_bytes)}", "budget-name")
    plot.dot(at_ms, top, "peak")
    plot.text(at_ms, top + 0.04 * plot.y_max, f"peak {format_bytes(timeline.peak_bytes)}", "peak-name")
    plot.after = '<i class="cursor" hidden></i>'
    data = _readable(profile, timeline, entries, buckets.width_ms)
    shown = [k for k in STACK if timeline.kind_bytes[:, k].any()]
    legend = "".join(f'<span class="{css_of(k)}"><i></i>{escape(kind_name(k))}</span>' for k in shown)
    return (
        plot.html()
        + f'<p class="kinds">{legend}</p><p class="readout" aria-live="off"></p>'
        + f'<script type="application/json" class="moments">{data}</script>'
    )


def _in_band(values: Sequence[float], name: str, height: float) -> tuple[int, str] | None:
    """Where in a band its name fits: the bucket, and "" or the class for where there is more room."""
    for plot_px, css in ((NARROW_PX, ""), (1.5 * NARROW_PX, "wide-only")):
        half = int(text_px(name) / plot_px * _BUCKETS / 2) + 4
        thickness = [min(values[i - half : i + half + 1]) for i in range(half, len(values) - half)]
        best = max(thickness, default=0.0)
        if best > height:
            return thickness.index(best) + half, css
    return None


def _readable(profile: Profile, timeline: Timeline, entries: Sequence[int], width_ms: float) -> str:
    """What the page says under the pointer: by bucket, bytes by kind and what runs."""
    program, model = profile.program, profile.fingerprint.model_class
    kinds = [k for k in STACK if timeline.kind_bytes[:, k].any()]
    digits = 1 if timeline.peak_bytes >= GIB else 3
    texts: dict[str, int] = {}
    runs = []
    for entry in entries:
        op = int(timeline.ops[entry])
        phase = Phase(int(timeline.phases[entry])).name.lower()
        again = ", again" if timeline.recomputed[entry] else ""
        said = f"{phase}: {short_op(program.ops[op].name)} of {shown_module(program, op, model)}{again}"
        runs.append(texts.setdefault(said, len(texts)))
    data = {
        "width": round(width_ms, 6),
        "end": round(timeline.end_ms, 4),
        "kinds": [kind_name(k) for k in kinds],
        "mib": [[round(timeline.kind_bytes[e, k] / MIB, digits) for k in kinds] for e in entries],
        "runs": runs,
        "texts": list(texts),
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def frontier_chart(profile: Profile, frame: pd.DataFrame, plan: Plan | None) -> str:
    """Peak against recomputation, for all solvers and policies."""
    step_ms = profile.step_ms or 1.0
    unit, unit_bytes = ("GiB", GIB) if frame["peak_bytes"].max() >= GIB else ("MiB", MIB)
    shares = [*(frame["recompute_share"] * 100)]
    peaks = [*(frame["peak_bytes"] / unit_bytes)]
    if plan is not None:
        shares.append(plan.recompute_ms / step_ms * 100)
        peaks.append(plan.peak_bytes / unit_bytes)
    low, high = min(peaks), max(peaks)
    pad = 0.06 * (high - low) or 0.05 * high
    plot = Plot(
        x_min=max(0.0, low - pad),
        x_max=high + pad,
        y_max=(max(shares) or 1.0) * 1.1,
        height_px=340,
        x_title=f"peak of the step, {unit}",
        y_title="recomputation, % of the step's time",
        said="Peak of the step against recomputation, for every solver and policy; the figures are in the table below.",
        css="frontier",
    )
    solved = frame[frame["status"] != "policy"]
    bound = solved.groupby("peak_bytes")["lower_bound_ms"].max().sort_index()
    lower = dict(bound.items())
    if plan is not None:
        lower[plan.peak_bytes] = plan.lower_bound_ms
    plot.line([(p / unit_bytes, ms / step_ms * 100) for p, ms in sorted(lower.items())], "bound", "2 4")
    ends: list[tuple[float, float, list[str], int]] = []
    for i, (solver, rows) in enumerate(solved.groupby("solver", sort=False)):
        rows = rows.sort_values("peak_bytes")
        points = [
            (p / unit_bytes, s * 100)
            for p, s in zip(rows["peak_bytes"], rows["recompute_share"], strict=True)
        ]
        plot.line(points, f"s{i % len(SERIES)}", DASHES[i % len(DASHES)])
        for point in points:
            plot.dot(*point, f"s{i % len(SERIES)}")
        x, y = points[0]
        near = [e for e in ends if abs(e[0] - x) < 0.03 * (high - low) and abs(e[1] - y) < 0.04 * plot.y_max]
        if near:
            near[0][2].append(str(solver))
        else:
            ends.append((x, y, [str(solver)], i))
    if plan is not None:
        plot.dot(plan.peak_bytes / unit_bytes, plan.recompute_ms / step_ms * 100, "ring")
        plot.text(
            plan.peak_bytes / unit_bytes,
            plan.recompute_ms / step_ms * 100,
            "this plan",
            "peak-name ring-name",
        )
    for x, y, solvers, i in ends:
        plot.text(x, y, " = ".join(solvers), f"s{i % len(SERIES)}-name")
    for row in frame[frame["status"] == "policy"].itertuples():
        plot.dot(row.peak_bytes / unit_bytes, row.recompute_share * 100, "cross")
    for row in frame[frame["status"] == "policy"].itertuples():
        plot.text(row.peak_bytes / unit_bytes, row.recompute_share * 100, row.solver, "policy-name")
    return plot.html()


def tradeoff_chart(curve: Curve) -> str:
    """What one kind of module can discard, and at what price."""
    largest = max(ms for _, ms in curve.points) or 1.0
    plot = Plot(
        x_max=100.0,
        y_max=largest * 1.08,
        height_px=170,
        x_title=f"discarded, % of {format_bytes(curve.tradeoff.saved_bytes)}",
        y_title="recomputation, ms",
        said=f"{curve.name}: {len(curve.points)} reachable points; discarding {curve.points[-1][0]:.0%} takes "
        f"{curve.points[-1][1]:.2f} ms.",
        css="small",
    )
    if curve.pwlf.n_segments:
        plot.line([(100 * x, y) for x, y in curve.line(curve.pwlf)], "pwlf", "5 4")
    plot.line([(100 * x, y) for x, y in curve.line(curve.hull)], "hull")
    for share, ms in curve.points:
        plot.dot(100 * share, ms, "reach")
    alike = f" <small>{len(curve.members)} alike</small>" if len(curve.members) > 1 else ""
    return f"<figure><figcaption>{escape(curve.name)}{alike}</figcaption>{plot.html(4, 4)}</figure>"
