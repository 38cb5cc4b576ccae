"""Ops of a recorded step run again on fake tensors, so that what they take in other sizes is seen, not estimated.

The executor's own code runs under the package's recorder and the device's kernels. What is seen is put into the program
of the step: memory, time and workspaces of slices are those that a step with the plan has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._device.cost import CostModel
from sacplan._device.devices import DeviceSpec
from sacplan._device.kernels import fake_device
from sacplan._program.program import Event, Op, Phase, Program, Tensor
from sacplan._program.rewriting import Indices, PatchBuilder
from sacplan._record.device_recorder import device_recorder
from sacplan._torch.calls import flat_tensors


@dataclass(slots=True)
class RehearsedOps:
    """What ran for something.

    Attributes:
        ops: those, in order.
        events: in which ``Event.OP`` refers to them by position.
        first: how many ops had run before.
    """

    ops: list[Op]
    events: list[tuple[int, int]]
    first: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What ran for something, in indices of its rehearsal: it may be put into a program several times.

    Attributes:
        ops: those, in order.
        events: in which ``Event.OP`` refers to them by position.
        given: storages of what was given, in order.
        made: the tensors that were returned.
        sizes: by storage, its bytes.
        tensors: by index, those that the ops take and return.
    """

    ops: Sequence[Op]
    events: Sequence[tuple[int, int]]
    given: tuple[int, ...]
    made: tuple[Tensor, ...]
    sizes: Mapping[int, int]
    tensors: Mapping[int, Tensor]


class Rehearsal:
    """One run on fake tensors.

    Args:
        program: whose ops run.
        device: what it runs on.

    Attributes:
        device: see above.
        known: by storage of the recorder, the storage of the program.
    """

    def __init__(self, program: Program, device: DeviceSpec) -> None:
        self.program = program
        self.known: dict[int, int] = {}
        self._recorder = device_recorder(device, _costs(device).cost, "observe")
        self.device = device
        self._tensors: list[torch.Tensor] = []  # alive, so that nothing that is given is freed

    @contextmanager
    def running(self) -> Iterator[None]:
        """The device's kernels, and the recorder; gradients are off."""
        with fake_device(self.device), self._recorder, torch.no_grad():
            yield
        self._recorder.forget()

    def given(self, tensor: int) -> torch.Tensor:
        """A fake tensor like one of the program's, which is alive before and after."""
        like = self.program.tensors[tensor]
        with self._recorder.paused():
            made = torch.empty_strided(like.shape, like.stride, dtype=getattr(torch, like.dtype))
        self.known[self._recorder.track_given(made)] = like.storage
        self._tensors.append(made)
        return made

    def like(self, tensor: Tensor) -> torch.Tensor:
        """A fake tensor of this shape on a storage of its own, which is alive before and after."""
        with self._recorder.paused():
            made = torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype))
        self._recorder.track_given(made)
        self._tensors.append(made)
        return made

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """What was made stays alive to the end: no other tensor can be taken for it."""
        self._tensors.extend(tensors)

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The recorder's storage of a tensor."""
        return self._recorder.storage_of(tensor)

    def is_made(self, made: torch.Tensor, storage: int) -> int:
        """From here on a storage that was made stands for one of the program's; its bytes."""
        index = self._recorder.storage_of(made)
        self.known[index] = storage
        return self._recorder.storage_sizes[index]

    def stands_for(self, tensor: torch.Tensor) -> int:
        """The program's storage that a tensor's stands for, or -1."""
        return self.known.get(self._recorder.storage_of(tensor), -1)

    @property
    def n_ops(self) -> int:
        """How many ops ran so far."""
        return self._recorder.seen()[0]

    def seen(self, run: Callable[[], Any]) -> tuple[Any, RehearsedOps]:
        """What a function returns, and what ran for it."""
        n_ops, n_events = self._recorder.seen()
        out = run()
        ops, events = self._recorder.seen_since(n_ops, n_events)
        return out, RehearsedOps(ops, events, n_ops)

    def piece(self, given: Sequence[torch.Tensor], run: Callable[[], Any]) -> Piece:
        """What runs for a function that reads some tensors. What it returns stays alive."""
        out, seen = self.seen(run)
        made = []
        for t in flat_tensors(out):
            dtype = str(t.dtype).removeprefix("torch.")
            storage = self.storage_of(t)
            made.append(Tensor(storage, dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset()))
        self.keep(flat_tensors(out))
        used = {i for op in seen.ops for i in (*op.inputs, *op.outputs) if i >= 0}
        tensors = dict(zip(used, self._recorder.tensors(used), strict=True))
        storages = {t.storage for t in (*made, *tensors.values())}
        storages.update(s for op in seen.ops for s in (*op.reads, *op.writes, *op.mutates))
        storages.update(arg for code, arg in seen.events if code != Event.OP)
        sizes = self._recorder.storage_sizes
        return Piece(
            ops=tuple(seen.ops),
            events=tuple(seen.events),
            given=tuple(map(self.storage_of, given)),
            made=tuple(made),
            sizes={s: sizes[s] for s in storages},
            tensors=tensors,
        )

    def into(
        self, draft: PatchBuilder, seen: RehearsedOps, phase: Phase, scope: int
    ) -> list[tuple[int, int]]:
        """What was seen as events of the program; ops and storages that are new are added."""
        storage = draft.numbering(self.known, self._recorder.storage_sizes)
        ops = [
            Op(
                op.name,
                phase,
                scope,
                op.time_ms,
                op.flops,
                op.workspace_bytes,
                op.reads,
                op.writes,
                op.mutates,
                False,
            )
            for op in seen.ops
        ]
        return draft.put(seen.events, ops, Indices(storage))


@functools.lru_cache(maxsize=4)
def _costs(device: DeviceSpec) -> CostModel:
    return CostModel(device)
