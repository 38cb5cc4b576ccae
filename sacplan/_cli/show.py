"""Show profiles, plans, verifications and targets: as tables for people, and as facts for ``--json``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from sacplan._cli.output import number, pairs, table
from sacplan._program.budget import format_bytes, format_share

if TYPE_CHECKING:
    from pathlib import Path

    from sacplan import Plan, Profile, Verification
    from sacplan._cli.target import Target
    from sacplan._device.device_memory import DeviceMemory
    from sacplan._program.notebook import Section
    from sacplan._program.program import CallSite, Program
    from sacplan._ranks.ranks import Ranks
    from sacplan._shard.sharding import Sharding

_GROUPS = 20  # rows of units; further ones are only counted
_OPS = 6  # names of ops in a row; further ones are only counted


def size(n_bytes: int | None) -> str:
    """Write bytes rounded and exactly: ``2.41 GiB (2587710464 bytes)``."""
    return "none" if n_bytes is None else f"{rounded_size(n_bytes)} ({n_bytes} bytes)"


def rounded_size(n_bytes: int) -> str:
    """Write bytes rounded: ``2.41 GiB``."""
    return format_bytes(n_bytes)


def model_row(facts: Mapping[str, Any], model_class: str) -> tuple[str, str]:
    """Return the row for the model, with the options of an ``hf:`` target."""
    shown = [_fact(name, value) for name, value in facts.items() if name != "model"]
    chosen = f" ({', '.join(shown)})" if shown else ""
    return "model", f"{facts.get('model', model_class)}{chosen}"


def _fact(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if value is True:  # a flag: ``load in 4bit``
        return words
    return f"{words} {value:,}" if name in ("parameters", "trained") else f"{words} {value}"


def ranks_text(ranks: Ranks, program: Program | None = None) -> str:
    """Say over how many ranks a step is spread, and how (see ``sacplan._plan.reading``, which imports torch)."""
    from sacplan._plan.reading import ranks_text

    return ranks_text(ranks, program)


def sections_shown(sections: Sequence[Section]) -> list[Table | str]:
    """Return sections as titles with tables below them."""
    shown: list[Table | str] = []
    for section in sections:
        shown += [*([""] if shown else []), section.title]
        if section.rows:
            shown.append(pairs([(f"  {label}", text) for label, text in section.rows]))
    return shown


def _device(text: str, ranks: Ranks, program: Program | None = None) -> tuple[str, str]:
    return "device", text if ranks.devices == 1 else f"{text}, {ranks_text(ranks, program)}"


def target_facts(target: Target | None, output: Path | None = None) -> dict[str, Any]:
    """Return the facts about a target, and the file that the result was saved to."""
    facts: dict[str, Any] = {} if target is None else {"target": target.name}
    # Only ``hf:`` targets have facts. What another target does is in the user's code.
    if target is not None and target.facts:
        facts["hf"] = dict(target.facts)
    return facts if output is None else {**facts, "output": str(output)}


def remarks(profile: Profile, what: str, output: Path | None) -> list[str]:
    """Return the notes on assumptions, and on the file that the result was saved to."""
    return [*assumed(profile.assumptions), *saved(what, output)]


def assumed(sentences: Iterable[str]) -> list[str]:
    """Return a note for each assumption."""
    return [f"assumed: {sentence}" for sentence in sentences]


def saved(what: str, output: Path | None) -> list[str]:
    """Return a note on the file that the result was saved to, if there is one."""
    return [] if output is None else [f"{what} written to {output}"]


def profile_facts(profile: Profile) -> dict[str, Any]:
    """Return the facts about a profile, for ``--json``."""
    return {
        "model_class": profile.fingerprint.model_class,
        "device": profile.device,
        "device_memory_bytes": profile.device_memory_bytes,
        "ranks": msgspec.to_builtins(profile.ranks),
        "peak_bytes": profile.peak_bytes,
        "device_memory": msgspec.to_builtins(profile.device_memory()),
        "peak_phase": profile.baseline.peak_phase.name.lower(),
        "peak_module": profile.baseline.peak_fqn,
        "step_ms": profile.step_ms,
        "forward_ms": profile.forward_ms,
        "step_flops": profile.program.flops,
        "ops": len(profile.program.ops),
        "mode": profile.mode,
        "setup": msgspec.to_builtins(profile.fingerprint.setup),
        "trace": profile.trace,
        "runtime": profile.runtime,
        "assumptions": list(profile.assumptions),
    }


def profile_table(profile: Profile, facts: Mapping[str, Any]) -> Table:
    """Return a profile as a table."""
    baseline = profile.baseline
    where = baseline.peak_phase.name.lower() + (f" of {baseline.peak_fqn}" if baseline.peak_fqn else "")
    if profile.mode == "inference":
        facts = {name: fact for name, fact in facts.items() if name != "optimizer"}  # none runs
    return pairs(
        [
            model_row(facts, profile.fingerprint.model_class),
            _device(f"{profile.device}, {size(profile.device_memory_bytes)}", profile.ranks, profile.program),
            ("recorded with", str(profile.fingerprint.setup)),
            ("peak", f"{size(profile.peak_bytes)}, in the {where}"),
            *allocator_pairs(profile.device_memory()),
            ("step", f"{profile.step_ms:.2f} ms ({profile.runtime}), forward {profile.forward_ms:.2f} ms"),
            ("recorded", f"{len(profile.program.ops)} ops ({profile.mode}, {profile.trace})"),
        ]
    )


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts about a plan, for ``--json``. Decisions on single ops are in the file of ``-o``."""
    return {
        "model_class": plan.fingerprint.model_class,
        "device": plan.device,
        "setup": msgspec.to_builtins(plan.fingerprint.setup),
        "ranks": msgspec.to_builtins(plan.ranks),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "device_memory": msgspec.to_builtins(plan.device_memory),
        "recompute_ms": plan.recompute_ms,
        "recompute_flops": plan.recompute_flops,
        "lower_bound_ms": plan.lower_bound_ms,
        "added_ms": plan.added_ms,
        "step_ms": plan.step_ms,
        "step_flops": plan.step_flops,
        "status": plan.status,
        "gap": plan.gap,
        "solver": plan.solver,
        "discard_ratios": plan.discard_ratios,
        "techniques": list(plan.provenance.techniques),
        "chunks": msgspec.to_builtins(plan.chunks),
        "gradients": plan.gradients,
        "why_gradients": plan.why_gradients,
        "beyond": list(plan.beyond),
    }


def plan_tables(plan: Plan, profile: Profile, facts: Mapping[str, Any]) -> list[Table]:
    """Return the figures of a plan, its sharding, its chunks, and what its units discard."""
    from sacplan._plan.reading import host_text, whence

    summary = pairs(
        [
            model_row(facts, plan.fingerprint.model_class),
            _device(plan.device, plan.ranks, profile.program),
            ("recorded with", str(plan.fingerprint.setup)),
            ("unplanned", size(plan.baseline_peak_bytes)),
            ("budget", size(plan.budget_bytes) + whence(plan, profile.device_memory_bytes)),
            ("planned", size(plan.peak_bytes)),
            *allocator_pairs(plan.device_memory),
            (
                "recompute",
                f"{plan.recompute_ms:.2f} ms, {format_share(plan.recompute_ms, plan.step_ms)} of the step without a "
                f"plan; {format_share(plan.recompute_flops, plan.step_flops)} of its FLOPs",
            ),
            ("step", f"{_planned_ms(plan)}, {plan.step_ms:.2f} ms without a plan"),
            ("lower bound", f"{plan.lower_bound_ms:.2f} ms, for any schedule with that peak"),
            *chunk_pairs(plan),
            *([("on the host", host_text(plan))] if plan.offloaded else []),
            *([("cheaper", ". ".join(plan.beyond))] if plan.beyond else []),
            ("solver", f"{plan.solver}, {plan.status}"),
            *_sharding_pairs(plan),
        ]
    )
    tables = [summary]
    if plan.ranks.sharding is not None and plan.ranks.sharding.styles:
        tables.append(_sharding_table(plan.ranks.sharding))
    if plan.chunks:
        tables.append(_chunks_table(plan, profile))
    # Without chunks, a table of units that discard nothing says just that. With chunks, such units may only be
    # there to run in slices, and are in the table of chunks.
    if plan.discarded or (plan.units and not plan.chunks):
        tables.append(_units_table(plan))
    return tables


def allocator_pairs(found: DeviceMemory | None) -> list[tuple[str, str]]:
    """Return the peaks that torch's allocator would report; nothing for a CPU."""
    from sacplan._plan.reading import device_memory_text

    return [("on the GPU", device_memory_text(found))] if found is not None else []


def _planned_ms(plan: Plan) -> str:
    return f"{plan.planned_ms:.2f} ms"


def _sharding_pairs(plan: Plan) -> list[tuple[str, str]]:
    if plan.ranks.sharding is None:
        return []
    from sacplan._plan.meshes import described_name

    name = str(plan.provenance.options.get("sharding", "given"))
    return [("sharding", described_name(name, plan.ranks.sharding.mesh))]


def _sharding_table(sharding: Sharding) -> Table:
    """Return what ``parallelize_module`` is given."""
    return table([f"on {sharding.mesh}", "style"], [[*item] for item in sharding.styles.items()])


def chunk_pairs(plan: Plan) -> list[tuple[str, str]]:
    """Return rows on what chunks cost and how they affect gradients. Empty unless the plan may use chunks."""
    if "chunk" not in plan.provenance.techniques:
        return []
    cost = (
        f"{plan.added_ms:+.2f} ms, {format_share(plan.added_ms, plan.step_ms)} of the step"
        if plan.chunks
        else "none"
    )
    found = [("chunks", cost)]
    # In inference there are no gradients that slices could change.
    if plan.provenance.mode == "train":
        found.append(("gradients", f"{plan.gradients}, because {plan.why_gradients}"))
    return found


def _chunks_table(plan: Plan, profile: Profile) -> Table:
    from sacplan._report.chunks import chunk_rows

    rows = [
        [
            row.module or "(the model)",
            str(row.count),
            str(row.slices),
            str(row.rows),
            f"{row.added_ms:+.2f}",
            row.what,
        ]
        for row in chunk_rows(profile, plan)
    ]
    columns = (
        "in slices from",
        number("slices"),
        number("of rows"),
        number("added ms"),
        "what runs in slices",
    )
    return table(columns, rows, ("added ms", "of rows"))


def _units_table(plan: Plan) -> Table:
    """Return what units discard. Units that do the same share a row."""
    groups: dict[Any, list[str]] = {}
    discarded = plan.discarded
    chunked = {chunk.unit for chunk in plan.chunks}
    for fqn in plan.units:
        # It runs in slices and discards nothing: it is in the table of chunks.
        if fqn in chunked and fqn not in discarded:
            continue
        # By pattern and by what they discard: layers that do the same share a row.
        groups.setdefault((re.sub(r"\d+", "*", fqn), tuple(discarded.get(fqn, ()))), []).append(fqn)
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
    # The groups that are cut off still count: one row says how many units they have.
    if left := rows[_GROUPS:]:
        units_left = str(sum(int(row[1]) for row in left))
        rows[_GROUPS:] = [[f"and {len(left)} more groups", units_left, "", "", "see -o or --json"]]
    columns = ("modules", number("units"), number("discard"), number("recompute ms"), "what is recomputed")
    return table(columns, rows, ("units", "recompute ms"))


def together(names: Sequence[str]) -> str:
    """Join names that differ in one number: ``layers.{0-3,7}.mlp``."""
    if len(names) == 1:
        return names[0] or "(the model)"
    # Words and numbers in turn. The names have one pattern, so the lists have one length.
    parts = [re.split(r"(\d+)", n) for n in names]
    varying = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    # Names that differ in several numbers, or in none, have no short form.
    if len(varying) != 1:
        return f"{names[0]} ... {names[-1]}"
    i = varying[0]
    return "".join([*parts[0][:i], "{" + _ranges([int(p[i]) for p in parts]) + "}", *parts[0][i + 1 :]])


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        # It continues the run before.
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _op_counts(sites: Iterable[CallSite]) -> str:
    counts = Counter(site.op.removeprefix("aten.").removesuffix(".default") for site in sites)
    # The most frequent ops first, since only some are shown.
    words = [name if n == 1 else f"{name} x{n}" for name, n in counts.most_common()]
    more = [f"{len(words) - _OPS} other ops"] if len(words) > _OPS else []
    return ", ".join([*words[:_OPS], *more])


def _whose_time(seen: Verification, plan: Plan) -> str:
    """Say which time a verification reports: wall time for a real step, a prediction for a fake one."""
    if seen.run == "real":
        return f"wall time here; predicted for {plan.device}: {_planned_ms(plan)}"
    return f"predicted, {plan.step_ms:.2f} ms without a plan"


def verification_table(seen: Verification, plan: Plan, facts: Mapping[str, Any]) -> Table:
    """Return a verification as a table."""
    return pairs(
        [
            model_row(facts, plan.fingerprint.model_class),
            # All peaks below are those of one rank, so a row says how many there are.
            *([_device(plan.device, plan.ranks)] if plan.ranks.devices > 1 else []),
            ("budget", size(seen.budget_bytes)),
            ("planned", size(seen.predicted_peak_bytes)),
            ("seen", f"{size(seen.peak_bytes)}, {seen.source}"),
            *([("on the host", seen.host_text)] if seen.predicted_host_bytes else []),
            ("difference", f"{seen.error:+.3%}, planned against seen"),
            ("recompute", f"{seen.recompute_flops / 1e9:.2f} GFLOP"),
            ("step", f"{seen.step_ms:.2f} ms ({_whose_time(seen, plan)})"),
            ("verdict", "within the budget" if seen.within_budget else "OVER the budget"),
            # The first few show what is wrong; ``--json`` has all of them.
            *(("not as planned", str(difference)) for difference in seen.differences[:3]),
            *(("set up otherwise", str(difference)) for difference in seen.setup_differences),
        ]
    )
