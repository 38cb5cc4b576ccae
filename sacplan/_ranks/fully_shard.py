"""The step of one rank that FSDP2 runs (``fully_shard``), from the recorded step of the whole model.

    patch = sharded(program, fingerprint.local_parameters, spec, world_size=8, units=["layers.*", ""])
    rank = program.with_(patch).renumbered()

A program is rewritten; no process group is needed, and none is touched:

- Parameters, optimizer state and the optimizer's temporaries become the rank's shards: those of rank 0, which
  has the largest.
- A unit gathers its parameters when its forward begins and again when its backward begins, frees them after
  both (the root keeps them from forward to backward), and reduces its gradients to shards when its backward
  is over. Each of these is an op of the program that allocates what torch allocates.
- What may run again is limited, see ``unit_limits.py``.

The order of allocations was read in ``torch/distributed/fsdp/_fully_shard`` of 2.13 (``_fsdp_state.py``,
``_fsdp_param_group.py``, ``_fsdp_collectives.py``), and is compared with the allocator in
``tests/ranks/test_fully_shard.py`` (one process that is rank 0 of eight, for many kinds of models) and
``tests/ranks/test_fsdp_plans.py`` (real ranks):

- The output of an all-gather and the unsharded parameters that are copied out of it are two buffers. In the forward
  pass the first lives until the next unit has gathered too, or the root's forward ends. In the backward pass it lives
  until it is copied out, but it is gathered one unit ahead.
- The input of a reduce-scatter lives until the next unit's backward is over. Its output is the gradients.
- A unit whose inputs need no gradient is reduced when the whole backward pass is over.

The time of a collective is its exposed part (``overlap.py``):

- On GPUs the host runs ahead. A unit's gather may start when the unit before it has copied out its own, in forward
  as in backward: it is hidden behind that unit's computation. Its reduce-scatter is hidden behind the backward of the
  next unit, which waits for it before it reduces. Gathers and reduces share the links.
- On CPUs ``fully_shard`` waits for each collective where it starts it.
- Copies into and out of the buffers are computation.

Recomputation by a plan hides more than is counted here: exposed times are those of the step without it. The time of the
optimizer's ops is proportional to the bytes of the shards.

Not counted: what NCCL or gloo allocate for themselves (NCCL does outside of torch's allocator). Not modelled:
that collectives take multiprocessors and bandwidth from computation; mixed-precision policies
(what is gathered and reduced has the parameters' own type), offloading, meshes of two dimensions, explicit
prefetching, gradients left unreduced over several backward passes. Optimizer state of another shape than its
parameter's (Adafactor's factors) is counted whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from sacplan._device.devices import DeviceSpec
from sacplan._program.fingerprint import FingerprintEntry
from sacplan._program.program import ROOT_SCOPE, Event, Op, Patch, Phase, Program, StorageKind, is_inside
from sacplan._program.rewriting import PatchBuilder
from sacplan._ranks.backward_hooks import Hooks, hooks_of
from sacplan._ranks.options import DEFAULTS, FullyShardOptions
from sacplan._ranks.shard_sizes import sizes_of_a_rank
from sacplan._ranks.shards import Parameter, itemsize, owners, parameter_bytes, parameters_of, resolve_units
from sacplan._ranks.unit_limits import GATHER, kept_at_limits
from sacplan._shard.costs import Collective, Costs
from sacplan._shard.mesh import Mesh
from sacplan._shard.overlap import Overlap
from sacplan.errors import TraceError

_COPY_OUT = "fsdp.split_with_sizes_copy.default"
_COPY_IN = "fsdp.chunk_cat.default"
_REDUCE = "c10d._reduce_scatter_base_.default"

_FREE, _OP = int(Event.FREE), int(Event.OP)


def sharded(
    program: Program,
    parameters: Sequence[FingerprintEntry],
    spec: DeviceSpec,
    world_size: int,
    units: Sequence[str],
    options: FullyShardOptions = DEFAULTS,
) -> Patch:
    """Return the rewrite for one rank, if ``fully_shard`` is called on each of the units.

    Args:
        program: of the whole model on one device; without a plan, or of a step that was traced with one applied.
        parameters: name, shape and dtype of each (``Fingerprint.local_parameters``).
        spec: the device; its allocator's rounding counts.
        world_size: ranks, at least 2.
        units: patterns for module names, see ``resolve_units``.
        options: the other arguments of ``fully_shard``. The step must have been recorded with its ``mp_policy``.

    Raises:
        TraceError: unknown units, or a model that ``fully_shard`` could not run with them.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
        raise TraceError(f"world_size is {world_size!r}; to shard it must be an int of at least 2.")
    options.check(world_size)
    found = parameters_of(program, parameters)
    names = resolve_units(units, program)
    owned = owners(found, names, program, options.mp_policy)
    if not owned:
        raise TraceError(
            f"none of the units {', '.join(map(repr, names))} has a parameter of its own: nothing would be sharded."
        )
    # The ops that may not run again are marked first, so that the rewriter copies marked ops. Those that it
    # does not change otherwise would be missing from its patch, so they are merged in; where both have one,
    # the rewriter's wins, since it was made from the marked op.
    limited = kept_at_limits(program, owned)
    patch = _FullyShardRewriter(limited, spec, world_size, names, owned, options).patch()
    kept = {i: op for i, (op, old) in enumerate(zip(limited.ops, program.ops, strict=True)) if op is not old}
    return msgspec.structs.replace(patch, changed_ops={**kept, **patch.changed_ops})


@dataclass(frozen=True, slots=True)
class _Running:
    """A collective that computation has not waited for yet."""

    op: int
    end_ms: float


@dataclass(slots=True)
class _Context:
    """The state that the units below one root share, as ``FSDPCommContext``."""

    root: str
    gathered: int | None = None  # the buffer of the last all-gather in forward
    copied_ms: float | None = None  # when the last all-gather was copied out
    reduced: list[int] = field(default_factory=list)  # inputs of reduce-scatters
    reducing: list[_Running] = field(default_factory=list)
    all_reducing: list[_Running] = field(default_factory=list)  # among replicas, waited for at the end
    order: list[_ParamGroup] = field(default_factory=list)  # in which forwards ended


@dataclass(slots=True, eq=False)
class _ParamGroup:
    """The state of one unit, as ``FSDPParamGroup``."""

    unit: str
    parameters: tuple[Parameter, ...]
    context: _Context
    ranks_after_forward: int  # over so many ranks the parameters are spread from forward to backward
    state: str = "idle"
    gathering: int | None = None  # the buffer of an all-gather that nobody has waited for
    gather: _Running | None = None
    unsharded: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()  # shards of fewer ranks, from forward to backward, one for each parameter
    indices: list[int] = field(default_factory=list)
    grads: dict[int, None] = field(default_factory=dict)  # not reduced yet
    reduced_grads: int | None = None
    all_reduced: int | None = None  # the buffer of an all-reduce, if it is not the gradient itself


class _FullyShardRewriter:
    """Goes through the events once, and does at each what the hooks of ``fully_shard`` do there."""

    def __init__(
        self,
        program: Program,
        spec: DeviceSpec,
        world_size: int,
        units: Sequence[str],
        owned: Mapping[str, tuple[Parameter, ...]],
        options: FullyShardOptions,
    ) -> None:
        self.r = program
        self.spec = spec
        self.options = options
        self.replicas, self.shards = options.replicas, world_size // options.replicas
        self.clock = Overlap.of(world_size, spec)
        self.draft = PatchBuilder(program)
        # The rewrite is a list of events in the place of each old one; an event that maps to itself is not
        # stored.
        self.out: list[tuple[int, int]] = []  # the events in the place of the current one
        self.after_casts: list[int] = []  # buffers that live until the outputs of a root are cast
        self.entered: set[int] = set()
        self.groups: dict[str, _ParamGroup] = {}
        self.contexts: dict[str, _Context] = {}
        for unit in units:
            # The outermost unit around this one. FSDP2 finds it as the state whose forward runs first
            # (``FSDPState._lazy_init``), and shares streams and buffers among all units below it.
            root = min((u for u in units if unit == u or is_inside(unit, u)), key=len)
            context = self.contexts.setdefault(root, _Context(root))
            # A unit whose parameters all belong to inner units has no parameter group. It only frees the last
            # all-gather when it is a root.
            if unit in owned:
                after_forward = options.ranks_after_forward(self.shards, unit == root)
                self.groups[unit] = _ParamGroup(unit, owned[unit], context, after_forward)
        self.unit_calls = {scope: unit for unit in units for scope in program.calls[unit]}
        self.around = self._calls_around()
        self.trained = self._trained()
        self.gradients = self._gradients()
        self.reduced: dict[int, int] = {}  # gradients that were freed, to the storages of their shards
        self.awaited: set[int] = set()  # gradients that live until they are reduced
        for s, n_bytes in enumerate(sizes_of_a_rank(program, self._owned(), self.shards, spec)):
            if n_bytes != program.storage_bytes[s]:
                self.draft.storage_bytes[s] = n_bytes

    def _calls_around(self) -> dict[int, tuple[int, ...]]:
        """Return, by scope, the calls of units with parameters around it (itself included), the innermost first."""
        found: dict[int, tuple[int, ...]] = {ROOT_SCOPE: ()}
        for scope, call in enumerate(self.r.scopes):  # parents come first
            own = (scope,) if self.unit_calls.get(scope) in self.groups else ()
            found[scope] = own + found[call.parent]
        return found

    def _trained(self) -> dict[int, list[tuple[_ParamGroup, Parameter]]]:
        """Return, by storage of a gradient, the parameters that it is for; several gradients may lie on one storage."""
        found: dict[int, list[tuple[_ParamGroup, Parameter]]] = defaultdict(list)
        for group in self.groups.values():
            for p in group.parameters:
                if p.storage in self.r.gradients:
                    found[self.r.tensors[self.r.gradients[p.storage]].storage].append((group, p))
        return found

    def _gradients(self) -> dict[int, _ParamGroup]:
        """Return, by storage of a gradient, the unit that reduces it.

        A gradient that another one has replaced is known as the gradient of no parameter. It goes to the innermost unit
        around its op that has a parameter of its size.
        """
        r, found = self.r, {}
        started = set(r.initial)
        last = {r.tensors[t].storage for t in r.gradients.values()}
        for s, kind in enumerate(r.storage_kinds):
            writer = r.writer.get(s)
            # Gradients that were there before the step are reduced already, and a storage that no op writes
            # is not made by this backward pass.
            if kind != StorageKind.GRADIENT or s in started or writer is None:
                continue
            if s in last:
                if (
                    s in self.trained
                ):  # else the parameter belongs to no unit, and nothing reduces its gradient
                    found[s] = self.trained[s][0][0]
                continue
            groups = [self._group(call) for call in self.around[r.ops[writer].scope]]
            if not groups and "" in self.groups:
                # A gradient of an op outside of all calls, such as the loss.
                groups = [self.groups[""]]  # of a parameter that is used outside of all calls
            fitting = (
                group
                for group in groups
                for p in group.parameters
                if p.trainable and self.spec.round_up(p.gradient_bytes) == r.storage_bytes[s]
            )
            trained = (group for group in groups if any(p.trainable for p in group.parameters))
            group = next(fitting, next(trained, None))
            if group is not None:
                found[s] = group
        return found

    def _group(self, call: int) -> _ParamGroup:
        return self.groups[self.unit_calls[call]]

    # --- the rewrite --------------------------------------------------------------------------------

    def patch(self) -> Patch:
        """Return the rewrite."""
        r, hooks = self.r, hooks_of(self.r, self.around)
        events = self.draft.events
        for position, (code, arg) in enumerate(r.events):
            self.out = []
            if self.after_casts and not self._casts_output(code, arg):
                for buffer in self.after_casts:
                    self._free(buffer)
                self.after_casts.clear()
            if position in hooks:
                self._run_hooks(hooks[position])
            # The recorded step frees a gradient in the optimizer or at the end. On a rank the unsharded
            # gradient is freed when it is reduced (``_post_backward``), so the recorded event is dropped.
            awaited = code == Event.FREE and (arg in self.reduced or arg in self.awaited)
            if not awaited:
                self.out.append((code, arg))
            if code == Event.OP:
                # The op is in ``out`` already; this does the bookkeeping around it.
                self._copy_op(arg)
            elif code == Event.ENTER:
                self.entered.add(arg)
                self._pre_forward(arg)
            elif code == Event.EXIT:
                self._post_forward(arg)
            elif code == Event.FREE and not awaited and arg in self.gradients:
                self.gradients[arg].grads.pop(arg, None)  # it was replaced by another
            if self.out != [(code, arg)]:
                events[position] = tuple(self.out)
        # What comes after the last event: the end of the root's forward in inference, or hooks if the step ends with
        # its backward pass.
        self.out = []
        for buffer in self.after_casts:
            self._free(buffer)
        if len(r.events) in hooks:
            self._run_hooks(hooks[len(r.events)])
        if self.out:
            events[len(r.events)] = tuple(self.out)
        return msgspec.structs.replace(
            self.draft.patch(),
            parameter_bytes=parameter_bytes(r, self._owned(), self.draft.storage_bytes, self.spec),
        )

    def _casts_output(self, code: int, arg: int) -> bool:
        """Whether an event after the end of a root's forward belongs to the cast of its outputs (``output_dtype``)."""
        policy = self.options.mp_policy
        if policy is None or policy.output_dtype is None:
            return False
        if code != Event.OP:
            return code in (Event.PACK, Event.FREE)
        op = self.r.ops[arg]
        dtypes = {self.r.tensors[t].dtype for t in op.outputs if t >= 0}
        return op.name == "aten._to_copy.default" and dtypes == {policy.output_dtype}

    def _owned(self) -> Iterator[Parameter]:
        for group in self.groups.values():
            yield from group.parameters

    def _copy_op(self, index: int) -> None:
        op = self.r.ops[index]
        self.clock.compute(op.time_ms)
        # The optimizer reads the reduced shard in the place of each gradient. Several gradients of a unit are
        # one storage now, hence ``dict.fromkeys``.
        if op.phase == Phase.OPTIMIZER and self.reduced:
            reads = tuple(dict.fromkeys(self.reduced.get(s, s) for s in op.reads))
            mutates = tuple(dict.fromkeys(self.reduced.get(s, s) for s in op.mutates))
            time_ms = op.time_ms * self._share(op, (*reads, *op.writes))
            self.draft.ops[index] = msgspec.structs.replace(op, reads=reads, mutates=mutates, time_ms=time_ms)
        elif op.phase == Phase.BACKWARD:
            for s in op.mutates:
                # Gradient accumulation: the recorded op adds to the full gradient of the pass before. On a
                # rank that is a shard, to which FSDP2 adds after it has reduced this pass's gradient. So what
                # the op reads besides stays alive until then.
                if s in self.reduced:  # added to a gradient of an earlier pass, which is in shards already
                    self._await(self.gradients[s], (t for t in op.reads if t not in op.mutates))
            for s in op.writes:
                if s in self.gradients:
                    self.gradients[s].grads[s] = None

    def _share(self, op: Op, storages: Iterable[int]) -> float:
        """Return the bytes that an op touches on a rank, as a share of those that it touches in the whole step."""
        # The optimizer is bound by memory, so its time is taken to be proportional to its bytes. At most 1: a
        # shard is never larger than the tensor, but rounding and padding may make it appear so.
        whole = sum(self.r.storage_bytes[s] for s in {*op.reads, *op.writes})
        touched = sum(self.draft.storage_bytes[s] for s in set(storages))
        return min(1.0, touched / whole) if whole else 1.0

    def _await(self, group: _ParamGroup, gradients: Iterable[int]) -> None:
        for s in gradients:
            self.awaited.add(s)
            self.gradients[s] = group
            group.grads[s] = None

    def _collective(
        self,
        name: str,
        phase: Phase,
        group: _ParamGroup,
        reads: Iterable[int],
        n_bytes: int,
        kind: StorageKind,
        workspace_bytes: int = 0,
        time_ms: float = 0.0,
    ) -> int:
        """Add an op that allocates one storage, and return the storage. A collective has its exposed time."""
        (storage,) = self._allocating(name, phase, group, reads, [n_bytes], kind, workspace_bytes, time_ms)
        return storage

    def _changing(self, name: str, group: _ParamGroup, storage: int) -> None:
        """Add an op of the backward pass that changes a storage in place."""
        self._allocating(name, Phase.BACKWARD, group, (storage,), (), StorageKind.OTHER, mutates=(storage,))

    def _allocating(
        self,
        name: str,
        phase: Phase,
        group: _ParamGroup,
        reads: Iterable[int],
        sizes: Iterable[int],
        kind: StorageKind,
        workspace_bytes: int = 0,
        time_ms: float = 0.0,
        mutates: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Add an op that allocates storages of these sizes, and return them."""
        storages = tuple(self.draft.new_storage(n_bytes, kind) for n_bytes in sizes)
        op = Op(
            name=name,
            phase=phase,
            # In backward no call is running, so the op goes to the first call of the unit.
            scope=self.r.calls[group.unit][0] if phase == Phase.BACKWARD else self._running(group),
            time_ms=time_ms,
            flops=0,
            workspace_bytes=workspace_bytes,
            reads=tuple(reads),
            writes=storages,
            mutates=mutates,
            # A collective must run on all ranks in the same order, so a plan may never run it again on its
            # own.
            recomputable=False,
        )
        self.out.append((_OP, self.draft.ops.add(op)))
        return storages

    def _started(self, kind: Collective, n_bytes: int, ranks: int, since: float | None = None) -> _Running:
        """Start the collective of the op that was added last, among ``ranks`` neighbours or among the replicas."""
        at_once = self.spec.kind == "cpu"
        axes = Mesh.of({"outer": self.replicas * self.shards // ranks, "inner": ranks})
        axis = 1
        if kind == "all_reduce":
            axes, axis = Mesh.of({"replicas": self.replicas, "shards": self.shards}), 0
        time_ms = Costs.of(axes, self.spec).collective_ms(kind, n_bytes, axis)
        end = self.clock.send(time_ms, None if at_once else since)
        running = _Running(len(self.draft.ops) - 1, end)
        # Without streams (``_fsdp_param_group.py`` on a CPU) nothing overlaps: the collective is waited for
        # where it starts.
        if at_once:
            self._waited(running)
        return running

    def _waited(self, running: _Running) -> None:
        """Have computation wait for a collective, and add the wait to the time of its op."""
        op = self.draft.ops[running.op]
        exposed = self.clock.wait(running.end_ms)
        self.draft.ops[running.op] = msgspec.structs.replace(op, time_ms=op.time_ms + exposed)

    def _waited_for_reduces(self, context: _Context) -> None:
        for running in context.reducing:
            self._waited(running)
        context.reducing.clear()

    def _running(self, group: _ParamGroup) -> int:
        """Return the call of a unit that runs now."""
        return next(s for s in reversed(self.r.calls[group.unit]) if s in self.entered)

    def _free(self, storage: int) -> None:
        self.out.append((_FREE, storage))

    # --- what fully_shard does ----------------------------------------------------------------------

    def _run_hooks(self, hooks: Hooks) -> None:
        for call in hooks.ended:
            self._post_backward(self._group(call))
        if hooks.final:
            self._final_callback()
        for call in hooks.begun:
            self._pre_backward(self._group(call))

    def _pre_forward(self, call: int) -> None:
        unit = self.unit_calls.get(call)
        group = self.groups.get(unit) if unit is not None else None
        if group is not None:
            group.state = "forward"
            # In forward a unit gathers and waits at once. The overlap comes from the stream, on which this
            # gather may have started when the unit before had copied out (``copied_ms``).
            self._unshard(group, Phase.FORWARD)
            self._wait(group, Phase.FORWARD)

    def _post_forward(self, call: int) -> None:
        unit = self.unit_calls.get(call)
        if unit is None:
            return
        group = self.groups.get(unit)
        if group is not None:
            if group.ranks_after_forward == self.shards:
                self._reshard(group)
            elif group.ranks_after_forward > 1:
                self._keep_shards(group)
            # A unit that is called several times has several entries; each of its backwards pops the last one
            # (``_record_post_forward`` in ``_fsdp_param_group.py``).
            group.indices.append(len(group.context.order))
            group.context.order.append(group)
            group.state = "idle"
        context = self.contexts.get(unit)
        # ``contexts`` is keyed by root: only the end of the root's forward frees the last all-gather, since
        # no unit gathers after it (``FSDPState._post_forward``).
        if context is not None and context.gathered is not None:
            # As above, a local variable of ``_post_forward`` holds the buffer while outputs are cast.
            self.after_casts.append(context.gathered)
            context.gathered = None

    def _pre_backward(self, group: _ParamGroup) -> None:
        if group.state == "backward":  # a hook on each output, but the first one gathers
            return
        group.state = "backward"
        self._unshard(group, Phase.BACKWARD)
        self._wait(group, Phase.BACKWARD)
        if group.indices:
            # The backward pass is taken to run the units in the reverse order of their forwards: prefetch the next one.
            index = group.indices.pop()
            # At 0 this unit ran first in forward: there is none before it to prefetch.
            if index > 0:
                self._unshard(group.context.order[index - 1], Phase.BACKWARD)

    def _unshard(self, group: _ParamGroup, phase: Phase) -> None:
        if group.gathering is None and not group.unsharded:  # else it was prefetched, or never resharded
            # The host reaches this point long before the device. So the gather counts as started when the
            # unit before it had copied out its own, not now.
            ranks = group.ranks_after_forward if group.kept else self.shards
            reads = group.kept or tuple(p.storage for p in group.parameters)
            n_bytes = sum(p.gathered_bytes(self.shards) for p in group.parameters)
            # Shards of another type are cast into one flat tensor (``_get_param_all_gather_inputs``), which lives until
            # they are copied into the buffer. Shards kept after the forward have the right type, and are copied too.
            cast_bytes = sum(p.gathered_bytes(self.shards) for p in group.parameters if p.is_cast) // ranks
            group.gathering = self._collective(
                GATHER,
                phase,
                group,
                reads,
                self.spec.round_up(n_bytes),
                StorageKind.OTHER,
                self.spec.round_up(cast_bytes),
                time_ms=self.clock.copy(cast_bytes) if cast_bytes else 0.0,
            )
            group.gather = self._started("all_gather", n_bytes, ranks, group.context.copied_ms)

    def _wait(self, group: _ParamGroup, phase: Phase) -> None:
        # Unsharded already: it was not resharded after forward.
        if group.gathering is None:
            return
        context, buffer, group.gathering = group.context, group.gathering, None
        if group.gather is not None:
            self._waited(group.gather)
        sizes = [self.spec.round_up(p.gathered_bytes(self.shards)) for p in group.parameters]
        time_ms = self.clock.copy(sum(sizes))
        context.copied_ms = self.clock.now
        # One storage for all of them, unless they are freed one by one.
        if group.ranks_after_forward in (1, self.shards):
            sizes = [sum(sizes)]
        group.unsharded = self._allocating(
            _COPY_OUT, phase, group, (buffer,), sizes, StorageKind.PARAMETER, time_ms=time_ms
        )
        for shard in group.kept:
            self._free(shard)
        group.kept = ()
        if phase == Phase.FORWARD:
            # ``wait_for_unshard`` lets go of the buffer of the unit before at its start, but a local variable holds it
            # until the function returns: two buffers are alive while the second one is copied out.
            if context.gathered is not None:
                self._free(context.gathered)
            # Kept until the next unit has gathered, so that its all-gather can overlap with this copy-out.
            context.gathered = buffer
        else:
            self._free(buffer)

    def _reshard(self, group: _ParamGroup) -> None:
        for storage in group.unsharded:
            self._free(storage)
        group.unsharded = ()

    def _keep_shards(self, group: _ParamGroup) -> None:
        """Copy the shards that the unit keeps until its backward, and free its parameters, one after the other."""
        kept = []
        for p, storage in zip(group.parameters, group.unsharded, strict=True):
            n_bytes = p.gathered_bytes(self.shards) // group.ranks_after_forward
            kept.append(
                self._collective(
                    "aten.clone.default",
                    Phase.FORWARD,
                    group,
                    (storage,),
                    self.spec.round_up(n_bytes),
                    StorageKind.PARAMETER,
                    time_ms=self.clock.copy(n_bytes),
                )
            )
            self._free(storage)
        group.kept, group.unsharded = tuple(kept), ()

    def _post_backward(self, group: _ParamGroup) -> None:
        group.state = "reduced"
        # The order is that of ``FSDPParamGroup.post_backward``: free the unsharded parameters, then the input
        # of the reduction before, and only then allocate the input of this one.
        self._reshard(group)
        context = group.context
        for buffer in context.reduced:
            self._free(buffer)
        context.reduced.clear()
        self._waited_for_reduces(context)
        # No parameter of the unit is trained, or none got a gradient in this pass.
        if not group.grads:
            return
        if group.all_reduced is not None:  # of the pass before
            self._free(group.all_reduced)
            group.all_reduced = None
        trained = self._with_gradient(group)
        elements = sum(p.shard_elements(self.shards) for p in trained)
        dtype, reduce_dtype = trained[0].dtype, self._reduce_dtype(trained[0])
        n_bytes = self.shards * elements * itemsize(reduce_dtype)
        # CUDA has a kernel for it; on a CPU what has to be padded is copied first.
        padded = (p for p in trained if self.spec.kind == "cpu" and p.is_padded(self.shards))
        workspace = sum(self.spec.round_up(p.gathered_bytes(self.shards)) for p in padded)
        full = self._collective(
            _COPY_IN,
            Phase.BACKWARD,
            group,
            group.grads,
            self.spec.round_up(n_bytes),
            StorageKind.OTHER,
            workspace,
            time_ms=self.clock.copy(n_bytes),
        )
        # ``foreach_reduce`` drops the unsharded gradients when they are copied in, before it allocates the
        # output.
        for s in group.grads:
            self._free(s)
        shard = self._collective(
            _REDUCE,
            Phase.BACKWARD,
            group,
            (full,),
            self.spec.round_up(n_bytes // self.shards),
            StorageKind.GRADIENT,
        )
        context.reducing.append(self._started("reduce_scatter", n_bytes, self.shards))
        if self.replicas > 1:
            self._changing("c10d.allreduce_.default", group, shard)
            context.all_reducing.append(self._started("all_reduce", n_bytes // self.shards, self.replicas))
        if reduce_dtype != dtype:
            shard = self._cast_shard(group, shard, elements * itemsize(dtype))
        # The first pass of an accumulation leaves its shard as the gradient; later ones add theirs to it.
        if group.reduced_grads is None:
            group.reduced_grads = shard
        else:
            self._free(shard)  # added to what is there
        self.reduced.update(dict.fromkeys(group.grads, group.reduced_grads))
        group.grads.clear()
        context.reduced.append(full)

    def _cast_shard(self, group: _ParamGroup, reduced: int, n_bytes: int) -> int:
        """Cast reduced gradients to the type of the shards, and return the storage of the result."""
        shard = self._collective(
            "aten._to_copy.default",
            Phase.BACKWARD,
            group,
            (reduced,),
            self.spec.round_up(n_bytes),
            StorageKind.GRADIENT,
            time_ms=self.clock.copy(n_bytes),
        )
        # Among replicas the unit holds what was reduced until its next reduction, or the end of the backward pass, so
        # that no other reduction gets the same memory (``AllReduceState`` in ``_fsdp_param_group.py``).
        if self.replicas > 1:
            group.all_reduced = reduced
        else:
            self._free(reduced)
        return shard

    def _with_gradient(self, group: _ParamGroup) -> list[Parameter]:
        """Return the parameters whose gradients the unit reduces now: those that have one."""
        found = [
            p
            for p in group.parameters
            if p.storage in self.r.gradients
            and self.r.tensors[self.r.gradients[p.storage]].storage in group.grads
        ]
        # A gradient of an earlier pass may have been replaced by another: then its parameter is not known.
        known = all(s in self.trained for s in group.grads)
        return found if known and found else [p for p in group.parameters if p.trainable]

    def _reduce_dtype(self, p: Parameter) -> str:
        """Return the type in which the gradients of a unit are reduced, one of whose parameters this is."""
        policy = self.options.mp_policy
        computed = (p.compute_dtype or p.dtype).removeprefix("torch.")
        if policy is None or policy.reduce_dtype is None or policy.reduce_dtype == policy.param_dtype:
            return f"torch.{computed}"
        return f"torch.{policy.reduce_dtype}"

    def _final_callback(self) -> None:
        # As in ``FSDPState._root_post_backward_final_callback``: first the units whose hook did not run, then
        # what is left in flight.
        for group in self.groups.values():
            if group.state != "reduced":  # no input needed a gradient, so no hook has run
                self._post_backward(group)
            group.state = "idle"
            group.indices.clear()
            if group.gathering is not None:  # gathered ahead, and never wanted
                self._free(group.gathering)
                group.gathering = None
            if group.all_reduced is not None:
                self._free(group.all_reduced)
                group.all_reduced = None
        for context in self.contexts.values():
            self._waited_for_reduces(context)
            for running in context.all_reducing:
                self._waited(running)
            context.all_reducing.clear()
            context.copied_ms = None
            context.order.clear()
            for buffer in context.reduced:
                self._free(buffer)
            context.reduced.clear()
