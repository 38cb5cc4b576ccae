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
  pass the first lives until the next unit has copied out its own, or the root's forward ends. In the backward pass it
  lives until it is copied out, but it is gathered one unit ahead.
- The input of a reduce-scatter lives until the next unit's backward is over. Its output is the gradients. Only
  parameters that have a gradient are in it.
- A unit whose inputs need no gradient is reduced when the whole backward pass is over.
- With ``reshard_after_forward=n`` a unit copies the shards that ``n`` ranks hold together out of its unsharded
  parameters, one after the other, and gathers these in the backward pass.

With a mixed-precision policy the step is recorded with units that compute in ``param_dtype``
(``_record/mixed_precision.py``), while parameters keep the size of their own type. What is added here has one of three
types: an all-gather ``param_dtype``, and before it a flat tensor in which the shards are cast; a reduce-scatter
``reduce_dtype``; the gradients after it the type of the shards. With replicas the output of the reduce-scatter is
all-reduced in place, and if it is cast afterwards, each unit holds it until the backward pass is over.

With ``CPUOffloadPolicy`` shards, reduced gradients and the optimizer are on the host, see ``offload.py``.

The time of a collective is its exposed part (``overlap.py``):

- On GPUs the host runs ahead. A unit's gather may start when the unit before it has copied out its own, in forward
  as in backward: it is hidden behind that unit's computation. Its reduce-scatter is hidden behind the backward of the
  next unit, which waits for it before it reduces. Gathers and reduces share the links.
- On CPUs ``fully_shard`` waits for each collective where it starts it.
- Copies into and out of the buffers are computation.

Recomputation by a plan hides more than is counted here: exposed times are those of the step without it. The time of the
optimizer's ops is proportional to the bytes of the shards.

Not counted: what NCCL or gloo allocate for themselves (NCCL does outside of torch's allocator). Not modelled:
optimizers that step in the backward pass (``sacplan.ranks`` records them), that collectives take multiprocessors and
bandwidth from computation, different arguments for different units, explicit prefetching, gradients left unreduced over
several backward passes, and links of their own for all-reduces among replicas. Optimizer state of another shape than
its parameter's (Adafactor's factors) is counted whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from sacplan._device.devices import DeviceSpec
from sacplan._program.fingerprint import FingerprintEntry
from sacplan._program.program import ROOT_SCOPE, Event, Op, Patch, Phase, Program, StorageKind, is_inside
from sacplan._ranks.backward_hooks import Hooks, hooks_of
from sacplan._ranks.offload import HostMemory, HostShards, gather_inputs_bytes, host_bytes_of, host_memory
from sacplan._ranks.options import DEFAULTS, FullyShardOptions
from sacplan._ranks.param_groups import CommContext, ParamGroup, Reduction
from sacplan._ranks.rank_ops import RankOps
from sacplan._ranks.shard_sizes import sizes_of_a_rank
from sacplan._ranks.shards import Parameter, owners, parameter_bytes, parameters_of, resolve_units
from sacplan._ranks.unit_limits import GATHER, kept_at_limits
from sacplan.errors import TraceError

_COPY_OUT = "fsdp.split_with_sizes_copy.default"
_COPY_IN = "fsdp.chunk_cat.default"
_REDUCE = "c10d._reduce_scatter_base_.default"
_ALL_REDUCE = "c10d.allreduce_.default"
_NORM = "aten.linalg_vector_norm.default"
_CAST = "aten._to_copy.default"


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
        raise TraceError(f"{world_size!r} ranks; to shard, give an int of at least 2.")
    options.check(world_size)
    trains = any(op.phase == Phase.BACKWARD for op in program.ops)
    if not trains and options.reshard_after_forward not in (None, True):
        raise TraceError(
            f"reshard_after_forward is {options.reshard_after_forward} and the step has no backward pass: units would "
            "keep their parameters until the next step, which is not modelled. Leave it out, or give True."
        )
    found = parameters_of(program, parameters)
    names = resolve_units(units, program)
    owned = owners(found, names, program, options.mp_policy, options.ignored_params)
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


def on_host(
    program: Program,
    parameters: Sequence[FingerprintEntry],
    world_size: int,
    units: Sequence[str],
    options: FullyShardOptions,
) -> HostMemory:
    """Return what a rank takes of the host's memory; nothing without an ``offload_policy``. Arguments: ``sharded``."""
    policy = options.offload_policy
    if policy is None:
        return HostMemory(0, 0, 0)
    names = resolve_units(units, program)
    found = parameters_of(program, parameters)
    owned = owners(found, names, program, options.mp_policy, options.ignored_params)
    shards = world_size // options.replicas
    return host_memory(
        program, [p for unit in owned.values() for p in unit], shards, pinned=policy.pin_memory
    )


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
        # The rewrite is a list of events in the place of each old one; an event that maps to itself is not stored.
        self.ops = RankOps(program, spec, self.shards, self.replicas)
        self.after_casts: list[int] = []  # buffers that live until the outputs of a root are cast
        self.entered: set[int] = set()
        self.groups: dict[str, ParamGroup] = {}
        self.contexts: dict[str, CommContext] = {}
        for unit in units:
            # The outermost unit around this one. FSDP2 finds it as the state whose forward runs first
            # (``FSDPState._lazy_init``), and shares streams and buffers among all units below it.
            root = min((u for u in units if unit == u or is_inside(unit, u)), key=len)
            context = self.contexts.setdefault(root, CommContext(root))
            # A unit whose parameters all belong to inner units has no parameter group. It only frees the last
            # all-gather when it is a root.
            if unit in owned:
                after_forward = options.ranks_after_forward(self.shards, unit == root)
                self.groups[unit] = ParamGroup(unit, owned[unit], context, self.shards, after_forward)
        self.unit_calls = {scope: unit for unit in units for scope in program.calls[unit]}
        self.around = self._calls_around()
        self.trained = self._trained()
        self.gradients = self._gradients()
        self.reduced: dict[int, int] = {}  # gradients that were freed, to the storages of their shards
        self.awaited: set[int] = set()  # gradients that live until they are reduced
        self.host = self._on_host()
        for s, n_bytes in enumerate(sizes_of_a_rank(program, self._owned(), self.shards, spec)):
            n_bytes = 0 if self.host is not None and s in self.host.n_bytes else n_bytes
            if n_bytes != program.storage_bytes[s]:
                self.ops.draft.storage_bytes[s] = n_bytes
        for group in self.groups.values():
            self._begin_with_gradients(group)

    def _begin_with_gradients(self, group: ParamGroup) -> None:
        """Let the gradients that were there before the step be what earlier micro-steps reduced: views of one shard."""
        started = set(self.r.initial)
        having = {
            p.storage: self._gradient_of(p)
            for p in group.parameters
            if p.storage in self.r.gradients and self._gradient_of(p) in started
        }
        if not having:
            return
        trained = [p for p in group.parameters if p.storage in having]
        sizes = Reduction.of(trained, self.shards, self.options.mp_policy)
        first = next(iter(having.values()))
        # The shard takes the place of one of the gradients, and the others get no bytes.
        for s in having.values():
            self.ops.draft.storage_bytes[s] = 0
        self.ops.draft.storage_bytes[first] = self.spec.round_up(sizes.shard_bytes)
        group.reduced_grads = first
        group.with_grad |= having.keys()
        self.reduced.update(dict.fromkeys(having.values(), first))
        self.gradients.update(dict.fromkeys(having.values(), group))

    def _on_host(self) -> HostShards | None:
        """Return what lies on the host; None: nothing does, or the device is the host."""
        policy = self.options.offload_policy
        if policy is None or self.spec.kind == "cpu":
            return None
        owned = tuple(self._owned())
        return HostShards.of(self.r, owned, self.shards, self.spec, pinned=policy.pin_memory)

    def _calls_around(self) -> dict[int, tuple[int, ...]]:
        """Return, by scope, the calls of units with parameters around it (itself included), the innermost first."""
        found: dict[int, tuple[int, ...]] = {ROOT_SCOPE: ()}
        for scope, call in enumerate(self.r.scopes):  # parents come first
            own = (scope,) if self.unit_calls.get(scope) in self.groups else ()
            found[scope] = own + found[call.parent]
        return found

    def _trained(self) -> dict[int, list[ParamGroup]]:
        """Return, by storage of a gradient, the units with the parameters that it is for.

        Several gradients may lie on one storage.
        """
        found: dict[int, list[ParamGroup]] = defaultdict(list)
        for group in self.groups.values():
            for p in group.parameters:
                if p.storage in self.r.gradients:
                    found[self._gradient_of(p)].append(group)
        return found

    def _gradient_of(self, p: Parameter) -> int:
        return self.r.tensors[self.r.gradients[p.storage]].storage

    def _gradients(self) -> dict[int, ParamGroup]:
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
                # Else the parameter belongs to no unit, and nothing reduces its gradient.
                if s in self.trained:
                    found[s] = self.trained[s][0]
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

    def _group(self, call: int) -> ParamGroup:
        return self.groups[self.unit_calls[call]]

    # --- the rewrite --------------------------------------------------------------------------------

    def patch(self) -> Patch:
        """Return the rewrite."""
        r, hooks = self.r, hooks_of(self.r, self.around)
        events = self.ops.draft.events
        for position, (code, arg) in enumerate(r.events):
            self.ops.out = []
            if self.after_casts and not self._casts_output(code, arg):
                for buffer in self.after_casts:
                    self.ops.free(buffer)
                self.after_casts.clear()
            if position in hooks:
                self._run_hooks(hooks[position])
            # The recorded step frees a gradient in the optimizer or at the end. On a rank the unsharded
            # gradient is freed when it is reduced (``_post_backward``), so the recorded event is dropped.
            awaited = code == Event.FREE and (arg in self.reduced or arg in self.awaited)
            norms = self._replicated_norms(arg) if code == Event.OP else {}
            if not awaited:
                self.ops.out.append((code, arg))
            if code == Event.OP:
                # The op is in ``out`` already; this does the bookkeeping around it.
                self._copy_op(arg, norms)
                for norm in norms.values():
                    self.ops.free(norm)
            elif code == Event.ENTER:
                self.entered.add(arg)
                self._pre_forward(arg)
            elif code == Event.EXIT:
                self._post_forward(arg)
            elif code == Event.FREE and not awaited and arg in self.gradients:
                self.gradients[arg].grads.pop(arg, None)  # it was replaced by another
            if self.ops.out != [(code, arg)]:
                events[position] = tuple(self.ops.out)
        # What comes after the last event: the end of the root's forward in inference, or hooks if the step ends with
        # its backward pass.
        self.ops.out = []
        for buffer in self.after_casts:
            self.ops.free(buffer)
        if len(r.events) in hooks:
            self._run_hooks(hooks[len(r.events)])
        if self.ops.out:
            events[len(r.events)] = tuple(self.ops.out)
        return msgspec.structs.replace(
            self.ops.draft.patch(),
            parameter_bytes=parameter_bytes(r, self._owned(), self.ops.draft.storage_bytes, self.spec),
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
        return op.name == _CAST and dtypes == {policy.output_dtype}

    def _owned(self) -> Iterator[Parameter]:
        for group in self.groups.values():
            yield from group.parameters

    def _replicated_norms(self, index: int) -> dict[int, int]:
        """Reduce the norms of sharded gradients before the op that takes their norm; return the storages by theirs.

        ``clip_grad_norm_`` takes the norm of each gradient, stacks them, and takes the norm of that. On DTensors each
        rank has the norms of its shards (``_NormPartial``), and the last norm needs those of all ranks: they are raised
        to the power of the norm, reduced, and the root is taken (``torch/distributed/tensor/_ops/_math_ops.py``).
        """
        r, op = self.r, self.r.ops[index]
        if op.phase != Phase.OPTIMIZER or op.name != _NORM or not self.reduced:
            return {}
        # The largest of the largest values is taken first, and the ranks reduce that single number.
        if "inf" in op.arguments.lower():
            return {}
        found = {}
        for stacked in op.reads:
            writer = r.writer.get(stacked)
            if writer is None or r.ops[writer].name != "aten.stack.default":
                continue
            makers = (r.ops[w] for s in r.ops[writer].reads if (w := r.writer.get(s)) is not None)
            if not any("norm" in maker.name and self.reduced.keys() & set(maker.reads) for maker in makers):
                continue
            n_bytes = r.storage_bytes[stacked]
            (found[stacked],) = self.ops.add(
                "_c10d_functional.all_reduce.default",
                Phase.OPTIMIZER,
                ROOT_SCOPE,
                (stacked,),
                [n_bytes if self.host is None else 0],
                StorageKind.TEMPORARY,
                workspace_bytes=2 * self.spec.round_up(n_bytes) if self.host is None else 0,
            )
            self.ops.wait(self.ops.start("all_reduce", n_bytes, self.shards))
        return found

    def _copy_op(self, index: int, instead: Mapping[int, int]) -> None:
        """Do what a rank does at an op of the recorded step; ``instead``: storages that it reads in place of others."""
        op = self.r.ops[index]
        self.ops.clock.compute(op.time_ms)
        # The optimizer reads the reduced shard in the place of each gradient. Several gradients of a unit are
        # one storage now, hence ``dict.fromkeys``.
        if op.phase == Phase.OPTIMIZER and self.reduced:
            reads = tuple(dict.fromkeys(instead.get(s, self.reduced.get(s, s)) for s in op.reads))
            mutates = tuple(dict.fromkeys(self.reduced.get(s, s) for s in op.mutates))
            touched = (*reads, *op.writes)
            time_ms, workspace_bytes = op.time_ms * self._share(op, touched), op.workspace_bytes
            on_host_ms = None if self.host is None else self.host.steps(op, touched)
            if on_host_ms is not None:
                time_ms, workspace_bytes = on_host_ms, 0
            self.ops.draft.ops[index] = msgspec.structs.replace(
                op, reads=reads, mutates=mutates, time_ms=time_ms, workspace_bytes=workspace_bytes
            )
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
        touched = sum(self.ops.draft.storage_bytes[s] for s in set(storages))
        return min(1.0, touched / whole) if whole else 1.0

    def _await(self, group: ParamGroup, gradients: Iterable[int]) -> None:
        for s in gradients:
            self.awaited.add(s)
            self.gradients[s] = group
            group.grads[s] = None

    def _collective(
        self,
        name: str,
        phase: Phase,
        group: ParamGroup,
        reads: Iterable[int],
        n_bytes: int,
        kind: StorageKind,
        workspace_bytes: int = 0,
        time_ms: float = 0.0,
    ) -> int:
        """Add an op that allocates one storage, and return the storage. A collective has its exposed time."""
        (storage,) = self.ops.add(
            name,
            phase,
            self._scope(group, phase),
            reads,
            [n_bytes],
            kind,
            workspace_bytes=workspace_bytes,
            time_ms=time_ms,
        )
        return storage

    def _scope(self, group: ParamGroup, phase: Phase) -> int:
        """Return the call that an op of a unit belongs to."""
        calls = self.r.calls[group.unit]
        # In backward no call is running, so the op goes to the first call of the unit.
        return calls[0] if phase == Phase.BACKWARD else next(s for s in reversed(calls) if s in self.entered)

    def _waited_for_reduces(self, context: CommContext) -> None:
        for running in context.reducing:
            self.ops.wait(running)
        context.reducing.clear()

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

    def _pre_backward(self, group: ParamGroup) -> None:
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

    def _unshard(self, group: ParamGroup, phase: Phase) -> None:
        if group.gathering is None and not group.unsharded:  # else it was prefetched, or never resharded
            # The host reaches this point long before the device. So the gather counts as started when the
            # unit before it had copied out its own, not now.
            n_bytes, ranks = group.gathered_bytes, group.gathering_ranks
            waits_ms, behind_ms = self._from_host_ms(group)
            group.gathering = self._collective(
                GATHER,
                phase,
                group,
                group.sources,
                n_bytes,
                StorageKind.OTHER,
                workspace_bytes=self._gather_workspace_bytes(group),
                time_ms=self.ops.clock.compute(waits_ms) + self.ops.copy_ms(group.cast_bytes),
            )
            group.gather = self.ops.start(
                "all_gather", n_bytes, ranks, group.context.copied_ms, before_ms=behind_ms
            )

    def _gather_workspace_bytes(self, group: ParamGroup) -> int:
        """Return what an all-gather takes beside its buffer: its inputs, if they are not the shards themselves."""
        if self.options.offload_policy is None:
            return self.spec.round_up(group.cast_bytes)
        # Kept shards are on the device and have the right type, and only the path without offloading copies them.
        if group.kept:
            return 0
        buffer_bytes = self.spec.round_up(group.gathered_bytes)
        return gather_inputs_bytes(group.parameters, self.shards, buffer_bytes, self.spec)

    def _from_host_ms(self, group: ParamGroup) -> tuple[float, float]:
        """Return the time for copying the shards of a unit to the device: that waits, and that runs behind."""
        if self.host is None or group.kept:
            return 0.0, 0.0
        ms = self.host.copy_ms(host_bytes_of(group.parameters, self.shards))
        # Of memory that is not pinned, the host waits for the copy, and issues nothing meanwhile.
        return (0.0, ms) if self.host.pinned else (ms, 0.0)

    def _wait(self, group: ParamGroup, phase: Phase) -> None:
        # Unsharded already: it was not resharded after forward.
        if group.gathering is None:
            return
        context, buffer, group.gathering = group.context, group.gathering, None
        if group.gather is not None:
            self.ops.wait(group.gather)
        sizes = [self.spec.round_up(p.gathered_bytes(self.shards)) for p in group.parameters]
        time_ms = self.ops.copy_ms(sum(sizes))
        context.copied_ms = self.ops.clock.now
        # One storage for all of them, unless they are freed one by one.
        if group.ranks_after_forward in (1, self.shards):
            sizes = [sum(sizes)]
        scope = self._scope(group, phase)
        group.unsharded = self.ops.add(
            _COPY_OUT, phase, scope, (buffer,), sizes, StorageKind.PARAMETER, time_ms=time_ms
        )
        for shard in group.kept:
            self.ops.free(shard)
        group.kept = ()
        if phase == Phase.FORWARD:
            # ``wait_for_unshard`` lets go of the buffer of the unit before at its start, but a local variable holds it
            # until the function returns: two buffers are alive while the second one is copied out.
            if context.gathered is not None:
                self.ops.free(context.gathered)
            # Kept until the next unit has gathered, so that its all-gather can overlap with this copy-out.
            context.gathered = buffer
        else:
            self.ops.free(buffer)

    def _reshard(self, group: ParamGroup) -> None:
        for storage in group.unsharded:
            self.ops.free(storage)
        group.unsharded = ()

    def _keep_shards(self, group: ParamGroup) -> None:
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
                    n_bytes,
                    StorageKind.PARAMETER,
                    time_ms=self.ops.copy_ms(n_bytes),
                )
            )
            self.ops.free(storage)
        group.kept, group.unsharded = tuple(kept), ()

    def _post_backward(self, group: ParamGroup) -> None:
        group.state = "reduced"
        # The order is that of ``FSDPParamGroup.post_backward``: free the unsharded parameters, then the input
        # of the reduction before, and only then allocate the input of this one.
        self._reshard(group)
        context = group.context
        for buffer in context.reduced:
            self.ops.free(buffer)
        context.reduced.clear()
        self._waited_for_reduces(context)
        # No parameter of the unit is trained, or none got a gradient in this pass.
        if not group.grads:
            return
        if group.all_reduced is not None:  # of the pass before
            self.ops.free(group.all_reduced)
            group.all_reduced = None
        trained = self._with_gradient(group)
        sizes = Reduction.of(trained, self.shards, self.options.mp_policy)
        # CUDA has a kernel for it; on a CPU what has to be padded is copied first.
        padded = sizes.padded_bytes if self.spec.kind == "cpu" else ()
        full = self._collective(
            _COPY_IN,
            Phase.BACKWARD,
            group,
            group.grads,
            sizes.input_bytes,
            StorageKind.OTHER,
            workspace_bytes=sum(map(self.spec.round_up, padded)),
            time_ms=self.ops.copy_ms(sizes.input_bytes),
        )
        # ``foreach_reduce`` drops the unsharded gradients when they are copied in, before it allocates the
        # output.
        for s in group.grads:
            self.ops.free(s)
        shard = self._collective(
            _REDUCE,
            Phase.BACKWARD,
            group,
            (full,),
            sizes.output_bytes,
            StorageKind.GRADIENT,
        )
        context.reducing.append(self.ops.start("reduce_scatter", sizes.input_bytes, self.shards))
        if self.replicas > 1:
            scope = self._scope(group, Phase.BACKWARD)
            self.ops.add(
                _ALL_REDUCE, Phase.BACKWARD, scope, (shard,), (), StorageKind.GRADIENT, mutates=(shard,)
            )
            running = self.ops.start("all_reduce", sizes.output_bytes, self.replicas, among_replicas=True)
            context.to_finish.append(running)
        if sizes.is_cast:
            shard = self._cast_shard(group, shard, sizes.shard_bytes)
        if self.host is not None:
            shard = self._copy_to_host(group, shard, sizes, self.host)
        # The first pass of an accumulation leaves its shard as the gradients; later ones add theirs to it. A later
        # one with the first gradient of some parameter stays, since that gradient is a view of it.
        having = {p.storage for p in trained}
        if group.reduced_grads is None:
            group.reduced_grads = shard
        elif having <= group.with_grad:
            self.ops.free(shard)
        group.with_grad |= having
        self.reduced.update(dict.fromkeys(group.grads, group.reduced_grads))
        group.grads.clear()
        context.reduced.append(full)

    def _cast_shard(self, group: ParamGroup, reduced: int, n_bytes: int) -> int:
        """Cast reduced gradients to the type of the shards, and return the storage of the result."""
        shard = self._collective(
            _CAST,
            Phase.BACKWARD,
            group,
            (reduced,),
            n_bytes,
            StorageKind.GRADIENT,
            time_ms=self.ops.copy_ms(n_bytes),
        )
        # Among replicas the unit holds what was reduced until its next reduction, or the end of the backward pass, so
        # that no other reduction gets the same memory (``AllReduceState`` in ``_fsdp_param_group.py``).
        if self.replicas > 1:
            group.all_reduced = reduced
        else:
            self.ops.free(reduced)
        return shard

    def _copy_to_host(self, group: ParamGroup, shard: int, sizes: Reduction, host: HostShards) -> int:
        """Copy reduced gradients to the host, and return the storage that they have there."""
        # Gradients that are added to earlier ones are waited for, and so are those in memory that is not pinned.
        ms = host.copy_ms(sizes.shard_bytes)
        waits = not host.pinned or group.reduced_grads is not None
        there = self._collective(
            _CAST,
            Phase.BACKWARD,
            group,
            (shard,),
            0,
            StorageKind.GRADIENT,
            time_ms=self.ops.clock.compute(ms) if waits else 0.0,
        )
        host.add(there, sizes.shard_bytes)
        if not waits:
            group.context.to_finish.append(self.ops.send(ms))
        # What was all-reduced without a cast is held as a cast one is, see ``_cast_shard``.
        if self.replicas > 1 and not sizes.is_cast:
            group.all_reduced = shard
        else:
            self.ops.free(shard)
        return there

    def _with_gradient(self, group: ParamGroup) -> list[Parameter]:
        """Return the parameters whose gradients the unit reduces now: those that have one."""
        found = [
            p
            for p in group.parameters
            if p.storage in self.r.gradients and self._gradient_of(p) in group.grads
        ]
        # A gradient of an earlier pass may have been replaced by another: then its parameter is not known.
        known = all(s in self.trained for s in group.grads)
        return found if known and found else [p for p in group.parameters if p.trainable]

    def _final_callback(self) -> None:
        # As in ``FSDPState._root_post_backward_final_callback``: first the units whose hook did not run, then
        # what is left in flight.
        for group in self.groups.values():
            if group.state != "reduced":  # no input needed a gradient, so no hook has run
                self._post_backward(group)
            group.state = "idle"
            group.indices.clear()
            if group.gathering is not None:  # gathered ahead, and never wanted
                self.ops.free(group.gathering)
                group.gathering = None
            if group.all_reduced is not None:
                self.ops.free(group.all_reduced)
                group.all_reduced = None
        for context in self.contexts.values():
            self._waited_for_reduces(context)
            for running in context.to_finish:
                self.ops.wait(running)
            context.to_finish.clear()
            context.copied_ms = None
            context.order.clear()
            for buffer in context.reduced:
                self.ops.free(buffer)
            context.reduced.clear()
