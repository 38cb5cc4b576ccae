"""A plan in words: its figures, and what it does in each layer.

    for section in plan_sections(plan): ...
    print(as_text(plan_sections(plan)))

``print(plan)``, notebooks and the command line show the same sections.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import UNSET

from sacplan.core.budget import format_bytes, format_share
from sacplan.core.names import matching_modules
from sacplan.core.program import Program
from sacplan.core.sections import Section
from sacplan.device.device_memory import DeviceMemory
from sacplan.device.outside_allocator import MARGIN, outside_on_gpu, outside_text
from sacplan.distributed.ranks.ranks import Ranks
from sacplan.planning.layers import LayerOps, LayerReading, read_layers, summed
from sacplan.planning.limits import LEFT_ON_CPU
from sacplan.planning.value import PlanValue

_PARTS = 10  # parts that a sentence names; further ones are only counted


def plan_sections(plan: PlanValue) -> list[Section]:
    """Return a plan in words: its figures, then a section for each kind of layer."""
    sections = [Section(f"Plan for {plan.fingerprint.model_class} on {plan.device}", plan_rows(plan))]
    if plan.ranks.sharding is not None:
        styles = tuple(plan.ranks.sharding.styles.items())
        sections.append(Section(f"Modules on mesh {plan.ranks.sharding.mesh}", styles))
    for layer in read_layers(plan):
        rows = [
            ("keeps", amount(layer.kept, len(layer.layers))),
            ("recomputes", amount(layer.recomputed, len(layer.layers), with_time=True)),
            *(("in slices", text) for text in layer.sliced),
            *(("on the host", text) for text in layer.away),
        ]
        sections.append(Section(layer.name, tuple((label, text) for label, text in rows if text)))
    # Unless the model itself is a unit, some modules are outside of all units.
    if "" not in plan.units:
        sections.append(
            Section("All else runs as without a plan." if plan.units else "Runs as without a plan.", ())
        )
    return sections


def kept_sections(layers: Sequence[LayerReading]) -> list[Section]:
    """Return in words what a step keeps in its layers."""
    return [Section(one.name, (("keeps", amount(one.kept, len(one.layers))),)) for one in layers]


def host_text(plan: PlanValue) -> str:
    """Describe what a plan has in the memory of the host; ``""`` for nothing."""
    counts = (len(plan.offloaded), "tensors"), (len(plan.offloaded_weights), "parameters")
    there = " and ".join(f"{n} {what}" for n, what in counts if n)
    if not there:
        return ""
    return (
        f"{format_bytes(plan.host_bytes)}, {there}; with waits and slices the step takes "
        f"{plan.added_ms:+.2f} ms"
    )


def plan_rows(plan: PlanValue) -> tuple[tuple[str, str], ...]:
    """Return the figures of a plan as pairs of label and text, without labels that do not apply."""
    fingerprint, setup = plan.fingerprint, str(plan.fingerprint.setup)
    saves = 1 - plan.peak_bytes / plan.baseline_peak_bytes if plan.baseline_peak_bytes else 0.0
    rows = [
        ("parameters", f"{fingerprint.n_parameters:,}, {fingerprint.dtype or 'none'}"),
        ("batch", fingerprint.batch_in_words),
        ("set up as", setup),
        ("ranks", "" if plan.ranks.devices == 1 else ranks_text(plan.ranks)),
        ("budget", "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes) + whence(plan)),
        (
            "peak",
            f"{format_bytes(plan.peak_bytes)}, {saves:.1%} less than the {format_bytes(plan.baseline_peak_bytes)} "
            "without a plan",
        ),
        ("on the GPU", device_memory_text(plan.device_memory)),
        (
            "recompute",
            f"{plan.recompute_ms:.2f} ms, {format_share(plan.recompute_ms, plan.step_ms)} of the step; no schedule "
            f"with this peak takes less than {plan.lower_bound_ms:.2f} ms",
        ),
        (
            "step",
            f"{plan.planned_ms:.2f} ms, {plan.step_ms:.2f} ms without a plan",
        ),
        (
            "slices",
            f"{plan.added_ms:+.2f} ms, {format_share(plan.added_ms, plan.step_ms)} of the step"
            if plan.chunks
            else "",
        ),
        ("on the host", host_text(plan)),
        ("host budget", "" if plan.provenance.host_budget is UNSET else str(plan.provenance.host_budget)),
        ("gradients", f"{plan.gradients}: {plan.why_gradients}" if plan.provenance.mode == "train" else ""),
        ("technique", ", ".join(plan.provenance.techniques)),
        ("made by", f"{plan.solver} ({plan.status})"),
        ("note", "" if plan.provenance.remarks is UNSET else ". ".join(plan.provenance.remarks)),
        ("limit", plan.provenance.limit_in_words),
        *(("assumes", sentence) for sentence in plan.provenance.assumed),
    ]
    return tuple((label, text) for label, text in rows if text)


def device_memory_text(found: DeviceMemory | None) -> str:
    """Return the peaks of the allocator in words; empty if there are none."""
    if found is None:
        return ""
    return (
        f"max_memory_allocated {format_bytes(found.steps.max_memory_allocated)}, max_memory_reserved "
        f"{format_bytes(found.reserved_bytes(expandable=False))}, "
        f"{format_bytes(found.reserved_bytes(expandable=True))} with expandable segments"
    )


def fills_gpu(plan: PlanValue) -> bool:
    """Whether a plan was made to fit the memory of a GPU, and not for a budget."""
    asked = plan.provenance.budget is not None
    return plan.budget_bytes is not None and plan.device_memory is not None and not asked


def whence(plan: PlanValue) -> str:
    """Say how the limit for the peak came about; ``""`` if there is none, or the user gave it."""
    if plan.budget_bytes is None or plan.provenance.budget is not None:
        return ""
    of_device = f", the memory of {plan.device} less "
    if not fills_gpu(plan):
        return f"{of_device}{LEFT_ON_CPU:.0%}"
    outside = outside_text(outside_on_gpu(plan.ranks.communicators))
    return f"{of_device}{outside}, {MARGIN:.1%} for errors of prediction, and what torch reserves beyond the peak"


def amount(parts: Sequence[LayerOps], layers: int, *, with_time: bool = False) -> str:
    """Return the figures and names of parts: ``1.50 GiB, 3.20 ms each: mm x2 of q_proj, k_proj; ...``."""
    if not parts:
        return ""
    n_bytes, ms = summed(part.n_bytes for part in parts), summed(part.ms for part in parts)
    figures = []
    # 0 bytes are not shown if the parts take time: these ops run again only for other ops.
    if n_bytes is not None and (n_bytes or not ms):
        figures.append(format_bytes(n_bytes))
    if with_time and ms is not None:
        figures.append(_ms(ms))
    said = ", ".join(figures)
    if said and layers > 1:
        said += " each"
    words = "; ".join(map(str, parts[:_PARTS]))
    if parts[_PARTS:]:
        words += f"; and {len(parts) - _PARTS} more"
    return f"{said}: {words}" if said else words


def _ms(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 0.1 or not ms else f"{ms * 1e3:.3g} us"


def as_text(sections: Sequence[Section], width: int = 100) -> str:
    """Return sections as text: each is a title and rows of a label and a text, which is wrapped to ``width``."""
    return "\n\n".join(section.text(width) for section in sections)


def layer_facts(groups: Sequence[LayerReading]) -> list[dict[str, object]]:
    """Return each group of like layers for ``--json``. Bytes and ms are those of one layer."""
    return [
        {
            "layers": list(group.layers),
            "kept": [part_facts(part) for part in group.kept],
            "recomputed": [part_facts(part) for part in group.recomputed],
            "in_slices": list(group.sliced),
            "on_the_host": list(group.away),
        }
        for group in groups
    ]


def part_facts(part: LayerOps) -> dict[str, object]:
    """Return a part of a layer as JSON has it."""
    return {"ops": part.ops, "modules": list(part.modules), "bytes": part.n_bytes, "ms": part.ms}


def ranks_text(ranks: Ranks, program: Program | None = None) -> str:
    """Describe how a step is spread over ranks, and what runs it.

    If its program is given, the text says how many modules each pattern of FSDP2 units matches.
    """
    if ranks.devices == 1:
        return "one device"
    if ranks.fsdp_units is None:
        how = "parallelize_module" if ranks.world_size == 1 else "DistributedDataParallel"
    else:
        how = "fully_shard: " + ", ".join(_unit(pattern, program) for pattern in ranks.fsdp_units)
        how += f"; {ranks.options}" if str(ranks.options) else ""
    if ranks.sharding is not None:
        how = f"mesh {ranks.sharding.mesh}, {how}"
    return f"one of {ranks.devices} ranks, run by {ranks.run_by} ({how})"


def _unit(pattern: str, program: Program | None) -> str:
    if not pattern:
        return "the model"
    # A pattern without a wildcard is the name of one module. Without a program, matches cannot be counted.
    if program is None or not re.search(r"[*?[]", pattern):
        return pattern
    return f"{len(matching_modules(tuple(program.calls), [pattern], 'units'))} x {pattern}"
