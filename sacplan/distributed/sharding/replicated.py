"""``sacplan.Replicated``: the tensor-parallel style of a module that is whole on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only


class Replicated(ParallelStyle):
    """Makes the parameters of a module DTensors that are whole on each rank.

    ``parallelize_module`` leaves modules without a style as they are. Then optimizers that step many parameters at once
    (``foreach``, ``fused``) raise: they do not take plain tensors with DTensors, nor DTensors of several meshes.

    Plain inputs are the same on all ranks, and make plain outputs. Inputs that are DTensors may be cut: outputs are
    then what DTensor makes of them.

    Attributes:
        output_layouts: the placement of the output, a DTensor; None: the output stays as computed, or plain if whole.
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._replicate, _as_whole, self._placed)

    def _placed(self, _: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return tree_map_only(DTensor, self._output, outputs)

    def _output(self, t: DTensor) -> torch.Tensor:
        if self.output_layouts is not None:
            return t.redistribute(placements=[self.output_layouts])
        return t.to_local() if all(p.is_replicate() for p in t.placements) else t

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
