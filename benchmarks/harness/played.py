"""A recorded step, played on the CUDA caching allocator from the start of a training run.

``allocator_figures`` is the entry point. A run allocates in another order than one recorded step suggests, and that
order decides which blocks are reused:

1. The model comes first, parameters and then buffers.
2. The first step begins without the optimizer's state. It is made in the first optimizer step, into blocks that the
   backward pass has freed.
3. The batch of a step is made while the one before is still there.
4. Workspaces of cuBLAS stay. From the second step on, the one of the backward thread is there during the forward pass.
5. What the training loop holds (gradients, the loss, outputs) lives on until the loop drops it, see ``Loop``.

Steps run until one changes neither figure. ``max_memory_allocated`` counts whole blocks, so what the allocator does not
split off a block is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sacplan
from sacplan._device.caching_allocator import MIB, MIN_BLOCK_BYTES, SMALL_BYTES, Block, CachingAllocator
from sacplan._program.program import Event, Op, Phase, Program, StorageKind

MOST_STEPS = 4

_LASTING = (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.OPTIMIZER_STATE)
_COMPUTE, _ALL_GATHER, _REDUCE_SCATTER = "compute", "all-gather", "reduce-scatter"


def _nothing(program: Program) -> Iterable[int]:
    return ()


def _none_kept(program: Program) -> Mapping[int, int]:
    return {}


def _no_workspace(program: Program, op: Op) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Loop:
    """What a training loop holds between steps, and what the libraries of its time allocate.

    Attributes:
        gradients: when the loop drops them: ``"step"`` after the optimizer's step; ``"backward"`` only right before the
            next backward pass, so that they are there during the forward pass; ``"never"``: they are set to zero, as
            ``zero_grad()`` did before torch 2.0, and each new gradient is added to the old one and freed.
        held: of a program, the storages that a variable of the loop holds until the next forward pass has returned,
            such as the loss.
        workspace: bytes that an op takes besides, while it runs.
        until: of a program, storages that something holds beyond their last use, and the op before which it drops each.
    """

    gradients: Literal["step", "backward", "never"] = "step"
    held: Callable[[Program], Iterable[int]] = _nothing
    workspace: Callable[[Program, Op], int] = _no_workspace
    until: Callable[[Program], Mapping[int, int]] = _none_kept


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a run up to the end of a step, in bytes.

    Attributes:
        tensors: the peak of the sum of tensors, each rounded to 512 bytes.
        allocated: ``torch.cuda.max_memory_allocated()``.
        reserved: ``torch.cuda.max_memory_reserved()``.
        reserved_expandable: the same with ``expandable_segments:True``.
        end: ``torch.cuda.memory_allocated()`` when the step is over, with the gradients and the batch.
    """

    tensors: int
    allocated: int
    reserved: int
    reserved_expandable: int
    end: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures after the first step, and after as many as it takes until they no longer change."""

    first: StepFigures
    steady: StepFigures


def allocator_figures(profile: sacplan.Profile, plan: Any = None, loop: Loop | None = None) -> RunFigures:
    """Play a profile's step, with a plan or without, from the start of a run."""
    program = profile.program if plan is None else profile.with_plan(plan)
    default = _Run(program, CachingAllocator, loop or Loop()).play()
    expandable = _Run(program, ExpandableAllocator, loop or Loop()).play()

    def figures(i: int) -> StepFigures:
        tensors, allocated, reserved, end = default[i]
        return StepFigures(tensors, allocated, reserved, expandable[i][2], end)

    return RunFigures(figures(0), figures(-1))


class ExpandableAllocator(CachingAllocator):
    """The allocator with ``expandable_segments:True``: a pool is one segment that grows by pages.

    What differs from the default (``CUDACachingAllocator.cpp``): pages of 2 MiB (small) and 20 MiB (large) are mapped
    behind the segment's last block, which they merge with if it is free (``map_block``); every remainder of 512 bytes
    or more is split off (``should_split``); and the last block, which can grow, counts as the largest in the search
    for the best fit (``get_free_block``).
    """

    _LARGE_AT = 0
    _SMALL_AT = 1 << 50

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[bool, Block | None] = {True: None, False: None}

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``."""
        nbytes = max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        small = nbytes <= SMALL_BYTES
        block = self._best_fit(nbytes, small)
        if block is not None and block is self._last[small]:
            # Any other free block that is large enough comes first. One call finds it: the last block is taken already.
            other = self._best_fit(nbytes, small)
            if other is not None:
                self._remember(block)
                block = other
        block = block or self._grown(nbytes, small)
        if block.nbytes - nbytes >= MIN_BLOCK_BYTES:
            self._split(block, nbytes)
            if self._last[small] is block:
                self._last[small] = block.after
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it merges with free neighbours."""
        before = block.before if block.before is not None and block.before.free else None
        super().free(block)
        merged = before or block
        if merged.after is None:
            self._last[block.small] = merged

    def _grown(self, nbytes: int, small: bool) -> Block:
        """Map as many pages as a request needs behind the last block, and return it."""
        page = (2 if small else 20) * MIB
        last = self._last[small]
        if last is not None and last.free:
            self._forget(last)
            last.free = False
            missing, block = nbytes - last.nbytes, last
        else:
            start = self._SMALL_AT if small else self._LARGE_AT
            address = start if last is None else last.address + last.nbytes
            missing, block = nbytes, Block(address, 0, small)
            block.before = last
            if last is not None:
                last.after = block
        mapped = -(-missing // page) * page
        block.nbytes += mapped
        self.reserved_bytes += mapped
        self._last[small] = block
        return block


@dataclass(slots=True)
class _Card:
    """The allocator's pools, one for each stream: blocks of one stream do not serve another."""

    make: Callable[[], CachingAllocator]
    pools: dict[str, CachingAllocator] = field(default_factory=dict)
    allocated: int = 0
    peak_allocated: int = 0

    def take(self, nbytes: int, stream: str) -> Block:
        if stream not in self.pools:
            self.pools[stream] = self.make()
        block = self.pools[stream].allocate(nbytes)
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: Block, stream: str) -> None:
        self.allocated -= block.nbytes
        self.pools[stream].free(block)

    @property
    def reserved(self) -> int:
        return sum(pool.reserved_bytes for pool in self.pools.values())


class _Run:
    """Steps of one program, one after the other, on one card."""

    def __init__(self, program: Program, make: Callable[[], CachingAllocator], loop: Loop) -> None:
        self._program, self._loop = program, loop
        self._card = _Card(make)
        self._blocks: dict[int, Block] = {}
        self._holders = [0] * len(program.storage_bytes)
        self._streams = _streams(program)
        self._tensor_bytes = self._peak_tensor_bytes = 0
        initial = program.initial
        kinds = program.storage_kinds
        on_cpu = _counters_on_cpu(program)
        self._model = [s for s in initial if kinds[s] in (StorageKind.PARAMETER, StorageKind.BUFFER)]
        self._state = [s for s in initial if kinds[s] == StorageKind.OPTIMIZER_STATE and s not in on_cpu]
        self._batch = [s for s in initial if kinds[s] not in _LASTING]
        self._workspaces = _lasting_workspaces(program)
        self._gradients = {program.tensors[t].storage for t in program.gradients.values()}
        self._held_by_loop = frozenset(loop.held(program))
        self._until = loop.until(program)
        self._dropped_at: dict[int, list[int]] = defaultdict(list)
        for s, op in self._until.items():
            self._dropped_at[op].append(s)
        self._kept: set[int] = set()
        # Blocks of the step before, each with its stream and size: batch, gradients, and what the loop holds.
        self._old_batch: list[tuple[Block, str, int]] = []
        self._old_gradients: list[tuple[Block, str, int]] = []
        self._new_gradients: list[int] = []  # to be added to old ones, with ``gradients="never"``
        self._old_values: list[tuple[Block, str, int]] = []
        self._has_state = False

    def play(self) -> list[tuple[int, int, int, int]]:
        """Return after each step the peaks of tensors and of blocks, what is reserved, and what is allocated then."""
        for s in self._model:
            self._hold(s)
        found: list[tuple[int, int, int, int]] = []
        while len(found) < MOST_STEPS and (len(found) < 2 or found[-1] != found[-2]):
            end = self._step()
            found.append((self._peak_tensor_bytes, self._card.peak_allocated, self._card.reserved, end))
        return found

    def _step(self) -> int:
        """Play a step; return what is allocated at its end."""
        program = self._program
        self._kept = set(self._until)
        for s in self._batch:
            self._hold(s)
        self._drop(self._old_batch)
        phase = Phase.FORWARD
        for code, arg in program.events:
            if code == Event.OP:
                op = program.ops[arg]
                if op.phase != phase:
                    phase = op.phase
                    self._enter(phase)
                for s in self._dropped_at.get(arg, ()):
                    self._unkeep(s)
                self._run_op(op)
            elif code == Event.ALLOC:
                self._hold(arg)
            elif code == Event.FREE:
                self._release(arg)
            elif code == Event.PACK:
                self._hold(program.handle_storages[arg])
            elif code == Event.RELEASE:
                self._release(program.handle_storages[arg])
            elif code == Event.UNPACK:
                self._hold(program.handle_storages[program.instance_handles[arg]])
            elif code == Event.DROP:
                self._release(program.handle_storages[program.instance_handles[arg]])
        end = self._card.allocated
        self._end()
        return end

    def _enter(self, phase: Phase) -> None:
        if phase == Phase.BACKWARD:
            # The model has returned, so that variables have new values, and zero_grad was called.
            self._drop(self._old_values)
            if self._loop.gradients == "backward":
                self._drop(self._old_gradients)
        elif phase == Phase.OPTIMIZER and not self._has_state:
            self._has_state = True
            for s in self._state:
                self._hold(s)

    def _run_op(self, op: Op) -> None:
        writes = op.writes
        if writes and self._new_gradients:  # added to the old ones, before anything else is allocated
            for s in self._new_gradients:
                self._free(s)
            self._new_gradients.clear()
        if op.replaces >= 0 and op.replaces in self._blocks and writes:
            # An op in place: its first output is in the block of the version that it overwrites.
            self._blocks[writes[0]] = self._blocks.pop(op.replaces)
            self._holders[writes[0]] += 1
            writes = writes[1:]
        for s in writes:
            self._hold(s)
        stream = self._streams.get(op.writes[0], _COMPUTE) if op.writes else _COMPUTE
        inside = [n for n in (op.workspace_bytes, self._loop.workspace(self._program, op)) if n]
        taken = [self._take(nbytes, stream) for nbytes in inside]
        for each in taken:
            self._give(each)
        if self._old_gradients and self._loop.gradients == "never":
            self._new_gradients += [s for s in op.writes if s in self._gradients]

    def _end(self) -> None:
        """Drop what the step has left, except for what lasts."""
        lasting = {*self._model, *self._state, *self._workspaces}
        keeps_gradients = self._loop.gradients != "step" and not self._old_gradients
        for s in sorted(self._blocks.keys() - lasting):
            left = self._blocks.pop(s), self._streams.get(s, _COMPUTE), self._program.storage_bytes[s]
            if s in self._batch:
                self._old_batch.append(left)
            elif s in self._held_by_loop:
                self._old_values.append(left)
            elif s in self._gradients and keeps_gradients:
                self._old_gradients.append(left)
            else:  # with old gradients there, a new one was added to them
                self._give(left)
        self._new_gradients.clear()
        self._holders = [0] * len(self._holders)
        for s in self._blocks:
            self._holders[s] = 1

    # --- blocks

    def _hold(self, s: int) -> None:
        self._holders[s] += 1
        nbytes = self._program.storage_bytes[s]
        if nbytes and s not in self._blocks:
            self._blocks[s] = self._take(nbytes, self._streams.get(s, _COMPUTE))[0]

    def _release(self, s: int) -> None:
        self._holders[s] -= 1
        # What a variable of the loop holds stays until the step is over, and longer (``_end``).
        if self._holders[s] <= 0 and s not in self._held_by_loop and s not in self._kept:
            self._free(s)

    def _unkeep(self, s: int) -> None:
        self._kept.discard(s)
        if self._holders[s] <= 0:
            self._free(s)

    def _free(self, s: int) -> None:
        if s in self._blocks:
            self._give((self._blocks.pop(s), self._streams.get(s, _COMPUTE), self._program.storage_bytes[s]))

    def _take(self, nbytes: int, stream: str) -> tuple[Block, str, int]:
        self._tensor_bytes += nbytes
        self._peak_tensor_bytes = max(self._peak_tensor_bytes, self._tensor_bytes)
        return self._card.take(nbytes, stream), stream, nbytes

    def _give(self, taken: tuple[Block, str, int]) -> None:
        block, stream, nbytes = taken
        self._tensor_bytes -= nbytes
        self._card.give(block, stream)

    def _drop(self, blocks: list[tuple[Block, str, int]]) -> None:
        for each in blocks:
            self._give(each)
        blocks.clear()


def _streams(program: Program) -> dict[int, str]:
    """Return the storages that FSDP2 allocates on streams of its own, with the stream."""
    found: dict[int, str] = {}
    for op in program.ops:
        if op.name.startswith("fsdp.all_gather_copy_in"):
            found |= dict.fromkeys(op.writes, _ALL_GATHER)
        elif op.name.startswith("c10d._reduce_scatter"):
            found |= dict.fromkeys(op.writes, _REDUCE_SCATTER)
    return found


def _counters_on_cpu(program: Program) -> frozenset[int]:
    """Return the optimizer's step counters, which are on the CPU unless the optimizer is fused."""
    if any("_fused_" in op.name for op in program.ops if op.phase == Phase.OPTIMIZER):
        return frozenset()
    return frozenset(
        tensor.storage
        for tensor in program.tensors
        if not tensor.shape and program.storage_kinds[tensor.storage] == StorageKind.OPTIMIZER_STATE
    )


def _lasting_workspaces(program: Program) -> frozenset[int]:
    """Return the workspaces of libraries: storages that appear in the step without an op and are never freed."""
    made = {arg for code, arg in program.events if code == Event.ALLOC}
    freed = {arg for code, arg in program.events if code == Event.FREE}
    return frozenset(s for s in made - freed if program.storage_kinds[s] == StorageKind.OTHER)
