"""Factor rules: what a rule says, and the table of formulas that make them.

A formula is a small function of one call's shapes and arguments, registered by the names of ops, in the way of
``torch.utils.flop_counter``. An op without a formula must see whole tensors.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.ops import draws_numbers


class Kind(enum.Enum):
    """How a factor shows in one output of an op, and how the results of slices make the whole output."""

    PASS = "pass"
    """The output is sliced with the inputs; or it does not depend on the factor, and any slice gives all of it."""
    SUM = "sum"
    """The results of slices are added."""
    MAX = "max"
    MIN = "min"
    MEAN = "mean"
    """The results are added, each times the length of its slice over that of the whole."""
    WEIGHTED_MEAN = "weighted_mean"
    """The sums of slices are added, and divided by the second output of the whole."""
    BLOCK = "block"
    """A slice of the inputs does not determine any part of the output."""

    @property
    def makes_the_whole(self) -> bool:
        """Whether a loop can put the whole output together from what slices give, one after the other."""
        return self is not Kind.BLOCK and self is not Kind.WEIGHTED_MEAN


Factors = tuple[int, ...]
"""The factors of one dimension, the slowest first; their product is its size. Empty for size 1."""

Dims = tuple[Factors, ...]
"""The factors of each dimension of one tensor."""


class Resized(NamedTuple):
    """An integer argument that is a size, or a stride.

    Attributes:
        argument: its position.
        position: within the list, if the argument is one.
        factors: the argument is their product, or a multiple of it.
    """

    argument: int
    position: int | None
    factors: Factors


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one call of an op.

    Attributes:
        inputs: the factors of each tensor argument, in the order of positions, then keywords, lists flattened.
        outputs: the factors of each tensor that is returned.
        sizes: the size of each factor.
        kinds: the kind of each factor in each output; ``kinds[output][factor]``.
        resized: integer arguments that are sizes, and change with the slice.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: tuple[int, ...]
    kinds: tuple[tuple[Kind, ...], ...]
    resized: tuple[Resized, ...] = ()

    def kind(self, factor: int, output: int = 0) -> Kind:
        """Return the kind of a factor in an output."""
        return self.kinds[output][factor]


class RuleBuilder(Call):
    """Builds the rule of one call: a formula names the factors and gives each its kind."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any) -> None:
        super().__init__(func, args, kwargs, returned)
        self._sizes: list[int] = []
        self._kinds: list[Kind] = []
        self._by_output: dict[tuple[int, int], Kind] = {}
        self._resized: list[Resized] = []

    def factor(self, size: int, kind: Kind = Kind.PASS) -> Factors:
        """Make a factor, as the only one of a dimension; none for size 1."""
        # Nothing to slice. And a broadcast operand of size 1 has no factor that its partner would disagree with.
        if size == 1:
            return ()
        self._sizes.append(size)
        self._kinds.append(kind)
        return (len(self._sizes) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = Kind.PASS) -> Dims:
        """Make factors, one for each dimension."""
        return tuple(self.factor(size, kind) for size in shape)

    def blocked(self, shape: Sequence[int]) -> Dims:
        """Make factors for dimensions that must be whole."""
        return self.dims(shape, Kind.BLOCK)

    def of_length(self, dims: Dims, shape: Sequence[int], other: Sequence[int]) -> Dims:
        """Return the factors ``dims`` of a shape for one whose dimensions of other lengths must be whole."""
        return tuple(
            f if n == length else self.factor(length, Kind.BLOCK)
            for f, n, length in zip(dims, shape, other, strict=True)
        )

    def becomes(self, factors: Collection[int], kind: Kind, *outputs: int) -> None:
        """Set the kind of factors in these outputs; in all, if none are given."""
        for factor in factors:
            if not outputs:
                self._kinds[factor] = kind
            for output in outputs:
                self._by_output[output, factor] = kind

    def resize(self, argument: str, position: int | None, factors: Factors) -> None:
        """Say that an integer argument, or one of a list, is the size of these factors."""
        if factors:
            self._resized.append(Resized(list(self.arguments).index(argument), position, factors))

    def resize_all(self, argument: str, dims: Dims) -> None:
        """Say that an argument lists the sizes of these dimensions."""
        for i, factors in enumerate(dims):
            self.resize(argument, i, factors)

    def rule(self, inputs: Sequence[Dims], outputs: Sequence[Dims]) -> Rule:
        """Return the rule with these factors of tensor arguments and outputs."""
        # One kind for all outputs, except where the formula has set another for some (``becomes``).
        kinds = (tuple(self._kinds),) * len(outputs)
        if self._by_output:
            kinds = tuple(
                tuple(self._by_output.get((output, f), kind) for f, kind in enumerate(self._kinds))
                for output in range(len(outputs))
            )
        return Rule(tuple(inputs), tuple(outputs), tuple(self._sizes), kinds, tuple(self._resized))


Formula = Callable[[RuleBuilder], Rule | None]
FormulaT = TypeVar("FormulaT", bound=Formula)

_FORMULAS: dict[str, Formula] = {}


def register(*names: str) -> Callable[[FormulaT], FormulaT]:
    """Register the decorated formula for these ops, by name (``"mm bmm"``) or name and overload (``"max.dim"``)."""

    def add(formula: FormulaT) -> FormulaT:
        for name in " ".join(names).split():
            if name in _FORMULAS:
                raise ValueError(f"{name} has a formula already")
            _FORMULAS[name] = formula
        return formula

    return add


def register_both_ways(
    there: str, back: str
) -> Callable[[Callable[[RuleBuilder, Any, Any], tuple[Dims, Dims]]], None]:
    """Register a formula for ops from one tensor to another (``there``), and for their gradients (``back``).

    A formula gets the call, input and output of the forward op (or their gradients), and returns their factors.
    """

    def add(formula: Callable[[RuleBuilder, Any, Any], tuple[Dims, Dims]]) -> None:
        def forward(call: RuleBuilder) -> Rule:
            dims, out_dims = formula(call, call.inputs[0], call.outputs[0])
            return call.rule([dims], [out_dims])

        def backward(call: RuleBuilder) -> Rule:
            dims, out_dims = formula(call, call.outputs[0], call.inputs[0])
            if "input_sizes" in call.arguments:
                call.resize_all("input_sizes", dims)
            return call.rule([out_dims], [dims])

        register(there)(forward)
        register(back)(backward)

    return add


@functools.cache
def formula_of(func: torch._ops.OpOverload) -> Formula | None:
    """Return the formula of an op; None if it has none.

    An in-place op (``relu_``) has the formula of the op without the underscore. An op that PyTorch tags as pointwise
    needs none of its own. Ops of other namespaces and with ``out=`` have none.
    """
    # Nothing is known of ops of other libraries. With ``out=`` a slice would write into memory of the whole.
    if func.namespace not in ("aten", "prims") or any(a.is_out for a in func._schema.arguments):
        return None
    name = func._schema.name.partition("::")[2]
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    # The overload goes before the op (``max.dim`` and ``max`` mean different things), the exact name before the name
    # without the underscore, and any formula of our own before the tag: pointwise ops may have arguments that matter.
    for key in (f"{name}.{func._overloadname}", name, f"{plain}.{func._overloadname}", plain):
        if key in _FORMULAS:
            return _FORMULAS[key]
    return _FORMULAS["pointwise"] if torch.Tag.pointwise in func.tags else None


def rule_of(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
) -> Rule | None:
    """Return the factors of one call of an op.

    Args:
        func: the op.
        args, kwargs: as dispatch modes are given them. Tensors may be anything with ``shape`` and ``dtype``.
        outputs: what the call returns, described in the same way.

    Returns:
        None if the op must see whole tensors: it has no formula, or draws random numbers.
    """
    # Random ops: slices would draw other numbers than the whole does.
    formula = formula_of(func)
    if formula is None or draws_numbers(func, args, kwargs):
        return None
    call = RuleBuilder(func, args, kwargs, outputs)
    return formula(call) if call.outputs else None
