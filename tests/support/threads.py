"""Functions that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def at_once(*work: Callable[[], T]) -> list[T]:
    """Run functions at the same time, each on a thread of its own, and return what they return.

    Raises:
        BaseException: what the first of them raised that failed, when all are over.
    """
    # A pool gives a second task to a thread that is done with its first; so nobody begins before all have a thread.
    start = threading.Barrier(len(work))

    def begin(one: Callable[[], T]) -> T:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(begin, work))
