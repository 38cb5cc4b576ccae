"""The kernels of a device, emulated on fake CPU tensors, so that autograd keeps what it keeps there.

:func:`fake_device` is FakeTensorMode together with :func:`device_kernels`, which switches on, for a CUDA device:

- ``routes.py``, ``attention.py``, ``cudnn_rnn.py``: the ops that CUDA runs in other kernels;
- ``autocast.py``: CUDA's cast lists;
- ``foreach.py``: optimizers take the path that is the default there.

``kernel_workspaces.py`` knows what a kernel allocates inside, ``libraries.py`` what cuBLAS keeps.

How: Python kernels for the dispatch key ``AutogradCPU``. A function mode would miss the calls inside
``F.multi_head_attention_forward``, and the key ``CPU`` would lose autograd.

Known gaps, all of them small or not knowable without the device:

- math attention: ``attn.add_(mask)`` becomes out-of-place under a dispatch mode (one score-sized temporary);
- cuDNN's own workspaces (convolutions, attention, RNN) and the reserve of fused batch norm count as 0;
- ``dropout_`` and feature dropout are composites on both sides and left alone; packed sequences of LSTM and
  GRU stay composites, and so do recurrent layers on ROCm;
- efficient attention's backward on float32 keeps one more product for a moment, about as large as its
  workspace; the partial sums of layer norm's backward;
- an optimizer's ``step`` counters count 512 bytes each, where CUDA keeps them on the host unless fused;
- second derivatives through ``rms_norm``, ``torch.func`` transforms over it, and inference mode (which skips
  the autograd keys) are not routed.

Private PyTorch APIs, used on 2.13 and present in 2.11 to 2.15: ``torch._subclasses.FakeTensorMode``,
``torch._subclasses.fake_impls.op_implementations_dict``, ``Library._destroy``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._refs  # registers torch's own fake layer norm, which must be there before it is replaced
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sacplan._device import autocast, foreach
from sacplan._device.devices import DeviceSpec, resolve_device
from sacplan._device.overrides import FAKES, ROUTES, composite
from sacplan._torch.ops import tensors_in
from sacplan._torch.private import active_fake_mode

# The registrations belong to the process, so they are made by the first context that is entered anywhere and
# taken back by the last one that is left. Which device is active belongs to the thread. A routed kernel that
# is called with real tensors, or in a thread without an active CUDA device, runs torch's own composite.

_local = threading.local()
_lock = threading.Lock()
_entered = 0
_undo: list[Callable[[], None]] = []


def _stack() -> list[DeviceSpec]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def active_device() -> DeviceSpec | None:
    """The device whose kernels are emulated in this thread just now; the innermost one, None outside."""
    stack = _stack()
    return stack[-1] if stack else None


def _active_cuda() -> DeviceSpec | None:
    spec = active_device()
    return spec if spec is not None and spec.kind == "cuda" else None


def _is_active() -> bool:
    return _active_cuda() is not None


def _is_emulated(args: Any) -> bool:
    return _active_cuda() is not None and any(isinstance(t, FakeTensor) for t in tensors_in(args))


def _routed(original: torch._ops.OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def route(*args: Any, **kwargs: Any) -> Any:
        spec = _active_cuda()
        if spec is None or not isinstance(args[0], FakeTensor):
            return composite(original, *args, **kwargs)
        return kernel(spec, *args, **kwargs)

    return route


def _fake(ours: Callable[..., Any], previous: Callable[..., Any] | None) -> Callable[..., Any]:
    def fake(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        out = NotImplemented if _active_cuda() is None else ours(mode, func, *args, **kwargs)
        if out is NotImplemented and previous is not None:
            return previous(mode, func, *args, **kwargs)
        return out

    return fake


def _install() -> None:
    global _entered
    with _lock:
        _entered += 1
        if _entered > 1:
            return
        try:
            _register()
        except BaseException:
            _take_back()
            _entered -= 1
            raise


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")
    _undo.append(library._destroy)
    for name, (original, kernel) in ROUTES.items():
        library.impl(name, _routed(original, kernel), "AutogradCPU")
    with warnings.catch_warnings():
        # Some ops have a kernel of torch's own for autocast, which is back when the library is destroyed.
        warnings.filterwarnings("ignore", message="[\\s\\S]*[Oo]verriding a previously registered kernel")
        autocast.register(library, _is_emulated)
    for op, ours in FAKES.items():
        previous = fake_impls.op_implementations_dict.get(op)
        fake_impls.op_implementations_dict[op] = _fake(ours, previous)
        _undo.append(lambda op=op, previous=previous: _restore_fake(op, previous))  # type: ignore[misc]
    for patch in (autocast.Patch(_is_active), foreach.Patch(lambda: _is_active() and _in_fake_mode())):
        patch.install()
        _undo.append(patch.remove)


def _in_fake_mode() -> bool:
    return active_fake_mode() is not None


def _restore_fake(op: torch._ops.OpOverload, previous: Callable[..., Any] | None) -> None:
    if previous is None:
        del fake_impls.op_implementations_dict[op]
    else:
        fake_impls.op_implementations_dict[op] = previous


def _take_back() -> None:
    while _undo:
        _undo.pop()()


def _uninstall() -> None:
    global _entered
    with _lock:
        _entered -= 1
        if not _entered:
            _take_back()


@contextmanager
def device_kernels(device: str | DeviceSpec | torch.device = "h100") -> Iterator[DeviceSpec]:
    """Route fake CPU tensors to the kernels of ``device``, under a FakeTensorMode that is there already.

    On a device of kind ``"cpu"`` nothing is routed. Contexts nest: the inner device wins, and the outer one
    is back when it is left. Real tensors and other threads keep torch's own kernels.

    Raises:
        DeviceError: an unknown device; inside, attention that no enabled backend can run.
    """
    spec = resolve_device(device)
    if spec.kind != "cuda":
        with _active(spec):
            yield spec
        return
    _install()
    try:
        with _active(spec), autocast.outer_autocast():
            yield spec
    finally:
        _uninstall()


@contextmanager
def _active(spec: DeviceSpec) -> Iterator[None]:
    stack = _stack()
    stack.append(spec)
    # Fake results are cached per process by op and shape, and would outlive the change of kernels.
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        stack.pop()
        FakeTensorMode.cache_clear()


@contextmanager
def fake_device(device: str | DeviceSpec | torch.device = "h100") -> Iterator[FakeTensorMode]:
    """FakeTensorMode on CPU tensors, with the kernels and the allocator's rounding of ``device``.

    .. code-block:: python

        with sacplan.fake_device("h100") as mode:
            model = Model()
            model(torch.randint(8192, (8, 1024))).sum().backward()   # nothing is computed

    Yields the mode (``mode.from_tensor`` makes fakes of real tensors, which are not accepted otherwise).
    Shapes are static. :func:`active_device` says which device it is. Choose the dtype where the model is
    made: torch cannot cast a fake module with ``.to(dtype)``.

    For a CUDA device ``torch.autocast("cuda")`` and ``torch.autocast("cpu")`` both do what CUDA's autocast does,
    and optimizers take the ``foreach`` path by default, as there.

    Raises:
        DeviceError: an unknown device.
    """
    spec = resolve_device(device)
    with FakeTensorMode(allow_non_fake_inputs=False, static_shapes=True) as mode, device_kernels(spec):
        yield mode
