"""How fast kernels of each kind run: a few figures that hold for every GPU.

The time of one kernel is that of whatever it waits for longest, after its launches:

    ms = 1e3 * max(bytes / (bandwidth * bandwidth_efficiency * share),
                   elements / (rate * multiprocessors * clock),
                   FLOPs / (peak * compute_efficiency * share))

A share is relative to the kernel that does best: for bytes a contiguous elementwise op, for FLOPs a large matrix
product. So ``bandwidth_efficiency`` and ``compute_efficiency`` of a :class:`DeviceSpec` say what a device reaches, and
changing them scales all kernels. The figures here say how kernels compare, which differs little between devices. A rate
is for kernels that wait for instructions or latency and not for bytes: elements per cycle and multiprocessor.

Where the figures come from:

- *published*: fitted to the times of single ops that Liger-Kernel has published for A100, H100, B200, RTX 3090 and RTX
  4090 (``benchmarks/data/README.md``). Rows over .1 ms, least squares of the logarithm of predicted over measured time,
  with a loss that is linear for outliers. ``python -m benchmarks.published_ops`` compares.
- *steps*: fitted to the times of whole steps that timm has published for RTX 3090 and 4090, channels last
  (``benchmarks/data/steps.jsonl``). ``python -m benchmarks.published`` compares.
- *paper*: a figure of the publication that is named.
- *assumed*: we know of no published figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sacplan.core.files import table_of
from sacplan.errors import DeviceError


class KernelRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of kernels by kind, see ``sacplan/device/kernel_rates.py`` for the formula and for where they come from.

    Raises:
        DeviceError: a figure that is not positive and finite.
    """

    cast: float = 0.63
    """Share of bandwidth: elementwise and contiguous, but types differ (``unrolled_elementwise_kernel``). Published."""
    strided: float = 0.64
    """Share of bandwidth: elementwise, with an operand that is broadcast or has gaps (``elementwise_kernel``), and
    ``cat``. Published."""
    strided_rate: float = 2.3
    """Elements per cycle and multiprocessor of the same. Published."""
    reduction: float = 0.88
    """Share of bandwidth: sums, means, maxima (``reduce_kernel``). Published."""
    softmax: float = 1.0
    """Share of bandwidth: softmax and log-softmax. Published."""
    softmax_backward: float = 0.93
    """Share of bandwidth: their gradients. Published."""
    softmax_row_us: float = 1.75
    """Microseconds that a block needs for a row of more than 1,024 elements at least, in softmax. Published."""
    norm: float = 0.63
    """Share of bandwidth: layer norm and RMS norm. Published."""
    norm_backward: float = 0.73
    """Share of bandwidth: their gradients. Published."""
    moments_rate: float = 0.59
    """Elements per cycle and multiprocessor: moments of group norm, and the sums of its gradient. Published."""
    batch_walk_us: float = 0.25
    """Microseconds for each sample of the batch, in the gradients of group norm's weight and bias. Published."""
    nll_row_us: float = 0.036
    """Microseconds for each row of a reduced ``nll_loss``, whose one block of 32 threads walks over all. Published."""
    gather_rate: float = 0.51
    """Elements per cycle and multiprocessor: a thread looks up the address of one element. Published."""
    index_sort_us: float = 180.0
    """Microseconds that sorting indices takes besides the passes over them: a dozen of small kernels. Published."""
    random_rate: float = 6.0
    """Elements per cycle and multiprocessor: random numbers. The published rows say that it is at least 3.7."""
    sort: float = 0.6
    """Share of bandwidth: a pass of a radix sort. Assumed."""
    scan: float = 0.4
    """Share of bandwidth: cumulative sums. Assumed."""
    foreach: float = 0.95
    """Share of bandwidth: foreach and fused optimizers (``multi_tensor_apply``). Assumed."""
    convolution: float = 0.93
    """Share of FLOPs: cuDNN's convolutions and recurrent layers. Steps."""
    grouped_convolution: float = 0.3
    """Share of FLOPs: grouped convolutions of 4, 8, 16 or 32 channels a group, whose kernels are made for it. Steps."""
    padded_convolution: float = 0.11
    """Share of FLOPs: grouped convolutions of other widths, a small padded product for each group. Steps."""
    padded_convolution_backward: float = 0.03
    """Share of FLOPs: their gradients, with cuDNN 8.3. Steps."""
    depthwise_backward: float = 0.27
    """Share of bandwidth: gradients of depthwise convolutions. They themselves are bound by bandwidth. Steps."""
    flash_attention: float = 0.88
    """Share of FLOPs on Ampere and Ada, with heads of 128 like all of attention. Paper: FlashAttention-2 (Dao, 2023):
    73 % of an A100's peak. With the backward pass it is 203 TFLOP/s there, as the figure in the README of
    Dao-AILab/flash-attention shows; xformers 98."""
    flash_attention_backward: float = 0.76
    """Share of FLOPs. The same paper: 63 % of the peak."""
    cudnn_attention: float = 0.85
    """Share of FLOPs. Paper: FlashAttention-3 (Shah et al., 2024), figure 5: cuDNN with 600 TFLOP/s on an H100."""
    cudnn_attention_backward: float = 0.7
    """Share of FLOPs. The same paper, figure 6: 500 TFLOP/s."""
    efficient_attention: float = 0.4
    """Share of FLOPs. Paper: FlashAttention-2, figure 5, xformers (CUTLASS): about 100 TFLOP/s on an A100."""
    efficient_attention_backward: float = 0.35
    """Share of FLOPs. The same paper, figure 6."""

    def __post_init__(self) -> None:
        # With 0 or infinity a kernel would take no time, or forever. NaN is refused, too: it compares as False.
        for name, value in msgspec.structs.asdict(self).items():
            if not 0 < value < math.inf:
                raise DeviceError(f"KernelRates: {name} must be positive and finite, got {value!r}")


FIGURES = KernelRates.__struct_fields__
"""The names of the figures."""

HOPPER = KernelRates(flash_attention=0.53, flash_attention_backward=0.46)
"""On Hopper and later, flash attention is the kernel that was written for Ampere. Paper: FlashAttention-3 (Shah et al.,
2024), figures 5 and 6: 370 and 322 TFLOP/s on an H100."""


FITTED_BYTES_PER_CYCLE = 12.8
"""Bytes of bandwidth for a cycle of a multiprocessor on an H100, and 13.4 on an A100 with 80 GB: the published shares
are of these two. An RTX 3090 has 6.3 and a 4090 has 3.1."""
# Not strided kernels: with all of the bandwidth, timm's steps come out too fast (grouped convolutions: 90 % within 31.5
# and not 24.8 %), and no published op tells.
_ASK_FOR_TOO_FEW = ("cast", "reduction", "norm", "norm_backward")
"""Kinds that miss bandwidth since a multiprocessor asks for too few bytes in a cycle. So their shares are larger where
there is less bandwidth for it: timm's steps on RTX 3090 and 4090 show that they have all of it there."""


def default_rates(capability: tuple[int, int] | None, bytes_per_cycle: float) -> KernelRates:
    """Return the rates of a GPU with this bandwidth for a cycle of a multiprocessor."""
    rates = HOPPER if capability is not None and (9, 0) <= capability < (12, 0) else KernelRates()
    more = max(1.0, FITTED_BYTES_PER_CYCLE / bytes_per_cycle)
    shares = {name: min(1.0, more * getattr(rates, name)) for name in _ASK_FOR_TOO_FEW}
    return msgspec.structs.replace(rates, **shares)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of kernel, and which of the figures it runs by.

    Attributes:
        share: the share of bandwidth; None: it moves bytes as fast as a contiguous elementwise op.
        rate: elements per cycle and multiprocessor; None: they do not matter.
        block_us: microseconds that a block needs for an element (a row). Blocks run side by side.
        us: microseconds for an element, one after the other.
        matrix: the share of FLOPs; None: all of ``compute_efficiency``.
    """

    share: str | None = None
    rate: str | None = None
    block_us: str | None = None
    us: str | None = None
    matrix: str | None = None


KINDS: Mapping[str, Kind] = {
    row.pop("kind"): Kind(**{figure: name or None for figure, name in row.items()})
    for row in table_of(Path(__file__).with_name("kernel_kinds.csv"))
}
"""The kinds of kernels by name."""
