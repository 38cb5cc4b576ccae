"""A recorded step as a chain: stages, sizes and times against the replay, and drops against a simulation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.core.program import Phase, Program
from sacplan.solvers.rotor.rotor import Operation, OperationKind, peak
from sacplan.solvers.rotor.stages import Stages, drops_of, stages_of
from sacplan.techniques.recompute.rewrite import recomputed
from tests.zoo.convnets import resnet18, resnet50
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")

KEEP_ALL, KEEP_INPUT = OperationKind.FORWARD_KEEP_ALL, OperationKind.FORWARD_KEEP_INPUT
KEEP_NOTHING, LOSS, BACKWARD = OperationKind.FORWARD_KEEP_NOTHING, OperationKind.LOSS, OperationKind.BACKWARD
CONVNETS = {"resnet18": resnet18, "resnet50": resnet50}
PROFILES: dict[object, sacplan.Profile] = {}


def linear_layers(layers: int = 3, dim: int = 16) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))


def masked() -> nn.Module:
    """Layers that read one mask, made of the batch."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layers[0](x))
        mask = (x > 0).float()
        for layer in self.layers:
            h = torch.tanh(layer(h) * mask)
        return h

    return FromFunction(forward, layers=linear_layers())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))


def profile_of(model: nn.Module, batch: torch.Tensor, **options: object) -> sacplan.Profile:
    return sacplan.profile(model, batch, **({"device": "cpu"} | options))  # type: ignore[arg-type]


def shared(what: object, make: Callable[[], sacplan.Profile]) -> sacplan.Profile:
    """One profile for all tests. ``functools.cache`` forgets: profiling clears those beside a model's class."""
    if what not in PROFILES:
        PROFILES[what] = make()
    return PROFILES[what]


def convnet(name: str, inplace: bool = True) -> sacplan.Profile:
    def make() -> sacplan.Profile:
        with torch.device("meta"):
            model = CONVNETS[name](inplace)
        return profile_of(model, torch.empty(128, 3, 224, 224, device="meta"), device="h100")

    return shared((name, inplace), make)


def language_model() -> sacplan.Profile:
    def make() -> sacplan.Profile:
        with torch.device("meta"):
            model = LM(layers=4, dim=128, vocab=500)
        return profile_of(model, tokens(8, 128, 500), loss_fn=cross_entropy, device="h100")

    return shared("lm", make)


def small_mlp() -> sacplan.Profile:
    return shared("mlp", lambda: profile_of(mlp(), torch.randn(4, 8), optimizer=torch.optim.AdamW))


def names(program: Program, ops: Sequence[int]) -> list[str]:
    """Without namespace and overload, and without views."""
    found = [program.ops[i] for i in ops]
    return [op.name.split(".")[1] for op in found if op.writes or op.mutates]


def stages_with(program: Program, stages: Stages, fqn: str) -> set[int]:
    """The stages that a module's ops are in."""
    inside = {
        op for s in program.calls[fqn] for op in range(program.scopes[s].first_op, program.scopes[s].end_op)
    }
    return {i for i, ops in enumerate(stages.ops) if inside & set(ops)}


def keep_everything(stages: Stages) -> list[Operation]:
    n = len(stages)
    forward = [Operation(KEEP_ALL, i) for i in range(n)]
    return [*forward, Operation(LOSS, n), *(Operation(BACKWARD, i) for i in reversed(range(n)))]


# --- the models -----------------------------------------------------------------------------------


# --- stages ---------------------------------------------------------------------------------------


def test_who_saved_a_boundary() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        """ReLU saves what it makes, GELU what it takes, exp what it makes: the module does not tell them apart."""
        return torch.exp(F.linear(F.gelu(torch.relu(F.linear(x, self.first))), self.second))

    first, second = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))
    program = profile_of(FromFunction(forward, first=first, second=second), torch.randn(8, 16)).program
    stages = stages_of(program)
    assert [names(program, ops) for ops in stages.ops[:3]] == [["mm", "relu"], ["gelu"], ["mm", "exp"]]
    backward = [op for op in program.ops if op.phase is Phase.BACKWARD]
    at = {op.name.split(".")[1]: i for i, op in enumerate(backward)}
    relu, gelu = at["threshold_backward"], at["gelu_backward"]
    assert stages.chain.backward_ms[0] == pytest.approx(sum(op.time_ms for op in backward[relu:]))
    assert stages.chain.backward_ms[1] == pytest.approx(sum(op.time_ms for op in backward[gelu:relu]))


def test_a_mask_of_the_batch_is_input() -> None:
    model, x = masked(), torch.randn(8, 16)
    program = profile_of(model, x).program
    stages = stages_of(program)
    # The first layer runs twice. Of the two factors autograd saves the mask alone.
    layers = [stages_with(program, stages, f"layers.{i}") for i in range(3)]
    assert layers == [{0, 1}, {2}, {3}]
    mask = next(i for i, op in enumerate(program.ops) if op.name == "aten._to_copy.default")
    assert mask in stages.ops[1]
    assert not any(mask in ops for role in (stages.makers, stages.path, stages.side) for ops in role)
    parameters = sum(4 * p.numel() for p in model.parameters())
    assert stages.fixed_bytes == parameters + 4 * x.numel()


def test_no_cut_between_versions_of_a_storage() -> None:
    def fills(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        h.mul_(2)
        h[:, 0] = 1.0
        return self.layers[2](torch.tanh(self.layers[1](torch.tanh(h))))

    program = profile_of(FromFunction(fills, layers=linear_layers()), torch.randn(8, 16)).program
    stages = stages_of(program)
    (filled,) = (i for i, op in enumerate(program.ops) if op.name.startswith("aten.fill_"))
    assert filled in stages.ops[0]
    assert stages_with(program, stages, "layers.0") == {0}
    assert stages_with(program, stages, "layers.1") == {1}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(("name", "blocks"), [("resnet18", (2, 2, 2, 2)), ("resnet50", (3, 4, 6, 3))])
def test_resnets(name: str, blocks: tuple[int, ...], inplace: bool) -> None:
    program = convnet(name, inplace).program
    stages = stages_of(program)
    assert len(stages) == 3 + sum(blocks) + 1  # conv1; bn1 and relu; maxpool; blocks; avgpool
    rows = [f"layer{row + 1}.{i}" for row, n in enumerate(blocks) for i in range(n)]
    assert [stages_with(program, stages, fqn) for fqn in rows] == [{3 + i} for i in range(len(rows))]
    assert stages_with(program, stages, "bn1") == {1}
    assert stages_with(program, stages, "fc") == {len(stages)}
    image, features = 128 * 3 * 224 * 224 * 4, 128 * 64 * 112 * 112
    indices = 8 * features // 4  # of the max-pool: autograd keeps them, and they come with its output
    statistics = 2 * 512 if inplace else 0  # of the batch norm, if that is what the ReLU writes to
    assert stages.chain.output_bytes[:4] == (
        image,
        4 * features,
        4 * features + statistics,
        features + indices,
    )


def test_what_cannot_run_again_stays() -> None:
    def sums() -> nn.Module:
        return FromFunction(
            lambda self, x: torch.tanh(x + torch.sin(torch.cumsum(self.linear(x), -1))),
            linear=nn.Linear(16, 16),
        )

    model, x = nn.Sequential(nn.Linear(16, 16), sums(), sums()), torch.randn(8, 16)
    program = profile_of(model, x).program
    stages = stages_of(program)
    forward = [i for ops in stages.ops for i in ops]
    kept = [i for i in forward if program.ops[i].name == "aten.cumsum.default"]
    assert [program.ops[i].recomputable for i in kept] == [False, False]
    assert not set(kept) & set(drops_of(stages, [Operation(KEEP_INPUT, 1), Operation(KEEP_ALL, 1)]))
    assert stages.fixed_bytes == sum(4 * p.numel() for p in model.parameters()) + 2 * 4 * x.numel()
    assert stages.chain.saved_bytes[1:] == (4 * x.numel(),) * 3


# --- sizes and times ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.65])
@pytest.mark.parametrize("profile", [language_model, lambda: convnet("resnet50")], ids=["lm", "resnet50"])
def test_a_sequence_takes_what_the_replay_says(profile, share: float) -> None:  # type: ignore[no-untyped-def]
    program = profile().program
    stages = stages_of(program)
    whole = peak(stages.chain.sizes(), keep_everything(stages))[0]
    found = sacplan.rotor(stages.chain, int(share * whole))
    drops = drops_of(stages, found.operations)
    assert set(drops.values()) == {1}
    sites = program.sites(program.calls[stages.unit][0])
    run = recomputed(program, {stages.unit: {sites[op]: 1 for op in drops}}).footprint
    assert run.peak_bytes == pytest.approx(found.peak_bytes + stages.fixed_bytes, rel=0.005)
    # Rotor runs a stage whole; the op behind which the boundary is kept, and what is never asked for, does not run.
    assert 0 < run.recompute_ms <= found.total_ms - stages.chain.step_ms


# --- how often each op's output is thrown away ----------------------------------------------------


def simulated_drops(program: Program, stages: Stages, operations: Sequence[Operation]) -> dict[int, int]:
    """Runs the sequence: which values are there, op by op; a value that is there is not made again."""
    thrown: Counter[int] = Counter()
    stage_of = {op: k for k, ops in enumerate(stages.ops) for op in ops}
    mine = [{op for op in ops if program.ops[op].writes} for ops in stages.ops]
    makers: list[set[int]] = []
    needed: list[set[int]] = []
    for k, boundary in enumerate(stages.boundary):
        version, found = boundary, set()
        while version >= 0:
            found.add(program.writer[version])
            version = program.ops[program.writer[version]].replaces
        todo, seen = list(found), set(found)
        while todo:
            for s in program.ops[todo.pop()].reads:
                op = program.writer.get(s, -1)
                if stage_of.get(op, -1) == k and op not in seen:
                    seen.add(op)
                    todo.append(op)
        makers.append(found)
        needed.append(seen - found)
    there: set[int] = set()
    been: set[int] = set()
    for operation in operations:
        k = operation.stage
        if operation.kind in (LOSS, BACKWARD):
            if operation.kind is BACKWARD:
                there -= mine[k]
            continue
        # The first run is the model's own code, which runs all; later ones run what the boundary behind them needs.
        there |= makers[k] | needed[k] if k in been else mine[k]
        been.add(k)
        if operation.kind is KEEP_ALL:
            there |= mine[k]  # backward asks for the rest
            continue
        gone = (there & mine[k]) - makers[k]
        if operation.kind is KEEP_NOTHING:
            gone |= there & makers[k - 1]
        thrown.update(gone)
        there -= gone
    last = set(stages.ops[-1])
    return {op: n for op, n in thrown.items() if program.ops[op].recomputable and op not in last}


def random_sequence(stages: int, seed: int) -> tuple[Operation, ...]:
    rng = random.Random(seed)
    output = [rng.randint(100, 1000) for _ in range(stages + 1)]
    chain = sacplan.Chain(
        [rng.uniform(1, 10) for _ in range(stages)],
        [rng.uniform(2, 20) for _ in range(stages + 1)],
        output,
        [size + rng.randint(0, 5000) for size in output],
        [rng.randint(0, 300) for _ in range(stages)],
        [rng.randint(0, 900) for _ in range(stages + 1)],
    )
    try:
        return sacplan.rotor(chain, int(rng.uniform(0.1, 1) * sum(chain.saved_bytes)), slots=60).operations
    except sacplan.InfeasibleBudget as error:
        return sacplan.rotor(chain, error.smallest_feasible_bytes, slots=60).operations


@pytest.mark.parametrize(
    "profile", [small_mlp, language_model, lambda: convnet("resnet18", False)], ids=["mlp", "lm", "resnet18"]
)
def test_drops_are_those_of_a_simulation(profile) -> None:  # type: ignore[no-untyped-def]
    program = profile().program
    stages = stages_of(program)
    most = 0
    for seed in range(40):
        operations = random_sequence(len(stages), seed)
        drops = drops_of(stages, operations)
        assert drops == simulated_drops(program, stages, operations)
        most = max(most, *drops.values(), 0)
    assert most >= (3 if len(stages) > 5 else 1)


def test_nothing_is_dropped_where_all_is_kept() -> None:
    stages = stages_of(language_model().program)
    assert drops_of(stages, keep_everything(stages)) == {}


def test_what_only_backward_needs_is_dropped_once() -> None:
    def side() -> nn.Module:
        """Makes something that nothing behind it reads."""

        def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            self.last_norm = torch.exp(h).sum()  # not used by the loss
            return torch.tanh(x + self.b(h))

        return FromFunction(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))

    program = profile_of(nn.Sequential(nn.Linear(16, 16), side(), side()), torch.randn(8, 16)).program
    stages = stages_of(program)
    assert [names(program, ops) for ops in stages.side] == [[], ["exp", "sum"], ["exp", "sum"]]
    three = [Operation(KEEP_INPUT, 1), Operation(KEEP_INPUT, 1), Operation(KEEP_ALL, 1)]
    drops = drops_of(stages, three)
    assert {drops[op] for op in stages.side[1]} == {1}
    assert {drops[op] for op in stages.path[1]} == {2}
    assert not set(stages.makers[1]) & set(drops)
    assert drops == simulated_drops(program, stages, three)


# --- errors ---------------------------------------------------------------------------------------


def test_two_calls_of_the_model_are_no_chain() -> None:
    profile = profile_of(mlp(), torch.randn(4, 8), loss_fn=lambda m, b: (m(b) + m(2 * b)).sum())
    with pytest.raises(sacplan.errors.PlanError, match=r"called 2 times.*loss_fn that calls the model once"):
        stages_of(profile.program)


def test_a_model_without_a_cut() -> None:
    def total(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        found = x.new_zeros(())
        for layer in self.layers:
            found += F.gelu(layer(x)).sum()
        return found

    profile = profile_of(
        FromFunction(total, layers=linear_layers()), torch.randn(4, 16), loss_fn=lambda m, b: m(b)
    )
    with pytest.raises(
        sacplan.errors.PlanError,
        match=r"is one stage: .*made by aten.new_zeros.default in the model itself, .*another solver",
    ):
        stages_of(profile.program)
