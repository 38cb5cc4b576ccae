"""Find the outcome of a check (an ``assert``, or an ``if`` that only raises) that lets the step go on.

A model that asserts something about its data asks a fake tensor for a bool. The data is not there, but only one answer
lets the step continue. So the source of the innermost frame of the user's code is parsed, and the place at which the
frame asks is looked up among the conditions.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import sys
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__)
_FILES = ("_ops.py", "_compile.py", "_tensor.py", "overrides.py", "utils/_stats.py")
_SKIPPED = (
    *(os.path.join(_TORCH, *name.split("/")) for name in _FILES),
    *(os.path.join(_TORCH, name, "") for name in ("_dynamo", "_subclasses")),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
)


def outcome_that_passes() -> bool | None:
    """Return the bool with which the check that reads a tensor now passes; None if no check does, or it is unclear.

    A check is the condition of an ``assert``, or of an ``if`` that does nothing but raise. It is unclear if several
    checks with different outcomes may be asking. Only conditions that treat all their parts alike are understood:
    ``not a or not b``, but not ``a and not b``.
    """
    frame: FrameType | None = sys._getframe(1)
    # Between the code that asks and this function are PyTorch's dispatch and sacplan's modes.
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return None
    # If no check covers the place, a plain branch asks. If several do, they must agree: nested ones, or, where only the
    # line is known (Python 3.10), those on one line.
    at = _place(frame)
    outcomes = {
        outcome for low, high, outcome in _checks_in(frame.f_code.co_filename) if low[: len(at)] <= at <= high
    }
    return outcomes.pop() if len(outcomes) == 1 else None


def _place(frame: FrameType) -> tuple[int, ...]:
    """Return line and column of the instruction that runs; the line alone before Python 3.11."""
    if sys.version_info >= (3, 11):
        line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
        if line is not None and column is not None:
            return line, column
    return (frame.f_lineno,)


@functools.lru_cache(maxsize=32)
def _checks_in(filename: str) -> tuple[tuple[tuple[int, int], tuple[int, int], bool], ...]:
    """Return first and last place of each condition that guards an error, and the outcome that passes."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # no Python source, such as a template
        return ()
    checks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            passes = True
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            passes = False
        else:
            continue
        polarity = _polarity(node.test)
        if polarity is not None:
            test = node.test
            first = node.lineno, node.col_offset  # where Python 3.11 places the jump
            last = test.end_lineno or 0, test.end_col_offset or 0
            checks.append((first, last, passes is polarity))
    return tuple(checks)


def _polarity(test: ast.expr) -> bool | None:
    """Return what all parts of a condition have to be for it to be true, True or False; None if they differ.

    Only one of the parts is being read when the check asks, and it cannot be told which. So the answer is only known
    where all parts have to be the same.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _polarity(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = {_polarity(value) for value in test.values}
        return parts.pop() if len(parts) == 1 else None
    return True
