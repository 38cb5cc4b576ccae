"""The decisions that a plan consists of: classes that techniques have, told apart in files by ``technique``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from sacplan.core.files import Count, Name, Positive
from sacplan.core.program import CallSite


class Site(NamedTuple):
    """The call site of an op in a unit: equal to the tuple (unit, op, occurrence, place).

    Attributes:
        unit: fqn of the module, ``""`` for the model itself.
        op, occurrence, place: as in ``CallSite``.
    """

    unit: str
    op: str
    occurrence: int
    place: str = ""


class AnyDecision(Struct, frozen=True, forbid_unknown_fields=True, tag_field="technique"):
    """Base of decisions; the tag of each is the name of its technique.

    Attributes:
        unit: fqn of a module, ``""`` for the model itself.
    """

    unit: str

    @property
    def units(self) -> tuple[str, ...]:
        """The modules that have to be units, or whose forward the decision replaces."""
        return (self.unit,)

    @property
    def sites(self) -> tuple[CallSite, ...]:
        """The call sites in the unit that the decision is about: none, by default."""
        return ()


class SiteDecision(AnyDecision, frozen=True):
    """Base of decisions about one call site.

    Attributes:
        unit, op, occurrence, place: the call site, see ``Site``.
    """

    op: Name
    occurrence: Count
    place: str = ""

    @property
    def site(self) -> Site:
        """The call site with its unit."""
        return Site(self.unit, self.op, self.occurrence, self.place)

    @property
    def sites(self) -> tuple[CallSite, ...]:
        """The call sites in the unit that the decision is about: this one."""
        return (CallSite(self.op, self.occurrence, self.place),)


class Recompute(SiteDecision, frozen=True, tag="recompute", omit_defaults=True):
    """Discard the outputs of an op, and run the op again when the backward pass asks for them.

    Attributes:
        times: how often the values are dropped: first after the forward pass, then each time they were
            recomputed on the way to something else.
    """

    times: Positive = 1


class Partition(AnyDecision, frozen=True, tag="partition"):
    """Save some values of a graph that ``torch.compile`` makes, and recompute all else that its backward pass needs.

    This is recomputation by the compiler: PyTorch splits the joint graph at the saved values.

    Attributes:
        unit: fqn of the compiled module, ``""`` for the model itself; the first one of those that share a graph.
        graph: which graph, by its ops and sizes (``graph_key`` in ``sacplan/torch_compat/partitioning.py``).
        saved: names of the nodes that are saved.
    """

    graph: Name
    saved: tuple[Name, ...]


class Chunk(AnyDecision, frozen=True, tag="chunk", omit_defaults=True):
    """Run some ops in slices of one dimension.

    The temporaries of a slice are freed before the next one begins. The size is split into ``slices`` slices of equal
    length; the last one may be shorter. It is the size in the current call, not the recorded one.

    Attributes:
        unit: fqn of the module, ``""`` for the model itself.
        span: which ops. ``"stretch"``: those at ``sites``, in one call of the unit, without gradients. ``"module"``:
            the unit's forward, and its backward, in which the forward of each slice runs again. ``"backward"``:
            the unit's backward alone. Its forward runs whole, and keeps nothing but the unit's input. ``"rest"``: all
            that is computed from the unit's input until it is reduced to numbers, forward and backward in one loop.
        slices: the number of slices.
        dim: the dimension of the unit's input; for a stretch, of what the op at its last site makes.
        outer, inner: of a stretch. Its dimension, seen as (outer, size, inner), is sliced along the middle.
        sites: call sites of a stretch, in order, without views. All of them run when the last one is reached.
        exits: of a stretch, the tensors that are needed after it: (position in ``sites``, which output of the op).
    """

    span: Literal["stretch", "module", "backward", "rest"]
    slices: Positive
    dim: Count
    outer: Positive = 1
    inner: Positive = 1
    sites: tuple[CallSite, ...] = ()
    exits: tuple[tuple[Count, Count], ...] = ()


class SeenTensor(NamedTuple):
    """A tensor, as an argument or an output of an op: equal to the tuple (unit, op, occurrence, place, tensor).

    Attributes:
        unit, op, occurrence, place: the call site, as in ``Site``.
        tensor: its position among the tensors of the op's arguments and then of its outputs.
    """

    unit: str
    op: Name
    occurrence: Count
    place: str
    tensor: Count

    @property
    def site(self) -> Site:
        """The call site."""
        # The first four fields are those of a ``Site``, in its order.
        return Site(*self[:4])


class Offload(SiteDecision, frozen=True, kw_only=True, tag="offload", omit_defaults=True):
    """Copy a tensor that is kept for the backward pass to the host, and back in time.

    The copy out begins after the op. Whoever reads the tensor before it is back waits for it.

    Attributes:
        tensor: which tensor of the op, as in ``SeenTensor``.
        let_go: the op after which computation waits for the copy, and the tensor's memory on the device is freed.
        fetch: the copy back begins, and its memory is allocated, when autograd first asks for the tensor named here.
            None: when the offloaded tensor itself is needed.
    """

    tensor: Count = 0
    let_go: Site
    fetch: SeenTensor | None = None

    @property
    def units(self) -> tuple[str, ...]:
        """The modules whose forward the decision replaces, with those of ``let_go`` and ``fetch``."""
        others = [self.let_go.unit, *([] if self.fetch is None else [self.fetch.unit])]
        return tuple(dict.fromkeys((self.unit, *others)))


class OffloadWeight(AnyDecision, frozen=True, kw_only=True, tag="offload-weight", omit_defaults=True):
    """Leave a parameter on the host, and copy it to the device for each use; it is never copied back.

    In the forward pass it is on the device while one module runs, in the backward pass as long as autograd needs it.

    Attributes:
        unit: fqn of the module in whose forward saved tensors are seen: ``module``, or one around it.
        parameter: fqn of the parameter.
        module: fqn of the module whose call uses the parameter: the last one, if it is tied.
        begin: fqn of the module whose call begins the copy for the forward pass: ``around``, or one that runs earlier.
        around: fqn of the innermost module that runs all ops of the forward pass that read the parameter: from the
            beginning of its call on the parameter is on the device.
        fetch: the copy for the backward pass begins when autograd first asks for the tensor named here. None: when the
            parameter itself is needed.
        trained: whether it may be trained, by an optimizer that updates it on the host and keeps its gradient there.
    """

    parameter: Name
    module: str
    begin: str
    around: str
    fetch: SeenTensor | None = None
    trained: bool = False

    @property
    def units(self) -> tuple[str, ...]:
        """The modules that have to be units: ``fetch`` may name another one."""
        return tuple(dict.fromkeys((self.unit, *([] if self.fetch is None else [self.fetch.unit]))))


# A new kind of decision is a class above, and a member of this union.
Decision: TypeAlias = Recompute | Partition | Chunk | Offload | OffloadWeight

Discarded = Mapping[str, Mapping[CallSite, int]]
"""By unit, the call sites that it discards, each with the number of times that its values are dropped."""


def discarded_by(decisions: Iterable[Decision]) -> dict[str, dict[CallSite, int]]:
    """Return the call sites that decisions recompute, by unit."""
    found: dict[str, dict[CallSite, int]] = {}
    for decision in decisions:
        # Only recomputation discards what single call sites make; other decisions are skipped.
        if isinstance(decision, Recompute):
            found.setdefault(decision.unit, {})[decision.sites[0]] = decision.times
    return found


def as_decisions(discarded: Discarded) -> tuple[Recompute, ...]:
    """Return the inverse of ``discarded_by``; a unit that discards nothing needs no decision."""
    return tuple(
        Recompute(unit, op, occurrence, place, times)
        for unit, sites in discarded.items()
        for (op, occurrence, place), times in sites.items()
    )
