"""Run ops of a recorded step again on fake tensors of other sizes, so that their costs are seen, not estimated.

The executor's own code runs under the package's recorder and the device's kernels. The ops and events that the recorder
sees are put into the program of the step. So memory, time and workspaces of slices are those of a step with the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sacplan.core.program import Op, Phase, Program, StorageKind
from sacplan.core.rewriting import Indices, PatchBuilder
from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec
from sacplan.device.kernels import fake_device
from sacplan.record.recorder import Recorder
from sacplan.torch_compat.fake_tensors import FakeTensorMode, fake_empty_strided

_WITHOUT_CALL: dict[str, Any] = {
    "recomputable": False, "state_bytes": 0, "replaces": -1, "inputs": (), "outputs": (), "arguments": "[[],{}]",
    "forward_of": -1, "recomputes": -1,
}  # fmt: skip
"""Fields of an op about its call and other ops of the rehearsal, with the values for an op that has neither."""


@dataclass(slots=True)
class RehearsedOps:
    """The ops and events of one part of a rehearsal.

    Attributes:
        ops: the ops, in order.
        events: the events; ``Event.OP`` refers to ops by their position in ``ops``.
        first: how many ops of the rehearsal had run before.
    """

    ops: list[Op]
    events: list[tuple[int, int]]
    first: int


class Rehearsal:
    """One run of some ops on fake tensors.

    Args:
        program: whose ops run.
        device: what it runs on.

    Attributes:
        known: by storage of the recorder, the storage of the program.
    """

    def __init__(self, program: Program, device: DeviceSpec) -> None:
        self.program = program
        self.known: dict[int, int] = {}
        self._recorder = Recorder(device, _costs(device).cost, "observe")
        self.device = device
        self._tensors: list[torch.Tensor] = []  # alive, so that nothing that is given is freed
        self._mode: FakeTensorMode | None = None  # while it runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter the device's kernels and the recorder; gradients are off."""
        with fake_device(self.device) as self._mode, self._recorder, torch.no_grad():
            yield
        self._recorder.forget()
        self._mode = None

    def given(self, tensor: int) -> torch.Tensor:
        """Return a fake tensor that stands for one of the program; it is alive before and after what runs."""
        like = self.program.tensors[tensor]
        assert self._mode is not None
        # No op of the step, so it is made where the recorder does not see it.
        stand_in = fake_empty_strided(self._mode, like.shape, like.stride, getattr(torch, like.dtype))
        self._recorder.storages.track(stand_in, StorageKind.OTHER, initial=True)
        self._tensors.append(stand_in)
        self.known[self._recorder.storages.known(stand_in)] = like.storage
        return stand_in

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors alive to the end: the address of one that is freed could be given to another tensor."""
        self._tensors.extend(tensors)

    def is_made(self, made: torch.Tensor, storage: int) -> int:
        """From now on let the storage of ``made`` stand for one of the program's; return its bytes."""
        index = self._recorder.storages.known(made)
        self.known[index] = storage
        return self._recorder.storages.nbytes[index]

    def stands_for(self, tensor: torch.Tensor) -> int:
        """Return the storage of the program that a tensor's storage stands for, or -1."""
        return self.known.get(self._recorder.storages.known(tensor), -1)

    @property
    def n_ops(self) -> int:
        """Number of ops that have run so far."""
        return self._recorder.seen()[0]

    def seen(self, run: Callable[[], Any]) -> tuple[Any, RehearsedOps]:
        """Call a function; return its result, and the ops and events that were seen meanwhile."""
        n_ops, n_events = self._recorder.seen()
        out = run()
        ops, events = self._recorder.seen_since(n_ops, n_events)
        return out, RehearsedOps(ops, events, n_ops)

    def into(
        self, draft: PatchBuilder, seen: RehearsedOps, phase: Phase, scope: int
    ) -> list[tuple[int, int]]:
        """Add ops that were seen, and their new storages, to a program, and return their events."""
        storage = draft.numbering(self.known, self._recorder.storages.nbytes)
        # A plan names call sites of the model, and these ops have none, so none of them may run again.
        ops = [msgspec.structs.replace(op, phase=phase, scope=scope, **_WITHOUT_CALL) for op in seen.ops]
        return draft.put(seen.events, ops, Indices(storage))


@functools.lru_cache(maxsize=4)
def _costs(device: DeviceSpec) -> CostModel:
    return CostModel(device)
