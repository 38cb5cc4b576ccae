"""Copies that are as late as CUDA allows: values, memory and order are right, and every wait is needed.

``tests/support/slow_link.py`` has the streams.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sacplan
from benchmarks.harness.mixed_plans import mixed_plan
from benchmarks.harness.steps import on_one_thread
from benchmarks.random_programs import OFFLOADING, run
from sacplan.techniques.offload.executor.parcels import Parcel
from sacplan.techniques.runtime.tensors import view_of
from tests.support.recomputing import fuzz
from tests.support.slow_link import SlowLink, SlowStream, slow_link
from tests.support.steps import bit_equal, grads_of
from tests.zoo import language_models as models

Without = tuple[str, ...]
Planned = tuple[models.LM, torch.Tensor, sacplan.Plan]


@pytest.fixture(scope="module")
def planned() -> Planned:
    torch.manual_seed(0)
    # Without dropout, whose random numbers threads would share.
    model, batch = models.LM(layers=3, vocab=32, dropout=0.0), torch.randint(0, 32, (8, 32))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="cpu")
    draws = (mixed_plan(profile, random.Random(seed), ("recompute", "offload")) for seed in range(20))
    return model, batch, next(plan for plan in draws if len(plan.offloaded) >= 6 and plan.discarded)


# --- steps ------------------------------------------------------------------------------------------------


def a_step(planned: Planned, without: Without = ()) -> bool:
    """Whether a step is right."""
    model, batch, plan = planned
    plain = grads_of(model, batch, models.cross_entropy)
    with sacplan.apply(model, plan), slow_link(without) as link:
        try:
            found = grads_of(model, batch, models.cross_entropy)
        except sacplan.errors.RecipeError:  # what is recomputed is not what the forward pass had
            return False
    assert link.copies >= 2 * len(plan.offloaded)
    return bit_equal(plain, found) and not link.broken


def a_step_that_fails(planned: Planned) -> bool:
    """Whether copies that are under way when a backward pass fails do no harm, then and in the next step."""
    model, batch, plan = planned
    plain = grads_of(model, batch, models.cross_entropy)

    def fail(grad: torch.Tensor) -> None:
        # Behind the last layer's own backward pass, in which copies back for other layers have begun.
        raise KeyError("in the middle")

    def hooked(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    with sacplan.apply(model, plan), slow_link() as link:
        hook = model.layers[1].register_forward_hook(hooked)
        with pytest.raises(KeyError):
            grads_of(model, batch, models.cross_entropy)
        hook.remove()
        gc.collect()
        assert link.copies > len(plan.offloaded)  # some have begun to come back
        found = grads_of(model, batch, models.cross_entropy)
    return bit_equal(plain, found) and not link.broken


def two_streams(planned: Planned, without: Without = ()) -> bool:
    """Whether a tensor may be sent, let go of, fetched and taken on streams that know nothing of each other."""
    with slow_link(without) as link:
        first, second, third = (SlowStream(link, computes=True) for _ in range(3))
        value = torch.arange(8.0)
        wanted = value.clone()
        with link.stream(first):
            parcel = Parcel(value)
        with link.stream(second):
            parcel.await_out(value.untyped_storage())
            assert told(link, value) == [first, second]
        with link.stream(third):
            parcel.fetch()
        taken = []
        for stream in (second, third):
            with link.stream(stream):
                taken.append(parcel.take(view_of(value)))
        assert told(link, taken[0]) == [second, third]
        # That one waits is no help for the other: each waits for both ways.
        ordered = all({0, 1} <= stream.order for stream in (second, third))
        return ordered and all(torch.equal(wanted, one) for one in taken)


def given_up(planned: Planned, without: Without = ()) -> bool:
    """Whether a copy back is waited for that nobody takes, by the stream to which its memory belongs."""
    with slow_link(without) as link:
        home = SlowStream(link, computes=True)
        value = torch.arange(8.0)
        with link.stream(home):
            parcel = Parcel(value)
            parcel.await_out(value.untyped_storage())
            parcel.fetch()
        del parcel  # on the stream of another thread, as it may be
        return {0, 1} <= home.order and not link.broken


def freed_on_its_way(planned: Planned, without: Without = ()) -> bool:
    """Whether a copy out is waited for whose source is freed, by the stream on which it began."""
    with slow_link(without) as link:
        home = SlowStream(link, computes=True)
        value = torch.arange(8.0)
        with link.stream(home):
            parcel = Parcel(value)
        # So that the allocator has it wait, too, for memory of another stream.
        assert told(link, value) == [home]
        del value
        waited = 0 in home.order and not link.broken
        del parcel
        return waited


def told(link: SlowLink, tensor: torch.Tensor) -> list[SlowStream]:
    """Return the streams of which the allocator knows that they use a tensor's memory."""
    return [stream for memory, stream in link.told if memory() is tensor.untyped_storage()]


@pytest.mark.parametrize("right", [a_step, a_step_that_fails, two_streams, given_up, freed_on_its_way])
def test_right_on_a_slow_link(planned: Planned, right: Callable[[Planned], bool]) -> None:
    assert right(planned)


@pytest.mark.parametrize(
    ("without", "right"),
    [
        pytest.param(("_begin", "out"), a_step, id="out: for the value"),
        pytest.param(("wait", "await_out"), a_step, id="letting go: for the copy out"),
        pytest.param(("_begin", "back"), a_step, id="back: for the memory"),
        pytest.param(("wait", "take"), a_step, id="taking: for the copy back"),
        pytest.param(("back", "fetch"), two_streams, id="back: for the way out"),
        pytest.param(("give_up", "__del__"), given_up, id="giving up: for the copy back"),
        pytest.param(("give_up",), freed_on_its_way, id="freeing: for the copy out"),
    ],
)
def test_without_any_one_wait_something_is_wrong(
    planned: Planned, without: Without, right: Callable[[Planned, Without], bool]
) -> None:
    assert not right(planned, without)


# --- memory -----------------------------------------------------------------------------------------------


def test_memory_is_let_go_of_when_the_copy_is_over_and_not_before() -> None:
    with slow_link() as link:
        value = torch.arange(8.0)
        gone = weakref.ref(value.untyped_storage())
        parcel = Parcel(value)
        parcel.await_out(value.untyped_storage())
        view = view_of(value)
        del value
        assert gone() is None  # the link does not keep it
        assert torch.equal(parcel.take(view), torch.arange(8.0))
        late = torch.ones(8)
        parcel = Parcel(late)
        view = view_of(late)
        del late
        assert parcel.take(view).isnan().all()  # it went before
    assert not link.broken


def test_a_write_to_what_is_on_its_way(planned: Planned) -> None:
    """It is an error, as without a plan; or the copy was over before, and the gradients are those without the write."""
    model, batch, plan = planned
    plain = grads_of(model, batch, models.cross_entropy)
    refused = 0
    for name, module in model.named_modules():
        if list(module.children()):
            continue
        for where in ("", "layers.1"):  # when the model returns, or in the middle
            with contextlib.ExitStack() as hooks:
                outputs: list[torch.Tensor] = []

                def keep(_: Any, args: Any, output: torch.Tensor, outputs: Any = outputs) -> None:
                    outputs.append(output)

                def spoil(_: Any, args: Any, output: torch.Tensor, outputs: Any = outputs) -> None:
                    with torch.no_grad():
                        for one in outputs:
                            one.mul_(2)

                for hook in (
                    module.register_forward_hook(keep),
                    model.get_submodule(where).register_forward_hook(spoil),
                ):
                    hooks.callback(hook.remove)
                spoiled = None
                with contextlib.suppress(RuntimeError):  # autograd's own check
                    spoiled = grads_of(model, batch, models.cross_entropy)
                with sacplan.apply(model, plan), slow_link() as link:
                    try:
                        found = grads_of(model, batch, models.cross_entropy)
                    except (sacplan.SacplanError, RuntimeError):
                        assert spoiled is None, name
                        refused += 1
                        continue
                assert bit_equal(found, plain if spoiled is None else spoiled), name
                assert not link.broken
    assert refused > 5


# --- random programs and threads ----------------------------------------------------------------------------


@fuzz(6)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("kind", OFFLOADING)
def test_random_programs(kind: str, seed: int) -> None:
    with slow_link() as link:
        outcome = on_one_thread(run)(seed, kinds=(kind,), threads=False)
    assert not outcome.failures
    assert not link.broken


def test_random_programs_copy_and_go_on_threads() -> None:
    copies = threaded = 0
    for seed in (3, 15, 16, 17):
        with slow_link() as link:
            outcome = on_one_thread(run)(seed, kinds=("mixed",), threads=True)
        assert not outcome.failures
        assert not link.broken
        copies, threaded = copies + link.copies, threaded + outcome.threaded
    assert copies > 20
    assert threaded > 20
