"""PyTorch's own op database as training steps: each op on samples that are large enough to be measured.

``torch.testing._internal`` has some 600 ops with samples of their arguments, and makes them from a few lengths that
lie in its modules. Those are multiplied here until a sample takes ``ENOUGH_BYTES``, or as far as it can be.
"""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

ENOUGH_BYTES = 2**17
MOST_BYTES = 2**25
_SCALES = (1, 2, 4, 8, 16, 32)
_SECONDS = 4
_SAMPLES_LOOKED_AT = 200


def op_database() -> list[Any]:
    """Return all ``OpInfo`` of PyTorch's op database.

    Raises:
        ImportError: ``expecttest`` is missing, which ``torch.testing._internal`` imports.
    """
    try:
        from torch.testing._internal import common_methods_invocations as database
    except ModuleNotFoundError as error:
        if error.name != "expecttest":
            raise
        raise ImportError(
            "PyTorch's op database needs expecttest, which is not installed: pip install expecttest"
        ) from error
    # The database's own wrapper reads and sets the generator's state around some ops, which takes memory.
    database.wrapper_set_seed = _call
    return list(database.op_db)


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def type_for(op: Any) -> torch.dtype:
    """Return float32 where the op takes it, else another type."""
    supported = op.supported_dtypes("cpu")
    return next((d for d in _TYPES if d in supported), torch.float32)


_TYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)


def full_name(op: Any) -> str:
    """Return the name of an op of the database, with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


class OpStep(torch.nn.Module):
    """One op on one sample, as a model of one layer.

    Every floating-point tensor of the sample goes through an addition first, so that the op's arguments are activations
    and receive gradients, where the op has any.

    Attributes:
        batch: the sample's tensors.
    """

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = _Op(op, sample)
        self.batch = self.op.tensors
        self.op.tensors = ()

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.op(*tensors)


class _Op(torch.nn.Module):
    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self._call = op.op
        self._process = sample.output_process_fn_grad
        leaves, self._structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        self._tensor_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = tuple(leaves[i].detach() for i in self._tensor_at)
        self._wants_gradient = [bool(leaves[i].requires_grad) for i in self._tensor_at]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        types = dict.fromkeys(
            t.dtype for t, wants in zip(self.tensors, self._wants_gradient, strict=True) if wants
        )
        self.shifts = torch.nn.ParameterDict(
            {str(dtype)[6:]: torch.zeros((), dtype=dtype) for dtype in types}
        )

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self._leaves)
        for i, t, wants in zip(self._tensor_at, tensors, self._wants_gradient, strict=True):
            leaves[i] = t + self.shifts[str(t.dtype)[6:]] if wants else t
        given, args, kwargs = tree_unflatten(leaves, self._structure)
        return self._process(self._call(given, *args, **kwargs))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Add up all that the op returns, as far as gradients flow from it."""
    total: torch.Tensor | None = None
    for t in tree_leaves(model(*batch)):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            part = t.sum()
            part = part.real if part.is_complex() else part
            total = part if total is None else total + part
    assert total is not None
    return total


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of an op, and the scale at which it was made."""

    sample: Any
    scale: int
    nbytes: int


def samples_of(op: Any, most: int = 2, *, enough_bytes: int = ENOUGH_BYTES) -> list[Sample]:
    """Return up to ``most`` samples of an op, the largest of each kind.

    Samples are of one kind if they pass equally many values and tensors, and the same keywords. Those with tensors that
    are not strided (sparse ones) are left out: their storages are not one block of memory.
    """
    found: list[Sample] = []
    for scale in _SCALES:
        made = list(_made(op, scale))
        if not made:
            break
        made.sort(key=lambda s: -s.nbytes)
        found = made
        if found[0].nbytes >= enough_bytes:
            break
    kinds: dict[Any, Sample] = {}
    for s in found:
        kinds.setdefault(_kind(s.sample), s)
    return [s if s.nbytes >= enough_bytes else _repeated(op, s) for s in list(kinds.values())[:most]]


def _repeated(op: Any, small: Sample) -> Sample:
    """Return the sample with its tensors repeated in the first way that the op takes; else the sample."""
    if not isinstance(small.sample.input, torch.Tensor) or not small.nbytes:
        return small
    times = -(-2 * ENOUGH_BYTES // small.nbytes)
    rows = small.sample.input.shape[:1]
    ways: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda t: t.repeat(times, *[1] * (t.dim() - 1)) if t.dim() and t.shape[:1] == rows else t,
        lambda t: t.repeat(times, *[1] * t.dim()),
        lambda t: t.repeat(times, *[1] * (t.dim() - 1)) if t is small.sample.input and t.dim() else t,
        lambda t: t.repeat(*[1] * (t.dim() - 1), times) if t.dim() else t,
    )
    for way in ways:
        sample = small.sample.transform(functools.partial(_alike, way))
        model = OpStep(op, sample)
        try:
            with _at_most(_SECONDS):
                if op.supports_autograd:
                    loss_of(model, model.batch).backward()
                else:
                    model(*model.batch)
        except Exception:  # the op does not take it so: the next way
            continue
        nbytes = sum(t.numel() * t.element_size() for t in model.batch)
        if small.nbytes < nbytes <= 4 * MOST_BYTES:
            return Sample(sample, small.scale, nbytes)
    return small


def _alike(way: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    return way(leaf).detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _kind(sample: Any) -> Any:
    leaves = tree_leaves((sample.input, sample.args))
    return len(leaves), sum(isinstance(t, torch.Tensor) for t in leaves), tuple(sorted(sample.kwargs))


def _made(op: Any, scale: int) -> Iterator[Sample]:
    """Yield the samples that the database makes at a scale, until it takes too long or fails."""
    differentiable = op.supports_autograd and type_for(op) is not torch.int64
    with _lengths_times(scale), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made: list[Sample] = []
        try:
            with _at_most(_SECONDS):
                samples = op.sample_inputs("cpu", type_for(op), requires_grad=differentiable)
                for sample in itertools.islice(samples, _SAMPLES_LOOKED_AT):
                    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
                    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
                    if not tensors or any(t.layout is not torch.strided for t in tensors):
                        continue
                    nbytes = sum(t.numel() * t.element_size() for t in tensors)
                    if nbytes <= MOST_BYTES:
                        made.append(Sample(sample, scale, nbytes))
        except Exception:
            # A sample function may fail at a scale that it was not made for. What it made until then counts.
            if scale == 1:
                raise
    yield from made


_LENGTHS = ("XS", "S", "M", "L")


@contextmanager
def _lengths_times(scale: int) -> Iterator[None]:
    """Multiply the lengths that the database makes samples from, for a while."""
    before: list[tuple[Any, str, int]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for length in _LENGTHS:
                value = vars(module).get(length)
                if type(value) is int:
                    before.append((module, length, value))
                    setattr(module, length, scale * value)
    try:
        yield
    finally:
        for module, length, value in before:
            setattr(module, length, value)


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise ``TimeoutError`` after a while. It takes an alarm, so it works in the main thread only."""

    def stop(*_: object) -> None:
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
