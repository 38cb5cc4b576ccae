"""Workspaces of CPU kernels, measured: memory that a kernel allocates and frees again, which no dispatch mode sees.

Convolutions above all (layouts reordered for oneDNN, a second gradient, im2col), but also the copies that a
kernel makes of operands that are not contiguous, accumulators per thread, and matrix products of half types.
There is no formula to rely on: which of a dozen kernels runs depends on the build, the instruction set and the
number of threads. So each distinct op and shape runs once, for real, on made-up operands (``real_ops.py``),
and the allocator's events say what was alive inside beyond the outputs. The result is kept for the life of
the process. A profile for ``device="cpu"`` is therefore one for the local CPU.

What it depends on, found by experiment (torch 2.13, x86 with oneDNN):

- no cache: eager convolutions reorder their weights in every call, so the first call is like any other;
- the number of threads: accumulators per thread (layer norm's backward, attention) grow with it, and oneDNN
  chooses its kernels by it. It is part of the key;
- memory format and strides of the operands, which are part of the key too;
- not the values, but for a few ops (``_BY_VALUES``).

What has to be added to ``live + outputs`` to get an op's peak is the peak of what is allocated inside, less
the outputs: it does not matter whether the outputs come first or last.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sacplan.device.cost import is_free, op_key
from sacplan.device.devices import DeviceSpec
from sacplan.device.kernel_workspaces import kernel_workspace_bytes
from sacplan.device.real_ops import RUN_ERRORS, RealOp, first_line, run_for_real
from sacplan.errors import TraceError
from sacplan.torch_compat.allocations import allocation_deltas, profiler_is_on
from sacplan.torch_compat.autograd import autograd_as_outside
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.fake_kernels import fake_kernels
from sacplan.torch_compat.fake_tensors import active_fake_mode
from sacplan.torch_compat.ops import arguments_by_name, aten_names, op_named, tensors_in
from sacplan.torch_compat.private import storage_key, strided_parts

# Ops that allocate nothing but what they return, whatever their operands: not worth a run. Every other op runs once.
# Elementwise ops and matrix products are told apart by their operands: see ``_worth_a_run``.
# ``tests/device/test_op_temporaries.py`` runs what is not run here, over PyTorch's op database.
_NOTHING_INSIDE = aten_names("""
    arange as_strided_copy bernoulli cat clone copy_ detach_copy empty_like expand_copy fill fill_ full full_like
    linspace normal_ one_ ones ones_like permute_copy rand rand_like randint randn randn_like
    random_ slice_copy squeeze_copy stack t_copy transpose_copy uniform_ unsqueeze_copy view_copy
    zero_ zeros zeros_like
""")
# Elementwise ops with temporaries of their own: copies of expanded operands, several kernels in one op.
_ELEMENTWISE_WITH_MORE = aten_names("gelu gelu_backward ldexp mvlgamma")
_BY_VALUES = aten_names("linalg_matrix_exp isin _unique2 unique_consecutive unique_dim")
"""Ops whose kernels choose their way, or their sizes, by the values of their operands."""
_RUN_HERE = ("aten", "prims", "bitsandbytes")
"""Libraries whose ops may be run on made-up operands: they only compute."""
_PRODUCTS = aten_names("mm addmm bmm baddbmm addbmm mv addmv")
_MADE_FOR_BLAS = frozenset((torch.float32, torch.float64))

_CPU = torch.device("cpu")
_known: dict[Any, Any] = {}
"""Bytes by (torch, threads, oneDNN, op key); for the life of the process."""


def measured_workspace_bytes(call: Call) -> int:
    """Return the bytes that the CPU kernel of an op takes at its peak beyond live tensors and its outputs.

    May be called inside a dispatch mode, under FakeTensorMode, in the backward pass: modes are off while
    the op runs, and generators are restored. 0 for ops that are not known to have a workspace, and, with a
    warning, if the op cannot be run on made-up operands.

    Raises:
        TraceError: a profiler is on in this thread.
    """
    # Most calls leave here, at the cost of some look-ups. A run takes far longer, and happens once for each key.
    if not _worth_a_run(call):
        return _number_bytes(call)
    key = (torch.__version__, torch.get_num_threads(), torch.backends.mkldnn.enabled, op_key(call))
    # In a real step each call has values of its own. The result of made-up ones must not stand for them, nor
    # the reverse.
    by_values = call.func._schema.name in _BY_VALUES and active_fake_mode() is None
    known = None if by_values else _known.get(key)
    if known is None:
        try:
            inside: int = run_for_real(call, _CPU, _peak_inside)
        except RUN_ERRORS as error:
            warnings.warn(
                f"the workspace of {call.func} could not be measured ({first_line(error)}); it counts as 0.",
                stacklevel=2,
            )
            inside = 0
        # Negative if an output was not allocated during the run.
        known = max(0, inside)
        if not by_values:
            _known[key] = known
    return known


# Ops whose backward formula takes another way under a dispatch mode than in the plain step, because it avoids writing
# in place where ``isTensorSubclassLike`` says that there is a subclass (``FunctionsManual.cpp``, torch 2.13): what the
# plain formula allocates is measured. ``benchmarks.op_memory`` finds more of them.
_OTHER_FORMULA_UNDER_A_MODE = aten_names("""
    max min median nanmedian prod cumprod cumprod_ binary_cross_entropy binary_cross_entropy_with_logits xlogy
    special_xlog1py clamp clamp_ clamp_min clamp_max masked_fill ormqr trace linalg_householder_product
""")


def measured_formula_bytes(call: Call) -> tuple[int, int] | None:
    """Return the bytes that the backward formula of an op takes at its peak on a CPU beyond its gradients.

    Two figures: for incoming gradients that are contiguous, and for those that are one element, expanded.

    None where the ops that a dispatch mode sees are those of the plain step, and account for it; where no argument
    requires a gradient; and, with a warning, where the formula cannot be run on made-up operands.
    """
    if call.func._schema.name not in _OTHER_FORMULA_UNDER_A_MODE or not torch.is_grad_enabled():
        return None
    wanted = tuple(i for i, t in enumerate(tensors_in((call.args, call.kwargs))) if t.requires_grad)
    if not wanted:
        return None
    # A leaf must not be written in place, so the op's out-of-place namesake is run, which has the same formula.
    func = op_named(str(call.func).replace("_.", ".")) or call.func
    call = Call(func, call.args, call.kwargs, call.returned)
    key = ("formula", torch.__version__, torch.get_num_threads(), wanted, op_key(call))
    if key not in _known:
        try:
            _known[key] = run_for_real(call, _CPU, lambda op: _inside_the_formula(op, wanted))
        except RUN_ERRORS as error:
            warnings.warn(
                f"the backward pass of {func} could not be measured ({first_line(error)}); it counts as the ops that "
                "a dispatch mode sees.",
                stacklevel=2,
            )
            return None
    known: tuple[int, int] = _known[key]
    return known


def _inside_the_formula(op: RealOp, wanted: Sequence[int]) -> tuple[int, int]:
    # The graph is made once and run backward twice: what the forward pass allocates must not be in the figures.
    given = tensors_in((op.args, op.kwargs))
    leaves = [given[i].requires_grad_() for i in wanted]
    with autograd_as_outside():
        outputs = [t for t in tensors_in(op()) if t.requires_grad]

    def inside(upstream: Sequence[torch.Tensor]) -> int:
        def run() -> Any:
            return torch.autograd.grad(outputs, leaves, upstream, retain_graph=True, allow_unused=True)

        return max(0, _peak_beyond_outputs(run, (given, upstream)))

    ones = [torch.ones_like(t) for t in outputs]
    return inside(ones), inside([t.new_ones(()).expand(t.shape) for t in ones])


def _worth_a_run(call: Call) -> bool:
    """Whether the kernel of this call may allocate more than it returns."""
    func = call.func
    name = func._schema.name
    if func.namespace not in _RUN_HERE:
        return False  # collectives and custom ops are not run here
    tensors = [t for t in tensors_in((call.args, call.kwargs)) if t.dim()]
    if any(t.layout is not torch.strided for t in tensors):
        return True  # of a sparse tensor even a transpose is a copy
    if name in _NOTHING_INSIDE or is_free(func):
        return False
    if name in _PRODUCTS:
        # Where a matrix has neither rows nor columns of stride 1 (permuted, expanded), BLAS takes a copy. Half
        # types are reordered for oneDNN, or added up in float32.
        return any(t.dtype not in _MADE_FOR_BLAS or (t.dim() > 1 and not _fits_blas(t)) for t in tensors)
    if torch.Tag.pointwise in func.tags and name not in _ELEMENTWISE_WITH_MORE:
        # An operand of another type than the result is first cast, which makes a copy.
        return len({t.dtype for t in (*tensors, *tensors_in(call.returned))}) > 1
    return True


_TAKES_NUMBERS_AS_THEY_ARE = aten_names("""
    pow.Tensor_Scalar pow_.Scalar float_power_.Scalar lerp.Scalar lerp_.Scalar masked_fill.Scalar masked_fill_.Scalar
""")
"""Overloads of elementwise ops whose kernels take a number itself, and make no tensor of it."""

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _number_bytes(call: Call) -> int:
    """Return the bytes of tensors that an elementwise op makes of Python numbers, and of their casts.

    Numbers in place of a tensor, and the operand of an overload for numbers, such as ``mul.Scalar`` of backward
    formulas and ``rsub.Scalar`` of ``1 - x``. Other numbers, such as bounds and slopes, the kernel takes themselves.
    """
    func = call.func
    if torch.Tag.pointwise not in func.tags:
        return 0
    result = next(iter(tensors_in(call.returned)), None)
    expects_operand = "scalar" in func._overloadname.lower() and func.name() not in _TAKES_NUMBERS_AS_THEY_ARE
    n_bytes = 0
    for argument, value in zip(func._schema.arguments, call.args, strict=False):
        dtype = _NUMBERS.get(type(value))
        if dtype is None:
            continue
        if isinstance(argument.type, torch.TensorType):
            pass
        elif expects_operand and isinstance(argument.type, torch.NumberType):
            expects_operand = False  # what follows is a factor (alpha)
        else:
            continue
        n_bytes += dtype.itemsize
        if result is not None and result.dtype != dtype:
            n_bytes += result.dtype.itemsize
    return n_bytes


def _fits_blas(t: torch.Tensor) -> bool:
    """Whether BLAS can read the matrices of [..., N, M] without a copy, by rows or by columns."""
    rows, columns = t.shape[-2:]
    row_stride, column_stride = t.stride()[-2:]
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    return by_rows or (row_stride == 1 and column_stride >= max(1, rows))


def _peak_inside(op: RealOp) -> int:
    return _peak_beyond_outputs(op, (op.args, op.kwargs))


def _peak_beyond_outputs(run: Callable[[], Any], given: Any) -> int:
    """Return the peak of ``run``'s allocations, less the bytes of new storages that it returns."""
    if profiler_is_on():
        raise TraceError(
            "a profiler is on, and a profile for a CPU needs it to measure what kernels allocate inside. "
            "Leave the profiler's context first."
        )
    outputs = 0

    def watched() -> None:
        nonlocal outputs
        out = run()
        old = {storage_key(part.untyped_storage()) for t in tensors_in(given) for part in strided_parts(t)}
        storages = [part.untyped_storage() for t in tensors_in(out) for part in strided_parts(t)]
        returned = {storage_key(storage): storage.nbytes() for storage in storages}
        # By storage: two outputs on one storage, or an output on an input's, must not count twice.
        outputs = sum(nbytes for key, nbytes in returned.items() if key not in old)

    live = peak = 0
    for delta in allocation_deltas(watched):
        live += delta
        peak = max(peak, live)
    return peak - outputs


# ---------------------------------------------------------------------------------------------------------
# What a kernel keeps for its backward pass without its fake kernel knowing

_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


@contextmanager
def measured_reserves() -> Iterator[None]:
    """Make oneDNN's fake LSTM return tensors with as many bytes as the real one does.

    torch's own fake kernels are wrong twice (2.11 to 2.15). The workspace that the forward pass keeps for the
    backward pass has no bytes, though it is several times the layer's output. The gradients of the two biases are
    one tensor, while the real kernel copies one for the other. Enter this inside a FakeTensorMode for a CPU. It
    applies to the whole process while it is on; contexts nest.
    """
    with fake_kernels({_LSTM: _fake_lstm_layer, _LSTM_BACKWARD: _fake_lstm_layer_backward}):
        yield


def _fake_lstm_layer(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Make fake output [T, N, H] of input [T, N, C], hidden and cell state of the given shapes, workspace [bytes]."""
    call = Call(func, args, kwargs)
    a = call.arguments
    steps, batch = a["input"].shape[:2]
    reserve = _lstm_reserve_bytes(call) if a["train"] and torch.is_grad_enabled() else 0
    new = a["input"].new_empty
    return (
        new((steps, batch, a["hidden_size"])),
        new(a["hx_"].shape),
        new(a["cx_"].shape),
        new((reserve,), dtype=torch.uint8),
    )


def _fake_lstm_layer_backward(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Make fake gradients of input, four parameters, hidden and cell state, all float32 whatever the operands' type."""
    a = arguments_by_name(func, args, kwargs)

    def new(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    # A layer without biases passes zeros in the shape of its matrices, and still gets a vector for each.
    biases = [new(a[name], a[name].shape[:1]) for name in ("weight3", "weight4")]
    before, after = (
        [new(a[name], a[name].shape) for name in names]
        for names in (("input", "weight1", "weight2"), ("hx_", "cx_tmp"))
    )
    return (*before, *biases, *after)


def _lstm_reserve_bytes(call: Call) -> int:
    key = ("reserve", torch.__version__, torch.get_num_threads(), op_key(call))
    known: int | None = _known.get(key)
    if known is None:
        known = _known[key] = run_for_real(call, _CPU, lambda op: op()[3].nbytes)
    return known


def workspace_bytes(spec: DeviceSpec, call: Call) -> int:
    """Return the bytes that an op's kernel allocates inside: measured on a CPU, by formula on a GPU."""
    return measured_workspace_bytes(call) if spec.kind == "cpu" else kernel_workspace_bytes(call, spec)


def formula_bytes(spec: DeviceSpec, call: Call) -> tuple[int, int] | None:
    """Return ``measured_formula_bytes`` for a CPU; None for a GPU, where the other formula is not accounted for."""
    return measured_formula_bytes(call) if spec.kind == "cpu" else None
