"""Predict what torch reports on a GPU: ``max_memory_allocated`` and ``max_memory_reserved``.

The peak of a program is the sum of its tensors (``liveness.py``). A GPU reports more, since its memory is handed out in
blocks: a block may be larger than its tensor (``max_memory_allocated``), and segments stay reserved when their blocks
are free (``max_memory_reserved``). So the program's allocations and frees are played through on the simulated allocator
(``caching_allocator.py``), in their order.

The play begins as a process does, since the order in which things come decides where holes are:

1. The model: parameters and buffers.
2. The first step. The optimizer's state comes when its ``step`` begins, into blocks that the backward pass has freed.
3. More steps, until one reserves nothing more. When a step begins, the next batch is there before the old one goes,
   and then the gradients go (``zero_grad``). The loss, and whatever else the step before has left, stays in a variable
   of the loop until the forward pass has returned.

A step that adds to gradients of earlier micro-batches is played as two micro-steps, the first of which makes the
gradients.

The workspaces that cuBLAS keeps stay from step to step. Buffers that ``fully_shard`` allocates on streams of their own
have pools of their own, as in torch.

Not simulated: the CUDA context, NCCL's buffers and libraries that allocate for themselves, which are outside of the
allocator (``outside_allocator.py``); ``record_stream``, which delays frees.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from sacplan.core.derived import derived
from sacplan.core.elements import Event, Phase, StorageKind
from sacplan.core.files import Count
from sacplan.core.liveness import Fold
from sacplan.core.program import Program
from sacplan.device.caching_allocator import (
    Block,
    CachingAllocator,
    ExpandableAllocator,
    OutOfDeviceMemory,
)

ZeroGrad = Literal["step", "backward"]

_STEPS = 8
"""Steps after the first, at most. Two are usually enough, but some programs reserve one more segment in each."""

_STREAMS = {"fsdp.all_gather_copy_in.default": 1, "c10d._reduce_scatter_base_.default": 2}
"""Ops that allocate on a stream of their own: ``foreach_all_gather`` and ``foreach_reduce`` in torch's
``_fsdp_collectives.py``."""

_STAYS = (
    StorageKind.PARAMETER,
    StorageKind.BUFFER,
    StorageKind.OPTIMIZER_STATE,
    StorageKind.GRADIENT,  # alive before the step: buckets of DDP
)


_OP = int(Event.OP)  # a plain integer, since a play asks at every event


class AllocatorPeaks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peaks that torch's allocator reports, in bytes.

    Attributes:
        max_memory_allocated: ``torch.cuda.max_memory_allocated()``: blocks in use.
        max_memory_reserved: ``torch.cuda.max_memory_reserved()``: segments.
    """

    max_memory_allocated: Count
    max_memory_reserved: Count


class DeviceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peaks of a training run as torch's allocator on a GPU would report them.

    Attributes:
        steps: of all steps until nothing changes any more, with the allocator's default settings.
        first_step: of the first step alone, in which the optimizer's state does not exist before its ``step``.
        expandable_steps, expandable_first_step: the same with
            ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    steps: AllocatorPeaks
    first_step: AllocatorPeaks
    expandable_steps: AllocatorPeaks
    expandable_first_step: AllocatorPeaks

    def reserved_bytes(self, *, expandable: bool | None = None) -> int:
        """Return ``max_memory_reserved`` of the whole run. It decides whether the run fits the device.

        Args:
            expandable: With expandable segments or without; None: as this process is set up, see
                ``expandable_segments``.
        """
        peaks = (
            (self.expandable_first_step, self.expandable_steps)
            if (expandable_segments() if expandable is None else expandable)
            else (self.first_step, self.steps)
        )
        return max(peak.max_memory_reserved for peak in peaks)


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the allocator of a process with this environment has expandable segments.

    As in torch (``c10/cuda/CUDAAllocatorConfig.h``), the first of these variables that is set is the one that counts.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = next((environment[name] for name in names if name in environment), "")
    return "expandable_segments:True" in settings.replace(" ", "").split(",")


@derived
def device_memory(program: Program) -> DeviceMemory:
    """Play a program on the allocator of a GPU, with its default settings and with expandable segments.

    Args:
        program: the step, with a plan or without. Sizes are those of a CUDA device.
    """
    first_step, steps = _played(program, expandable=False)
    expandable_first_step, expandable_steps = _played(program, expandable=True)
    return DeviceMemory(steps, first_step, expandable_steps, expandable_first_step)


def reserved_bytes(program: Program, *, expandable: bool | None = None) -> int:
    """Return ``DeviceMemory.reserved_bytes`` of a program, of which only the setting asked for is played."""
    peaks = _played(program, expandable=expandable_segments() if expandable is None else expandable)
    return max(peak.max_memory_reserved for peak in peaks)


WITH_RETRIES = "It still runs, with allocation retries: torch gives cached memory back, which takes time."
"""What ``retries_within`` means to a user."""


def retries_within(program: Program, n_bytes: int) -> int | None:
    """Return how often torch gives cached segments back in a run that may reserve ``n_bytes``; None if it needs more.

    Each time costs a synchronization and new segments. The run is that of ``peaks_on``. None with expandable segments,
    too: what torch gives back of those is not simulated.
    """
    if expandable_segments():
        return None
    allocator = CachingAllocator(n_bytes)
    try:
        peaks_on(allocator, program)
    except OutOfDeviceMemory:
        return None
    return allocator.retries


def beyond_peak_bytes(program: Program) -> int:
    """Return what the allocator reserves beyond the peak of a program: holes, and what rounding adds."""
    return reserved_bytes(program) - program.footprint.peak_bytes


@derived
def _played(program: Program, *, expandable: bool) -> tuple[AllocatorPeaks, AllocatorPeaks]:
    return peaks_on(ExpandableAllocator() if expandable else CachingAllocator(), program)


def peaks_on(
    allocator: CachingAllocator, program: Program, *, zero_grad: ZeroGrad = "step"
) -> tuple[AllocatorPeaks, AllocatorPeaks]:
    """Train on an empty allocator; return the peaks of the first step, and of all steps until nothing changes.

    ``zero_grad`` says when the loop drops the gradients: between two steps, or right before the next backward pass.
    """
    changes = changes_of(program)
    run = TrainingRun(allocator, zero_grad)
    first = run.step(changes)
    # Once a step reserves nothing more, there is a block for all that the next one asks for.
    allocated, reserved = first.max_memory_allocated, -1
    for _ in range(_STEPS):
        if allocator.reserved_bytes == reserved:
            break
        reserved = allocator.reserved_bytes
        # Torch reports the maximum of all steps. The blocks of two steps differ as long as holes move about.
        allocated = max(allocated, run.step(changes).max_memory_allocated)
    return first, AllocatorPeaks(allocated, allocator.reserved_bytes)


@dataclass(frozen=True, slots=True)
class Changes:
    """The allocations and frees of a process. A block is an index into ``sizes``.

    Attributes:
        sizes: bytes of each block.
        streams: stream of the blocks that are not on the main one.
        model: blocks that are there before the first step.
        given: blocks that each step is given, such as the batch.
        state: blocks that come when the optimizer's ``step`` begins for the first time.
        forward, backward, optimizer: changes of a step until its backward pass begins, until the optimizer's ``step``
            begins, and from then on. A change is a block that is allocated, or ``~block`` for one that is freed.
        gradients, leftover: gradients, and other blocks, that nothing has freed when the step is over.
        renewed: by block that is alive when a step is over, the block that it becomes when the next step begins.
        staying: blocks that come in a step and stay, in order.
        added: with accumulation, by block of a gradient that is added to an earlier one, the block of the latter. The
            first micro-step has no earlier gradient, so the block itself becomes the gradient.
    """

    sizes: list[int]
    streams: dict[int, int]
    model: list[int]
    given: list[int]
    state: list[int]
    forward: list[int]
    backward: list[int]
    optimizer: list[int]
    gradients: list[int]
    leftover: list[int]
    renewed: dict[int, int]
    staying: dict[int, None]
    added: dict[int, int]


_NOTHING = Changes([], {}, [], [], [], [], [], [], [], [], {}, {}, {})
"""What a process has done before its first step."""


@derived
def changes_of(program: Program) -> Changes:
    """Read a program's changes off its events, by the one rule of ``liveness.py``."""
    reader = BlockReader(program)
    for code, arg in program.events:
        reader.step(code, arg)
    kinds, initial = program.storage_kinds, [s for s in program.initial if program.device_bytes[s]]
    # A step without an optimizer, or without a backward pass, has none of these moments: what follows is then empty.
    end = len(reader.changes)
    optimizer_at = reader.begins.get(Phase.OPTIMIZER, end)
    backward_at = min(reader.begins.get(Phase.BACKWARD, end), optimizer_at)
    elsewhere = reader.workspaces.union(initial)
    # What the step has made and not freed.
    left = {s: block for s, block in reader.block_of.items() if block not in elsewhere}
    # A tensor from before the step may be freed in it and replaced by a new one, as some of Adafactor's state is. The
    # next step then begins with the new one. A tensor without a replacement is given to each step, as the batch is.
    changed = {~change for change in reader.changes if change < 0}
    renewed: dict[int, int] = {}
    given = [s for s in initial if kinds[s] not in _STAYS]
    for old in (s for s in initial if s in changed and kinds[s] in _STAYS):
        like = (s for s in left if kinds[s] == kinds[old] and reader.sizes[s] == reader.sizes[old])
        new = next(like, None)
        if new is None:
            given.append(old)
        else:
            renewed[left.pop(new)] = old
    stays = [s for s in initial if s not in given]
    added = _added(program, changed)
    accumulated = frozenset(added.values())
    return Changes(
        sizes=reader.sizes,
        streams=reader.streams,
        model=[s for s in stays if s not in accumulated and kinds[s] != StorageKind.OPTIMIZER_STATE],
        given=given,
        state=[s for s in stays if kinds[s] == StorageKind.OPTIMIZER_STATE],
        forward=reader.changes[:backward_at],
        backward=reader.changes[backward_at:optimizer_at],
        optimizer=reader.changes[optimizer_at:],
        gradients=[*(left[s] for s in left if kinds[s] == StorageKind.GRADIENT), *accumulated],
        leftover=[block for s, block in left.items() if kinds[s] != StorageKind.GRADIENT],
        renewed=renewed,
        staying=dict.fromkeys(sorted(reader.workspaces)),
        added=added,
    )


def _added(program: Program, freed: Collection[int]) -> dict[int, int]:
    """Return, by storage of a gradient that the backward pass adds to an earlier one, the storage of the latter.

    Gradients of a rank of FSDP2 are not among them: shards stay as they are from step to step.
    """
    kinds, sizes, earlier = program.storage_kinds, program.storage_bytes, frozenset(program.initial)
    added: dict[int, int] = {}
    for op in program.ops:
        # A sum in place writes one tensor, a gradient from before the step. It reads another of the same size, which is
        # new and not needed any more.
        if op.phase != Phase.BACKWARD or len(op.mutates) != 1:
            continue
        (total,) = op.mutates
        if total not in earlier or kinds[total] != StorageKind.GRADIENT or total in added.values():
            continue
        new = (s for s in op.reads if s not in earlier and s in freed and sizes[s] == sizes[total])
        added.update((s, total) for s in itertools.islice(new, 1))
    return added


class BlockReader(Fold):
    """A fold that turns the events of a program into allocations and frees.

    Attributes:
        sizes: bytes by block. Those of the program's storages come first, under their own indices.
        streams: stream of the blocks that are not on the main one.
        changes: blocks as they are allocated, ``~block`` as they are freed.
        block_of: by storage that is alive, its block.
        storage_of: by block, the storage that it was allocated for; none for the workspace of an op.
        begins: by phase, how many changes there were when it began.
        workspaces: blocks that a library keeps for good.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = list(program.device_bytes)
        self.streams = dict(program.streams)
        self.changes: list[int] = []
        self.block_of = {s: s for s in program.initial if program.device_bytes[s]}
        self.storage_of = {block: s for s, block in self.block_of.items()}
        self.begins: dict[Phase, int] = {}
        # Only a library's workspace is allocated without a tensor on it.
        seen = {tensor.storage for tensor in program.tensors}
        self.workspaces = {arg for code, arg in program.events if code == Event.ALLOC and arg not in seen}
        self._overwritten = -1  # the storage whose block the op before took over; -1: none
        self._moved: set[int] = set()  # storages whose own block is another version's, or of another size
        self._resized: dict[int, int] = {}  # by resized storage, its bytes now
        super().__init__(program)  # it calls ``hold`` for what is alive at first

    def step(self, code: int, arg: int) -> None:
        """Go on by one event."""
        if code != _OP:
            super().step(code, arg)
            return
        op = self.program.ops[arg]
        self.begins.setdefault(op.phase, len(self.changes))
        # The old version gave its block to the new one, but is still held: it needs another.
        if self._overwritten >= 0 and self.holders[self._overwritten]:
            self._allocate(self._overwritten)
        self._overwritten = -1
        # An op that writes in place makes a new version of a storage, in the block of the old one.
        if op.replaces in self.block_of and self.sizes[op.writes[0]] == self.sizes[op.replaces]:
            self.block_of[op.writes[0]] = self.block_of.pop(op.replaces)
            self._overwritten = op.replaces
            self._moved.add(op.replaces)
        inside = (self._more(op.workspace_bytes),) if op.workspace_bytes else ()
        if op.name in _STREAMS:
            self.streams.update(dict.fromkeys((*op.writes, *inside), _STREAMS[op.name]))
        super().step(code, arg)
        for block in inside:
            self.changes += (block, ~block)

    def hold(self, storage: int) -> None:
        """Count one more holder; the first one allocates a block."""
        super().hold(storage)
        if self.holders[storage] == 1 and storage not in self.block_of:
            self._allocate(storage)

    def release(self, storage: int) -> None:
        """Count one holder less; the last one frees the block."""
        super().release(storage)
        if not self.holders[storage] and storage in self.block_of:
            self.changes.append(~self.block_of.pop(storage))

    def _allocate(self, storage: int) -> None:
        n_bytes = self._resized.get(storage, self.sizes[storage])
        if n_bytes:  # the allocator gives no block for 0 bytes
            block = self._more(n_bytes) if storage in self._moved else storage
            self.block_of[storage], self.storage_of[block] = block, storage
            self.changes.append(block)

    def _resize(self, storage: int, before: int, after: int) -> None:
        if storage in self.program.on_host:
            return
        old = self.block_of.pop(storage, None)
        self._resized[storage] = after
        self._moved.add(storage)
        if self.holders[storage]:
            self._allocate(storage)  # before the old block goes: the contents are copied
        if old is not None:
            self.changes.append(~old)

    def _more(self, n_bytes: int) -> int:
        """Return a new block of ``n_bytes``, beyond those of the storages."""
        self.sizes.append(n_bytes)
        return len(self.sizes) - 1


class TrainingRun:
    """A process that trains: its allocator, and the blocks that it holds.

    Its steps may be of several programs of one model and optimizer: with other sizes of batches, or other plans.

    Attributes:
        between_bytes: the most that was allocated when the last step began, of training or of an evaluation: the next
            batch is there before the last batch and the gradients go. This is not part of the peak of a step.
    """

    def __init__(self, allocator: CachingAllocator, zero_grad: ZeroGrad = "step") -> None:
        self.changes = _NOTHING  # of the last step
        self.allocator = allocator
        self.zero_grad = zero_grad
        self.blocks: dict[int, Block] = {}
        self.between_bytes = 0
        self._has_state = False
        self._evaluation: TrainingRun | None = None

    def step(self, changes: Changes) -> AllocatorPeaks:
        """Run one step, and return its peaks; with accumulation, those of the second of two micro-steps."""
        if changes.added:
            self.micro_step(changes, updates=False)
        return self.micro_step(changes, adds=bool(changes.added))

    def evaluate(self, changes: Changes) -> AllocatorPeaks:
        """Run a step without gradients, and return its peaks. All that training holds stays there.

        Its batch and outputs stay until those of the next evaluation are there, or training goes on.
        """
        if self._evaluation is None:
            self._evaluation = inner = TrainingRun(self.allocator)
            # Not ``_NOTHING`` itself, so that the model is not allocated again, nor are the libraries' workspaces.
            inner.changes = dataclasses.replace(_NOTHING, staying=self.changes.staying)
            inner.blocks = {
                index: self.blocks[index] for index in self.changes.staying if index in self.blocks
            }
        peaks = self._evaluation.micro_step(changes, updates=False)
        self.between_bytes = self._evaluation.between_bytes
        return peaks

    def micro_step(self, changes: Changes, *, adds: bool = False, updates: bool = True) -> AllocatorPeaks:
        """Run forward and backward pass, and return their peaks.

        Args:
            changes: Those of a step. With accumulation, of one that adds to gradients and updates.
            adds: Whether it adds to the gradients of the micro-step before; else it drops them.
            updates: Whether the optimizer steps.
        """
        # Training goes on: the blocks of an evaluation go, except those that it shares.
        if self._evaluation is not None:
            ours = set(self.blocks.values())
            self._free(block for block in self._evaluation.blocks.values() if block not in ours)
            self._evaluation = None
        last, allocator, blocks = self.changes, self.allocator, self.blocks
        self.changes = changes
        if last is _NOTHING:
            self._change(changes.model)
        kept = frozenset(changes.added.values() if adds else ())
        # Popped, since this step makes blocks of the same indices. Some are gone: a step may free its own batch.
        given, gradients, leftover = (
            [blocks.pop(index) for index in indices if index in blocks and index not in kept]
            for indices in (last.given, last.gradients, last.leftover)
        )
        for new, old in last.renewed.items():
            if new in blocks:  # it is not if the optimizer did not step
                blocks[old] = blocks.pop(new)
        # Between programs, workspaces differ in index, since what a plan adds comes first, but not in order.
        held = [blocks.pop(index) for index in last.staying if index in blocks]
        blocks.update(zip(changes.staying, held, strict=False))
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        self._change(changes.given)
        self._free(given)
        if self.zero_grad == "step":
            self._free(gradients)
        self.between_bytes = allocator.peak_allocated_bytes
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        self._change(changes.forward)
        self._free(leftover)
        if self.zero_grad == "backward":
            self._free(gradients)
        self._change(changes.backward, {} if adds else changes.added)
        if updates:
            if not self._has_state:
                self._change(changes.state)
                self._has_state = True
            self._change(changes.optimizer)
        else:  # no update, but what the passes have made is freed, such as the loss
            stays = changes.renewed.values()
            self._change([i for i in changes.optimizer if i < 0 and ~i in blocks and ~i not in stays])
        return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.reserved_bytes)

    def _free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.allocator.free(block)

    def _change(self, indices: Iterable[int], becomes: Mapping[int, int] = MappingProxyType({})) -> None:
        """Allocate and free blocks; those in ``becomes`` are not freed, but go on under the index given there."""
        changes, blocks = self.changes, self.blocks
        sizes, streams, staying = changes.sizes, changes.streams, changes.staying
        allocate, free = self.allocator.allocate, self.allocator.free
        for index in indices:
            if ~index in becomes:
                blocks[becomes[~index]] = blocks.pop(~index)
            elif index < 0:
                free(blocks.pop(~index))
            elif index not in staying or index not in blocks:
                blocks[index] = allocate(sizes[index], streams.get(index, 0))
