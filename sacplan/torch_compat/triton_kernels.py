"""Launches of Triton kernels, such as Liger's, as ops of the recorded step.

No dispatch mode sees a launch, and version counters do not count what a kernel writes. So a launch runs an op that
takes all tensors of the kernel as written: what the kernel reads or writes is kept, and no op that read it before runs
again. A plan decides nothing about launches, so none need be seen where it is applied.

Triton needs a GPU. In a fake step the kernel does not run, but the code around it does, which allocates all that the
kernel fills.

Private API of Triton, tried with 3.9: ``JITFunction.run``, ``Autotuner.run``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.private import replaced

_LIBRARY = torch.library.Library("sacplan", "FRAGMENT")
_LIBRARY.define("triton_kernel_(Tensor(a!)[] tensors) -> ()")


@torch.library.impl(_LIBRARY, "triton_kernel_", "CompositeExplicitAutograd")
def _launched(tensors: Any) -> None:
    """Compute nothing: the kernel has run, or the step is a fake one."""


TRITON_KERNEL = torch.ops.sacplan.triton_kernel_.default
TRITON_KERNEL_NAME = str(TRITON_KERNEL)
"""The op's name in a program."""


@contextmanager
def triton_kernels_seen() -> Iterator[None]:
    """Record each launch of a Triton kernel as an op; on fake tensors the kernel does not run."""
    with ExitStack() as stack:
        # A model that launches kernels has imported Triton. Autotuners are replaced too: they would time candidates.
        for name, kind in (("jit", "JITFunction"), ("autotuner", "Autotuner")):
            if module := sys.modules.get(f"triton.runtime.{name}"):
                owner = getattr(module, kind)
                stack.enter_context(replaced(owner, run=_seen(owner.run)))
        yield


def _seen(launch: Any) -> Any:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        is_fake = any(isinstance(t, FakeTensor) for t in tensors)
        result = None if is_fake else launch(kernel, *args, **kwargs)
        # Autograd must not count the write: a kernel may only read what is saved for the backward pass.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            TRITON_KERNEL(tensors)
        return result

    return run
