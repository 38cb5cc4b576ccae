"""Under ``torch.compile`` a plan becomes tags for the partitioner instead of recipes.

Neither dispatch modes nor saved-tensor hooks belong in a compiled graph. So while a unit's forward is
traced, it becomes a checkpoint with a selective context. The policy of that context looks up each op by its name,
and by its number among the ops of that name in this call of the unit, in the plan's record of the calls. The
partitioner then decides what the compiled forward saves, and duplicates the ops to recompute; duplicated random ops
get the forward pass's generator state. What each tag means to the partitioner (torch 2.13; both the min-cut one, the
default of the backends, and the plain one):

- ``PREFER_RECOMPUTE``, on what the plan discards: this node is recomputed, whatever that costs.
- ``MUST_SAVE``, on kept matmuls, convolutions and attention: never computed again, and kept only if the
  backward pass, or what is recomputed there, has a use for it. Min-cut does the same without the tag.
- ``PREFER_SAVE``, on the rest, has no effect. The partitioner may recompute pointwise ops that fuse, as
  it does without a plan. ``MUST_SAVE`` would forbid that, and save more than compiling without a plan.
- Views of a discarded tensor are tagged as the tensor is: untagged, those that the partitioner does not
  count as views (``split``, ``transpose``) would be saved in its place. Views of kept tensors have no tag:
  with one, their bases would be saved even if the backward pass had no use for them.

The traced ops are those of an eager step in the same order, except for Python decompositions that only tracing
uses. Of these ``aten.dropout`` would shift the counts: switched off it becomes a ``clone``, and on devices
without a fused kernel it becomes ``native_dropout`` instead of four ops. Batch norm has another name. All are
counted as the eager ops that they stand for. ``matmul`` yields other views, which does not matter. Recurrent
layers and resampling are traced as entirely different ops: a discarded call site that does not occur in the
trace is an error; a plan is never kept in part. A planner that meets this error keeps these ops.

A unit in which the graph breaks cannot be checkpointed as part of a graph: that is an error too. A module that
is compiled on its own inside an eager unit runs eagerly, since a dispatch mode is on: compile whole units.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sacplan.errors import NotInGraph, PlanError
from sacplan.techniques.runtime.alignment import RecordedUnit
from sacplan.torch_compat.ops import is_heavy, tensors_in
from sacplan.torch_compat.private import storage_key, with_outputs

_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default
_CLONE = torch.ops.aten.clone.default
_UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})
_UNFUSED_DROPOUT = (
    "aten.empty_like.default",
    "aten.bernoulli_.float",
    "aten.div_.Scalar",
    "aten.mul.Tensor",
)
_TRACED_BATCH_NORMS = frozenset(
    {torch.ops.aten._native_batch_norm_legit.default, torch.ops.aten._native_batch_norm_legit.no_stats}
)
_BATCH_NORMS = ("aten.native_batch_norm.default", "aten.cudnn_batch_norm.default")  # a device mostly runs one
_FUSED_DROPOUT_DEVICES = frozenset({"cuda", "xpu", "lazy", "privateuseone"})


NamedOp = tuple[str, int]
"""An op by name, and its place among the ops of that name in one call of the unit."""


class Tags:
    """The ops that a unit discards. Equal tags are one object, so that equal layers share compiled code."""

    def __init__(self, sites: frozenset[NamedOp], unknown: frozenset[NamedOp], again: NamedOp | None) -> None:
        self.sites = sites
        self.unknown = unknown  # discarded call sites that no recorded call runs, so that none is met
        self.again = again  # an op, if any, that is recomputed more than once: cannot be compiled
        self.units: WeakSet[TaggedForward] = WeakSet()  # stand-ins of the units that discard these ops
        self.met: WeakKeyDictionary[Any, set[NamedOp]] = WeakKeyDictionary()  # ops met, by traced graph

    def __reduce__(self) -> Any:
        return _interned, (self.sites, self.unknown, self.again)


@functools.lru_cache(maxsize=1024)
def _interned(sites: frozenset[NamedOp], unknown: frozenset[NamedOp], again: NamedOp | None) -> Tags:
    return Tags(sites, unknown, again)


def tags_of(recorded: RecordedUnit) -> Tags:
    """Return the tags of a unit. They are made before anything is traced."""
    times = recorded.discarded_by_name()
    unknown = frozenset((site.op, site.occurrence) for site in recorded.not_recorded())
    return _interned(frozenset(times), unknown, next((site for site, n in times.items() if n > 1), None))


class TaggedForward(Protocol):
    """A stand-in for a unit's forward."""

    fqn: str

    @property
    def tags(self) -> Tags:
        """The tags of the ops that the plan discards."""
        ...

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's own forward."""
        ...


def checkpointed_for_compile(planned: TaggedForward, args: Any, kwargs: Any) -> Any:
    """Run the unit's forward as a checkpointed region of the graph that is being traced."""

    def call() -> Any:
        # Side effects (a cache that is filled, an attribute that is set) happen once, in the forward pass,
        # as they do with recipes; without this Dynamo refuses them inside a checkpoint.
        once = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer
        return once(planned.call_original, *args, **kwargs)

    return checkpoint(call, use_reentrant=False, context_fn=functools.partial(_contexts, planned.tags))


def _contexts(tags: Tags) -> Any:
    # None where no graph is being traced: it broke inside the unit.
    graph = torch._guards.TracingContext.try_get()
    if graph is None:
        _broken.update(tags.units)
        return contextlib.nullcontext(), _Broken()
    if tags.again is not None:
        raise PlanError(
            f"the plan recomputes {tags.again[0]} #{tags.again[1]} of unit {_traced_module()} more than once, but "
            "torch.compile recomputes a discarded tensor only once. Train without compiling, or plan with "
            'solver="milp".'
        )
    met = tags.met.setdefault(graph, set())
    policy = _Policy(tags.sites, met)
    forward, backward = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
    forward = with_outputs(forward, policy.note_output)
    return _Checked(forward, tags, met, _traced_module()), backward


_broken: WeakSet[TaggedForward] = WeakSet()
"""Units in which the graph broke, until the error names them: later, they would be taken for another model's."""


class _Broken(contextlib.nullcontext[None]):
    """The context in which a unit with a broken graph would run again; by then, all of them are in ``_broken``."""

    def __enter__(self) -> None:
        units = frozenset(planned.fqn for planned in _broken)
        _broken.clear()
        raise NotInGraph(
            "torch.compile broke the graph inside a unit of the plan, so the plan cannot be kept there. "
            "Compile with fullgraph=True to see where, and remove the break; or leave the unit's module "
            "uncompiled, with torch.compiler.disable, and the plan is kept as in an eager step.",
            units,
        )


def _traced_module() -> str:
    """Return the compiler's name of the module that is being traced."""
    stack = torch.fx.traceback.get_current_meta().get("nn_module_stack") or {}
    return next((str(path) for path, _ in reversed(list(stack.values()))), "(unnamed)")


class _Policy:
    """Tags the ops of one call of a unit, in the order in which they are traced."""

    def __init__(self, sites: frozenset[NamedOp], met: set[NamedOp]) -> None:
        self._sites = sites
        self._met = met
        self._seen: dict[str, int] = defaultdict(int)
        self._discarded: dict[int, torch.Tensor] = {}  # by storage; kept alive, since addresses are reused
        self._awaits_output = False

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self._awaits_output = False
        if ctx.is_recompute:  # asked by torch before 2.13; the answer does not matter while compiling
            return CheckpointPolicy.PREFER_SAVE
        in_dropout = (func is _CLONE or func is _NATIVE_DROPOUT) and _called_by_dropout()
        follows_input = _is_view(func) or (func is _CLONE and in_dropout)
        discarded = follows_input and self._is_discarded((args, kwargs))
        for name in _eager_names(func, args, in_dropout):
            # Each eager op that this one stands for is counted, or all later places of that name would be off.
            site = (name, self._seen[name])
            self._seen[name] += 1
            if site in self._sites:
                self._met.add(site)
                discarded = True
        if not discarded:
            return CheckpointPolicy.MUST_SAVE if is_heavy(func) else CheckpointPolicy.PREFER_SAVE
        self._awaits_output = True
        return CheckpointPolicy.PREFER_RECOMPUTE

    def note_output(self, out: Any) -> None:
        """Remember the output of the op that the policy was just asked about, if it is discarded."""
        if self._awaits_output:
            self._discarded.update((storage_key(t.untyped_storage()), t) for t in tensors_in(out))
        self._awaits_output = False

    def _is_discarded(self, inputs: Any) -> bool:
        base = next(iter(tensors_in(inputs)), None)
        return base is not None and storage_key(base.untyped_storage()) in self._discarded


class _Checked(TorchDispatchMode):
    """The context of the forward pass; raises at its end if some discarded call site did not occur.

    Calls of a unit may differ in what they run. A forward pass is traced twice, the first time for its aliasing and
    without a graph; so the second time it is known what all of its calls run. This class must be a dispatch mode to be
    accepted in a graph, but only the mode inside it is ever active.
    """

    def __init__(self, mode: Any, tags: Tags, met: set[NamedOp], where: str) -> None:
        super().__init__()
        self._mode = mode
        self._tags = tags
        self._met = met
        self._where = where

    @property
    def ac_graph_id(self) -> Any:
        """Which checkpoint of the graph this is; torch sets it, and the mode inside reads it."""
        return self._mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, value: Any) -> None:
        self._mode.ac_graph_id = value

    def __enter__(self) -> Any:
        return self._mode.__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self._mode.__exit__(exc_type, exc_value, traceback)
        missing = sorted((self._tags.sites - self._met) | self._tags.unknown)
        # Not after another error; and only while a graph is traced, when the calls of the first trace have been
        # seen (see above).
        if missing and exc_type is None and get_proxy_mode() is not None:
            shown = ", ".join(f"{name} #{occurrence}" for name, occurrence in missing[:3])
            more = ", ..." if len(missing) > 3 else ""
            raise NotInGraph(
                f"compiled, the unit {self._where} does not run {len(missing)} of the ops that the plan "
                f"discards in it ({shown}{more}). The plan was made for another device or batch, or "
                "torch.compile traces other ops than an eager step runs. Make the plan for the device that "
                "runs the step, or leave this module uncompiled, with torch.compiler.disable.",
                ops=frozenset(name for name, _ in missing),
            )


def _eager_names(func: Any, args: Any, in_dropout: bool) -> tuple[str, ...]:
    """Return the names of the eager ops that one traced op stands for."""
    if in_dropout and func is _CLONE:
        return ()
    if in_dropout and args[0].device.type not in _FUSED_DROPOUT_DEVICES:
        return _UNFUSED_DROPOUT
    if func in _TRACED_BATCH_NORMS:
        return _BATCH_NORMS
    return (str(func),)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return func in _UNDECLARED_VIEWS or any(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _called_by_dropout() -> bool:
    """Whether torch's Python decomposition of dropout asked for the op that is dispatched now."""
    # The decomposition is a few frames above the dispatch; the bound limits the cost for ops that it did not ask for.
    frame = sys._getframe(1).f_back
    for _ in range(16):
        if frame is None:
            return False
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where == ("torch._decomp.decompositions", "dropout"):
            return True
        frame = frame.f_back
    return False
