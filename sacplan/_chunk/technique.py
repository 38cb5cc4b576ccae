"""The technique "chunk": run ops in slices of one dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from sacplan._chunk.body import stretches_patch
from sacplan._device.devices import DeviceSpec
from sacplan._program.decisions import Chunk, Decision
from sacplan._program.places import OpSequence
from sacplan._program.program import Patch, Program
from sacplan._program.regions import Option, Region
from sacplan._program.technique import Installed, View
from sacplan.errors import PlanError


class Chunking:
    """See ``sacplan._program.technique.Technique``. Stretches are found by a search of their own (``search.py``)."""

    name = "chunk"
    decision = Chunk

    def options(self, program: Program, region: Region, costs: Sequence[float]) -> Sequence[Option]:
        """None: stretches are not chosen region by region."""
        return ()

    def option_patch(self, program: Program, region: Region, option: Option, view: View) -> Patch:
        """There are no options."""
        raise PlanError("chunks are not options of regions.")

    def decisions(self, program: Program, taken: Sequence[tuple[Region, Option]]) -> tuple[Decision, ...]:
        """There are no options."""
        return ()

    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """Loops in the place of ops."""
        if device is None:
            raise PlanError("what a loop over slices takes depends on the device, and none was given.")
        return stretches_patch(program, cast(Sequence[Chunk], decisions), device)

    def install(
        self,
        model: torch.nn.Module,
        decisions: Sequence[Decision],
        recorded: Mapping[str, Sequence[OpSequence]],
        *,
        check: bool,
    ) -> Installed:
        """Replace the forward of each unit."""
        from sacplan._chunk.executor.stretch import InstalledStretches  # the executor is not needed to plan

        return InstalledStretches(model, cast(Sequence[Chunk], decisions), recorded)
