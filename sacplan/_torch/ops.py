"""What sacplan must know of an op: which arguments it writes, and whether it may run a second time.

Running again must give the same bits and change nothing else. So an op may only be discarded if its bits do not
vary, and it makes new outputs and fills them: a factory such as ``empty`` may be filled later by a kernel that no
dispatch mode sees, so what factories make is always kept. And it must write nothing, with two exceptions:

- Batch norm updates running statistics, which its output in training does not depend on: it runs again without them.
- An op that writes its first argument in place (``relu_``) may run again on an argument that was itself made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._torch.private import is_plain, storage_key

# Ops that write running statistics though their schema does not say so, nor do they count a version
# (torch 2.11 to 2.15).
_RUNNING_STATISTICS = ("running_mean", "running_var")
_WRITES_UNDECLARED = {
    "aten::native_batch_norm": _RUNNING_STATISTICS,
    "aten::cudnn_batch_norm": _RUNNING_STATISTICS,
    "aten::miopen_batch_norm": _RUNNING_STATISTICS,
    "aten::batch_norm_update_stats": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": _RUNNING_STATISTICS,
    "aten::_cudnn_rnn": ("dropout_state",),
    "aten::miopen_rnn": ("dropout_state",),
}
# Of these, the ones that take None for the statistics, and use them only where they do not train.
_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
# Ops that may give other bits the next time: on CUDA they add in an order that varies (see
# torch.use_deterministic_algorithms), or a part of what they return is never filled.
_BITS_VARY = frozenset(
    {
        "aten::_ctc_loss",
        "aten::_cudnn_ctc_loss",
        "aten::_embedding_bag",
        "aten::_index_put_impl",
        "aten::bincount",
        "aten::cumsum",
        "aten::histc",
        "aten::index_add",
        "aten::index_put",
        "aten::index_reduce",
        "aten::kthvalue",
        "aten::median",
        "aten::mkldnn_rnn_layer",
        "aten::nanmedian",
        "aten::put",
        "aten::scatter",
        "aten::scatter_add",
        "aten::scatter_reduce",
        "aten::segment_reduce",
    }
)
_FACTORIES = ("_empty", "empty", "full", "lift", "new_", "ones", "resize", "set_", "zeros")


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the schema of an op tells.

    Attributes:
        name: ``"aten.mm.default"``.
        written_positions, written_names: arguments written in place, by position and by keyword; running
            statistics that the schema does not declare are among them.
        unversioned: some of these writes count no version.
        rerunnable: it may run again, as far as the op itself is concerned.
        random: it may draw from a generator.
        in_place: it writes its first argument, nothing else, and returns it.
        training: of a batch norm, the position of the argument that says whether it trains; else None.
    """

    name: str
    written_positions: tuple[int, ...]
    written_names: tuple[str, ...]
    unversioned: bool
    rerunnable: bool
    random: bool
    in_place: bool = False
    training: int | None = None

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments that this call writes in place."""
        if self.training is not None and not args[self.training]:
            return []
        found = [args[i] for i in self.written_positions if i < len(args)]
        return found + [kwargs[name] for name in self.written_names if name in kwargs]

    def left_out(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The positions of arguments that it does without when it runs again."""
        if self.training is None or not args[self.training]:
            return ()
        return self.written_positions


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
    undeclared = _WRITES_UNDECLARED.get(schema.name, ())
    for i, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            names.append(argument.name)
            if not argument.kwarg_only:
                positions.append(i)
    aliases = any(r.alias_info is not None for r in schema.returns)
    reads_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    random = torch.Tag.nondeterministic_seeded in func.tags or any(
        "Generator" in str(a.type) for a in schema.arguments
    )
    batch_norm = schema.name in _BATCH_NORMS
    in_place = (
        names == ["self"]
        and positions == [0]
        and not undeclared
        and len(schema.returns) == 1
        and aliases
        and torch.Tag.inplace_view not in func.tags
    )
    rerunnable = (
        func.namespace in ("aten", "prims")
        and (not names or batch_norm or in_place)
        and (not aliases or in_place)
        and reads_tensors
        and schema.name.removesuffix("_") not in _BITS_VARY
        and not schema.name.removeprefix("aten::").startswith(_FACTORIES)
        and any("Tensor" in str(r.type) for r in schema.returns)
    )
    training = None
    if batch_norm:
        training = next(i for i, argument in enumerate(schema.arguments) if argument.name == "training")
    return OpTraits(
        str(func), tuple(positions), tuple(names), bool(undeclared), rerunnable, random, in_place, training
    )


def can_run_again(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether this call of an op may run a second time, and sizes, strides and storages say all about its tensors.

    An op that writes in place may, if what it writes is made again, too.
    """
    traits = op_traits(func)
    inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
    if not traits.rerunnable or not outputs or not all(map(is_ordinary_tensor, (*inputs, *outputs))):
        return False
    if kwargs.get("non_blocking"):
        return False  # nobody would wait for the second copy
    if traits.random and len({t.device for t in inputs}) != 1:
        return False  # which generator?
    if traits.random and inputs[0].device.type not in ("cpu", "cuda", "meta"):
        return False
    if traits.in_place:
        return True
    taken = {storage_key(t.untyped_storage()) for t in inputs}
    return not any(storage_key(t.untyped_storage()) in taken for t in outputs)  # else it hands an input on


def is_ordinary_tensor(t: torch.Tensor) -> bool:
    return is_plain(t) and not (t.is_inference() or t.is_nested or t.is_quantized or t._is_zerotensor())


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
