"""A saved storage lives as long as somebody holds it, and until its first holder comes."""

from __future__ import annotations

import weakref

import torch

from sacplan._executor.saved import SavedStorage, SavedStorages


class Holding:
    """A holder, as a handle of autograd is one."""

    def __init__(self, saved: SavedStorage) -> None:
        self.saved = saved
        saved.add(self)

    def let_go(self, version: int) -> bool:
        return True


def test_it_goes_with_its_last_holder_while_the_call_still_runs() -> None:
    call, tensor = SavedStorages(), torch.zeros(3)
    saved = weakref.ref(call.of(tensor))
    assert saved() is call.of(tensor.view(3, 1))  # nobody holds it yet, and it is there
    first, second = Holding(call.of(tensor)), Holding(call.of(tensor))
    call.of(tensor).let_go(0)
    del first
    assert saved() is not None
    del second
    assert saved() is None


def test_what_nobody_comes_to_hold_goes_with_the_call() -> None:
    call, tensor = SavedStorages(), torch.zeros(3)
    saved = weakref.ref(call.of(tensor))
    call.end()
    assert saved() is None
