"""What sacplan must know of an op: which arguments it writes, and whether it may run a second time.

Running again must give the same values and change nothing else. So an op may only be discarded if
its schema writes nothing, it does not write behind its schema's back (running statistics), its
outputs are new, and it fills them: a factory such as ``empty`` may be filled later by a kernel that
no dispatch mode sees, so what factories make is always kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Ops that write running statistics though their schema does not say so (torch 2.11 to 2.15).
_WRITES_UNDECLARED = frozenset(
    {
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::batch_norm_update_stats",
        "aten::_batch_norm_impl_index",
        "aten::native_group_norm_running",
        "aten::fake_quantize_per_channel_affine",
        "aten::rrelu_with_noise",
    }
)
_RANDOM = frozenset(
    {
        "aten::native_dropout",
        "aten::_fused_dropout",
        "aten::bernoulli",
        "aten::rand_like",
        "aten::randn_like",
        "aten::randint_like",
        "aten::multinomial",
        "aten::normal",
        "aten::poisson",
        "aten::binomial",
        "aten::_sample_dirichlet",
        "aten::_standard_gamma",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "aten::_cudnn_rnn",
        "aten::miopen_rnn",
    }
)


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the schema of an op tells.

    Attributes:
        name: ``"aten.mm.default"``.
        written_positions, written_names: arguments written in place, by position and by keyword.
        rerunnable: it may run again, as far as the op itself is concerned.
        random: it may draw from a generator.
    """

    name: str
    written_positions: tuple[int, ...]
    written_names: tuple[str, ...]
    rerunnable: bool
    random: bool


_traits: dict[Any, OpTraits] = {}


def op_traits(func: Any) -> OpTraits:
    """Traits of an ``OpOverload``; remembered."""
    traits = _traits.get(func)
    if traits is None:
        traits = _traits[func] = _read_traits(func)
    return traits


def _read_traits(func: Any) -> OpTraits:
    schema = func._schema
    positions, names = [], []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                positions.append(i)
    aliases = any(r.alias_info is not None for r in schema.returns)
    reads_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    random = schema.name in _RANDOM or torch.Tag.nondeterministic_seeded in func.tags
    rerunnable = (
        func.namespace in ("aten", "prims")
        and not names
        and not aliases
        and reads_tensors
        and schema.name not in _WRITES_UNDECLARED
        and not _is_factory_like(schema.name)
        and any("Tensor" in str(r.type) for r in schema.returns)
    )
    return OpTraits(str(func), tuple(positions), tuple(names), rerunnable, random)


def _is_factory_like(name: str) -> bool:
    base = name.split("::")[-1]
    return base.startswith(("empty", "new_", "zeros", "ones", "full", "resize", "set_", "lift"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an argument or a result: nested tuples, lists, mappings and dataclass-like outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
