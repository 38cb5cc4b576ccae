"""The step as a memory snapshot, for the viewer at https://pytorch.org/memory_viz.

The format is the pickled result of ``torch.cuda.memory._snapshot``, which ``torch/cuda/memory.py`` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sacplan.core.liveness import Fold
from sacplan.core.names import shown_module
from sacplan.core.program import ROOT_SCOPE, Event, Op, Program
from sacplan.device.caching_allocator import Block, CachingAllocator
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


class _Changes(Fold):
    """A fold that notes which storages may have been allocated or freed."""

    __slots__ = ("changed",)

    def __init__(self, program: Program) -> None:
        self.changed: dict[int, None] = {}
        super().__init__(program)

    def hold(self, storage: int) -> None:
        super().hold(storage)
        self.changed[storage] = None

    def release(self, storage: int) -> None:
        super().release(storage)
        self.changed[storage] = None


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
        self.alive: dict[int, _Allocation] = {}  # by storage
        self.stacks = _Stacks(profile, program)
        self.now_ms = 0.0

    def play(self) -> None:
        """Fill ``entries``."""
        program = self.program
        fold = _Changes(program)
        self._settle(fold)
        for code, arg in program.events:
            if code == Event.RESIZE:  # its contents are copied, so both blocks are there for a moment
                self._settle(fold)
                old = self.alive.pop(program.resizes[arg][0], None)
                fold.step(code, arg)
                self._settle(fold)
                if old is not None:
                    self._free(old)
                continue
            fold.step(code, arg)
            # Changes between ops wait for the next op, see the class.
            if code != Event.OP:
                continue
            op = program.ops[arg]
            # Before ``_settle``, which would free the old block and allocate another one.
            if op.replaces >= 0:
                self._take_over(op)
            self._settle(fold)
            if op.replaces >= 0:
                fold.changed[op.replaces] = None  # if it is still held, it is allocated again
            if op.workspace_bytes:
                workspace = self._allocate(op.workspace_bytes, self.stacks.of_workspace(arg), WORKSPACE)
            self.now_ms += op.time_ms
            if op.workspace_bytes:
                self._free(workspace)
        self._settle(fold)

    def _take_over(self, op: Op) -> None:
        """Give the block of an overwritten storage to the output of an op that writes in place."""
        sizes, new = self.program.storage_bytes, op.writes[0]
        # A storage of 0 bytes has no block.
        if op.replaces in self.alive:
            old = self.alive.pop(op.replaces)
            # The recording counts a write in place as a new version of the storage. On a device it is the
            # same block, which neither is freed nor allocated.
            if sizes[new] == sizes[op.replaces]:
                self.alive[new] = old
            else:
                self._free(old)

    def _settle(self, fold: _Changes) -> None:
        # By what holds now: a storage that came and went since the last op is in neither list.
        gone = [s for s in fold.changed if not fold.holders[s] and s in self.alive]
        come = [s for s in fold.changed if fold.holders[s] and s not in self.alive]
        fold.changed.clear()
        for storage in gone:
            self._free(self.alive.pop(storage))
        for storage in come:
            n_bytes = 0 if storage in self.program.on_host else fold.size(storage)
            # The allocator gives no block for 0 bytes, and none in the memory of the host.
            if n_bytes:
                kind = self.program.storage_kinds[storage].name.lower()
                self.alive[storage] = self._allocate(n_bytes, self.stacks.of_storage(storage), kind)

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
