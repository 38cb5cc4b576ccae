"""The errors and the warning of a step for which memory is too small: no plan fits, or the one that was made does not.

- No plan holds a budget: the error says what makes the smallest peak, and what other techniques would reach.
- The tensors of a plan fit a GPU, but its segments do not: how much is reserved, and whether expandable segments would
  help.
- No plan holds a budget on a mesh: the same as the first, for a rank.
- A plan that was made by rule, or for a budget, does not fit the device: a warning when it is returned.

What other techniques would reach is searched for when ``plan`` makes the error, so reading its text cannot fail. These
searches are bounded and skip choices of fewer techniques, so ``plan(profile, "smallest")`` may go a little lower.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from sacplan.core.budget import exact_bytes, format_bytes
from sacplan.core.liveness import Footprint
from sacplan.core.program import Phase, Program
from sacplan.core.setup import Setup, outermost_patterns
from sacplan.device.device_memory import WITH_RETRIES, reserved_bytes, retries_within
from sacplan.device.outside_allocator import outside_text
from sacplan.errors import InfeasibleBudget, SacplanWarning
from sacplan.planning.candidate import Candidate
from sacplan.planning.limits import EXPANDABLE_SEGMENTS, Room, beside_others
from sacplan.planning.plan import Plan
from sacplan.planning.planner import Planner, smallest_bytes
from sacplan.profiling.profile import Profile
from sacplan.record.limits import WITHOUT_HOOKS
from sacplan.techniques.registry import TECHNIQUES

OPTIMIZER_STEP = "optimizer step"
"""``binding`` of an error whose smallest peak is in the optimizer's step, and not in a module."""


def infeasible(
    profile: Profile, asked: Planner, budget_bytes: int, *, looks_further: bool
) -> InfeasibleBudget:
    """Return the error: what was tried, the smallest peak and where it is, and what to do about it.

    Args:
        profile: The step.
        asked: The planner that has found nothing.
        budget_bytes: The budget.
        looks_further: Whether to say what other techniques would reach, which takes further searches.
    """
    # The search that came nearest to the budget is the one to explain.
    run = asked.searches.nearest.smallest.footprint
    inference = profile.mode == "inference"
    binding = _binding(run, inference=inference)
    where = f"{run.peak_phase.name.lower()} of {binding}" if binding != OPTIMIZER_STEP else binding
    advice = "make the batch smaller"
    if binding == OPTIMIZER_STEP:
        shard = "" if profile.is_of_a_rank else "shard it over several devices, "
        advice = (
            f"use an optimizer with less state or fewer temporaries (fused=True), {shard}or train fewer parameters: a "
            "smaller batch does not help"
        )
    reached = f"{format_bytes(run.peak_bytes)} ({run.peak_bytes} bytes), in the {where}. "
    own = [
        TECHNIQUES[name].how
        for one in asked.searches.own_solvers(asked.techniques)
        for name in one.techniques
    ]
    if inference and not own:
        message = (
            f"the step takes more than {format_bytes(budget_bytes)}, and in inference nothing is kept for a backward "
            f"pass, so there is nothing to recompute. Its peak is {reached}"
        )
    else:
        names = " and ".join(s.name for s in asked.searches.solvers)
        # Rotor is named only if it made a plan: for a model that is not a chain it has none.
        if asked.last is not None and any(each.has_found(asked.last) for each in asked.searches.all):
            names += f", then {asked.last.name}"
        how = f", {', '.join(own)}" if own else f" (solvers: {names})"
        message = (
            f"no plan found keeps the step under {format_bytes(budget_bytes)}{how}. Unplanned it takes "
            f"{format_bytes(profile.peak_bytes)}. The smallest peak reached is {reached}"
        )
    if pins := asked.basis.recorded.pins:
        message += f"That is with {pins.said}. "
    message += "".join(f"{said[0].upper()}{said[1:]}. " for said in left_alone(profile))
    # A technique's own solver has tried everything already.
    if looks_further and not own:
        message += _with_other_techniques(profile, asked, budget_bytes)
    return InfeasibleBudget(
        f"{message}Give at least {exact_bytes(run.peak_bytes)}, or {advice}.",
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=run.peak_bytes,
        binding=binding,
    )


def left_alone(profile: Profile) -> tuple[str, ...]:
    """Return sentences on what no plan touches in a step, and why; () for none."""
    unseen = tuple(said for said in profile.rules if said == WITHOUT_HOOKS)
    return differentiated_twice(profile.program) + checkpointed(profile.fingerprint.setup) + unseen


def checkpointed(setup: Setup) -> tuple[str, ...]:
    """Return a sentence on the modules that the step checkpoints by itself; () if there are none."""
    if not setup.checkpointed:
        return ()
    names = ", ".join(name or "the model itself" for name in outermost_patterns(setup.checkpointed))
    return (
        f"the step checkpoints by itself ({names}), and a plan leaves this as it is: switch it off, for a Hugging Face "
        "model with `model.gradient_checkpointing_disable()`, and sacplan chooses what to recompute there, too",
    )


def differentiated_twice(program: Program) -> tuple[str, ...]:
    """Return a sentence on what a backward pass with ``create_graph=True`` keeps; () for a step without such a pass.

    The ops of this pass are differentiated as well, so autograd keeps what they read. A plan only discards what is kept
    in the forward pass of a unit: a tensor made again for the first backward pass is then kept for the second.
    """
    kept = {
        storage
        for storage, op in zip(program.handle_storages, program.handle_ops, strict=True)
        if op >= 0 and program.ops[op].phase == Phase.BACKWARD and program.ops[op].forward_of >= 0
    }
    if not kept:
        return ()
    n_bytes = format_bytes(sum(program.storage_bytes[storage] for storage in kept))
    return (
        f"the step differentiates twice: its first backward pass keeps {n_bytes} for the second, and no plan "
        "recomputes what a backward pass keeps",
    )


def segments_do_not_fit(profile: Profile, nearest: Candidate, reserved: int, room: Room) -> InfeasibleBudget:
    """Return the error for plans whose tensors fit a GPU, and whose reserved segments do not.

    Args:
        profile: The step.
        nearest: The plan with the fewest reserved bytes.
        reserved: How many bytes these are.
        room: What the allocator may reserve.
    """
    run = nearest.footprint
    binding = _binding(run, inference=profile.mode == "inference")
    # ``reserved`` is for the allocator's setting in this process. If segments expand here already, both figures are
    # equal, and nothing is advised.
    expandable = reserved_bytes(nearest.program, expandable=True)
    helps = (
        f"With {EXPANDABLE_SEGMENTS}, here and where you train, it reserves {format_bytes(expandable)}, which fits. "
        if expandable <= room.n_bytes < reserved
        else ""
    )
    return InfeasibleBudget(
        "the tensors of a plan fit, but what the allocator reserves for them does not: with a peak of "
        f"{format_bytes(run.peak_bytes)} it reserves {format_bytes(reserved)} ({reserved} bytes, max_memory_reserved). "
        f"There is room for {format_bytes(room.n_bytes)}: the {format_bytes(profile.spec.memory_bytes)} of "
        f"{profile.device} less {outside_text(room.outside)}. {helps}"
        "Make the batch smaller, or give a budget, which limits the tensors alone: at least "
        f"{exact_bytes(run.peak_bytes)}.",
        budget_bytes=room.n_bytes,
        smallest_feasible_bytes=reserved,
        binding=binding,
    )


def infeasible_on_mesh(
    profile: Profile, rank: Profile, nearest: InfeasibleBudget, where: str, name: str, *, is_share: bool
) -> InfeasibleBudget:
    """Return the error for a mesh on which no sharding and no plan holds the budget.

    Args:
        profile: The step on a single device.
        rank: The step of a rank with the sharding that came nearest to the budget.
        nearest: The error for this rank.
        where: The mesh, or all that were tried.
        name: Name of the sharding.
        is_share: Whether the budget is a share of what a rank takes unplanned.
    """
    smallest_bytes = nearest.smallest_feasible_bytes
    unplanned = format_bytes(rank.peak_bytes)
    of_what = f", the share of {unplanned} that a rank takes unplanned" if is_share else ""
    return InfeasibleBudget(
        f"no plan found keeps the step on mesh {where} under {format_bytes(nearest.budget_bytes)} on each rank"
        f"{of_what}. On a single device it takes {format_bytes(profile.peak_bytes)} unplanned. The smallest peak "
        f"reached is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes), spread as {name!r}; "
        f"{nearest.binding} makes it. "
        f"Give at least {exact_bytes(smallest_bytes)}, more ranks, or a smaller batch.",
        budget_bytes=nearest.budget_bytes,
        smallest_feasible_bytes=smallest_bytes,
        binding=nearest.binding,
    )


def _binding(run: Footprint, *, inference: bool) -> str:
    """Return the module that runs at the peak, or ``OPTIMIZER_STEP``."""
    if run.peak_phase == Phase.OPTIMIZER:
        return OPTIMIZER_STEP
    # Without a name, the op at the peak is in no module call (scope -1), or in that of the model itself.
    outside = (
        "the loss, outside of any module" if run.peak_scope < 0 and not inference else "the model itself"
    )
    return run.peak_fqn or outside


def _with_other_techniques(profile: Profile, asked: Planner, budget_bytes: int) -> str:
    """Return sentences on further techniques that reach a smaller peak, each with a space after it; ``""`` for none.

    None are tried in inference: only chunks help there, and they are the default.
    """
    said = ""
    for name in TECHNIQUES if profile.mode == "train" else ():
        if name in asked.techniques:
            continue
        more = asked.with_technique(name)
        found = more.cheapest(budget_bytes, quick=True)
        if found is None:
            more.searches.go_further(more.techniques, budget_bytes)
            found = more.cheapest(budget_bytes, quick=True)
        found = found or more.searches.nearest.smallest
        peak_bytes = found.footprint.peak_bytes
        if peak_bytes <= budget_bytes:
            time = _time(found, profile.step_ms)
            return f"{said}With techniques={more.techniques!r} the budget holds, and the step takes {time}. "
        if peak_bytes < smallest_bytes(asked.searches.nearest):
            reached = f"{format_bytes(peak_bytes)} ({peak_bytes} bytes)"
            said += f"With techniques={more.techniques!r} a search reaches {reached}. "
    return said


def _time(found: Candidate, step_ms: float) -> str:
    """Return in words how long a step takes with a plan."""
    share = (found.footprint.recompute_ms + found.added_ms) / step_ms
    if f"{abs(share):.1%}" == "0.0%":
        return "as long as without a plan"
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'} time than without a plan"


# --- plans that do not fit the device ----------------------------------------------------------------------

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def looking_for_plans() -> Iterator[None]:
    """Suppress the warning of ``handed_out`` in a ``with`` block whose plans are compared and mostly never shown."""
    before = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(before)


def handed_out(made: Plan, profile: Profile) -> Plan:
    """Return the plan, and warn if it takes more memory than the device has.

    The ``SacplanWarning`` points at the line of the user who called the public function.
    """
    if not _quiet.get() and (why := _does_not_fit(made, profile)):
        warnings.warn(
            f"this plan does not fit: {why}",
            SacplanWarning,
            stacklevel=4,  # skips this function, the public one, and the decorator that checks its arguments
        )
    return made


def _does_not_fit(made: Plan, profile: Profile) -> str:
    """Return why a plan does not fit its device, with figures and advice; ``""`` if it fits."""
    spec = profile.spec
    rank = " on each rank" if made.ranks.devices > 1 else ""
    has = f"{spec.name} has {format_bytes(spec.memory_bytes)}"
    advice = "Try a smaller batch, several devices, or a device with more memory."
    # Not even the tensors fit, so no setting of the allocator helps.
    if made.peak_bytes > spec.memory_bytes:
        return f"its step takes {format_bytes(made.peak_bytes)}{rank}, and {has}. {advice}"
    # A plan for a CPU, or from an older file, has no figures of an allocator to compare.
    if made.device_memory is None:
        return ""
    room = beside_others(spec, made.ranks.communicators)
    reserved = made.device_memory.reserved_bytes()
    if reserved <= room.n_bytes:
        return ""
    expandable = made.device_memory.reserved_bytes(expandable=True)
    # In a process whose segments expand already, ``expandable`` equals ``reserved``, and does not fit either. Then a
    # budget may be the cause, since it limits the tensors alone.
    if expandable <= room.n_bytes:
        advice = f"With {EXPANDABLE_SEGMENTS} it reserves {format_bytes(expandable)}, which fits."
    elif made.budget_bytes is not None:
        advice = f"Without a budget, a plan is made that fits. {advice}"
    is_of_step = made.ranks == profile.ranks and not profile.runs_compiled
    if is_of_step and retries_within(profile.with_plan(made), room.n_bytes) is not None:
        advice += f" {WITH_RETRIES}"
    return (
        f"its tensors take {format_bytes(made.peak_bytes)}{rank}, for which the allocator reserves "
        f"{format_bytes(reserved)} (max_memory_reserved), with {outside_text(room.outside)} outside of it, and {has}. "
        f"{advice}"
    )
