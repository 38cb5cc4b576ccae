"""From what the command line names to the values that the stages hand on: targets, profiles, plans, devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sacplan._cli import show
from sacplan._cli.exits import TargetError
from sacplan._cli.hf import DEFAULT_OPTIMIZER, HfOptions
from sacplan._cli.options import DEFAULT_DEVICE, Attn, Dtype, Mode, Objective, Optimizer, Runtime
from sacplan._cli.origin import Origin, origin_in
from sacplan._cli.output import note, stage, warn
from sacplan._cli.targets import Target, is_json_file, load_target, users_code
from sacplan.errors import InfeasibleBudget

if TYPE_CHECKING:
    from sacplan import DeviceSpec, Plan, Profile, Verification
    from sacplan._ranks.ranks import Ranks

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
class TraceOptions:
    """How a step is to be recorded; None where the command line says nothing."""

    device: str | None
    runtime: Runtime | None
    mode: Mode | None = None
    world_size: int | None = None
    fsdp_units: list[str] | None = None

    @property
    def ranks(self) -> Ranks | None:
        """Over how many ranks, and how; None where nothing is said.

        Raises:
            TargetError: units, and one rank.
        """
        from sacplan._ranks.ranks import Ranks

        if self.fsdp_units and (self.world_size or 1) == 1:
            raise TargetError(
                "--fsdp-unit is given, and with one rank nothing is sharded. Say over how many ranks: --world-size 8."
            )
        return None if self.world_size is None else Ranks.of(self.world_size, self.fsdp_units or None)

    def given(self) -> list[str]:
        """What a saved profile has decided already."""
        named = {"--runtime": self.runtime, "--trace": self.mode}
        return [name for name, value in named.items() if value is not None]


def resolved_device(text: str | None) -> DeviceSpec:
    """The device of ``--device``: a name, or a file that ``DeviceSpec.save`` wrote."""
    from sacplan._device.devices import DeviceSpec, resolve_device

    text = text or DEFAULT_DEVICE
    return DeviceSpec.load(existing(text)) if is_json_file(text) else resolve_device(text)


@dataclass(frozen=True)
class Source:
    """What a plan is made from.

    Attributes:
        profile: recorded now, or loaded.
        target: the target that was recorded; None of a loaded profile.
        origin: how to make the model and the batch again, where that is known.
    """

    profile: Profile
    target: Target | None
    origin: Origin | None

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was chosen for an ``hf:`` target, to be shown."""
        return self.target.facts if self.target else {}


def profile_of(source: str, how: TraceOptions, options: HfOptions) -> Source:
    """Load a saved profile, or record the step of a target.

    Raises:
        TargetError: options that contradict a saved profile, or a target that cannot be loaded.
    """
    if is_json_file(source):
        return _saved_profile(source, how, options)
    ranks = how.ranks  # said before anything is loaded
    spec = resolved_device(how.device)
    real = how.mode == Mode.REAL
    with stage("loading"):
        target = load_target(source, options, spec.kind if real else "meta")
    return Source(_record(target, spec, how, ranks), target, Origin.of(target))


def _record(target: Target, spec: DeviceSpec, how: TraceOptions, ranks: Ranks | None) -> Profile:
    import sacplan
    from sacplan._ranks.ranks import ONE_RANK

    ranks = ranks or ONE_RANK
    with stage("tracing"), users_code(f"the step of {target.name}"):
        return sacplan.profile(
            target.model,
            target.batch,
            target.loss_fn,
            target.optimizer,
            device=spec,
            runtime=(how.runtime or Runtime.COST_MODEL).value,
            trace=(how.mode or Mode.FAKE).value,
            world_size=ranks.world_size,
            fsdp_units=ranks.fsdp_units,
        )


def _saved_profile(source: str, how: TraceOptions, options: HfOptions) -> Source:
    import sacplan

    given = [*how.given(), *options.given()]
    if given:
        raise TargetError(
            f"{' and '.join(given)}: {source} was recorded already. Record another one with "
            f"sacplan profile TARGET {' '.join(f'{g} ...' for g in given)}."
        )
    with stage("reading"):
        profile = _read(sacplan.Profile.load, existing(source), "profile")
        origin = _read(lambda path: origin_in(path, "profile"), Path(source), "profile")
    if how.device is not None and resolved_device(how.device).name != profile.device:
        raise TargetError(
            f"{source} is of a step on {profile.device}; record one on the other device with "
            f"sacplan profile TARGET --device {how.device}."
        )
    ranks = how.ranks
    if ranks is not None and not _same(ranks, profile.ranks):
        raise TargetError(
            f"{source} is of {show.ranks_text(profile.ranks)}, and not of {show.ranks_text(ranks)}; record that with "
            "sacplan profile TARGET --world-size N --fsdp-unit PATTERN."
        )
    return Source(profile, None, origin)


def _same(ranks: Ranks, others: Ranks) -> bool:
    def known(r: Ranks) -> Any:
        return r.world_size, None if r.fsdp_units is None else frozenset(r.fsdp_units)

    return bool(known(ranks) == known(others))


def plan_from(path: str) -> Plan:
    """Load a plan."""
    import sacplan

    return _read(sacplan.Plan.load, existing(path), "plan")


def as_planned(asked: HfOptions, plan: Plan, plan_file: str) -> HfOptions:
    """What an ``hf:`` target is made with to verify a plan: what was asked for, else what the plan was made with.

    Says on stderr what it takes from the plan, and where both say something and do not agree.
    """
    origin = _read(lambda path: origin_in(path, "plan"), existing(plan_file), "plan")
    made = HfOptions.of_fingerprint(plan.fingerprint) if origin is None else origin.options
    taken = made.less(asked)
    if taken.given():
        whose = "" if origin is None else f", which was made from {origin.name}"
        note(f"{taken.words()}: from {plan_file}{whose}")
    if origin is None and "--optimizer" not in asked.given():
        note(
            f"{plan_file} does not say which optimizer and attention it was made with; taken are --optimizer "
            f"{DEFAULT_OPTIMIZER} and what transformers chooses"
        )
    for name in asked.given():
        ours, its = getattr(asked, name[2:]), getattr(made, name[2:])
        if its is not None and ours != its:
            warn(f"{name} {ours} is given, and {plan_file} was made with {name} {its}; {ours} is taken")
    return asked.over(made)


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
    from sacplan._plan.planning import resolve_solver
    from sacplan._program.budget import parse_budget

    if budget is not None:
        parse_budget(budget, 2**40)
    resolve_solver(solver)


def planned(
    source: Source,
    budget: str,
    solver: str,
    objective: Objective,
    keep: list[str] | None = None,
    never: list[str] | None = None,
) -> Plan:
    """A plan of a profile; where there is none, hints at what to change."""
    import sacplan
    from sacplan._plan.context import planning_context
    from sacplan._recompute.pins import resolve_pins

    profile = source.profile
    kept, left = tuple(keep or ()), tuple(never or ())
    with stage("fitting"):  # what plan would start with, and finds then
        pins = resolve_pins(profile.program, profile.fingerprint, kept, left)
        planning_context(profile.program, objective.value, pins)
    with stage("solving"), with_hints(source.origin, profile.ranks):
        return sacplan.plan(profile, budget, solver, objective.value, keep=kept, never=left)


@contextlib.contextmanager
def with_hints(origin: Origin | None, ranks: Ranks | None) -> Iterator[None]:
    """What else a person could change where no plan fits; ``ranks`` is None where a step cannot be spread."""
    try:
        yield
    except InfeasibleBudget as error:
        if error.binding == "optimizer step":
            hints = _other_optimizers(origin)
            if ranks is not None and ranks.world_size == 1:
                hints.append("--world-size and --fsdp-unit shard parameters and state over several devices")
            error.__notes__ = hints  # type: ignore[attr-defined]
        raise


def _other_optimizers(origin: Origin | None) -> list[str]:
    """What takes less, if there is something."""
    if origin is None:
        return [
            "an optimizer of torch has no temporaries with fused=True, and those of one parameter at a time with "
            "foreach=False"
        ]
    hints = {
        Optimizer.ADAMW.value: ["--optimizer adamw-fused has no temporaries, and sgd no state"],
        Optimizer.ADAMW_FUSED.value: ["--optimizer sgd has no state"],
    }
    return hints.get(origin.options.optimizer or DEFAULT_OPTIMIZER, [])
