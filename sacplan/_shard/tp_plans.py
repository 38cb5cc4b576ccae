"""Tensor-parallel plans of Hugging Face (``base_model_tp_plan``) as layouts of parameters.

    homes = homes_of_tp_plan(model, Mesh.of({"dp": 2, "tp": 4}), "tp")

A plan gives modules a style by name, such as ``{"layers.*.mlp.up_proj": "colwise"}``. What a style does to
parameters is in ``transformers/distributed/tensor_parallel.py`` (of 5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sacplan._program.elements import pattern_of
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placement, Placements, cut, fits
from sacplan.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
WHOLE = frozenset(
    {
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
        "all_reduce",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "local_params",
    }
)
"""Styles that leave a module's own parameters as they are."""

PACKED = 2
"""How many matrices lie one after the other in a packed one."""


def homes_of_tp_plan(model: nn.Module, mesh: Mesh, axis: str) -> dict[str, Placements]:
    """Return the layouts of a model's parameters under its own tensor-parallel plan.

    Args:
        model: of ``transformers``; may be on the meta device.
        mesh: the ranks.
        axis: the name of the one that the plan is for; on the others parameters are replicated.

    Returns:
        By parameter, with ``*`` for the number of a repeated layer. Those that the plan replicates are left out, and so
        are those that the ranks do not divide evenly, which Hugging Face cuts into uneven parts.

    Raises:
        PlanError: the model has no such plan, the mesh no such axis, or the plan a style that is not known.
    """
    if axis not in mesh.names:
        raise PlanError(f"mesh {mesh} has no axis {axis!r}; it has {', '.join(map(repr, mesh.names))}.")
    plan = _plan_of(model)
    at = mesh.names.index(axis)
    found: dict[str, Placements] = {}
    for name, parameter in model.named_parameters():
        pattern = pattern_of(name)
        # A plan may name a parameter, or the module that has it.
        style = plan.get(pattern) or plan.get(pattern.rpartition(".")[0])
        if style is None:
            continue
        placement = _placement(style, name, parameter.ndim)
        layout = tuple(placement if i == at else REPLICATED for i in range(len(mesh.axes)))
        # Hugging Face would cut unevenly here, which no layout says: replicated instead.
        if placement.is_cut and fits(parameter.shape, layout, mesh.ranks):
            found[pattern] = layout
    return found


def _plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the plan by module or parameter: that of the model, or that of its configuration."""
    plan = getattr(model, "_tp_plan", None)
    # ``_tp_plan`` of a model is complete, with prefixes. The configuration's names begin at the base model.
    if not plan:
        inner = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        around = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {around + name: style for name, style in inner.items()}
    if not plan:
        raise PlanError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan in its configuration). State "
            "where its parameters are at home, or let sacplan.plan(mesh=...) find it."
        )
    return dict(plan)


def _placement(style: str, name: str, ndim: int) -> Placement:
    is_vector = ndim == 1
    # The weight of a Linear is (out, in), those of experts (experts, out, in): columns are the last but one
    # dimension, and of a bias the only one.
    if style in COLUMNS:
        return cut(max(0, ndim - 2))
    # The bias of rows is added once, after the sum, so it is not cut.
    if style in ROWS:
        return REPLICATED if is_vector else cut(ndim - 1)
    if style == "packed_colwise":
        return cut(max(0, ndim - 2), PACKED)
    if style == "packed_rowwise":
        return REPLICATED if is_vector else cut(ndim - 1, PACKED)
    if style in ("embedding_rowwise", "embedding_colwise"):
        return cut(0 if style == "embedding_rowwise" else 1)
    if style in WHOLE:
        return REPLICATED
    raise PlanError(
        f"the plan gives {name!r} the style {style!r}, which is not known here. State where its parameters are at home."
    )
