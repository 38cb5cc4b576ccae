"""Check arguments of public functions against the annotations: a wrong type is an error that names the argument."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import itertools
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, overload

import numpy as np
import torch

from sacplan.errors import SacplanError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Saved")

# What ``typing.get_origin`` gives for ``Sequence[...]`` and ``Iterable[...]``.
_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable)

_ALIKE = 0.55  # difflib's ratio from which an unknown argument is taken for a known one


def checked(error: type[SacplanError], *skip: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that arguments that do not fit their annotations raise ``error``.

    Only types are looked at; the function itself checks strings and ranges.

    Args:
        error: the class that is raised.
        skip: arguments that the function checks itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        name_of = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True  # pytest shows the line of the caller
            # Bound before the call, so that a missing or unknown argument raises ``error`` as well.
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as wrong:
                raise error(f"{name_of}: {wrong}.{_meant(signature, kwargs)}") from wrong
            # Annotations are evaluated at the first call, when all names of the module are defined.
            for name, hint in _hints(function).items():
                if name in given and name not in skip and not fits(given[name], hint):
                    asked = signature.parameters[name].annotation
                    raise error(f"{name_of}: {_misfit(name, given[name], hint, asked)}.")
            return function(*args, **kwargs)

        return call

    return decorate


def _meant(signature: inspect.Signature, given: Collection[str]) -> str:
    """Return a question with the argument that an unknown one is most like; ``""`` if none is.

    Names are compared word by word as well, since their lengths may differ: ``grad_accum`` stands for
    ``accumulation_steps``, and ``batch_size`` for ``batch``.
    """
    unknown = next((name for name in given if name not in signature.parameters), "")

    def likeness(known: str) -> float:
        pairs = itertools.product({unknown, *unknown.split("_")}, {known, *known.split("_")})
        return max(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    nearest = max((name for name in signature.parameters if name not in given), key=likeness, default="")
    is_like = unknown and likeness(nearest) >= _ALIKE
    return f" Did you mean {nearest}= rather than {unknown}=?" if is_like else ""


@functools.cache
def _hints(function: Any) -> Mapping[str, Any]:
    """Return the annotations of the parameters that can be checked, by name."""
    # ``**kwargs`` is left out: its annotation is for each value, but all values are bound as one dictionary.
    return {
        name: hint
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
        and (hint := evaluated(parameter.annotation, function.__globals__)) is not Any
    }


def evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Evaluate an annotation; ``Any`` if its names are imported for type checkers only."""
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, names)
    except NameError:
        return Any


def fits(value: Any, hint: Any) -> bool:
    """Whether a value may be passed where ``hint`` is asked for."""
    # A hint that is not understood (a name, a type variable) lets everything pass: this check is there for better
    # messages, and must not refuse what the function takes.
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, TypeVar)):
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if origin is typing.Union or origin is types.UnionType:
        return any(fits(value, member) for member in inner)
    if origin is typing.Literal:
        # Only the type: the function itself says in a better sentence which values it takes.
        return any(type(value) is type(literal) for literal in inner)
    if hint in (int, float):
        # numpy's numbers may stand for Python's, but True is no 1.
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, (bool, np.bool_))
    if hint is bool:
        return isinstance(value, (bool, np.bool_))
    if origin in _SEQUENCES:
        return _fits_items(value, inner[0])
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, inner[0]) for v in value)
    if origin is not None:
        return isinstance(value, origin)
    if getattr(hint, "_is_protocol", False):
        # Protocols need not be ``runtime_checkable``, so public names are looked up. A class is no instance.
        return not isinstance(value, type) and all(
            hasattr(value, name)
            for name in (*vars(hint), *vars(hint).get("__annotations__", ()))
            if name[0] != "_"
        )
    return isinstance(value, hint)


def _fits_items(value: Any, item: Any) -> bool:
    if isinstance(value, str):
        return item is str  # one pattern, or a mistake that the function itself explains
    # These are iterable, too, but given for a sequence of patterns or budgets they are mistakes.
    if isinstance(value, (bytes, Mapping, torch.Tensor)) or not isinstance(value, collections.abc.Iterable):
        return False
    # Only items of lists and tuples are checked: checking those of an iterator would use it up.
    return not isinstance(value, (list, tuple)) or all(fits(v, item) for v in value)


class Saved(Protocol):
    """A value that may be given as itself or as the file that it was saved to, such as a profile."""

    MADE_BY: ClassVar[str]
    """How to make such a value."""

    @classmethod
    def load(cls: type[S], path: str | Path) -> S:
        """Read a saved value."""
        ...


@overload
def opened(value: S | str | Path, kind: type[S]) -> S: ...
@overload
def opened(value: S | str | Path | None, kind: type[S]) -> S | None: ...
def opened(value: S | str | Path | None, kind: type[S]) -> S | None:
    """Return the value itself, or load it if it is the name of a file."""
    return kind.load(value) if isinstance(value, (str, Path)) else value


def _misfit(name: str, value: Any, hint: Any, asked: Any) -> str:
    """Return what is wrong with a value that does not fit, or with the first such item of a sequence."""
    # The annotation may be a union of a ``Saved`` type with ``str`` and ``Path``.
    saved = next((kind for kind in (hint, *typing.get_args(hint)) if hasattr(kind, "MADE_BY")), None)
    if saved is not None:
        given = f"a {type(value).__name__}" if value is not None else "None"
        needed = f"{name} must be a {saved.__name__}, or the path of a saved one"
        return f"{needed}, not {given}. Make it with {saved.MADE_BY}"
    if isinstance(value, (list, tuple)) and typing.get_origin(hint) in _SEQUENCES:
        item = next(v for v in value if not fits(v, typing.get_args(hint)[0]))
        return f"{name} has {item!r} in it; it must be {asked}"
    return f"{name} must be {asked}, not {type(value).__name__}"


def check_statistics(what: str, error: type[SacplanError], **figures: Any) -> None:
    """Raise ``error`` unless all figures, numbers or sequences of numbers, are finite and not negative."""
    for name, figure in figures.items():
        # Strings and mappings are iterable, too, but their items are no figures.
        if isinstance(figure, (str, bytes, Mapping)):
            raise error(
                f"{what}: {name} must be a number, or a sequence of numbers, not {type(figure).__name__}."
            )
        for value in figure if isinstance(figure, collections.abc.Iterable) else (figure,):
            # NaN fails the comparison, too.
            if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
                raise error(f"{what}: {name} has {value!r}; it must be a finite number that is not negative.")
