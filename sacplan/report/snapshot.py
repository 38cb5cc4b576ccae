"""The step as a memory snapshot, for the viewer at https://pytorch.org/memory_viz.

The format is the pickled result of ``torch.cuda.memory._snapshot``, which ``torch/cuda/memory.py`` describes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sacplan.core.names import shown_module
from sacplan.core.program import ROOT_SCOPE, Event, Program
from sacplan.device.caching_allocator import Block, CachingAllocator
from sacplan.device.device_memory import BlockReader
from sacplan.profiling.profile import Profile
from sacplan.questions.alive import WORKSPACE, Origins

SnapshotEntry = dict[str, Any]
Frames = list[dict[str, Any]]

PROTOCOL = 4  # the latest that the viewer can read
_FIRST_ADDRESS = 0x7F0000000000
_POOL = (0, 0)
_WITHOUT_CATEGORY = "unknown"  # if there are categories, the viewer needs one of this name
_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}


def snapshot_of(profile: Profile, program: Program) -> dict[str, Any]:
    """Return the snapshot of a step, with a plan or without.

    Args:
        profile: of the step.
        program: the step.
    """
    written = _Writer(profile, program)
    written.play()
    return {
        "predicted_by": "sacplan",
        "segments": written.segments(),
        "device_traces": [written.entries],
        "allocator_settings": _SETTINGS,
    }


@dataclass(frozen=True, slots=True)
class _Allocation:
    """A block in use, the bytes that were requested, and the stack that requested them."""

    block: Block
    n_bytes: int
    frames: Frames

    @property
    def address(self) -> int:
        return _FIRST_ADDRESS + self.block.address


class _Writer:
    """Replay a step on an empty allocator.

    The peak of a step is taken while ops run. So the changes between two ops are made when the next one begins: first
    all frees, then all allocations. In any other order the snapshot could exceed the predicted peak.
    """

    def __init__(self, profile: Profile, program: Program) -> None:
        self.program = program
        self.entries: list[SnapshotEntry] = []
        self.allocator = CachingAllocator()
        self.reader = BlockReader(program)
        self.alive: dict[int, _Allocation] = {}  # by block
        self.stacks = _Stacks(profile, program)
        self.now_ms = 0.0
        self._made = 0  # of the reader's changes

    def play(self) -> None:
        """Fill ``entries``."""
        program, reader = self.program, self.reader
        self._make(reader.block_of.values())
        for code, arg in program.events:
            is_resized = code == Event.RESIZE
            if is_resized:
                self._settle(len(reader.changes))
            reader.step(code, arg)
            if is_resized:  # in this order: its contents are copied, so both blocks are there for a moment
                self._make(reader.changes[self._made :])
                self._made = len(reader.changes)
            elif code == Event.OP:  # changes between ops wait for the next op, see the class
                self._run(arg)
        self._settle(len(reader.changes))

    def _run(self, index: int) -> None:
        """Settle what comes and goes up to an op, and run it. Its workspace is the last that comes and goes."""
        op, changes = self.program.ops[index], self.reader.changes
        inside = 2 if op.workspace_bytes else 0
        self._settle(len(changes) - inside)
        self._made = len(changes)
        if inside:
            workspace = self._allocate(op.workspace_bytes, self.stacks.of_workspace(index), WORKSPACE)
        self.now_ms += op.time_ms
        if inside:
            self._free(workspace)

    def _settle(self, end: int) -> None:
        """Make the changes up to ``end``: first all frees, then all allocations."""
        # A block that came and went since the last op, or went and came back, is in neither list.
        left: Counter[int] = Counter()
        for change in self.reader.changes[self._made : end]:
            left[max(change, ~change)] += 1 if change >= 0 else -1
        self._make([~block for block, n in left.items() if n < 0])
        self._make([block for block, n in left.items() if n > 0])
        self._made = end

    def _make(self, changes: Iterable[int]) -> None:
        for change in changes:
            if change < 0:
                self._free(self.alive.pop(~change))
                continue
            storage = self.reader.storage_of[change]
            kind = self.program.storage_kinds[storage].name.lower()
            frames = self.stacks.of_storage(storage)
            self.alive[change] = self._allocate(self.reader.sizes[change], frames, kind)

    def _allocate(self, n_bytes: int, frames: Frames, category: str) -> _Allocation:
        known = len(self.allocator.segments)
        made = _Allocation(self.allocator.allocate(n_bytes), n_bytes, frames)
        # Segments that this allocation made necessary.
        for segment in self.allocator.segments[known:]:
            address = _FIRST_ADDRESS + segment.address
            self._note("segment_alloc", address, segment.nbytes, frames, category=_WITHOUT_CATEGORY)
        self._note("alloc", made.address, n_bytes, frames, category=category)
        return made

    def _free(self, allocation: _Allocation) -> None:
        self.allocator.free(allocation.block)
        # On one stream a free is completed at once.
        for action in ("free_requested", "free_completed"):
            self._note(action, allocation.address, allocation.n_bytes, allocation.frames)

    def _note(self, action: str, address: int, n_bytes: int, frames: Frames, **more: str) -> None:
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": n_bytes,
                "stream": 0,
                "time_us": round(self.now_ms * 1e3),
                "pool_id": _POOL,
                "frames": frames,
                **more,
            }
        )

    def segments(self) -> list[SnapshotEntry]:
        """Return the reserved segments at the end of the step, with the blocks that are alive in them."""
        in_use = {one.block.address: one for one in self.alive.values()}
        found = []
        for segment in self.allocator.segments:
            blocks = [_block(block, in_use.get(block.address)) for block in segment]
            active = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
            found.append(
                {
                    "device": 0,
                    "address": _FIRST_ADDRESS + segment.address,
                    "total_size": segment.nbytes,
                    "allocated_size": active,
                    "active_size": active,
                    "requested_size": sum(b["requested_size"] for b in blocks),
                    "stream": 0,
                    "segment_type": "small" if segment.first.pool[1] else "large",
                    "segment_pool_id": _POOL,
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return found


def _block(block: Block, allocation: _Allocation | None) -> SnapshotEntry:
    return {
        "address": _FIRST_ADDRESS + block.address,
        "size": block.nbytes,
        "requested_size": 0 if allocation is None else allocation.n_bytes,
        "state": "inactive" if allocation is None else "active_allocated",
        "frames": [] if allocation is None else allocation.frames,
    }


class _Stacks:
    """Stacks for allocations, innermost frame first: ops and modules in place of functions and files.

    Line numbers are always 0.
    """

    def __init__(self, profile: Profile, program: Program) -> None:
        self.program = program
        self.model = profile.fingerprint.model_class
        self.origins = Origins(profile, program)
        self.of_ops: dict[int, Frames] = {}

    def of_op(self, op: int) -> Frames:
        """Return the stack of an op: the op, the module calls around it, and the phase."""
        if op not in self.of_ops:
            run = self.program.ops[op]
            # A recomputed op has the modules of the one that it repeats, and its own phase.
            again = run.recomputes
            recorded = op if again < 0 else again
            name = self.program.ops[recorded].name + (" (recomputed)" if again >= 0 else "")
            phase = run.phase.name.lower()
            self.of_ops[op] = [
                _frame(name, shown_module(self.program, recorded, self.model)),
                *self._around(recorded, phase),
                _frame(phase, self.model),
            ]
        return self.of_ops[op]

    def of_workspace(self, op: int) -> Frames:
        """Return the stack of memory that the kernel of an op allocates."""
        frames = self.of_op(op)
        return [_frame(WORKSPACE, frames[0]["filename"]), *frames]

    def of_storage(self, storage: int) -> Frames:
        """Return the stack of a storage: that of its op, or a description of what existed before the step."""
        writer = self.program.writer.get(storage)
        if writer is not None:
            return self.of_op(writer)
        module, what, *_ = self.origins.of(storage)
        reader = self.origins.reader.get(storage)
        in_model = reader is not None and module == shown_module(self.program, reader, self.model)
        when = "before the step" if storage in self.origins.initial else "in the step"
        return [
            _frame(what, module),
            *(self._around(reader, when) if reader is not None and in_model else ()),
            _frame(when, self.model),
        ]

    def _around(self, op: int, name: str) -> Frames:
        """Return the module calls around that of an op, without the model itself."""
        scope = self.program.ops[op].scope
        around = () if scope == ROOT_SCOPE else self.program.ancestors(scope)
        return [_frame(name, fqn) for s in around if (fqn := self.program.scopes[s].fqn)]


def _frame(name: str, filename: str) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": 0}
