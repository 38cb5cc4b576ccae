"""What the tests of sharded steps share: models, and what the allocator of one rank saw."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from sacplan.device.devices import resolve_device
from tests.zoo.language_models import cross_entropy

CPU = resolve_device("cpu")
OPTIMIZER = torch.optim.AdamW
RANKS = 8
"""Ranks of the fake process group of the fixture ``mesh``."""


def cross_entropy_in_two(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Gradients of the first half are there, in shards, when the second one begins."""
    first, second = batch.chunk(2)
    cross_entropy(model, first).backward()
    return cross_entropy(model, second)


def fully_sharded(
    model: nn.Module,
    mesh: Any,
    patterns: Sequence[str],
    reshard: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """``fully_shard`` on the modules that match, the inner ones first; of nested matches of a pattern the outermost."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policies = {
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "offload_policy": offload_policy or OffloadPolicy(),
        "ignored_params": ignored_params,
    }
    names = [name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)]
    chosen = set[str]()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        chosen |= {
            name
            for name in found
            if not any(name.startswith(f"{other}.") or not other for other in found - {name})
        }
    for fqn in reversed([name for name in names if name in chosen]):
        fully_shard(model.get_submodule(fqn), mesh=mesh, reshard_after_forward=reshard, **policies)
    return model


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW on those that are trained."""
    return OPTIMIZER([p for p in parameters if p.requires_grad])


class RankMemory:
    """Peak bytes of a step of the rank that this process is, from the profiler's allocation events.

    What collectives allocate for themselves is left out: gloo copies on the CPU, NCCL has buffers of its own outside
    of torch's allocator. To be measured with ``patient_collectives``: without, a buffer sometimes lives longer.
    """

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor]) -> None:
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        self.optimizer = optimizer_of(list(model.parameters()))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn(self.model, self.batch)
        loss.backward()
        self.optimizer.step()

    def peak_bytes(self, held_bytes: int = 0) -> int:
        """Of a second step, or a third; ``held_bytes``: alive all the time, not the model's, optimizer's or batch's.

        With threads, which a fake group has not, the larger of two.
        """
        self.step()  # makes the optimizer's state
        peaks = []
        for _ in range(1 if dist.get_backend() == "fake" else 2):
            self.optimizer.zero_grad(set_to_none=True)
            before = self._alive_bytes() + held_bytes
            peaks.append(before + max(levels(self.step)))
        return max(peaks)

    def _alive_bytes(self) -> int:
        tensors = [*self.model.parameters(), *self.model.buffers(), *tree_leaves(self.batch)]
        for state in self.optimizer.state.values():
            tensors.extend(v for v in state.values() if isinstance(v, torch.Tensor))
        storages = (getattr(t, "_local_tensor", t).untyped_storage() for t in tensors)
        return sum({s._cdata: s.nbytes() for s in storages}.values())


def levels(run: Callable[[], object]) -> list[int]:
    """Bytes alive after each allocation and each end of one, over what was alive when ``run`` began.

    What other threads allocate (gloo's) is left out.
    """
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler, torch.profiler.record_function("this thread"):
        run()
    events, threads = [], {}
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    stack = [(event, False) for event in reversed(results.experimental_event_tree())]
    while stack:
        event, in_collective = stack.pop()
        threads[event.name] = event.start_tid
        in_collective = in_collective or event.name.startswith(("c10d::", "gloo:"))
        stack.extend((child, in_collective) for child in reversed(event.children))
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            events.append(
                (event.start_time_ns, fields.ptr, fields.alloc_size, event.start_tid, in_collective)
            )
    events.sort(key=lambda e: e[0])
    found, live, ours = [0], 0, set()
    for _, pointer, size, thread, in_collective in events:
        if size > 0:
            if in_collective or thread != threads["this thread"]:
                continue
            ours.add(pointer)
        elif pointer in ours:
            ours.remove(pointer)
        else:
            continue
        live += size
        found.append(live)
    return found


@contextlib.contextmanager
def patient_collectives() -> Iterator[None]:
    """Collectives that return when gloo's threads hold their tensors no more, as NCCL's stream order has it.

    Of a tensor that such a thread is the last to let go of, the profiler does not see the end.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

    functional = torch.ops._c10d_functional
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
            waits = _patient(op := getattr(functional, name))
            waits.default = op.default  # type: ignore[attr-defined]  # what dispatch modes are called with
            patch.setattr(functional, name, waits)
        for collective in (fsdp.DefaultAllGather, fsdp.DefaultReduceScatter):
            patch.setattr(collective, "__call__", _patient(collective.__call__))
        yield


def _patient(collective: Callable[..., Any]) -> Callable[..., Any]:
    alone = _uses(torch.empty(1))

    def waits(*args: Any, **kwargs: Any) -> Any:
        held = [(t, _uses(t)) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = collective(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            held.append((out, alone))
            with _disable_current_modes():  # the step has its own wait, later
                torch.ops._c10d_functional.wait_tensor(out)
        until = time.monotonic() + 5  # a thread of a busy machine; a plan may keep them, too
        while any(_uses(t) > before for t, before in held) and time.monotonic() < until:
            time.sleep(1e-3)
        return out

    return waits


def _uses(t: torch.Tensor) -> int:
    """Of the tensor and of its storage: gloo's threads hold the same tensor, or views of it."""
    storage: int = torch._C._storage_Use_Count(t.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return storage + t._use_count()  # type: ignore[attr-defined]
