"""The technique "chunk": run ops in slices, so that their intermediate tensors never exist as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sacplan.core.decisions import Chunk, Decision
from sacplan.core.liveness import Footprint
from sacplan.core.optimizer_ops import steps_in_backward
from sacplan.core.program import Patch, Phase, Program
from sacplan.device.devices import DeviceSpec
from sacplan.errors import PlanError
from sacplan.techniques.base.offers import Offer
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.base.technique import Installed, StepSolver, Technique, ToInstall
from sacplan.techniques.chunk.chunk_entry import CannotChunk
from sacplan.techniques.chunk.entries import backward_chunks, loss_chunks, module_chunks, offer_of
from sacplan.techniques.chunk.families import merged
from sacplan.techniques.chunk.rest import training_chunk
from sacplan.techniques.chunk.search import StretchSolver
from sacplan.techniques.chunk.stretches import stretch_rewrite


class Chunking(Technique):
    """Chunking makes offers in training, and has a solver of its own for steps without gradients.

    It names no regions: other techniques have no use for ops that run in slices.
    """

    name = "chunk"
    row = "chunked loss"
    uncompiled = (
        "torch.compile cannot keep slices: compile the layers, each with .compile(), and not the whole model."
    )
    row_of_long_search = "chunks"
    decision = Chunk
    one_device = "slices are planned for tensors of one device"
    how = "however finely its ops are sliced"

    def offers(self, step: PlanStep, peak: Footprint | None) -> Sequence[Offer]:
        """Offer the loss in slices; if a peak is given, the modules around it instead."""
        if not step.gradients or step.device is None or (peak and peak.peak_phase == Phase.OPTIMIZER):
            return ()  # inference has its own solver; chunks need a device; none lowers a peak in the optimizer
        if steps_in_backward(step.program):
            return ()  # slices add up the gradients of a parameter, whose hook would run for each of them
        program, device, pins = step.program, step.device, step.pins.outside
        if peak is not None:
            found = module_chunks(program, peak.peak_scope, device, pins)
            return [offer_of(step, chunks) for chunks in found]
        # What is compiled cannot run in slices, so the loss in slices has to begin after it.
        compiled = (i for i in pins.compiled_ops if program.ops[i].phase == Phase.FORWARD)
        loss = loss_chunks(program, device, after=max(compiled, default=-1))
        return [offer_of(step, loss.chunks)] if loss.chunks else []

    def settled(self, step: PlanStep, peak: Footprint, decisions: Sequence[Decision]) -> Sequence[Decision]:
        """Return chunks of the backward pass of the module at the peak, and of all modules that are alike."""
        if not step.gradients or step.device is None or peak.peak_phase != Phase.BACKWARD:
            return ()
        known, pins = [one for one in decisions if isinstance(one, Chunk)], step.pins.outside
        return backward_chunks(step.program, peak.peak_scope, step.device, pins, known)

    def solvers(self, step: PlanStep) -> Sequence[StepSolver]:
        """Return the search for a path through stretches of ops, for steps without gradients."""
        return () if step.gradients else (StretchSolver(),)

    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """Return the patch that puts loops in the place of ops that run in slices.

        Raises:
            PlanError: this step has no such ops, or two of the loops would be in the same place.
        """
        if device is None:
            raise PlanError("a plan with chunks is read with the device that it is for; it was not given.")
        chunks, rewrites = _chunks(decisions), []
        for chunk in chunks:
            try:
                rewrite = stretch_rewrite if chunk.span == "stretch" else training_chunk
                rewrites.append(rewrite(program, chunk, device))
            except CannotChunk as error:
                raise PlanError(f"{chunk} cannot be carried out on this step: {error}.") from error
        try:
            return merged(program, rewrites)
        except ValueError as error:
            raise PlanError(f"{error}, so these chunks do not go together: {chunks}.") from error

    def install(self, wanted: ToInstall) -> Iterator[Installed]:
        """Replace the forward of each unit."""
        # The executor is not needed to plan.
        from sacplan.techniques.chunk.executor.install import InstalledChunks

        yield InstalledChunks(wanted.model, _chunks(wanted.decisions), wanted.recorded)


def _chunks(decisions: Sequence[Decision]) -> list[Chunk]:
    """Return the chunks among decisions; raise ``PlanError`` if there are stretches and other decisions."""
    found = [one for one in decisions if isinstance(one, Chunk)]
    stretches = sum(one.span == "stretch" for one in found)
    if stretches and stretches != len(decisions):
        raise PlanError("a plan has stretches, which run without gradients, or other chunks, but not both.")
    return found
