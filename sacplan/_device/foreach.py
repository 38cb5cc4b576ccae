"""Optimizers take their ``foreach`` path on fake parameters of a CUDA device, as they do there by default.

torch decides by the exact type of the parameters and their device: fake parameters have neither, so tracing
would silently take the single-tensor path, whose temporaries are another matter (``foreach`` holds as much as
all parameters). Each optimizer's own rules (Adafactor stays single, a tensor learning rate, ``fused``) are
left to torch.

Private PyTorch APIs, tried on 2.13 and present in 2.11 to 2.15: ``_foreach_supported_types`` and
``_get_foreach_kernels_supported_devices`` in ``torch.optim.optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

_DEVICES = "_get_foreach_kernels_supported_devices"


class Patch:
    """The two questions that ``torch.optim`` asks, answered for fake CPU parameters where ``is_active()``."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        self._is_active = is_active
        self._devices: Callable[[], list[str]] = getattr(torch_optimizer, _DEVICES)

    def install(self) -> None:
        """Fake parameters count as parameters; their device counts where the caller's thread emulates CUDA."""
        own, is_active = self._devices, self._is_active

        def devices() -> list[str]:
            return [*own(), "cpu"] if is_active() else own()

        torch_optimizer._foreach_supported_types.append(FakeTensor)
        setattr(torch_optimizer, _DEVICES, devices)

    def remove(self) -> None:
        """Put torch's own answers back."""
        torch_optimizer._foreach_supported_types.remove(FakeTensor)
        setattr(torch_optimizer, _DEVICES, self._devices)
