"""The state of the units of ``fully_shard`` at one moment of a step, as FSDP2 keeps it, and the sizes of their buffers.

Names are those of ``_fsdp_param_group.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sacplan._program.mixed_precision import MixedPrecision
from sacplan._ranks.rank_ops import Running
from sacplan._ranks.shards import Parameter, itemsize


@dataclass(slots=True)
class CommContext:
    """The state that the units below one root share (``FSDPCommContext``).

    Attributes:
        root: the outermost unit.
        gathered: the buffer of the last all-gather in forward.
        copied_ms: when the last all-gather was copied out.
        reduced: inputs of reduce-scatters.
        reducing: reduce-scatters that the next one waits for.
        to_finish: what only the end of the backward pass waits for: all-reduces among replicas, and copies to the host.
        order: units in the order in which their forwards ended.
    """

    root: str
    gathered: int | None = None
    copied_ms: float | None = None
    reduced: list[int] = field(default_factory=list)
    reducing: list[Running] = field(default_factory=list)
    to_finish: list[Running] = field(default_factory=list)
    order: list[ParamGroup] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ParamGroup:
    """The parameters of one unit, and its state (``FSDPParamGroup``).

    Attributes:
        unit: name of the module.
        parameters: those of the unit and not of one inside of it.
        context: shared with the other units below the same root.
        shards: over so many ranks the parameters are sharded.
        ranks_after_forward: over so many they are spread from forward to backward.
        state: ``"idle"``, ``"forward"``, ``"backward"`` or ``"reduced"``.
        gathering: the buffer of an all-gather that nobody has waited for, and ``gather`` the collective.
        unsharded: the parameters: one storage for all, or one for each where they are freed one by one.
        kept: shards of ``ranks_after_forward`` ranks, one for each parameter, from forward to backward.
        indices: places in ``context.order`` of forwards whose backward has not begun.
        grads: gradients that are not reduced yet.
        reduced_grads: the storage of the reduced ones, and ``with_grad`` the parameters that have one.
        all_reduced: the buffer of an all-reduce, if it is not the gradient itself.
    """

    unit: str
    parameters: tuple[Parameter, ...]
    context: CommContext
    shards: int
    ranks_after_forward: int
    state: str = "idle"
    gathering: int | None = None
    gather: Running | None = None
    unsharded: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    indices: list[int] = field(default_factory=list)
    grads: dict[int, None] = field(default_factory=dict)
    reduced_grads: int | None = None
    with_grad: set[int] = field(default_factory=set)
    all_reduced: int | None = None

    @property
    def sources(self) -> tuple[int, ...]:
        """The storages that the next all-gather reads."""
        return self.kept or tuple(p.storage for p in self.parameters)

    @property
    def gathering_ranks(self) -> int:
        """The number of ranks of the next all-gather."""
        return self.ranks_after_forward if self.kept else self.shards

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the buffer of an all-gather."""
        return sum(p.gathered_bytes(self.shards) for p in self.parameters)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the flat tensor in which shards of another type are cast before the next all-gather.

        It lives until they are copied into the buffer (``_get_param_all_gather_inputs``). Shards that were kept after
        the forward have the right type already, and are copied all the same.
        """
        return (
            sum(p.gathered_bytes(self.shards) for p in self.parameters if p.is_cast) // self.gathering_ranks
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """Sizes of the reduction of some gradients of a unit.

    Attributes:
        input_bytes, output_bytes: of the reduce-scatter.
        shard_bytes: of the gradients in the type of the shards.
        is_cast: whether that is another type than the one in which they are reduced.
        padded_bytes: what a CPU copies first, since the ranks do not divide it: one number for each parameter.
    """

    input_bytes: int
    output_bytes: int
    shard_bytes: int
    is_cast: bool
    padded_bytes: tuple[int, ...]

    @classmethod
    def of(cls, trained: Sequence[Parameter], shards: int, policy: MixedPrecision | None) -> Reduction:
        """Return the sizes for the parameters that have a gradient; all have the same type."""
        p = trained[0]
        reduced_in = p.compute_dtype or p.dtype
        # ``init_dtype_attrs`` drops a ``reduce_dtype`` that is the ``param_dtype``: gradients have that type already.
        if policy is not None and policy.reduce_dtype not in (None, policy.param_dtype):
            reduced_in = f"torch.{policy.reduce_dtype}"
        elements = sum(p.shard_elements(shards) for p in trained)
        output_bytes = elements * itemsize(reduced_in)
        return cls(
            shards * output_bytes,
            output_bytes,
            elements * p.itemsize,
            reduced_in != p.dtype,
            tuple(p.gathered_bytes(shards) for p in trained if p.is_padded(shards)),
        )
