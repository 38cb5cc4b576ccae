"""Factor rules beside the sharding strategies of DTensor: what both know, they say alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sacplan.distributed.sharding.placements import PARTIAL, REPLICATED, Placement
from sacplan.distributed.sharding.strategies import axis_strategies
from sacplan.torch_compat.calls import Call, flat_tensors
from tests.support.op_steps import STEPS, calls_of

if not dist.is_available():
    pytest.skip("a build without torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.utils._pytree import tree_map

aten = torch.ops.aten

Placements = tuple[str, ...]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mm.default, (x(4, 6), x(6, 8))),
    (aten.bmm.default, (x(2, 4, 6), x(2, 6, 8))),
    (aten.addmm.default, (x(8), x(4, 6), x(6, 8))),
    (aten.baddbmm.default, (x(2, 4, 8), x(2, 4, 6), x(2, 6, 8))),
    (aten.add.Tensor, (x(4, 6), x(6))),
    (aten.gelu.default, (x(4, 6),)),
    (aten.where.self, (x(4, 6) > 0, x(4, 6), x(4, 1))),
    (aten.view.default, (x(4, 6, 8), [24, 8])),
    (aten.view.default, (x(4, 8), [4, 2, 4])),
    (aten.permute.default, (x(2, 4, 6), [2, 0, 1])),
    (aten.transpose.int, (x(2, 4, 6), 1, -1)),
    (aten.t.default, (x(4, 6),)),
    (aten.unsqueeze.default, (x(4, 6), 1)),
    (aten.expand.default, (x(4, 1, 6), [4, 8, 6])),
    (aten.select.int, (x(4, 6, 8), 1, 0)),
    (aten.slice.Tensor, (x(4, 6), 1, 0, 4)),
    (aten.split.Tensor, (x(4, 6), 2, 1)),
    (aten.cat.default, ([x(4, 6), x(4, 2)], 1)),
    (aten.stack.default, ([x(4, 6), x(4, 6)], 1)),
    (aten.sum.dim_IntList, (x(4, 6, 8), [1])),
    (aten.sum.default, (x(4, 6),)),
    (aten.mean.dim, (x(4, 6, 8), [-1])),
    (aten.amax.default, (x(4, 6), [1])),
    (aten.max.dim, (x(4, 6), 1)),
    (aten.argmax.default, (x(4, 6), 1)),
    (aten.cumsum.default, (x(4, 6), 1)),
    (aten.topk.default, (x(4, 6), 2)),
    (aten._softmax.default, (x(2, 4, 6), -1, False)),
    (aten._log_softmax.default, (x(4, 6), 1, False)),
    (aten._softmax_backward_data.default, (x(4, 6), x(4, 6), 1, torch.float32)),
    (aten.native_layer_norm.default, (x(2, 4, 6), [6], x(6), x(6), 1e-5)),
    (
        aten.native_layer_norm_backward.default,
        (x(2, 4, 6), x(2, 4, 6), [6], x(2, 4, 1), x(2, 4, 1), x(6), x(6), [True, True, True]),
    ),
    (aten.embedding.default, (x(10, 6), torch.randint(10, (2, 4)))),
    (aten.embedding_dense_backward.default, (x(2, 4, 6), torch.randint(10, (2, 4)), 10, -1, False)),
    (aten.gather.default, (x(4, 6), 1, torch.randint(6, (4, 2)))),
    (aten.index_select.default, (x(4, 6), 1, torch.randint(6, (2,)))),
    (aten.index.Tensor, (x(4, 6), [torch.randint(4, (2,))])),
    (aten.scatter_add.default, (x(4, 6), 1, torch.randint(6, (4, 2)), x(4, 2))),
    (
        aten.convolution.default,
        (x(4, 6, 8, 8), x(2, 6, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    (aten.nll_loss_forward.default, (x(4, 6), torch.randint(6, (4,)), None, 2, -100)),
    (aten.nll_loss_backward.default, (x(), x(4, 6), torch.randint(6, (4,)), None, 2, -100, x())),
    (aten.linalg_vector_norm.default, (x(4, 6), 2, [1])),
    (aten._scaled_dot_product_attention_math.default, (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8))),
]


@pytest.fixture(scope="module")
def strategies() -> Iterator[Any]:
    """From a call to what DTensor offers: placements of inputs and of outputs on two ranks."""
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    propagator = DTensor._op_dispatcher.sharding_propagator

    def meta(t: torch.Tensor) -> Any:
        return TensorMeta(t.shape, t.stride(), t.dtype)

    def strategy(t: torch.Tensor) -> Any:
        placements = [Replicate(), *(Shard(d) for d, n in enumerate(t.shape) if n > 1)]
        placements += [Replicate()] * (5 - len(placements))  # losses pair those of scores and targets
        return OpStrategy(
            [OpSpec(DTensorSpec(mesh, (p,), tensor_meta=meta(t)), input_specs=()) for p in placements]
        )

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return strategy(value)
        if isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
            return TupleStrategy([strategy(t) for t in value])
        return value

    def offered(op: Any, args: tuple[Any, ...], n_outputs: int) -> set[tuple[Placements, Placements]]:
        single = getattr(propagator, "op_single_dim_strategy_funcs", {})
        if op in single:
            info = single[op]
            given = tree_map(lambda v: meta(v) if isinstance(v, torch.Tensor) else v, args)
            rows = [
                tuple(Shard(p.dim) if hasattr(p, "dim") else p for p in row)
                for row in getattr(info, "func", info)(op, given, {})
            ]
            return {(tuple(map(str, row[n_outputs:])), tuple(map(str, row[:n_outputs]))) for row in rows}
        if op not in propagator.op_strategy_funcs:
            return set()
        found = propagator.op_strategy_funcs[op](OpSchema(op, tuple(map(described, args)), {}))
        rows = set()
        for spec in getattr(found, "strategies", ()):
            outputs = spec.output_specs
            outputs = (outputs,) if isinstance(outputs, DTensorSpec) else outputs
            rows.add(
                (
                    tuple(str(s.placements[0]) for s in spec.input_specs or ()),
                    tuple("" if s is None else str(s.placements[0]) for s in outputs),
                )
            )
        return rows

    return offered


def strategies_of(op: Any, args: tuple[Any, ...]) -> set[tuple[Placements, Placements]]:
    """What we say that ranks may do, in DTensor's words: where inputs lie, and outputs."""
    found = set()
    call = Call(op, args, {}, op(*args))
    for s in axis_strategies(call, 2, [[REPLICATED, PARTIAL]] * len(call.inputs)):
        if all(p.outer == 1 for p in s.inputs + s.outputs):
            found.add((tuple(map(_said, s.inputs)), tuple(map(_said, s.outputs))))
    return found


def _said(p: Placement) -> str:
    if p.is_cut:
        return str(Shard(p.dim))
    return str(Partial(p.reduce) if p.is_partial else Replicate())


MORE: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mul.Tensor, (x(4, 6), x(4, 6))),
    (aten.mul.Scalar, (x(4, 6), 2.0)),
    (aten.div.Scalar, (x(4, 6), 2.0)),
    (aten.neg.default, (x(4, 6),)),
    (aten.clone.default, (x(4, 6),)),
    (aten.sub.Tensor, (x(4, 6), x(4, 6))),
    (aten.amin.default, (x(4, 6), [0])),
    (aten.mean.default, (x(4, 6),)),
    (aten.add_.Tensor, (x(4, 6), x(4, 6))),
    (aten.constant_pad_nd.default, (x(4, 6), [0, 2], 0.0)),
]


KNOWN = {
    # The mean over labels of which some are left out is no mean of the ranks' means (1.875 for 1.982).
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    # In evaluation the statistics that are saved are empty, and cannot be cut.
    "aten.native_batch_norm.default",
}
"""Where strategies differ from DTensor's, and why."""


def test_strategies_do_not_contradict(strategies: Any) -> None:
    """Where DTensor takes inputs as we offer them to ranks, it says the same of the outputs.

    Of cuts, means, and summands that views pass on.
    """
    steps = [call for name in STEPS for call in calls_of(STEPS[name])]
    calls = CALLS + MORE + [(c.func, tuple(c.args)) for c in steps if not c.kwargs]
    agreed, partial, wrong = 0, 0, []
    for op, args in calls:
        ours = strategies_of(op, args)
        if op is aten.unbind.int:
            continue  # it raises where the dimension is cut
        for inputs, theirs in strategies(op, args, len(list(flat_tensors(op(*args))))):
            if set(inputs) == {str(Replicate())}:
                continue  # what all ranks have, each may use a part of
            if (inputs, theirs) in ours:
                agreed += 1
                partial += any("P" in i for i in inputs)
            elif inputs in {i for i, _ in ours}:
                wrong.append((str(op), inputs, theirs))
    assert {op for op, _, _ in wrong} == KNOWN, wrong
    assert agreed > 500
    assert partial
