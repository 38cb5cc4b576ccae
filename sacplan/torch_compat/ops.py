"""Traits of an op: which arguments it writes, and whether it may run a second time.

A second run must give the same bits and change nothing else. So the outputs of an op may be discarded only if
the op is deterministic and fills new outputs itself: what a factory such as ``empty`` returns may be filled later
by a kernel that no dispatch mode sees, so the outputs of factories are kept (but see ``record/filled.py``). And the op
must write nothing, with two exceptions:

- Batch norm updates running statistics, which its output in training does not depend on: it runs again without them.
- An op that writes its first argument in place (``relu_``) may run again on an argument that was itself recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sacplan.torch_compat.private import is_plain, storage_key

Rule = TypeVar("Rule", bound=Callable[..., Any])


class RuleTable(dict[Any, Rule]):
    """Rules by op. The table is the decorator that adds one: ``@table(op, another_op)`` above a function."""

    def __call__(self, *ops: Any) -> Callable[[Rule], Rule]:
        """Register the decorated function for each of ``ops``."""

        def register(rule: Rule) -> Rule:
            self.update(dict.fromkeys(ops, rule))
            return rule

        return register


def aten_names(names: str) -> frozenset[str]:
    """Return the schema names (``"aten::mm"``) of the ops in a list separated by white space (``"mm bmm"``)."""
    return frozenset(f"aten::{name}" for name in names.split())


# Ops that write running statistics without declaring it in the schema or counting a version (torch 2.11 to 2.15).
# The first three take None for the statistics, and use them only when they are not training.
_BATCH_NORMS = aten_names("native_batch_norm cudnn_batch_norm miopen_batch_norm")
_WRITES_STATISTICS = _BATCH_NORMS | aten_names(
    "batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts"
)
_WRITES_UNDECLARED = dict.fromkeys(_WRITES_STATISTICS, ("running_mean", "running_var")) | dict.fromkeys(
    aten_names("_cudnn_rnn miopen_rnn"), ("dropout_state",)
)
# Ops that may give other bits the next time: on CUDA they add in an order that varies (see
# torch.use_deterministic_algorithms), or a part of what they return is never filled.
_BITS_VARY = aten_names("""
    _ctc_loss _cudnn_ctc_loss _embedding_bag _index_put_impl bincount cumsum histc index_add index_put
    index_reduce kthvalue median mkldnn_rnn_layer nanmedian put scatter scatter_add scatter_reduce segment_reduce
""")
EMPTY = frozenset(f"aten.{name}.default" for name in ("empty_like", "new_empty", "zeros_like", "new_zeros"))
"""Factories that may run again where ops are seen to fill what they return (``record/filled.py``)."""
_FACTORIES = ("_empty", "empty", "full", "lift", "new_", "ones", "resize", "set_", "zeros")


ArgumentPlace = int | tuple[int | str, int]
"""Where a tensor stands among the arguments: a position, or (position or name, index in a list; -1 for no list)."""


@dataclass(frozen=True, slots=True)
class OpTraits:
    """Facts about an op, read from its schema and from the tables above.

    Attributes:
        func: the op.
        name: ``"aten.mm.default"``.
        tensor_positions: the positional arguments that may be tensors, or lists of tensors.
        written_positions, written_names: arguments written in place, by position and by keyword; running
            statistics that the schema does not declare are among them.
        rerunnable: it may run again, as far as the op itself is concerned.
        random: it may draw from a generator.
        in_place: it writes its first argument, nothing else, and returns it.
        training: of a batch norm, the position of the argument that says whether it trains; else None.
        resizes: it may change the sizes of a tensor that it is given: a view in place, ``resize_``, or an ``out=``.
        chooses_kernel: whether settings of PyTorch say which kernel computes it: matmuls, convolutions, attention.
    """

    func: Any
    name: str
    tensor_positions: tuple[int, ...]
    written_positions: tuple[int, ...]
    written_names: tuple[str, ...]
    rerunnable: bool
    random: bool
    in_place: bool = False
    training: int | None = None
    resizes: bool = False
    chooses_kernel: bool = False

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments that this call writes in place.

        Nothing, if it is a batch norm that does not train. Arguments that are None are left out, such as the
        statistics of an instance norm.
        """
        if self.training is not None and not args[self.training]:
            return []
        found = [args[i] for i in self.written_positions if i < len(args)]
        found += [kwargs[name] for name in self.written_names if name in kwargs]
        return [argument for argument in found if argument is not None]

    def left_out(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of arguments that a second run gets as None: running statistics in training."""
        if self.training is None or not args[self.training]:
            return ()
        return self.written_positions

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any], list[ArgumentPlace], list[torch.Tensor]]:
        """Return the arguments with None for each tensor, and the tensors with their places."""
        rest: list[Any] = list(args)
        rest_by_name: dict[str, Any] = {}
        places: list[ArgumentPlace] = []
        tensors: list[torch.Tensor] = []
        for i in self.tensor_positions:
            if i >= len(rest):  # left out, so a default: positions rise, and none after it was given
                break
            value = rest[i]
            if isinstance(value, torch.Tensor):
                rest[i] = None
                places.append(i)
                tensors.append(value)
            elif isinstance(value, (list, tuple)):
                rest[i] = _split_list(i, value, places, tensors)
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                rest_by_name[name] = None
                places.append((name, -1))
                tensors.append(value)
            elif isinstance(value, (list, tuple)):
                rest_by_name[name] = _split_list(name, value, places, tensors)
            else:
                rest_by_name[name] = value
        return rest, rest_by_name, places, tensors


def _split_list(
    where: int | str, values: Sequence[Any], places: list[ArgumentPlace], tensors: list[torch.Tensor]
) -> tuple[Any, ...]:
    for j, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places.append((where, j))
            tensors.append(value)
    return tuple(None if isinstance(value, torch.Tensor) else value for value in values)


_COLLECTIVES = frozenset(
    f"_c10d_functional.{name}.default"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
)
"""Collectives that may run again: all ranks have the same plan, and so run them in the same order."""

_COMPUTES_ONLY = frozenset((
    "bitsandbytes.gemm_4bit.default", "bitsandbytes.dequantize_4bit.default",
    "bitsandbytes.dequantize_blockwise.default",
))  # fmt: skip
"""Ops of other libraries that only compute their results, with the same bits each time (read in bitsandbytes 0.50)."""


@functools.cache
def op_traits(func: Any) -> OpTraits:
    """Read the traits of an ``OpOverload``, once."""
    schema = func._schema
    # What it writes: the arguments that the schema marks as written, and statistics that it does not mark.
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
    # An op counts as in place if ``self`` is all that it writes and returns (``relu_``). Left out are ops with more to
    # write (``out=``, statistics), and views in place (``t_``), which change a tensor and no values.
    in_place = (
        names == ["self"]
        and positions == [0]
        and not undeclared
        and len(schema.returns) == 1
        and aliases
        and torch.Tag.inplace_view not in func.tags
    )
    # Each condition rules out one way in which a second run could differ, or do harm:
    # - an op of another library may do anything, unless we have read it, and a collective would wait for ranks that do
    #   not run it again;
    # - what the op writes would be written twice, but for the two exceptions of the module's docstring;
    # - a view makes nothing: its storage is what has to be made again;
    # - a factory (known by its name, or by taking no tensor) returns memory that something else fills;
    # - the bits vary from run to run; those of an in-place op vary as those of its namesake do;
    # - an op that returns no tensor makes nothing to make again.
    # Random ops may run again: the executor puts the generator's state back first (``random``).
    rerunnable = (
        (func.namespace in ("aten", "prims") or str(func) in _COLLECTIVES | _COMPUTES_ONLY)
        and (not names or batch_norm or in_place)
        and (not aliases or in_place)
        and reads_tensors
        and schema.name.removesuffix("_") not in _BITS_VARY
        and (str(func) in EMPTY or not schema.name.removeprefix("aten::").startswith(_FACTORIES))
        and any("Tensor" in str(r.type) for r in schema.returns)
    )
    # Statistics are written in training only, so whether such an op writes is a question of each call.
    training = None
    if batch_norm:
        training = next(i for i, argument in enumerate(schema.arguments) if argument.name == "training")
    may_be_tensors = (
        i for i, a in enumerate(schema.arguments) if not a.kwarg_only and "Tensor" in str(a.type)
    )
    return OpTraits(
        func=func,
        name=str(func),
        tensor_positions=tuple(may_be_tensors),
        written_positions=tuple(positions),
        written_names=tuple(names),
        rerunnable=rerunnable,
        random=random,
        in_place=in_place,
        training=training,
        resizes=len(names) > len(positions) or torch.Tag.inplace_view in func.tags,
        chooses_kernel=func._overloadpacket in flop_registry,
    )


@functools.cache
def _dropout_position(func: Any) -> int | None:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == "dropout_p"), None)


def draws_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an op may draw from a generator: attention without dropout does not."""
    if not op_traits(func).random:
        return False
    # The tag is of the op, not of the call: attention has it whether or not it drops anything. All other ops count as
    # drawing, which costs a generator's state and is always safe.
    at = _dropout_position(func)
    return at is None or bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))


def is_heavy(func: Any) -> bool:
    """Whether an op is a matrix product, a convolution or attention: expensive to run again."""
    return func._overloadpacket in flop_registry or "_attention" in func.__name__


_BETWEEN_RANKS = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
_SETS_UP = _BETWEEN_RANKS | {"fsdp"}


def is_between_ranks(func: Any) -> bool:
    """Whether an op is a collective or waits for one. It runs on all ranks or on none."""
    return func.namespace in _BETWEEN_RANKS


def waited_for(sent: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective and return it."""
    wait: Any = op_named("_c10d_functional.wait_tensor.default")
    result: torch.Tensor = wait(sent)
    return result


@functools.cache
def op_named(name: str) -> torch._ops.OpOverload | None:
    """Return the op of this name and overload (``"aten.mm.default"``); None if its library is not imported here."""
    try:
        func = functools.reduce(getattr, name.split("."), torch.ops)
    except (AttributeError, RuntimeError):
        return None
    return func if isinstance(func, torch._ops.OpOverload) else None


def op_of_schema(name: str) -> torch._ops.OpOverload | None:
    """Return the op of this schema (``"aten::add.Tensor"``); None if this torch does not have it."""
    packet, _, overload = name.replace("::", ".").partition(".")[2].partition(".")
    return op_named(f"{name.partition(':')[0]}.{packet}.{overload or 'default'}")


@functools.cache
def is_computation(name: str) -> bool:
    """Whether an op, by the name of its overload, makes or writes values; of collectives, those that may run again."""
    if name.partition(".")[0] in _SETS_UP:
        return name in _COLLECTIVES
    func = op_named(name)
    # An op of a library that is not imported here may be anything. One that writes changes values of an old tensor.
    if func is None or op_traits(func).written_names:
        return True
    return not func.is_view and any("Tensor" in str(r.type) for r in func._schema.returns)


_FUSED_ON_GPUS = "_fused_rms_norm"
"""A composite, and its backward op, with kernels of their own on CUDA, which a build for the CPU does not know of."""


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether an op is made of others on every device, and autograd differentiates only these."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":  # unknown to the dispatcher
        return False

    def has(key: str) -> bool:
        # Not ``func.has_kernel_for_dispatch_key``, which counts Python's decompositions as well.
        return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)

    # Some composites have kernels of their own on common devices, such as ``silu_backward``.
    own = has("CPU") or has("CUDA") or func._opname.startswith(_FUSED_ON_GPUS)
    return has("CompositeImplicitAutograd") and not own


# The key of torch's own kernel of a composite. ``op.decompose`` gives a Python decomposition for dropout.
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def run_composite(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own C++ kernel of a composite op, below any Python kernel that replaces it."""
    return op._op_dk(COMPOSITE, *args, **kwargs)


def run_in_parts(mode: TorchDispatchMode, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Run a composite op that a dispatch mode has got, so that the mode sees the ops that it is made of.

    Where autograd does not take it apart, it comes whole: in inference mode, and where a DTensor runs its own code.
    """
    TorchDispatchMode.__enter__(mode)
    try:
        return run_composite(op, *args, **(kwargs or {}))
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


# Not a view by its schema, but one in memory: autograd alone takes its result for a new tensor.
_ALIASES = frozenset(("aten._unsafe_view.default",))


@functools.cache
def is_alias(name: str) -> bool:
    """Whether an op, by the name of its overload, gives another view of its argument's memory and writes nothing."""
    func = op_named(name)
    return func is not None and (func.is_view or name in _ALIASES) and not op_traits(func).written_names


def arguments_by_name(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of one call, defaults included, in the order of the schema."""
    defaults = _defaults(func)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


@functools.cache
def _defaults(func: torch._ops.OpOverload) -> Mapping[str, Any]:
    """Return the default of each argument in the order of the schema; None for required ones."""
    return {a.name: a.default_value if a.has_default_value() else None for a in func._schema.arguments}


def can_run_again(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether this call of an op may run a second time, and its tensors are described by sizes, strides and storages.

    An op that writes in place may; the caller must see to it that the written tensor is recomputed, too.
    """
    traits = op_traits(func)
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
    # Without outputs there is nothing to recompute, and a tensor that is not ordinary cannot be described so.
    if not traits.rerunnable or not outputs or not all(map(is_ordinary_tensor, (*inputs, *outputs))):
        return False
    if kwargs.get("non_blocking"):
        return False  # a copy that nobody waits for: the second one may not have arrived when it is read
    if traits.random and len({t.device for t in inputs}) != 1:
        return False  # the device of the tensors tells which generator the op draws from: it must be one
    if traits.random and inputs[0].device.type not in ("cpu", "cuda", "meta"):
        return False  # generators of other devices are not put back for a second run
    if traits.in_place:
        return True  # its output is its input, on purpose
    # Any other op that returns one of its inputs makes nothing new.
    taken = {storage_key(t.untyped_storage()) for t in inputs}
    return not any(storage_key(t.untyped_storage()) in taken for t in outputs)


def is_ordinary_tensor(t: torch.Tensor) -> bool:
    """Whether sizes, strides and a storage describe the tensor."""
    return is_plain(t) and not (t.is_inference() or t.is_nested or t.is_quantized)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results, in order: nested tuples, lists and dicts."""
    found: list[torch.Tensor] = []
    _append_tensors((value,), found)
    return found


def _append_tensors(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    # A list that is passed on instead of nested generators, since this runs several times for each op.
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _append_tensors(value, found)
        elif isinstance(value, dict):
            _append_tensors(value.values(), found)
