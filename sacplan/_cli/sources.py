"""From what the command line names to the values that the stages hand on: targets, profiles, plans, devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sacplan._cli.exits import TargetError
from sacplan._cli.hf import HfOptions
from sacplan._cli.options import DEFAULT_DEVICE, Attn, Dtype, Mode, Objective, Optimizer, Runtime
from sacplan._cli.output import stage
from sacplan._cli.targets import Target, is_json_file, load_target, users_code
from sacplan.errors import InfeasibleBudget

if TYPE_CHECKING:
    from sacplan import DeviceSpec, Plan, Profile, Verification

_Value = TypeVar("_Value")


def hf_options(
    batch: int | None,
    seq: int | None = None,
    dtype: Dtype | None = None,
    optimizer: Optimizer | None = None,
    attn: Attn | None = None,
) -> HfOptions:
    """The options of ``hf:`` targets as one value."""
    return HfOptions(
        batch=batch,
        seq=seq,
        dtype=dtype and dtype.value,
        optimizer=optimizer and optimizer.value,
        attn=attn and attn.value,
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """How a step is to be recorded; None where the command line says nothing."""

    device: str | None
    runtime: Runtime | None
    mode: Mode | None

    def given(self) -> list[str]:
        """What a saved profile has decided already."""
        named = {"--runtime": self.runtime, "--trace": self.mode}
        return [name for name, value in named.items() if value is not None]


def resolved_device(text: str | None) -> DeviceSpec:
    """The device of ``--device``: a name, or a file that ``DeviceSpec.save`` wrote."""
    from sacplan._trace.devices import DeviceSpec, resolve_device

    text = text or DEFAULT_DEVICE
    return DeviceSpec.load(existing(text)) if is_json_file(text) else resolve_device(text)


def profile_of(source: str, how: Recording, options: HfOptions) -> tuple[Profile, Target | None]:
    """Load a saved profile, or record the step of a target.

    Raises:
        TargetError: options that contradict a saved profile, or a target that cannot be loaded.
    """
    if is_json_file(source):
        return _saved_profile(source, how, options), None
    spec = resolved_device(how.device)
    real = how.mode == Mode.REAL
    with stage("loading"):
        target = load_target(source, options, spec.kind if real else "meta")
    return record(target, spec, how), target


def record(target: Target, spec: DeviceSpec, how: Recording) -> Profile:
    """Record the step of a target."""
    import sacplan

    with stage("tracing"), users_code(f"the step of {target.name}"):
        return sacplan.profile(
            target.model,
            target.batch,
            target.loss_fn,
            target.optimizer,
            device=spec,
            runtime=(how.runtime or Runtime.COST_MODEL).value,
            trace=(how.mode or Mode.FAKE).value,
        )


def _saved_profile(source: str, how: Recording, options: HfOptions) -> Profile:
    import sacplan

    given = [*how.given(), *options.given()]
    if given:
        raise TargetError(
            f"{' and '.join(given)}: {source} was recorded already. Record another one with "
            f"sacplan profile TARGET {' '.join(f'{g} ...' for g in given)}."
        )
    with stage("reading"):
        profile = _read(sacplan.Profile.load, existing(source), "profile")
    if how.device is not None and resolved_device(how.device).name != profile.device:
        raise TargetError(
            f"{source} is of a step on {profile.device}; record one on the other device with "
            f"sacplan profile TARGET --device {how.device}."
        )
    return profile


def plan_from(path: str) -> Plan:
    """Load a plan."""
    import sacplan

    return _read(sacplan.Plan.load, existing(path), "plan")


def existing(text: str) -> Path:
    """The path of a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise TargetError(f"{text}: there is no such file.")
    return path


def _read(load: Callable[[Path], _Value], path: Path, what: str) -> _Value:
    try:
        return load(path)
    except (KeyError, TypeError, ValueError, IndexError, EOFError) as error:
        raise TargetError(
            f"{path} is not a whole {what} ({type(error).__name__}: {error}). Make it again."
        ) from error


def verified(target: Target, plan: Plan, mode: Mode) -> Verification:
    """The step of a target with the plan applied."""
    import sacplan

    with stage("verifying"), users_code(f"the step of {target.name}"):
        return sacplan.verify(
            target.model, target.batch, plan, target.loss_fn, target.optimizer, run=mode.value
        )


def check_early(budget: str | None, solver: str) -> None:
    """What is wrong without looking at the model is said before it is recorded."""
    from sacplan._plan.budget import parse_budget
    from sacplan._plan.planning import resolve_solver

    if budget is not None:
        parse_budget(budget, 2**40)
    resolve_solver(solver)


def planned(
    profile: Profile,
    budget: str,
    solver: str,
    objective: Objective,
    keep: list[str] | None = None,
    never: list[str] | None = None,
) -> Plan:
    """A plan of a profile; where there is none, hints at what to change."""
    import sacplan
    from sacplan._plan.landscape import landscape_of
    from sacplan._plan.pins import resolve_pins

    kept, left = tuple(keep or ()), tuple(never or ())
    with stage("fitting"):  # what plan would start with, and finds then
        pins = resolve_pins(profile.recording, profile.fingerprint, kept, left)
        landscape_of(profile.recording, objective.value, pins)
    with stage("solving"), _with_hints():
        return sacplan.plan(profile, budget, solver, objective.value, keep=kept, never=left)


@contextlib.contextmanager
def _with_hints() -> Iterator[None]:
    """What else a person could change where no plan fits."""
    try:
        yield
    except InfeasibleBudget as error:
        if error.binding == "optimizer step":
            hint = (
                "the optimizer's step is what does not fit, and no plan changes that; a fused one has no temporaries "
                "(hf: --optimizer adamw-fused), and sgd no state"
            )
            error.__notes__ = [hint]  # type: ignore[attr-defined]
        raise
