"""Show the progress of long calls: a bar in a notebook and on a terminal, nothing where output goes elsewhere.

with reported(progress, "frontier", total=32) as step:
step("milp at 3 GiB")
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

from sacplan.errors import PlanError

Progress: TypeAlias = bool | Callable[[Any], Any] | None
"""``progress=`` of a call: None for a bar in a notebook or on a terminal, True for one anywhere, False for none, or a
function that is called with each result as soon as it is known."""

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)

_PATIENCE_S = 0.5  # a call that is over by then shows nothing


@contextlib.contextmanager
def reported(progress: Progress, what: str, total: int | None = None) -> Iterator[Callable[[Any, str], None]]:
    """Yield a function that takes each result, and its name in a few words.

    Args:
        progress: the argument of the call.
        what: the name of the call, shown before the bar.
        total: number of results to come, if that is known.

    Raises:
        PlanError: ``progress`` is neither a bool nor None nor a function.
    """
    if progress is not None and not isinstance(progress, bool):
        # A class can be called as well, but it would only make objects that nobody looks at.
        if isinstance(progress, type) or not callable(progress):
            raise PlanError(
                f"progress is {progress!r}; give True, False, None, or a function of one result, such as print."
            )
        function = progress
        yield lambda result, said: (function(result), None)[1]
        return
    if not (wanted() if progress is None else progress):
        yield lambda result, said: None
        return
    # A bar that was asked for shows at once.
    with _bar(what, total, 0.0 if progress else _PATIENCE_S) as bar:

        def step(result: Any, said: str) -> None:
            bar.set_postfix_str(said, refresh=False)
            bar.update()

        yield step


@contextlib.contextmanager
def stages_go_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Have ``begins`` call a function, as on a command line that shows which stage of a long call runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def begins(stage: str) -> None:
    """Say that a stage of a call begins, in a few words; nothing happens where nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(stage)


def wanted() -> bool:
    """Whether someone watches: a notebook, or a terminal behind stderr."""
    # ``sys.stderr`` is None in a process without a console, such as one of ``pythonw``.
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _in_notebook() -> bool:
    # Where IPython is not imported there is no notebook. With it there may be a terminal, which has no kernel.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _bar(what: str, total: int | None, delay: float) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a notebook without ipywidgets gets a bar of text
        from tqdm.auto import tqdm
    return tqdm(total=total, desc=what, delay=delay, leave=False, dynamic_ncols=True)
