"""Other ways to compute a head and its loss without whole logits, priced for the same loss.

    region = LossRegion(tokens=8192, width=4096, vocabulary=128256, dtype=torch.bfloat16)
    found = linear_cross_entropy(region, resolve_device("h100"))
    print(found.name, found.peak_bytes, found.time_ms)

``torch.nn.functional.linear_cross_entropy`` (torch 2.13) and Liger's fused loss keep what they do to themselves: the
one is a custom op, in which no dispatch mode sees anything, the other a Triton kernel, which runs on no fake tensor.
So both are priced by the rule in their source: the size of a slice, the buffers that are alive at once, and the
kernels of a slice.

Both take the gradients in the forward pass, slice by slice. A peak is that of the loss
alone, all its operands being leaves: hidden states, weight, targets, gradients and what is alive besides. Libraries'
workspaces do not count. A time is that of forward and backward pass by the roofline, kernel by kernel: a slice reads
the weight again, and launches its own kernels.

Not covered: class weights, label smoothing (``linear_cross_entropy`` then computes whole logits), a frozen head.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from sacplan.device.cost import tf32_allowed
from sacplan.device.devices import DeviceSpec

_FLOAT32_BYTES = torch.float32.itemsize
_INDEX_BYTES = torch.int64.itemsize


@dataclass(frozen=True, slots=True)
class LossRegion:
    """A linear head followed by the cross entropy, averaged over the tokens.

    Attributes:
        tokens: rows of the hidden states: samples times positions.
        width: columns of the hidden states.
        vocabulary: rows of the weight.
        dtype: of hidden states and weight.
        bias: whether the head has one.
    """

    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to compute the loss and its gradients.

    Attributes:
        name: the name that people know it by.
        peak_bytes: everything alive at once: hidden states, weight, targets, gradients, temporaries.
        time_ms: predicted, of forward and backward pass.
        available: whether it can run here: it is installed, and runs on the device.
        note: how it slices, or why it is not available.
    """

    name: str
    peak_bytes: int
    time_ms: float
    available: bool
    note: str


# --- what a step is made of -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Prices:
    """Bytes as the device's allocator counts them, and times by its roofline.

    ``ms`` adds up: each method is one kernel or more.
    """

    region: LossRegion
    spec: DeviceSpec
    ms: float = 0.0

    def product(self, rows: int, inner: int, columns: int, dtype: torch.dtype, out_bytes: int) -> None:
        """Add a matrix product.

        ``out_bytes``: bytes moved for each element of the result, twice its size if the product is added to it.
        """
        spec = self.spec
        peak = spec.reached_flops(dtype, tf32=tf32_allowed())
        moved = dtype.itemsize * (rows * inner + inner * columns) + out_bytes * rows * columns
        compute_ms = 2 * rows * inner * columns / peak * 1e3
        self.ms += max(compute_ms, self._moving_ms(moved)) + spec.kernel_launch_us * 1e-3

    def sweep(self, nbytes: int, kernels: int = 1) -> None:
        """Add kernels that are bound by the bytes that they move."""
        self.ms += self._moving_ms(nbytes) + kernels * self.spec.kernel_launch_us * 1e-3

    def total(self, *allocations: int) -> int:
        """Return the bytes of several allocations."""
        return sum(map(self.spec.round_up, allocations))

    def operands(self) -> int:
        """Return the bytes of hidden states, weight, bias and targets."""
        return self.gradients() + self.total(_INDEX_BYTES * self.region.tokens)

    def gradients(self, hidden_bytes: int | None = None) -> int:
        """Return the bytes of the gradients of hidden states, weight and bias.

        ``hidden_bytes``: bytes of an element of the first, if not as in the region.
        """
        region, size = self.region, self.region.dtype.itemsize
        hidden = region.tokens * region.width * (hidden_bytes or size)
        weight = region.vocabulary * region.width * size
        return self.total(hidden, weight, region.vocabulary * size if region.bias else 0)

    def _moving_ms(self, nbytes: int) -> float:
        return nbytes / (self.spec.bandwidth_bytes_per_s * self.spec.bandwidth_efficiency) * 1e3


def _slice_rows(region: LossRegion) -> int:
    """Return the rows of a slice whose logits are about as large as the hidden states: a power of two.

    The rule of both: ``next_power_of_2(ceil(tokens / ceil(vocabulary / width)))``.
    """
    rows = -(-region.tokens // -(-region.vocabulary // region.width))
    return int(1 << (rows - 1).bit_length())


def _slices(region: LossRegion, rows: int) -> list[int]:
    """Return the rows of each slice; the last may be smaller."""
    whole, rest = divmod(region.tokens, rows)
    return [rows] * whole + ([rest] if rest else [])


# --- torch.nn.functional.linear_cross_entropy ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chunked:
    """How ``LinearCrossEntropyOptions()`` decides by device and type (torch 2.13).

    On a GPU and in float32: ``acc_policy="compact"``, slices half as large as the rule says; half types on a CPU:
    ``"accurate"``, whole slices, since products of half types are slow there. Half types accumulate in float32.

    Attributes:
        rows: of a slice.
        compact: weight gradients go straight to where they are added up; else to a buffer, and from there.
        accumulate: bytes of an element of what is accumulated, and of the class weights.
        logits: bytes of an element of the logits; in float16 they are not accumulated in float32 on a GPU.
        hidden: bytes of an element of the gradient of the hidden states while it is added up.
    """

    rows: int
    compact: bool
    accumulate: int
    logits: int
    hidden: int

    @classmethod
    def of(cls, region: LossRegion, spec: DeviceSpec, rows: int | None) -> _Chunked:
        dtype = region.dtype
        half = dtype in (torch.float16, torch.bfloat16)
        accumulate = _FLOAT32_BYTES if half else dtype.itemsize
        if half and spec.kind == "cpu":
            rows = min(rows or _slice_rows(region), region.tokens)
            return cls(rows, False, accumulate, accumulate, accumulate)
        rows = max(1, min(rows or _slice_rows(region) // 2, region.tokens))
        logits = dtype.itemsize if dtype == torch.float16 else accumulate
        return cls(rows, True, accumulate, logits, dtype.itemsize)


def linear_cross_entropy(region: LossRegion, spec: DeviceSpec, rows: int | None = None) -> Alternative:
    """``F.linear_cross_entropy(hidden, weight, targets, options=LinearCrossEntropyOptions())`` (torch 2.13).

    Args:
        region: the loss.
        spec: the device.
        rows: of a slice, ``batch_chunk_size=`` of the options; None: as torch decides.
    """
    chunked = _Chunked.of(region, spec, rows)
    prices = _Prices(region, spec)
    for rows in _slices(region, chunked.rows):
        _chunked_slice(prices, chunked, rows)
    # The gradients are outputs of the op, for whose own gradients autograd makes zeros before they are scaled.
    prices.sweep(3 * prices.gradients(), kernels=6 if region.bias else 4)
    forward = _chunked_forward_bytes(prices, chunked)
    backward = prices.operands() + 2 * prices.gradients()
    available = hasattr(torch.nn.functional, "linear_cross_entropy")
    note = f"slices of {chunked.rows} tokens"
    if not available:
        note += f"; needs torch 2.13, this is {torch.__version__}"
    return Alternative("F.linear_cross_entropy", max(forward, backward), prices.ms, available, note)


def _chunked_forward_bytes(prices: _Prices, chunked: _Chunked) -> int:
    """Return the most that is alive in a slice, or at the end, where the hidden states' gradient gets its type."""
    region = prices.region
    size, mixed = region.dtype.itemsize, chunked.accumulate != region.dtype.itemsize
    width, vocabulary, rows = region.width, region.vocabulary, chunked.rows
    weight = vocabulary * width
    throughout = prices.total(
        rows * vocabulary * chunked.logits,
        rows * chunked.logits,
        region.tokens,  # which targets are ignored
        region.tokens * _INDEX_BYTES,  # the others
        region.tokens * chunked.accumulate,  # and their weights
        0 if chunked.compact else weight * chunked.accumulate,  # a slice's gradient of the weight
        weight * chunked.logits if mixed and not chunked.compact else 0,  # the weight, converted
        rows * width * chunked.accumulate if mixed else 0,  # the slice, converted
        vocabulary * chunked.logits if region.bias and chunked.logits != size else 0,
        vocabulary * chunked.accumulate if region.bias and mixed else 0,
    )
    converted = rows * vocabulary * size if chunked.compact and chunked.logits != size else 0
    inside = max(
        prices.total(converted, *_scaled_rows(region, chunked)),
        # Added up by an op on two types, which on a CPU converts what it reads and what it writes.
        0 if chunked.compact else prices.total(*[weight * chunked.accumulate] * 2),
    )
    after = prices.total(region.tokens * width * size) if chunked.hidden != size else 0
    return prices.operands() + prices.gradients(chunked.hidden) + throughout + max(inside, after)


def _scaled_rows(region: LossRegion, chunked: _Chunked) -> tuple[int, ...]:
    """Return the bytes of the rows of the weight that were looked up, and of what is alive beside them.

    The scaled hidden states of the slice before are alive then.

    These go where the logits were if they fit there.
    """
    row_bytes = region.width * chunked.hidden
    following = _slices(region, chunked.rows)[1:2]
    if chunked.accumulate != region.dtype.itemsize or region.vocabulary >= region.width or not following:
        return (chunked.rows * row_bytes,)
    return (chunked.rows * row_bytes, following[0] * row_bytes)


def _chunked_slice(prices: _Prices, chunked: _Chunked, rows: int) -> None:
    region = prices.region
    width, vocabulary, size = region.width, region.vocabulary, region.dtype.itemsize
    dtype = region.dtype if chunked.compact else torch.float32
    logits = rows * vocabulary * chunked.logits
    prices.product(rows, width, vocabulary, dtype, chunked.logits)
    # The largest of a row, less it, exponentials, their sum, times a factor; one element of each row for the loss.
    prices.sweep(8 * logits, kernels=12)
    if region.bias:
        prices.sweep(3 * logits, kernels=4)
    if chunked.logits != size and chunked.compact:
        prices.sweep(logits + rows * vocabulary * size)
    prices.sweep(4 * rows * width * size, kernels=3)  # rows of the weight, scaled
    prices.product(rows, vocabulary, width, dtype, 2 * chunked.hidden)
    prices.product(vocabulary, rows, width, dtype, 2 * size if chunked.compact else chunked.accumulate)
    prices.sweep(4 * rows * width * chunked.accumulate, kernels=4)
    if not chunked.compact:
        prices.sweep(vocabulary * width * (chunked.accumulate + 2 * size))


# --- Liger ----------------------------------------------------------------------------------------------------------


def liger(region: LossRegion, spec: DeviceSpec) -> Alternative:
    """``LigerFusedLinearCrossEntropyLoss()``: one kernel computes loss and gradient of a slice where its logits are.

    As in its source of 2026, where the gradient of the weight is added up in place, in the weight's type
    (``accum_dtype=None``). Earlier releases added a whole float32 copy of it in each slice.
    """
    prices = _Prices(region, spec)
    tokens, width, vocabulary = region.tokens, region.width, region.vocabulary
    size, dtype = region.dtype.itemsize, region.dtype
    most = min(_slice_rows(region), tokens)
    for rows in _slices(region, most):
        logits = rows * vocabulary * size
        prices.product(rows, width, vocabulary, dtype, size)
        prices.sweep(3 * logits)  # read twice, the gradient written over it
        prices.product(rows, vocabulary, width, dtype, size)
        prices.product(vocabulary, rows, width, dtype, 2 * size)
        if region.bias:
            prices.sweep(3 * logits, kernels=3)
    peak = prices.operands() + prices.gradients()
    # Logits of a slice, the losses, and which of them count.
    peak += prices.total(most * vocabulary * size, _FLOAT32_BYTES * tokens, tokens)
    installed = importlib.util.find_spec("liger_kernel") is not None
    note = f"slices of {most} tokens"
    if spec.kind != "cuda":
        note += "; runs on GPUs only"
    elif not installed:
        note += "; pip install liger-kernel"
    return Alternative("Liger", peak, prices.ms, installed and spec.kind == "cuda", note)
