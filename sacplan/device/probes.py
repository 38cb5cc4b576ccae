"""Ops that show how fast each kind of kernel runs, for ``calibrate``.

    rates = measured_rates(spec, where, nbytes, seconds_of)

A probe is a call of one op and the figure of :class:`KernelRates` that its time shows. The formula of
``kernel_rates.py`` is solved for that figure:

    share = bytes / (seconds * bandwidth * bandwidth_efficiency)
    rate  = elements / (seconds * multiprocessors * clock)

First the launches, and the other kernels of the op as the rates so far predict them, are taken off the measured time.
So a kind that other probes contain comes before them.

If something else takes longer than what the figure counts, the figure comes out as slow as the measured time allows,
and the prediction for the probe is right all the same. A figure whose op the device or the build lacks stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec
from sacplan.device.kernel_rates import KINDS, KernelRates
from sacplan.device.op_kernels import Call, kernels_of
from sacplan.device.real_ops import RUN_ERRORS

aten = torch.ops.aten

SecondsOf = Callable[[Callable[[], object]], float]
"""Measures a function that takes no arguments."""

_LEAST_SHARE = 0.01
"""Least share of the measured time that is attributed to the kernel itself, after the others are subtracted."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A call, and the figure that it shows.

    Attributes:
        figure: of :class:`KernelRates`.
        kind: of the kernel that shows it.
        func, args, kwargs: the call.
    """

    figure: str
    kind: str
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """Call the op."""
        return self.func(*self.args, **self.kwargs)


def measured_rates(
    spec: DeviceSpec, where: torch.device, nbytes: int, seconds_of: SecondsOf
) -> tuple[KernelRates, tuple[str, ...]]:
    """Return the rates of a device, and the names of the figures that were measured.

    Args:
        spec: the device, with peaks, bandwidth and launches as measured, and the rates to start from.
        where: the device.
        nbytes: about the size of the largest operands.
        seconds_of: the clock.
    """
    measured = []
    for probe in probes(where, nbytes):
        try:
            out = probe.run()
            seconds = seconds_of(probe.run)
        except torch.OutOfMemoryError:  # a RuntimeError, too, but no statement about the op
            raise
        except RUN_ERRORS:
            continue
        value = _solved(probe, out, seconds, CostModel(spec))
        spec = replace(spec, rates=msgspec.structs.replace(spec.kernel_rates, **{probe.figure: value}))
        measured.append(probe.figure)
    return spec.kernel_rates, tuple(measured)


def _solved(probe: Probe, out: Any, seconds: float, model: CostModel) -> float:
    """Return the value of a probe's figure with which the model predicts the measured time."""
    call = Call(probe.func, probe.args, probe.kwargs, out)
    launched = kernels_of(call)
    peak = model.flops_per_s(call) if call.flops else 0.0
    mine = [k for k in launched if k.kind == probe.kind]
    others_ms = sum(model.kernel_ms(k, peak) for k in launched if k.kind != probe.kind)
    launch_ms = sum(k.launches for k in mine) * model.spec.kernel_launch_us * 1e-3
    ms = max(seconds * 1e3 - others_ms - launch_ms, seconds * 1e3 * _LEAST_SHARE)

    spec, kind = model.spec, KINDS[probe.kind]
    elements = sum(k.elements for k in mine)
    if probe.figure == kind.share:
        moved = sum(k.nbytes for k in mine)
        return moved / (ms * 1e-3 * spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency)
    if probe.figure == kind.matrix:
        return sum(k.flops for k in mine) / (ms * 1e-3 * peak)
    if probe.figure == kind.rate:
        return elements / (ms * 1e-3 * spec.cycles_per_s)
    side_by_side = spec.sm_count * (spec.threads_per_sm // 1024) if probe.figure == kind.block_us else 1
    return ms * 1e3 * side_by_side / elements


# ---------------------------------------------------------------------------------------------------------
# The probes


def probes(where: torch.device, nbytes: int) -> Iterator[Probe]:
    """Yield the probes one at a time, so that the operands of one are let go before the next."""
    yield from _elementwise(where, nbytes)
    yield from _on_rows(where, nbytes)
    yield from _group_norm(where, nbytes)
    yield from _on_indices(where, nbytes)
    yield from _convolution(where)
    for forward in (_flash, _efficient, _cudnn):
        try:
            yield from forward(*(_operand(where) for _ in range(4)))
        except torch.OutOfMemoryError:
            raise
        except RUN_ERRORS:  # the forward pass, which the backward pass needs results of, does not run here
            continue


_WIDTH = 4096


def _tensor(
    where: torch.device, nbytes: int, dtype: torch.dtype = torch.float32, width: int = _WIDTH
) -> torch.Tensor:
    """Return a matrix of about this size."""
    return torch.zeros(max(nbytes // (width * dtype.itemsize), 1), width, dtype=dtype, device=where)


def _elementwise(where: torch.device, nbytes: int) -> Iterator[Probe]:
    x, y = _tensor(where, nbytes), _tensor(where, nbytes // 2, torch.bfloat16)
    yield Probe("cast", "cast", aten._to_copy.default, (y,), {"dtype": torch.float32})
    yield Probe("strided", "strided", aten.add.Tensor, (x, x[:1]))
    # One byte each, so that instructions take longer than bytes.
    small = _tensor(where, nbytes // 4, torch.uint8)
    yield Probe("strided_rate", "strided", aten.add.Tensor, (small, small[:1]))
    yield Probe("random_rate", "random", aten.random_.default, (small,))
    # Four tensors, so that no list is a single one.
    parts = [list(t.chunk(4)) for t in (x, torch.zeros_like(x))]
    yield Probe("foreach", "foreach", aten._foreach_add_.List, tuple(parts))


def _on_rows(where: torch.device, nbytes: int) -> Iterator[Probe]:
    x, weight = _tensor(where, nbytes), torch.ones(_WIDTH, device=where)
    yield Probe("reduction", "reduction", aten.sum.dim_IntList, (x, [-1]))
    yield Probe("scan", "scan", aten.cumsum.default, (x, -1))
    # Just over the length that one warp holds, and half precision: blocks wait for one another and not for bytes.
    short = _tensor(where, nbytes // 8, torch.bfloat16, width=1088)
    yield Probe("softmax_row_us", "softmax", aten._softmax.default, (short, -1, False))
    yield Probe("softmax", "softmax", aten._softmax.default, (x, -1, False))
    gradient = aten._log_softmax_backward_data.default
    yield Probe("softmax_backward", "softmax_backward", gradient, (x, x.clone(), -1, x.dtype))
    yield Probe("norm", "norm", aten.native_layer_norm.default, (x, [_WIDTH], weight, weight, 1e-5))
    moments = torch.ones(len(x), 1, device=where)
    args = (x.clone(), x, [_WIDTH], moments, moments, weight, weight, [True, True, True])
    yield Probe("norm_backward", "norm_backward", aten.native_layer_norm_backward.default, args)


def _group_norm(where: torch.device, nbytes: int) -> Iterator[Probe]:
    channels, length = 512, 512
    samples = max(nbytes // (4 * channels * length), 1)
    x = torch.zeros(samples, channels, length, device=where)
    args = (x, None, None, samples, channels, length, channels // 4, 1e-5)
    yield Probe("moments_rate", "moments", aten.native_group_norm.default, args)
    # Few elements in each sample of a large batch: the walk over the batch takes the longest.
    batch, channels, length = 128, 4, 512
    x, means = torch.zeros(batch, channels, length, device=where), torch.zeros(batch, 1, device=where)
    weight = torch.ones(channels, device=where)
    backward = (x.clone(), x, means, means, weight, batch, channels, length, 1, [True, True, True])
    yield Probe("batch_walk_us", "batch_walk", aten.native_group_norm_backward.default, backward)


def _on_indices(where: torch.device, nbytes: int) -> Iterator[Probe]:
    rows, words = 2**14, 2**13
    ids = torch.arange(rows, device=where) % words
    scores = torch.zeros(rows, 8, device=where)
    yield Probe("nll_row_us", "nll", aten.nll_loss_forward.default, (scores, ids % 8, None, 1, -100))
    table = torch.zeros(words, _WIDTH, device=where)
    many = torch.arange(max(nbytes // (4 * _WIDTH), 1), device=where) % words
    yield Probe("gather_rate", "gather", aten.embedding.default, (table, many))
    yield Probe("sort", "sort", aten.sort.default, (_tensor(where, nbytes // 8, width=2**16),))
    gradient = torch.zeros(rows, 64, device=where)
    args = (gradient, ids, words, -1, False)
    yield Probe("index_sort_us", "index_sort", aten.embedding_dense_backward.default, args)


def _convolution(where: torch.device) -> Iterator[Probe]:
    """Yield convolutions of 3 x 3 on 64 images of 56 x 56 with 288 channels, channels last, by channels of a group."""
    images = torch.zeros(64, 56, 56, 288, dtype=torch.bfloat16, device=where).permute(0, 3, 1, 2)
    for width, figure in (
        (288, "convolution"),
        (32, "grouped_convolution"),
        (24, "padded_convolution"),
        (24, "padded_convolution_backward"),
        (1, "depthwise_backward"),
    ):
        filters = torch.zeros(288, width, 3, 3, dtype=torch.bfloat16, device=where)
        geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 288 // width)
        if figure.endswith("backward"):
            args = (images, images, filters, None, *geometry, [True, True, False])
            yield Probe(figure, figure, aten.convolution_backward.default, args)
        else:
            yield Probe(figure, figure, aten.convolution.default, (images, filters, None, *geometry))


# --- attention ------------------------------------------------------------------------------------------

Tensor = torch.Tensor


def _operand(where: torch.device) -> Tensor:
    """Return queries, keys, values or a gradient: eight sequences of 4,096 tokens, 16 heads of 128."""
    return torch.zeros(8, 16, 4096, 128, dtype=torch.bfloat16, device=where)


def _flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[Probe]:
    op = aten._scaled_dot_product_flash_attention.default
    yield Probe("flash_attention", "flash_attention", op, (q, k, v))
    out, logsumexp, starts_q, starts_k, most_q, most_k, state, unused, _ = op(q, k, v)
    args = (grad, q, k, v, out, logsumexp, starts_q, starts_k, most_q, most_k, 0.0, False, state, unused)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    yield Probe("flash_attention_backward", "flash_attention_backward", backward, args)


def _efficient(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[Probe]:
    op = aten._scaled_dot_product_efficient_attention.default
    yield Probe("efficient_attention", "efficient_attention", op, (q, k, v, None, True))
    out, logsumexp, seed, offset = op(q, k, v, None, True)
    args = (grad, q, k, v, None, out, logsumexp, seed, offset, 0.0, [True, True, True, False])
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    yield Probe("efficient_attention_backward", "efficient_attention_backward", backward, args)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Iterator[Probe]:
    op = aten._scaled_dot_product_cudnn_attention.default
    yield Probe("cudnn_attention", "cudnn_attention", op, (q, k, v, None, True))
    out, logsumexp, starts_q, starts_k, most_q, most_k, seed, offset, _ = op(q, k, v, None, True)
    args = (grad, q, k, v, out, logsumexp, seed, offset, None, starts_q, starts_k, most_q, most_k, 0.0, False)
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    yield Probe("cudnn_attention_backward", "cudnn_attention_backward", backward, args)
