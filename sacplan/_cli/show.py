"""Results as text: what a profile, a plan, a verification, a frontier and the devices look like."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sacplan._cli.output import Column, note, print_pairs, print_table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from sacplan import Plan, Profile, Verification
    from sacplan._cli.targets import Target
    from sacplan._program.program import Program
    from sacplan._ranks.ranks import Ranks

_GROUPS = 20  # rows of units; the rest is counted
_OPS = 6  # names in a row

Pairs = list[tuple[str, str]]


def size(n_bytes: int | None) -> str:
    """Bytes for people, and exactly."""
    from sacplan._program.budget import format_bytes

    return "none" if n_bytes is None else f"{format_bytes(n_bytes)} ({n_bytes} bytes)"


def share(part: float, whole: float) -> str:
    """In percent."""
    return f"{part / whole:.1%}" if whole else "0.0%"


def target_pairs(facts: Mapping[str, Any]) -> Pairs:
    """What was chosen for an ``hf:`` target."""
    if not facts:
        return []
    shown = {k: f"{v:,}" if k == "parameters" else str(v) for k, v in facts.items() if k != "model"}
    return [("model", f"{facts['model']} ({', '.join(f'{k} {v}' for k, v in shown.items())})")]


def ranks_text(ranks: Ranks, program: Program | None = None) -> str:
    """Over how many ranks a step is spread, and how; with its recording, how many modules each pattern is."""
    if ranks.world_size == 1:
        return "one device"
    if ranks.fsdp_units is None:
        return f"one of {ranks.world_size} ranks (DistributedDataParallel)"
    units = ", ".join(_unit(pattern, program) for pattern in ranks.fsdp_units)
    return f"one of {ranks.world_size} ranks (fully_shard: {units})"


def _unit(pattern: str, program: Program | None) -> str:
    from sacplan._ranks.shards import resolve_units

    if not pattern:
        return "the model"
    if program is None or not re.search(r"[*?[]", pattern):
        return pattern
    return f"{len(resolve_units([pattern], program))} x {pattern}"


def _spread(ranks: Ranks, program: Program | None = None) -> str:
    return "" if ranks.world_size == 1 else f", {ranks_text(ranks, program)}"


def profile_facts(profile: Profile) -> dict[str, Any]:
    """A profile for ``--json``."""
    return {
        "model_class": profile.fingerprint.model_class,
        "device": profile.device,
        "device_memory_bytes": profile.device_memory_bytes,
        "ranks": profile.ranks.to_dict(),
        "peak_bytes": profile.peak_bytes,
        "peak_phase": profile.baseline.peak_phase.name.lower(),
        "peak_module": profile.baseline.peak_fqn,
        "step_ms": profile.step_ms,
        "forward_ms": profile.forward_ms,
        "step_flops": profile.program.flops,
        "ops": len(profile.program.ops),
        "trace": profile.trace,
        "runtime": profile.runtime,
        "assumptions": list(profile.assumptions),
    }


def show_profile(profile: Profile, facts: Mapping[str, Any]) -> None:
    """A profile."""
    run = profile.baseline
    where = run.peak_phase.name.lower() + (f" of {run.peak_fqn}" if run.peak_fqn else "")
    print_pairs(
        [
            *(target_pairs(facts) or [("model", profile.fingerprint.model_class)]),
            (
                "device",
                f"{profile.device}, {size(profile.device_memory_bytes)}{_spread(profile.ranks, profile.program)}",
            ),
            ("peak", f"{size(profile.peak_bytes)}, in the {where}"),
            ("step", f"{profile.step_ms:.2f} ms ({profile.runtime}), forward {profile.forward_ms:.2f} ms"),
            ("recorded", f"{len(profile.program.ops)} ops ({profile.trace})"),
        ]
    )
    _assumptions(profile)


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan for ``--json``; the file of ``-o`` has the decisions op by op."""
    return {
        "model_class": plan.fingerprint.model_class,
        "device": plan.device,
        "ranks": plan.ranks.to_dict(),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "recompute_flops": plan.recompute_flops,
        "lower_bound_ms": plan.lower_bound_ms,
        "step_ms": plan.step_ms,
        "step_flops": plan.step_flops,
        "status": plan.status,
        "gap": plan.gap,
        "solver": plan.solver,
        "discard_ratios": plan.discard_ratios,
    }


def show_plan(plan: Plan, profile: Profile, facts: Mapping[str, Any]) -> None:
    """A plan, and what its units discard."""
    print_pairs(
        [
            *(target_pairs(facts) or [("model", plan.fingerprint.model_class)]),
            ("device", plan.device + _spread(plan.ranks, profile.program)),
            ("unplanned", size(plan.baseline_peak_bytes)),
            ("budget", size(plan.budget_bytes)),
            ("planned", size(plan.peak_bytes)),
            (
                "recompute",
                f"{plan.recompute_ms:.2f} ms, {share(plan.recompute_ms, plan.step_ms)} of a step of "
                f"{plan.step_ms:.2f} ms; {share(plan.recompute_flops, plan.step_flops)} of its FLOPs",
            ),
            ("no less than", f"{plan.lower_bound_ms:.2f} ms, for any schedule with that peak"),
            ("solver", f"{plan.solver}, {plan.status}"),
        ]
    )
    if plan.units:
        print_table(*_units(plan))
    _assumptions(profile)


def _units(plan: Plan) -> tuple[Sequence[Column], list[list[str]]]:
    """Units that do the same are one row."""
    columns = (
        Column("modules"),
        Column("units", numbers=True),
        Column("discard", numbers=True),
        Column("ms again", numbers=True),
        Column("what runs again"),
    )
    groups: dict[Any, list[str]] = {}
    for fqn, unit in plan.units.items():
        groups.setdefault((re.sub(r"\d+", "*", fqn), tuple(unit.discarded)), []).append(fqn)
    rows = []
    for (_, sites), names in groups.items():
        units = [plan.units[n] for n in names]
        rows.append(
            [
                together(names),
                str(len(names)),
                f"{sum(u.discard_ratio for u in units) / len(units):.0%}",
                f"{sum(u.recompute_ms for u in units):.2f}",
                _op_counts(sites),
            ]
        )
    if len(rows) > _GROUPS:
        left = rows[_GROUPS:]
        rows = [
            *rows[:_GROUPS],
            [f"and {len(left)} more groups", str(sum(int(r[1]) for r in left)), "", "", "see -o or --json"],
        ]
    return columns, rows


def together(names: Sequence[str]) -> str:
    """Names that differ in one number, as one: ``layers.{0-3,7}.mlp``."""
    if len(names) == 1:
        return names[0] or "(the model)"
    parts = [re.split(r"(\d+)", n) for n in names]
    varying = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if len(varying) != 1:
        return f"{names[0]} ... {names[-1]}"
    i = varying[0]
    return "".join([*parts[0][:i], "{" + _ranges([int(p[i]) for p in parts]) + "}", *parts[0][i + 1 :]])


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _op_counts(sites: Sequence[tuple[str, int]]) -> str:
    counts = Counter(name.removeprefix("aten.").removesuffix(".default") for name, _ in sites)
    words = [name if n == 1 else f"{name} x{n}" for name, n in counts.most_common()]
    more = [f"{len(words) - _OPS} other ops"] if len(words) > _OPS else []
    return ", ".join([*words[:_OPS], *more])


def verification_facts(seen: Verification) -> dict[str, Any]:
    """A verification for ``--json``."""
    return {
        "verified": seen.within_budget,
        "peak_bytes": seen.peak_bytes,
        "predicted_peak_bytes": seen.predicted_peak_bytes,
        "budget_bytes": seen.budget_bytes,
        "recompute_flops": seen.recompute_flops,
        "step_ms": seen.step_ms,
        "run": seen.run,
        "source": seen.source,
    }


def show_verification(seen: Verification, plan: Plan, facts: Mapping[str, Any]) -> None:
    """A verification."""
    print_pairs(
        [
            *(target_pairs(facts) or [("model", plan.fingerprint.model_class)]),
            *([("device", plan.device + _spread(plan.ranks))] if plan.ranks.world_size > 1 else []),
            ("budget", size(seen.budget_bytes)),
            ("planned", size(seen.predicted_peak_bytes)),
            ("seen", f"{size(seen.peak_bytes)}, {seen.source}"),
            ("difference", f"planned is {seen.error:+.3%} of seen"),
            ("recompute", f"{seen.recompute_flops / 1e9:.2f} GFLOP"),
            ("step", f"{seen.step_ms:.2f} ms ({'wall time' if seen.run == 'real' else 'predicted'})"),
            ("verdict", "within the budget" if seen.within_budget else "OVER the budget"),
        ]
    )


_FRONTIER = {
    "solver": Column("solver"),
    "budget_bytes": Column("budget", numbers=True),
    "peak_bytes": Column("peak", numbers=True),
    "recompute_ms": Column("ms again", numbers=True),
    "recompute_share": Column("of step", numbers=True),
    "lower_bound_ms": Column("no less than", numbers=True),
    "recompute_flops_share": Column("of FLOPs", numbers=True),
    "units": Column("units", numbers=True),
    "status": Column("status"),
}


def show_frontier(frame: pd.DataFrame, profile: Profile) -> None:
    """A frontier."""
    from sacplan._program.budget import format_bytes

    def text(column: str, value: Any) -> str:
        if column.endswith("_bytes"):
            return format_bytes(int(value))
        if column.endswith("_share"):
            return f"{value:.1%}"
        return f"{value:.2f}" if column.endswith("_ms") else str(value)

    rows = [[text(c, row[c]) for c in _FRONTIER] for row in frame.to_dict("records")]
    print_table(list(_FRONTIER.values()), rows)
    if profile.ranks.world_size > 1:
        note(f"all figures are those of {ranks_text(profile.ranks, profile.program)}")


def show_devices(frame: pd.DataFrame) -> None:
    """The device table."""
    titles = {
        "memory_gib": "GiB",
        "bandwidth_gb_per_s": "GB/s",
        "float32_tflops": "fp32 TFLOP/s",
        "bfloat16_tflops": "bf16",
        "float16_tflops": "fp16",
        "float8_tflops": "fp8",
        "capability": "capability",
    }
    columns = [Column("name"), *(Column(t, numbers=True) for t in titles.values()), Column("source")]
    rows = [
        [str(name), *(_figure(row[c]) for c in titles), str(row["source"])] for name, row in frame.iterrows()
    ]
    print_table(columns, rows)


def _figure(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def saved(paths: Mapping[str, Any]) -> None:
    """Which files were written; on stderr, since the result is above."""
    for what, path in paths.items():
        if path is not None:
            note(f"{what} written to {path}")


def _assumptions(profile: Profile) -> None:
    for sentence in profile.assumptions:
        note(f"assumed: {sentence}")


def target_facts(target: Target | None) -> dict[str, Any]:
    """A target for ``--json``."""
    return (
        {}
        if target is None
        else {"target": target.name, **({"hf": dict(target.facts)} if target.facts else {})}
    )


def output_fact(output: Path | None) -> dict[str, Any]:
    """Where a result was saved, for ``--json``."""
    return {} if output is None else {"output": str(output)}
