"""The arguments of ``fully_shard`` other than the modules, as a value that files can hold.

options = FullyShardOptions.of(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=2)

With a mixed-precision policy, shards and the optimizer keep the type of the parameters. What a unit gathers, and
everything that it computes, has ``param_dtype``; its gradients are cast to ``reduce_dtype`` before they are reduced,
and then to the type of the shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from sacplan.core.files import Name, Positive
from sacplan.errors import TraceError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


_TYPES = ("param_dtype", "reduce_dtype", "output_dtype")


class MixedPrecision(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A ``torch.distributed.fsdp.MixedPrecisionPolicy`` with its types as names, such as ``"bfloat16"``.

    Attributes:
        param_dtype: type in which units gather their parameters and compute; None: that of the parameters.
        reduce_dtype: type in which gradients are reduced; None: the type in which they were computed.
        output_dtype: type to which a unit casts its floating-point outputs; None: they stay as they are.
        cast_forward_inputs: whether a unit casts its floating-point inputs to ``param_dtype``.
    """

    param_dtype: Name | None = None
    reduce_dtype: Name | None = None
    output_dtype: Name | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        # Values may come from a file, with a type that this torch does not have.
        for name in _TYPES:
            value = getattr(self, name)
            dtype = None if value is None else getattr(torch, value, None)
            if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TraceError(
                    f"mp_policy: {name} is {value!r}; give a floating-point type, such as torch.bfloat16."
                )

    @classmethod
    def of(cls, policy: Any) -> MixedPrecision | None:
        """Return the value of torch's policy; None for a policy that changes nothing.

        Raises:
            TraceError: ``policy`` is no ``MixedPrecisionPolicy``, or has a type that is no floating-point one.
        """
        if policy is None:
            return None
        if isinstance(policy, cls):
            return None if policy == cls() else policy
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not isinstance(policy, MixedPrecisionPolicy):
            raise TraceError(
                f"mp_policy is {policy!r:.100}; give torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype="
                "torch.bfloat16, reduce_dtype=torch.float32), as to fully_shard."
            )
        types = {
            name: None if (value := getattr(policy, name)) is None else str(value).removeprefix("torch.")
            for name in _TYPES
        }
        found = cls(**types, cast_forward_inputs=policy.cast_forward_inputs)
        return None if found == cls() else found

    @property
    def of_torch(self) -> Any:
        """Torch's policy."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        types = {
            name: None if (value := getattr(self, name)) is None else getattr(torch, value) for name in _TYPES
        }
        return MixedPrecisionPolicy(**types, cast_forward_inputs=self.cast_forward_inputs)

    def __str__(self) -> str:
        """Return torch's own spelling, without what is at its default."""
        types = [f"{name}={value}" for name in _TYPES if (value := getattr(self, name)) is not None]
        if not self.cast_forward_inputs:
            types.append("cast_forward_inputs=False")
        return f"MixedPrecisionPolicy({', '.join(types)})"


class CPUOffload(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A ``torch.distributed.fsdp.CPUOffloadPolicy``: shards, their gradients and the optimizer are on the host.

    Attributes:
        pin_memory: whether the host's copies of parameters and gradients are pinned, so that copies overlap.
    """

    pin_memory: bool = True

    @classmethod
    def of(cls, policy: Any) -> CPUOffload | None:
        """Return the value of torch's policy; None for a policy that moves nothing.

        Raises:
            TraceError: ``policy`` is no ``OffloadPolicy``.
        """
        if policy is None or isinstance(policy, cls):
            return policy
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if not isinstance(policy, OffloadPolicy):
            raise TraceError(
                f"offload_policy is {policy!r:.100}; give torch.distributed.fsdp.CPUOffloadPolicy(), as to fully_shard."
            )
        return cls(policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else None

    def __str__(self) -> str:
        """Return the policy as it is written in a call."""
        return f"CPUOffloadPolicy({'' if self.pin_memory else 'pin_memory=False'})"


class FullyShardOptions(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Arguments of ``fully_shard``, the same for all units. The defaults are torch's.

    Attributes:
        mp_policy: types of gathered parameters, of gradients while they are reduced, and of outputs.
        reshard_after_forward: whether a unit frees its parameters after its forward. An int: it keeps them sharded
            over that many ranks. None: all units but the outermost ones free them.
        replicas: how many groups of ranks hold the same shards (HSDP); 1: parameters are sharded over all ranks.
        offload_policy: whether shards lie in the memory of the host; None: on the device.
        ignored_params: names of parameters that each rank holds whole, on the device. Their gradients are not reduced.
    """

    mp_policy: MixedPrecision | None = None
    reshard_after_forward: bool | int | None = None
    replicas: Positive = 1
    offload_policy: CPUOffload | None = None
    ignored_params: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        mp_policy: Any = None,
        reshard_after_forward: Any = None,
        replicas: int = 1,
        offload_policy: Any = None,
        ignored_params: Iterable[str] = (),
    ) -> FullyShardOptions:
        """Return checked options from torch's own objects.

        Raises:
            TraceError: a value that ``fully_shard`` does not take.
        """
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
            raise TraceError(
                f"reshard_after_forward is {reshard_after_forward!r}; give True, False, None, or the number of ranks "
                "that the parameters stay spread over after the forward."
            )
        # An int of 1 is False to fully_shard, but equals True in Python, so False is stored.
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            reshard_after_forward = False if reshard_after_forward == 1 else reshard_after_forward
        return cls(
            MixedPrecision.of(mp_policy),
            reshard_after_forward,
            replicas,
            CPUOffload.of(offload_policy),
            tuple(ignored_params),
        )

    def arguments(self, model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` for the modules of a model.

        Raises:
            TraceError: ``ignored_params`` has names of no parameters of the model.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        known = dict(model.named_parameters())
        unknown = [name for name in self.ignored_params if name not in known]
        if unknown:
            raise TraceError(f"ignored_params: the model has no parameters {', '.join(unknown[:3])}.")
        policy, offload = self.mp_policy, self.offload_policy
        return {
            "mesh": mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy() if policy is None else policy.of_torch,
            "offload_policy": OffloadPolicy() if offload is None else CPUOffloadPolicy(offload.pin_memory),
            "ignored_params": {known[name] for name in self.ignored_params},
        }

    @property
    def communicators(self) -> int:
        """The number of NCCL communicators of a rank: for shards, replicas, and shards over fewer ranks."""
        of_fewer = self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, bool)
        return 1 + (self.replicas > 1) + of_fewer

    def check(self, world_size: int) -> None:
        """Raise ``TraceError`` if the options do not go together with a number of ranks."""
        if world_size % self.replicas:
            raise TraceError(f"{self.replicas} replicas of the shards do not divide {world_size} ranks.")
        if self.replicas > 1 and self.replicas == world_size:
            raise TraceError(
                f"the mesh has {self.replicas} replicas of one shard each: nothing is sharded. Give DDP({world_size}), "
                "or at least 2 ranks to the last axis of the mesh."
            )
        kept, shards = self.reshard_after_forward, world_size // self.replicas
        if kept is not None and not isinstance(kept, bool) and (kept < 1 or shards % kept):
            divisors = (
                ", ".join(str(n) for n in range(2, shards) if shards % n == 0) or "none but 1 and itself"
            )
            raise TraceError(
                f"reshard_after_forward is {kept}, which does not divide the {shards} ranks that parameters are "
                f"sharded over (divisors: {divisors}). Give one of these, True or False."
            )

    def __str__(self) -> str:
        """Return the arguments that are not at their defaults, as written in a call; empty if there are none."""
        parts = [] if self.mp_policy is None else [f"mp_policy={self.mp_policy}"]
        if self.reshard_after_forward is not None:
            parts.append(f"reshard_after_forward={self.reshard_after_forward}")
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        if self.offload_policy is not None:
            parts.append(f"offload_policy={self.offload_policy}")
        if self.ignored_params:
            parts.append(f"{len(self.ignored_params)} ignored_params, which each rank holds whole")
        return ", ".join(parts)


DEFAULTS = FullyShardOptions()
"""What ``fully_shard(module)`` does."""
