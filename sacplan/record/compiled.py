"""A compiled step: compile a fake model as its user does, with kernels that do nothing, so that it can be recorded.

    with dry_compiled(model, compilation, spec):
        step.accumulate()          # compiles, the first time
        with recorder: step.run()  # runs what was compiled

PyTorch itself compiles; none of its rules are repeated here. Of a compiled graph the recorder sees what inductor's
wrapper does: it allocates, calls kernels and ops, and frees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, get_args

import torch

from sacplan.core.compilation import Backend, Compilation
from sacplan.core.elements import outermost
from sacplan.core.names import matching_modules
from sacplan.device.devices import DeviceSpec
from sacplan.errors import TraceError
from sacplan.record.step import Step
from sacplan.torch_compat.compiling import compiled_with, keep_dynamo_out
from sacplan.torch_compat.inductor import compiled_so_far, dry_compiler
from sacplan.torch_compat.private import function_modes_off

CompileModules = bool | Sequence[str] | Mapping[str, Any] | Compilation | None
"""The argument ``compile`` of ``profile``."""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
)


def compilation_of(asked: CompileModules, model: torch.nn.Module) -> Compilation | None:
    """Return how the model is compiled: as asked, by default as it is already; None if nothing is.

    Args:
        asked: as for ``profile``.
        model: as ``compiled_in_place`` yields it.

    Raises:
        TraceError: a pattern that matches no module, or a backend or keyword that is not known.
    """
    # ``trace_step`` refuses a model that is no module, with a better message.
    if asked is False or not isinstance(model, torch.nn.Module):
        return None
    return _compiled_already(model) if asked is None else _asked_for(asked, model)


def _asked_for(asked: CompileModules, model: torch.nn.Module) -> Compilation:
    if isinstance(asked, Compilation):
        return asked
    given: dict[str, Any] = dict(asked) if isinstance(asked, Mapping) else {}
    patterns: Any = given.pop("modules", "") if asked is True or isinstance(asked, Mapping) else asked
    unknown = given.keys() - set(Compilation.__struct_fields__)
    if unknown:
        raise TraceError(
            f"compile= has {', '.join(map(repr, sorted(unknown)))}; known are modules, backend, mode, dynamic, "
            "fullgraph and options, as for torch.compile."
        )
    names = [fqn for fqn, _ in model.named_modules()]
    modules = matching_modules(names, [patterns] if isinstance(patterns, str) else patterns, "compile")
    return _checked(Compilation(modules, **given))


def _checked(compilation: Compilation) -> Compilation:
    if compilation.backend not in get_args(Backend):
        raise TraceError(
            f"backend {compilation.backend!r} of torch.compile is not modelled; known are "
            f"{', '.join(map(repr, get_args(Backend)))}. With compile=False the step is recorded as it runs uncompiled."
        )
    return compilation


def _compiled_already(model: torch.nn.Module) -> Compilation | None:
    found = {
        fqn: compiled_with(module._compiled_call_impl)
        for fqn, module in model.named_modules()
        if module._compiled_call_impl is not None
    }
    if not found:
        return None
    outer = outermost(found)
    ways = [found[fqn] for fqn in outer]
    if any(way != ways[0] for way in ways):
        raise TraceError(
            "modules of the model were compiled with different arguments of torch.compile. Say how they are compiled "
            "with compile={...}, or profile the step uncompiled, with compile=False."
        )
    return _checked(Compilation(outer, **ways[0]))


@contextlib.contextmanager
def dry_compiled(model: torch.nn.Module, compilation: Compilation, spec: DeviceSpec) -> Iterator[None]:
    """Inside, modules of a fake model run compiled, without kernels."""
    # Between two graphs, eager ops call the recorder and its hooks, which Dynamo must not trace.
    keep_dynamo_out("sacplan.record")
    keep_dynamo_out("sacplan.torch_compat", "private")
    with compiler_for(spec):
        modules = dict(model.named_modules())
        for fqn in compilation.modules:
            module = modules[fqn]
            module.compile(**compilation.arguments)
            module._compiled_call_impl = _Unwatched(module, module._compiled_call_impl)
        yield


def compiler_for(spec: DeviceSpec) -> AbstractContextManager[None]:
    """Return the context in which ``torch.compile`` compiles for a device, without kernels."""
    return dry_compiler(_gpu(spec) if spec.kind == "cuda" else None)


def compile_step(step: Step, unrecorded: AbstractContextManager[Any]) -> None:
    """Run the step once, so that it compiles.

    Args:
        step: with a model that is to run compiled.
        unrecorded: entered around the step.

    Raises:
        TraceError: nothing was compiled.
    """
    before = compiled_so_far()
    with unrecorded:
        if step.mode == "inference":
            step.run()
        else:
            step.accumulate()
    step.model.zero_grad(set_to_none=True)
    if compiled_so_far() == before:
        raise TraceError(
            "torch.compile compiled nothing of this step: Dynamo left all of it as it is. It compiles no code of "
            "torch.nn alone, such as a Sequential of its layers; or loss_fn does not call the model that it is given. "
            "With compile=False the step is recorded as it runs uncompiled."
        )


@contextlib.contextmanager
def really_compiled(model: torch.nn.Module, compilation: Compilation | None, step: Step) -> Iterator[None]:
    """Inside, only modules of ``compilation`` run compiled (None: no module); undone afterwards.

    On entry the step runs until nothing more is compiled.
    """
    modules = [] if compilation is None else [model.get_submodule(fqn) for fqn in compilation.modules]
    # Set nothing on other modules, not even the value that they have: the instance would get an attribute.
    before = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl or m in modules}
    try:
        for module in before:
            module._compiled_call_impl = None
        if compilation is not None:
            torch.compiler.reset()
            for module in modules:
                module.compile(**compilation.arguments)
            compiled = None
            while compiled != (compiled := compiled_so_far()):
                step.run()
                step.model.zero_grad(set_to_none=True)
        yield
    finally:
        for module, own in before.items():
            module._compiled_call_impl = own


class _Unwatched:
    """Calls a compiled module without the hooks that came after it was compiled, such as those of a recorder.

    Dynamo would trace these hooks, and compile again because of them. Those of the module itself, and global ones, run
    here instead.
    """

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any]) -> None:
        self._module = module
        self._compiled = compiled
        self._own = [(m, {name: dict(vars(m)[name]) for name in _HOOKS}) for m in module.modules()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = torch.nn.modules.module
        global_before, global_after = hooks._global_forward_pre_hooks, hooks._global_forward_hooks
        own = self._own[0][1]["_forward_pre_hooks"]
        added = [(key, hook) for key, hook in self._module._forward_pre_hooks.items() if key not in own]
        for hook in list(global_before.values()):
            hook(self._module, args)
        for key, hook in added:
            if key in self._module._forward_pre_hooks_with_kwargs:
                hook(self._module, args, kwargs)
            else:
                hook(self._module, args)
        pairs = [(vars(module)[name], known[name]) for module, known in self._own for name in known]
        with contextlib.ExitStack() as stack:
            for current in (global_before, global_after):
                stack.enter_context(_reduced_to({}, current))
            for current, known in pairs:
                if current.keys() != known.keys():
                    stack.enter_context(_reduced_to(known, current))
            stack.enter_context(function_modes_off())
            output = self._compiled(*args, **kwargs)
            for current, known in pairs:
                known.update(current)  # hooks that the model registered during the call are its own
        for hook in list(global_after.values()):
            hook(self._module, args, output)
        return output


@contextlib.contextmanager
def _reduced_to(known: Mapping[Any, Any], hooks: dict[Any, Any]) -> Iterator[None]:
    before = dict(hooks)
    hooks.clear()
    hooks.update(known)
    try:
        yield
    finally:
        now = dict(hooks)  # with those that were registered inside
        hooks.clear()
        hooks.update(before | now)


def _gpu(spec: DeviceSpec) -> SimpleNamespace:
    """Return the properties of a device as CUDA names them; those that ``DeviceSpec`` lacks are of recent boards."""
    major, minor = spec.capability or (9, 0)
    return SimpleNamespace(
        name=spec.name,
        major=major,
        minor=minor,
        total_memory=spec.memory_bytes,
        multi_processor_count=spec.sm_count,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536 if (major, minor) in ((8, 6), (8, 9), (12, 0)) else 2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=(227 if major >= 9 else 163 if (major, minor) == (8, 0) else 99) * 1024,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472 if major >= 9 else 167936,
        L2_cache_size=50 * 2**20,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
