"""Plans by rule: checkpoint nothing, everything, every k-th layer, or by op.

This is what people do by hand. The checkpointing modes and their names are those of torchtitan
(``torchtitan/distributed/activation_checkpoint.py``) and torchtune (PR #785). Here they run differently: as recipes
(``techniques/recompute/executor/recipes.py``), so that only ops whose outputs the backward pass asks for run again, and
nothing is cached that autograd does not use. Nothing is optimised here. The peak and the recomputation of the plan are
measured on the rewritten program, as for any other plan.

A rule turns into decisions in three steps. ``layers_of`` finds the layers: the longest runs of numbered siblings that
look alike and feed one another. The mode then selects ops in them (``Selects``, by position in one call of a layer).
Finally ``discarded_in`` walks back from what autograd saves to the selected ops that have to run again for it. A
selected op whose output the backward pass does not need does not become a decision.

Known inefficiency: the layers of a run are compared by walking over the ops between them, once per neighbour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from sacplan.core.arguments import checked, opened
from sacplan.core.decisions import Decision, Discarded, as_decisions
from sacplan.core.elements import names_module
from sacplan.core.pins import Pins, resolve_pins
from sacplan.core.program import CallSite, Op, Program, is_inside
from sacplan.errors import PlanError
from sacplan.planning.checkpoints import Selects, discarded_in, everything, runs_of
from sacplan.planning.infeasible import handed_out, looking_for_plans
from sacplan.planning.make import plan_by_hand
from sacplan.planning.meshes import POLICIES, way
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile, ProfileOrPath

MODES = ("none", "full", "selective")


@checked(PlanError, "option")
def policy(
    mode: str,
    option: int | str | None = None,
    *,
    profile: ProfileOrPath,
    layers: str | None = None,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    mesh: Any = None,
) -> Plan:
    """Return a plan made by a rule instead of a search: the same in every layer, whatever the budget.

        plan = sacplan.policy("selective", 2, profile=profile)   # checkpoint every second layer
        plan = sacplan.policy("full", profile=profile, layers="model.layers.*")

    Args:
        mode: ``"none"`` discards nothing. ``"full"`` discards in every layer everything that may run again; the inputs
            of the layer are kept. ``"selective"`` does what ``option`` says.

            ``"ddp"`` and ``"fsdp"`` cut the batch over all axes of a mesh; each rank has all parameters, or a shard of
            them. ``"megatron"`` is tensor parallelism on the last axis, with ``"ddp"`` on
            the other axes; ``"fsdp + megatron"`` has ``"fsdp"`` on them. ``"sequence"`` is
            ``"megatron"`` with sequence and loss parallelism.
        option: For ``"selective"`` only:

            - An integer ``k`` (or its digits, ``"2"``): checkpoint the layers number k, 2k, ... of the run as
              ``"full"`` does, and leave the others alone. 1 is the same as ``"full"``.
            - ``"op"``: in every layer, keep attention and every second matmul or convolution (the first, the third,
              ...), and recompute the rest. The count starts again in each call of a layer.
            - ``"op-keep-matmuls"``: in every layer, keep attention and all matmuls and convolutions, and recompute the
              rest.

        profile: A profile from ``sacplan.profile``, or the path of one.
        layers: A pattern for the names of the layers (``fnmatch``; ``*`` also matches dots). If matches are nested, the
            outermost ones count. By default, layers are found by structure: siblings with consecutive numbers in a list
            (``h.0``, ``h.1``, ...) that are of the same kind, each of which depends on the one before. The longest run
            counts, and so do others that are not nested with it (an encoder and a decoder). A recorded step has no
            classes, so two modules count as the same kind if they share at least half of the names of the modules that
            are called in them.
        keep, never: Patterns as for ``sacplan.plan``. The outputs of these ops and modules are kept, whatever the mode
            says. They change neither which modules are layers nor how matmuls are counted. A layer that contains a
            module of ``never`` does not become a unit; in its place, inner modules that contain none become units.
        mesh: For ``"ddp"``, ``"fsdp"``, ``"megatron"``, ``"sequence"`` and combinations only: the ranks, as for
            ``sacplan.plan``. The batch of the profile is that of all ranks together.

    Returns:
        A plan with status ``"policy"`` and without a budget: peaks in bytes, times in ms. A plan that takes more memory
        than the device has gives a ``SacplanWarning``.

    Raises:
        PlanError: An unknown mode or option, no layers, a mode that would discard nothing in them, or a pattern that
            matches nothing. The message says why.
    """
    profile = opened(profile, Profile)
    # A policy on a mesh decides how the step is spread over ranks, and discards nothing.
    if mesh is not None:
        if option is not None or layers is not None or keep or never:
            raise PlanError("a policy on a mesh takes no option, layers, keep or never.")
        with looking_for_plans():
            made = policy("none", profile=way(profile, mesh, mode).profile)
        provenance = structs.replace(
            made.provenance,
            solver=f"policy-{mode}",
            options={"mode": mode, "sharding": mode},
            techniques=("shard",),
        )
        return handed_out(structs.replace(made, provenance=provenance), profile)
    # A mode that needs a mesh. Checked before unknown modes, since that message says less.
    if mode in POLICIES or " + " in mode:
        raise PlanError(f"policy {mode!r} spreads a step over ranks: give them, mesh={{'dp': 8}}.")
    if mode not in MODES:
        raise PlanError(f"unknown mode {mode!r}; known are {_listed((*MODES, *POLICIES))}.")
    if mode != "selective" and option is not None:
        raise PlanError(f"mode {mode!r} takes no option, got {option!r}. Options belong to mode 'selective'.")
    # A rule selects ops, which a compiled graph does not have, so it is applied to the uncompiled step.
    program = profile.uncompiled.program
    pins = resolve_pins(program, profile.uncompiled.fingerprint, keep, never)
    decisions: tuple[Decision, ...] = ()
    if mode != "none":
        decisions = as_decisions(_discarded_by(mode, option, program, layers, pins))
    name = f"policy-{mode}" + (f"-{option}" if option is not None else "")
    asked = {"mode": mode, "option": option, "layers": layers}
    return handed_out(plan_by_hand(profile, decisions, name, pins, options=asked), profile)


def _discarded_by(
    mode: str, option: int | str | None, program: Program, layers: str | None, pins: Pins
) -> Discarded:
    """Return by unit the call sites that the mode ``"full"`` or ``"selective"`` discards in the layers."""
    selects, k = _read_option(option) if mode == "selective" else (everything, 1)
    found = layers_of(program, layers)
    if k > len(found):
        raise PlanError(
            f"option {option!r} would checkpoint every {k}th layer, but there are {len(found)} layers "
            f"({_shortened(found)}), so none. Known options: an integer from 1 to {len(found)}, {_listed(_BY_OP)}."
        )
    discarded: dict[str, dict[CallSite, int]] = defaultdict(dict)
    # The layers number k, 2k, ..., so that with k = 1 every layer is checkpointed.
    for fqn in found[k - 1 :: k]:
        for unit, sites in discarded_in(program, fqn, selects, pins).items():
            discarded[unit].update(sites)
    if not discarded:
        raise PlanError(
            f"mode {mode!r} would discard nothing in the layers {_shortened(found)}: autograd keeps nothing there "
            + ("that may run again and is not pinned by keep or never. " if pins else "that may run again. ")
            + "Name other modules with layers=, or use mode 'none'."
        )
    return discarded


# --- options ----------------------------------------------------------------------------------------------


def _all_but_matmuls(ops: Sequence[Op]) -> set[int]:
    return {i for i, op in enumerate(ops) if not op.flops}


def _every_second_matmul(ops: Sequence[Op]) -> set[int]:
    # FLOPs are counted for matmuls, convolutions and attention, and for nothing else.
    matmuls = [i for i, op in enumerate(ops) if op.flops and "attention" not in op.name]
    return _all_but_matmuls(ops).union(matmuls[1::2])


_BY_OP: dict[str, Selects] = {"op": _every_second_matmul, "op-keep-matmuls": _all_but_matmuls}


def _read_option(option: object) -> tuple[Selects, int]:
    """Return the rule for the ops of a layer, and k: every k-th layer follows the rule.

    Raises:
        PlanError: The option is unknown.
    """
    if isinstance(option, str):
        if option in _BY_OP:
            return _BY_OP[option], 1
        # ``isdigit`` alone also accepts digits such as ``"²"``, which ``int`` refuses.
        k = int(option) if option.isascii() and option.isdigit() else 0
    else:
        k = option if isinstance(option, int) and not isinstance(option, bool) else 0
    if k < 1:
        raise PlanError(
            f"unknown option {option!r} of mode 'selective'; known are an integer k of at least 1 (checkpoint "
            f"every k-th layer), {_listed(_BY_OP)}."
        )
    return everything, k


# --- layers -----------------------------------------------------------------------------------------------


def layers_of(program: Program, pattern: str | None = None) -> list[str]:
    """Return the names of the layers in execution order: those that match, or those found by structure (``policy``).

    Raises:
        PlanError: There are none.
    """
    runs = runs_of(program)
    if pattern is None:
        if not runs:
            raise PlanError(
                "no layers found: no two modules in a list that are alike and feed one another. Name the layers with "
                f'layers="..."; the modules are {_shortened([f for f in program.calls if f])}.'
            )
        return _in_order(program, (fqn for run in runs for fqn in run))
    matching = {fqn for fqn in program.calls if fqn and names_module(pattern, fqn)}
    # Of nested matches only the outermost is a layer, since units of a plan do not nest.
    outermost = [f for f in matching if not any(is_inside(f, other) for other in matching)]
    if not outermost:
        known = [f"{run[0].rpartition('.')[0]}.*" for run in runs]
        raise PlanError(
            f"no module that is called matches layers={pattern!r}. "
            + (f"Layers found by structure: {_listed(known)}; " if known else "")
            + f"modules are {_shortened([f for f in program.calls if f])}."
        )
    return _in_order(program, outermost)


def _in_order(program: Program, fqns: Iterable[str]) -> list[str]:
    wanted = set(fqns)
    return [fqn for fqn in program.calls if fqn in wanted]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _shortened(names: Sequence[str], most: int = 8) -> str:
    return _listed(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
