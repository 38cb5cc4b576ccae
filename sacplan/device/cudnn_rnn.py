"""Recurrent layers as CUDA runs them: one ``_cudnn_rnn`` for all layers and steps, and what it keeps.

cuDNN does not publish the size of the reserve that the forward pass keeps for the backward pass; torch's own
fake kernel gives it no bytes. It is **estimated** here: for each step, layer and direction what the backward
formulas read, in the input's type (LSTM: four gates, cell state, hidden state; GRU: three gates, the candidate's
recurrent term, hidden state; plain: hidden state), and one byte per element for dropout between the layers.
Check it on a GPU before planning with little headroom. Weights are assumed to be flattened
(``nn.LSTM.flatten_parameters``, which the modules do on CUDA), so no copy of them is made.

Packed sequences (their batch sizes depend on data), projections and ROCm are left to torch's composite. Source:
PyTorch's ``RNN.cpp``.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import torch

from sacplan.device.devices import DeviceSpec
from sacplan.device.overrides import fake_kernel, override
from sacplan.torch_compat.ops import arguments_by_name, run_composite

aten = torch.ops.aten

# cuDNN's modes.
RELU, TANH, LSTM, GRU = 0, 1, 2, 3
_KEPT_PER_STEP = {RELU: 1, TANH: 1, LSTM: 6, GRU: 5}


def takes_cudnn(spec: DeviceSpec, dtype: torch.dtype) -> bool:
    """Whether a recurrent layer in ``dtype`` goes to cuDNN (bfloat16 from sm80 on)."""
    if spec.capability is None or not torch.backends.cudnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return spec.capability >= (8, 0)
    return dtype in (torch.float16, torch.float32, torch.float64)


def _run(mode: int, op: torch._ops.OpOverload, spec: DeviceSpec, *args: Any) -> Any:
    """Return output and last states of ``lstm.input`` or a relative over input [T, N, C] (or [N, T, C]).

    On a CPU PyTorch runs each step as ops of its own, or oneDNN's layer, and keeps other tensors than cuDNN does. Calls
    that cuDNN does not take, that are empty, or that have projections (their reserve is not estimated) run as
    PyTorch's composite.
    """
    input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = (hx[0], hx[1]) if mode == LSTM else (hx, None)
    projected = cell is not None and hidden.shape[2] != cell.shape[2]
    if not takes_cudnn(spec, input.dtype) or projected or input.numel() == 0:
        return run_composite(op, *args)
    # Stands for the buffer that all weights are views of on CUDA. Empty: at full size it would count the weights twice.
    flat_weight = params[0].new_empty(0)
    output, last_hidden, last_cell, _reserve, _ = aten._cudnn_rnn.default(
        input, params, 4 if has_biases else 2, flat_weight, hidden, cell, mode, hidden.shape[2], 0, num_layers,
        batch_first, dropout, train, bidirectional, [], None,
    )  # fmt: skip
    return (output, last_hidden, last_cell) if mode == LSTM else (output, last_hidden)


for _mode, _op in enumerate((aten.rnn_relu.input, aten.rnn_tanh.input, aten.lstm.input, aten.gru.input)):
    override[_op] = functools.partial(_run, _mode, _op)


def reserve_bytes(mode: int, states: int, num_layers: int, dropout: float, element_size: int) -> int:
    """Estimate the bytes that the forward pass keeps for the backward pass.

    kept * states * layers * element_size, with ``kept`` of ``_KEPT_PER_STEP``; with dropout, another byte for each of
    the states between two layers. See the module's docstring.

    Args:
        mode: cuDNN's.
        states: elements of a layer's hidden states of all steps, T * N * H * directions.
        num_layers, dropout: of the module.
        element_size: bytes of an element of the input.
    """
    masks = states * (num_layers - 1) if dropout > 0 else 0
    return _KEPT_PER_STEP[mode] * states * num_layers * element_size + masks


@fake_kernel(aten._cudnn_rnn.default)
def fake_forward(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Make fake output, last hidden state, last cell state, reserve [bytes], and the flat weights as given."""
    a = arguments_by_name(func, args, kwargs)
    # ``_run`` never calls the op with packed sequences or projections: such a direct call has torch's own fake kernel.
    if len(a["batch_sizes"]) or a["proj_size"]:
        return NotImplemented
    directions = 2 if a["bidirectional"] else 1
    input, hidden = a["input"], a["hidden_size"]
    n, t = (0, 1) if a["batch_first"] else (1, 0)
    batch, steps = input.shape[n], input.shape[t]
    kept = 0
    if a["train"]:
        all_states = steps * batch * hidden * directions
        kept = reserve_bytes(a["mode"], all_states, a["num_layers"], a["dropout"], input.element_size())
    states = [a["num_layers"] * directions, batch, hidden]
    # Computed as [T, N, ...], and transposed where the batch comes first.
    output = input.new_empty([steps, batch, hidden * directions])
    return (
        output.transpose(0, 1) if a["batch_first"] else output,
        a["hx"].new_empty(states),
        input.new_empty([0]) if a["cx"] is None else a["cx"].new_empty(states),
        input.new_empty([kept], dtype=torch.uint8),
        a["weight_buf"].new_empty([prod(a["weight_buf"].shape)]),
    )


@fake_kernel(aten._cudnn_rnn_backward.default)
def fake_backward(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Make fake gradients of input, hidden state, cell state, and of each weight."""
    a = arguments_by_name(func, args, kwargs)
    contiguous = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    weights = a["weight"] if a["output_mask"][3] else []
    return (
        contiguous(a["input"]),
        contiguous(a["hx"]),
        a["input"].new_empty([0]) if a["cx"] is None else contiguous(a["cx"]),
        [contiguous(w) for w in weights],
    )
