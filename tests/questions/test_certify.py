"""``certify`` against real loops on a CPU, and against the allocator played by hand."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader

import sacplan
from sacplan.device.caching_allocator import CachingAllocator, ExpandableAllocator
from sacplan.device.device_memory import TrainingRun, changes_of
from sacplan.errors import PlanError
from sacplan.questions.certify import certify
from sacplan.questions.lengths import Drawing, Shape
from sacplan.questions.scaled import SizedBoth
from sacplan.torch_compat.allocations import allocation_events
from tests.support.devices import memory_with_room
from tests.zoo.language_models import LM, cross_entropy

MIB = 2**20
ADAMW = functools.partial(torch.optim.AdamW, foreach=True)


def make_batch(n: int, seq: int) -> torch.Tensor:
    return torch.zeros(n, seq, dtype=torch.long)


def drawn(n: int, longest: int = 96) -> list[int]:
    """Lengths as data sets have them: most are short, a few are long."""
    found = np.random.default_rng(0).lognormal(3.0, 0.7, n)
    return [int(length) for length in found.clip(4, longest)]


def model() -> LM:
    return LM(layers=2, dim=32, heads=2, vocab=64)


def measured(lengths: list[int], batch: int, plans: Any = None, **how: Any) -> tuple[int, list[Shape]]:
    """The peak of a real loop on the CPU, from the profiler's allocation events, and the batches that it had."""
    net = model()
    optimizer = ADAMW(net.parameters())
    samples = [torch.zeros(length, dtype=torch.long) for length in lengths]
    loader = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        collate_fn=functools.partial(pad_sequence, batch_first=True),
    )
    shapes = []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for tokens in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net, tokens)
            loss.backward()
            optimizer.step()
            shapes.append(Shape(*tokens.shape))
    live = peak = 0
    for delta in allocation_events(profiler, {}):
        assert not isinstance(delta, str)
        live += delta
        peak = max(peak, live)
    return peak + sum(p.untyped_storage().nbytes() for p in net.parameters()), shapes


@pytest.mark.parametrize("n_steps", [16, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_the_peak_of_a_whole_run_is_that_of_a_real_loop(n_steps: int) -> None:
    lengths = drawn(4 * n_steps - 1)  # the last batch has three samples
    peak, shapes = measured(lengths, 4)
    found = certify(model(), make_batch, lengths, "cpu", cross_entropy, ADAMW, batch=4)
    assert len(shapes) == found.steps == n_steps
    assert found.shapes == len(set(shapes)) > n_steps / 4
    (row,) = found.rows
    assert row.allocated_bytes == pytest.approx(peak, rel=0.005)
    assert shapes[row.allocated_at.index] == row.allocated_at[1:]
    print(row.allocated_bytes, peak)
