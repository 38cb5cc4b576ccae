"""The values that lazy tensors stand for, and the deferred ops (nodes) that would make them.

A region is everything that is computed in slices of one axis. Its values are

- sliced: a slice of the axis gives a slice of the value (``DeferredTensor.window``);
- reduced: each slice gives a part, and the parts are combined (``DeferredTensor.combined``);
- late: made of reduced values, after the loop;
- free: independent of the slices, so that it is computed before the loop, or in it if only slices are needed.

A value follows from the values that its op reads. One sliced argument makes an op part of the loop; a factor rule says
whether its results are then sliced or reduced. If it also reads a reduced or late value, that one is computed at once,
in a loop of its own. Without a sliced argument, a reduced or late one makes the results late, and free ones alone make
free ones.

Values refer to the nodes that make them and nodes to their arguments, and never the other way round but weakly. So
reference counts free what nobody asks for any more, at the moment at which the plain step would free the tensor.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sacplan.core.factors.rule import Kind, Rule
from sacplan.errors import ChunkError
from sacplan.techniques.chunk.flow import FactorCut, Window
from sacplan.techniques.runtime.tensors import version_of


class Stage(enum.Enum):
    """When a node runs: before the loop, in it, or after it."""

    FREE = enum.auto()
    LOOP = enum.auto()
    LATE = enum.auto()


@dataclass
class Tally:
    """How many loops over the slices of a region have run."""

    loops: int = 0


Choose = Callable[[Sequence[tuple[int, int]]], Iterable[tuple[int, int]]]
"""From all slices (start, stop) to those that run."""


class SlicedRegion:
    """A region: everything that is computed in slices of one axis.

    Args:
        size: length of the axis.
        slices: the most slices; each has ``ceil(size / slices)`` elements, the last one perhaps less.
        on_whole: called with an op that could not be sliced, and the reason.
        choose: chooses the slices that run, for planning, where some stand for all.

    Attributes:
        length: elements in a slice.
        tally: counts its loops.
        hooks: hooks on tensors outside, to be removed when the region is over.
        targets: returns what the entry's node gives gradients to (``Targets``); None if there is no node, or no longer.
        pending: scalars that nobody has computed yet, and that somebody still refers to. Each loop computes them along,
            since code that looks at one would need a loop for it.
    """

    def __init__(
        self,
        size: int,
        slices: int,
        on_whole: Callable[[str, str], None] | None = None,
        choose: Choose | None = None,
    ) -> None:
        self.size = size
        # Rounded up, so there may be fewer slices than asked for.
        self.length = max(1, -(-size // slices))
        self.tally = Tally()
        self.hooks: list[Any] = []
        self.targets: Callable[[], Any] = lambda: None
        self._gradients: list[weakref.ref[torch.Tensor]] = []
        self._on_whole, self._choose = on_whole, choose
        self._pending: list[weakref.ref[DeferredTensor]] = []

    def note_whole(self, op: str, reason: str) -> None:
        """Note that an op needs whole tensors."""
        if self._on_whole is not None:
            self._on_whole(op, reason)

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each slice that runs."""
        # A step runs all of them. A rehearsal runs a few, each in the place of others that are alike (``sampling.py``).
        starts = range(0, self.size, self.length)
        every = [(start, min(self.size, start + self.length)) for start in starts]
        yield from every if self._choose is None else self._choose(every)

    def note_scalar(self, value: DeferredTensor) -> None:
        """Note a scalar that a loop computes along if anybody still refers to it."""
        # Weakly: what code has dropped is not computed.
        self._pending.append(weakref.ref(value))

    def note_gradient(self, lazy: torch.Tensor) -> None:
        """Note a lazy tensor that a formula of autograd has made."""
        # The tensor and not its value, which lives for as long as an op that is deferred reads it.
        self._gradients.append(weakref.ref(lazy))

    def take_gradients(self) -> list[torch.Tensor]:
        """Return the noted tensors that somebody still refers to, and forget all."""
        alive = [lazy for lazy in (ref() for ref in self._gradients) if lazy is not None]
        self._gradients.clear()
        return alive

    def remove_hooks(self) -> None:
        """Remove all hooks: the region is over."""
        while self.hooks:
            self.hooks.pop().remove()

    @property
    def pending(self) -> list[DeferredTensor]:
        """The scalars that the next loop computes along, see the class."""
        alive = [value for value in (ref() for ref in self._pending) if value is not None]
        # Computed ones are dropped on the way, so the list does not grow with the step.
        self._pending = [weakref.ref(value) for value in alive if value.data is None]
        return [value for value in alive if value.data is None]


class DeferredTensor:
    """One tensor that is computed when somebody asks.

    Attributes:
        region: the region that it belongs to.
        shape, stride, dtype, device: as of the whole tensor.
        window: the part of the region's axis that it has, if it is sliced.
        combined: how the parts of a reduced value make the whole.
        node: the op that makes it; None if the region begins with it, or once it is computed.
        data: the whole tensor, once it is there.
        source: returns the whole tensor if the region begins with one that something else keeps. If the value was
            computed in slices and is gone, it raises an error.
        aliased: whether another tensor shares its memory, as far as code can tell.
        hooked: whether a hook makes its gradient lazy.
    """

    def __init__(
        self,
        region: SlicedRegion,
        like: torch.Tensor,
        *,
        device: torch.device | None = None,
        window: Window | None = None,
        combined: Kind | None = None,
        node: DeferredOp | None = None,
        data: torch.Tensor | None = None,
        source: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.region = region
        self.shape, self.stride, self.dtype = tuple(like.shape), tuple(like.stride()), like.dtype
        self.device = device or like.device
        self.window, self.combined, self.node, self.data, self.source = window, combined, node, data, source
        self.aliased = self.hooked = False

    @property
    def sliced(self) -> bool:
        """Whether slices of the region give slices of it."""
        return self.window is not None

    @property
    def free(self) -> bool:
        """Whether it does not depend on the slices."""
        # Without a node it is computed, or the region begins with it. Neither depends on a slice.
        return self.window is None and (self.node is None or self.node.stage is Stage.FREE)

    @property
    def there(self) -> bool:
        """Whether it is computed, or a view of what is."""
        if self.node is None:
            return self.data is not None
        # A view of what is there takes no memory: to compute it now costs nothing.
        func = self.node.func
        return getattr(func, "is_view", False) and all(v.there for v in self.node.values)

    @property
    def begins(self) -> bool:
        """Whether it is there without computing anything: the region begins with it, or it is settled."""
        return self.node is None

    def whole(self) -> torch.Tensor:
        """Return the tensor of a value that ``begins``."""
        if self.data is not None:
            return self.data
        assert self.source is not None
        return self.source()

    def settle(self, data: torch.Tensor) -> None:
        """Keep the computed tensor, and let go of the op that makes it."""
        # With the op goes what it reads, unless something else refers to that.
        self.data, self.node, self.source = data, None, None

    def leave(self, data: torch.Tensor) -> None:
        """Settle it, and take it out of the loops: ops that read it from now on run at once, on the whole tensor."""
        self.settle(data)
        self.window = self.combined = None


class Held:
    """A tensor among the arguments of a node, as it was when the op was deferred."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)

    def checked(self, func: Any) -> torch.Tensor:
        """Return the tensor, or raise ``ChunkError`` if it was changed or freed since."""
        t = self.tensor
        # The plain step has read it by now, so to change it is no error there. Here the change would be in the result.
        if version_of(t) != self.version:
            raise ChunkError(
                f"{func} runs in slices when its result is needed, but a tensor of shape {tuple(t.shape)} that it "
                "reads was changed in place since. Read results, such as logits, before optimizer.step() changes the "
                "weights; or leave this chunk out of the plan."
            )
        # Parameters are freed by resizing their storage to nothing, which no version shows.
        if t.numel() and not t.untyped_storage().nbytes():
            raise ChunkError(
                f"{func} runs in slices when its result is needed, but the memory of a tensor of shape "
                f"{tuple(t.shape)} that it reads was freed (fully_shard frees gathered parameters after the forward "
                "pass). Read results, such as logits, in the forward of the module that makes them; or leave this "
                "chunk out of the plan."
            )
        return t


@dataclass(eq=False)
class DeferredOp:
    """An op that was deferred.

    Attributes:
        func: the op.
        args, kwargs: its arguments, with ``DeferredTensor`` and ``Held`` instead of tensors.
        inputs: the ``DeferredTensor`` and ``Held`` among the arguments, in order.
        stage: when it runs.
        number: its place in the order in which ops were deferred.
        rule: its factor rule, if there is one.
        cut: the factor along which it is sliced, if it is.
        move: whether it moves the window: a slice along the axis, or the backward of one.
        outputs: weak references to the values that it makes.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    stage: Stage
    rule: Rule | None = None
    cut: FactorCut | None = None
    move: bool = False
    outputs: list[weakref.ref[DeferredTensor]] = field(default_factory=list)
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        # Leaves, since lists among the arguments hold tensors as well, as those of ``cat`` do.
        leaves = tree_leaves((self.args, self.kwargs))
        self.inputs = [x for x in leaves if isinstance(x, (DeferredTensor, Held))]

    def new_output(self, region: SlicedRegion, like: torch.Tensor, **how: Any) -> DeferredTensor:
        """Add the value of one more output; ``how``: see ``DeferredTensor``."""
        value = DeferredTensor(region, like, node=self, **how)
        self.outputs.append(weakref.ref(value))
        return value

    @property
    def values(self) -> list[DeferredTensor]:
        """The inputs that are lazy."""
        return [x for x in self.inputs if isinstance(x, DeferredTensor)]

    @property
    def made(self) -> list[DeferredTensor | None]:
        """The outputs; None for those that nobody refers to."""
        return [ref() for ref in self.outputs]
