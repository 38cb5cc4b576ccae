"""``Profile``: one recorded step, and what can be read off it: peak, time, module statistics, the step with a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from msgspec import structs

from sacplan.classic.graph import Graph, parse_module_info
from sacplan.classic.stats import module_info, segments_of
from sacplan.classic.units import UnitTradeoff, unit_tradeoffs
from sacplan.core.arguments import checked
from sacplan.core.budget import format_bytes
from sacplan.core.decisions import AnyDecision, Decision, Discarded, as_decisions
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.liveness import Footprint
from sacplan.core.program import Phase, Program
from sacplan.core.sections import Section
from sacplan.device.device_memory import DeviceMemory, device_memory
from sacplan.device.devices import DeviceSpec
from sacplan.device.eager import eager_ms, waits_ms
from sacplan.device.library_workspaces import library_workspaces
from sacplan.distributed.ranks.ranks import ONE_RANK, AnyRanks, Ranks, ranks_of
from sacplan.errors import NotInGraph, PlanError, TraceError
from sacplan.profiling import files
from sacplan.profiling.remarks import (
    no_optimizer,
    on_the_host,
    summed_outputs,
    triton_kernels,
    unfused_attention,
    without_bfloat16,
    without_cudnn_workspaces,
)
from sacplan.profiling.timeline import timeline_of
from sacplan.record.step import (
    Mode,
)
from sacplan.solvers.rotor.chain import Chain
from sacplan.solvers.rotor.stages import stages_of
from sacplan.techniques.registry import installed_on, rewritten, why_uncompiled
from sacplan.torch_compat.compiling import compiled_in_place
from sacplan.torch_compat.partitioning import GivenGraph

if TYPE_CHECKING:
    import pandas as pd
    import torch


class HasDecisions(Protocol):
    """A plan, as far as a profile needs it: its decisions."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of the plan, see ``Plan``."""
        ...


Decided: TypeAlias = HasDecisions | Iterable[Decision] | Discarded
"""A plan, its decisions, or a mapping of units to the call sites that they discard."""


NO_SOURCE = (
    "the step of a rank is recorded from the model, which a profile from a file does not have: give ranks= to "
    "sacplan.profile (--world-size to sacplan profile), or make the profile where you plan."
)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The model that a profile was recorded from, known only in the process that recorded it.

    Attributes:
        model: the user's.
        again: records the step once more, with other fields of the ``StepRequest``.
        joint_graphs: the joint graphs of a step that inductor compiles, split as when it was recorded.
    """

    model: torch.nn.Module
    again: Callable[..., Profile]
    joint_graphs: Sequence[GivenGraph] = ()
    _known: dict[Any, Profile] = field(default_factory=dict)

    def on(self, ranks: Ranks) -> Profile:
        """Return the profile of a rank's step, which is recorded once for meshes that differ only in names.

        Raises:
            TraceError: the step does not run on these ranks.
        """
        sharding = ranks.sharding
        key = (
            structs.replace(ranks, sharding=None),
            sharding and (tuple(sharding.styles.items()), sharding.mesh.ranks),
        )
        if key not in self._known:
            self._known[key] = self.again(ranks=ranks)
        found = self._known[key]
        graphs: Any = found.source and found.source.joint_graphs
        source = dataclasses.replace(self, joint_graphs=graphs)
        return dataclasses.replace(found, ranks=ranks, source=source)


@dataclass(frozen=True)
class Profile:
    """One recorded step, from which plans are made. Frozen; ``save`` and ``load`` it.

    Attributes:
        recorded: the step of one device, op by op, as it ran.
        fingerprint: identifies the model and the batch.
        spec: the device that the step would run on.
        trace, runtime: how the step was run, and how its ops were timed.
        mode: ``"train"`` or ``"inference"``.
        rules: what a fake trace took for granted where sizes or values depend on data, a sentence each.
        ranks: over how many ranks the step is spread, and how.
        source: the model that was recorded; None for a profile from a file, or one computed from another.
    """

    MADE_BY: ClassVar[str] = "sacplan.profile(model, batch)"

    recorded: Program
    fingerprint: Fingerprint
    spec: DeviceSpec
    trace: str
    runtime: str
    mode: Mode = "train"
    rules: tuple[str, ...] = ()
    ranks: Ranks = ONE_RANK
    source: Source | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields that are saved, without ``source`` and cached values."""
        return type(self), tuple(self._saved().values())

    def _saved(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "source"}

    @property
    def runs_compiled(self) -> bool:
        """Whether modules ran compiled in the recorded step."""
        how = self.fingerprint.setup.compiled
        return how is not None and how.recorded

    @property
    def uncompiled(self) -> Profile:
        """The step recorded uncompiled, on which plans are proposed; the setup still says what is compiled.

        Raises:
            PlanError: the profile is from a file, which holds no model.
        """
        if not self.runs_compiled:
            return self
        setup: Any = self.fingerprint.setup
        how = structs.replace(setup.compiled, recorded=False, **self._not_in_graph)
        fingerprint = structs.replace(self.fingerprint, setup=structs.replace(setup, compiled=how))
        return dataclasses.replace(self._recorded_uncompiled, fingerprint=fingerprint)

    def planned_and_run(self, planned: Callable[[Profile], Any]) -> tuple[Any, Profile]:
        """Plan on the uncompiled step, run the compiled one with the plan, dry, and return plan and run.

        If the compiler breaks the graph in a unit of the plan, or traces other ops in place of one, another plan is
        made: without this unit, and with this op kept.

        Raises:
            NotInGraph: the run shows no unit or op that was not left out already.
        """
        while True:
            plan = planned(self.uncompiled)
            try:
                return plan, self.run_with(plan)
            except NotInGraph as error:
                found = {"broken": error.units.intersection(plan.units), "untraced": error.ops}
                known = {
                    which: tuple(sorted({*self._not_in_graph[which], *new})) for which, new in found.items()
                }
                if known == self._not_in_graph:
                    raise
                self._not_in_graph.update(known)

    @cached_property
    def _not_in_graph(self) -> dict[str, tuple[str, ...]]:
        return {"broken": (), "untraced": ()}

    @cached_property
    def _recorded_uncompiled(self) -> Profile:
        return self._again(compiled=None)

    def run_with(self, plan: Any) -> Profile:
        """Return the profile of a compiled step run again with a plan, dry; cached by decisions.

        Raises:
            PlanError: as for ``uncompiled``; or the plan cannot run compiled.
        """
        if not plan.decisions:
            return self
        how = self.fingerprint.setup.compiled
        why = why_uncompiled(plan.decisions) if how is not None and "" in how.modules else ""
        if why:
            raise PlanError(f"this step is compiled as a whole. {why}")
        if plan.decisions not in self._dry_runs:
            put_on = functools.partial(installed_on, plan.decisions, plan.recorded)
            # Partitions alone need no hooks of autograd, so saved tensors are recorded, to plan what runs eagerly.
            saved = "record" if plan.partitions == plan.decisions else "observe"
            self._dry_runs[plan.decisions] = self._again(prepare=put_on, saved=saved)
        return self._dry_runs[plan.decisions]

    def run_again(self) -> Profile:
        """Return the profile of a compiled step run again without a plan, dry.

        Raises:
            PlanError: as for ``uncompiled``.
        """
        return self._again(saved="observe")

    @cached_property
    def joint_graphs(self) -> dict[str, Any]:
        """A cache of what plans find out about the graphs of a compiled step, by ``graph_key``."""
        return {}

    @cached_property
    def _dry_runs(self) -> dict[tuple[Decision, ...], Profile]:
        return {}

    def _again(self, **how: Any) -> Profile:
        """Record the step once more, with other fields of its ``StepRequest``."""
        if self.source is None:
            raise PlanError(
                "a plan for a compiled step is proved by running the step with it, dry. This profile is from a file or "
                "was pickled, and has no model: call sacplan.profile here."
            )
        return self.source.again(ranks=self.ranks, **how)

    def on_ranks(self, ranks: AnyRanks | None) -> Profile:
        """Return the profile of one rank, with the step spread over ``ranks``; None returns this one.

        Raises:
            TraceError: unknown units, a model that cannot be spread so, or what ``fully_shard`` does not take.
        """
        if ranks is None:
            return self
        with compiled_in_place(None if self.source is None else self.source.model) as model:
            ranks = ranks_of(ranks, (name for name, *_ in self.fingerprint.parameters), model)
        if ranks == self.ranks:  # the same profile, with all that is cached in it
            return self
        if self.recorded.gathering and self.ranks == ONE_RANK:
            raise TraceError(
                "fully_shard had been called on the model when it was profiled: this is the profile of a rank already. "
                "Leave ranks and mesh out, or profile the model before it is sharded."
            )
        if self.source is None:
            raise PlanError(NO_SOURCE)
        # With this profile's device, since a caller may have given it another size of memory.
        return dataclasses.replace(self.source.on(ranks), spec=self.spec)

    @cached_property
    def program(self) -> Program:
        """The step on its device: the recorded one, with the workspaces of libraries."""
        return self.recorded.with_(library_workspaces(self.recorded, self.spec))

    @property
    def device(self) -> str:
        """Name of the device that the step would run on."""
        return self.spec.name

    @property
    def device_memory_bytes(self) -> int:
        """Memory in bytes of the device that the step would run on."""
        return self.spec.memory_bytes

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions behind the figures, a sentence each.

        They come from a fake trace, from spreading the step over ranks, from training without a loss or without an
        optimizer, from attention that no fused kernel runs, from what cuDNN does not publish, from Triton
        kernels, and from bfloat16 on a device that has none.
        """
        found = [
            *self.rules,
            *self.ranks.assumptions,
            *(() if self.fingerprint.setup.compiled is None else self.fingerprint.setup.compiled.assumptions),
            *filter(None, [summed_outputs(self.fingerprint.setup), on_the_host(self.fingerprint.setup)]),
        ]
        if self.has_no_optimizer:
            found.append(no_optimizer(self.program, self.spec))
        last = (
            unfused_attention(self.recorded, self.spec),
            without_cudnn_workspaces(self.recorded, self.spec),
            triton_kernels(self.recorded),
            without_bfloat16(self.recorded, self.spec),
        )
        return (*found, *filter(None, last))

    @property
    def is_of_a_rank(self) -> bool:
        """Whether this is the step of one of several ranks, which may have shards alone."""
        return self.ranks.devices > 1 or self.fingerprint.local_shapes is not None

    @property
    def has_no_optimizer(self) -> bool:
        """Whether this is a training step in which no optimizer ran: the peak lacks its state."""
        return self.mode == "train" and self.fingerprint.setup.optimizer is None

    @property
    def optimizer_host_bytes(self) -> int:
        """Bytes of the host's memory that the optimizer takes: paged state, or what is offloaded to the CPU."""
        found: int = self.fingerprint.setup.optimizer_host_bytes
        return found

    @property
    def baseline(self) -> Footprint:
        """Peak and recomputation of the step without a plan."""
        return self.program.footprint

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole step: everything alive on the device, parameters, batch and optimizer state included."""
        return self.baseline.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that a rank takes with ``offload_policy``; 0 without.

        These are the shards of parameters and gradients, in pinned memory rounded up to powers of two, and the
        optimizer's state. They are not in ``peak_bytes``, unless the device is a CPU, whose memory is the host's.
        """
        return int(self.fingerprint.setup.shards_host_bytes)

    @property
    def unplanned_host_bytes(self) -> int:
        """Bytes of the host's memory that a rank takes without a plan: ``host_bytes`` and ``optimizer_host_bytes``.

        0 on a CPU, whose memory is the host's: there they are in ``peak_bytes``.
        """
        return 0 if self.spec.kind == "cpu" else self.host_bytes + self.optimizer_host_bytes

    @cached_property
    def step_ms(self) -> float:
        """Time of the step in ms, predicted or measured op by op: of its ops, and of a GPU's waits for the CPU."""
        return self.program.step_ms + self.waits_ms(self.program)

    @property
    def update_ms(self) -> float:
        """Part of ``step_ms`` that a micro-step without the optimizer's step does not have."""
        if self.spec.kind == "cuda" and not self.runs_compiled:
            return self.step_ms - eager_ms(self.program, without=Phase.OPTIMIZER)
        return sum(op.time_ms for op in self.program.ops if op.phase == Phase.OPTIMIZER)

    def waits_ms(self, program: Program) -> float:
        """Return how long a GPU waits for the CPU in a program of this step, in ms; 0 if it is compiled."""
        return waits_ms(program) if self.spec.kind == "cuda" and not self.runs_compiled else 0.0

    @property
    def forward_ms(self) -> float:
        """Time of the forward pass in milliseconds."""
        return self.program.forward_ms

    @cached_property
    def tradeoffs(self) -> Mapping[str, UnitTradeoff]:
        """Memory that modules with children could discard, and the time to recompute it; by fqn in execution order."""
        return unit_tradeoffs(self.program)

    @cached_property
    def graph(self) -> Graph:
        """The module tree with statistics, trade-offs and memory rows, as ``sac_milp`` reads it."""
        info = module_info(self.program, self.program, self.tradeoffs)
        return dataclasses.replace(parse_module_info(info, root=""), segments=segments_of(self.program))

    @property
    def chain(self) -> Chain:
        """The step as a chain of stages, for ``sacplan.rotor``.

        Raises:
            PlanError: the forward pass cannot be split into stages, or the step calls the model more than once.
        """
        return stages_of(self.program).chain

    def with_plan(self, plan: Decided) -> Program:
        """Return the program of the step with a plan, with decisions, or with a mapping of units to discarded calls.

        Raises:
            PlanError: ``plan`` is none of these, or has a chunk that cannot be carried out on this step.
        """
        # A mapping is iterable too, so it comes first. A single decision counts as a list of one.
        decisions: tuple[Decision, ...]
        if isinstance(plan, Mapping):
            decisions = as_decisions(plan)
        else:
            found: Any = plan if isinstance(plan, Iterable) else getattr(plan, "decisions", (plan,))
            decisions = tuple(found)
        wrong = [one for one in decisions if not isinstance(one, AnyDecision)]
        if wrong:
            raise PlanError(
                f"this takes a plan, decisions of one (plan.decisions), or plan.discarded, not {plan!r:.100}."
            )
        if not self.runs_compiled or not decisions:
            return rewritten(self.program, decisions, self.spec)
        if not hasattr(plan, "recorded"):
            raise PlanError(
                "this step is compiled, and a plan changes what the compiler makes of it: it is run with the plan, "
                "dry. That takes the whole plan, and not decisions of one."
            )
        return self.run_with(plan).program

    def footprint(self, plan: Decided) -> Footprint:
        """Return peak and recomputation of the step with a plan; for ``plan`` see ``with_plan``."""
        return self.with_plan(plan).footprint

    def device_memory(self, plan: Decided | None = None) -> DeviceMemory | None:
        """Return the peaks that torch's allocator would report on the GPU, without a plan or with one.

            profile.device_memory().steps.max_memory_reserved

        ``peak_bytes`` is the sum of everything that is alive. A GPU's allocator hands out blocks and reserves segments,
        and both take more: see :class:`sacplan.DeviceMemory`. None if the device is a CPU.
        """
        # There is no caching allocator on a CPU, so nothing is reserved beyond the tensors.
        if self.spec.kind != "cuda":
            return None
        return device_memory(self.program if plan is None else self.with_plan(plan))

    def to_frame(self) -> pd.DataFrame:
        """Return statistics of each module as a table, in execution order."""
        return self.graph.to_frame()

    def timeline(self, plan: Decided | None = None) -> pd.DataFrame:
        """Return the bytes alive at each op by kind as a table, without a plan or with one (see ``with_plan``).

        Columns: ``op``, ``phase``, ``module``, ``recomputed``, ``start_ms`` and ``ms`` (as predicted), ``total_bytes``,
        and one for each kind.
        """
        return timeline_of(self.program if plan is None else self.with_plan(plan))

    @checked(TraceError)
    def save(self, path: str | Path) -> None:
        """Write to a file (JSON; compressed where the name ends in ``.gz``)."""
        files.save(path, **self._saved())

    @classmethod
    @checked(TraceError)
    def load(cls, path: str | Path) -> Profile:
        """Read what ``save`` wrote.

        Raises:
            TraceError: the file is damaged, or holds something else.
        """
        return cls(**files.load(path))

    def in_words(self) -> Section:
        """Return the model, the setup and the figures of the recording, for people."""
        fingerprint, baseline = self.fingerprint, self.baseline
        where = baseline.peak_phase.name.lower() + (f" of {baseline.peak_fqn}" if baseline.peak_fqn else "")
        rows = (
            ("parameters", f"{fingerprint.n_parameters:,}, {fingerprint.dtype or 'none'}"),
            ("batch", fingerprint.batch_in_words),
            ("set up as", str(fingerprint.setup)),
            ("peak", f"{format_bytes(self.peak_bytes)}, in the {where}"),
            *([("host", format_bytes(self.host_bytes))] if self.host_bytes else []),
            ("step", f"{self.step_ms:.2f} ms ({self.runtime}), forward {self.forward_ms:.2f} ms"),
            ("recorded", f"{len(self.program.ops)} ops ({self.mode}, {self.trace})"),
        )
        return Section(f"Profile of {fingerprint.model_class} on {self.device}", rows)

    def __repr__(self) -> str:
        """One line: model, device, peak, time, ops."""
        return (
            f"Profile({self.fingerprint.model_class} on {self.device}: peak {format_bytes(self.peak_bytes)}, "
            f"step {self.step_ms:.2f} ms, {len(self.program.ops)} ops{', no optimizer' * self.has_no_optimizer})"
        )


ProfileOrPath: TypeAlias = Profile | str | Path
"""A profile, or the file that it was saved to."""
