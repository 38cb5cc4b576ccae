"""Kernels of ops whose addresses depend on data, and of ops that join or sort tensors."""

from __future__ import annotations

import math

from sacplan.device.op_kernels import Call, Kernel, kernels, tensor_bytes
from sacplan.torch_compat.ops import aten_names, tensors_in

# ---------------------------------------------------------------------------------------------------------
# Gathers and scatters (Indexing.cu, IndexKernel.cu, ScatterGatherKernel.cu)


@kernels(*aten_names("embedding index index_select gather take _unsafe_index take_along_dim masked_select"))
def _gather(call: Call) -> tuple[Kernel, ...]:
    """Read as many bytes as are written, and the index. A thread looks up one element at a time."""
    elements = sum(t.numel() for t in call.writes)
    return (Kernel("gather", 2 * call.written_bytes + _index_bytes(call), elements),)


@kernels(*aten_names("""
    scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_copy index_copy_
    index_fill index_fill_ masked_scatter masked_scatter_ put put_ index_reduce index_reduce_
"""))  # fmt: skip
def _scatter(call: Call) -> tuple[Kernel, ...]:
    """Out of place, a copy of the whole tensor first; then each element is read, added to and written."""
    source = tensors_in((call.args[1:], call.kwargs))
    elements = max((t.numel() for t in source), default=0)
    size = call.writes[0].element_size() if call.writes else 0
    last = Kernel("gather", 3 * elements * size + _index_bytes(call), elements)
    if call.func._schema.name.endswith("_"):
        return (last,)
    return Kernel("pointwise", 2 * call.written_bytes), last


@kernels("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")
def _index_put(call: Call) -> tuple[Kernel, ...]:
    """Values that accumulate are sorted by index first, so that each element is written by one thread."""
    values = call.args[2]
    elements = max((t.numel() for t in call.reads[1:]), default=values.numel())
    moved = Kernel("gather", 3 * elements * values.element_size() + _index_bytes(call), elements)
    accumulates = len(call.args) > 3 and bool(call.args[3])
    copy = () if call.func._schema.name.endswith("_") else (Kernel("pointwise", 2 * call.written_bytes),)
    indices = max((t.numel() for t in tensors_in(call.args[1])), default=0)
    return *copy, *(_sorted_indices(indices) if accumulates else ()), moved


def _index_bytes(call: Call) -> int:
    return sum(tensor_bytes(t) for t in call.reads if not t.dtype.is_floating_point and t.dtype.itemsize >= 4)


# ---------------------------------------------------------------------------------------------------------
# The gradient of an embedding (Embedding.cu, EmbeddingBackwardKernel.cu)

_SORTED_FROM = 3072
"""Number of indices above which they are sorted; below, one kernel adds with a block for each row."""
_ROWS_AT_ONCE = 10
"""Rows of one word that a thread adds (``NROWS_PER_THREAD``)."""


@kernels("aten::embedding_dense_backward")
def _embedding_backward(call: Call) -> tuple[Kernel, ...]:
    """Zeros; the indices sorted; partial sums in float32, of at most ten rows each; the sums of these.

    Threads side by side read columns of one row, so rows move at full bandwidth; each thread of a partial sum looks up
    first where its rows begin. Words count as drawn uniformly, since a recording does not know them.
    """
    grad, indices, words = call.args[:3]
    rows, width, size = indices.numel(), grad.shape[-1], grad.element_size()
    zeros = Kernel("pointwise", call.written_bytes)
    if rows <= _SORTED_FROM:
        return zeros, Kernel("gather", tensor_bytes(grad) + 2 * rows * width * size, rows * width)
    distinct = words * -math.expm1(-rows / words)
    # ceil(k / 10) partial sums of a word that occurs k times: one for a rare word, k / 10 + .45 for a frequent one.
    partial = max(distinct, rows / _ROWS_AT_ONCE + 0.45 * distinct)
    return (
        zeros,
        *_sorted_indices(rows),
        Kernel("pointwise", tensor_bytes(grad), launches=0),
        Kernel("gather", 4 * partial * width, partial * width),
        Kernel("gather", (4 * partial + size * distinct) * width, partial * width),
    )


_SORTED_BY_ONE_BLOCK = 2048
"""Indices that CUB sorts in one tile. An H100 takes 7 us for all of an ``index_put`` of up to 1,116."""


def _sorted_indices(count: int) -> tuple[Kernel, ...]:
    """Return the kernels that sort int64 indices with their positions (CUB, Thrust)."""
    if count <= _SORTED_BY_ONE_BLOCK:
        return (Kernel("sort", count * (8 + _POSITION_BYTES)),)
    return Kernel("index_sort", elements=1), _radix_sort(count, 8)


# ---------------------------------------------------------------------------------------------------------
# Sorts (Sort.cu, TensorTopK.cu), and tensors put together (Shape.cu)

_SHARED_SORT = 4096
"""Elements of a row that one block sorts in shared memory."""
_POSITION_BYTES = 8


def _radix_sort(elements: int, key_bytes: int) -> Kernel:
    """Return the passes of a radix sort, of eight bits each. A pass reads and writes keys and positions."""
    return Kernel("sort", 2 * key_bytes * elements * (key_bytes + _POSITION_BYTES), launches=key_bytes + 2)


@kernels(
    "aten::sort",
    "aten::argsort",
    "aten::msort",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::unique_consecutive",
)
def _sort(call: Call) -> tuple[Kernel, ...]:
    """A block sorts a short row. Long rows are sorted together, and then once more by the number of the row."""
    x = call.reads[0]
    length = x.shape[-1] if x.dim() else 1
    if length <= _SHARED_SORT:
        return (Kernel("sort", call.nbytes),)
    return _radix_sort(x.numel(), x.element_size()), _radix_sort(x.numel(), 4)


@kernels("aten::topk", "aten::kthvalue")
def _topk(call: Call) -> tuple[Kernel, ...]:
    """Radix select: a pass over the row for each eight bits of a key, one more that collects, and a sort of these."""
    passes = call.reads[0].element_size() + 1
    return Kernel("reduction", passes * tensor_bytes(call.reads[0])), Kernel("sort", 2 * call.written_bytes)


@kernels("aten::cat", "aten::stack")
def _cat(call: Call) -> tuple[Kernel, ...]:
    return (Kernel("strided", call.nbytes, sum(t.numel() for t in call.writes)),)
