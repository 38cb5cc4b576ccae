"""Show profiles, plans, verifications and targets: the library's own words for people, and facts for ``--json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from sacplan.cli.output import pairs
from sacplan.core.budget import format_bytes
from sacplan.core.sections import Section

if TYPE_CHECKING:
    from pathlib import Path

    from sacplan import Plan, Profile
    from sacplan.integrations.hf.target import Target


_PARTS = 5  # of what is alive at the peak, the largest


def size(n_bytes: int) -> str:
    """Write bytes rounded and exactly: ``2.41 GiB (2587710464 bytes)``."""
    return f"{format_bytes(n_bytes)} ({n_bytes} bytes)"


# --- for people


def sections_shown(sections: Sequence[Section], hf: Mapping[str, Any] | None = None) -> list[Table | str]:
    """Return sections as titles with tables below them; the first table says how an ``hf:`` target was made."""
    shown: list[Table | str] = []
    for section in sections:
        rows = section.rows
        if hf and not shown:
            rows = (("target", ", ".join(_fact(name, value) for name, value in hf.items())), *rows)
        shown += [*([""] if shown else []), section.title]
        if rows:
            shown.append(pairs([(f"  {label}", text) for label, text in rows]))
    return shown


def _fact(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if value is True:  # a flag: ``load in 4bit``
        return words
    return f"{words} {value:,}" if name in ("parameters", "trained") else f"{words} {value}"


def profile_section(profile: Profile) -> Section:
    """Return a profile in words, with its ranks and what torch's allocator would report."""
    from sacplan.planning.reading import device_memory_text, ranks_text
    from sacplan.questions.parts import parts_of

    words, ranks = profile.in_words(), profile.ranks
    spread = [("ranks", ranks_text(ranks, profile.program))] if ranks.devices > 1 else []
    on_gpu = device_memory_text(profile.device_memory())
    parts = ", ".join(str(part) for part in parts_of(profile, profile.program)[:_PARTS])
    at_peak = [("at the peak", parts)] if parts else []
    return Section(
        words.title, (*spread, *words.rows, *([("on the GPU", on_gpu)] if on_gpu else []), *at_peak)
    )


def remarks(profile: Profile, what: str, output: Path | None) -> list[str]:
    """Return the notes on assumptions, and on the file that the result was saved to."""
    return [*(f"assumed: {sentence}" for sentence in profile.assumptions), *saved(what, output)]


def saved(what: str, output: Path | None) -> list[str]:
    """Return a note on the file that the result was saved to, if there is one."""
    return [] if output is None else [f"{what} written to {output}"]


# --- for ``--json``

_PROFILE = (
    "fingerprint.model_class", "device", "device_memory_bytes", "ranks", "peak_bytes", "step_ms", "forward_ms", "mode",
    "fingerprint.setup", "trace", "runtime", "assumptions",
)  # fmt: skip
# Without the decisions on single ops, which are in the file of ``-o``.
_PLAN = (
    "fingerprint.model_class", "device", "fingerprint.setup", "ranks", "budget_bytes", "peak_bytes", "host_bytes",
    "baseline_peak_bytes", "device_memory", "recompute_ms", "recompute_flops", "lower_bound_ms", "added_ms", "step_ms",
    "step_flops", "status", "gap", "solver", "discard_ratios", "provenance.techniques", "chunks", "gradients",
    "why_gradients",
)  # fmt: skip


def facts_of(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes as JSON-ready facts, each under the last part of its dotted name."""
    return {name.rpartition(".")[2]: msgspec.to_builtins(attrgetter(name)(value)) for name in names}


def target_facts(target: Target | None, output: Path | None = None) -> dict[str, Any]:
    """Return the facts about a target, and the file that the result was saved to."""
    facts: dict[str, Any] = {} if target is None else {"target": target.name}
    # Only ``hf:`` targets have facts. What another target does is in the user's code.
    if target is not None and target.facts:
        facts["hf"] = dict(target.facts)
    return facts if output is None else {**facts, "output": str(output)}


def profile_facts(profile: Profile) -> dict[str, Any]:
    """Return the facts about a profile."""
    return facts_of(profile, _PROFILE) | {
        "device_memory": msgspec.to_builtins(profile.device_memory()),
        "peak_phase": profile.baseline.peak_phase.name.lower(),
        "peak_module": profile.baseline.peak_fqn,
        "step_flops": profile.program.flops,
        "ops": len(profile.program.ops),
    }


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts about a plan."""
    return facts_of(plan, _PLAN)
