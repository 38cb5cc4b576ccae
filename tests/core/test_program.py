"""The recorded step as a program: tensors, who saved what, liveness, patches, and programs without a backward pass."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.liveness import Fold
from sacplan.core.program import Event, Phase, Program
from sacplan.device.op_kernels import Call
from sacplan.record.step import default_loss
from sacplan.techniques.recompute.rewrite import discarded_ops, recompute
from tests.support.ops import Ops
from tests.support.steps import assert_predicted
from tests.zoo import language_models as models
from tests.zoo.layers import Then


def views(x: torch.Tensor) -> torch.Tensor:
    """Views of activations are saved, with an offset, and views of views are read in the backward pass."""
    q, k, v = x.chunk(3, dim=-1)
    return (torch.sigmoid(q) * k[:, 1:2] + v.transpose(0, 1).exp().transpose(0, 1)).sum()


class Double(torch.autograd.Function):
    """Saves its input, and calls ops of its own in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * 2).cos()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return -2 * grads[0] * (2 * x).sin()


def lm() -> tuple[nn.Module, torch.Tensor]:
    return models.LM(layers=2, dim=32, vocab=64, dropout=0.0), torch.randint(0, 64, (2, 16))


CASES: dict[str, Any] = {
    "lm": lm,
    "views": lambda: (Then(views, 48), torch.randn(4, 6, 48)),
    "custom": lambda: (Then(lambda x: Double.apply(x.relu()).sum()), torch.randn(3, 8)),
    "convnet": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4)
        ),
        torch.randn(2, 3, 8, 8),
    ),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    if name == "convnet":
        model(batch)  # its lazy layer
    return model, batch


@functools.cache
def recorded(name: str) -> Program:
    return sacplan.profile(*made(name), device="cpu").program


def _views(call: Call) -> tuple[str, list[Any], list[Any]]:
    """What a mode sees of a call: the op, and the layouts of what it reads and makes."""
    views = [
        [(tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype)) for t in tensors_of(value)]
        for value in ((call.args, call.kwargs), call.returned)
    ]
    return str(call.func), *views


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_those_of_a_real_step(name: str) -> None:
    model, batch = made(name)
    program = recorded(name)
    with Ops(_views) as seen:
        loss = default_loss(model, batch)
        loss.backward()

    def view(tensor: int) -> tuple[Any, ...]:
        t = program.tensors[tensor]
        return (t.shape, t.stride, t.offset, f"torch.{t.dtype}")

    expected = [call for call in seen.noted if "detach" not in call[0]]
    found = [
        (op.name, list(map(view, op.inputs)), list(map(view, op.outputs)))
        for op in program.ops
        if op.phase == Phase.FORWARD and "detach" not in op.name
    ]
    assert found == expected[: len(found)]


@pytest.mark.parametrize("name", CASES)
def test_who_saved_what_is_who_asks_for_it(name: str) -> None:
    """Autograd unpacks a tensor for the op that the handle was recorded for: its node's number says so."""
    program = recorded(name)
    asked = 0
    pending: list[int] = []
    for code, arg in program.events:
        if code == Event.UNPACK:
            pending.append(program.instance_handles[arg])
        elif code == Event.OP and pending:
            forward = program.ops[arg].forward_of
            if forward >= 0:
                assert {program.handle_ops[handle] for handle in pending} == {forward}
                asked += len(pending)
            pending.clear()
    assert asked
    for handle, op in enumerate(program.handle_ops):
        assert program.tensors[program.handle_tensors[handle]].storage == program.handle_storages[handle]
        if name != "custom":
            storage = program.handle_storages[handle]
            assert storage in (*program.ops[op].reads, *program.ops[op].writes)


def everything(program: Program) -> dict[str, dict[tuple[str, int], int]]:
    """All that may be discarded, once."""
    (scope,) = program.calls[""]
    return {"": {site: 1 for op, site in program.sites(scope).items() if program.ops[op].recomputable}}


@pytest.mark.parametrize("name", CASES)
def test_a_rewrite_is_local_and_keeps_indices(name: str) -> None:
    program = recorded(name)
    patch = recompute(program, everything(program))
    rewritten = program.with_(patch)
    assert rewritten.ops[: len(program.ops)] == program.ops
    discarded = discarded_ops(program, everything(program))
    touched = {s for op in discarded for s in program.ops[op].writes}
    for position in patch.events:
        code, arg = program.events[position]
        if code == Event.OP:
            assert arg in discarded
        elif code != Event.EXIT:
            assert program.storage_of(code, arg) in touched
    again = [op.recomputes for op in rewritten.ops if op.recomputes >= 0]
    assert tuple(again) == rewritten.footprint.again
    assert set(again) <= set(discarded)
    ended = Fold(rewritten)
    for code, arg in rewritten.events:
        ended.step(code, arg)
    plain = Fold(program)
    for code, arg in program.events:
        plain.step(code, arg)
    assert ended.live == plain.live  # nothing that was recomputed is left
    assert min(ended.holders.values()) >= 0


# --- inference ------------------------------------------------------------------------------------


def test_a_step_without_a_backward_pass_is_a_program() -> None:
    model, batch = made("lm")
    profile = sacplan.profile(model.eval(), batch, device="cpu", mode="inference")
    program = profile.program
    assert {op.phase for op in program.ops} == {Phase.FORWARD}
    assert program.handle_storages == ()
    train = sacplan.profile(model, batch, device="cpu")
    assert profile.peak_bytes < train.peak_bytes
    output = model(batch)
    end = program.footprint.end_bytes
    assert end == sum(program.storage_bytes[s] for s in program.initial) + output.nbytes


def test_plans_for_inference() -> None:
    model, batch = made("lm")
    profile = sacplan.profile(model, batch, device="cpu", mode="inference")
    plan = sacplan.plan(profile, "100%")
    assert plan.status == "unplanned"
    assert plan.recompute_ms == 0
    assert plan.peak_bytes == profile.peak_bytes
    assert_predicted(model, batch, plan)
    with pytest.raises(sacplan.InfeasibleBudget, match="inference") as info:
        sacplan.plan(profile, "90%", techniques=("recompute",))
    assert info.value.smallest_feasible_bytes == profile.peak_bytes
    assert sacplan.plan(profile, "smallest").chunks


def test_inference_takes_no_optimizer() -> None:
    model, batch = made("lm")
    with pytest.raises(sacplan.errors.TraceError, match="optimizer"):
        sacplan.profile(model, batch, optimizer=torch.optim.AdamW, device="cpu", mode="inference")
    with pytest.raises(sacplan.errors.TraceError, match="unknown mode 'serve'"):
        sacplan.profile(model, batch, device="cpu", mode="serve")  # type: ignore[arg-type]


# --- files ----------------------------------------------------------------------------------------


def test_ranks_whose_shards_differ_in_size_have_the_same_plan() -> None:
    first = sacplan.profile(*made("convnet"), device="cpu").fingerprint
    last = msgspec.structs.replace(first, local_shapes={"head.weight": (1, 2)})
    assert first.is_of_same(last)
    assert not first.is_of_same(msgspec.structs.replace(first, batch=()))
