"""Run ops of a recorded step again on fake tensors of other sizes, so that their costs are seen, not estimated.

The executor's own code runs under the package's recorder and the device's kernels. The ops and events that the recorder
sees are put into the program of the step. So memory, time and workspaces of slices are those of a step with the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sacplan.core.program import Event, Op, Phase, Program, Tensor
from sacplan.core.rewriting import Indices, PatchBuilder
from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec
from sacplan.device.kernels import fake_device
from sacplan.record.device_recorder import device_recorder
from sacplan.torch_compat.fake_tensors import FakeTensorMode, fake_empty_strided
from sacplan.torch_compat.ops import tensors_in


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


@dataclass(frozen=True, slots=True)
class Piece:
    """The ops and events of a function, to be put into a program any number of times.

    Storages and tensors are those of the rehearsal.

    Attributes:
        ops: the ops, in order.
        events: the events; ``Event.OP`` refers to ops by their position in ``ops``.
        given: storages of the tensors that the function was given, in order.
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
    """One run of some ops on fake tensors.

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
        made = self.like(like)
        self.known[self.storage_of(made)] = like.storage
        return made

    def like(self, tensor: Tensor) -> torch.Tensor:
        """Return a fake tensor of this layout on a storage of its own, alive before and after what runs."""
        assert self._mode is not None
        # No op of the step, so it is made where the recorder does not see it.
        made = fake_empty_strided(self._mode, tensor.shape, tensor.stride, getattr(torch, tensor.dtype))
        self._recorder.storages.track_given(made)
        self._tensors.append(made)
        return made

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors alive to the end: the address of one that is freed could be given to another tensor."""
        self._tensors.extend(tensors)

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the recorder's storage of a tensor."""
        return self._recorder.storages.known(tensor)

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

    def piece(self, given: Sequence[torch.Tensor], run: Callable[[], Any]) -> Piece:
        """Call a function that reads some tensors, and return what ran. Its results stay alive."""
        # Results stay alive: freed, their ``FREE`` would be among the events of the next piece. All storages that the
        # ops, events and results refer to get their sizes, so that the piece needs the recorder no more.
        out, seen = self.seen(run)
        made = []
        for t in tensors_in(out):
            dtype = str(t.dtype).removeprefix("torch.")
            storage = self.storage_of(t)
            made.append(Tensor(storage, dtype, tuple(t.shape), tuple(t.stride()), int(t.storage_offset())))
        self.keep(tensors_in(out))
        used = {i for op in seen.ops for i in (*op.inputs, *op.outputs) if i >= 0}
        tensors = dict(zip(used, self._recorder.tensors.values(used), strict=True))
        storages = {t.storage for t in (*made, *tensors.values())}
        storages.update(s for op in seen.ops for s in (*op.reads, *op.writes, *op.mutates))
        storages.update(arg for code, arg in seen.events if code != Event.OP)
        sizes = self._recorder.storages.nbytes
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
        """Put ops that were seen into a program, and return their events; new storages are added to it."""
        storage = draft.numbering(self.known, self._recorder.storages.nbytes)
        # A plan names call sites of the model, and these ops have none, so none of them may run again.
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
                runs=op.runs,
            )
            for op in seen.ops
        ]
        return draft.put(seen.events, ops, Indices(storage))


@functools.lru_cache(maxsize=4)
def _costs(device: DeviceSpec) -> CostModel:
    return CostModel(device)
