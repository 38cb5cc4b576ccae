"""A step on a predicted time axis, as a table: what runs when, and what is alive then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sacplan.core.names import shown_module
from sacplan.core.program import Program, StorageKind

if TYPE_CHECKING:
    import pandas as pd


def timeline_of(program: Program) -> pd.DataFrame:
    """Return a row for each op that runs, in order, including recomputed ops; columns: see ``Profile.timeline``."""
    import pandas as pd

    rows = []
    start_ms = 0.0
    # The first moment is the state before the step, at which no op runs.
    for moment in program.liveness.moments[1:]:
        op = program.ops[moment.op]
        # A recomputed op is shown in the module of the op that it repeats, but in its own phase.
        again = op.recomputes >= 0
        recorded = op.recomputes if again else moment.op
        by_kind = list(moment.by_kind)
        if op.replaces >= 0:
            # ``liveness`` subtracts an overwritten storage from the temporaries; here, from its own kind instead.
            size = program.storage_bytes[op.replaces]
            by_kind[StorageKind.TEMPORARY] += size
            by_kind[program.storage_kinds[op.replaces]] -= size
        what = op.name, op.phase.name.lower(), shown_module(program, recorded, ""), again
        rows.append((*what, start_ms, op.time_ms, moment.live_bytes, *by_kind))
        start_ms += op.time_ms
    named = ["op", "phase", "module", "recomputed", "start_ms", "ms", "total_bytes"]
    return pd.DataFrame(rows, columns=[*named, *(kind.name.lower() for kind in StorageKind)])
