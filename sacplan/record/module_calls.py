"""The calls of modules: which one runs, and to which one an op belongs.

In the forward pass that is the innermost call on the stack. In the backward pass no module runs. There each autograd
node has the sequence number that the forward pass gave it, and the call whose range of numbers it falls into is the
one that made it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs

from sacplan.core.program import ROOT_SCOPE, Event, Scope
from sacplan.errors import TraceError
from sacplan.torch_compat.autograd import autograd_sequence_number, called_by_checkpoint, in_backward
from sacplan.torch_compat.distributed_modules import gathers

_ENTER, _EXIT = int(Event.ENTER), int(Event.EXIT)


def other_thread(what: str) -> TraceError:
    """Return the error to raise where a part of the step runs in another thread."""
    return TraceError(
        f"{what} runs in another thread than the step that is recorded, such as one of a ThreadPoolExecutor. Dispatch "
        "modes and saved-tensor hooks belong to one thread, so neither a recording nor a plan would see what it runs. "
        "Call the parts of the model one after the other, in the thread that calls the model."
    )


@dataclass(eq=False)
class ModuleCalls:
    """Hooks on all modules, and the calls that they see.

    Args:
        events: the recorder's.
        n_ops: tells how many ops ran so far.
        bytes_of: bytes of the tensors in a value.
        fail: keeps an error, to be raised when the recorder is left.
        track_model: names the modules of a model that nobody has named before its first call.

    Attributes:
        backward_order: calls in the order in which the backward pass comes to them, outer ones before inner ones.
        on_dtensors: modules whose forward ran ops on DTensors; ``""`` outside of all.
        checkpointed: modules whose forward ``torch.utils.checkpoint`` ran again in the backward pass.
    """

    events: list[tuple[int, int]]
    n_ops: Callable[[], int]
    bytes_of: Callable[[Any], int]
    fail: Callable[[Exception], None]
    track_model: Callable[[torch.nn.Module], None]
    backward_order: dict[int, None] = field(default_factory=dict)
    on_dtensors: set[str] = field(default_factory=set)
    checkpointed: dict[str, None] = field(default_factory=dict)
    _fqns: dict[int, str] = field(default_factory=dict)
    _modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    _calls: list[Scope] = field(
        default_factory=list
    )  # the end and the output of one that runs are not known yet
    _stack: list[int] = field(default_factory=list)
    # Autograd's next sequence number, and the call that runs from there on.
    _marks: list[tuple[int, int]] = field(default_factory=list)
    _backward_call: int = ROOT_SCOPE
    _thread: int = field(default_factory=threading.get_ident)
    _removers: list[Any] = field(default_factory=list)
    _have_hooks: set[int] = field(
        default_factory=set
    )  # modules with hooks of their own that run before their forward

    def name(self, model: torch.nn.Module) -> None:
        """Name the modules after ``model``. One that two models share keeps its first name."""
        for fqn, module in model.named_modules():
            self._fqns.setdefault(id(module), fqn)
            self._modules[id(module)] = module

    def __enter__(self) -> ModuleCalls:
        hooks = torch.nn.modules.module
        self._removers = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._exit, always_call=True),
        ]
        # Global pre-hooks run before a module's own ones (torch/nn/modules/module.py, ``_call_impl``). What own
        # ones run is no part of the module, since recipes of a unit do not see it. So the call begins in a hook after
        # these.
        for key, module in self._modules.items():
            if module._forward_pre_hooks:
                self._removers.append(module.register_forward_pre_hook(self._begin))
                self._have_hooks.add(key)
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *exc: object) -> None:
        for remover in self._removers:
            remover.remove()
        self._removers = []
        self._have_hooks.clear()

    def restart(self) -> None:
        """Begin a new record, between two forwards."""
        self._calls.clear()
        self._marks.clear()
        self.backward_order.clear()
        self.on_dtensors.clear()
        self.checkpointed.clear()
        self._backward_call = ROOT_SCOPE

    def forget(self) -> None:
        """Let go of the model."""
        self._modules.clear()
        self._fqns.clear()

    # --- the forward pass --------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._have_hooks:
            self._begin(module, args)

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        # These are no calls of the forward pass: inside of a backward pass, in another thread (an error if the module
        # is the model's, since its ops would be missing), and of a module that nobody has named.
        if in_backward():
            # Checkpointing runs a forward again, and a custom autograd.Function may call modules in its backward: their
            # ops belong to the node that runs.
            fqn = self._fqns.get(id(module))
            if fqn is not None and called_by_checkpoint():
                self.checkpointed[fqn] = None
            return
        if threading.get_ident() != self._thread:
            if id(module) in self._fqns:
                error = other_thread(f"module {self._fqns[id(module)]!r}")
                self.fail(error)  # whoever started the thread may never ask for its result
                raise error
            return  # of a model that is not recorded
        if id(module) not in self._fqns:
            if self._stack or self._fqns:
                return  # a module that the model does not own, such as a loss: part of whoever calls it
            self.track_model(module)  # nobody named a model: the first module that is called is taken for it
        call = len(self._calls)
        n_ops = self.n_ops()
        fqn = self._fqns[id(module)]
        self._calls.append(Scope(fqn, self.current, n_ops, n_ops, self.bytes_of(args), 0))
        self._stack.append(call)
        self._marks.append((autograd_sequence_number(), call))
        self.events.append((_ENTER, call))

    def _exit(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # ``_begin`` ignores these calls, too, so there is nothing to end.
        if in_backward() or id(module) not in self._fqns or not self._stack:
            return
        if threading.get_ident() != self._thread:
            return
        index = self._stack.pop()
        end, nbytes = self.n_ops(), self.bytes_of(output)
        self._calls[index] = structs.replace(self._calls[index], end_op=end, output_bytes=nbytes)
        self._marks.append((autograd_sequence_number(), self.current))
        self.events.append((_EXIT, index))

    @property
    def current(self) -> int:
        """The call whose forward runs, or ``ROOT_SCOPE``."""
        return self._stack[-1] if self._stack else ROOT_SCOPE

    def note_dtensors(self) -> None:
        """Note that the forward that runs now has run an op on DTensors."""
        self.on_dtensors.add(self._calls[self._stack[-1]].fqn if self._stack else "")

    # --- the backward pass -------------------------------------------------------------------

    def of_node(self, number: int | None) -> int:
        """Return the call that made an autograd node.

        Marks rise with the sequence number, so the last mark at or before the node's number is the call that ran when
        the node was made. Nodes that accumulate gradients have no number: they go with the node before.
        """
        if number is None:
            return self._backward_call
        # ``bisect_right``: of several marks at one number the last is right, since no node was made between them.
        at = bisect_right(self._marks, number, key=lambda mark: mark[0])
        call = self._marks[at - 1][1] if at else ROOT_SCOPE
        self._backward_call = call
        # The calls around this one that the backward pass has not come to yet are before it, outermost first.
        chain = []
        while call != ROOT_SCOPE and call not in self.backward_order:
            chain.append(call)
            call = self._calls[call].parent
        self.backward_order.update(dict.fromkeys(reversed(chain)))
        return self._backward_call

    # --- the result --------------------------------------------------------------------------

    def scopes(self) -> tuple[Scope, ...]:
        """Return the calls as plain values."""
        return tuple(self._calls)

    def leaf_fqns(self) -> frozenset[str]:
        """Modules without children."""
        return frozenset(fqn for key, fqn in self._fqns.items() if not any(self._modules[key].children()))

    def gathering(self) -> frozenset[str]:
        """Modules that gather parameters."""
        return frozenset(fqn for key, fqn in self._fqns.items() if gathers(self._modules[key]))

    def parameter_bytes(self) -> dict[str, int]:
        """By module, bytes of its parameters and those of the modules in it."""
        parameters = {id(p): p for m in self._modules.values() for p in m.parameters(recurse=False)}
        sizes = {key: self.bytes_of(p) for key, p in parameters.items()}  # once each: modules are nested
        return {
            fqn: sum(sizes[id(p)] for p in self._modules[key].parameters()) for key, fqn in self._fqns.items()
        }
