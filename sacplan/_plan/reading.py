"""A plan in words: what each layer keeps, recomputes and runs in slices, and where two plans differ.

    for section in plan_sections(plan): ...
    print(as_text(plan_sections(plan)))

``print(plan)``, notebooks and the command line show the same sections.

A plan decides by unit and call site; a reader thinks in layers. The way from one to the other:

1. Each call site gets a name as seen from the model, so that it no longer matters which module was the unit.
2. The values made there are grouped by layer, the outermost numbered module.
3. Inside a layer, modules whose ops read the same are folded into one part.
4. Layers with the same parts become one section: ``model.layers.0-31 (32 layers)``.

All figures of a section are those of one layer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from msgspec import UNSET

from sacplan._device.device_memory import DeviceMemory
from sacplan._device.outside_allocator import outside_on_gpu, outside_text
from sacplan._plan.value import PlanValue, UnitPlan
from sacplan._program.budget import format_bytes, format_share
from sacplan._program.decisions import Chunk
from sacplan._program.elements import pattern_of
from sacplan._program.names import folded_names, one_name, short_op
from sacplan._program.notebook import Section
from sacplan._program.places import OpSequence
from sacplan._program.program import CallSite, Program
from sacplan._ranks.ranks import Ranks
from sacplan._ranks.shards import resolve_units

ITSELF = "(the model itself)"  # the layer of ops that run outside of any module but the model

_LAST = (2**62, 0)  # order of a layer of which no value is known: it runs in slices and nothing else
_PARTS = 10  # named in a sentence; the others are only counted
_RUNS_IN_SLICES = {
    "rest": "all that is computed from its input on: the loss, and their gradients",
    "module": "the module, forward and backward",
    "backward": "the backward pass of the module, in which its forward pass runs again",
}


class _ModelSite(NamedTuple):
    """A call site as seen from the model, so that it is the same whatever the unit of the plan."""

    module: str
    place: str
    op: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class _SiteValue:
    """The value made at one call site.

    ``order`` is the order of execution. Bytes and ms are None if the plan has no such figures, as in older files.
    """

    at: _ModelSite
    order: tuple[int, int]
    n_bytes: int | None
    ms: float | None


@dataclass(frozen=True, slots=True)
class LayerOps:
    """Ops of the same kind in modules of a layer.

    Attributes:
        ops: Their names, with how often each runs.
        modules: Names relative to the layer; ``""`` is the layer itself.
        n_bytes: Bytes of their outputs that autograd asks for; None if not known.
        ms: Predicted time to run them again, 0 if they are kept; None if not known.
    """

    ops: str
    modules: tuple[str, ...]
    n_bytes: int | None
    ms: float | None

    def __str__(self) -> str:
        names = ", ".join(name for name in self.modules if name)
        return f"{self.ops} of {names}" if names else self.ops


@dataclass(frozen=True, slots=True)
class LayerReading:
    """The effect of a plan in layers that are alike.

    Attributes:
        layers: Names of the layers. A layer is a numbered module, or outside of those a module with ops of its own.
        kept, recomputed: Parts of one of the layers, the largest first.
        sliced: Descriptions of what runs in slices.
        away: The ops whose outputs or inputs wait on the host.
    """

    layers: tuple[str, ...]
    kept: tuple[LayerOps, ...]
    recomputed: tuple[LayerOps, ...]
    sliced: tuple[str, ...]
    away: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """One name for all of them: ``model.layers.0-31 (32 layers)``."""
        return together(self.layers)


def together(layers: Sequence[str]) -> str:
    """Return one name for layers whose names differ in one number."""
    if len(layers) == 1:
        return layers[0] or ITSELF
    return f"{one_name(layers)} ({len(layers)} layers)"


def read_layers(plan: PlanValue) -> list[LayerReading]:
    """Return what a plan does layer by layer, in order of execution. Outside of its units it does nothing."""
    kept, recomputed = _values(plan)
    sliced: dict[str, list[str]] = defaultdict(list)
    for chunk in plan.chunks:
        layer, inner = _layer_of(chunk.unit)
        sliced[layer].append(f"{f'{inner}: ' if inner else ''}{what_runs(chunk)}, in {chunk.slices} slices")
    return _folded(kept, recomputed, sliced, _away(plan))


def kept_layers(units: Mapping[str, UnitPlan], sequences: Sequence[OpSequence]) -> list[LayerReading]:
    """Return what a step keeps without a plan. The arguments are from ``unit_plans`` with nothing discarded."""
    return _folded(list(_kept_values(units, sequences)), [], {})


def what_runs(chunk: Chunk) -> str:
    """Describe what a chunk runs in slices."""
    if chunk.span == "stretch":
        return f"a stretch of {len(chunk.sites)} ops"
    return _RUNS_IN_SLICES[chunk.span]


def _values(plan: PlanValue) -> tuple[list[_SiteValue], list[_SiteValue]]:
    """Return the values that are kept, and those that are recomputed, in the units of a plan."""
    discarded = plan.discarded
    recomputed = []
    # The place of a unit in the plan comes first in the order of its values, and their place in the unit second.
    for index, (fqn, unit) in enumerate(plan.units.items()):
        sites = discarded.get(fqn, {})
        places = _ModelSites(index, fqn, unit, plan.sequences)
        # Plans from older files have no figures for single call sites.
        n_bytes = unit.discarded_bytes or (None,) * len(sites)
        times = unit.discarded_ms or (None,) * len(sites)
        recomputed += [
            _SiteValue(*places.of(site), n, ms) for site, n, ms in zip(sites, n_bytes, times, strict=True)
        ]
    return list(_kept_values(plan.units, plan.sequences)), recomputed


def _away(plan: PlanValue) -> dict[str, tuple[str, ...]]:
    """Return by layer, in words, the tensors that wait on the host: the ops that make or read them."""
    places = {
        fqn: _ModelSites(index, fqn, unit, plan.sequences)
        for index, (fqn, unit) in enumerate(plan.units.items())
    }
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in plan.offloaded:
        # A plan that was written by hand may name a unit of which it holds no calls.
        known = places.get(one.unit)
        layer, inner = _layer_of(known.of(one.sites[0])[0].module if known is not None else one.unit)
        found[layer][f"{short_op(one.op)}{f' of {inner}' if inner else ''}"] += 1
    return {
        layer: (", ".join(f"{op} x{n}" if n > 1 else op for op, n in ops.items()),)
        for layer, ops in found.items()
    }


def _kept_values(units: Mapping[str, UnitPlan], sequences: Sequence[OpSequence]) -> Iterable[_SiteValue]:
    for index, (fqn, unit) in enumerate(units.items()):
        places = _ModelSites(index, fqn, unit, sequences)
        n_bytes = unit.kept_bytes or (None,) * len(unit.kept)
        yield from (_SiteValue(*places.of(site), n, 0.0) for site, n in zip(unit.kept, n_bytes, strict=True))


class _ModelSites:
    """Names the call sites of a unit as seen from the model."""

    def __init__(self, index: int, fqn: str, unit: UnitPlan, sequences: Sequence[OpSequence]) -> None:
        self.index, self.fqn = index, fqn
        self.known: dict[str, tuple[int, str]] = {}  # place to (order, module around it)
        # If calls of a unit differ, a place has the position of the first call that has it.
        for i in unit.calls:
            for caller, place, _ in sequences[i]:
                self.known.setdefault(place, (len(self.known), caller))

    def of(self, site: CallSite) -> tuple[_ModelSite, tuple[int, int]]:
        """Return the call site as seen from the model, and its place in the order of execution."""
        # "after X" is in the module that calls X. If the recorded sequence does not have the place, its name tells.
        after, inner = site.place.startswith("after "), site.place.removeprefix("after ")
        around = inner.rpartition(".")[0] if after else inner
        order, caller = self.known.get(site.place, (len(self.known), around))
        place = f"after {self._named(inner)}" if after else self._named(inner)
        # A second call of a module has " (2)" behind its name, but it is the same module.
        module = self._named(re.sub(r" \(\d+\)$", "", caller))
        return _ModelSite(module, place, site.op, site.occurrence), (self.index, order)

    def _named(self, inner: str) -> str:
        return f"{self.fqn}.{inner}".strip(".")


def _layer_of(module: str) -> tuple[str, str]:
    """Split the name of a module into its layer, the outermost numbered module, and the rest.

    A module inside no numbered one is its own layer.
    """
    parts = module.split(".")
    # A name without a number is a layer as a whole: the index of its last part leaves nothing for the rest.
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])


def _folded(
    kept: Sequence[_SiteValue],
    recomputed: Sequence[_SiteValue],
    sliced: Mapping[str, Sequence[str]],
    away: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[LayerReading]:
    """Group values by layer, and fold layers that read the same into one.

    Layers are the same if their names differ only in numbers and their parts have the same words and bytes. Times may
    differ by rounding, so they are not compared; those of the first layer are shown.
    """
    by_layer: dict[str, tuple[list[_SiteValue], list[_SiteValue]]] = {}
    for which, values in enumerate((recomputed, kept)):
        for value in values:
            by_layer.setdefault(_layer_of(value.at.module)[0], ([], []))[which].append(value)
    for layer in (*sliced, *away):
        by_layer.setdefault(layer, ([], []))

    def order(layer: str) -> tuple[int, ...]:
        return min((value.order for values in by_layer[layer] for value in values), default=_LAST)

    alike: dict[object, list[tuple[str, tuple[LayerOps, ...], tuple[LayerOps, ...]]]] = defaultdict(list)
    for layer in sorted(by_layer, key=order):
        again, held = map(_parts, by_layer[layer])
        # The words that a reader would see decide whether two layers are alike, and the bytes beside them.
        words = tuple((str(part), part.n_bytes) for part in (*again, *held))
        others = (tuple(sliced.get(layer, ())), away.get(layer, ()))
        # The number of recomputed parts is in the key, since ``words`` alone does not tell where they end and the kept
        # ones begin.
        alike[pattern_of(layer), len(again), words, others].append((layer, held, again))
    return [
        LayerReading(
            tuple(one[0] for one in same),
            same[0][1],
            same[0][2],
            tuple(sliced.get(same[0][0], ())),
            away.get(same[0][0], ()),
        )
        for same in alike.values()
    ]


def _parts(values: Iterable[_SiteValue]) -> tuple[LayerOps, ...]:
    """Group the values of a layer by module, and fold modules with the same ops into one part."""
    by_module: dict[str, list[_SiteValue]] = defaultdict(list)
    for value in values:
        by_module[_layer_of(value.at.module)[1]].append(value)
    alike: dict[tuple[str, bool], list[tuple[str, list[_SiteValue]]]] = defaultdict(list)
    for module, own in by_module.items():
        # Ops of the layer itself stay apart: the folded name of several modules has no word for it.
        alike[_ops_in_words(own), not module].append((module, own))
    parts = [
        LayerOps(
            ops,
            folded_names([module for module, _ in same]),
            _sum(value.n_bytes for _, own in same for value in own),
            _sum(value.ms for _, own in same for value in own),
        )
        for (ops, _), same in alike.items()
    ]
    # The largest first. Of parts that keep nothing, the one that takes longest.
    return tuple(sorted(parts, key=lambda part: (-(part.n_bytes or 0), -(part.ms or 0.0))))


def _ops_in_words(values: Iterable[_SiteValue]) -> str:
    counts = Counter(short_op(value.at.op) for value in values)
    return ", ".join(op if n == 1 else f"{op} x{n}" for op, n in counts.items())


def _sum(numbers: Iterable[float | int | None]) -> int | None:
    found = list(numbers)
    # A sum with an unknown part would be wrong, so it is unknown as well.
    return None if None in found else sum(found)  # type: ignore[arg-type]


# --- sections ---------------------------------------------------------------------------------------------------


def plan_sections(plan: PlanValue) -> list[Section]:
    """Return a plan in words: its figures, then a section for each kind of layer."""
    sections = [Section(f"Plan for {plan.fingerprint.model_class} on {plan.device}", plan_rows(plan))]
    if plan.ranks.sharding is not None:
        homes = tuple(plan.ranks.sharding.homes.items())
        sections.append(Section(f"Parameters on mesh {plan.ranks.sharding.mesh}", homes))
    for layer in read_layers(plan):
        rows = [
            ("keeps", _amount(layer.kept, len(layer.layers))),
            ("recomputes", _amount(layer.recomputed, len(layer.layers), with_time=True)),
            *(("in slices", text) for text in layer.sliced),
            *(("on the host", f"of what it keeps: {text}") for text in layer.away),
        ]
        sections.append(Section(layer.name, tuple((label, text) for label, text in rows if text)))
    # If the model itself is a unit, nothing is left outside of the units.
    if "" not in plan.units:
        sections.append(
            Section("All else runs as without a plan." if plan.units else "Runs as without a plan.", ())
        )
    return sections


def kept_sections(layers: Sequence[LayerReading]) -> list[Section]:
    """Return in words what a step keeps in its layers."""
    return [Section(one.name, (("keeps", _amount(one.kept, len(one.layers))),)) for one in layers]


def host_text(plan: PlanValue) -> str:
    """Return what a plan has in the memory of the host; ``""`` for nothing."""
    if not plan.offloaded:
        return ""
    return (
        f"{format_bytes(plan.host_bytes)}, {len(plan.offloaded)} tensors; with waits and slices the step takes "
        f"{plan.added_ms:+.2f} ms"
    )


def plan_rows(plan: PlanValue) -> tuple[tuple[str, str], ...]:
    """Return the figures of a plan as labels and texts. Labels that do not apply are left out."""
    fingerprint, setup = plan.fingerprint, str(plan.fingerprint.setup)
    saves = 1 - plan.peak_bytes / plan.baseline_peak_bytes if plan.baseline_peak_bytes else 0.0
    rows = [
        ("parameters", f"{fingerprint.n_parameters:,}, {fingerprint.dtype or 'none'}"),
        ("batch", fingerprint.batch_in_words),
        ("set up as", setup),
        ("ranks", "" if plan.ranks.world_size == 1 else ranks_text(plan.ranks)),
        ("budget", "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes) + whence(plan)),
        (
            "peak",
            f"{format_bytes(plan.peak_bytes)}, {saves:.1%} less than the {format_bytes(plan.baseline_peak_bytes)} "
            "without a plan",
        ),
        ("on the GPU", device_memory_text(plan.device_memory)),
        (
            "recompute",
            f"{plan.recompute_ms:.2f} ms, {format_share(plan.recompute_ms, plan.step_ms)} of the step",
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
        ("cheaper", ". ".join(plan.beyond)),
        ("technique", ", ".join(plan.provenance.techniques)),
        ("made by", f"{plan.solver} ({plan.status})"),
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
    """Whether a plan was made to fit a GPU, without a budget or headroom."""
    asked = plan.provenance.budget is not None or plan.provenance.headroom is not None
    return plan.budget_bytes is not None and plan.device_memory is not None and not asked


def whence(plan: PlanValue, memory_bytes: int | None = None) -> str:
    """Say how the limit for the peak came about; empty for a budget that was asked for.

    Args:
        plan: The plan.
        memory_bytes: Memory of its device, if it is known. Then the figures add up to it.
    """
    # No budget, or one that the user gave.
    if plan.budget_bytes is None or plan.provenance.budget is not None:
        return ""
    of_device = f", the memory of {plan.device} less "
    # The tensors may take all of the memory but a headroom: the one that the user gave, or the default.
    if not fills_gpu(plan):
        headroom = plan.provenance.headroom
        return of_device + ("15%" if headroom is None else str(headroom))
    outside = outside_on_gpu(plan.ranks.communicators)
    found = f"{of_device}{outside_text(outside)}"
    if memory_bytes is None:
        return f"{found} and what torch reserves beyond the peak"
    # What remains between the memory and the limit is what torch reserves beyond the peak.
    beyond = memory_bytes - sum(one.n_bytes for one in outside) - plan.budget_bytes
    return (
        f"{found}, and less {format_bytes(beyond)} that torch reserves beyond the peak" if beyond else found
    )


def _amount(parts: Sequence[LayerOps], layers: int, *, with_time: bool = False) -> str:
    """Return the figures and names of parts: ``1.50 GiB, 3.20 ms each: mm x2 of q_proj, k_proj; ...``."""
    if not parts:
        return ""
    n_bytes, ms = _sum(part.n_bytes for part in parts), _sum(part.ms for part in parts)
    figures = []
    # 0 bytes are not shown if the parts take time: those ops run again only for other ops.
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
    """Return sections as text: each has a title, and rows below it whose long texts are wrapped beside their label."""
    return "\n\n".join(section.text(width) for section in sections)


def layer_facts(layers: Sequence[LayerReading]) -> list[dict[str, object]]:
    """Return the layers for ``--json``. Bytes and ms are those of one layer."""
    return [
        {
            "layers": list(layer.layers),
            "kept": [_part_facts(part) for part in layer.kept],
            "recomputed": [_part_facts(part) for part in layer.recomputed],
            "in_slices": list(layer.sliced),
            "on_the_host": list(layer.away),
        }
        for layer in layers
    ]


def _part_facts(part: LayerOps) -> dict[str, object]:
    return {"ops": part.ops, "modules": list(part.modules), "bytes": part.n_bytes, "ms": part.ms}


def ranks_text(ranks: Ranks, program: Program | None = None) -> str:
    """Describe how a step is spread over ranks, and what runs it.

    With its program, this includes how many modules each pattern of FSDP2 units matches.
    """
    if ranks.world_size == 1:
        return "one device"
    if ranks.sharding is not None:
        how = f"mesh {ranks.sharding.mesh}"
    elif ranks.fsdp_units is None:
        how = "DistributedDataParallel"
    else:
        how = "fully_shard: " + ", ".join(_unit(pattern, program) for pattern in ranks.fsdp_units)
        how += f"; {ranks.options}" if str(ranks.options) else ""
    return f"one of {ranks.world_size} ranks, run by {ranks.run_by} ({how})"


def _unit(pattern: str, program: Program | None) -> str:
    if not pattern:
        return "the model"
    # Without a wildcard, the pattern is the name of one module. Without a program, nobody knows how many match.
    if program is None or not re.search(r"[*?[]", pattern):
        return pattern
    return f"{len(resolve_units([pattern], program))} x {pattern}"


# --- two plans --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """A difference between two plans, in layers that are alike.

    Attributes:
        layers: Names of the layers.
        only_first, only_second: Parts of one layer that one plan recomputes and the other does not.
        slices: Descriptions of what runs in slices in the first plan and in the second; empty if they are the same.
    """

    layers: tuple[str, ...]
    only_first: tuple[LayerOps, ...]
    only_second: tuple[LayerOps, ...]
    slices: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The difference between two plans.

    Attributes:
        equal: Whether they are equal; provenance does not count.
        figures: Label to both texts, for those that differ, and always for peak and recompute.
        layers: The layers in which they differ.
    """

    equal: bool
    figures: Mapping[str, tuple[str, str]]
    layers: tuple[LayerDifference, ...]


def difference(first: PlanValue, second: PlanValue) -> PlanDifference:
    """Compare two plans call site by call site, whatever their units."""
    rows = [
        {"model": plan.fingerprint.model_class, "device": plan.device, **dict(plan_rows(plan))}
        for plan in (first, second)
    ]
    figures = {
        label: (rows[0].get(label, "none"), rows[1].get(label, "none"))
        for label in dict.fromkeys((*rows[0], *rows[1]))
        if label in ("peak", "recompute") or rows[0].get(label) != rows[1].get(label)
    }
    homes = [dict(plan.ranks.sharding.homes) if plan.ranks.sharding else {} for plan in (first, second)]
    for name in dict.fromkeys((*homes[0], *homes[1])):
        if homes[0].get(name) != homes[1].get(name):
            figures[f"{name} lies as"] = (homes[0].get(name, "replicated"), homes[1].get(name, "replicated"))
    # Compared by call sites as seen from the model, so it does not matter which units the two plans have.
    again = [{value.at: value for value in _values(plan)[1]} for plan in (first, second)]
    only = [[value for at, value in one.items() if at not in other] for one, other in (again, again[::-1])]
    # The two lists take the places of what is kept and what is recomputed, so that equal layers are folded here, too.
    changed = [
        LayerDifference(layer.layers, layer.kept, layer.recomputed) for layer in _folded(only[0], only[1], {})
    ]
    return PlanDifference(first == second, figures, (*changed, *_sliced_otherwise(first, second)))


def _sliced_otherwise(first: PlanValue, second: PlanValue) -> list[LayerDifference]:
    slices: dict[str, tuple[list[str], list[str]]] = {}
    for which, plan in enumerate((first, second)):
        for layer in read_layers(plan):
            for name in layer.layers:
                slices.setdefault(name, ([], []))[which].extend(layer.sliced)
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    # Layers whose slices changed in the same way share one line.
    for name, both in slices.items():
        if both[0] != both[1]:
            texts = ["; ".join(one) or "nothing" for one in both]
            alike[pattern_of(name), texts[0], texts[1]].append(name)
    return [LayerDifference(tuple(names), (), (), (a, b)) for (_, a, b), names in alike.items()]


def difference_sections(found: PlanDifference, names: tuple[str, str]) -> list[Section]:
    """Return in words the layers in which two plans differ; ``names`` are the names of the plans."""
    sections = []
    for layer in found.layers:
        rows = [
            (f"only {name} recomputes", _amount(parts, len(layer.layers), with_time=True))
            for name, parts in zip(names, (layer.only_first, layer.only_second), strict=True)
        ]
        rows += [(f"{name} runs in slices", text) for name, text in zip(names, layer.slices, strict=True)]
        sections.append(Section(together(layer.layers), tuple((label, text) for label, text in rows if text)))
    return sections


def difference_facts(found: PlanDifference) -> dict[str, object]:
    """Return a difference for ``--json``. Bytes and ms are those of one layer."""
    return {
        "equal": found.equal,
        "figures": {label: list(both) for label, both in found.figures.items()},
        "layers": [
            {
                "layers": list(layer.layers),
                "only_first_recomputes": [_part_facts(part) for part in layer.only_first],
                "only_second_recomputes": [_part_facts(part) for part in layer.only_second],
                "in_slices": list(layer.slices),
            }
            for layer in found.layers
        ],
    }
