"""``parallel_code``: write the sharding of a plan as code for PyTorch's own parallel APIs."""

from __future__ import annotations

import torch

from sacplan._plan.plan import Plan, PlanOrPath
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.program import ROOT_SCOPE, Phase
from sacplan._shard.emit import Emission, described, emit
from sacplan.errors import PlanError

_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


@checked(PlanError, "model", "plan")
def parallel_code(model: torch.nn.Module, plan: PlanOrPath, profile: ProfileOrPath | None = None) -> Emission:
    """Write the sharding of a plan for other tools, as far as they can express it.

        found = sacplan.parallel_code(model, plan, profile)
        print(found.code or found.reasons)

    ``code`` is Python that defines ``shard(model, device_mesh)`` by ``parallelize_module``, ``fully_shard`` and
    DistributedDataParallel; ``tp_plan`` is the argument of ``from_pretrained(..., tp_plan=...)``. Neither contains
    recomputation or chunks.

    Args:
        model: the one planned for; may be on the meta device.
        plan: from ``sacplan.plan(..., mesh=...)`` or ``sacplan.policy(..., mesh=...)``.
        profile: the one that the plan was made from. It shows which linear layers get a sharded input. Without it
            that is guessed from the widths of layers.

    Raises:
        PlanError: the plan spreads nothing over ranks.
        PlanMismatch: it was made for another model.
    """
    plan = opened(plan, Plan)
    profile = opened(profile, Profile)
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"model must be an nn.Module, not {type(model).__name__}.")
    if not isinstance(plan, Plan) or plan.ranks.sharding is None:
        raise PlanError(
            "the plan spreads nothing over ranks; make one with sacplan.plan(profile, budget, mesh=...)."
        )
    plan.fingerprint.check_model(model)
    arriving = None if profile is None else _arriving_cut(model, profile.on_ranks(plan.ranks))
    return emit(plan.ranks.sharding, described(model), arriving_cut=arriving)


def _arriving_cut(model: torch.nn.Module, rank: Profile) -> set[str]:
    """Return the linear layers whose input is sharded along the dimension that they sum over.

    On one rank such an input is narrower than ``in_features``.
    """
    program = rank.program
    linear = {name: m.in_features for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    found = set()
    # Backward ops are skipped, since they multiply by the same weights in other shapes. Ops outside of
    # modules have no layer to attribute to.
    for op in program.ops:
        if op.phase != Phase.FORWARD or op.scope == ROOT_SCOPE or op.name not in _PRODUCTS:
            continue
        fqn = program.scopes[op.scope].fqn
        # The first input of ``addmm`` is the bias.
        inputs = op.inputs[1:] if op.name == "aten.addmm.default" else op.inputs
        if fqn in linear and inputs and program.tensors[inputs[0]].shape[-1] < linear[fqn]:
            found.add(fqn)
    return found
