"""The time of collectives that a recorded step runs itself, by the links of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sacplan.core.files import table_of
from sacplan.device.devices import DeviceSpec
from sacplan.device.op_kernels import Call
from sacplan.distributed.sharding.costs import Collective, Costs
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.errors import TraceError
from sacplan.torch_compat.local_tensors import local_part
from sacplan.torch_compat.ops import is_between_ranks, tensors_in
from sacplan.torch_compat.private import group_of

Cost = Callable[[Call], tuple[int, float]]
"""From a call to its FLOPs and its time in ms, as ``Recorder`` takes it."""

_TABLE = table_of(Path(__file__).with_name("collectives.csv"))
_KINDS: Mapping[str, Any] = {row["op"]: row["collective"] for row in _TABLE}


@functools.cache
def collective_named(op: str) -> Collective | None:
    """Return the collective that an op is, by the name of its overload; None if the op is none, or waits for one."""
    namespace, _, name = op.partition(".")
    # Collectives are in ``c10d`` and ``_c10d_functional``; the table has names without endings.
    if "c10d" not in namespace:
        return None
    return _KINDS.get(name.partition(".")[0].rstrip("_").removesuffix("_out").removesuffix("_coalesced"))


def with_collectives(cost: Cost, spec: DeviceSpec) -> Cost:
    """Return a cost function in which collectives take the time of their links, and waiting takes none."""

    def of(call: Call) -> tuple[int, float]:
        if not is_between_ranks(call.func):
            return cost(call)
        kind = collective_named(str(call.func))
        return 0, 0.0 if kind is None else _collective_ms(kind, spec, call)

    return of


def _collective_ms(kind: Collective, spec: DeviceSpec, call: Call) -> float:
    ranks = group_of(call.func, call.args, call.kwargs)
    if ranks is None:
        raise TraceError(
            f"{call.func} speaks to process group {call.kwargs.get('group_name', call.args[-1])!r}, which is not "
            "there: the model was parallelised with a device mesh whose groups have been shut down. Profile it while "
            'torch.distributed is initialized; a "fake" process group will do.'
        )
    # The full buffer is the larger one of what is given and what is made.
    n_bytes = max(
        sum(t.numel() * t.element_size() for t in map(local_part, tensors_in(value)))
        for value in (*call.args[:2], call.returned)
    )
    if kind == "all_to_all":
        n_bytes *= len(ranks)
    # Ranks that are not neighbours are those of an axis that is not the last.
    apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    mesh = Mesh((("group", len(ranks)), ("between", max(1, apart))))
    return Costs(mesh, spec).collective_ms(kind, n_bytes, axis=0)
