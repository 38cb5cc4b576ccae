"""The technique "chunk": run ops in slices, so that what they make inside is never there as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sacplan._chunk.body import stretches_patch
from sacplan._chunk.entries import ChunkOptions, loss_chunks, module_chunks
from sacplan._chunk.families import merged
from sacplan._chunk.rest import CannotChunk, training_chunk
from sacplan._chunk.search import StretchSolver
from sacplan._device.devices import DeviceSpec
from sacplan._program.decisions import Chunk, Decision
from sacplan._program.liveness import Footprint
from sacplan._program.places import OpSequence
from sacplan._program.program import Patch, Phase, Program
from sacplan._technique.offers import Offer
from sacplan._technique.regions import Option, Region
from sacplan._technique.step import PlanStep
from sacplan._technique.technique import Installed, StepSolver
from sacplan.errors import PlanError


class Chunking:
    """See ``sacplan._technique.technique.Technique``."""

    name = "chunk"
    decision = Chunk
    one_device = "slices are planned for tensors of one device"
    how = "however finely its ops are sliced"

    def longest_run(self, step: PlanStep) -> int:
        """It names no regions that others have options for."""
        return 0

    def regions(self, step: PlanStep, size: int) -> Sequence[Region]:
        """None: what runs in slices is of no use to other techniques, see ``offers``."""
        return ()

    def options(self, step: PlanStep, region: Region) -> Sequence[Option]:
        """None."""
        return ()

    def offers(self, step: PlanStep, peak: Footprint | None) -> Sequence[Offer]:
        """The loss in slices, and where a peak is known, the modules that make it."""
        if not step.gradients or step.device is None or (peak and peak.peak_phase == Phase.OPTIMIZER):
            return ()
        program, device, accumulate = step.program, step.device, step.accumulate
        if peak is not None:
            return [each.offer(step) for each in module_chunks(program, peak.peak_scope, device, accumulate)]
        loss = loss_chunks(program, device, accumulate)
        return [loss.offer(step)] if isinstance(loss, ChunkOptions) else []

    def solvers(self, step: PlanStep) -> Sequence[StepSolver]:
        """Where there are no gradients, a path through stretches of ops."""
        return () if step.gradients else (StretchSolver(),)

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        """The patch that the option came with."""
        assert option.patch is not None
        return option.patch

    def decisions(self, program: Program, taken: Sequence[tuple[Region, Option]]) -> tuple[Decision, ...]:
        """Those that the options came with."""
        return tuple(option.decision for _, option in taken if option.decision is not None)

    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """The loop instead of the ops that run in slices.

        Raises:
            PlanError: this step has no such ops.
        """
        if device is None:
            raise PlanError("a plan with chunks is read with the device that it is for; it was not given.")
        stretches = _stretches(decisions)
        if stretches:
            return stretches_patch(program, stretches, device)
        chunks = [one for one in decisions if isinstance(one, Chunk)]
        patches = []
        for chunk in chunks:
            try:
                patches.append(training_chunk(program, chunk, device).patch)
            except CannotChunk as error:
                raise PlanError(f"{chunk} cannot be carried out on this step: {error}.") from error
        return merged(program, patches)

    def install(
        self,
        model: torch.nn.Module,
        decisions: Sequence[Decision],
        recorded: Mapping[str, Sequence[OpSequence]],
        *,
        check: bool,
    ) -> Installed:
        """Replace the forward of each unit."""
        from sacplan._chunk.executor.install import InstalledChunks  # the executor is not needed to plan
        from sacplan._chunk.executor.stretch import InstalledStretches

        stretches = _stretches(decisions)
        if stretches:
            return InstalledStretches(model, stretches, recorded)
        return InstalledChunks(model, [one for one in decisions if isinstance(one, Chunk)])


def _stretches(decisions: Sequence[Decision]) -> list[Chunk]:
    """Those for inference; a plan has no others beside them."""
    found = [one for one in decisions if isinstance(one, Chunk) and one.span == "stretch"]
    if found and len(found) != len(decisions):
        raise PlanError("a plan has stretches, which run without gradients, or other chunks, but not both.")
    return found
