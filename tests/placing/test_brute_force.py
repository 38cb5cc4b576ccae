"""The integer program against all choices, priced op by op without the search's graph."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
import torch
from torch import nn

import sacplan
from sacplan._device.cost import CostModel
from sacplan._placing.evaluation import ClassChoices
from sacplan._placing.search import ShardingSearch
from sacplan._profile.profile import Profile
from sacplan._program.calls import call_with
from sacplan._program.program import Event, Op, Phase
from sacplan._shard.costs import Costs
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placement
from sacplan._shard.strategies import AxisStrategy, axis_strategies
from sacplan._solve.milp import Milp
from sacplan._torch.calls import Call
from sacplan._torch.ops import op_named

Strategies = Mapping[int, AxisStrategy]


@cache
def linear(tokens: int, width: int, inner: int, optimizer: bool) -> Profile:
    with torch.device("meta"):
        model, batch = nn.Linear(width, inner, bias=False), torch.empty(tokens, width)
    return profiled(model, batch, optimizer)


def profiled(model: nn.Module, batch: torch.Tensor, optimizer: bool) -> Profile:
    return sacplan.profile(
        model,
        batch,
        loss_fn=lambda m, x: m(x).sum(),
        optimizer=torch.optim.AdamW if optimizer else None,
        device="h100",
    )


class Priced:
    """Time and peak of a step on one rank of one axis, gone through event by event."""

    def __init__(self, profile: Profile, ranks: int) -> None:
        self.program = profile.recorded
        self.ranks = ranks
        self.spec = profile.spec
        self.costs = Costs.of(Mesh.of(ranks), profile.spec)
        self.model = CostModel(profile.spec)
        self.part = cache(self._part)
        self.moved = cache(self._moved)
        self.n_bytes = cache(self._n_bytes)
        self.followed = cache(self._followed)

    def meta(self, tensor: int, placement: Placement = REPLICATED) -> torch.Tensor:
        t = self.program.tensors[tensor]
        shape = list(t.shape)
        if placement.is_cut:
            shape[placement.dim] //= self.ranks
        return torch.empty_strided(shape, t.stride, dtype=getattr(torch, t.dtype), device="meta")

    def _n_bytes(self, tensor: int, placement: Placement) -> float:
        t = self.meta(tensor)
        return t.numel() * t.element_size() / (self.ranks if placement.is_cut else 1)

    def strategies(self, op: Op, have: tuple[Placement, ...]) -> tuple[AxisStrategy, ...]:
        func = op_named(op.name)
        assert func is not None
        args, kwargs = call_with(op.arguments, [self.meta(t) for t in op.inputs])
        outputs = [self.meta(t) for t in op.outputs]
        return axis_strategies(Call(func, args, kwargs, outputs), self.ranks, [{p} for p in have])

    def _part(self, index: int, strategy: AxisStrategy) -> float:
        op = self.program.ops[index]

        def ms(inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> float:
            args, kwargs = call_with(op.arguments, list(map(self.meta, op.inputs, inputs)))
            return self.model.cost(
                op_named(op.name), args, kwargs, list(map(self.meta, op.outputs, outputs))
            )[1]

        whole = ms((REPLICATED,) * len(op.inputs), (REPLICATED,) * len(op.outputs))
        return ms(strategy.inputs, strategy.outputs) / whole if whole else 1.0

    def _moved(self, tensor: int, source: Placement, target: Placement) -> tuple[float, float]:
        """What is sent, and what is copied."""
        shape = self.program.tensors[tensor].shape
        n_bytes = self.n_bytes(tensor, REPLICATED)
        ms = self.costs.redistribution_ms(n_bytes, shape, (source,), (target,))
        inner = (source.is_cut and source.dim > 0) or (target.is_cut and target.dim > 0)
        sends = source != target and (source.is_cut or source.is_partial)
        return ms, self.costs.copy_ms(n_bytes) if inner and sends else 0.0

    def price(self, homes: Mapping[int, Placement], chosen: Strategies) -> tuple[float, float] | None:
        """Milliseconds and bytes; None where it cannot run."""
        program = self.program
        layouts: dict[int, Placement] = {}
        sizes: dict[int, float] = {}
        owner: dict[int, int] = {}
        storage_of = {t: program.tensors[t].storage for t in range(len(program.tensors))}
        gradients = {t: s for s, t in program.gradients.items()}
        last = {
            storage_of[t]: i
            for i, op in enumerate(program.ops)
            if op.phase == Phase.BACKWARD
            for t in op.outputs
        }

        def rounded(n: float) -> float:
            return math.ceil(n / self.spec.allocation_round_bytes) * self.spec.allocation_round_bytes

        def layout(tensor: int) -> Placement | None:
            return layouts.get(tensor, homes.get(storage_of[tensor]))

        for storage, home in homes.items():
            sizes[storage] = rounded(program.storage_bytes[storage] / (self.ranks if home.is_cut else 1))
            owner[storage] = storage
        for storage, tensor in program.gradients.items():
            owner[storage_of[tensor]] = storage
        for op in program.ops:
            if op.phase == Phase.OPTIMIZER and len(homes) == 1:  # one parameter: all of its size goes with it
                (home,) = homes.values()
                for t in (*op.inputs, *op.outputs):
                    s = storage_of[t]
                    if s not in owner and math.prod(program.tensors[t].shape) > 1:
                        sizes[s] = rounded(program.storage_bytes[s] / (self.ranks if home.is_cut else 1))
        total = peak = 0.0
        computed, beside = [0.0, 0.0], [0.0, 0.0]  # forward, backward
        first = next(storage_of[t] for op in program.ops for t in op.inputs if storage_of[t] in homes)
        reduced_last = max(last[storage_of[t]] for t in gradients)
        paid: set[object] = set()
        holders: Counter[int] = Counter()
        live = 0.0

        def size(s: int) -> float:
            return sizes.get(s, float(program.storage_bytes[s]))

        def hold(s: int, n: int) -> None:
            nonlocal live
            before = holders[s] > 0
            holders[s] += n
            live += size(s) * ((holders[s] > 0) - before)

        for s in program.initial:
            hold(s, 1)
        for code, arg in program.events:
            if code != Event.OP:
                storage = (
                    arg
                    if code in (Event.ALLOC, Event.FREE)
                    else program.handle_storages[arg]
                    if code in (Event.PACK, Event.RELEASE)
                    else program.handle_storages[program.instance_handles[arg]]
                    if code in (Event.UNPACK, Event.DROP)
                    else None
                )
                if storage is not None:
                    hold(storage, 1 if code in (Event.ALLOC, Event.PACK, Event.UNPACK) else -1)
                continue
            op, copies = program.ops[arg], {}
            have = [layout(t) for t in op.inputs]
            if op.phase == Phase.OPTIMIZER:
                (home,) = homes.values()
                in_parts = home.is_cut and any(program.tensors[t].shape for t in op.inputs)
                total += op.time_ms / (self.ranks if in_parts else 1)
            elif arg in chosen:
                strategy = chosen[arg]
                half = int(op.phase != Phase.FORWARD)
                computed[half] += op.time_ms * self.part(arg, strategy)
                if strategy.reduces:
                    return None  # not in these models
                for t, source, target in zip(op.inputs, have, strategy.inputs, strict=True):
                    if source is not None and source != target:
                        sent, copied = self.moved(t, source, target)
                        if math.isinf(sent):
                            return None
                        if (t, op.phase, target) not in paid:
                            paid.add((t, op.phase, target))
                            total += copied
                            if storage_of[t] in homes and (half or storage_of[t] != first):
                                beside[half] += sent  # gathered ahead
                            else:
                                total += sent
                        copies[t, target] = self.n_bytes(t, target)
                if not self.follows(op, have, strategy):
                    return None
                layouts.update(zip(op.outputs, strategy.outputs, strict=True))
            elif any(p is not None for p in have):
                total += op.time_ms
                for t, p in self.followed(arg, tuple(p or REPLICATED for p in have)):
                    if p is None:
                        return None
                    layouts.setdefault(t, p)
            else:
                total += op.time_ms
            for t in op.outputs:
                if storage_of[t] in op.writes and op.phase != Phase.OPTIMIZER:
                    p = layouts.get(t, REPLICATED)
                    sizes[storage_of[t]] = rounded(
                        program.storage_bytes[storage_of[t]] / (self.ranks if p.is_cut else 1)
                    )
            for s in op.writes:
                hold(s, 1)
            gone = 0.0
            for t in set(op.outputs):
                if t in gradients and last[storage_of[t]] == arg:
                    source, home, s = layouts[t], homes[gradients[t]], storage_of[t]
                    if source != home:
                        sent, copied = self.moved(t, source, home)
                        if math.isinf(sent):
                            return None
                        total += copied
                        if arg == reduced_last:
                            total += sent
                        else:
                            beside[1] += sent  # reduced behind
                        gone = self.n_bytes(t, source)
                    held = holders[s]
                    hold(s, -held)
                    sizes[s] = rounded(program.storage_bytes[s] / (self.ranks if home.is_cut else 1))
                    hold(s, held)
            inside = program.inside_bytes[arg]
            assert not inside
            peak = max(peak, live + sum(copies.values()) + gone)
        total += sum(max(0.0, b - c) for b, c in zip(beside, computed, strict=True))
        return total + sum(computed), peak

    def _followed(self, index: int, have: tuple[Placement, ...]) -> tuple[tuple[int, Placement | None], ...]:
        op = self.program.ops[index]
        if op.name == "aten.ones_like.default":
            return ((op.outputs[0], REPLICATED),)
        found = next((s for s in self.strategies(op, have) if s.inputs == have), None)
        return tuple((t, found and found.outputs[i]) for i, t in enumerate(op.outputs))

    @staticmethod
    def follows(op: Op, have: list[Placement | None], strategy: AxisStrategy) -> bool:
        if op.phase == Phase.FORWARD and op.scope >= 0:
            return True
        pairs = list(zip(have, strategy.inputs, strict=True))
        if any(t.is_partial and (h is None or not h.is_partial) for h, t in pairs):
            return False
        cuts = [h for h, t in pairs if t.is_cut]
        return not cuts or any(h is not None and h.is_cut for h in cuts)


def all_choices(search: ShardingSearch) -> Iterator[ClassChoices]:
    offered = search.evaluation.options[0].strategies
    for picks in itertools.product(*(range(len(some)) for some in offered)):
        yield [list(picks)]


def prices(
    profile: Profile, search: ShardingSearch, ranks: int, every: int
) -> list[tuple[float, float, ClassChoices]]:
    """Of all choices that can run; each ``every``-th is compared with the search's own figures."""
    priced, graph = Priced(profile, ranks), search.graph
    found = []
    for number, choice in enumerate(all_choices(search)):
        of = search.evaluation.options[0].strategies
        homes, chosen = {}, {}
        for c in graph.classes:
            strategy = of[c.index][choice[0][c.index]]
            homes.update((p.storage, strategy.outputs[0]) for p in c.parameters)
            chosen.update(dict.fromkeys(c.ops, strategy))
        price = priced.price(homes, chosen)
        if number % every == 0:
            assert (price is not None) == search.evaluation.is_possible(choice)
        if price is not None and len(found) % every == 0:
            figures = search.evaluation.figures(choice)
            assert figures.ms == pytest.approx(price[0], rel=1e-9)
            assert figures.peak_bytes == pytest.approx(price[1], abs=1)
        if price is not None:
            found.append((*price, choice))
    return found


def check(profile: Profile, ranks: int, limits: int, every: int = 1) -> None:
    search = ShardingSearch(
        profile.recorded,
        profile.parameters,
        Mesh.of(ranks),
        profile.spec,
        options=Milp(gap=0.0, work_limit=100_000_000),
    )
    found = prices(profile, search, ranks, every)
    assert len({round(peak) for _, peak, _ in found}) > 1
    least = min(peak for _, peak, _ in found)
    assert search.smallest.figures.peak_bytes == pytest.approx(least, abs=1024)
    peaks = sorted({peak for _, peak, _ in found})
    for limit in [math.inf, *peaks[:: max(1, len(peaks) // limits)]]:
        best = min(ms for ms, peak, _ in found if peak <= limit)
        solved = search.cheapest(limit)
        assert solved is not None
        assert solved.figures.peak_bytes <= limit
        assert solved.figures.ms == pytest.approx(best, rel=1e-4)  # what breaks ties counts less
        assert solved.bound_ms is not None
        assert solved.bound_ms <= best * (1 + 1e-9)
    assert search.cheapest(least - 1024) is None


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "inner"), [(512, 1024, 4096), (65536, 512, 512), (64, 4096, 1024)]
)
def test_one_layer_against_all_choices(tokens: int, width: int, inner: int, optimizer: bool) -> None:
    check(linear(tokens, width, inner, optimizer), 4, 8)


@pytest.mark.slow
def test_two_layers_against_all_choices() -> None:
    with torch.device("meta"):
        two = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
        profile = profiled(two, torch.empty(512, 256), optimizer=False)
    check(profile, 2, 12, every=29)
