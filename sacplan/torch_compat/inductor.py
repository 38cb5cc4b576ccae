"""``torch.compile`` without kernels: the compiler runs as it is, and what it would have compiled does nothing.

Everything that decides about memory is PyTorch's own: Dynamo, AOTAutograd, the partitioner, and inductor's lowering,
fusion and memory planning. Inside ``dry_compiler``,

- inductor's kernels are objects that tell a watcher that they were called, with what, and what they move;
- the wrapper that inductor writes is run as it is, and allocates by ``aten.empty_strided``, which fake tensors know;
- with a GPU for a target, a graph is moved there just before the partitioner gets it (``_to_gpu``): its nodes are
  run again on fake CUDA tensors. What is around it stays on fake CPU tensors, on which autograd works in any build.

Private PyTorch API, tried on 2.13: ``private_names.json`` lists it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from sacplan.errors import SacplanError
from sacplan.torch_compat.fake_tensors import active_fake_mode, fake_empty_strided
from sacplan.torch_compat.private import replaced, without_a_log
from sacplan.torch_compat.versions import torch_names

_GPU = torch.device("cuda", 0)


class Watcher(Protocol):
    """An observer of what compiled graphs do below the dispatcher."""

    def allocated(self, tensor: torch.Tensor) -> None:
        """A graph has allocated memory."""

    def kernel_ran(self, name: str, tensors: Sequence[torch.Tensor], nbytes: int) -> None:
        """A kernel has read or written tensors, and moved so many bytes."""


watchers: list[Watcher] = []
"""Watchers, of which the last one is told."""

_entered = {"dry": 0, "graph": 0}

MEASURES = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
"""Options of inductor that have it time kernels: they are off in a dry run, which has none."""

POOLS = ("triton.cudagraphs", "triton.cudagraph_trees")
"""Options with which a graph runs as a CUDA graph, in a pool of its own."""


def is_compiling_dry() -> bool:
    """Whether a ``dry_compiler`` is entered."""
    return _entered["dry"] > 0


def in_compiled_graph() -> bool:
    """Whether a graph that the compiler made is running."""
    return _entered["graph"] > 0


class _Kernel:
    """A stand-in for a kernel that inductor would have compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any, **_: Any) -> None:
        if watchers:
            tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
            watchers[-1].kernel_ran(self.name, tensors, sum(t.nbytes for t in tensors))

    __call__ = run


@contextlib.contextmanager
def _counted(what: str) -> Iterator[None]:
    _entered[what] += 1
    try:
        yield
    finally:
        _entered[what] -= 1


def _noted(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiler, so that ``in_compiled_graph`` is true while its graphs run."""

    @functools.wraps(compile_graph)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        run = compile_graph(*args, **kwargs)

        def noted(arguments: list[Any]) -> Any:
            with _counted("graph"):
                return run(arguments)

        noted._boxed_call = True  # type: ignore[attr-defined]
        return noted

    return compiled


@contextlib.contextmanager
def dry_compiler(gpu: SimpleNamespace | None = None) -> Iterator[None]:
    """Inside, what ``torch.compile`` compiles has no kernels, for this machine's CPU or for a GPU.

    Code that was compiled before is compiled again when it runs next: Dynamo's caches belong to the code of the
    model, which other copies of it share, and are emptied before and afterwards.

    Args:
        gpu: what CUDA says of the device (``get_device_properties``); None for the CPU.
    """
    with torch_names():
        from torch._dynamo import config as dynamo_config
        from torch._dynamo.backends import debugging
        from torch._inductor import async_compile, compile_fx, cpu_vec_isa
        from torch._inductor import config as inductor_config

        guards: Any = torch._C._dynamo.guards
        names = [name for name in vars(guards) if name.startswith("_empty_strided_")]
        kernels: Any = async_compile.AsyncCompile
        wait = kernels.wait
        whole = compile_fx.compile_fx
        inner = compile_fx.compile_fx_inner
        is_fake: Any = torch._subclasses.fake_tensor.is_fake
        copy_graph: Any = torch.fx.GraphModule.__deepcopy__

    def make_kernel(_: Any, *args: Any, **__: Any) -> _Kernel:
        return _Kernel(args[0] if isinstance(args[0], str) else "cpp_fused")

    def wait_for(self: Any, scope: dict[str, Any]) -> None:
        # The names of C++ kernels are those that the wrapper gives them.
        for name, value in scope.items():
            if isinstance(value, _Kernel):
                value.name = name
        wait(self, scope)

    def without_measuring(*args: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        if gpu is None:
            # Asked later, in the folder of a graph, this would build its libraries again in each process.
            cpu_vec_isa.valid_vec_isa_list()
        kwargs.setdefault("inner_compile", _noted(functools.partial(_compile_inner, inner, gpu is not None)))
        patches = {k: v for k, v in (config_patches or {}).items() if k not in (*MEASURES, *POOLS)}
        return whole(*args, config_patches=patches or None, **kwargs)

    def copied(self: Any, memo: Any) -> Any:
        # Real constants of a graph would become fake copies with modes on; fake ones are not copied.
        held = (*vars(self).values(), *self._buffers.values(), *self._parameters.values())
        memo |= {id(value): value for value in held if is_fake(value)}
        with _disable_current_modes():
            return copy_graph(self, memo)

    torch.compiler.reset()
    try:
        with (
            _counted("dry"),
            warnings.catch_warnings(),
            replaced(
                kernels, **dict.fromkeys(("cpp", "cpp_pybinding", "triton"), make_kernel), wait=wait_for
            ),
            replaced(guards, **dict.fromkeys(names, _allocate), _reinterpret_tensor=_reinterpret),
            replaced(compile_fx, compile_fx=without_measuring),
            replaced(debugging, boxed_nop=_noted(debugging.boxed_nop)),
            # Nobody reads the printed code of graphs.
            replaced(torch.fx.GraphModule, __deepcopy__=copied, print_readable=_always("")),
            inductor_config.patch(
                force_disable_caches=True,
                compile_threads=1,
                size_asserts=False,
                nan_asserts=False,
                alignment_asserts=False,
                **dict.fromkeys(MEASURES, False),
            ),
            dynamo_config.patch(run_gc_after_compile=False),  # what is left is collected once, after the step
            without_a_log("torch.__trace"),  # its records would keep graphs alive
            without_a_log("torch._higher_order_ops.wrap"),  # on what checkpoints may not hold
            contextlib.nullcontext() if gpu is None else _gpu_world(gpu),
        ):
            warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
            # Wrappers for a GPU check whether their inputs are aligned.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except torch._dynamo.exc.BackendCompilerFailed as failed:
        # Errors of sacplan say by themselves what is wrong.
        if isinstance(failed.inner_exception, SacplanError):
            raise failed.inner_exception from failed
        raise
    finally:
        torch.compiler.reset()


def _allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    # Below the dispatcher, as in C++.
    mode = active_fake_mode()
    assert mode is not None, "a dry run belongs inside of a FakeTensorMode"
    made = fake_empty_strided(mode, size, stride, dtype)
    if watchers:
        watchers[-1].allocated(made)
    return made


def _reinterpret(tensor: Any, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    start = tensor.storage_offset() + offset
    return fake_empty_strided(tensor.fake_mode, size, stride, tensor.dtype, tensor.untyped_storage(), start)


def _compile_inner(inner: Callable[..., Any], on_gpu: bool, graph: Any, inputs: Any, **kwargs: Any) -> Any:
    if on_gpu:
        # A graph for inference has met no partitioner; graphs of training are on the GPU already.
        inputs = _to_gpu(graph) if _is_on_cpu(graph) else _inputs_of(graph, inputs)
    return inner(graph, inputs, **kwargs)


def compiled_so_far() -> int:
    """Return how many graphs Dynamo has made in this process."""
    with torch_names():
        from torch._dynamo.utils import counters
    made: int = counters["stats"]["unique_graphs"]
    return made


def follow_generators(mode: type[Any]) -> None:
    """Make a dispatch mode see random ops of compiled graphs that run again with a generator's saved state.

    The ops are arguments of higher-order operators, and dispatch modes do not see what these run. Saved states are
    tensors from ``mode.generator_state()``, which are counted and never read.
    """
    with torch_names():
        from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    def running(paused: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        # The mode is off while its handler runs. It is entered by the base class alone: its own ``__enter__`` would
        # enter its hooks a second time.
        TorchDispatchMode.__enter__(paused)
        try:
            return op(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(paused, None, None, None)

    def saving(paused: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return paused.generator_state(), running(paused, op, *args, **kwargs)

    def restoring(paused: Any, _: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        before = paused.generator_state()  # alive during the op, as the state that is put back after it
        out = running(paused, op, *args, **kwargs)
        del before
        return out

    run_and_save_rng_state.py_impl(mode)(saving)
    run_with_rng_state.py_impl(mode)(restoring)


# --- a GPU that is not there ---------------------------------------------------------------------


def _placeholders(graph: Any) -> list[Any]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _is_on_cpu(graph: Any) -> bool:
    values = [node.meta.get("val") for node in graph.graph.nodes]
    return not any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)


def _inputs_of(graph: Any, inputs: Any) -> list[Any]:
    values = [node.meta.get("val") for node in _placeholders(graph)]
    return [v if isinstance(v, torch.Tensor) else i for v, i in zip(values, inputs, strict=True)]


def _to_gpu(graph: Any) -> list[Any]:
    """Move a graph to the GPU, and return what it takes: its nodes run again, on fake tensors of that device."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def moved(value: Any) -> Any:
        return _GPU if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, moved)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
    values = [node.meta["val"] for node in _placeholders(graph)]
    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))

    def twin(t: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_GPU)

    inputs: list[Any] = [tree_map_only(torch.Tensor, twin, value) for value in values]
    FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*inputs)
    graph.recompile()
    return inputs


@contextlib.contextmanager
def _gpu_world(gpu: SimpleNamespace) -> Iterator[None]:
    """Have the compiler find a GPU with these properties, and triton."""
    with torch_names():
        import torch._inductor.codegen.triton as triton_code
        import torch._inductor.codegen.wrapper as wrapper
        import torch.utils._triton as triton_utils
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor import compile_fx, scheduler
        from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    functorch_config: Any = torch._functorch.config
    users_of_triton = [m for m in (triton_utils, triton_code) if hasattr(m, "triton_hash_with_backend")]
    partition = compile_fx.partition_fn
    deduce = Folder._deduce_value

    def on_gpu(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        return partition(graph, _to_gpu(graph), **kwargs)

    def deduced(self: Any, node: Any) -> Any:
        # Single numbers are computed for real: on the CPU instead of the graph's device.
        given = node.kwargs
        node.kwargs = {**given, "device": torch.device("cpu")} if "device" in given else given
        try:
            return deduce(self, node)
        finally:
            node.kwargs = given

    def header(self: Any) -> None:
        self.imports.writeline("get_raw_stream = lambda i: 0")
        self.imports.writeline("start_graph = end_graph = lambda *a, **k: None")

    properties, capability = _always(gpu), (gpu.major, gpu.minor)
    number = 10 * gpu.major + gpu.minor
    worker: Any = CudaInterface.Worker
    with contextlib.ExitStack() as stack:
        replacements: tuple[tuple[Any, dict[str, Any]], ...] = (
            (worker, {"get_device_properties": staticmethod(properties)}),
            (
                CudaInterface,
                {
                    "get_device_properties": staticmethod(properties),
                    "get_compute_capability": staticmethod(_always(number)),
                    "is_bf16_supported": staticmethod(_always(capability >= (8, 0))),
                },
            ),
            (scheduler, {"has_triton": _always(True)}),
            *((m, {"triton_hash_with_backend": _always("none")}) for m in users_of_triton),
            (
                torch.cuda,
                {
                    "get_device_properties": properties,
                    "get_device_capability": _always(capability),
                    "is_bf16_supported": _always(capability >= (8, 0)),
                    "current_device": _always(0),
                    "device_count": _always(1),
                    "set_device": _always(None),
                    "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8),
                    "set_rng_state": _always(None),
                    "_DeviceGuard": lambda index: contextlib.nullcontext(),
                },
            ),
            (compile_fx, {"partition_fn": on_gpu}),
            (Folder, {"_deduce_value": deduced}),
            (
                wrapper.PythonWrapperCodegen,
                {"write_triton_header_once": header, "write_get_raw_stream_header": lambda self: None},
            ),
        )
        for owner, attributes in replacements:
            stack.enter_context(replaced(owner, **attributes))
        # Ops that run again get a saved state, not the generator of a missing device.
        stack.enter_context(functorch_config.patch(graphsafe_rng_functionalization=False))
        _lend_device_guard()
        yield


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@functools.cache
def _lend_device_guard() -> None:
    """Give CUDA the CPU's device guard, which does nothing, where the build has none.

    Some ops ask for a guard in C++ (``index_put``), on fake tensors as well.
    """
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    registry = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(path), "_ZN3c104impl26device_guard_impl_registryE")
    if not registry[1]:
        registry[1] = registry[0]
