"""Turn in-place writes of the forward pass into ops that make a new storage in place of an old one.

``relu_(x)`` overwrites ``x``. To run it again, the old ``x`` is needed, which is gone; but if the old ``x`` can be made
again, the result can, too. So the program tells the two apart. The storage is split into versions: the op reads the old
version and makes the new one (``Op.replaces``), and the old one is freed with it. Nothing is allocated, so the bytes
alive at each op stay the same.

A write makes a new version if

- the op may run again as far as its own traits go, and writes to one storage only;
- an op of the forward pass that may run again made the old version;
- autograd does not hold the old version, which would stay alive next to the new one, and be counted twice.

Otherwise the op stays one that mutates, and may not run again.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from sacplan.core.program import Event, Op, Patch, Phase, Program
from sacplan.core.rewriting import PatchBuilder

_FREE = int(Event.FREE)


def in_place_versions(program: Program) -> Patch:
    """Return the rewrite that splits storages into versions; a write that makes no version stays an op that mutates."""
    return _Splitter(program).patch()


class _Splitter:
    """One pass over the events. Handles and tensors after a write refer to the version at their time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.now: dict[int, int] = {}  # storage to the version that it has now, if it was split
        self.draft = PatchBuilder(program)
        self.makers: dict[int, int] = {}  # storage, or version, to the op that made it
        self.tensors: dict[tuple[int, int], int] = {}  # (tensor, version) to the tensor on that version

    def patch(self) -> Patch:
        """Return the patch. Events keep their positions, and refer to versions; a new version frees the old one."""
        program, now, draft = self.program, self.now, self.draft
        held: Counter[int] = Counter()  # by storage, how often autograd holds it or a version of it
        for position, (code, arg) in enumerate(program.events):
            if code == Event.PACK:
                storage = program.handle_storages[arg]
                held[storage] += 1
                if storage in now:
                    draft.handle_storages[arg] = now[storage]
                    draft.handle_tensors[arg] = self._tensor(program.handle_tensors[arg])
            elif code == Event.RELEASE:
                held[program.handle_storages[arg]] -= 1
            elif code in (Event.FREE, Event.ALLOC):
                if arg in now:
                    draft.events[position] = ((code, now[arg]),)  # what autograd keeps of it is still read
            elif code == Event.OP:
                old = self._op(arg, held)
                if old is not None:
                    draft.events[position] = ((code, arg), (_FREE, old))
        return draft.patch()

    def _op(self, index: int, held: Counter[int]) -> int | None:
        """Let an op refer to versions; return the version that it overwrites, or None if it makes no new one."""
        op, now, draft = self.program.ops[index], self.now, self.draft
        renamed = self._renamed(op) if now else op
        target = op.mutates[0] if len(op.mutates) == 1 else -1
        # The conditions of the module's docstring. Only the forward pass is run again, so only it needs versions.
        # ``op.recomputable`` also says that the argument is what another op returned (``Recorder._record``). An op that
        # makes something new as well (``op.writes``) stays as it is.
        if op.phase is Phase.FORWARD and target >= 0 and op.recomputable and not op.writes:
            old = now.get(target, target)
            maker = self.makers.get(old, -1)
            # No maker: a parameter, the batch, or memory that no op of the forward pass was seen to make.
            if maker >= 0 and draft.ops[maker].recomputable and not held[target]:
                new = draft.new_storage(draft.storage_bytes[target], draft.storage_kinds[target])
                now[target] = new
                self.makers[new] = index
                # Inputs were renamed before ``now`` changed: the op reads the old version. Outputs are on the new one.
                outputs = tuple(map(self._tensor, op.outputs))
                draft.ops[index] = msgspec.structs.replace(
                    renamed, writes=(new,), mutates=(), replaces=old, outputs=outputs
                )
                return old
            # The value before the write cannot be made again.
            renamed = msgspec.structs.replace(renamed, recomputable=False)
        # An op of a later phase makes no old version: what it writes is never made again.
        if op.phase is Phase.FORWARD:
            self.makers.update(dict.fromkeys(op.writes, index))
        if renamed is not op:
            draft.ops[index] = renamed
        return None

    def _renamed(self, op: Op) -> Op:
        now = self.now
        if now.keys().isdisjoint((*op.reads, *op.mutates)):
            return op
        return msgspec.structs.replace(
            op,
            reads=tuple(now.get(s, s) for s in op.reads),
            mutates=tuple(now.get(s, s) for s in op.mutates),
            inputs=tuple(map(self._tensor, op.inputs)),
            outputs=tuple(map(self._tensor, op.outputs)),
        )

    def _tensor(self, tensor: int) -> int:
        """Return a tensor on the version that its storage has now."""
        if tensor < 0:  # an argument that is no recorded tensor
            return tensor
        view = self.program.tensors[tensor]
        if view.storage not in self.now:
            return tensor
        key = tensor, self.now[view.storage]
        if key not in self.tensors:
            self.tensors[key] = self.draft.tensors.add(msgspec.structs.replace(view, storage=key[1]))
        return self.tensors[key]
