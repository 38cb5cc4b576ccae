"""The recorded ops of a chunk, deferred one after the other by the executor's engine on fake tensors.

Each tensor of the program is in one of three states here. It is *lazy* if an op that was deferred makes it; *real* if
it is there as in the plain step; or both, if it is a view of what enters: lazy in the module, real for all others.
Deferring an op can run others (a number that code reads needs a loop of its own), and what the recorder sees of these
is kept by op, for the patch.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sacplan.core.program import Op, Phase
from sacplan.core.replayed_calls import Opaque, call_with
from sacplan.device.devices import DeviceSpec
from sacplan.errors import ChunkError
from sacplan.record.in_place import OUT_OF_PLACE
from sacplan.record.rehearsal import Rehearsal, RehearsedOps
from sacplan.techniques.chunk.chunk_entry import CannotChunk, ChunkSpan
from sacplan.techniques.chunk.executor import losses  # noqa: F401  (registers how losses are put together)
from sacplan.techniques.chunk.executor.lazy import Lazy, defer, real, root
from sacplan.techniques.chunk.executor.values import DeferredTensor, SlicedRegion
from sacplan.techniques.chunk.flow import Window
from sacplan.techniques.chunk.sampling import SampledSlices
from sacplan.torch_compat.ops import op_named, tensors_in

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class DeferredTensors:
    """The tensors and storages of the program that are not as in the plain step.

    Attributes:
        lazy: by tensor that is not computed where it was, the lazy one that stands for it.
        inside: the same for views of what enters, which are lazy for ops of the module only.
        saved: by deferred forward op, the lazy tensors that it read and made. Its backward ops read these.
        storages: storages of lazy tensors that never come into being as a whole, unless they leave the chunk.
        given: storages of lazy tensors that are there, and are read in slices: what enters, and incoming gradients.
    """

    def __init__(self, begins: int) -> None:
        self.begins = begins
        self.lazy: dict[int, Lazy] = {}
        self.inside: dict[int, Lazy] = {}
        self.saved: dict[int, dict[int, Lazy]] = {}
        self.storages: set[int] = set()
        self.given: set[int] = {begins}

    def known(self, op: Op, in_module: bool) -> Mapping[int, Lazy]:
        """Return the lazy tensors that an op may read.

        A backward op looks first at those that its forward op read or made. Two views of one layout are one tensor of
        the program, but two lazy tensors, and autograd saved one of the two.
        """
        saved = self.saved.get(op.forward_of, {}) if op.phase is Phase.BACKWARD else {}
        return ChainMap(saved, self.lazy, self.inside if in_module else {})

    def add(self, tensor: int, storage: int, made: Lazy) -> None:
        """Note the lazy tensor that a deferred op has made for a tensor of the program, and its storage there."""
        (self.inside if storage == self.begins else self.lazy)[tensor] = made
        if storage not in self.given:
            self.storages.add(storage)

    def let_go(self) -> None:
        """Forget all lazy tensors, as the step has by the time of its loop: what nobody holds is not computed."""
        self.lazy.clear()
        self.inside.clear()
        self.saved.clear()


class DeferredRun:
    """Ops of the program that the engine has deferred, in order, and what ran meanwhile.

    Attributes:
        tensors: see ``DeferredTensors``.
        region: the engine's.
        sampled: which slices of its loops run.
        ran: by deferred op, what ran when it was deferred: nothing for most.
        held: (storage, deferred op that reads it): what stays alive until a loop has read it.
        computed: deferred ops that ran a loop at once, for a number that they read.
        expected: by forward op whose output gets a lazy gradient, the gradient's shape and the part of the axis that it
            has. None: it does not depend on the slices, as the gradient of a loss.
    """

    def __init__(self, span: ChunkSpan, device: DeviceSpec) -> None:
        self.span, self.program = span, span.program
        self.rehearsal = Rehearsal(span.program, device)
        self.sampled = SampledSlices(self.rehearsal)
        self.region = SlicedRegion(span.axis.size, span.chunk.slices, on_whole=_refuse, choose=self.sampled)
        self.tensors = DeferredTensors(span.begins)
        self.ran: dict[int, RehearsedOps] = {}
        self.held: dict[tuple[int, int], None] = {}
        self.computed: list[int] = []
        self.expected: dict[int, tuple[tuple[int, ...], Window | None]] = {}
        self._real: dict[int, torch.Tensor] = {}
        # Number of a node of the engine to the deferred op that it belongs to.
        self._makers: dict[int, int] = {}

    def enter(self) -> None:
        """Begin the region with what enters the module."""
        tensor = self.span.tensor
        self.tensors.inside[tensor] = root(self.region, self.rehearsal.given(tensor), self.span.axis)

    @property
    def last(self) -> int:
        """The op deferred last: the final loop runs in its place."""
        return next(reversed(self.ran))

    def op_of(self, node: int) -> int:
        """Return the deferred op that a node of the engine belongs to."""
        return self._makers[node]

    def is_there(self, tensor: int, made: torch.Tensor) -> None:
        """Let ops that are deferred from here on read ``made`` for a tensor of the program."""
        self._real[tensor] = made

    def tensor(self, index: int, known: Mapping[int, Lazy]) -> torch.Tensor:
        """Return what an op gets for a tensor of the program: the lazy one, or a fake one like it.

        Raises:
            CannotChunk: it is a view of something sliced that no deferred op has made.
        """
        if index in known:
            return known[index]
        if index not in self._real:
            if self.program.tensors[index].storage in self.tensors.storages:
                raise CannotChunk("what is sliced is read in a layout that no op made")
            self._real[index] = self.rehearsal.given(index)
        return self._real[index]

    def gradient(self, index: int, forward: int, tensor: int) -> None:
        """Let an incoming gradient be lazy: it is there as a whole, and backward op ``index`` begins to read it."""
        made = self.tensor(tensor, {})
        storage = self.program.tensors[tensor].storage
        self.tensors.given.add(storage)
        self.held[storage, index] = None
        # The gradient of a sliced output is sliced alike. That of a reduced output, such as a loss, is read whole.
        window = self.expected[forward][1]
        self.tensors.lazy[tensor] = Lazy(DeferredTensor(self.region, made, window=window, data=made))

    def defer(self, index: int, op: Op, known: Mapping[int, Lazy]) -> None:
        """Defer an op of the program. One that reads nothing lazy runs now.

        Raises:
            CannotChunk: the engine would have to run it on whole tensors, or cannot call it at all.
        """
        # The program writes in place where the plain step does. Lazy tensors are tensor subclasses, for which autograd
        # computes the same out of place (see in_place.py).
        func = op_named(OUT_OF_PLACE.get(op.name, op.name))
        if func is None:
            raise CannotChunk(f"this process has no op {op.name}")
        try:
            args, kwargs = call_with(op.arguments, [self.tensor(t, known) for t in op.inputs])
            loops = self.region.tally.loops
            run = _deferred if any(t in known for t in op.inputs) else _call
            out, seen = self.rehearsal.seen(lambda: run(func, args, kwargs))
        except (Opaque, ChunkError) as error:
            raise CannotChunk(str(error)) from error
        # Deferring the op ran a loop: it reads a number that the slices make.
        if self.region.tally.loops > loops:
            self.computed.append(index)
        outputs = list(tensors_in(out))
        if len(outputs) != len(op.outputs):
            raise CannotChunk(f"{op.name} gave {len(outputs)} results instead of {len(op.outputs)}")
        for t, made in zip(op.outputs, outputs, strict=True):
            storage = self.program.tensors[t].storage
            # A lazy result does not come into being here. Any other is there, as in the plain step.
            if isinstance(made, Lazy):
                self._note_output(index, made.value)
                self.tensors.add(t, storage, made)
            else:
                self._real[t] = made
                self.rehearsal.is_made(made, storage)
        # A deferred op keeps what it reads alive until a loop has run it. One that ran at once does not.
        for t in op.inputs if any(isinstance(made, Lazy) for made in outputs) else ():
            if t not in known:
                self.held[self.program.tensors[t].storage, index] = None
        self._note_nodes(index, [made.value for made in outputs if isinstance(made, Lazy)])
        self.ran[index] = seen

    def _note_output(self, index: int, value: DeferredTensor) -> None:
        # A slice across the edge of a window runs other sizes than one inside, so sampling has to know the edges.
        if (window := value.window) is not None:
            self.sampled.windows.add((window.start, window.start + window.axis.size))
        if value.combined is not None:
            self.expected[index] = value.shape, None  # as ``watch`` in the executor has it

    def _note_nodes(self, index: int, values: list[DeferredTensor]) -> None:
        """Note the nodes of an op: all new ones that its outputs depend on, since the engine may rewrite the op."""
        while values:
            node = values.pop().node
            if node is not None and node.number not in self._makers:
                self._makers[node.number] = index
                values.extend(node.values)


def _refuse(op: str, why: str) -> None:
    """Refuse an op that the engine would run on whole tensors in a step: a plan must not count on that."""
    raise CannotChunk(f"{op} cannot run in slices: {why}")


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on real tensors, unless it reads a number: that would fail on fake ones, and nothing needs it."""
    return None if func is _READ_NUMBER else func(*args, **kwargs)


def _deferred(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Defer an op. A number that code reads is computed at once, as in the step, but has no value on fake tensors."""
    if func is _READ_NUMBER:
        real(args[0])
        return None
    return defer(func, args, kwargs)
