"""Storages that get another size while they are alive: events of the program, as large as the real step makes them.

The measured side is the allocation events of ``torch.profiler``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.program import Event
from tests.support.slow import slow_after
from tests.support.steps import grads_of, mean_square
from tests.zoo.layers import FromFunction


def _filled(how: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        with torch.no_grad():
            scale = how(h)
        return self.down(h * scale)  # type: ignore[no-any-return]

    return run


def _out_of_nothing(h: torch.Tensor) -> torch.Tensor:
    scale = torch.empty(0)
    torch.mul(h, h, out=scale)
    return scale


def _grown_twice(h: torch.Tensor) -> torch.Tensor:
    scale = torch.empty(h.numel() // 2)
    scale.untyped_storage().resize_(h.nbytes)  # both blocks are there while the contents are copied
    return scale.resize_(2 * h.numel()).resize_(h.shape).copy_(h)


def _emptied(h: torch.Tensor) -> torch.Tensor:
    scratch = torch.cat((h, h, h))
    scratch.untyped_storage().resize_(0)  # ``scratch`` lives on
    scale = torch.cat((h, h))[: len(h)].clone()
    return scale.mul_(1 / scratch.dim())


FILLED = {
    "resize_": lambda h: torch.empty(0).resize_(h.shape).copy_(h),
    "resize_as_": lambda h: h.new().resize_as_(h).copy_(h),
    "set_": lambda h: torch.empty(0).set_(torch.empty_like(h)).copy_(h),
    "out": _out_of_nothing,
    "grown twice": _grown_twice,
    "emptied": _emptied,
}


def _model(how: str, parts: int = 2) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    run = _filled(FILLED[how])
    model = (FromFunction(run, up=nn.Linear(16, 64), down=nn.Linear(64, 16)) for _ in range(parts))
    return nn.Sequential(*model), torch.randn(128, 16)


@pytest.mark.parametrize("how", slow_after(3, FILLED))
@pytest.mark.parametrize("trace", ["fake", "real"])
def test_memory_that_a_resize_takes_is_planned_for(how: str, trace: Any) -> None:
    model, x = _model(how)
    profile = sacplan.profile(model, x, mean_square, device="cpu", trace=trace)
    for plan in (sacplan.plan(profile, "100%"), sacplan.plan(profile, "90%", "greedy")):
        measured = sacplan.verify(model, x, plan, mean_square, run="real").peak_bytes
        assert measured == plan.peak_bytes
        assert sacplan.verify(model, x, plan, mean_square).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("how", FILLED)
def test_files_and_reports_have_the_sizes_of_the_moment(how: str, tmp_path: Path) -> None:
    model, x = _model(how)
    profile = sacplan.profile(model, x, mean_square, device="h100")
    profile.save(tmp_path / "profile.json")
    again = sacplan.Profile.load(tmp_path / "profile.json")
    program = again.program
    assert again == profile
    assert program.footprint == profile.program.footprint
    rows = sacplan.Report(again).alive_at_peak()
    assert int(rows["bytes"].sum()) == program.footprint.peak_bytes
    # Blocks are as large as what was asked for here, up to the allocator's steps of 512 bytes, which are in the sizes.
    assert (
        sacplan.plan(again, "100%").device_memory.first_step.max_memory_allocated
        >= program.footprint.peak_bytes
    )


def test_what_autograd_keeps_may_be_freed_and_brought_back() -> None:
    """As ``fully_shard`` does with a gathered parameter: the handle stays, and the memory goes."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).tanh()
        y = self.down(h)
        kept, size = h.detach().clone(), h.untyped_storage().size()
        kept_on = [kept]

        def back(_: torch.Tensor) -> None:
            h.untyped_storage().resize_(size)
            h.data.copy_(kept_on.pop())

        y.register_hook(back)
        h.untyped_storage().resize_(0)
        return y + torch.cat((x, x, x, x)).view(4, *x.shape).sum(0)

    model = FromFunction(run, up=nn.Linear(16, 64), down=nn.Linear(64, 16))
    x = torch.randn(64, 16)
    profile = sacplan.profile(model, x, mean_square, device="cpu")
    events = [code for code, _ in profile.program.events]
    assert events.count(Event.RESIZE) == len(profile.program.resizes) == 2
    plan = sacplan.plan(profile, "100%")
    assert sacplan.verify(model, x, plan, mean_square, run="real").peak_bytes == plan.peak_bytes
    # What makes or reads contents that were gone for a while is not run again.
    smallest = sacplan.plan(profile, "smallest")
    found = sacplan.verify(model, x, smallest, mean_square, run="real")
    assert found.peak_bytes == smallest.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["out", "emptied"])
def test_every_technique_leaves_resized_storages_alone(how: str) -> None:
    model, x = _model(how, parts=1)
    profile = sacplan.profile(model, x, mean_square, device="cpu")
    whole = grads_of(model, x, mean_square)
    for techniques in (("offload",), ("recompute", "chunk", "offload")):
        plan = sacplan.plan(profile, "smallest", techniques=techniques)
        assert sacplan.verify(model, x, plan, mean_square).peak_bytes == plan.peak_bytes
        with sacplan.apply(model, plan):
            torch.testing.assert_close(grads_of(model, x, mean_square), whole)
