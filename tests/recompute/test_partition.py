"""Parts of the forward pass, and which regions share their options."""

from __future__ import annotations

import pytest
import torch

import sacplan
from sacplan._program.pins import NO_PINS
from sacplan._program.program import Phase, Program
from sacplan._recompute.partition import join, partition, runs
from sacplan._recompute.regions import Region, Regions, _components
from tests.zoo.language_models import LM, cross_entropy, tokens


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = LM(layers=6, dim=64, vocab=300)
    return sacplan.profile(model, tokens(4, 64, 300), loss_fn=cross_entropy, device="h100").program


def cells_of(program: Program, early: frozenset[int] = frozenset()) -> dict[str, Region]:
    """By the layer that is in it; the first and the last region have ops around a layer, too."""
    regions = Regions(program, [op.time_ms for op in program.ops], early).joined(1)
    found = {}
    for i in range(6):
        (scope,) = program.calls[f"layers.{i}.mlp"]
        (found[f"layers.{i}"],) = (
            region for region in regions if (program.scopes[scope].first_op,) in region.members
        )
    return found


def saved_in(program: Program, fqn: str) -> list[int]:
    """What ops of a module made and autograd saved there, by size."""
    (call,) = program.calls[fqn]
    scope = program.scopes[call]
    found = {
        s
        for s, at in zip(program.handle_storages, program.liveness.handle_scopes, strict=True)
        if scope.first_op <= program.writer.get(s, -1) < scope.end_op and call in (at, *program.ancestors(at))
    }
    return sorted(found, key=lambda s: (program.storage_bytes[s], s))


def test_every_op_of_a_module_is_in_one_piece(program: Program) -> None:
    parts, split = partition(program, NO_PINS)
    wanted = [i for i, op in enumerate(program.ops) if op.phase is Phase.FORWARD and op.scope >= 0]
    assert [part.unit for part in parts[1:-1]] == [f"layers.{i}" for i in range(1, 5)]
    assert split == {""}
    assert [len(run) for run in runs(parts)] == [6]
    for size, count in ((1, 6), (2, 3), (4, 2), (6, 1)):
        joined = join(program, parts, size)
        assert len(joined) == count
        assert sorted(op for part in joined for group in part.members for op in group) == wanted


def test_layers_share_their_options(program: Program) -> None:
    regions = cells_of(program)
    middle = [regions[f"layers.{i}"] for i in range(1, 5)]
    assert len({region.kind for region in middle}) == 1
    assert all(region.options is middle[0].options for region in middle)


def test_what_is_asked_for_early_makes_a_difference_to_its_own_cell_alone(program: Program) -> None:
    plain = cells_of(program)
    early = frozenset(saved_in(program, "layers.3.mlp")[-2:])  # the largest
    regions = cells_of(program, early)
    for fqn, region in regions.items():
        if fqn != "layers.3":
            assert region.options == plain[fqn].options
            assert region.kind != regions["layers.3"].kind
    more = set(regions["layers.3"].options) - set(plain["layers.3"].options)
    kept = {op for op in map(program.writer.get, early) if op is not None}
    assert any(option.members and kept.isdisjoint(regions["layers.3"].ops(option)) for option in more)
    assert len({regions[f"layers.{i}"].kind for i in (1, 2, 4)}) == 1


def test_layers_that_are_early_throughout_go_with_those_that_are_not(program: Program) -> None:
    plain = cells_of(program)
    regions = cells_of(program, frozenset(program.handle_storages))
    assert {fqn: region.options for fqn, region in regions.items()} == {
        fqn: region.options for fqn, region in plain.items()
    }
    assert len({regions[f"layers.{i}"].kind for i in range(1, 5)}) == 1


def test_layers_that_are_alike_share_their_connected_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an option discards falls into the same groups in each of them, so it is worked out for one."""

    def worked_out(layers: int) -> int:
        found: list[object] = []

        def count(gone: object, reads: object) -> object:
            found.append(gone)
            return _components(gone, reads)  # type: ignore[arg-type]

        program = sacplan.profile(LM(layers=layers), tokens(2, 16), cross_entropy, device="cpu").program
        with monkeypatch.context() as patched:
            patched.setattr("sacplan._recompute.regions._components", count)
            Regions(program, [op.time_ms for op in program.ops]).joined(1)
        return len(found)

    assert 0 < worked_out(4) == worked_out(8)
