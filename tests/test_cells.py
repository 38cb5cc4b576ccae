"""Pieces of the forward pass, and which cells share their options."""

from __future__ import annotations

import pytest
import torch

import sacplan
from sacplan._fit.cells import Cell, Cells
from sacplan._fit.pieces import join, pieces_of, runs
from sacplan._plan.pins import NO_PINS
from sacplan._trace.recording import Phase, Recording
from tests.models import LM, cross_entropy, tokens


@pytest.fixture(scope="module")
def recording() -> Recording:
    with torch.device("meta"):
        model = LM(layers=6, dim=64, vocab=300)
    return sacplan.profile(model, tokens(4, 64, 300), loss_fn=cross_entropy, device="h100").recording


def cells_of(recording: Recording, early: frozenset[int] = frozenset()) -> dict[str, Cell]:
    """By the layer that is in it; the first and the last cell have ops around a layer, too."""
    cells = Cells(recording, [op.time_ms for op in recording.ops], early).joined(1)
    found = {}
    for i in range(6):
        (scope,) = recording.calls[f"layers.{i}.mlp"]
        (found[f"layers.{i}"],) = (
            cell for cell in cells if (recording.scopes[scope].first_op,) in cell.members
        )
    return found


def saved_in(recording: Recording, fqn: str) -> list[int]:
    """What ops of a module made and autograd saved there, by size."""
    (call,) = recording.calls[fqn]
    scope = recording.scopes[call]
    found = {
        s
        for s, at in zip(recording.handle_storages, recording.handle_scopes, strict=True)
        if scope.first_op <= recording.writer.get(s, -1) < scope.end_op
        and call in (at, *recording.ancestors(at))
    }
    return sorted(found, key=lambda s: (recording.storage_bytes[s], s))


def test_every_op_of_a_module_is_in_one_piece(recording: Recording) -> None:
    pieces, split = pieces_of(recording, NO_PINS)
    wanted = [i for i, op in enumerate(recording.ops) if op.phase is Phase.FORWARD and op.scope >= 0]
    assert [piece.unit for piece in pieces[1:-1]] == [f"layers.{i}" for i in range(1, 5)]
    assert split == {""}
    assert [len(run) for run in runs(pieces)] == [6]
    for size, count in ((1, 6), (2, 3), (4, 2), (6, 1)):
        joined = join(recording, pieces, size)
        assert len(joined) == count
        assert sorted(op for piece in joined for group in piece.members for op in group) == wanted


def test_layers_share_their_options(recording: Recording) -> None:
    cells = cells_of(recording)
    middle = [cells[f"layers.{i}"] for i in range(1, 5)]
    assert len({cell.kind for cell in middle}) == 1
    assert all(cell.options is middle[0].options for cell in middle)


def test_what_is_asked_for_early_makes_a_difference_to_its_own_cell_alone(recording: Recording) -> None:
    plain = cells_of(recording)
    early = frozenset(saved_in(recording, "layers.3.mlp")[-2:])  # the largest
    cells = cells_of(recording, early)
    for fqn, cell in cells.items():
        if fqn != "layers.3":
            assert cell.options == plain[fqn].options
            assert cell.kind != cells["layers.3"].kind
    more = set(cells["layers.3"].options) - set(plain["layers.3"].options)
    kept = {op for op in map(recording.writer.get, early) if op is not None}
    assert any(option.members and kept.isdisjoint(cells["layers.3"].ops(option)) for option in more)
    assert len({cells[f"layers.{i}"].kind for i in (1, 2, 4)}) == 1


def test_layers_that_are_early_throughout_go_with_those_that_are_not(recording: Recording) -> None:
    plain = cells_of(recording)
    cells = cells_of(recording, frozenset(recording.handle_storages))
    assert {fqn: cell.options for fqn, cell in cells.items()} == {
        fqn: cell.options for fqn, cell in plain.items()
    }
    assert len({cells[f"layers.{i}"].kind for i in range(1, 5)}) == 1
