"""The mixed-precision policy of ``fully_shard``, as a value that files can hold.

    policy = MixedPrecision.of(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

Shards and the optimizer keep the type of the parameters. What a unit gathers, and everything that it computes, has
``param_dtype``; its gradients are cast to ``reduce_dtype`` before they are reduced, and then to the type of the shards.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct

from sacplan.core.files import Name
from sacplan.errors import TraceError


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
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
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
            TraceError: it is no ``MixedPrecisionPolicy``, or names a type that no gradient can have.
        """
        if policy is None or isinstance(policy, cls):
            return None if policy == cls() else policy
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not isinstance(policy, MixedPrecisionPolicy):
            raise TraceError(
                f"mp_policy is {policy!r:.100}; give torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype="
                "torch.bfloat16, reduce_dtype=torch.float32), as to fully_shard."
            )
        types = {
            name: None if (value := getattr(policy, name)) is None else str(value).removeprefix("torch.")
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
        }
        found = cls(**types, cast_forward_inputs=policy.cast_forward_inputs)
        return None if found == cls() else found

    @property
    def of_torch(self) -> Any:
        """Torch's policy."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        types = {
            name: None if (value := getattr(self, name)) is None else getattr(torch, value)
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
        }
        return MixedPrecisionPolicy(**types, cast_forward_inputs=self.cast_forward_inputs)

    def __str__(self) -> str:
        """Return torch's own spelling, without what is at its default."""
        types = [
            f"{name}={value}"
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
            if (value := getattr(self, name)) is not None
        ]
        if not self.cast_forward_inputs:
            types.append("cast_forward_inputs=False")
        return f"MixedPrecisionPolicy({', '.join(types)})"
