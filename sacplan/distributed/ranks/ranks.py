"""How a step is spread over ranks: what a user asks for, and the calls of PyTorch that do it.

ranks = FSDP2(8, ["layers.*", ""]).of(names, model)
ranks.spread_data(model, device_mesh)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, structs

from sacplan.core.files import Positive
from sacplan.core.names import matching_modules
from sacplan.distributed.ranks.options import DEFAULTS, FullyShardOptions
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.sharding import Sharding, axes_of
from sacplan.errors import TraceError
from sacplan.torch_compat.private import replicate

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

RunBy: TypeAlias = Literal["FSDP2", "DDP", "DTensor"]
"""What runs a step on several ranks: ``fully_shard``, ``DistributedDataParallel``, or ``parallelize_module`` alone."""


class Ranks(Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is spread over devices.

    Attributes:
        world_size: ranks that have different parts of a batch; 1: there is one device, or tensors alone are spread.
        fsdp_units: for FSDP2, patterns for the modules on which ``fully_shard`` is called (see ``resolve_units``); the
            batch is that of one rank. None with several ranks: DDP.
        sharding: for a plan on a mesh, which ``sacplan.apply`` carries out by PyTorch's calls; its axes for data have
            ``world_size`` ranks. None: the user makes these calls.
        fully_shard: for FSDP2, the other arguments of ``fully_shard``; absent where they are the defaults.
    """

    world_size: Positive = 1
    fsdp_units: tuple[str, ...] | None = None
    sharding: Sharding | None = None
    # Not None: the checksum of a profile that was saved before the field was there must stay the same.
    fully_shard: FullyShardOptions | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.fully_shard is not UNSET and self.fsdp_units is None:
            raise TraceError(
                f"{self.fully_shard} is given without the modules that fully_shard is called on: name them, as in "
                'FSDP2(8, ["layers.*", ""]).'
            )
        # With 1, the axes for data are left out of the step.
        if self.sharding is not None and self.world_size not in (1, self.sharding.data.size):
            raise TraceError(
                f"world_size is {self.world_size}, and the axes for data of mesh {self.sharding.mesh} have "
                f"{self.sharding.data.size} ranks."
            )
        # Several ranks without units are valid: DDP.
        if self.world_size == 1 and self.fsdp_units is not None:
            raise TraceError(
                "FSDP2 of 1 rank: nothing is sharded. Say over how many ranks fully_shard shards, FSDP2(8)."
            )
        self.options.check(self.world_size)

    @classmethod
    def of(
        cls,
        world_size: int = 1,
        fsdp_units: Sequence[str] | None = None,
        options: FullyShardOptions = DEFAULTS,
    ) -> Ranks:
        """Return checked ranks; a ``TraceError`` if they do not go together."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise TraceError(f"{world_size!r} ranks: give an int of at least 1.")
        if isinstance(fsdp_units, str):
            raise TraceError(
                f"the units of FSDP2 are the string {fsdp_units!r}; give a list, [{fsdp_units!r}]."
            )
        units = None if fsdp_units is None else tuple(fsdp_units)
        return cls(world_size, units, fully_shard=UNSET if options == DEFAULTS else options)

    @classmethod
    def on_mesh(cls, sharding: Sharding, fsdp_units: Sequence[str] | None) -> Ranks:
        """Return the ranks of a mesh, with ``fully_shard`` on these modules; None: replicas."""
        data = sharding.data.ranks
        # Of two axes for data, ``fully_shard`` replicates over the first (``HSDPMeshInfo`` in ``_fsdp_init.py``).
        replicas = data[0] if fsdp_units is not None and len(data) > 1 else 1
        ranks = cls.of(math.prod(data), fsdp_units, FullyShardOptions.of(None, None, replicas, None, ()))
        return structs.replace(ranks, sharding=sharding)

    @property
    def devices(self) -> int:
        """The number of all ranks, including those that share a part of a batch."""
        return self.world_size if self.sharding is None else self.sharding.mesh.size

    @property
    def options(self) -> FullyShardOptions:
        """The arguments of ``fully_shard`` other than the modules."""
        return DEFAULTS if self.fully_shard is UNSET else self.fully_shard

    @property
    def run_by(self) -> RunBy | None:
        """The name of what runs the step on several ranks; None on one device.

        The peak depends on it: each gathers and reduces at different times, into different buffers.
        """
        if self.world_size == 1:
            # Several devices are then one data rank: tensors alone are spread.
            return None if self.devices == 1 else "DTensor"
        return "DDP" if self.fsdp_units is None else "FSDP2"

    @property
    def communicators(self) -> int:
        """The number of NCCL communicators that a rank takes part in; 0 on one device."""
        if self.sharding is not None:
            return self.sharding.mesh.communicators
        return self.options.communicators if self.world_size > 1 else 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""
        if self.sharding is not None:
            return self.sharding.mesh
        replicas = self.options.replicas
        axes = {"replicate": replicas, "shard": self.world_size // replicas}
        return Mesh.of(axes if replicas > 1 else {"dp": self.world_size})

    def spread_data(self, model: nn.Module, device_mesh: DeviceMesh) -> None:
        """Call ``fully_shard`` on the units, inner ones first, or ``replicate`` on the model.

        Raises:
            TraceError: unknown units.
        """
        # There is nothing to spread over one rank.
        if self.world_size == 1:
            return
        if self.fsdp_units is None:
            replicate(model)
            return
        from torch.distributed.fsdp import fully_shard

        given = self.options.arguments(model, axes_of(device_mesh, self._data.names))
        for unit in reversed(units_of(model, self.fsdp_units)):
            fully_shard(model.get_submodule(unit), **given)

    @property
    def _data(self) -> Mesh:
        return self.mesh if self.sharding is None else self.sharding.data

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions about the step of a rank, a sentence each."""
        tensors = ""
        if self.sharding is not None and self.sharding.styles:
            axis, size = self.sharding.mesh.axes[-1]
            tensors = f", and parallelize_module over the {size} ranks of axis {axis!r}"
        if self.world_size == 1:
            return (f"one of {self.devices} ranks{tensors.replace(', and', ', run by')}",) if tensors else ()
        if self.fsdp_units is None:
            return (
                f"one of {self.world_size} ranks, run by DDP, DistributedDataParallel(model) with its defaults: "
                "gradients are held twice; what NCCL allocates for itself is not in the peak; the time of a collective "
                "is what the rest of the backward pass does not hide, by the links of the device",
            )
        units = ", ".join(map(repr, self.fsdp_units))
        return (
            f"one of {self.world_size} ranks, that with the largest shards, run by FSDP2, fully_shard(module) for the "
            f"modules {units}, with {self._with_options()}{tensors}; what NCCL allocates for itself is not in the "
            "peak; the time of a collective is what the computation of a unit does not hide, by the device's links",
        )

    def _with_options(self) -> str:
        options, policy = self.options, self.options.mp_policy
        rest = str(structs.replace(options, mp_policy=None))
        return f"{rest or 'its defaults'} and {policy or 'no mixed-precision policy'}"


@dataclass(frozen=True)
class FSDP2:
    """Ranks over which ``fully_shard`` spreads a step, for ``ranks=`` of ``profile`` and ``plan``.

        sacplan.plan(profile, "22GiB", ranks=sacplan.FSDP2(8))
        sacplan.FSDP2({"replicate": 2, "shard": 4}, ["layers.*", ""], mp_policy=MixedPrecisionPolicy(torch.bfloat16))

    The model is the whole one, before ``fully_shard``; the batch is that of one rank. Wrong values raise an error where
    ``ranks`` is given.

    Attributes:
        mesh: how many ranks, or the mesh of ``fully_shard``: a ``DeviceMesh`` of one or two axes, or its sizes by name.
        units: patterns for the modules on which ``fully_shard`` is called (``*`` also matches dots, ``""`` is the model
            itself). None: the layers of each outermost stack, and the model.
        mp_policy, reshard_after_forward, offload_policy: as for ``fully_shard``. The model keeps its own type:
            parameters in float32 are recorded with units that compute in the policy's ``param_dtype``. With a
            ``CPUOffloadPolicy``, ``Profile.host_bytes`` is what a rank takes of the host's memory.
        ignored_params: parameters of the model that each rank holds whole, as for ``fully_shard``.
    """

    mesh: Any
    units: Sequence[str] | None = None
    mp_policy: Any = None
    reshard_after_forward: bool | int | None = None
    offload_policy: Any = None
    ignored_params: Iterable[nn.Parameter] = ()

    def of(self, parameters: Iterable[str], model: nn.Module | None) -> Ranks:
        """Return checked ranks, for a model with parameters of these names.

        Raises:
            TraceError: an argument that ``fully_shard`` does not take, or some that do not go together.
        """
        world_size, replicas = self.mesh, 1
        if not isinstance(self.mesh, int):
            shape = _mesh_shape(self.mesh)
            world_size, replicas = math.prod(shape), math.prod(shape[:-1])
        options = FullyShardOptions.of(
            self.mp_policy,
            self.reshard_after_forward,
            replicas,
            self.offload_policy,
            names_of(self.ignored_params, model),
        )
        return Ranks.of(world_size, layers_of(parameters) if self.units is None else self.units, options)


@dataclass(frozen=True)
class DDP:
    """Ranks that ``DistributedDataParallel`` keeps replicas on, for ``ranks=`` of ``profile`` and ``plan``.

        sacplan.plan(profile, "22GiB", ranks=sacplan.DDP(8))

    Attributes:
        world_size: how many ranks. The batch is that of one.
    """

    world_size: int


AnyRanks: TypeAlias = FSDP2 | DDP | Ranks


def ranks_of(asked: Any, parameters: Iterable[str], model: nn.Module | None) -> Ranks:
    """Return checked ranks from what a user has given for ``ranks=``.

    Args:
        asked: an ``FSDP2`` or a ``DDP``, or the ranks of a plan or a profile.
        parameters: names of the model's parameters.
        model: None for a profile from a file.

    Raises:
        TraceError: ``asked`` is none of these, or does not fit the model.
    """
    if isinstance(asked, Ranks):
        return asked
    if isinstance(asked, DDP):
        return Ranks.of(asked.world_size)
    if not isinstance(asked, FSDP2):
        raise TraceError(
            f"ranks is {asked!r:.100}; give sacplan.FSDP2(8), sacplan.DDP(8), or the ranks of a plan."
        )
    return asked.of(parameters, model)


def names_of(parameters: Iterable[nn.Parameter], model: nn.Module | None) -> tuple[str, ...]:
    """Return the names of parameters, in the order of the model; of a tied one, its first name."""
    wanted = {id(p) for p in parameters}
    if not wanted:
        return ()
    if model is None:
        raise TraceError(
            "ignored_params are parameters of a model, and a profile from a file has none: give these ranks to "
            "sacplan.profile."
        )
    found = {id(p): name for name, p in model.named_parameters()}
    if not wanted <= found.keys():
        raise TraceError(
            "ignored_params holds what is no parameter of the model; give a set of them, "
            "{p for p in model.parameters() if ...}."
        )
    return tuple(name for key, name in found.items() if key in wanted)


def layers_of(parameters: Iterable[str]) -> tuple[str, ...]:
    """Return patterns for the modules of ``fully_shard``: the layers of each outermost stack, and the model itself."""
    found = []
    for name in parameters:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        # Layers of the model itself are listed: ``*`` alone would match all modules.
        if at is not None:
            found.append(".".join([*parts[:at], "*"]) if at else parts[0])
    return (*dict.fromkeys(found), "")


def _mesh_shape(mesh: Any) -> tuple[int, ...]:
    """Return the sizes of the axes of a ``DeviceMesh``, or of a mapping by name; the last one is for shards."""
    shape = tuple(mesh.values() if isinstance(mesh, Mapping) else getattr(mesh, "shape", ()))
    if len(shape) not in (1, 2) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise TraceError(
            f"FSDP2 of {mesh!r:.100}: give a number of ranks, a DeviceMesh of one axis or of two (replicas, and "
            'shards), or its sizes, {"replicate": 2, "shard": 4}.'
        )
    return shape


ONE_RANK = Ranks()
"""The whole step on one device."""


def units_of(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that patterns name, in the order of ``named_modules()``; ``""`` is the model itself.

    Containers without a forward, such as a ``ModuleList``, are no units: patterns for them mean their modules.

    Raises:
        TraceError: a pattern matches nothing; the message lists near names.
    """
    if isinstance(patterns, str) or not patterns:
        raise TraceError(
            f"the units of FSDP2 are {patterns!r}; give a list of patterns for module names, such as "
            '["layers.*", ""] ("" is the model itself).'
        )
    from torch import nn

    names = [
        fqn
        for fqn, module in model.named_modules()
        if type(module).forward is not nn.Module.forward or "forward" in vars(module)
    ]
    found = set(matching_modules(names, patterns, "units"))
    return tuple(name for name in names if name in found)
