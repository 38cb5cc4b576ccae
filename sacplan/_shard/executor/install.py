"""Puts a sharding on a model and takes it off: parameters and gradients get their layouts, and calls are counted."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sacplan._shard.executor.grid import Grid
from sacplan._shard.executor.placed import moved_to, place, placed_from
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placements, fits, format_layout
from sacplan._shard.places import CallPattern, matches
from sacplan._shard.process_groups import check_ranks
from sacplan._torch.autograd import backward_number, call_after_backward
from sacplan._torch.dtensors import DTensor
from sacplan._torch.fake_tensors import active_fake_mode
from sacplan.errors import PlanError, PlanMismatch


def spread(
    model: nn.Module,
    mesh: Mesh,
    device_mesh: DeviceMesh,
    homes: Mapping[str, Placements],
    places: Sequence[CallPattern] = (),
    *,
    check: bool = True,
) -> ShardingHandle:
    """Spread a model over the ranks of a mesh; call it on all of them, with the same model on each.

    Parameters become placed tensors; make the optimizer afterwards. Buffers stay plain, replicated on each rank.

    Args:
        model: unsharded on each rank, with the same values.
        mesh: the ranks.
        device_mesh: the same ranks; see ``torch.distributed.device_mesh.init_device_mesh``.
        homes: the layouts of parameters by name pattern (``*`` is the number of a layer). The others are replicated.
        places: calls whose inputs are moved.
        check: in the first step, compare the batches of all ranks.

    Returns:
        A handle that removes it.

    Raises:
        PlanError: the mesh does not match the ranks, or a parameter cannot have its layout.
        PlanMismatch: the model has no parameter of a pattern, or another rank has another model or sharding.
    """
    check_ranks(mesh.size)
    if active_fake_mode() is None:  # else nothing is sent, and there are no values
        _agree(model, mesh, homes, places)
    grid = Grid(mesh, device_mesh, places, check)
    return ShardingHandle(model, grid, _homes_of(model, mesh, homes))


class ShardingHandle:
    """A sharding on a model.

    Attributes:
        grid: the state that its tensors share.
        never_met: the places that no call was found for so far.
    """

    def __init__(self, model: nn.Module, grid: Grid, homes: Mapping[str, Placements]) -> None:
        self.grid = grid
        self._model: nn.Module | None = model
        self._shells: list[tuple[nn.Parameter, Any]] = []
        self._hooks: list[Any] = []
        made: dict[int, Any] = {}
        # All names, since a tied parameter has to be replaced in each of its modules; made once, so that it
        # stays tied.
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = self._placed(parameter, homes[name])
                self._shells.append((parameter, made[id(parameter)]))
        _replace(model, made)
        self._watch(model)

    @property
    def has_run(self) -> bool:
        """Whether the model was called since."""
        return bool(self.grid.prepared)

    @property
    def never_met(self) -> Sequence[CallPattern]:
        """The places that no call was found for so far."""
        return self.grid.places.never_met()

    def from_parts(self, part: torch.Tensor, layout: Placements) -> torch.Tensor:
        """Return a tensor of which each rank has loaded its own part, such as a batch cut along dimension 0, ``S0``.

        Args:
            part: this rank's; of one size on all ranks.
            layout: how the parts make the whole.

        Raises:
            PlanError: parts of this shape do not make a tensor of this layout.
        """
        shape = list(part.shape)
        for placement, n in zip(layout, self.grid.ranks, strict=True):
            if placement.is_cut and placement.dim < len(shape):
                shape[placement.dim] *= n
        if not fits(shape, layout, self.grid.ranks):
            raise PlanError(
                f"parts of shape {tuple(part.shape)} on mesh {self.grid.mesh} do not make a tensor that lies as "
                f"{format_layout(layout)}."
            )
        stride = torch.empty(shape, device="meta").stride()
        return place(part, self.grid.form(layout, torch.Size(shape), stride, part.dtype), self.grid)

    def _placed(self, parameter: nn.Parameter, home: Placements) -> Any:
        # Of ``fully_shard`` or ``parallelize_module``: two shardings of one parameter do not go together.
        if isinstance(parameter, DTensor):
            raise PlanError("a parameter is sharded already; spread the whole model.")
        gradient = parameter.grad
        with torch.no_grad():
            placed = placed_from(parameter.detach(), home, self.grid, weight=True)
            if type(placed.detach()) is not type(placed):
                raise PlanError(
                    f"torch {torch.__version__} runs the ops of DTensors without asking their class, so no model can "
                    "be spread by a plan with a mesh. Use torch 2.12 or newer."
                )
            made = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            made.__dict__.update(
                {name: value for name, value in parameter.__dict__.items() if name not in made.__dict__}
            )
            # A model may have gradients already, such as between micro-batches.
            if gradient is not None:
                made.grad = placed_from(gradient, home, self.grid)
        # A hook on the tensor runs before the gradient is accumulated, so ``grad`` has the parameter's layout
        # from the beginning.
        if parameter.requires_grad:
            self._hooks.append(made.register_hook(self._sends_home(home)))
        # Hooks of the user or of a library move with the parameter, after our own, so that they see gradients
        # in the layout of the parameter.
        for hook in (parameter._backward_hooks or {}).values():
            made.register_hook(hook)
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            made.register_post_accumulate_grad_hook(hook)
        # The rank keeps its part alone. The emptied object gets its values back when the sharding is removed.
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return made

    def _sends_home(self, home: Placements) -> Any:
        grid = self.grid

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            number = backward_number()
            # Once for each backward pass: the callback that the engine runs at its end.
            if number != grid.backward:
                grid.backward = number
                call_after_backward(_ends(grid))
            return moved_to(gradient, home, grid)

        return hook

    def _watch(self, model: nn.Module) -> None:
        """Begin steps; know the module that runs, if places ask; let go of copies when the model's forward ends."""
        grid = self.grid
        for fqn, module in model.named_modules():
            begins = _begins(grid, fqn)
            self._hooks.append(module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True))
        # Two hooks for each module cost time in every call, so only where places ask.
        if len(grid.places):
            for fqn, module in model.named_modules():
                self._hooks.append(module.register_forward_pre_hook(_enters(grid, fqn), prepend=True))
                self._hooks.append(module.register_forward_hook(_leaves(grid), always_call=True))

        self._hooks.append(model.register_forward_hook(_clears(grid), always_call=True))

    def remove(self) -> None:
        """Make the parameters unsharded and plain again, on all ranks; gradients too. Call it on all of them."""
        # Removed already.
        if self._model is None:
            return
        for hook in self._hooks:
            hook.remove()
        self.grid.copies.clear()
        back: dict[int, Any] = {}
        whole = self.grid.replicated
        with torch.no_grad():
            for parameter, placed in self._shells:
                parameter.data = moved_to(placed, whole, self.grid)._local_tensor
                if placed.grad is not None:
                    parameter.grad = moved_to(placed.grad, whole, self.grid)._local_tensor
                parameter.requires_grad_(placed.requires_grad)
                attributes = {n: v for n, v in placed.__dict__.items() if n not in _OURS}
                parameter.__dict__.update(attributes)
                back[id(placed)] = parameter
        _replace(self._model, back)
        self._model, self._shells = None, []


_OURS = frozenset(("_form", "_grid", "_is_copy", "_same", "_local_tensor", "_spec", "_is_param"))


def _replace(model: nn.Module, by_id: Mapping[int, Any]) -> None:
    """Replace parameters by others wherever they are, so that tied ones stay tied."""
    # ``_parameters`` and not ``setattr``: the objects of the modules stay, and so do the names in
    # ``state_dict``.
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in by_id:
                module._parameters[name] = by_id[id(parameter)]


def _begins(grid: Grid, fqn: str) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        grid.agreement.begin(module, fqn, args, kwargs)

    return hook


def _ends(grid: Grid) -> Any:
    def callback() -> None:
        grid.copies.clear()
        grid.agreement.end()

    return callback


def _enters(grid: Grid, fqn: str) -> Any:
    def hook(*_: Any) -> None:
        grid.modules.append((fqn, Counter()))

    return hook


def _clears(grid: Grid) -> Any:
    def hook(*_: Any) -> None:
        grid.copies.clear()

    return hook


def _leaves(grid: Grid) -> Any:
    def hook(*_: Any) -> None:
        grid.modules.pop()

    return hook


def _homes_of(model: nn.Module, mesh: Mesh, homes: Mapping[str, Placements]) -> dict[str, Placements]:
    """Return the layouts of parameters by name. Tied ones have the layout that any of their names has."""
    names = dict(model.named_parameters(remove_duplicate=False))
    whole: Placements = (REPLICATED,) * len(mesh.axes)
    found: dict[str, Placements] = {}
    by_id: dict[int, tuple[str, Placements]] = {}
    for pattern, layout in homes.items():
        among = [name for name in names if matches(pattern, name)]
        if not among:
            raise PlanMismatch(
                f"the model has no parameter {pattern!r}, which the sharding gives a home; its parameters are "
                f"{', '.join(list(names)[:5])}, ... Plan again for this model."
            )
        for name in among:
            shape = tuple(names[name].shape)
            if len(layout) != len(mesh.axes) or any(p.is_partial for p in layout):
                raise PlanError(
                    f"home {format_layout(layout)!r} of {pattern} must have a placement R or S for each axis of {mesh}."
                )
            if not fits(shape, layout, mesh.ranks):
                raise PlanError(
                    f"parameter {name} of shape {shape} cannot be cut as {format_layout(layout)} on mesh {mesh}: "
                    f"the ranks do not divide it evenly. Try another mesh, or plan again."
                )
            # All patterns that match a parameter, under any of its names, must give it the same layout.
            known = by_id.setdefault(id(names[name]), (name, layout))
            if known[1] != layout:
                raise PlanError(
                    f"parameters {known[0]} and {name} are one, and have homes {format_layout(known[1])} and "
                    f"{format_layout(layout)}; give both the same."
                )
    for name, parameter in names.items():
        found[name] = by_id[id(parameter)][1] if id(parameter) in by_id else whole
    return found


def _agree(
    model: nn.Module, mesh: Mesh, homes: Mapping[str, Placements], places: Sequence[CallPattern]
) -> None:
    """Check that all ranks have the same model and sharding; else they would wait for each other for ever.

    Raises:
        PlanMismatch: they do not; it names them.
    """
    sharding = {
        "mesh": mesh.axes,
        "homes": {pattern: format_layout(layout) for pattern, layout in homes.items()},
        "places": [(p.unit, p.op, p.occurrence, p.inputs) for p in places],
    }
    mine = {
        "the sharding": _digest([json.dumps(sharding).encode()]),
        "names, shapes and types of the model's tensors": _digest(_described(model)),
        "values of the model's parameters": _digest(_sampled(model)),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for what in mine:
        others = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if others:
            raise PlanMismatch(
                f"ranks differ in {what}: {', '.join(map(str, others))} from rank 0. "
                f"Load the same plan on each, and make the model from the same seed or checkpoint."
            )


def _digest(parts: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _described(model: nn.Module) -> Iterator[bytes]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, t in tensors:
        yield f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad} ".encode()


_SAMPLES = 64


def _sampled(model: nn.Module) -> Iterator[bytes]:
    """Yield a few bytes of each parameter."""
    for parameter in model.parameters():
        # Nothing to sample.
        if parameter.is_meta or not parameter.numel():
            continue
        flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().flatten()
        few = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().cpu()
        yield few.view(torch.uint8).numpy().tobytes()
