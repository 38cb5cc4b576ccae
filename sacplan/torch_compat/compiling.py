"""``torch.compile``: keep Dynamo out of our own code, and stop it with an error.

Private PyTorch API, tried on 2.11 to 2.15 (``docs/versions.md``): ``torch._C._dynamo``, ``torch._dynamo.comptime``,
``torch.compiler._is_exporting_flag``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch._C._dynamo.eval_frame as _dynamo

from sacplan.errors import SacplanWarning, TraceError
from sacplan.torch_compat.versions import torch_names


def keep_dynamo_out(package: str, *names: str) -> None:
    """Keep Dynamo from compiling the functions of some modules, which dispatch modes call.

    Without this, code compiled inside a unit would be compiled with the recorder that watches its ops: that takes
    seconds, recompiles, and gains nothing.

    Args:
        package: where the modules are.
        names: their names in the package; without any, all that are imported so far.
    """
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    modules = modules or [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    # Functions inside of functions have code objects of their own, which lie among the constants of the outer ones.
    # SKIP is for the frame itself, DEFAULT for those that it calls: the user's code below may still be compiled.
    functions = [f for module in modules for f in _functions_of(module)]
    codes = [f.__code__ for f in functions]
    while codes:
        code = codes.pop()
        codes.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
        _dynamo.set_code_exec_strategy(
            code, _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
        )


def is_exporting() -> bool:
    """Whether ``torch.export`` runs. In code that Dynamo of torch 2.11 traces, torch's own function is always true."""
    return torch.compiler._is_exporting_flag


def warn_compiling(key: str, message: str) -> None:
    """Warn from code that Dynamo traces, once for each key, since it may be traced several times."""
    # Reads ``key`` and ``message`` of this frame.
    torch._dynamo.comptime.comptime(_warn_while_compiling)


_WARNED: set[str] = set()


def _warn_while_compiling(context: Any) -> None:
    key, message = (context.get_local(name).as_python_constant() for name in ("key", "message"))
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(message, SacplanWarning, stacklevel=2)


def stop_compiling(error: type[Exception], message: str) -> None:
    """Raise an error from code that Dynamo traces. Dynamo turns any other exception into a graph break."""
    torch._dynamo.comptime.comptime(_raise_while_compiling)
    raise error(message)  # reached where Dynamo does not trace, and `comptime` does nothing


@contextlib.contextmanager
def compiled_in_place(model: Any) -> Iterator[Any]:
    """Replace each ``torch.compile`` wrapper in the model by the module that it wraps; undone on exit.

    It yields the model. Inside, modules have the names that they had before they were compiled, and a compiled module
    is as after ``module.compile()``. What is no module is yielded as given.

    Raises:
        TraceError: ``torch.compiler.disable`` returned a module.
    """
    modules: list[Any] = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    with contextlib.ExitStack() as undo:
        # Inner wrappers first: of two around one module, the outer one overwrites what the inner one has set.
        for module in reversed(modules):
            inner = _inside(module)
            if inner is not module:
                if module.dynamo_ctx.callback is None:  # made by torch.compiler.disable
                    raise TraceError(
                        f"torch.compiler.disable returned a {type(inner).__name__} of this model. Put the module "
                        "itself there, with module.forward = torch.compiler.disable(module.forward)."
                    )
                undo.callback(setattr, inner, "_compiled_call_impl", inner._compiled_call_impl)
                inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)
                continue
            for name, child in list(module._modules.items()):
                if _inside(child) is not child:
                    undo.callback(module._modules.__setitem__, name, child)
                    module._modules[name] = _inside(child)
        yield _inside(model)


def _inside(module: Any) -> Any:
    while isinstance(module, torch.nn.Module) and "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
    return module


def compiled_with(compiled: Any) -> dict[str, Any]:
    """Return the arguments of ``torch.compile`` that made a compiled function: backend, dynamic, fullgraph, options.

    A mode shows as the options that it stands for.
    """
    with torch_names():
        context = inspect.getclosurevars(compiled).nonlocals["self"]
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        return {
            "backend": backend.compiler_name,
            "dynamic": backend.dynamic,
            "fullgraph": context.fullgraph,
            "options": dict(getattr(backend, "config", {})),
        }


def _raise_while_compiling(context: Any) -> None:
    error, message = (context.get_local(name).as_python_constant() for name in ("error", "message"))
    raise _uncompilable(error, message)


def _uncompilable(error: type[Exception], message: str) -> Exception:
    """Return the same error as a type that Dynamo neither swallows nor wraps (``UncapturedHigherOrderOpError``)."""
    with torch_names():
        from torch._dynamo.exc import UncapturedHigherOrderOpError

    found: Exception = type(error.__name__, (error, UncapturedHigherOrderOpError), {})(message)
    return found


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            # Methods and properties wrap the function. A function that is only imported belongs to another module.
            function = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", member))
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function
