"""Work in processes of their own, so that a crash, a limit or what imports leave behind costs one result only.

    for result in in_workers(names, work, lost, jobs=2):

Processes are spawned, not forked: torch's threads do not survive a fork, and memory of the parent would be measured as
the child's. So a function must be one of a module, which the process imports.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("spawn")


Lost = Callable[[str, str, float], Any]
"""Makes a result of an item, a reason and seconds, where a process died or took too long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a worker process.

    Attributes:
        seconds: of processor time, for one item: how far it gets does not depend on what else the machine does. Whole
            seconds, rounded up.
        address_space_gib: with the libraries of a CUDA build in it, and less room than 16, oneDNN takes other kernels
            or none.
        items: a process is replaced after as many: it has collected enough of what they leave.
    """

    seconds: float = 180.0
    address_space_gib: int = 16
    items: float = 50


def in_workers(
    items: Iterable[str],
    work: Callable[[str], Any],
    lost: Lost,
    *,
    jobs: int = 2,
    limits: Limits | None = None,
) -> Iterator[Any]:
    """Yield what ``work`` makes of each item, as results come, from ``jobs`` processes at a time.

    Args:
        items: names that are worked on.
        work: a function of a module.
        lost: what to make of an item whose process died or was ended by a limit.
        jobs: processes at a time.
        limits: on each of them.
    """
    limits = limits or Limits()
    waiting = list(reversed(list(items)))
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = idle.pop() if idle else _Worker(work, lost, limits)
                worker.start(waiting.pop())
                busy.append(worker)
            wait([worker.connection for worker in busy])  # until one answers or dies
            for worker in list(busy):
                if (result := worker.result()) is None:
                    continue
                busy.remove(worker)
                if not worker.spent:
                    idle.append(worker)
                elif worker.process.is_alive():
                    worker.end()
                yield result
    finally:
        for worker in (*idle, *busy):
            worker.end()


class _Worker:
    """A process, the item that it works on, and since when."""

    def __init__(self, work: Callable[[str], Any], lost: Lost, limits: Limits) -> None:
        self._lost, self._limits = lost, limits
        self.connection, theirs = _CONTEXT.Pipe()
        arguments = (theirs, work, limits)
        self.process = _CONTEXT.Process(target=_answer_all, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.item = ""
        self.began = 0.0
        self.done = 0

    def start(self, item: str) -> None:
        self.item, self.began = item, time.monotonic()
        self.connection.send(item)

    def result(self) -> Any:
        """Return the result of the item, or None while it is open."""
        if not self.connection.poll():
            return None
        try:
            self.done += 1
            return self.connection.recv()
        except EOFError:  # the process is gone: an op crashed it, or it ran into a limit
            self.process.join()
            exitcode = self.process.exitcode
            self.end()
        why = f"the process ended with exit code {exitcode}"
        if exitcode == -signal.SIGXCPU:
            why = f"not done after {self._limits.seconds:.0f} s of processor time"
        return self._lost(self.item, why, time.monotonic() - self.began)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    @property
    def spent(self) -> bool:
        """Whether another process should take over: this one is gone, or has had its share of items."""
        return not self.process.is_alive() or self.done >= self._limits.items


def _answer_all(connection: Connection, work: Callable[[str], Any], limits: Limits) -> None:
    """Answer items with what ``work`` makes of them, until the process is killed."""
    bytes_ = limits.address_space_gib << 30
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        item = connection.recv()
        if math.isfinite(limits.seconds):
            # The soft limit ends the process with SIGXCPU; the hard one stays, so that the next item can raise it.
            soft = math.ceil(time.process_time() + limits.seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        connection.send(work(item))
