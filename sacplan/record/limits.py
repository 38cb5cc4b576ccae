"""Explain errors of PyTorch that mean "this cannot be traced". Errors that the model raises come through unchanged.

PyTorch has no error classes for most of these, so they are told apart by their messages, which ``limits.csv`` lists.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from sacplan.core.files import table_of
from sacplan.errors import SacplanError, TraceError
from sacplan.torch_compat.fake_tensors import UnsupportedOperatorException, op_run_on_zeros

_LIMITS = table_of(Path(__file__).with_name("limits.csv"))
"""Patterns of messages, each with what to do."""

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
        # Looked at before the messages, since an op that PyTorch ran on zeros may fail with any of them.
        op = op_run_on_zeros(error)
        if op is not None:
            raise TraceError(
                f"{op} has no kernel for fake tensors, and when PyTorch ran it on zeros instead it failed: "
                f'{_first_line(error)}. Use trace="real", or give the op one with torch.library.register_fake.'
            ) from error
        for limit in _LIMITS:
            match = re.search(limit["message"], str(error)[:_BEGINNING])
            if match is not None:
                advice = limit["advice"].format(**match.groupdict())
                raise TraceError(f"{advice}. PyTorch says: {_first_line(error)}") from error
        raise  # the model's own error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:250]}"
