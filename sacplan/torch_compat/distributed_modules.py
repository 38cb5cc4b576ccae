"""Modules that PyTorch runs on several ranks: copies of them, and the parameters that they gather.

``fully_shard`` and ``replicate`` refuse a deep copy, since their states hold process groups, streams and hooks. A copy
that runs in the same process groups is well defined: it shares groups and meshes, and has everything else of its own.
The copy is in the state before its first forward.

Private PyTorch API, tried on 2.13: ``private_names.json`` lists it.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sacplan.errors import TraceError
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.host_memory import TO_DEVICE, TO_HOST, Copying
from sacplan.torch_compat.private import is_fully_sharded, modes_off, replaced
from sacplan.torch_compat.versions import torch_names

_CPU = torch.device("cpu")


def _groups_of(module: torch.nn.Module) -> Any:
    """Return the parameter groups of a module; none if ``fully_shard`` has not been called on it."""
    return module._get_fsdp_state()._fsdp_param_groups if is_fully_sharded(module) else ()  # type: ignore[operator]


def gathers(module: torch.nn.Module) -> bool:
    """Whether a module gathers parameters in its forward and its backward."""
    return bool(_groups_of(module))


def gathered_parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors for gathered parameters; those of parameters that are not gathered now have no bytes."""
    for module in model.modules():
        for group in _groups_of(module):
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs
                yield from getattr(parameter, "_unsharded_inner_tensors", ())


def offloaded_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the ``FSDPParam`` of each parameter whose shard is on the host."""
    for module in model.modules():
        for group in _groups_of(module):
            yield from (p for p in group.fsdp_params if p.offload_to_cpu)


def parts_on_host(parameter: Any) -> list[torch.Tensor]:
    """Return the shard of an offloaded parameter, and its gradient if there is one."""
    shard: torch.Tensor = parameter.sharded_param
    return [shard] if shard.grad is None else [shard, shard.grad]


@contextmanager
def copying_shards(model: torch.nn.Module, *, on_gpu: bool) -> Iterator[None]:
    """Inside, copies of ``fully_shard`` between host and device are ops; without ``on_gpu`` nothing is copied."""
    first = next(offloaded_parameters(model), None)
    if first is None:
        yield
        return
    kind, groups = type(first), sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
    with torch_names():
        gathered, reset, reduce = kind.all_gather_inputs.fget, kind.reset_sharded_param, groups.foreach_reduce

    def within(plain: Any, copy: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            # The first argument is one parameter, or all that a unit reduces, which share a policy.
            parameter = args[0] if isinstance(args[0], kind) else args[0][0]
            if not parameter.offload_to_cpu:
                return plain(*args, **kwargs)
            with Copying(copy if on_gpu else None, pinned=parameter.pin_memory):
                return plain(*args, **kwargs)

        return run

    inputs = property(within(gathered, TO_DEVICE))
    with (
        replaced(kind, all_gather_inputs=inputs, reset_sharded_param=within(reset, None)),
        replaced(groups, foreach_reduce=within(reduce, TO_HOST)),
    ):
        yield


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of DistributedDataParallel, whose names are those of a plan."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _reducer_of(module: Any) -> Any:
    """Return the DistributedDataParallel of a module, or the state that will make one; None if there is none."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return module
    state = _replicate_state(module)
    return getattr(state, "_ddp", state)


def _replicate_state(module: torch.nn.Module) -> Any:
    api = sys.modules.get("torch.distributed._composable.replicate")
    return None if api is None or not isinstance(module, api.DDP) else api.replicate.state(module)


def first_steps(model: torch.nn.Module) -> int:
    """Return how many first steps are unlike later ones: 2 if DDP's buckets change, 1 that makes gathered tensors."""
    modules = tuple(model.modules())
    if any(_reducer_of(m) is not None for m in modules):
        return 2
    parameters = (p for m in modules for group in _groups_of(m) for p in group.fsdp_params)
    return int(any(not hasattr(p, "_unsharded_param") for p in parameters))


def make_gathered(model: torch.nn.Module) -> None:
    """Let units make the tensors that hold gathered parameters, as their first forward would, and free them."""
    for module in filter(gathers, model.modules()):
        unit: Any = module
        unit.unshard()
        unit.reshard()


class _Parts:
    """What ``torch.chunk`` returns, each part made when it is asked for; parts after the last have no elements."""

    def __init__(self, tensor: torch.Tensor, parts: int, dim: int) -> None:
        self._tensor, self._dim, self._size = tensor, dim, -(-tensor.size(dim) // parts)

    def __getitem__(self, number: int) -> torch.Tensor:
        start = number * self._size
        size = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, size) if size > 0 else self._tensor.new_empty(0)


@contextmanager
def on_one_rank() -> Iterator[None]:
    """Inside, meshes and shards are made without the other ranks, and without an accelerator.

    Each ``DeviceMesh`` is one of CPUs, as fake tensors are, and its tensor of ranks stays real. ``fully_shard`` makes
    only the shards of a parameter that it uses, not those of all ranks, and does not pin them.
    """
    from torch.distributed.device_mesh import DeviceMesh

    with torch_names():
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard

        fully_shard: Any = _fully_shard
        after_forward = fully_shard._get_post_forward_mesh_info

    init, getitem = DeviceMesh.__init__, DeviceMesh.__getitem__

    def of_cpus(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(mesh, "cpu", *args, **kwargs)

    with (
        # A mesh has a real tensor of ranks, which fake modes must not see; these three make or index a mesh.
        replaced(DeviceMesh, __init__=modes_off()(of_cpus), __getitem__=modes_off()(getitem)),
        replaced(fully_shard, _get_post_forward_mesh_info=modes_off()(after_forward)),
        # What was gathered ahead and never used, such as a frozen embedding, is waited for on the accelerator's stream.
        replaced(torch.accelerator, current_stream=torch.cpu.current_stream),
        replaced(_fsdp_param, _chunk_with_empty=_Parts),  # makes only the shard that is indexed
        replaced(torch.Tensor, pin_memory=lambda tensor, *_: tensor),
    ):
        yield


def own_op_handlers() -> AbstractContextManager[None]:
    """Inside, DTensor's table of op handlers is a copy: handlers that ``loss_parallel`` adds are gone at the end."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    return replaced(dispatcher, _custom_op_handlers=dict(dispatcher._custom_op_handlers))


@contextmanager
def without_neighbours() -> Iterator[None]:
    """Inside, a stage of a pipeline runs its schedule without asking the stages before and after it for shapes.

    Outputs have the shapes that its forward gives them, and their gradients the same shapes. Inputs from the stage
    before must be known: ``PipelineStage(..., input_args=)``.
    """
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        yield
        return
    with torch_names():
        from torch.distributed.pipelining import _utils as metas

        kind, stage_kind = schedules._PipelineSchedule, schedules.PipelineStage
        kind._warmup_p2p, stage_kind._recv_meta, stage_kind._send_meta  # noqa: B018  (raises if missing)

    def alone(schedule: Any, stages: Any, has_backward: bool, *_: Any) -> None:
        asks = any(metas.InferenceMode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        for stage in stages:
            stage._inference_mode = metas.InferenceMode.DYNAMIC if asks else metas.InferenceMode.STATIC

    def received(stage: Any, sender: int) -> Any:
        given, is_later = stage._user_meta, sender > stage.stage_index
        known = given.output_grads if is_later else given.inputs
        if known is None and is_later and not stage._stage_meta.has_dtensors():
            known = metas._derive_grad_metas(stage._stage_meta.outputs)
        if known is None:
            raise TraceError(
                f"stage {stage.stage_index} of a pipeline asks stage {sender} what it sends, and nobody answers: give "
                f"PipelineStage {'output_grads' if is_later else 'input_args'}=, of one micro-batch."
            )
        return (metas._StageBackwardMeta if is_later else metas._StageForwardMeta)(known)

    groups: Any = torch.distributed.ProcessGroup
    plain, together = groups.send, torch.distributed.batch_isend_irecv

    # A transfer must hold its tensors until it is over.
    def send(group: Any, tensors: Any, *where: Any) -> Any:
        return _Answered(plain(group, tensors, *where), *tensors)

    def batch(ops: Any) -> list[Any]:
        return [_Answered(work, *(op.tensor for op in ops)) for work in together(ops)]

    with (
        replaced(kind, _warmup_p2p=alone),
        replaced(stage_kind, _recv_meta=received, _send_meta=lambda *_: None),
        replaced(groups, send=send),
        replaced(torch.distributed, batch_isend_irecv=batch),
    ):
        yield


# --- copies ---------------------------------------------------------------------------------------


def _copied(module: Any, memo: dict[int, Any]) -> Any:
    # ``FSDPModule.__new__`` makes a module of the class before ``fully_shard``. Compiled code would run the original.
    twin = memo[id(module)] = object.__new__(type(module))
    state = vars(module) | {"_compiled_call_impl": None}
    twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in state.items()})
    return twin


@contextmanager
def copyable(
    model: torch.nn.Module, memo: dict[int, Any], twin_of: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Inside, ``copy.deepcopy(model, memo)`` copies what runs on several ranks. At the end PyTorch knows the copies.

    ``twin_of`` copies a tensor.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None:
        yield
        return
    spread = {m: state for m in model.modules() if (state := states._get_module_state(m)) is not None}
    for parameter in (p for m in spread for group in _groups_of(m) for p in group.fsdp_params):
        twin_of(parameter.sharded_param)
        if hasattr(parameter, "_unsharded_param"):
            memo[id(parameter._unsharded_param)] = None  # not copied
    with ExitStack() as stack:
        for kind in {type(m) for m in model.modules() if m in spread or _replicate_state(m) is not None}:
            stack.enter_context(replaced(kind, __deepcopy__=_copied))
        stack.enter_context(_shared())
        yield
    for module, state in spread.items():
        states._insert_module_state(memo[id(module)], memo[id(state)])
        if is_fully_sharded(module):
            _reset_state(memo[id(state)])


@contextmanager
def _shared() -> Iterator[None]:
    """Inside, deep copies share process groups and what belongs to them."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    kinds = (types.ModuleType, DeviceMesh, ProcessGroup, torch.Stream, torch.Event)
    known: Any = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    known.update(dict.fromkeys(kinds, lambda value, memo: value))
    try:
        yield
    finally:
        for kind in kinds:
            del known[kind]


def _reset_state(state: Any) -> None:
    """Reset a copied state of ``fully_shard`` to that before the first forward, on fake tensors."""
    with torch_names():
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPStateContext

    state._is_root, state._state_ctx, state._comm_ctx = None, FSDPStateContext(), FSDPCommContext()
    # Fake tensors are of a CPU, whatever device they stand for.
    state._device, state._device_handle = _CPU, torch.cpu
    for group in state._fsdp_param_groups:
        group.device, group.device_handle = _CPU, torch.cpu
        group._to_sharded()
        for parameter in group.fsdp_params:
            parameter.device = _CPU
            parameter.all_gather_outputs = []
            vars(parameter).pop("_unsharded_param", None)


# --- DistributedDataParallel on fake tensors --------------------------------------------------------


def _reduced(_, bucket):  # type: ignore[no-untyped-def]  # PyTorch reads annotations, and refuses strings
    """Reduce a bucket of gradients, as DistributedDataParallel does without a hook."""
    work: Any = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda found: found.value()[0])


def reduce_by_hooks(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel reduce by communication hooks, which run in Python: its own or, without one, ours."""
    for reducer in filter(None, map(_reducer_of, model.modules())):
        if isinstance(reducer, torch.nn.parallel.DistributedDataParallel):
            hooks, reducer._comm_hooks = reducer._comm_hooks or [(_reduced, None)], []
            for hook, state in hooks:
                reducer.register_comm_hook(state, hook)
        elif not reducer._comm_hook_args:
            reducer._comm_hook_args.append(((None, _reduced), {}))


class _Answered:
    """The work of a collective on fake tensors, and these: its future has them, torch's has nothing."""

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self._work, self._tensors = work, list(tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> Any:
        found: Any = torch.futures.Future()
        found.set_result(self._tensors)
        return found


class _RealIndices(TorchDispatchMode):
    """Runs ops on the indices of buckets, which C++ reads, on real tensors; nothing is sent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(isinstance(t, FakeTensor) for t in given) or not (given or kwargs.get("dtype") is torch.int32):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            with torch_names():
                from torch._C._distributed_c10d import FakeWork

            return args[0], FakeWork().boxed()
        with _disable_current_modes():
            return func(*args, **kwargs)


@contextmanager
def fake_replicas() -> Iterator[None]:
    """Inside, DistributedDataParallel is made and rebuilds its buckets as on real tensors, without other ranks.

    Communication hooks get the tensors that they reduce.
    """
    if "torch.distributed" not in sys.modules or not torch.distributed.is_available():
        yield
        return
    reducer: Any = torch.distributed.Reducer  # type: ignore[attr-defined]
    plain = reducer._rebuild_buckets

    def rebuild(self: Any) -> Any:
        with _RealIndices():
            return plain(self)

    reduce: Any = torch.distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = reduce(tensor, *args, **kwargs)
        return None if work is None else _Answered(work, tensor)

    names = "_verify_param_shape_across_processes", "_sync_module_states"
    agreed = dict.fromkeys(names, lambda *args, **kwargs: None)
    with (
        replaced(reducer, _rebuild_buckets=rebuild),
        replaced(torch.distributed, all_reduce=all_reduce),
        replaced(torch.nn.parallel.distributed, **agreed),
    ):
        yield
