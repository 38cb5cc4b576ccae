"""What people do by hand today, as plans: checkpoint nothing, all, every k-th layer, by op; the loss in slices.

The checkpointing modes and their names are those of torchtitan (``torchtitan/distributed/activation_checkpoint.py``)
and torchtune (PR #785). What differs is how they are executed: as recipes (``_recompute/executor/recipes.py``), so only
what the backward pass asks for runs again, and nothing is cached that autograd never wanted. Nothing is
optimised here; the plan carries the replayed peak and recomputation like any other.

Known inefficiency: the layers of a run are compared by walking over the ops between them, once per neighbour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from msgspec import structs

from sacplan._chunk.entries import ChunkOptions, entry_size, loss_chunks
from sacplan._plan.limits import handed_out, looking_for_plans
from sacplan._plan.make import made_plan
from sacplan._plan.meshes import POLICIES, spread_of
from sacplan._plan.plan import Plan
from sacplan._plan.provenance import Provenance
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.decisions import Chunk, Decision, Discarded, as_decisions
from sacplan._program.pins import Pins, resolve_pins
from sacplan._program.program import ROOT_SCOPE, CallSite, Op, Phase, Program, is_inside
from sacplan._techniques import DEFAULT_TECHNIQUES, rewritten
from sacplan.errors import PlanError

MODES = ("none", "full", "selective", "chunked-loss")


@checked(PlanError, "option", "slices")
def policy(
    mode: str,
    option: int | str | None = None,
    *,
    profile: ProfileOrPath,
    layers: str | None = None,
    slices: int | None = None,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    mesh: Any = None,
) -> Plan:
    """A plan by rule instead of by search: the same in every layer, whatever the budget.

        plan = sacplan.policy("selective", 2, profile=profile)   # checkpoint every second layer
        plan = sacplan.policy("full", profile=profile, layers="model.layers.*")
        plan = sacplan.policy("chunked-loss", slices=16, profile=profile)

    Args:
        mode: ``"none"`` discards nothing. ``"full"`` discards in every layer all that may run again; what
            enters the layer is kept. ``"selective"`` does what ``option`` says. ``"chunked-loss"`` discards
            nothing, but computes the loss and its gradients in slices, from the module on with which that saves
            most: in most models the head. ``"ddp"`` and ``"fsdp"`` spread the batch over all axes of a mesh, with
            parameters whole or cut on each rank; run by sacplan, they are neither PyTorch's DDP nor its FSDP2, which
            ``world_size`` and ``fsdp_units`` stand for. ``"megatron"`` cuts the parameters of matrix products on the
            last axis and computes in parts, with ``"ddp"`` on the other axes; ``"fsdp + megatron"`` with that.
        option: of ``"selective"``, and only of it:

            - an integer ``k`` (or its digits, ``"2"``): *checkpoint* every k-th layer as ``"full"`` does, that
              is layers number k, 2k, ... of the run, and leave the others alone. 1 is ``"full"``.
            - ``"op"``: in every layer keep attention and every second matmul or convolution (the first, the
              third, ...), recompute the rest. The count starts anew in each call of a layer.
            - ``"op-keep-matmuls"``: in every layer keep attention and all matmuls and convolutions, recompute
              the rest.

        profile: from ``sacplan.profile``.
        layers: pattern for the names of the layers (``fnmatch``: ``*`` also matches dots; of nested matches the
            outermost counts). By default they are found: siblings with consecutive places in a list
            (``h.0``, ``h.1``, ...), of the same kind, each of which depends on the one before. The longest such
            run, and others that neither contain nor are inside of one taken already (encoder and decoder).
            A recorded step knows no classes, so two modules are of the same kind if at least half of the names of
            the modules called in one or the other are in both.
        slices: of ``"chunked-loss"``, and only of it: how many, 2 or more; one fewer or several where that does not
            divide the rows.
        keep, never: patterns as in ``sacplan.plan``: what these ops and modules make is kept whatever the mode says.
            They change neither which layers there are nor how matmuls are counted. A layer with a module of ``never``
            in it is no unit; its inner modules around which there is nothing left alone are units in its place.
            What is pinned must not be part of a chunked loss.
        mesh: of ``"ddp"``, ``"fsdp"``, ``"megatron"``, and ``"fsdp + megatron"``, and only of them: the ranks, as for
            ``sacplan.plan``; the batch of the profile is that of all together.

    Returns:
        A plan with status ``"policy"``, without a budget. Its peak, its recomputation and ``added_ms`` are replayed.
        ``SacplanWarning`` if it takes more than the device has.

    Raises:
        PlanError: an unknown mode or option, no layers, a mode that would discard nothing in them, a pattern
            that matches nothing, or a loss that cannot run in these slices; says why.
    """
    profile = opened(profile, Profile)
    if mesh is not None:
        if option is not None or layers is not None or slices is not None or keep or never:
            raise PlanError("a policy on a mesh takes no option, layers, slices, keep or never.")
        with looking_for_plans():
            spread = spread_policy(profile, mode, mesh)
        return handed_out(spread, profile.spec)
    if mode in POLICIES or " + " in mode:
        raise PlanError(f"policy {mode!r} spreads a step over ranks: give them, mesh={{'dp': 8}}.")
    if mode not in MODES:
        raise PlanError(f"unknown mode {mode!r}; known are {_listed((*MODES, *POLICIES))}.")
    if mode != "selective" and option is not None:
        raise PlanError(f"mode {mode!r} takes no option, got {option!r}. Options belong to mode 'selective'.")
    program = profile.program
    if mode == "chunked-loss":
        n_slices = _read_slices(slices, layers)
    elif slices is not None:
        raise PlanError(f"mode {mode!r} takes no slices, got {slices!r}. They belong to mode 'chunked-loss'.")
    pins = resolve_pins(program, profile.fingerprint, keep, never)
    decisions: tuple[Decision, ...] = ()
    name = f"policy-{mode}" + (f"-{option}" if option is not None else "")
    asked: dict[str, Any] = {"mode": mode, "option": option, "layers": layers}
    techniques = DEFAULT_TECHNIQUES
    if mode == "chunked-loss":
        decisions = (_chunked_loss(profile, n_slices, pins),)
        name, asked, techniques = f"{name}-{n_slices}", {"mode": mode, "slices": n_slices}, ("chunk",)
    elif mode != "none":
        decisions = as_decisions(_discarded_by(mode, option, program, layers, pins))
    provenance = Provenance.now(profile, name, asked, pins=pins, techniques=techniques)
    with_plan = rewritten(program, decisions, profile.spec)
    found = with_plan.footprint
    made = made_plan(
        profile,
        decisions,
        found,
        provenance,
        pins,
        status="policy",
        added_ms=with_plan.step_ms - program.step_ms - found.recompute_ms,
    )
    return handed_out(made, profile.spec)


def spread_policy(profile: Profile, mode: str, mesh: Any) -> Plan:
    """The plan of a named sharding, without recomputation."""
    spread = spread_of(profile, mode, mesh)
    made = policy("none", profile=spread.profile)
    provenance = structs.replace(
        made.provenance,
        solver=f"policy-{mode}",
        options={"mode": mode, "sharding": mode},
        techniques=("shard",),
    )
    return structs.replace(made, provenance=provenance)


def _discarded_by(
    mode: str, option: int | str | None, program: Program, layers: str | None, pins: Pins
) -> Discarded:
    """What the layers discard under any mode but ``"none"``."""
    selects, k = _read_option(option) if mode == "selective" else (_everything, 1)
    found = layers_of(program, layers)
    if k > len(found):
        raise PlanError(
            f"option {option!r} would checkpoint every {k}th layer, but there are {len(found)} layers "
            f"({_shortened(found)}), so none. Known options: an integer from 1 to {len(found)}, {_listed(_BY_OP)}."
        )
    discarded: dict[str, dict[CallSite, int]] = defaultdict(dict)
    for fqn in found[k - 1 :: k]:
        for unit, sites in _discarded_in(program, fqn, selects, pins).items():
            discarded[unit].update(sites)
    if not discarded:
        raise PlanError(
            f"mode {mode!r} would discard nothing in the layers {_shortened(found)}: autograd keeps nothing there "
            + ("that may run again and is not pinned by keep or never. " if pins else "that may run again. ")
            + "Name other modules with layers=, or use mode 'none'."
        )
    return discarded


# --- the loss in slices -----------------------------------------------------------------------------------

_MOST_REASONS = 4  # in a message


def _read_slices(slices: object, layers: str | None) -> int:
    if layers is not None:
        raise PlanError(f"mode 'chunked-loss' takes no layers, got {layers!r}: there is one loss.")
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 2:
        raise PlanError(
            f"mode 'chunked-loss' needs a number of slices, 2 or more, and slices is {slices!r}. Give for example "
            "slices=16, or a budget: sacplan.plan(profile, budget, techniques=('recompute', 'chunk'))."
        )
    return slices


def _chunked_loss(profile: Profile, slices: int, pins: Pins) -> Chunk:
    """The chunk that begins where slices save most, in so many."""
    if profile.mode == "inference":
        raise PlanError(
            "mode 'chunked-loss' is for training, and this profile is of inference, which computes no gradients. "
            "sacplan.profile(model, batch, loss_fn) records a step of training."
        )
    found = loss_chunks(profile.program, profile.spec)
    if not isinstance(found, ChunkOptions):
        why = [f"from {refused.unit!r} on: {refused.why}" for refused in found[:_MOST_REASONS]]
        raise PlanError(
            "there is no module from which on the loss could be computed in slices. "
            + ("; ".join(why) + "." if why else "No module with a name is called once in the step.")
        )
    if not pins.named_ops.isdisjoint(found.ops):
        op = profile.program.ops[min(pins.named_ops & found.ops)]
        given = (("keep", pins.keep), ("never", pins.never))
        said = " and ".join(f"{name}={list(patterns)!r}" for name, patterns in given if patterns)
        raise PlanError(
            f"the loss would run in slices from {found.unit!r} on, where {said} pins what {op.name} makes. "
            "Leave that pattern out."
        )
    rows = entry_size(profile.program, found.options[0][0])
    if slices > rows:
        raise PlanError(f"slices={slices}, but what enters {found.unit!r} has only {rows} rows.")
    return structs.replace(found.options[0][0], slices=slices)


# --- options ----------------------------------------------------------------------------------------------

_Selects = Callable[[Sequence[Op]], set[int]]
"""From the ops of one call of a layer to the positions of those that may be discarded."""


def _everything(ops: Sequence[Op]) -> set[int]:
    return set(range(len(ops)))


def _all_but_matmuls(ops: Sequence[Op]) -> set[int]:
    return {i for i, op in enumerate(ops) if not op.flops}


def _every_second_matmul(ops: Sequence[Op]) -> set[int]:
    # FLOPs are counted for matmuls, convolutions and attention, and for nothing else.
    matmuls = [i for i, op in enumerate(ops) if op.flops and "attention" not in op.name]
    return _all_but_matmuls(ops).union(matmuls[1::2])


_BY_OP: dict[str, _Selects] = {"op": _every_second_matmul, "op-keep-matmuls": _all_but_matmuls}


def _read_option(option: object) -> tuple[_Selects, int]:
    """What is discarded in a layer, and in every which layer."""
    if isinstance(option, str):
        if option in _BY_OP:
            return _BY_OP[option], 1
        k = int(option) if option.isascii() and option.isdigit() else 0
    else:
        k = option if isinstance(option, int) and not isinstance(option, bool) else 0
    if k < 1:
        raise PlanError(
            f"unknown option {option!r} of mode 'selective'; known are an integer k of at least 1 (checkpoint "
            f"every k-th layer), {_listed(_BY_OP)}."
        )
    return _everything, k


# --- layers -----------------------------------------------------------------------------------------------


def layers_of(program: Program, pattern: str | None = None) -> list[str]:
    """The layers of a model in execution order: those that match, or those found by structure (see ``policy``).

    Raises:
        PlanError: there are none.
    """
    runs = _runs(program)
    if pattern is None:
        if not runs:
            raise PlanError(
                "no layers found: no two modules in a list that are alike and feed one another. Name the layers with "
                f'layers="..."; the modules are {_shortened([f for f in program.calls if f])}.'
            )
        return _in_order(program, (fqn for run in runs for fqn in run))
    matching = {fqn for fqn in program.calls if fqn and fnmatchcase(fqn, pattern)}
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


def _runs(program: Program) -> list[list[str]]:
    """Runs of at least two alike siblings that do not nest, the longest first."""
    members: dict[str, set[str]] = defaultdict(set)  # module to the names called directly inside
    for fqn in program.calls:
        parts = fqn.split(".")
        for depth in range(1, len(parts)):
            members[".".join(parts[:depth])].add(parts[depth])
    siblings: dict[str, list[str]] = defaultdict(list)
    for fqn in program.calls:
        parent, _, name = fqn.rpartition(".")
        if name.isdigit() and fqn not in program.leaf_fqns and members[fqn]:
            siblings[parent].append(fqn)

    def first_call(fqn: str) -> range:
        return program.ops_in(program.calls[fqn][0])

    def follows(one: str, other: str) -> bool:
        alike = 2 * len(members[one] & members[other]) >= len(members[one] | members[other])
        return alike and program.depends(first_call(other), first_call(one))

    runs: list[list[str]] = []
    for fqns in siblings.values():
        run = fqns[:1]
        for one, other in pairwise(fqns):
            if not follows(one, other):
                runs.append(run)
                run = []
            run.append(other)
        runs.append(run)
    taken: list[list[str]] = []
    for run in sorted((run for run in runs if len(run) > 1), key=len, reverse=True):  # stable
        others = [fqn for other in taken for fqn in other]
        if not any(is_inside(a, b) or is_inside(b, a) for a in run for b in others):
            taken.append(run)
    return taken


# --- decisions --------------------------------------------------------------------------------------------


def _discarded_in(program: Program, fqn: str, selects: _Selects, pins: Pins) -> Discarded:
    """What one layer discards: saved tensors whose producers are selected, and what making them again takes.

    By unit: the layer, or where pins forbid that, modules in it.
    """
    chosen: set[int] = set()
    for scope in program.calls[fqn]:
        order = [i for i in program.sites(scope) if program.ops[i].phase == Phase.FORWARD]
        chosen.update(order[at] for at in selects([program.ops[i] for i in order]))
    chosen -= pins.kept_ops
    found = {}
    for unit in pins.units_in(program, fqn):
        sites: dict[CallSite, int] = {}
        for scope, (inside, outside) in _saved_by_call(program, unit).items():
            # What is held anyway, the unit's own output above all, stays where it is.
            again = _again(program, scope, inside, outside | program.liveness.outlives_forward, chosen)
            sites.update((site, 1) for op, site in program.sites(scope).items() if op in again)
        for site, ops in program.call_sites(unit).items():  # a call site is the same in every call
            if not pins.kept_ops.isdisjoint(ops) or not all(program.ops[i].recomputable for i in ops):
                sites.pop(site, None)
        if sites:
            found[unit] = sites
    return found


def _saved_by_call(program: Program, fqn: str) -> dict[int, tuple[set[int], set[int]]]:
    """By call of a module: the storages that autograd saves in it, and those that it saves anywhere else."""
    scopes = {scope for scope in program.liveness.handle_scopes if scope != ROOT_SCOPE}
    around = {scope: {scope, *program.ancestors(scope)} for scope in scopes}
    by_call: dict[int, tuple[set[int], set[int]]] = {call: (set(), set()) for call in program.calls[fqn]}
    for storage, scope in zip(program.handle_storages, program.liveness.handle_scopes, strict=True):
        for call, (inside, outside) in by_call.items():
            (inside if call in around.get(scope, ()) else outside).add(storage)
    return by_call


def _again(
    program: Program, scope: int, saved: set[int], held: Container[int], chosen: Container[int]
) -> set[int]:
    """The ops of one call that run again."""
    ops = program.ops
    inside = [i for i in program.sites(scope) if i in chosen and ops[i].recomputable]
    maker = {s: i for i in inside for s in ops[i].writes if s not in held}
    stack = [maker[s] for s in saved if s in maker]
    again = set(stack)
    while stack:
        for s in ops[stack.pop()].reads:
            if s in maker and maker[s] not in again:
                again.add(maker[s])
                stack.append(maker[s])
    return again


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _shortened(names: Sequence[str], most: int = 8) -> str:
    return _listed(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
