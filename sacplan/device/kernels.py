"""The kernels of a device, emulated on fake CPU tensors, so that autograd keeps what it would keep on the device.

:func:`fake_device` is FakeTensorMode together with :func:`device_kernels`, which switches on, for a CUDA device:

- ``overrides.py``, ``attention.py``, ``cudnn_rnn.py``: the ops that CUDA runs in other kernels. A new module of
  overrides is one more import here;
- ``autocast.py``: CUDA's cast lists;
- ``foreach_by_default``: optimizers take the path that is the default on CUDA;

and for every device ``layouts.py``: strides and storages as the kernels make them.

``kernel_workspaces.py`` knows what a kernel allocates inside, ``cublas.py`` what cuBLAS keeps.

How: Python kernels for the dispatch key ``AutogradCPU``. A function mode would miss the calls inside
``F.multi_head_attention_forward``, and the key ``CPU`` would lose autograd.

Known gaps, all of them small, or impossible to know without the device:

- math attention: ``attn.add_(mask)`` becomes out-of-place under a dispatch mode (one score-sized temporary);
- cuDNN's own workspaces (convolutions, attention, RNN) and the reserve of fused batch norm count as 0;
- ``dropout_`` and feature dropout are composites on both sides and left alone; packed sequences of LSTM and
  GRU stay composites, and so do recurrent layers on ROCm;
- efficient attention's backward on float32 briefly keeps one more product, about as large as its workspace; the
  partial sums of layer norm's backward are not counted;
- an optimizer's ``step`` counters count 512 bytes each, where CUDA keeps them on the host unless fused;
- second derivatives through ``rms_norm``, ``torch.func`` transforms over it, and inference mode (which skips
  the autograd keys) are not emulated.

Private PyTorch APIs, tried on 2.11 and 2.13: ``torch._subclasses.FakeTensorMode``, ``Library._destroy``.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch._refs  # registers torch's own fake layer norm, which must be there before it is replaced
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.optim import optimizer as torch_optimizer

from sacplan.device import attention, autocast, cudnn_rnn  # noqa: F401  (each registers its overrides)
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec, resolve_device
from sacplan.device.layouts import elementwise_kernels, kernels_for
from sacplan.device.overrides import fake_kernel, override
from sacplan.torch_compat.fake_kernels import FakeKernel, fake_kernels, forget_kernels
from sacplan.torch_compat.fake_tensors import active_fake_mode, make_fake_zeros_ordinary
from sacplan.torch_compat.local_tensors import local_part
from sacplan.torch_compat.ops import run_composite, tensors_in
from sacplan.torch_compat.private import replaced

# The registrations belong to the process: the first context that is entered anywhere makes them, and the last one
# that is left removes them. Which device is active belongs to the thread. An overridden op that is called with
# real tensors, or in a thread without an active CUDA device, runs torch's own composite.

_device: ContextVar[DeviceSpec | None] = ContextVar("device", default=None)


def active_device() -> DeviceSpec | None:
    """Return the device whose kernels are emulated in this thread: the innermost one, None outside."""
    return _device.get()


make_fake_zeros_ordinary(lambda: active_device() is not None)


def active_cuda() -> DeviceSpec | None:
    """Return the GPU whose kernels are emulated in this thread; None outside, and where a CPU's are."""
    return _active_of("cuda")


def _active_cpu() -> DeviceSpec | None:
    return _active_of("cpu")


def _active_of(kind: str) -> DeviceSpec | None:
    spec = active_device()
    return spec if spec is not None and spec.kind == kind else None


def _is_emulated(args: Any) -> bool:
    return active_cuda() is not None and any(map(_is_fake, tensors_in(args)))


def _is_fake(tensor: Any) -> bool:
    """Whether a tensor is fake, or stands for a fake one that is not computed yet."""
    deferred = getattr(type(tensor), "is_deferred", False)
    if isinstance(tensor, torch.Tensor):
        tensor = local_part(tensor)
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or (deferred and active_fake_mode() is not None)


def _overridden(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        spec = active_cuda()
        # Registered for the process: other threads, and real tensors in this one, keep torch's own kernel.
        if spec is None or not _is_fake(args[0]):
            return run_composite(op, *args, **kwargs)
        return kernel(spec, *args, **kwargs)

    return call


@functools.cache  # the same one at each registration, so that ``entered_kernels`` are equal
def _where(is_active: Callable[[], object], kernel: FakeKernel) -> FakeKernel:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs) if is_active() else NotImplemented

    return fake


def _register_layouts(stack: ExitStack) -> None:
    # Entered last means asked first: the elementwise kernels, for sizes of 1, come before those of both tables.
    for is_active, table in (
        (active_device, kernels_for("all devices")),
        (_active_cpu, kernels_for("CPU")),
        (active_device, elementwise_kernels()),
    ):
        stack.enter_context(fake_kernels({op: _where(is_active, kernel) for op, kernel in table.items()}))


def _register_cuda_kernels(stack: ExitStack) -> None:
    # The stack keeps the library alive: its registrations would go with it (a finalizer in ``torch/library.py``).
    library = torch.library.Library("aten", "IMPL")
    stack.callback(library._destroy)
    # While a compiler traces, torch looks kernels up in a cache of each op, which registering does not empty.
    forget_kernels(override)
    stack.callback(forget_kernels, override)
    for op, kernel in override.items():
        library.impl(op, _overridden(op, kernel), "AutogradCPU")
    with warnings.catch_warnings():
        # Torch warns where an op has an autocast kernel of its own, which is back when the library is destroyed.
        warnings.filterwarnings("ignore", message="[\\s\\S]*[Oo]verriding a previously registered kernel")
        autocast.register(library, _is_emulated)
    stack.enter_context(fake_kernels({op: _where(active_cuda, kernel) for op, kernel in fake_kernel.items()}))
    stack.enter_context(autocast.cuda_autocast_on_cpu(active_cuda))
    stack.enter_context(
        foreach_by_default(lambda: active_cuda() is not None and active_fake_mode() is not None)
    )


class _Registration:
    """Registers something for the process at the first entry, in any thread, and removes it at the last exit."""

    def __init__(self, register: Callable[[ExitStack], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._entered = 0
        self._made = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                # If a registration fails half-way, the stack takes back what was made, and nothing counts as entered.
                with ExitStack() as stack:
                    self._register(stack)
                    self._made = stack.pop_all()
            self._entered += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._made.close()


_layouts = _Registration(_register_layouts)
_cuda_kernels = _Registration(_register_cuda_kernels)


@contextmanager
def device_kernels(device: str | DeviceSpec | torch.device = DEFAULT_DEVICE) -> Iterator[DeviceSpec]:
    """Run fake CPU tensors through the kernels of ``device``, under a FakeTensorMode that is already on.

    On a device of kind ``"cpu"`` only ``layouts.py`` applies. Contexts nest: the inner device wins, and the outer one
    is back when the inner context is left. Real tensors and other threads keep torch's own kernels.

    Raises:
        DeviceError: an unknown device; inside, attention that no enabled backend can run.
    """
    spec = resolve_device(device)
    with registered(spec), _active(spec), autocast.outer_autocast() if spec.kind == "cuda" else nullcontext():
        yield spec


@contextmanager
def registered(spec: DeviceSpec) -> Iterator[None]:
    """Keep the kernels of a device registered, so that ``device_kernels`` inside need not do it each time.

    No device is made active, so ops run as before.
    """
    with _layouts, _cuda_kernels if spec.kind == "cuda" else nullcontext():
        yield


@contextmanager
def kernel_layouts(kind: str) -> Iterator[None]:
    """Give fake tensors the strides that kernels of this kind of device make (``layouts.py``), and change nothing else.

    For a real step that needs sizes of results before these are computed. Does nothing where a device is active.
    """
    if active_device() is not None or kind not in ("cpu", "cuda"):
        yield
        return
    with _layouts, _active(resolve_device(kind)):
        yield


@contextmanager
def _active(spec: DeviceSpec) -> Iterator[None]:
    token = _device.set(spec)
    # Fake results are cached per process by op and shape, and would outlive the change of kernels.
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        _device.reset(token)
        FakeTensorMode.cache_clear()


@contextmanager
def fake_device(device: str | DeviceSpec | torch.device = DEFAULT_DEVICE) -> Iterator[FakeTensorMode]:
    """FakeTensorMode on CPU tensors, with the kernels and the allocator's rounding of ``device``.

    .. code-block:: python

        with sacplan.fake_device("h100") as mode:
            model = Model()
            model(torch.randint(8192, (8, 1024))).sum().backward()   # nothing is computed

    Yields the mode (``mode.from_tensor`` makes fakes of real tensors, which are not accepted themselves).
    Shapes are static. :func:`active_device` says which device it is. Choose the dtype when the model is
    made: torch cannot cast a fake module with ``.to(dtype)``.

    For a CUDA device ``torch.autocast("cuda")`` and ``torch.autocast("cpu")`` both do what CUDA's autocast does,
    and optimizers take the ``foreach`` path by default, as on CUDA.

    Raises:
        DeviceError: an unknown device.
    """
    spec = resolve_device(device)
    with FakeTensorMode(allow_non_fake_inputs=False, static_shapes=True) as mode, device_kernels(spec):
        yield mode


@contextmanager
def foreach_by_default(is_active: Callable[[], bool]) -> Iterator[None]:
    """Let fake CPU parameters qualify for ``foreach`` where ``is_active()``, which is asked in each thread.

    ``foreach`` is the default on a CUDA device, and torch decides by the exact type of parameters and by their device.
    Without this, a trace would take the path of single tensors, whose temporaries differ: ``foreach`` holds as much as
    all parameters. Each optimizer's own rules (Adafactor stays single, a tensor learning rate, ``fused``) are torch's.

    Private PyTorch APIs, tried on 2.11 and 2.13: ``_foreach_supported_types`` and
    ``_get_foreach_kernels_supported_devices`` in ``torch.optim.optimizer``.
    """
    optimizers: Any = torch_optimizer
    own = optimizers._get_foreach_kernels_supported_devices

    def devices() -> list[str]:
        return [*own(), "cpu"] if is_active() else own()

    # ``_default_to_fused_or_foreach`` asks for the exact type and then for the device, so both lists must grow. The
    # types may grow for every thread: they let a fake parameter pass, whose device still decides.
    types = [*optimizers._foreach_supported_types, FakeTensor]
    with replaced(optimizers, _foreach_supported_types=types, _get_foreach_kernels_supported_devices=devices):
        yield
