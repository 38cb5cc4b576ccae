"""A plan by layers: what each keeps, recomputes and runs in slices.

A plan decides by unit and call site; a reader thinks in layers. These are the steps from decisions to layers:

1. Each call site gets a name as seen from the model, so that it no longer matters which module was the unit.
2. The values made there are grouped by layer, the outermost numbered module.
3. Inside a layer, modules whose ops read the same are folded into one part.
4. Layers with the same parts become one reading: ``model.layers.0-31 (32 layers)``.

All figures of a reading are those of one layer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Chunk
from sacplan.core.elements import pattern_of
from sacplan.core.names import braced, folded_names, one_name, short_op
from sacplan.core.program import CallSite
from sacplan.planning.value import PlanValue, UnitPlan

ITSELF = "(the model itself)"  # the layer of ops that run outside of any module but the model

_LAST = (2**62, 0)  # order of a layer without values, which only runs in slices or waits on the host
_RUNS_IN_SLICES = {
    "rest": "all that is computed from its input on: the loss, and their gradients",
    "module": "the module, forward and backward",
    "backward": "the backward pass of the module, in which its forward pass runs again",
}


class _SiteValue(NamedTuple):
    """The value made at one call site, whatever the unit of the plan.

    Attributes:
        module: the module that runs the op, as seen from the model.
        op: name of the op.
        order: sorts values by execution: index of the unit, then of its place.
        n_bytes, ms: None if the plan has no such figures, such as one that was put together by hand.
    """

    module: str
    op: str
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
        names = ", ".join(braced([name for name in self.modules if name]))
        return f"{self.ops} of {names}" if names else self.ops


@dataclass(frozen=True, slots=True)
class LayerReading:
    """The effect of a plan in layers that are alike.

    Attributes:
        layers: Names of the layers. A layer is a numbered module, or outside of these a module with its own ops.
        kept, recomputed: Parts of one of the layers, the largest first.
        sliced: Descriptions of what runs in slices.
        away: Descriptions of what waits on the host.
    """

    layers: tuple[str, ...]
    kept: tuple[LayerOps, ...]
    recomputed: tuple[LayerOps, ...]
    sliced: tuple[str, ...]
    away: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """One name for all of the layers: ``model.layers.0-31 (32 layers)``."""
        return together(self.layers)


def together(layers: Sequence[str]) -> str:
    """Return one name for layers whose names differ in one number."""
    if len(layers) == 1:
        return layers[0] or ITSELF
    return f"{one_name(layers)} ({len(layers)} layers)"


def read_layers(plan: PlanValue) -> list[LayerReading]:
    """Return what a plan does layer by layer, in order of execution. Modules outside of its units are left out."""
    discarded, places = plan.discarded, _places(plan.units, plan.sequences)
    recomputed: list[_SiteValue] = []
    for fqn, unit in plan.units.items():
        sites = discarded.get(fqn, {})
        recomputed += places[fqn].values(sites, unit.discarded_bytes, unit.discarded_ms)
    sliced: dict[str, list[str]] = defaultdict(list)
    for chunk in plan.chunks:
        layer, inner = _layer_of(chunk.unit)
        sliced[layer].append(f"{f'{inner}: ' if inner else ''}{what_runs(chunk)}, in {chunk.slices} slices")
    return _folded(_kept_values(plan.units, places), recomputed, sliced, _away(plan, places))


def kept_layers(units: Mapping[str, UnitPlan], sequences: Sequence[OpSequence]) -> list[LayerReading]:
    """Return what a step keeps without a plan. The arguments are from ``unit_plans`` with nothing discarded."""
    return _folded(_kept_values(units, _places(units, sequences)), [], {}, {})


def what_runs(chunk: Chunk) -> str:
    """Describe what a chunk runs in slices."""
    if chunk.span == "stretch":
        return f"a stretch of {len(chunk.sites)} ops"
    return _RUNS_IN_SLICES[chunk.span]


def _away(plan: PlanValue, places: Mapping[str, _Places]) -> dict[str, tuple[str, ...]]:
    """Return by layer, in words, what waits on the host: tensors, by the ops that make or read them, and parameters."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in plan.offloaded:
        # A plan that was written by hand may name a unit of which it holds no calls.
        known = places.get(one.unit)
        layer, inner = _layer_of(known.of(one.sites[0])[0] if known is not None else one.unit)
        found[layer][f"{short_op(one.op)}{f' of {inner}' if inner else ''}"] += 1
    texts: dict[str, tuple[str, ...]] = {
        layer: ("of what it keeps: " + ", ".join(f"{op} x{n}" if n > 1 else op for op, n in ops.items()),)
        for layer, ops in found.items()
    }
    weights: dict[str, list[str]] = defaultdict(list)
    for weight in plan.offloaded_weights:
        owner, _, name = weight.parameter.rpartition(".")
        layer, inner = _layer_of(owner)
        weights[layer].append(f"{inner}.{name}".strip("."))
    for layer, names in weights.items():
        texts[layer] = (*texts.get(layer, ()), f"parameters: {', '.join(names)}")
    return texts


def _kept_values(units: Mapping[str, UnitPlan], places: Mapping[str, _Places]) -> list[_SiteValue]:
    return [
        value
        for fqn, unit in units.items()
        for value in places[fqn].values(unit.kept, unit.kept_bytes, (0.0,) * len(unit.kept))
    ]


def _places(units: Mapping[str, UnitPlan], sequences: Sequence[OpSequence]) -> dict[str, _Places]:
    # The index of a unit comes first in the order of its values, and their place in the unit second.
    return {fqn: _Places(index, fqn, unit, sequences) for index, (fqn, unit) in enumerate(units.items())}


class _Places:
    """The modules that the call sites of one unit are in, as seen from the model."""

    def __init__(self, index: int, fqn: str, unit: UnitPlan, sequences: Sequence[OpSequence]) -> None:
        self.index, self.fqn = index, fqn
        self.known: dict[str, tuple[int, str]] = {}  # place to (order, module around it)
        # If calls of the unit differ, a place takes its order from the first call that has it.
        for i in unit.calls:
            for caller, place, _ in sequences[i]:
                self.known.setdefault(place, (len(self.known), caller))

    def of(self, site: CallSite) -> tuple[str, tuple[int, int]]:
        """Return the module that runs a call site, and its place in the order of execution."""
        # "after X" is in the module that calls X. If no recorded sequence has the place, its name says which that is.
        after, inner = site.place.startswith("after "), site.place.removeprefix("after ")
        around = inner.rpartition(".")[0] if after else inner
        order, caller = self.known.get(site.place, (len(self.known), around))
        # A second call of a module has " (2)" after its name, which is cut off: it is the same module.
        module = re.sub(r" \(\d+\)$", "", caller)
        return f"{self.fqn}.{module}".strip("."), (self.index, order)

    def values(
        self, sites: Collection[CallSite], n_bytes: Sequence[int], times: Sequence[float]
    ) -> Iterator[_SiteValue]:
        """Yield the values made at some sites; empty ``n_bytes`` or ``times`` are unknown figures."""
        unknown = (None,) * len(sites)
        for site, n, ms in zip(sites, n_bytes or unknown, times or unknown, strict=True):
            module, order = self.of(site)
            yield _SiteValue(module, site.op, order, n, ms)


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
    away: Mapping[str, tuple[str, ...]],
) -> list[LayerReading]:
    """Group values by layer, and fold layers that read the same into one.

    Layers are the same if their names differ only in numbers and their parts have the same words and bytes. Times may
    differ by rounding, so they are not compared; those of the first layer are shown.
    """
    by_layer: dict[str, tuple[list[_SiteValue], list[_SiteValue]]] = {}
    for which, values in enumerate((recomputed, kept)):
        for value in values:
            by_layer.setdefault(_layer_of(value.module)[0], ([], []))[which].append(value)
    for layer in (*sliced, *away):
        by_layer.setdefault(layer, ([], []))

    def order(layer: str) -> tuple[int, ...]:
        return min((value.order for values in by_layer[layer] for value in values), default=_LAST)

    read = {layer: tuple(map(_parts, by_layer[layer])) for layer in sorted(by_layer, key=order)}
    alike: dict[object, list[str]] = defaultdict(list)
    for layer, (again, held) in read.items():
        # Two layers are alike if a reader would see the same words and bytes for them.
        words = tuple((str(part), part.n_bytes) for part in (*again, *held))
        others = (tuple(sliced.get(layer, ())), away.get(layer, ()))
        # The number of recomputed parts is in the key, since ``words`` alone does not tell where they end and the kept
        # ones begin.
        alike[pattern_of(layer), len(again), words, others].append(layer)
    found = []
    for layers in alike.values():
        first = layers[0]
        again, held = read[first]
        found.append(
            LayerReading(tuple(layers), held, again, tuple(sliced.get(first, ())), away.get(first, ()))
        )
    return found


def _parts(values: Iterable[_SiteValue]) -> tuple[LayerOps, ...]:
    """Group the values of a layer by module, and fold modules with the same ops into one part."""
    by_module: dict[str, list[_SiteValue]] = defaultdict(list)
    for value in values:
        by_module[_layer_of(value.module)[1]].append(value)
    alike: dict[tuple[str, bool], list[tuple[str, list[_SiteValue]]]] = defaultdict(list)
    for module, own in by_module.items():
        # Ops of the layer itself stay apart: the folded name of several modules has no word for it.
        alike[_ops_in_words(own), not module].append((module, own))
    parts = [
        LayerOps(
            ops,
            folded_names([module for module, _ in same]),
            summed(value.n_bytes for _, own in same for value in own),
            summed(value.ms for _, own in same for value in own),
        )
        for (ops, _), same in alike.items()
    ]
    # The largest first; of parts that keep nothing, those that take longest.
    return tuple(sorted(parts, key=lambda part: (-(part.n_bytes or 0), -(part.ms or 0.0))))


def _ops_in_words(values: Iterable[_SiteValue]) -> str:
    counts = Counter(short_op(value.op) for value in values)
    return ", ".join(op if n == 1 else f"{op} x{n}" for op, n in counts.items())


def summed(numbers: Iterable[float | int | None]) -> int | None:
    """Return the sum; None if a number is unknown."""
    found = list(numbers)
    return None if None in found else sum(found)  # type: ignore[arg-type]
