"""Explain errors of PyTorch that mean "this cannot be traced". Errors that the model raises come through unchanged.

PyTorch has no error classes for most of these, so they are told apart by their messages.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from sacplan.errors import SacplanError, TraceError
from sacplan.record.fake_data import REAL_TENSOR
from sacplan.torch_compat.fake_tensors import UnsupportedOperatorException, op_run_on_zeros

_STRIDED = "only strided tensors can be followed: keep sparse, nested and mkldnn ones out of the step that is profiled"
_LIMITS: tuple[tuple[str, str], ...] = (
    # (a pattern in torch's message, what to do), as torch 2.11 to 2.13 say it
    (
        rf"{REAL_TENSOR}(?s:.)*layout=torch\.sparse",
        'an op takes a sparse tensor, and a fake step has strided ones only. Use trace="real"',
    ),
    (
        REAL_TENSOR,
        "a real tensor that requires a gradient, or is written, got into the fake step. loss_fn must use the model and "
        "the batch that it is given, and what it writes or trains besides should be part of the model",
    ),
    (
        r"Cannot access storage of|SparseTensorImpl|Sparse[\w ]* tensors do not have|Sparse(CPU|Meta|Csr\w*)\b",
        _STRIDED,
    ),
    (r"no strides|OpaqueTensorImpl|Mkldnn(CPU|Meta)\b", _STRIDED),
    (r"NestedTensor|nested tensor|self\.shape_env must not be None", _STRIDED),
    (
        r"Quantized(CPU|Meta|CUDA)\b",
        'quantized tensors have no fake kernels: use trace="real", or profile the model before it is converted',
    ),
    (
        r"no rule registered for HigherOrderOperator (?P<op>\w+)",
        "higher-order operators ({op}) cannot be followed: for the step that is profiled call the branch or the loop "
        "body directly",
    ),
    (
        r"FlexAttention does not support backward",
        "flex_attention has a backward pass on CUDA only, and a fake step runs on CPU tensors: use "
        "scaled_dot_product_attention for the profile",
    ),
    (
        r"'(Fake)?Tensor' object has no attribute '(?P<op>main_grad|grad_added_to_main_grad|get_main_grad)'",
        "with saved-tensor hooks, autograd hands out parameters without their Python attributes ({op}): keep the "
        "parameter itself on ctx",
    ),
    (
        r"its data is not allocated yet",
        'an op reads the values of a tensor in a way that a fake step cannot follow: use trace="real"',
    ),
    (
        r"no fake impl registered for <CustomOpDef\((?P<op>[\w:]+)\)",
        '{op} has no kernel for fake tensors. Use trace="real", or give the op one with its register_fake',
    ),
    (
        r"Ran out of input",
        "an object is received from another rank, as a stage of a pipeline asks its neighbours for shapes, and in "
        "sacplan.ranks nobody sends one: give PipelineStage input_args= and output_args=, of one micro-batch, and "
        "import torch.distributed.pipelining before the step runs",
    ),
    (r"not yet supported with fake tensors|[Ff]ake tensors? (is|are) not supported", 'use trace="real"'),
)

WITHOUT_HOOKS = (
    "the step calls torch.func.grad or a relative, which refuse the hooks that tell what autograd keeps: the peak is "
    "exact, but no plan can change the step. torch.autograd.grad(..., create_graph=True) can be planned around"
)
"""What is said of a step that was recorded without saved-tensor hooks."""

_BEGINNING = 400  # characters of a message; what follows may list every backend there is


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether this is the error with which ``torch.func`` refuses saved-tensor hooks."""
    return "don't yet support saved tensor hooks" in str(error)


@contextlib.contextmanager
def explained_limits() -> Iterator[None]:
    """Turn errors that come from tracing, and not from the model, into a ``TraceError`` that says what to do."""
    try:
        yield
    except SacplanError:
        raise
    except UnsupportedOperatorException as error:
        raise TraceError(
            f'{error.func} has no kernel for fake tensors. Use trace="real", or give the op one with '
            "torch.library.register_fake."
        ) from error
    except torch.OutOfMemoryError:
        raise  # a RuntimeError, too, but its own message is the best one
    except (RuntimeError, AttributeError, AssertionError, NotImplementedError, EOFError) as error:
        # Before the messages are looked at: run on zeros, an op may fail with any of them.
        op = op_run_on_zeros(error)
        if op is not None:
            raise TraceError(
                f"{op} has no kernel for fake tensors, and when PyTorch ran it on zeros instead it failed: "
                f'{_first_line(error)}. Use trace="real", or give the op one with torch.library.register_fake.'
            ) from error
        for pattern, advice in _LIMITS:
            found = re.search(pattern, str(error)[:_BEGINNING])
            if found is not None:
                advice = advice.format(**found.groupdict())
                raise TraceError(f"{advice}. PyTorch says: {_first_line(error)}") from error
        raise  # the model's own error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:250]}"
