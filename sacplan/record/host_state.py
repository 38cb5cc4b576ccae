"""Optimizer state that lies in the host's memory, and optimizers whose own step cannot run on fake tensors.

A fake step has CPU tensors, on which nothing tells the host's memory from the device's. What the libraries do on a GPU
is written down here:

- **counters.** torch.optim makes ``state["step"]`` on the CPU unless the kernel reads it (``fused``) or a CUDA graph
  does (``capturable``).
- **paged optimizers of bitsandbytes** keep the state of parameters with at least 100,000 elements in CUDA's managed
  memory (``get_paged`` in ``bitsandbytes/functional.py``, ``get_state_buffer`` in ``optim/optimizer.py``). The driver
  moves its pages between host and device as they are needed. PyTorch's allocator knows nothing of these, and where
  memory is short they are on the host: that is where they count here.
- **CPUOffloadOptimizer of torchao** keeps a copy of each parameter with at least 4,096 elements, its gradient and its
  state in pinned memory of the host (``torchao/optim/cpu_offload.py``). Its constructor asks for a CUDA device, so a
  class with the same sizes takes its place.
- **low-bit optimizers of torchao** run a compiled update. Compiled kernels are fused: they read gradient and state,
  and write state and parameter, without a temporary. Traced op by op the update would hold several float32 copies of
  the parameter. So the state is the class's own, and the update is one op that allocates nothing.

Tried with bitsandbytes 0.50 and torchao 0.18.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sacplan.torch_compat.distributed_modules import offloaded_parameters, parts_on_host
from sacplan.torch_compat.local_tensors import local_part

PAGED_FROM = 100_000
"""Least elements of a parameter whose state bitsandbytes pages."""

_LIBRARY = torch.library.Library("sacplan", "FRAGMENT")
_LIBRARY.define("fused_update_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] states) -> ()")
_LIBRARY.define("from_host_(Tensor(a!)[] parameters, int[] read_bytes) -> ()")
_LIBRARY.define("gradient_to_host(Tensor gradient) -> ()")


@torch.library.impl(_LIBRARY, "fused_update_", "Meta")
def _update(parameters: Any, gradients: Any, states: Any) -> None:
    """Compute nothing and allocate nothing: the real kernel is fused."""


@torch.library.impl(_LIBRARY, "from_host_", "Meta")
def _copied(parameters: Any, read_bytes: Any) -> None:
    """Compute nothing: the host has updated its copies, and they are written over the parameters.

    ``read_bytes`` is what the update of each parameter reads on the host, for its time (``device/host_step.py``).
    """


@torch.library.impl(_LIBRARY, "gradient_to_host", "Meta")
def _left(gradient: Any) -> None:
    """Allocate nothing: the memory on the host was allocated before."""


# --- what is on the host


def counters_on_host(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the counters of steps that are on the host."""
    groups = (group for group in optimizer.param_groups if group.get("fused") or group.get("capturable"))
    on_device = {id(p) for group in groups for p in group["params"]}
    for p, state in states(optimizer):
        step = state.get("step")
        if isinstance(step, torch.Tensor) and not step.dim() and id(p) not in on_device:
            yield step


def paged_state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the state of a paged optimizer of bitsandbytes that is in managed memory."""
    if not getattr(optimizer, "is_paged", False):
        return
    for p, state in states(optimizer):
        if p.numel() >= PAGED_FROM:
            yield from (state[name] for name in ("state1", "state2") if name in state)


def host_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of the host's memory that an optimizer takes on a GPU, its counters aside."""
    if optimizer is None:
        return 0
    return sum(t.nbytes for t in paged_state(optimizer)) + int(getattr(optimizer, "host_bytes", 0))


def stepped_on_host(optimizer: torch.optim.Optimizer | None) -> frozenset[int]:
    """Return the identities of the parameters that a fake optimizer updates on the host, and keeps no gradient of."""
    return frozenset(map(id, getattr(optimizer, "without_gradients", ())))


def shards_host_bytes(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of the host's memory that shards take with a ``CPUOffloadPolicy``, between two steps.

    If the policy says so, shards and gradients are in pinned memory, which comes in powers of two; state never is.
    """
    total, offloaded = 0, set()
    for p in offloaded_parameters(model):
        offloaded.add(p.sharded_param)
        for t in parts_on_host(p):
            n_bytes = local_part(t).nbytes
            total += 1 << (n_bytes - 1).bit_length() if p.pin_memory and n_bytes else n_bytes
    of_shards = (state for each in optimizers for p, state in states(each) if p in offloaded)
    parts = (part for state in of_shards for value in state.values() for part in plain_parts(value))
    return total + sum(part.nbytes for part in parts)


def states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield each parameter that has state, with the state."""
    for p, state in optimizer.state.items():
        if isinstance(state, dict):
            yield p, state


# --- stand-ins for other optimizers


def stand_in_factory(factory: Any) -> Any:
    """Return a factory that works on fake parameters: the given one, or one of ``CPUOffloadSizes``."""
    inner = factory.func if isinstance(factory, functools.partial) else factory
    torchao = sys.modules.get("torchao.optim")
    if torchao is None or inner is not torchao.CPUOffloadOptimizer:
        return factory
    if isinstance(factory, functools.partial):
        return functools.partial(CPUOffloadSizes, *factory.args, **factory.keywords)
    return CPUOffloadSizes


def for_fake_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Change an optimizer over fake parameters so that its step can run on them, and return it."""
    if getattr(optimizer, "is_paged", False):
        # It would warn that there are no pages on a CPU, where fake tensors are whatever the step is for.
        vars(optimizer)["_cpu_paged_warned"] = True
    kind: Any = type(optimizer)
    if kind.__module__.startswith("torchao.optim") and hasattr(kind, "_subclass_zeros"):
        optimizer.__class__ = _with_compiled_step(kind)
    return optimizer


@functools.cache
def _with_compiled_step(kind: Any) -> type[torch.optim.Optimizer]:
    """Return a subclass of a low-bit optimizer of torchao whose step makes missing state, and updates in one op."""

    @torch.no_grad()
    def step(self: Any, closure: Callable[[], Any] | None = None) -> None:
        updated: list[torch.Tensor] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                updated.append(p)
                # As the class does in its first step.
                if not self.state[p]:
                    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
                    made = {name: self._new_buffer(p, name == "exp_avg") for name in names}
                    self.state[p] |= {"step": torch.zeros(()), **made}
        states = [t for p in updated for v in self.state[p].values() for t in plain_parts(v)]
        torch.ops.sacplan.fused_update_(updated, [p.grad for p in updated], states)

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # ``Optimizer`` would hook it a second time
    return type(kind.__name__, (kind,), {"step": hooked, "__module__": kind.__module__})


def plain_parts(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a value: the tensor itself, or those inside of a tensor of torchao."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from plain_parts(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


class CPUOffloadSizes(torch.optim.Optimizer):
    """The memory of ``torchao.optim.CPUOffloadOptimizer``, for fake steps; it computes nothing.

    On the device it keeps no state but that of small parameters, and with ``offload_gradients`` no gradient of others
    once the backward pass has accumulated it.

    Attributes:
        host_bytes: of parameters, gradients and state on the host.
        without_gradients: the parameters whose gradients leave the device at once.
    """

    stands_for = "CPUOffloadOptimizer"

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, {})
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        small = [p for p in trained if p.numel() < minimal_size]
        self._offloaded = [p for p in trained if p.numel() >= minimal_size]
        # What an optimizer keeps follows from the parameter's layout and type, so it is measured once for each.
        alike = {(p.shape, p.stride(), p.dtype): p for p in self._offloaded}
        make = functools.partial(optimizer_class, **kwargs)
        n_bytes = {like: _bytes_on_host(make, p) for like, p in alike.items()}
        self._read_bytes = [n_bytes[p.shape, p.stride(), p.dtype] for p in self._offloaded]
        self.host_bytes = sum(self._read_bytes)
        self._small = make(small) if small else None
        if self._small is not None:
            # All state on the device is that of the small parameters.
            self.state = self._small.state
        self.without_gradients = self._offloaded if offload_gradients else []
        self._stream = torch.cpu.Stream()
        # No method: as a hook of a parameter it would hold the optimizer, and so the parameter itself.
        hook = functools.partial(_copy_gradient, self._stream, offload_gradients)
        for p in self._offloaded:
            p.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Write the host's copies over the parameters, when all gradients are there; update the small ones."""
        torch.cpu.current_stream().wait_stream(self._stream)
        torch.ops.sacplan.from_host_(self._offloaded, self._read_bytes)
        if self._small is not None:
            self._small.step()


def _copy_gradient(stream: Any, drops: bool, p: torch.Tensor) -> None:
    stream.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(stream):
        torch.ops.sacplan.gradient_to_host(p.grad)
    if drops:
        p.grad = None


def _bytes_on_host(make: Callable[..., torch.optim.Optimizer], p: torch.Tensor) -> int:
    copy = torch.empty_like(p, requires_grad=True)
    copy.grad = torch.empty_like(copy)
    # A step of the real class on a copy: what it keeps then is what the host keeps.
    optimizer = make([copy])
    optimizer.step()
    state = [t for _, kept in states(optimizer) for v in kept.values() for t in plain_parts(v)]
    return sum(t.nbytes for t in (copy, copy.grad, *state))
