"""Optimizers take their ``foreach`` path on fake parameters of a CUDA device, which is the default there.

torch decides by the exact type of the parameters and by their device. Fake parameters have neither, so a trace
would silently take the single-tensor path, whose temporaries differ (``foreach`` holds as much as all
parameters). Each optimizer's own rules (Adafactor stays single, a tensor learning rate, ``fused``) are left to
torch.

Private PyTorch APIs, tried on 2.11 and 2.13: ``_foreach_supported_types`` and
``_get_foreach_kernels_supported_devices`` in ``torch.optim.optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from sacplan.torch_compat.private import replaced


@contextmanager
def foreach_by_default(is_active: Callable[[], bool]) -> Iterator[None]:
    """Let fake CPU parameters qualify for ``foreach`` where ``is_active()``, which is asked in each thread."""
    optimizers: Any = torch_optimizer
    own = optimizers._get_foreach_kernels_supported_devices

    def devices() -> list[str]:
        return [*own(), "cpu"] if is_active() else own()

    # ``_default_to_fused_or_foreach`` asks for the exact type and then for the device, so both lists must grow. The
    # list of types may hold for every thread: it lets a fake parameter pass, whose device still decides.
    types = [*optimizers._foreach_supported_types, FakeTensor]
    with replaced(optimizers, _foreach_supported_types=types, _get_foreach_kernels_supported_devices=devices):
        yield
