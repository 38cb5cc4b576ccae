"""The differences between two plans: their figures, and by layer what one of them recomputes and the other does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sacplan.core.elements import pattern_of
from sacplan.core.notebook import Section
from sacplan.planning.layers import LayerOps, folded, read_layers, together, values_of
from sacplan.planning.reading import amount, part_facts, plan_rows
from sacplan.planning.value import PlanValue


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
    styles = [dict(plan.ranks.sharding.styles) if plan.ranks.sharding else {} for plan in (first, second)]
    for name in dict.fromkeys((*styles[0], *styles[1])):
        if styles[0].get(name) != styles[1].get(name):
            figures[f"style of {name}"] = (styles[0].get(name, "none"), styles[1].get(name, "none"))
    # Compared by call sites as seen from the model, so it does not matter which units the two plans have.
    again = [{value.at: value for value in values_of(plan)[1]} for plan in (first, second)]
    only = [[value for at, value in one.items() if at not in other] for one, other in (again, again[::-1])]
    # The two lists take the places of what is kept and what is recomputed, so that equal layers are folded here, too.
    changed = [
        LayerDifference(layer.layers, layer.kept, layer.recomputed) for layer in folded(only[0], only[1], {})
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
            (f"only {name} recomputes", amount(parts, len(layer.layers), with_time=True))
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
                "only_first_recomputes": [part_facts(part) for part in layer.only_first],
                "only_second_recomputes": [part_facts(part) for part in layer.only_second],
                "in_slices": list(layer.slices),
            }
            for layer in found.layers
        ],
    }
