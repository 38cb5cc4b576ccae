"""One HTML page about a profile and a plan, which needs no network."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import sacplan
from sacplan.core.budget import format_bytes
from sacplan.core.names import short_op
from sacplan.core.program import StorageKind
from sacplan.planning.layers import read_layers
from sacplan.planning.plan import Plan
from sacplan.planning.reading import plan_rows
from sacplan.profiling.profile import Profile
from sacplan.questions.alive import WORKSPACE, AliveGroup, peak_groups
from sacplan.questions.parts import peak_in_words
from sacplan.report.figures import (
    BUCKETS,
    GIB,
    MIB,
    draw_frontier,
    draw_memory,
    has_chunks,
    need_matplotlib,
)
from sacplan.report.modules import NOTHING, grouped, module_rows
from sacplan.report.palette import STACK, css_name, css_variables
from sacplan.report.panels import Panel, buckets_of, panels_of
from sacplan.techniques.chunk.entries import loss_chunks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Inches; the page stretches them to 1.1 to 1.9 times that.
_CHART, _FRONTIER = (4.4, 3.7), (4.4, 4.2)
_ALIVE_ROWS = 10
_MOST_ROWS = 250  # of the table of modules; the smallest ones are left out and counted
_COLOURS = {kind.name.lower().replace("_", " "): css_name(kind) for kind in StorageKind} | {
    WORKSPACE: css_name(StorageKind.TEMPORARY)
}


def report_html(profile: Profile, plan: Plan | None = None, frontier: pd.DataFrame | None = None) -> str:
    """Return the page as text; the frontier is one that ``check_frontier`` returned."""
    # Around everything, since figures are drawn while the page's values are collected.
    with _page_style():
        panels = panels_of(profile, *filter(None, [plan]))
        environment = Environment(
            loader=PackageLoader("sacplan.report", "."), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        environment.filters["bytes"] = format_bytes
        return environment.get_template("page.html").render(
            title=f"{profile.fingerprint.model_class} on {profile.device}",
            model=profile.fingerprint.model_class,
            figures=profile.in_words().rows if plan is None else plan_rows(plan),
            made_with=_made_with(plan),
            colours=Markup(css_variables()),
            peak=peak_in_words(profile, panels[-1].program),
            assumptions=profile.assumptions,
            panels=[_panel(profile, panel, panels) for panel in panels],
            made=_made,
            frontier=None if frontier is None else _frontier(profile, frontier, plan),
            chunks=None if plan is None else _chunks(profile, plan),
            modules=_modules(profile, plan),
        )


def _made_with(plan: Plan | None) -> str:
    """Return versions and date: those that the plan was made with, or without a plan those of the page."""
    if plan is not None:
        provenance = plan.provenance
        return f"sacplan {provenance.sacplan}, torch {provenance.torch}, {provenance.date:%Y-%m-%d}"
    return f"sacplan {sacplan.__version__}, torch {torch.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}"


def _chunks(profile: Profile, plan: Plan) -> dict[str, Any] | None:
    """Return what a plan runs in slices, or why the loss cannot run so. None for a plan without the technique."""
    if "chunk" not in plan.provenance.techniques:
        return None
    trains = profile.mode == "train"
    refused = loss_chunks(profile.program, profile.spec).refused if trains else {}
    return {
        "sliced": [f"{layer.name}: {text}" for layer in read_layers(plan) for text in layer.sliced],
        "exactness": "" if trains else "The output is close: kernels may round slices otherwise.",
        "refusals": [f"from {unit} on: {why}" for unit, why in refused.items()],
    }


def _made(group: AliveGroup) -> str:
    """Return the op that made a group, and the kind of the group."""
    maker = "" if group.op in group.kind else f"{group.op}{' again' if group.recomputed else ''}, "
    return maker + group.kind


@contextmanager
def _page_style() -> Iterator[None]:
    """Draw figures in matplotlib's default style, whatever the caller has set up."""
    need_matplotlib()
    import matplotlib.style

    # Text stays text; ids are the same each time.
    of_svg = {"svg.fonttype": "none", "svg.hashsalt": "sacplan", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.style.context(["default", of_svg]):
        yield


def _image(figure: Figure) -> str:
    """Return a figure as an address that has the whole SVG file in it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _panel(profile: Profile, panel: Panel, scale: Sequence[Panel]) -> dict[str, Any]:
    """Return a chart of memory over the step, and the table under it."""
    peak_bytes = panel.peak_bytes
    groups = peak_groups(profile, panel.program)
    figure = draw_memory([panel], scale, _CHART, sampled=True)
    plot = figure.axes[0].get_position()
    # The plot's left, top, width and height, as shares of the image.
    area = plot.x0, 1 - plot.y1, plot.width, plot.height
    return {
        "said": f"{panel.title}: memory over the step, peak {format_bytes(peak_bytes)}.",
        "image": _image(figure),
        "moments": _moments(profile, panel, max(p.end_ms for p in scale) or 1.0) | {"plot": area},
        "alive": [(g, _COLOURS.get(g.kind, css_name(StorageKind.OTHER))) for g in groups[:_ALIVE_ROWS]],
        "rest": groups[_ALIVE_ROWS:],
        "peak_bytes": peak_bytes,
    }


def _moments(profile: Profile, panel: Panel, x_max: float) -> dict[str, Any]:
    """Return the texts under the pointer: bytes by kind and the op that runs, for each bucket of time."""
    timeline = panel.timeline.iloc[list(buckets_of(panel, x_max / BUCKETS))]
    names = {kind.name.lower(): name for kind, name in STACK.items()}
    kinds = [kind for kind in names if panel.timeline[kind].any()]
    texts: dict[str, int] = {}
    runs = []
    for row in timeline.itertuples():
        module, again = row.module or profile.fingerprint.model_class, ", again" * row.recomputed
        said = f"{row.phase}: {short_op(row.op)} of {module}{again}"
        # Texts repeat from bucket to bucket, so the page has each text once, and ``runs`` the number of each bucket's.
        runs.append(texts.setdefault(said, len(texts)))
    mib = timeline[kinds].to_numpy() / MIB
    return {
        "width": x_max / BUCKETS,
        "x_max": x_max,
        "kinds": [names[kind] for kind in kinds],
        "mib": mib.round(1 if panel.peak_bytes >= GIB else 3).tolist(),
        "runs": runs,
        "texts": list(texts),
    }


def _frontier(profile: Profile, frame: pd.DataFrame, plan: Plan | None) -> dict[str, Any]:
    return {
        "image": _image(draw_frontier(profile, frame, plan, _FRONTIER)),
        "chunks": has_chunks(frame),
        "rows": list(frame.sort_values(["solver", "peak_bytes"], kind="stable").itertuples()),
    }


def _modules(profile: Profile, plan: Plan | None) -> dict[str, Any]:
    """Return the groups that the table shows, those that keep nothing, all rows, and the number left out."""
    rows = module_rows(profile, plan)
    nothing = [group for group in grouped(rows) if group.row.why == NOTHING]
    groups = [group for group in grouped(rows) if group.row.why != NOTHING]
    # Rows are chosen by weight, and shown in the order of execution.
    by_weight = sorted(groups, key=lambda g: -g.count * (g.row.kept_bytes + g.row.discarded_bytes))
    shown = {g.module for g in by_weight[:_MOST_ROWS]}
    return {
        "rows": rows,
        "groups": [g for g in groups if g.module in shown],
        "nothing": nothing,
        "left_out": len(groups) - len(shown),
    }
