"""``profile``: trace one training step and record it; nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from msgspec import structs
from torch.distributed.device_mesh import DeviceMesh

from sacplan.core.arguments import checked
from sacplan.core.compilation import Compilation
from sacplan.core.fingerprint import Fingerprint, local_shapes_of
from sacplan.core.model_calls import ModelCall
from sacplan.core.program import Phase, Program
from sacplan.core.setup import Routing, Setup, current_autocast, scripted_inside
from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.host_step import ranks_here, shared_host
from sacplan.device.kernels import fake_device
from sacplan.device.timing import MeasuredTimes
from sacplan.device.workspace import measured_reserves
from sacplan.distributed.ranks.ranks import DDP, FSDP2, ONE_RANK, Ranks, ranks_of
from sacplan.distributed.ranks.unit_limits import kept_at_limits
from sacplan.distributed.sharding.process_groups import device_mesh_of, pretended_ranks, this_rank
from sacplan.distributed.sharding.recorded import Cost, collective_named, with_collectives
from sacplan.errors import (
    DeviceError,
    PlanError,
    SacplanError,
    SacplanWarning,
    SumOfOutputsWarning,
    TraceError,
)
from sacplan.profiling.optimizer_table import factory_of
from sacplan.profiling.profile import Profile, Source
from sacplan.profiling.remarks import loss_of_library, summed_outputs, without_bfloat16
from sacplan.record.compiled import CompileModules, compilation_of, compile_step, dry_compiled
from sacplan.record.fake_copy import FakeCopier
from sacplan.record.fake_data import DataRules, data_rules
from sacplan.record.fake_values import is_rule
from sacplan.record.gradient_hooks import has_gradient_hooks, optimizers_in_backward
from sacplan.record.host_state import host_bytes, shards_host_bytes
from sacplan.record.limits import WITHOUT_HOOKS, explained_limits, refuses_hooks
from sacplan.record.module_calls import other_thread
from sacplan.record.recorder import Recorder
from sacplan.record.saved_tensors import SavedMode
from sacplan.record.seen_ops import LookingUp
from sacplan.record.state import held_by_function, preserved_rng, preserved_state
from sacplan.record.steady_step import record_settled_step
from sacplan.record.step import (
    LossFn,
    Mode,
    Step,
    accumulation_of,
    check_accumulation,
    check_model,
    each_optimizer,
    inner_optimizer,
    loss_or_default,
    optimizer_over,
    part_of_batch,
    resolve_batch,
)
from sacplan.record.user_code import (
    branches_of_a_real_step,
    cleared_caches,
    no_fake_tensors_left,
    told_of_scripted,
)
from sacplan.torch_compat.compiling import compiled_in_place
from sacplan.torch_compat.distributed_modules import (
    copying_shards,
    fake_replicas,
    make_gathered,
    own_op_handlers,
    reduce_by_hooks,
    without_neighbours,
)
from sacplan.torch_compat.fake_kernels import keep_to_this_thread
from sacplan.torch_compat.fake_tensors import FakeTensorMode, fake_parameters
from sacplan.torch_compat.partitioning import GivenGraph, joint_graphs_noted
from sacplan.torch_compat.triton_kernels import triton_kernels_seen

Runtime = Literal["cost-model", "benchmark", "operator-level-cost-model", "operator-level-benchmark"]
Trace = Literal["fake", "real"]

_LONG = "operator-level-"
"""Optional prefix of the names of runtimes, as in torch's ``RuntimeEstimator``."""


@checked(TraceError, "model", "batch", "optimizer", "ranks")
def profile(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    device: str | DeviceSpec | torch.device | None = None,
    runtime: Runtime = "cost-model",
    trace: Trace = "fake",
    *,
    mode: Mode = "train",
    accumulation_steps: int | None = None,
    routing: Routing = "balanced",
    ranks: FSDP2 | DDP | Ranks | None = None,
    compile: CompileModules = None,
) -> Profile:
    """Record one step of a model.

        profile = sacplan.profile(model, batch, device="h100")
        profile.peak_bytes, profile.step_ms

    Args:
        model: with real, meta or fake parameters. It is not touched. ``functools`` caches in the code of the model's
            classes are emptied before and afterwards. Fake tensors that a fake step leaves in globals and class
            attributes are taken out, and the values of before are put back.
        batch: a tensor, a tuple (positional), a mapping (keyword arguments), or a callable that makes one. Of batches
            that differ, give the largest: a plan holds for it and for smaller ones. For a ``DataLoader``, it is made
            from the longest samples of the data set by ``collate_fn``; the loader itself is not iterated.
        loss_fn: ``loss_fn(model, batch) -> scalar``, or None if it has run the backward pass itself. By default the
            output's ``.loss`` or ``["loss"]``, else its only scalar with a gradient, else the sum of its float tensors,
            with a warning. It gets a copy of the model, and must use the copy. In inference what it returns is the
            output, of any kind; by default the model's. With a list of optimizers it is the whole step,
            ``loss_fn(model, batch, optimizers)``: it zeroes gradients, calls ``backward`` and steps the optimizers.
        optimizer: an optimizer over the model, a callable ``params -> optimizer``, or a name as on the command line
            (``"paged-adamw-8bit"``); or a list of these, see ``loss_fn``. The optimizer's state and the temporaries
            of its step count. Without an optimizer they are missing from the peak, and ``Profile.assumptions`` says
            how much that is for AdamW.
        device: what the step will run on, see ``sacplan.devices()``; by default that of ``sacplan.ranks`` around the
            call, else ``"h100"``.
        runtime: ``"cost-model"`` (predicted kernel by kernel) or ``"benchmark"`` (each distinct op timed here).
        trace: ``"fake"`` computes nothing. ``"real"`` runs the step on the model's own tensors, an optimizer's
            part of it twice, and puts everything back: tensors, gradients, attributes, containers, random
            generators; needed where shapes depend on data.
        mode: ``"train"``: forward, backward, optimizer. ``"inference"``: the forward pass under ``torch.no_grad``;
            its output is alive at the end. ``model.training`` stays as it is.
        accumulation_steps: micro-batches whose gradients an optimizer step adds up; the batch is one of them. For
            more than 1, the last micro-step is recorded, with the optimizer's step: gradients are alive from its
            beginning, and no earlier micro-step has a higher peak. Times are those of the last one. A loop with
            ``zero_grad(set_to_none=False)`` keeps gradients as well: give 2. By default the number of an optimizer
            that Accelerate has prepared, else 1.
        routing: of a mixture of experts in a fake trace: ``"balanced"`` gives each expert as many tokens. ``"worst"``
            also tries all tokens on the same experts, and takes the step with the higher peak.
        ranks: what the step is spread over, ``sacplan.FSDP2(8)`` or ``sacplan.DDP(8)``; the profile is that of one
            rank. The model is the whole one, before ``fully_shard`` or DistributedDataParallel; the batch is that of a
            rank. Can be given to ``sacplan.plan`` instead.
        compile: what ``torch.compile`` is called on: True for the whole model, patterns for modules that are compiled
            each by itself (``["model.layers.*"]``), or a mapping with ``modules`` and the keywords of
            ``torch.compile``: ``backend`` ("inductor" or "aot_eager"), ``mode``, ``dynamic``, ``fullgraph``,
            ``options``. By default, what is compiled already is recorded compiled; False records it uncompiled.

    Raises:
        TraceError: the step cannot be recorded, has no gradient, or cannot be spread over the ranks. What the model
            itself raises comes through.
        DeviceError: an unknown device, or one that is not here where it is needed.

    Warns:
        SumOfOutputsWarning: the step trains the sum of the outputs, for want of a loss.
        SacplanWarning: the step is in bfloat16, and the device has no arithmetic for it.
    """
    with compiled_in_place(model) as model:
        # Anything that is not a module is refused by ``trace_step``, with a better message.
        if ranks is not None and isinstance(model, torch.nn.Module):
            ranks = ranks_of(ranks, (name for name, _ in model.named_parameters()), model)
        compiled = compilation_of(compile, model)
    over = ranks if isinstance(ranks, Ranks) else ONE_RANK
    if accumulation_steps is None:
        accumulation_steps = accumulation_of(optimizer) if mode == "train" else 1
    asked = StepRequest(
        model, batch, loss_fn, optimizer, device, runtime, trace,
        mode=mode, ranks=over, accumulation_steps=accumulation_steps, routing=routing, compiled=compiled,
    )  # fmt: skip
    found = trace_step(asked)
    # Experts without tokens may make no gradients: then balanced routing takes more, and the higher peak counts.
    if found.fingerprint.setup.routing == "worst" and any(is_rule("worst", rule) for rule in found.rules):
        found = max(found, trace_step(replace(asked, routing="balanced")), key=lambda one: one.peak_bytes)
    warn_of_step(found, stacklevel=3)
    return found


def warn_of_step(found: Profile, stacklevel: int) -> None:
    """Warn if a recorded step is not what its user trains: there is no loss, or no arithmetic for bfloat16."""
    if said := without_bfloat16(found.recorded, found.spec):
        warnings.warn(f"{said}.", SacplanWarning, stacklevel=stacklevel + 1)
    if said := summed_outputs(found.fingerprint.setup):
        warnings.warn(f"{said}.", SumOfOutputsWarning, stacklevel=stacklevel + 1)


@dataclass(frozen=True)
class StepRequest:
    """A step that is to be traced, for ``profile`` and ``verify``.

    Attributes:
        model, batch, loss_fn, optimizer, device, runtime, trace, mode, accumulation_steps, routing: as for
            ``profile``.
        prepare: called with the model (in a fake trace, its copy) before the step runs; may apply a plan to it.
        saved: how saved tensors are followed, see ``saved_tensors.py``.
        ranks: the ranks over which PyTorch spreads a copy of the model; the step is that of one of them. On a mesh, the
            batch is that of all ranks.
        compiled: the modules that run compiled.
    """

    model: torch.nn.Module
    batch: Any
    loss_fn: LossFn | None
    optimizer: Any
    device: str | DeviceSpec | torch.device | None
    runtime: str
    trace: str
    mode: Mode = "train"
    prepare: Callable[[torch.nn.Module], Any] | None = None
    saved: Literal["record", "observe"] = "record"
    ranks: Ranks = ONE_RANK
    accumulation_steps: int = 1
    routing: Routing = "balanced"
    compiled: Compilation | None = None

    def check(self) -> None:
        """Raise ``TraceError`` or ``PlanError`` for a request that cannot be traced."""
        check_model(self.model)
        for what, value, known in (
            ("runtime", self.runtime, get_args(Runtime)),
            ("trace", self.trace, ("fake", "real")),
            ("mode", self.mode, ("train", "inference")),
            ("routing", self.routing, get_args(Routing)),
        ):
            if value not in known:
                raise TraceError(f"unknown {what} {value!r}; known are {', '.join(map(repr, known))}.")
        if self.mode == "inference" and self.optimizer is not None:
            raise TraceError('mode="inference" runs no optimizer; leave optimizer= out, or use mode="train".')
        if self.trace == "real" and self.compiled is not None:
            raise TraceError(
                'trace="real" with a compiled step: a dry run of the compiler has no values. Use trace="fake", or '
                "compile=False."
            )
        if self.trace == "real" and self.routing != "balanced":
            raise TraceError(
                f'routing={self.routing!r} is for trace="fake": in a real trace, the data decides.'
            )
        if self.ranks.sharding is not None and self.compiled is not None:
            raise PlanError("a compiled step on a mesh is not recorded; profile the step with compile=False.")
        if self.ranks != ONE_RANK and self.trace == "real":
            raise PlanError(
                'a step on ranks is recorded on fake tensors; make the profile with trace="fake".'
            )
        # ``fully_shard`` makes parameters of its own, which do not have the hook.
        if self.ranks != ONE_RANK and has_gradient_hooks(self.model):
            raise TraceError(
                "a parameter has a hook that runs when its gradient is there (register_post_accumulate_grad_hook), and "
                "spreading the model makes other parameters. Spread it inside of sacplan.ranks(...), register the hook "
                "there, and profile it."
            )
        check_accumulation(self.accumulation_steps)
        if self.mode == "inference" and self.accumulation_steps > 1:
            raise TraceError(
                f'accumulation_steps={self.accumulation_steps}: mode="inference" makes no gradients that could be '
                "added up."
            )


@dataclass(frozen=True)
class _Resolved:
    """A request whose device, batch, loss and optimizer are known, and what is made for it before the step runs.

    Attributes:
        asked: the request; its batch is that of a rank, and its optimizer is resolved.
        loss_fn: the given one, or the default.
        spec, cost: the device, and the cost of a call of an op on it.
        autocast: the type of a ``torch.autocast`` around the trace.
        mesh: over which a copy of the model is spread; None for one rank.
        joint_graphs: noted while a compiled step runs.
    """

    asked: StepRequest
    loss_fn: LossFn
    spec: DeviceSpec
    cost: Cost
    autocast: str | None
    mesh: DeviceMesh | None
    joint_graphs: list[GivenGraph] = field(default_factory=list)


@dataclass(frozen=True)
class _Traced:
    """A recorded step.

    Attributes:
        program: the step.
        rules: what the trace took for granted, a sentence each.
        setup: how the step was set up.
        calls: the calls of the model in it.
        local_shapes: see ``Fingerprint``.
    """

    program: Program
    rules: tuple[str, ...]
    setup: Setup
    calls: tuple[ModelCall, ...]
    local_shapes: dict[str, tuple[int, ...]] | None


def trace_step(asked: StepRequest) -> Profile:
    """Trace one step and return its profile."""
    asked.check()
    spec = resolve_device(asked.device)
    runtime, model, ranks = asked.runtime.removeprefix(_LONG), asked.model, asked.ranks
    times = MeasuredTimes(spec) if runtime == "benchmark" else CostModel(spec)
    autocast = current_autocast(spec.kind)  # read here: in a fake step it is another device's
    run = _trace_fake if asked.trace == "fake" else _trace_real
    scripted = scripted_inside(model)
    as_written = told_of_scripted(model, scripted, asked.trace)
    # Contexts from the outside in: generators are put back last; the collector is off before the first fake tensor is
    # made; errors are explained where torch's own messages come through.
    with (
        compiled_in_place(model) as model,
        preserved_rng(),
        _no_garbage_collection(),
        explained_limits(),
        as_written,
        triton_kernels_seen(),
        _mesh_of(ranks) as mesh,
    ):
        # Made inside of these contexts, since a callable or a data set may draw random numbers for the batch.
        asked = replace(asked, model=model, batch=resolve_batch(asked.batch), device=spec)
        fingerprint = Fingerprint.of(model, asked.batch)
        loss_fn, cost = loss_or_default(asked.loss_fn, asked.mode), with_collectives(times.cost, spec)
        optimizer = each_optimizer(asked.optimizer, lambda one: inner_optimizer(factory_of(one, spec)))
        step = replace(asked, optimizer=optimizer)
        if ranks.sharding is not None:
            part = part_of_batch(asked.batch, fingerprint.rows, ranks.sharding.data.size)
            step = replace(step, batch=part)
        resolved = _Resolved(step, loss_fn, spec, cost, autocast, mesh)
        with _explained(ranks):
            traced = _with_hooks_or_without(run, resolved)
    _check_recorded(traced.program, asked.mode)
    recorded, rules = kept_at_limits(traced.program), traced.rules
    if ranks == ONE_RANK and any(collective_named(op.name) for op in recorded.ops):
        rules = (*rules, this_rank())
    devices = max(ranks.devices, ranks_here())
    if devices > 1 and (traced.setup.optimizer_host_bytes or traced.setup.shards_host_bytes):
        rules = (*rules, shared_host(devices, spec))
    fingerprint = structs.replace(
        fingerprint,
        setup=structs.replace(
            traced.setup, compiled=asked.compiled, scripted=scripted, routing=asked.routing
        ),
        calls=traced.calls,
        local_shapes=traced.local_shapes,
    )
    of_one_rank = replace(asked, prepare=None, saved="record", ranks=ONE_RANK)
    source = Source(model, lambda **how: trace_step(replace(of_one_rank, **how)), resolved.joint_graphs)
    return Profile(recorded, fingerprint, spec, asked.trace, runtime, asked.mode, rules, ranks, source)


@contextlib.contextmanager
def _mesh_of(ranks: Ranks) -> Iterator[DeviceMesh | None]:
    """Yield the mesh for a copy of the model; None for one rank. Enter outside of fake modes: it has a real tensor."""
    if ranks.devices == 1:
        yield None
        return
    with pretended_ranks(ranks.devices):
        yield device_mesh_of("cpu", ranks.mesh.ranks, ranks.mesh.names)


@contextlib.contextmanager
def _explained(ranks: Ranks) -> Iterator[None]:
    """Turn errors of the user's code, or of torch, in a step on ranks into a ``TraceError`` that names the mesh."""
    try:
        yield
    except SacplanError:
        raise
    except Exception as error:
        if ranks == ONE_RANK:
            raise
        raise TraceError(
            f"the step does not run on {ranks.mesh} as PyTorch spreads it: {type(error).__name__}: {error}"
        ) from error


def _with_hooks_or_without(run: Callable[[_Resolved], _Traced], resolved: _Resolved) -> _Traced:
    try:
        return run(resolved)
    except RuntimeError as error:
        if resolved.asked.saved != "record" or not refuses_hooks(error):
            raise
    found = run(replace(resolved, asked=replace(resolved.asked, saved="observe")))
    return replace(found, rules=(*found.rules, WITHOUT_HOOKS))


def _trace_fake(resolved: _Resolved) -> _Traced:
    # The step has a function of its own, so that its fake tensors are gone before ``no_fake_tensors_left`` looks.
    with no_fake_tensors_left(resolved.asked.model, resolved.loss_fn) as note:
        return _run_fake(resolved, note)


def _run_fake(resolved: _Resolved, note: Callable[[FakeTensorMode], None]) -> _Traced:
    asked, spec, mesh = resolved.asked, resolved.spec, resolved.mesh
    model = asked.model
    how: SavedMode = "virtual" if asked.saved == "record" else "observe"
    # The order of dispatch modes, innermost first: the recorder, which is entered later, sees an op first; then the
    # rules on data, and then FakeTensorMode. So the recorder sees what the rules answer, and not how.
    with (
        cleared_caches(model),
        branches_of_a_real_step(),
        fake_device(spec) as fake_mode,
        # On a CPU, torch's fake kernels of an LSTM return tensors of the wrong size.
        measured_reserves() if spec.kind == "cpu" else contextlib.nullcontext(),
        data_rules(asked.routing) as rules,
        fake_replicas(),
        without_neighbours(),
        fake_parameters(),
        contextlib.ExitStack() as running,
    ):
        note(fake_mode)
        keep_to_this_thread(fake_mode, lambda: other_thread("an op of the model"))
        copier, looking_up = FakeCopier(rules), LookingUp(fake_mode, rules)
        # From here on only the copy is used, also for a plan.
        fake = copier.model(model)
        if mesh is not None and asked.ranks.sharding is not None:
            running.enter_context(own_op_handlers())
            with looking_up:
                asked.ranks.sharding.parallelize(fake, mesh, source=None)
        handle = asked.prepare(fake) if asked.prepare is not None else None
        try:
            if mesh is not None:
                with looking_up:
                    asked.ranks.spread_data(fake, mesh)
            copier.parameters_replaced(model, fake)
            reduce_by_hooks(fake)
            running.enter_context(copying_shards(fake, on_gpu=spec.kind == "cuda"))
            if asked.compiled is not None:
                running.enter_context(dry_compiled(fake, asked.compiled, spec))
                resolved.joint_graphs.clear()
                if asked.prepare is None:  # a plan splits the graphs itself
                    running.enter_context(joint_graphs_noted(resolved.joint_graphs.append))
            step = Step(
                model=fake,
                batch=copier.batch(asked.batch),
                loss_fn=copier.functions.of_loss(resolved.loss_fn),
                optimizer=each_optimizer(asked.optimizer, lambda one: copier.optimizer(one, model, fake)),
                mode=asked.mode,
                accumulation_steps=asked.accumulation_steps,
            )
            with looking_up:
                make_gathered(fake)
            if asked.compiled is not None:
                compile_step(step, Recorder(spec, resolved.cost, "observe", rules))
            found = _traced(step, resolved, how, handle, rules)
        finally:
            if handle is not None:
                handle.remove()
            copier.forget_hooks()
    return replace(found, rules=(*found.rules, *loss_of_library(asked.model, found.setup)))


def _trace_real(resolved: _Resolved) -> _Traced:
    asked, spec = resolved.asked, resolved.spec
    model = asked.model
    how: SavedMode = "clone" if asked.saved == "record" else "observe"
    check_runs_here(model, spec, 'trace="real"')
    # Made before the snapshot, which must know the optimizer to put its state back.
    optimizer = each_optimizer(asked.optimizer, lambda one: optimizer_over(one, model))
    # What the loss function holds, and optimizers in hooks of parameters, may change in the step as well.
    with preserved_state(
        model, optimizer, asked.batch, *held_by_function(resolved.loss_fn), *optimizers_in_backward(model)
    ):
        step = Step(model, asked.batch, resolved.loss_fn, optimizer, asked.mode, asked.accumulation_steps)
        handle = asked.prepare(model) if asked.prepare is not None else None
        try:
            return _traced(step, resolved, how, handle)
        finally:
            # After an error, too: a plan must not stay on the user's own model.
            if handle is not None:
                handle.remove()


def _traced(
    step: Step, resolved: _Resolved, saved: SavedMode, handle: Any, rules: DataRules | None = None
) -> _Traced:
    """Record a step, and read off how it was set up once it has run."""
    spec = resolved.spec
    recorder = functools.partial(Recorder, spec, resolved.cost, saved, rules)
    program, calls, checkpointed = record_settled_step(step, recorder, handle, rules)
    setup = structs.replace(
        step.setup(resolved.autocast),
        # On a CPU the host's memory is the device's, and the program has all of it.
        optimizer_host_bytes=sum(map(host_bytes, step.optimizers)) if spec.kind == "cuda" else 0,
        shards_host_bytes=shards_host_bytes(step.model, step.optimizers),
        checkpointed=checkpointed,
    )
    said = () if rules is None else tuple(map(str, rules.applied))
    return _Traced(program, said, setup, calls, local_shapes_of(step.model))


def check_runs_here(model: torch.nn.Module, spec: DeviceSpec, what: str) -> None:
    """Check that the model's tensors are real and on a device of this kind.

    Raises:
        TraceError: some are on the meta device.
        DeviceError: they are on another kind of device.
    """
    # A model without tensors counts as one on the CPU.
    kinds = {t.device.type for t in (*model.parameters(), *model.buffers())} or {"cpu"}
    if "meta" in kinds:
        raise TraceError(f"{what} needs real parameters, some are on the meta device.")
    if kinds != {spec.kind}:
        raise DeviceError(
            f"{what} runs the step on the tensors that are there, and they are on {', '.join(sorted(kinds))}; the "
            f'device asked for is {spec.name}. Use device="{sorted(kinds)[0]}", or trace="fake".'
        )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector off inside: it would free tensors in cycles at moments that vary."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _check_recorded(program: Program, mode: Mode) -> None:
    # A plan decides what module calls keep for the backward pass: without calls, or that pass, there is no plan.
    if not program.scopes:
        raise TraceError(
            "no module of the model was called in the step. Does loss_fn use the model that it is given, "
            "and call it rather than its .forward?"
        )
    if mode == "train" and not any(op.phase == Phase.BACKWARD for op in program.ops):
        raise TraceError(
            "the step has no backward pass that any op ran in: no gradient reaches a parameter. For a step without "
            'one use mode="inference".'
        )
