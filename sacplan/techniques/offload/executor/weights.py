"""Parameters that lie on the host: each is on the device while its module runs, and for the backward pass.

``parameter.data`` is memory of the host between the uses, so ``state_dict``, ``named_parameters`` and whoever loads
into the parameter find the weights there. It is swapped for a copy on the device while the module runs. What autograd,
recipes and nodes of custom functions have saved of that copy lets go of it when the call ends, and shares a second copy
when it is asked for.

A trained parameter is updated on the host. Its optimizer moves the gradient there as soon as it is computed, as
torchao's ``CPUOffloadOptimizer`` does with ``offload_gradients=True``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from sacplan.core.decisions import OffloadWeight
from sacplan.errors import OffloadError, PlanError
from sacplan.techniques.base.technique import Installed
from sacplan.techniques.offload.executor.marks import Board
from sacplan.techniques.offload.executor.parcels import Parcel, whole
from sacplan.techniques.offload.executor.transfers import Transfer
from sacplan.techniques.runtime.recording import here, unrecorded
from sacplan.techniques.runtime.saved import SavedStorage
from sacplan.techniques.runtime.stand_ins import StandIn, check_there, put_on, take_off
from sacplan.techniques.runtime.tensors import view_of
from sacplan.torch_compat.autograd import autograd_sequence_number, custom_functions_since
from sacplan.torch_compat.compiling import stop_compiling
from sacplan.torch_compat.host_memory import empty_on_host, note_on_host
from sacplan.torch_compat.ops import tensors_in
from sacplan.torch_compat.private import is_plain

_switching = threading.RLock()
"""Held while parameters are switched: another thread may call the same module."""


class HostWeight:
    """A parameter whose memory is on the host.

    Args:
        module: the module that has it.
        name: its name there.
        number: that of the decision.
        decision: the one that it carries out.
        board: knows what has been taken away in the forward pass that runs.

    Raises:
        PlanError: the memory of the parameter is not its own.
    """

    def __init__(
        self, module: torch.nn.Module, name: str, number: int, decision: OffloadWeight, board: Board
    ) -> None:
        self._module, self._name, self._number, self._board = module, name, number, board
        self._decision = decision
        parameter = module._parameters[name]
        if parameter is None or not _fills_storage(parameter):
            raise PlanError(
                f"{self} is a part of other memory, or a tensor subclass, and the plan leaves it on the host. Give it "
                "memory of its own, parameter.data = parameter.data.clone(); or plan with other techniques than "
                "offload."
            )
        self._device = parameter.device
        self._arriving: tuple[Transfer, int] | None = None
        self._inside = 0  # calls that run, one inside of another
        self._there: Callable[[], Any] = _nothing  # the storage on the device while they run
        self._copied = False
        self._settle(parameter)

    def __str__(self) -> str:
        return f"parameter {self._name!r} of a {type(self._module).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the model, whose parameter settles when it is first used."""
        reset = {"_host": torch.empty(0), "_arriving": None, "_inside": 0, "_there": _nothing}
        return self.__dict__ | reset | {"_copied": True}

    def _settle(self, parameter: torch.Tensor) -> None:
        """Have a parameter on the host from here on."""
        self._host = _on_host(parameter)
        self._copied = False
        with torch.no_grad():
            parameter.data = _as(parameter, self._host)

    @property
    def _parameter(self) -> torch.Tensor | None:
        """The parameter, if it is on the host; None if somebody has moved it, or put another one there."""
        parameter = self._module._parameters.get(self._name)
        if parameter is None or parameter.untyped_storage() is self._host.untyped_storage():
            return parameter
        # A copy of the model settles here, and a parameter that ``load_state_dict(assign=True)`` took from elsewhere.
        if (self._copied or parameter.device != self._device) and _fills_storage(parameter):
            with unrecorded():
                self._settle(parameter)
            return parameter
        return None

    def begin(self) -> None:
        """Begin to copy to the device, for the forward pass."""
        parameter = self._parameter
        if parameter is not None and not self._inside:
            with unrecorded(), torch.no_grad():
                self._arriving = self._sent(), parameter._version

    def _sent(self) -> Transfer:
        host = self._host
        return Transfer.back(host, torch.empty(host.shape, dtype=host.dtype, device=self._device), None)

    def enter(self) -> None:
        """Have the parameter on the device.

        Raises:
            PlanError: it is trained by now, and was not when the plan was made.
        """
        with _switching:
            self._inside += 1
            # In a call inside of another the parameter is there already, unless it has left with the last of its uses.
            if not self.is_there:
                self._enter()

    def _enter(self) -> None:
        parameter = self._parameter
        if parameter is None:
            return
        if parameter.requires_grad and not self._decision.trained:
            raise PlanError(
                f"{self} is trained by now, and the plan leaves it on the host, never to be copied back. Freeze it, "
                "requires_grad_(False); or remove the plan, and make one from a profile of the model as it is."
            )
        arriving, self._arriving = self._arriving, None
        with unrecorded(), torch.no_grad():
            # A copy that began before somebody wrote to the parameter, as after an error, has old values.
            begun = arriving is not None and arriving[1] == parameter._version
            transfer = arriving[0] if arriving is not None and begun else self._sent()
            copy = transfer.target
            transfer.wait(copy.untyped_storage())
            parameter.data = _as(parameter, copy)
            self._there = weakref.ref(copy.untyped_storage())

    @property
    def is_there(self) -> bool:
        """Whether a call has it on the device."""
        return self._there() is not None

    def leave(self, nodes: Sequence[Any]) -> None:
        """Take the parameter away from the device, and have what is saved for the backward pass let go of it.

        Args:
            nodes: of custom functions in the call, which may keep it as an attribute.
        """
        with _switching:
            self._inside -= 1
            # The last of its uses ends. If ``around`` is another module, that one runs on without the parameter.
            if self._inside <= (self._decision.around != self._decision.module):
                self._leave(nodes)

    def _leave(self, nodes: Sequence[Any]) -> None:
        parameter = self._module._parameters.get(self._name)
        there, self._there = self._there(), _nothing
        if parameter is None or there is None or parameter.untyped_storage() is not there:
            return
        with unrecorded(), torch.no_grad():
            recorder = here.recorder
            saved = recorder.saved_on(parameter) if recorder is not None else None
            parameter.data = _as(parameter, self._host)
            # What hooks around the unit hold stays where they have it.
            if saved is not None and saved.for_others:
                self._board.note_hooks(self._decision.unit)
            elif saved is not None:
                saved.stand = self.second(parameter._version)
                for node in nodes:
                    _OfNode(node, self, saved)
                saved.let_go(parameter._version)
                self._board.enter(self._number, saved)

    def second(self, version: int) -> _Second:
        """Return a copy for the backward pass of what the parameter is at this version."""
        return _Second(self, self._host, self._device, version)

    def check_unwritten(self, version: int) -> None:
        """Raise ``OffloadError`` if the parameter, if it is on the host, was written since it had this version."""
        parameter = self._parameter
        if parameter is not None and parameter._version != version:
            raise OffloadError(
                f"{self} was written in place between the forward "
                "and the backward pass that needs it. Load or change weights before the forward pass, or after the "
                "backward pass."
            )

    def check_gradient(self, optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> None:
        """Raise ``OffloadError`` if an optimizer of these parameters, by identity, would step it on the device."""
        parameter = self._parameter
        if parameter is not None and parameter.grad is not None and id(parameter) in parameters:
            raise OffloadError(
                f"{self} lies on the host, and its gradient is on the device, where {type(optimizer).__name__} would "
                "update it. Train with the kind of optimizer that the plan was made for, which updates it on the host: "
                "torchao.optim.CPUOffloadOptimizer(params, offload_gradients=True, ...)."
            )

    def restore(self) -> None:
        """Put the parameter back on the device, for good."""
        parameter, self._arriving = self._parameter, None
        if parameter is not None:
            with torch.no_grad():
                parameter.data = _as(parameter, self._host.to(self._device, copy=True))


def _nothing() -> None:
    return None


class _Second(Parcel):
    """The second copy of a parameter on the device, for the backward pass."""

    def __init__(self, weight: HostWeight, host: torch.Tensor, device: torch.device, version: int) -> None:
        self.version = version
        self._weight = weight
        self._device, self._host = device, host
        self._out = self._back = None
        self._version_back = 0

    def fetch(self) -> None:
        """Begin to copy, unless that has begun."""
        if self._back is None:
            self._weight.check_unwritten(self.version)
        super().fetch()


class _Away:
    """Stands in an attribute of a node for a tensor that is away."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.view = view_of(tensor)


class _OfNode:
    """The attributes in which the node of a custom function keeps a parameter: they have it while the node runs.

    Args:
        node: lives as long as the graph, and has this among its hooks.
        weight: the parameter.
        saved: its storage in the call.
    """

    def __init__(self, node: Any, weight: HostWeight, saved: SavedStorage) -> None:
        self._node, self._weight = weakref.ref(node), weight
        self._saved: SavedStorage | None = saved
        self._away: dict[str, Any] = {}
        self._version = 0
        saved.add(self)
        node.register_prehook(self._put_back)
        node.register_hook(self._take_away)

    def let_go(self, version: int) -> bool:
        """Let go of the tensors, see ``Holder``; autograd does not check the versions of attributes either."""
        assert self._saved is not None
        self._version, storage, node = version, self._saved.storage(), self._node()
        for name, value in list(vars(node).items()):
            if any(is_plain(t) and t.untyped_storage() is storage for t in tensors_in(value)):
                self._away[name] = tree_map_only(
                    torch.Tensor, lambda t: _Away(t) if t.untyped_storage() is storage else t, value
                )
        self._take_away()
        return bool(self._away)

    def _put_back(self, _: Any) -> None:
        # In a retained graph, the node may run again after the copy is gone.
        stand = self._saved.stand if self._saved is not None else self._weight.second(self._version)
        assert stand is not None
        with unrecorded(), torch.no_grad():
            for name, value in self._away.items():
                setattr(self._node(), name, tree_map_only(_Away, lambda away: stand.take(away.view), value))

    def _take_away(self, *ran: Any) -> None:
        for name, value in self._away.items():
            setattr(self._node(), name, value)
        if ran:  # as autograd's hook, after the node
            self._saved = None


class WeightForward(StandIn):
    """Stands in for the forward of a module whose calls begin copies of parameters, or use such parameters.

    Attributes:
        begins: the parameters whose copies begin with a call.
        own: those that are on the device while a call runs.
    """

    def __init__(self, module: torch.nn.Module, fqn: str) -> None:
        super().__init__(module, fqn)
        self.begins: list[HostWeight] = []
        self.own: list[HostWeight] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with its parameters on the device."""
        if torch.compiler.is_compiling():
            stop_compiling(
                PlanError,
                f"the plan leaves parameters of module {self.fqn!r} on the host (technique offload), which "
                "torch.compile cannot copy. Run the model uncompiled, or plan with other techniques than offload.",
            )
        for weight in self.begins:
            weight.begin()
        number, nodes = autograd_sequence_number(), list[Any]()
        with ExitStack() as stack:
            for weight in self.own:
                stack.callback(weight.leave, nodes)
                weight.enter()
            out = self.call_original(*args, **kwargs)
            nodes += custom_functions_since(number, out) if any(w.is_there for w in self.own) else ()
            return out


class InstalledWeights(Installed):
    """Parameters of a model that lie on the host.

    Args:
        model: the model.
        weights: decisions about parameters, by number.
        board: knows what has been taken away in the forward pass that runs.

    Raises:
        PlanError: a parameter cannot leave, or is not there.
    """

    def __init__(self, model: torch.nn.Module, weights: Mapping[int, OffloadWeight], board: Board) -> None:
        self._forwards: dict[str, WeightForward] = {}
        self._weights: list[HostWeight] = []
        self._watched: Any = None
        parameters = dict(model.named_parameters(remove_duplicate=False))
        try:
            for number, one in weights.items():
                given = parameters.get(one.parameter)
                if given is None or (given.requires_grad and not one.trained):
                    raise PlanError(
                        f"the plan leaves parameter {one.parameter!r} on the host, which the model does not have, or "
                        "trains. Freeze it, requires_grad_(False); or profile the model as it is, and plan again."
                    )
                if model.get_submodule(one.around)._forward_pre_hooks:
                    raise PlanError(
                        f"module {one.around!r} has a forward pre-hook, which would find parameters on the host, where "
                        "the plan leaves them. Take it off; or plan with other techniques than offload."
                    )
                owner, _, name = one.parameter.rpartition(".")
                weight = HostWeight(model.get_submodule(owner), name, number, one, board)
                self._weights.append(weight)
                self._forward_of(model, one.begin).begins.append(weight)
                for fqn in dict.fromkeys((one.around, one.module)):
                    self._forward_of(model, fqn).own.append(weight)
            if any(one.trained for one in weights.values()):
                self._watched = register_optimizer_step_pre_hook(self._check_gradients)
        except Exception:
            self.remove()
            raise

    def _check_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for weight in self._weights:
            weight.check_gradient(optimizer, parameters)

    def _forward_of(self, model: torch.nn.Module, fqn: str) -> WeightForward:
        if fqn not in self._forwards:
            module = model.get_submodule(fqn)
            found = self._forwards[fqn] = WeightForward(module, fqn)
            # Inside the recorder of a unit, which must still be there when the call lets go of its parameters.
            above = found.replaced
            if isinstance(above, StandIn) and above.records:
                found.replaced, above.replaced = above.replaced, found
            else:
                put_on(module, found)
        return self._forwards[fqn]

    def check_removable(self) -> None:
        """Raise ``PlanError`` if somebody replaced a forward again."""
        check_there(self._forwards.values())

    def remove(self) -> None:
        """Bring the parameters back, and give every module its own forward back."""
        if self._watched is not None:
            self._watched.remove()
        for found in self._forwards.values():
            above = found.module.__dict__.get("forward")
            if above is found:
                take_off(found.module, found)
            elif isinstance(above, StandIn):
                above.replaced = found.replaced
        for weight in self._weights:
            weight.restore()
        self._forwards, self._weights = {}, []


def _fills_storage(parameter: torch.Tensor) -> bool:
    whole_bytes = parameter.untyped_storage().nbytes()
    return is_plain(parameter) and parameter.numel() * parameter.element_size() == whole_bytes


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host of all of a parameter's storage, as one vector."""
    with torch.no_grad():
        vector = whole(parameter)
        host = empty_on_host(vector)
        host.copy_(vector)
    note_on_host(host.untyped_storage())
    return host


def _as(parameter: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Return memory in the layout of a parameter."""
    return torch.as_strided(vector, parameter.shape, parameter.stride(), 0)
