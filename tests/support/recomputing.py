"""Plans that recompute given or random call sites, and all that a step gives, to compare bit by bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from torch import nn

import sacplan
from sacplan.core.call_sites import ops_of
from sacplan.core.decisions import as_decisions
from sacplan.core.program import CallSite, Phase
from sacplan.planning.make import provenance_of
from sacplan.planning.plan import Plan
from sacplan.planning.units import unit_plans
from sacplan.techniques.recompute.in_place_groups import reading_lost_versions
from sacplan.techniques.recompute.rewrite import recomputed
from tests.support.plans import Sites, times_of
from tests.zoo.units import batch


def plan_of(profile: sacplan.Profile, sites: Mapping[str, Sites]) -> Plan:
    discarded = {fqn: times_of(found, profile.program, fqn) for fqn, found in sites.items()}
    found = recomputed(profile.program, discarded).footprint
    units, sequences = unit_plans(profile.program, discarded, discarded)
    return Plan(
        decisions=as_decisions(discarded),
        units=units, sequences=sequences,
        peak_bytes=found.peak_bytes, baseline_peak_bytes=profile.peak_bytes, budget_bytes=None, recompute_ms=0.0,
        recompute_flops=0, lower_bound_ms=0.0, step_ms=0.0, step_flops=0, status="feasible", gap=None,
        provenance=provenance_of(profile, "none"), device="cpu", fingerprint=profile.fingerprint,
    )  # fmt: skip


def fitting_sites(profile: sacplan.Profile, fqn: str) -> set[CallSite]:
    """Call sites of a unit that the recording says can run again, in all its calls."""
    r = profile.program
    good: set[CallSite] = set()
    bad: set[CallSite] = set()
    for scope in r.calls[fqn]:
        for i, site in r.sites(scope).items():
            (good if r.ops[i].recomputable and r.ops[i].phase == Phase.FORWARD else bad).add(site)
    return good - bad


def all_sites(profile: sacplan.Profile, fqn: str) -> set[CallSite]:
    """Call sites that a plan may name, whether the recording says that they can run again or not."""
    r = profile.program
    return {site for scope in r.calls[fqn] for _, _, site in ops_of(r.sequence(scope))}


def random_plan(profile: sacplan.Profile, seed: int, *, fitting: bool) -> Plan:
    """Random units that do not nest, and a random share of their call sites."""
    rng = random.Random(seed)
    units: dict[str, list[CallSite]] = {}
    fqns = list(profile.program.calls)
    for fqn in rng.sample(fqns, len(fqns)):
        nested = any(f.startswith(fqn + ".") or fqn.startswith(f + ".") or not f for f in units)
        if nested or (not fqn and rng.random() < 0.7) or (not fqn and units) or len(units) == 4:
            continue
        sites = sorted(fitting_sites(profile, fqn) if fitting else all_sites(profile, fqn))
        share = rng.choice([0.2, 0.5, 0.9, 1.0])
        units[fqn] = [s for s in sites if rng.random() < share]
        if fqn == "":
            break
    if fitting:
        units = {
            f: [site for site in s if site not in reading_lost_versions(profile.program, f, s)]
            for f, s in units.items()
        }
    return plan_of(
        profile, {f: {site: rng.choice([1, 1, 1, 2, 3]) for site in s} for f, s in units.items() if s}
    )


def step(model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Loss, gradients, buffers and the generator's state."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(x)
    loss.backward()
    return state(model, loss)


def state(model: nn.Module, *more: torch.Tensor) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*more, *grads, *model.buffers(), torch.get_rng_state())]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)) for x, y in pairs)


def fuzz(examples: int) -> settings:
    """Every run draws the same examples; they are small, and not worth the minutes to shrink them."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, phases=[Stage.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def assert_peak_is_replayed(
    model: nn.Module, plan: Plan, x: Any = None, loss_fn: Any = None, optimizer: Any = None
) -> None:
    seen = sacplan.verify(model, batch() if x is None else x, plan, loss_fn, optimizer)
    assert seen.peak_bytes == plan.peak_bytes


def discard_all(
    model: nn.Module, fqns: list[str] | None = None, **kwargs: Any
) -> tuple[nn.Module, sacplan.Handle]:
    """A copy of the model with everything that may be discarded discarded."""
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    fqns = [f for f in profile.program.calls if f.count(".") == 1] if fqns is None else fqns
    planned = copy.deepcopy(model)
    plan = plan_of(profile, {f: sorted(fitting_sites(profile, f)) for f in fqns})
    return planned, sacplan.apply(planned, plan, **kwargs)
