"""Turn names and options of the command line into devices, profiles, plans and verifications."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sacplan.cli import options as o
from sacplan.cli.files import kind_of
from sacplan.cli.origin import options_of, origin_of, seen_in
from sacplan.cli.output import note, stage, warn
from sacplan.cli.targets import is_json_file, load_target, not_a_model, users_code
from sacplan.errors import DeviceError
from sacplan.integrations.hf.target import DEFAULTS, NAMED, ModelOptions, Target, TargetError

if TYPE_CHECKING:
    import pandas as pd

    from sacplan import DeviceSpec, Plan, Profile, Verification
    from sacplan.distributed.ranks.ranks import Ranks

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Source:
    """A profile to make a plan from.

    Attributes:
        profile: recorded now, or loaded.
        target: the target that was recorded; None for a loaded profile.
        origin: how to make the model and the batch again; None if that is not known.
    """

    profile: Profile
    target: Target | None
    origin: Mapping[str, Any] | None


def device_of(name: str | None) -> DeviceSpec:
    """Return the device of ``--device``: a name, or a file that ``DeviceSpec.save`` wrote."""
    from sacplan.device.devices import DeviceSpec, meant_by, resolve_device

    name = name or o.DEFAULT_DEVICE
    if is_json_file(name):
        return DeviceSpec.load(_existing(name))
    found = resolve_device(name)
    if said := meant_by(name):
        note(f"--device {said}")
    return found


def _asked_ranks(step: o.StepOptions) -> Ranks | None:
    """Return the ranks of ``--world-size`` and ``--fsdp-unit``; None if no world size is given."""
    from sacplan.distributed.ranks.ranks import Ranks

    # ``Ranks`` would refuse it as well, in the words of the library.
    if step.fsdp_unit and (step.world_size or 1) == 1:
        raise TargetError(
            "--fsdp-unit is given, but with one rank nothing is sharded. Say over how many ranks: --world-size 8."
        )
    return None if step.world_size is None else Ranks.of(step.world_size, step.fsdp_unit or None)


def dtype_for(spec: DeviceSpec, source: str, asked: ModelOptions) -> ModelOptions:
    """Return the options of an ``hf:`` target. Without a dtype, a device that has no bfloat16 gets float16."""
    # Asked for, or the default will do, or the target decides.
    if asked.dtype is not None or spec.has_bfloat16 or not source.startswith(NAMED):
        return asked
    note(f"--dtype float16, since {spec.name} has no bfloat16 arithmetic")
    return replace(asked, dtype="float16")


def sized_target(
    command: str, name: str, spec: DeviceSpec, hf: ModelOptions
) -> tuple[Target, Callable[..., Any]]:
    """Load a target for a command that tries batches of many sizes; return it, and what makes them."""
    with stage("loading"):
        target = load_target(name, dtype_for(spec, name, hf))
    if target.make_batch is None:
        raise TargetError(
            f"{command} tries batches of many sizes, but {name} makes only one. Return a mapping with the key "
            "make_batch as well, a function of the batch size: make_batch=lambda n: torch.randn(n, 512)."
        )
    return target, target.make_batch


def profile_of(source: str, step: o.StepOptions, hf: ModelOptions, plan: Plan | None = None) -> Source:
    """Load a saved profile, or record the step of a target.

    Args:
        source: as the user wrote it.
        step, hf: options.
        plan: of that step. A target with another model or batch is refused before it is recorded.

    Raises:
        TargetError: options that contradict a saved profile, or a target that cannot be loaded.
        PlanMismatch: the plan is for another model or batch.
    """
    ranks = _asked_ranks(step)  # first, so that an error in the options is reported before anything is loaded
    if is_json_file(source):
        return _saved_profile(source, step, ranks, hf)
    import sacplan

    # Errors in options first, then those of the device, then those of the target: from quick to slow.
    spec = device_of(step.device)
    with stage("loading"):
        target = load_target(
            source, dtype_for(spec, source, hf), spec.kind if step.trace == "real" else "meta"
        )
    # Recording takes long, and a wrong model is found at once.
    if plan is not None:
        with users_code(f"the batch of {target.name}"):
            plan.fingerprint.check_model(target.model)
            plan.fingerprint.check_batch(target.batch() if callable(target.batch) else target.batch)
    train = step.mode != "inference"
    computes = "timing each op" if step.runtime == "benchmark" else ""
    if step.trace == "real":
        computes = "running the step"
    with (
        stage(f"tracing{computes and f', {computes}'}", long=bool(computes)),
        users_code(f"the step of {target.name}"),
        warnings.catch_warnings(),
    ):
        # Both are among the assumptions that the result reports.
        warnings.filterwarnings("ignore", r".* has no bfloat16 ")
        warnings.simplefilter("ignore", sacplan.errors.SumOfOutputsWarning)
        profile = sacplan.profile(
            target.model, target.batch, target.loss_fn if train else None, target.optimizer if train else None,
            device=spec, ranks=ranks, **step.recorded,
        )  # fmt: skip
    return Source(profile, target, origin_of(target))


def _saved_profile(source: str, step: o.StepOptions, ranks: Ranks | None, hf: ModelOptions) -> Source:
    import sacplan

    # These options say how to record. They would change nothing in a recording, so they are refused.
    if given := step.recorded | hf.given():
        raise TargetError(
            f"{o.named(given)}: {source} is recorded already. Record another profile with "
            f"sacplan profile TARGET {o.written(given)}."
        )
    path = _existing(source)
    # The loader would only say that it is not a profile.
    if kind_of(path) in ("configuration", "device", "plan"):
        raise not_a_model(source, "a profile or ")
    # The origin is read here too: if it is damaged, the error is about this file, and not about the command.
    with stage("reading"):
        profile = _read(sacplan.Profile.load, source, "profile")
        origin = profile.fingerprint.target
        _read(lambda _: options_of(origin), source, "profile")
    # The device is part of a recording: its kernels, its rounding, its times.
    if step.device is not None and device_of(step.device).name != profile.device:
        raise TargetError(
            f"{source} is of a step on {profile.device}; record one on the other device with "
            f"sacplan profile TARGET --device {step.device}."
        )
    return Source(profile.on_ranks(ranks), None, origin)


def saved_profile(path: str) -> Profile:
    """Load a profile."""
    import sacplan

    return _read(sacplan.Profile.load, path, "profile")


def saved_plan(path: str) -> Plan:
    """Load a plan."""
    import sacplan

    return _read(sacplan.Plan.load, path, "plan")


def _existing(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise TargetError(f"{name}: there is no such file.")
    return path


def _read(load: Callable[[Path], _Value], name: str, what: str) -> _Value:
    path = _existing(name)
    try:
        return load(path)
    # A truncated or edited file may fail anywhere in its loader.
    except (KeyError, TypeError, ValueError, IndexError, EOFError) as error:
        raise TargetError(
            f"{path} is not a complete {what} ({type(error).__name__}: {error}). Make it again."
        ) from error


def as_planned(asked: ModelOptions, plan: Plan, plan_file: str) -> ModelOptions:
    """Return the options of an ``hf:`` target to verify: those given, else those that the plan was made with.

    Notes on stderr name what is taken from the plan, and where the two disagree.
    """
    origin = plan.fingerprint.target
    kept = _read(lambda _: options_of(origin), plan_file, "plan")
    given = asked.given()
    made = (kept or seen_in(plan.fingerprint)).given()
    taken = {name: value for name, value in made.items() if name not in given}
    if taken:
        whose = "" if origin is None else f", which was made from {origin['name']}"
        note(f"{o.written(taken)}: from {plan_file}{whose}")
    if origin is None and "optimizer" not in given:
        note(
            f"{plan_file} does not say which optimizer and attention it was made with; using --optimizer "
            f"{DEFAULTS.optimizer} and what transformers chooses"
        )
    for name, ours in given.items():
        # The user's own options win, but a verification of another step should not pass unnoticed.
        if made.get(name, ours) != ours:
            warn(f"--{name} {ours} is used, but {plan_file} was made with --{name} {made[name]}")
    return ModelOptions(**{**made, **given, "fetch": asked.fetch})


def step_as_planned(asked: o.StepOptions, plan: Plan, plan_file: str) -> o.StepOptions:
    """Return how to record a target for a report on a plan: as asked for, else as the plan's profile was recorded.

    Raises:
        TargetError: the plan is for a device that is not in the table.
    """
    from sacplan.device.devices import resolve_device

    device = asked.device or plan.device
    # A plan holds no more than the name of its device, which is not enough if the table does not have it.
    if asked.device is None:
        try:
            resolve_device(device)
        except DeviceError as error:
            raise TargetError(
                f"{plan_file} is for {device!r}, which is no device of the table; give the file of its DeviceSpec: "
                "--device FILE."
            ) from error
    setup: Any = plan.fingerprint.setup  # strings of these two are the literals of StepOptions
    made: Any = plan.provenance
    return replace(
        asked, device=device, runtime=asked.runtime or made.runtime, trace=asked.trace or made.trace,
        mode=asked.mode or made.mode, accumulation_steps=asked.accumulation_steps or setup.accumulation_steps,
        routing=asked.routing or setup.routing, compile=asked.compile or setup.compiled,
    )  # fmt: skip


def verified(target: Target, plan: Plan, run: o.Run, grad_accum: int | None = None) -> Verification:
    """Run the step of a target with a plan applied; without ``grad_accum`` with as many micro-batches as planned."""
    import sacplan

    train = plan.provenance.mode == "train"
    # A plan for inference was made from the forward pass alone.
    loss_fn, optimizer = (target.loss_fn, target.optimizer) if train else (None, None)
    steps = "running three real steps: one without the plan, two with it" if run == "real" else "verifying"
    with (
        stage(steps, long=run == "real"),
        users_code(f"the step of {target.name}"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", sacplan.errors.SumOfOutputsWarning)  # the assumptions report it
        return sacplan.verify(
            target.model, target.batch, plan, loss_fn, optimizer, run=run, accumulation_steps=grad_accum
        )


def check_early(budget: str | None, solver: str, techniques: list[str] | None) -> dict[str, Any]:
    """Check the options that do not depend on the model, before it is recorded.

    Returns:
        ``techniques=`` for functions of the library, if any were asked for.
    """
    from sacplan.core.budget import parse_budget
    from sacplan.planning.request import resolve_solver
    from sacplan.techniques.registry import resolve_techniques

    if budget is not None:
        # The peak that a share would be of is not known yet. Any will do to check the text.
        parse_budget(budget, 2**40)
    resolve_solver(solver)
    return {"techniques": resolve_techniques(techniques)} if techniques else {}


def check_early_of_device(asked: o.BudgetOptions) -> None:
    """Do the same for commands on several steps, which have no one peak that a budget could be a share of."""
    from sacplan.planning.limits import refuse_share

    refuse_share(asked.budget)
    check_early(asked.budget, asked.solver, asked.techniques)


def mesh_of(text: str | None, techniques: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``mesh=`` and ``techniques=`` for functions of the library. Empty without ``--mesh``."""
    if text is None:
        return {}
    mesh: Any = text
    # Three forms: axes with names, a number of devices, and ``8xh100``, which the library reads.
    if "=" in text:
        found = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", word) for word in text.split(",")]
        pairs = [(match[1], int(match[2])) for match in found if match is not None]
        # A word that does not match, or an axis that is named twice.
        if len(pairs) < len(found) or len(dict(pairs)) < len(pairs):
            raise TargetError(f"--mesh {text} cannot be read: {o.MESH}.")
        mesh = dict(pairs)
    elif text.strip().isdigit():
        mesh = int(text)
    # Without ``--technique`` the library adds sharding to its defaults itself.
    if not techniques:
        return {"mesh": mesh}
    return {"mesh": mesh, "techniques": ("shard", *techniques["techniques"])}


def planned(source: Source, budget: str | None, solver: str = "best", **how: Any) -> Plan:
    """Plan on a profile. ``how`` is passed to ``sacplan.plan``."""
    import sacplan

    with stage("planning"):
        return sacplan.plan(source.profile, budget, solver, **how)


def curve(profile: Profile, points: int, **how: Any) -> pd.DataFrame:
    """Compute the frontier of a profile. ``how`` is passed to ``sacplan.frontier``."""
    import sacplan

    with stage(f"planning for {points} budgets", long=True):
        return sacplan.frontier(profile, points, **how)
