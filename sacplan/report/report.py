"""``Report``: a step and a plan for it, as tables, figures, a page, and files for the viewers of others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sacplan.core.arguments import checked, opened
from sacplan.core.program import Program
from sacplan.core.writing import write_bytes
from sacplan.errors import PlanError
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.profiling.profile import Profile, ProfileOrPath
from sacplan.questions.alive import peak_groups
from sacplan.questions.parts import peak_in_words
from sacplan.questions.planned import planned
from sacplan.report.figures import check_frontier, draw_frontier, draw_memory
from sacplan.report.modules import module_rows
from sacplan.report.panels import panels_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

REST = "(smaller ones)"


class Report:
    """What a plan does to a step: tables, figures, a page, and files for viewers.

        report = sacplan.Report(profile, plan, sacplan.frontier(profile))
        report.module_table()
        report.write("report.html")

    Args:
        profile: A profile from ``sacplan.profile``, or the path of one.
        plan: A plan made from that profile, or the path of one. None: the step as it is.
        frontier: The frame that ``sacplan.frontier(profile)`` returns, for the figure and the page.

    Raises:
        PlanMismatch: The plan was made from another profile.
        PlanError: The frame is no frontier.
    """

    @checked(PlanError)
    def __init__(
        self,
        profile: ProfileOrPath,
        plan: PlanOrPath | None = None,
        frontier: pd.DataFrame | None = None,
    ) -> None:
        self.profile = opened(profile, Profile)
        self.plan = opened(plan, Plan)
        self.frontier = None if frontier is None else check_frontier(frontier)
        self.program: Program = planned(self.profile, self.plan)

    @property
    def peak(self) -> str:
        """A sentence on when the peak is, and on what is alive then: parameters, saved activations, logits, ..."""
        return peak_in_words(self.profile, self.program)

    # --- tables

    @checked(PlanError)
    def alive_at_peak(self, top: int | None = 20) -> pd.DataFrame:
        """List the tensors that are alive at the peak of the step, and the ops that made them.

        Storages share a row if the same op made them in modules that differ only by their number. The output of an op
        is listed under the module that ran it, a parameter under the module that reads it first.

        Args:
            top: The largest rows; the others are summed up in a last one. None: all rows.

        Returns:
            ``module``, ``op``, ``kind``, ``recomputed`` (made a second time), ``count``, ``each_bytes``, ``bytes``; the
            largest first. ``bytes`` sum up to ``peak_bytes``. In the last row, ``each_bytes`` is 0.

        Raises:
            PlanError: ``top`` is less than 1.
        """
        import pandas as pd

        if top is not None and top < 1:
            raise PlanError(f"top={top}: ask for at least 1 row, or None for all.")
        groups = peak_groups(self.profile, self.program)
        rows = [
            (g.module, g.op, g.kind, g.recomputed, g.count, g.each_bytes, g.n_bytes) for g in groups[:top]
        ]
        # One row for all that is not shown, so that the bytes still sum up to the peak.
        if rest := groups[len(rows) :]:
            rows.append((REST, "", "", False, sum(g.count for g in rest), 0, sum(g.n_bytes for g in rest)))
        return pd.DataFrame(
            rows, columns=["module", "op", "kind", "recomputed", "count", "each_bytes", "bytes"]
        )

    def module_table(self) -> pd.DataFrame:
        """List what each module keeps for the backward pass, what it discards, and why; one row per module.

        A row counts what the module's own ops make; modules inside it have their own rows. So the rows add up to what
        the step holds, and to ``plan.recompute_ms``. Ops outside the model, such as those of a loss, have a row too.

        Returns:
            By module, in the order of execution: ``kept_bytes`` (for the backward pass, or to recompute from),
            ``discarded_bytes`` (to be recomputed), ``recompute_ms``, ``recompute_share``, ``forward_ms`` and ``why``:
            in slices, discarded (the larger part), or kept, and what prevents discarding.
        """
        import pandas as pd

        return pd.DataFrame(module_rows(self.profile, self.plan)).set_index("module")

    # --- figures

    @checked(PlanError)
    def memory_figure(self, others: Sequence[PlanOrPath] = (), *, columns: int | None = None) -> Figure:
        """Draw memory over the step, stacked by kind, without the plan and with it.

            sacplan.Report(profile, recomputed).memory_figure([recomputed_and_chunked])

        The x axis is predicted time: a step that recomputes takes longer. Every op is drawn; nothing is averaged.

        Args:
            others: Further plans for the step, side by side with the report's under the names of their techniques.
            columns: How many panels stand side by side. None: all. Panels in one column can be read on a narrow page.

        Raises:
            PlanMismatch: A plan was made from another profile.
            PlanError: ``columns`` is less than 1; matplotlib is not installed.
        """
        plans = [plan for plan in (self.plan, *(opened(other, Plan) for other in others)) if plan is not None]
        panels = panels_of(self.profile, *plans)
        if columns is not None and columns < 1:
            raise PlanError(f"columns is {columns!r}; give 1 or more, or None for all panels side by side.")
        columns = min(columns or len(panels), len(panels))
        rows = -(-len(panels) // columns)
        size = (5.6 * columns, 3.9) if rows == 1 else (4.8 * columns, 2.2 * rows + 0.8)
        return draw_memory(panels, panels, size, columns=columns)

    def frontier_figure(self) -> Figure:
        """Draw the peak of the step against its cost: solvers as lines, policies as marks, the lower bound dotted.

        The cost is that of recomputation and of chunks. With chunks there is no lower bound. A ring marks the plan.

        Raises:
            PlanError: The report has no frontier; matplotlib is not installed.
        """
        if self.frontier is None:
            raise PlanError(
                "this report has no frontier: sacplan.Report(profile, plan, sacplan.frontier(profile))."
            )
        return draw_frontier(self.profile, self.frontier, self.plan, (7.2, 4.3))

    # --- files

    @cached_property
    def html(self) -> str:
        """The page that ``write`` writes."""
        from sacplan.report.page import report_html  # imports jinja2

        return report_html(self.profile, self.plan, self.frontier)

    @checked(PlanError)
    def write(self, path: str | Path) -> Path:
        """Write an HTML page: one file that loads nothing from the network. Return the path.

        It shows the headline figures, memory over the step with what is alive at the peak, the
        frontier, and what each module keeps and discards and why. If the plan may use chunks, it also shows them.

        Args:
            path: Of the HTML file; its directory must exist.

        Raises:
            PlanError: matplotlib is not installed.
        """
        write_bytes(path, self.html.encode())
        return Path(path)
