"""A cache of what is worked out from a program, kept for as long as the program is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
Subject = TypeVar("Subject")
Rest = ParamSpec("Rest")

_KEPT_UNDER = "_derived"


def derived(
    function: Callable[Concatenate[Subject, Rest], T],
) -> Callable[Concatenate[Subject, Rest], T]:
    """Decorate a function of a program (or of a ``PlanStep``) so that it runs once for each program and arguments.

    ``functools.cache`` would keep every program alive for good, and would hash it at every call. Here the results lie
    in the program's ``__dict__``: they are freed with the program, and neither compared nor pickled nor saved. The
    arguments after the first must be hashable. An error is not kept; the next call runs the function again.

    A function that returns an empty dict, decorated, is a typed cache that its callers fill themselves.
    """

    @functools.wraps(function)
    def kept(subject: Subject, /, *args: Rest.args, **kwargs: Rest.kwargs) -> T:
        # ``vars``: a frozen struct refuses ``setattr``, but has a ``__dict__`` (``dict=True``) for cached values.
        results: dict[Hashable, Any] = vars(subject).setdefault(_KEPT_UNDER, {})
        # All derived functions share one dictionary, so the function is part of the key.
        key = function, args, tuple(sorted(kwargs.items()))
        if key not in results:
            results[key] = function(subject, *args, **kwargs)
        result: T = results[key]
        return result

    return kept


@derived
def settled_from(program: object) -> list[Any]:
    """Return the list in which the maker of a program with settled decisions puts the recorded program."""
    return []
