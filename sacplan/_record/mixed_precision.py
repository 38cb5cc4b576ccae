"""Record a step in which units of ``fully_shard`` compute in the type of their mixed-precision policy.

    with lowered(model, MixedUnits(("layers.*", ""), policy)) as mixed:
        mixed.begin(recorder)    # parameters of units have ``param_dtype``
        ...                      # forward and backward
        mixed.finish(recorder)   # parameters and gradients have their own type again, for the optimizer

FSDP2 keeps the shards in the parameters' own type and gathers them in ``param_dtype``: modules see parameters of that
type, gradients have it, and the optimizer sees shards of the type that the model was made in. The whole model is
recorded in the same way. A parameter's data is a tensor of ``param_dtype`` until its gradient is there, and its own
after that. Both are one storage to the recorder, since what is gathered is no parameter of the program: the rewrite for
a rank adds it (``_ranks/fully_shard.py``). The recorded step is therefore only good for that rewrite.

Inputs and outputs of units are cast by hooks in the places of those of ``FSDPState`` (``_fsdp_state.py``): outside of
the module's call, so that the ops of the module keep the call sites that they have when ``fully_shard`` runs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch

from sacplan._program.mixed_precision import MixedUnits
from sacplan._program.program import is_inside
from sacplan._record.recorder import Recorder
from sacplan._torch.fully_shard import apply_to_tensors
from sacplan._torch.local_tensors import stands_for_another
from sacplan.errors import TraceError


class LoweredParameters:
    """The parameters of units, each with its own data and, while modules run, with data of ``param_dtype``."""

    def __init__(self, model: torch.nn.Module, units: MixedUnits | None) -> None:
        self.units = () if units is None else matching_units(model, units.units)
        self._dtypes: dict[torch.nn.Parameter, torch.dtype] = {}
        if units is not None:
            for name, p in model.named_parameters():
                dtype = getattr(torch, units.policy.compute_dtype(str(p.dtype).removeprefix("torch.")))
                inside = any(not unit or name.startswith(f"{unit}.") for unit in self.units)
                if not inside or dtype == p.dtype:
                    continue
                if stands_for_another(p):
                    raise TraceError(
                        f"mp_policy: parameter {name!r} is a DTensor, and sacplan records mixed precision of plain "
                        "tensors only. Leave mp_policy out, or make the profile without tensor parallelism."
                    )
                self._dtypes[p] = dtype
        self._own: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._lowered: list[torch.Tensor] = []

    def begin(self, recorder: Recorder) -> None:
        """Give the parameters data of ``param_dtype``, on what the recorder takes for the same storages."""
        self._lowered.clear()  # of the step before
        with recorder.paused(), torch.no_grad():
            for p, dtype in self._dtypes.items():
                self._own[p] = own = p.data
                p.data = own.to(dtype)
                recorder.storages.is_another_of(p, own)

    def finish(self, recorder: Recorder | None = None) -> None:
        """Give the parameters their own data back, and gradients of the same type.

        Without a recorder gradients are dropped: the step is over.
        """
        with contextlib.nullcontext() if recorder is None else recorder.paused(), torch.no_grad():
            for p, own in self._own.items():
                lowered, p.grad = p.grad, None
                p.data = own
                if recorder is None or lowered is None:
                    continue
                p.grad = lowered.to(p.dtype)
                recorder.storages.is_another_of(p.grad, lowered)
                # The recorder would take its end for that of the gradient.
                self._lowered.append(lowered)
        self._own.clear()
        if recorder is None:
            self._lowered.clear()


@contextlib.contextmanager
def lowered(model: torch.nn.Module, units: MixedUnits | None) -> Iterator[LoweredParameters]:
    """Cast inputs and outputs of units inside, and hand out their parameters."""
    parameters = LoweredParameters(model, units)
    removers: list[Any] = []
    if units is not None:
        policy = units.policy
        takes, gives = (
            None if d is None else getattr(torch, d) for d in (policy.param_dtype, policy.output_dtype)
        )
        for unit in parameters.units:
            module = model.get_submodule(unit)
            # The order is that of ``fully_shard``: its hooks are before those of the module on the way in, and behind
            # them on the way out.
            if takes is not None and policy.cast_forward_inputs:
                hook = functools.partial(_cast_inputs, takes)
                removers.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
            if gives is not None:
                removers.append(module.register_forward_hook(functools.partial(_cast_outputs, gives)))
    try:
        yield parameters
    finally:
        parameters.finish()
        for remover in removers:
            remover.remove()


def matching_units(model: torch.nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules that match, without those inside of another match of the same pattern.

    ``resolve_units`` does the same once it is known which modules are called. Containers without a forward cannot be.
    """
    callable_modules = [
        fqn
        for fqn, module in model.named_modules()
        if type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)
    ]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = {fqn for fqn in callable_modules if fnmatchcase(fqn, pattern)}
        found = {fqn for fqn in matches if not any(is_inside(fqn, other) for other in matches)}
        chosen.update((fqn, None) for fqn in callable_modules if fqn in found)
    return tuple(fqn for fqn in callable_modules if fqn in chosen)


def _cast_inputs(dtype: torch.dtype, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast_outputs(dtype: torch.dtype, module: torch.nn.Module, args: Any, output: Any) -> Any:
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """Cast the floating-point tensors of a nested value, as ``_cast_fp_tensor`` of FSDP2 does."""
    return apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
