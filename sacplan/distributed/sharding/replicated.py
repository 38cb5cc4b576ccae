"""``sacplan.Replicated``: the tensor-parallel style of a module that is whole on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only


class Replicated(ParallelStyle):
    """Makes the parameters of a module DTensors that are whole on each rank; its inputs and outputs stay plain tensors.

    ``parallelize_module`` leaves modules without a style as they are. Then optimizers that step many parameters at once
    (``foreach``, ``fused``) raise: they do not take plain tensors beside DTensors, nor DTensors of several meshes.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._replicate, _as_whole, _as_local)

    def _replicate(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(p.detach(), mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole, p.requires_grad))


def _as_whole(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        else x
        for x in inputs
    )


def _as_local(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
    return tree_map_only(DTensor, lambda t: t.to_local(), outputs)
