"""Turn names and options of the command line into devices, profiles, plans and verifications."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sacplan.cli import options as o
from sacplan.cli.files import kind_of
from sacplan.cli.origin import options_of, origin_of, seen_in
from sacplan.cli.output import note, stage
from sacplan.cli.targets import is_json_file, load_target, not_a_model, users_code
from sacplan.integrations.hf.target import NAMED, ModelOptions, Target, TargetError, given

if TYPE_CHECKING:
    import pandas as pd

    from sacplan import DeviceSpec, Plan, Profile


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
        return DeviceSpec.load(name)
    spec = resolve_device(name)
    if said := meant_by(name):
        note(f"--device {said}")
    return spec


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
    """Load a target for a command that tries batches of many sizes; return the target, and what makes batches."""
    with stage("loading"):
        target = load_target(name, dtype_for(spec, name, hf))
    if target.make_batch is None:
        raise TargetError(
            f"{command} tries batches of many sizes, but {name} makes only one. Return a mapping with the key "
            "make_batch as well, a function of the batch size (of certify, of other sizes, too): "
            "make_batch=lambda n: torch.randn(n, 512)."
        )
    return target, target.make_batch


def profile_of(source: str, step: o.StepOptions, hf: ModelOptions) -> Source:
    """Load a saved profile, or record the step of a target.

    Raises:
        TargetError: options that contradict a saved profile, or a target that cannot be loaded.
    """
    if is_json_file(source):
        return _saved_profile(source, step, hf)
    import sacplan
    from sacplan.distributed.ranks.ranks import Ranks

    # Errors in options first, then those of the device, then those of the target: from quick to slow.
    ranks = None
    if step.world_size is not None or step.fsdp_unit:
        ranks = Ranks.of(step.world_size or 1, step.fsdp_unit or None)
    spec = device_of(step.device)
    with stage("loading"):
        target = load_target(
            source, dtype_for(spec, source, hf), spec.kind if step.trace == "real" else "meta"
        )
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
            device=spec, ranks=ranks, **given(step, "device", "world_size", "fsdp_unit"),
        )  # fmt: skip
    return Source(profile, target, origin_of(target))


def _saved_profile(source: str, step: o.StepOptions, hf: ModelOptions) -> Source:
    import sacplan

    # These options say how to record. They would change nothing in a recording, so they are refused.
    if asked := given(step) | hf.given():
        raise TargetError(f"{o.named(asked)}: {source} is recorded already. Give this to sacplan profile.")
    # The loader would say no more than that the file is not a profile.
    if kind_of(Path(source)) in ("configuration", "device", "plan"):
        raise not_a_model(source, "a profile or ")
    with stage("reading"):
        profile = sacplan.Profile.load(source)
    return Source(profile, None, profile.fingerprint.target)


def as_planned(asked: ModelOptions, plan: Plan, plan_file: str) -> ModelOptions:
    """Return the options of an ``hf:`` target to verify: those given, else those that the plan was made with.

    A note on stderr names what is taken from the plan. Where the two disagree, the verification says so.
    """
    planned = (options_of(plan.fingerprint.target) or seen_in(plan.fingerprint)).given()
    ours = asked.given()
    if taken := {name: value for name, value in planned.items() if name not in ours}:
        note(f"{o.written(taken)}: from {plan_file}")
    return ModelOptions(**{**planned, **ours, "fetch": asked.fetch})


def check_early(budget: str | None, solver: str, techniques: list[str] | None) -> dict[str, Any]:
    """Check the options that do not depend on the model, before it is recorded.

    Returns:
        ``techniques=`` for functions of the library, if any were asked for.
    """
    from sacplan.core.budget import parse_budget
    from sacplan.planning.request import resolve_solver
    from sacplan.techniques.registry import resolve_techniques

    if budget is not None:
        # A share is one of a peak that is not known yet. Any peak will do to check the text.
        parse_budget(budget, 2**40)
    resolve_solver(solver)
    return {"techniques": resolve_techniques(techniques)} if techniques else {}


def check_early_of_device(asked: o.BudgetOptions) -> None:
    """Check the options of a command on several steps, which have no single peak that a budget could be a share of."""
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
        matches = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", word) for word in text.split(",")]
        pairs = [(match[1], int(match[2])) for match in matches if match is not None]
        # A word that does not match, or an axis that is named twice.
        if len(pairs) < len(matches) or len(dict(pairs)) < len(pairs):
            raise TargetError(f"--mesh {text} cannot be read: {o.MESH}.")
        mesh = dict(pairs)
    elif text.strip().isdigit():
        mesh = int(text)
    # Without ``--technique`` the library adds sharding to its defaults itself.
    if not techniques:
        return {"mesh": mesh}
    return {"mesh": mesh, "techniques": ("shard", *techniques["techniques"])}


def curve(profile: Profile, points: int, **how: Any) -> pd.DataFrame:
    """Compute the frontier of a profile. ``how`` is passed to ``sacplan.frontier``."""
    import sacplan

    with stage(f"planning for {points} budgets", long=True):
        return sacplan.frontier(profile, points, **how)
