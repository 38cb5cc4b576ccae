"""``apply``: change a model in place so that it runs as planned; ``handle.remove()`` undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from sacplan.core.arguments import checked, opened
from sacplan.core.call_sites import StepDifference
from sacplan.core.names import folded_names
from sacplan.core.near import did_you_mean
from sacplan.core.setup import Setup, warn_of
from sacplan.errors import PlanError, PlanMismatch
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.record.step import own_checkpointing
from sacplan.running.by_size import InstalledBySize, lifted
from sacplan.running.spread import SpreadModel
from sacplan.running.watch import Watched
from sacplan.techniques.base.technique import Installed, ToInstall
from sacplan.techniques.registry import by_technique
from sacplan.techniques.runtime.stand_ins import StandIn, no_replicas
from sacplan.torch_compat.compiling import compiled_in_place


class Handle:
    """A plan that is applied to a model. As a context manager it removes the plan at the end.

    Attributes:
        units: names of the modules that discard something or run something in slices.
    """

    def __init__(self, installed: Sequence[Installed]) -> None:
        self._installed = list(installed)
        self._seen: tuple[StepDifference, ...] = ()  # those of removed parts, which hold the model

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the modules whose forward is replaced."""
        return tuple(fqn for part in self._installed for fqn in part.units)

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """The first op of each unit that did not run as the plan expects, over all steps so far.

        Ops that run as recorded are discarded as planned: an additional or missing op shifts no decisions to other ops.
        A ``SacplanWarning`` reports the first difference, unless only the first call of a unit differs.
        """
        return (*self._seen, *(found for part in self._installed for found in part.differences))

    def forget_differences(self) -> None:
        """Forget the differences seen so far, for example after a first step that fills caches."""
        self._seen = ()
        for part in self._installed:
            part.forget_differences()

    def choose(self, index: int) -> None:
        """Run with plan ``index`` of several until the next call of the model, whose shapes choose."""
        for part in self._installed:
            if isinstance(part, Watched):
                part.watch.index = index

    def remove(self) -> None:
        """Give every module its own forward back. Pending backward passes stay correct."""
        for part in self._installed:
            # All checks come before any removal, so that either everything is removed or nothing.
            part.check_removable()
        self._seen = self.differences
        # In reverse, since each part was installed on what those before it had left.
        for part in reversed(self._installed):
            part.remove()
        self._installed = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        names = ", ".join(name or "the model" for name in folded_names(self.units))
        return f"Handle({len(self.units)} unit{'' if len(self.units) == 1 else 's'}: {names or 'none'})"


@checked(PlanError)
def apply(
    model: torch.nn.Module,
    plan: PlanOrPath | Sequence[PlanOrPath],
    *,
    check: bool = True,
    mesh: DeviceMesh | None = None,
) -> Handle:
    """Change a model so that it recomputes, runs in slices, and is sharded as the plan says.

        handle = sacplan.apply(model, plan)
        ...train...
        handle.remove()

    Parameter names, ``state_dict``, classes and module names do not change; losses and gradients are
    bit-equal, or with chunks close (``plan.gradients``). Apply before or after ``torch.compile`` and
    ``fully_shard``. In ``torch.no_grad`` a model with a plan for training runs as if nothing had been applied.

    Args:
        model: the one planned for.
        plan: from ``plan``, or loaded. Or several, the cheapest first: each call of the model runs with the first that
            was made for a call as large, and with the last one if none was. Choosing costs a look-up.
        check: in the first step, compare checksums of recomputed tensors with those of what autograd saved. This
            detects kernels that are not deterministic or write where PyTorch cannot see it, and costs that
            step a reduction and a synchronization for each discarded tensor. In every step on a CPU, also compare
            a few bytes of what recomputation starts from.
        mesh: for a plan on a mesh, the ranks (``torch.distributed.device_mesh``); default: a mesh over all ranks of the
            default process group.

    A plan on a mesh is applied on all of its ranks, to a model that is whole on each, before the optimizer is made.
    ``apply`` calls ``parallelize_module`` and ``fully_shard``, or ``replicate``, as ``plan.code()`` prints them. Each
    rank of an axis for data then calls the model with its own part of the batch. ``handle.remove()`` leaves the model
    spread.

    Raises:
        PlanMismatch: the plan was made for another model; names the first difference. Or ranks have different plans, or
            models of different values.
        PlanError: a plan is applied to this model already, the plan's units nest, a part of one is compiled on its
            own, or the model is wrapped. Or one of several plans does more than change modules, or does not hold the
            calls that it was made for.

    Warns:
        SacplanWarning: the model is set up so that a step takes more than planned: a key-value cache, another attention
            implementation, dropout that the recorded step did not have. Later, before the model runs: it is called
            with larger tensors than planned for, or while gradients exist that the recorded step did not have. Each
            different shape is compared once. A compiled model is not watched.
    """
    plans = opened_plans(plan)
    handle = put_on_all(model, plans, check=check, mesh=mesh)
    planned, here = plans[-1].fingerprint.setup, Setup.of(model)
    modes = planned.mode_differences(here) if plans[-1].provenance.mode == "train" and model.training else ()
    warn_of((*planned.model_differences(here), *modes), stacklevel=3)
    return handle


def put_on(
    model: torch.nn.Module,
    plan: Plan,
    *,
    check: bool = True,
    mesh: DeviceMesh | None = None,
    watched: bool = False,
    spread: bool = True,
) -> Handle:
    """Apply a plan without comparing the setup of the model with the one that was planned for.

    If a technique fails, what earlier techniques installed is removed again. ``watched``: calls of the model are
    compared with the planned ones. ``spread``: the model is spread over the plan's mesh, if the plan has one.
    """
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"model must be an nn.Module, not {type(model).__name__}.")
    installed: list[Installed] = []
    with compiled_in_place(model) as model, ExitStack() as after_an_error:
        # The order decides which error a user gets: a wrapper renames modules, so it must be named before the
        # fingerprint reports the names as a mismatch; and units are looked up in a model that is known to match.
        _check_not_wrapped(model, plan.fingerprint.setup)
        plan.fingerprint.check_model(model)
        _check_units(model, plan)
        # Also after an interrupt: a model that is half changed would be refused by the next ``apply``.
        after_an_error.callback(lambda: Handle(installed).remove())
        # Tensors first: techniques install themselves on modules whose parameters are those that will run.
        spreading = SpreadModel(model, plan, mesh) if spread and plan.ranks.sharding is not None else None
        if spreading is not None:
            installed.append(spreading)
        for technique, own in by_technique(plan.decisions):
            # ``install`` yields part by part: if a part fails, those before it are in the list, and are removed.
            installed.extend(technique.install(ToInstall(model, own, plan.recorded, check)))
        if watched:
            installed.append(Watched(model, plan))
        if spreading is not None:
            spreading.spread_data()
        after_an_error.pop_all()
    return Handle(installed)


def opened_plans(plan: PlanOrPath | Sequence[PlanOrPath]) -> list[Plan]:
    """Return one plan or several as a list, loaded.

    Raises:
        PlanError: There is none.
    """
    plans = [plan] if isinstance(plan, (Plan, str, Path)) else plan
    if not plans:
        raise PlanError("no plan was given. A run that fits as it is needs none.")
    return [opened(one, Plan) for one in plans]


def put_on_all(
    model: torch.nn.Module, plans: Sequence[Plan], *, check: bool = True, mesh: DeviceMesh | None = None
) -> Handle:
    """Apply a plan, or several of which each call of the model chooses one; the model's calls are watched."""
    if len(plans) == 1:
        return put_on(model, plans[0], check=check, mesh=mesh, watched=True)
    if not all(plan.fingerprint.calls for plan in plans):
        raise PlanError("a plan does not hold the calls of the model that it was made for. Make it again.")
    if any(plan.ranks.sharding is not None for plan in plans):
        raise PlanError("a plan on a mesh spreads the model, and cannot be one of several. Apply it alone.")
    plans_taken_off = []
    for plan in plans:
        with ExitStack() as after_an_error:
            handle = put_on(model, plan, check=check)
            after_an_error.callback(handle.remove)
            plans_taken_off.append(lifted(handle._installed))
            after_an_error.pop_all()
    watched = Watched(model, *plans)
    return Handle([watched, InstalledBySize(model, watched.watch, plans_taken_off)])


_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel)


def _check_not_wrapped(model: torch.nn.Module, planned: Setup) -> None:
    """Refuse wrapped models: wrappers change the names of modules. The model inside a wrapper may get a plan."""
    if isinstance(model, torch.nn.DataParallel):
        raise no_replicas("this model")
    # The root alone: a wrapped submodule keeps the names of the modules around it.
    if isinstance(model, _WRAPPERS):
        raise PlanError(
            f"the model is wrapped in {type(model).__name__}. Apply the plan first and wrap the model afterwards, or "
            "apply it to the model inside, `.module`."
        )
    for fqn, module in model.named_modules():
        # By name, since importing FSDP imports ``torch.distributed``, which not every build has. FSDP flattens
        # parameters and puts a module of its own around each unit. ``fully_shard`` does neither, so it is not
        # refused.
        if type(module).__name__ == "FullyShardedDataParallel":
            where = f"module {fqn!r}" if fqn else "this model"
            raise PlanError(
                f"{where} is a FullyShardedDataParallel. Apply the plan first, and wrap afterwards."
            )
    # The model's own checkpointing would nest with the plan's recomputation, and the plan has not counted it.
    checkpointing = own_checkpointing(model)
    if checkpointing is not None and not planned.checkpointed:
        raise PlanError(checkpointing)


def _check_units(model: torch.nn.Module, plan: Plan) -> None:
    modules = dict(model.named_modules())
    for fqn, module in modules.items():
        # A plan replaces ``forward`` on the instance, so the instance's own dict tells.
        if isinstance(module.__dict__.get("forward"), StandIn):
            raise PlanError(
                f"a plan is applied to this model already (module {fqn!r}). Call .remove() on its handle first."
            )
    for fqn in plan.units:
        if fqn not in modules:
            raise PlanMismatch(
                f"the plan has a unit {fqn!r}, but the model has no such module.{did_you_mean(fqn, modules)} Make a "
                "plan for this model with sacplan.plan."
            )
