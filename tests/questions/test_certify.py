"""``certify`` against real loops on a CPU, and against the allocator played by hand."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import sacplan
from benchmarks.harness.steps import run_peaks
from sacplan.device.caching_allocator import MIB, CachingAllocator, ExpandableAllocator
from sacplan.device.device_memory import AllocatorPeaks, Changes, TrainingRun, changes_of
from sacplan.device.devices import resolve_device
from sacplan.errors import PlanError
from sacplan.planning.limits import Room
from sacplan.planning.request import Request
from sacplan.questions.batch_sizes import Recordings
from sacplan.questions.certificate import BatchAt, Certificate, WholeRun
from sacplan.questions.certify import _Runs, certify
from sacplan.questions.lengths import Drawing, Shape, read_lengths, shape_of_batch
from sacplan.questions.scaled import SizedStep
from tests.support.devices import memory_with_room
from tests.zoo.language_models import LM, cross_entropy

ADAMW = functools.partial(torch.optim.AdamW, foreach=True)


def make_batch(n: int, seq: int) -> torch.Tensor:
    return torch.zeros(n, seq, dtype=torch.long)


def drawn(n: int, longest: int = 96) -> list[int]:
    """Lengths as data sets have them: most are short, a few are long."""
    found = np.random.default_rng(0).lognormal(3.0, 0.7, n)
    return [int(length) for length in found.clip(4, longest)]


def model() -> LM:
    return LM(layers=2, dim=32, heads=2, vocab=64)


def loader_of(lengths: list[int], generator: torch.Generator) -> DataLoader[torch.Tensor]:
    samples: Any = [torch.zeros(length, dtype=torch.long) for length in lengths]
    collate = functools.partial(pad_sequence, batch_first=True)
    return DataLoader(samples, batch_size=4, shuffle=True, generator=generator, collate_fn=collate)


def measured(lengths: list[int], plan: sacplan.Plan | None = None, **between: Any) -> tuple[int, list[Shape]]:
    """The peak of a real loop on the CPU, from the profiler's allocation events, and the batches that it had."""
    loader = loader_of(lengths, torch.Generator().manual_seed(0))
    shapes = []

    def batches() -> Iterator[torch.Tensor]:
        for tokens in loader:
            shapes.append(tuple(tokens.shape))
            yield tokens

    plans = () if plan is None else [plan]
    peaks = run_peaks(model(), batches(), len(loader), ADAMW, cross_entropy, plans, **between)
    return max(peaks), shapes


@pytest.mark.parametrize("n_steps", [16, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_the_peak_of_a_whole_run_is_that_of_a_real_loop(n_steps: int) -> None:
    lengths = drawn(4 * n_steps - 1)  # the last batch has three samples
    peak, shapes = measured(lengths)
    found = certify(model(), make_batch, lengths, "cpu", cross_entropy, ADAMW, batch=4)
    assert len(shapes) == found.steps == n_steps
    assert found.shapes == len(set(shapes)) > n_steps / 4
    (row,) = found.rows
    assert row.allocated_bytes == peak
    step = row.allocated_at.step
    assert row.allocated_at == BatchAt(step, shapes[step])
    assert found.fits
    assert found.breaks_at is None
    assert not found.plans


@pytest.mark.slow
@pytest.mark.parametrize("evaluation_batch", [4, 24])
def test_a_run_with_evaluations_and_accumulation(evaluation_batch: int) -> None:
    """One in which a step of training takes the most, and one in which an evaluation does."""
    lengths, between = drawn(4 * 61), [96] * 50
    evaluated = Drawing(read_lengths(between, None), evaluation_batch, seed=None).shapes()
    evaluations = 10, [functools.partial(make_batch, *shape) for shape in evaluated]
    peak, shapes = measured(lengths, accumulation=2, evaluations=evaluations)
    found = certify(
        model(), make_batch, lengths, "cpu", cross_entropy, ADAMW, batch=4, accumulation_steps=2,
        evaluation=between, evaluation_batch=evaluation_batch, evaluate_every=10,
    )  # fmt: skip
    (row,) = found.rows
    assert found.steps == len(shapes) == 61
    at = row.allocated_at
    assert at.evaluation == (evaluation_batch == 24)
    # The loop holds the loss of the step before, a float, during an evaluation. A recorded step ends without it.
    assert row.allocated_bytes == peak - 4 * at.evaluation
    if at.evaluation:
        step = max((19, 39, 59), key=lambda i: shapes[i][1])  # its batch is still there
        assert at == BatchAt(step, (24, 96), True)
        assert f"allocated from evaluation after batch {step} (24 x 96) on" in str(found)


@pytest.mark.slow
def test_what_to_do_if_a_run_does_not_fit() -> None:
    lengths, how = drawn(48), {"loss_fn": cross_entropy, "optimizer": ADAMW}
    whole = certify(model(), make_batch, lengths, "cpu", batch=4, **how).rows[0]
    budget = f"{int(0.8 * whole.allocated_bytes)}B"
    found = certify(model(), make_batch, lengths, "cpu", budget=budget, batch=4, buckets=2, **how)
    plain, one, several = found.rows
    assert plain.allocated_bytes == whole.allocated_bytes > plain.limit_bytes
    assert found.breaks_at == plain.breaks_at is not None
    assert plain.breaks_at.step <= plain.allocated_at.step
    # Nothing is recomputed in short batches, and every step is within the budget.
    assert (one.way, several.way) == ("one plan", "2 plans")
    assert one.fits
    assert several.fits
    assert 0 < several.added_ms < one.added_ms
    short, long = found.plans
    assert not short.plan.decisions
    assert long.plan.decisions
    ((_, shorter),), ((_, longer),) = short.shapes, long.shapes
    assert shorter < longer
    assert found.plan_for(4, shorter) == short.plan
    assert found.plan_for(4, shorter + 1) == long.plan == found.plan
    assert found.plan_for(4, longer + 1) is None
    # A real loop with the plan for the longest batch.
    assert measured(lengths, found.plan)[0] == one.allocated_bytes
    # The largest batch fits, and one more does not.
    assert found.largest in (1, 2, 3)
    for n, fits in ((found.largest, True), (found.largest + 1, False)):
        assert certify(model(), make_batch, lengths, "cpu", budget=budget, batch=n, **how).fits == fits
    assert f"never breaks as it is: {found.largest}." in str(found)
    assert list(found.to_frame()["way"]) == ["as it is", "one plan", "2 plans"]


@pytest.mark.usefixtures("no_cublas_workspaces")
def test_the_allocator_is_played_as_on_recordings_of_each_batch() -> None:
    net = LM(layers=1, dim=64, heads=2, vocab=1024)
    lengths = [256, 64, 192, 64, 128, 256, 192, 128, 64, 256, 32, 224]
    drawing = Drawing(read_lengths(lengths, None), None, tokens=1024)
    shapes = drawing.shapes()
    assert all(n * seq <= 1024 for n, seq in shapes)
    assert sum(n for n, _ in shapes) == len(lengths)
    recorded = {
        shape: sacplan.profile(net, make_batch(*shape), cross_entropy, ADAMW, device="h100")
        for shape in set(shapes)
    }

    def by_hand(allocator: CachingAllocator, empties: bool = False) -> list[tuple[int, int]]:
        run, found = TrainingRun(allocator), []
        for shape in shapes:
            peaks = run.step(changes_of(recorded[shape].program))
            found.append((peaks.max_memory_reserved, max(peaks.max_memory_allocated, run.between_bytes)))
            if empties:
                in_use = sum(one.nbytes for one in allocator.segments if any(not b.free for b in one))
                allocator.empty_cache()
                assert allocator.reserved_bytes == in_use
        return found

    how: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": ADAMW, "tokens": 1024}
    found = certify(net, make_batch, lengths, "h100", **how)
    for row, allocator in zip(
        found.rows, (CachingAllocator(), ExpandableAllocator(), CachingAllocator()), strict=True
    ):
        reserved, allocated = zip(*by_hand(allocator, row.allocator == "emptied"), strict=True)
        assert (row.reserved_bytes, row.allocated_bytes) == (max(reserved), max(allocated))
        for at, peaks in ((row.reserved_at, reserved), (row.allocated_at, allocated)):
            index = peaks.index(max(peaks))
            assert at == BatchAt(index, shapes[index])
        assert row.fits
        assert row.retries == 0
    # A GPU with a page less: the first batch that needs that page.
    reserved = [one for one, _ in by_hand(ExpandableAllocator())]
    memory_bytes = memory_with_room(max(reserved) - MIB)
    spec = dataclasses.replace(resolve_device("h100"), memory_bytes=memory_bytes)
    tight = certify(net, make_batch, lengths, spec, **how)
    index = reserved.index(max(reserved))
    assert tight.rows[1].breaks_at == BatchAt(index, shapes[index])


def test_the_allocator_is_played_with_evaluations_and_accumulation() -> None:
    net, lengths, between = LM(layers=1, dim=64, heads=2, vocab=1024), [256, 64, 192, 128, 32], [224, 96]
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        (lengths, {"loss_fn": cross_entropy, "optimizer": ADAMW, "accumulation_steps": 2}),
        (between, {"loss_fn": lambda model, x: cross_entropy(model.eval(), x), "mode": "inference"}),
    ]
    training, evaluation = (
        [changes_of(sacplan.profile(net, make_batch(1, n), device="h100", **how).program) for n in all_of]
        for all_of, how in kinds
    )

    def by_hand(allocator: CachingAllocator, evaluations: list[Changes]) -> tuple[list[tuple[int, int]], int]:
        run, found = TrainingRun(allocator), []

        def note(peaks: AllocatorPeaks) -> None:
            found.append((peaks.max_memory_reserved, max(peaks.max_memory_allocated, run.between_bytes)))

        for index, changes in enumerate(training):  # the last micro-step has no second one
            note(run.micro_step(changes, adds=index % 2 == 1, updates=index in (1, 3, 4)))
            for one in evaluations if index == 3 else ():
                note(run.evaluate(one))
        return found, allocator.allocated_bytes

    found = certify(
        net, make_batch, lengths, "h100", cross_entropy, ADAMW, batch=1, seed=None, accumulation_steps=2,
        evaluation=between, evaluate_every=2,
    )  # fmt: skip
    for row, allocator in zip(found.rows[:2], (CachingAllocator, ExpandableAllocator), strict=True):
        peaks, left = by_hand(allocator(), evaluation)
        assert (row.reserved_bytes, row.allocated_bytes) == tuple(map(max, zip(*peaks, strict=True)))
        assert left == by_hand(allocator(), [])[1]  # evaluations leave nothing


def test_emptying_the_cache_may_hold_where_nothing_else_does() -> None:
    net, draw = LM(layers=3, dim=256, heads=2, vocab=2048), random.Random(3)
    lengths = [draw.choice([64, 128, 256, 384, 512, 768, 1024, 1536, 2048]) for _ in range(40)]
    drawing, how = Drawing(read_lengths(lengths, None), 2), {"loss_fn": cross_entropy, "optimizer": ADAMW}
    steps = SizedStep(Recordings(net, make_batch, resolve_device("h100"), how).at, {(2, 64), (2, 2048)})

    def rows(room_bytes: int) -> list[WholeRun]:
        room, shapes = Room(room_bytes, True), drawing.shapes()
        return _Runs("LM", steps, room, shapes, drawing, Request())._rows("as it is")

    tight = rows(rows(2**40)[0].allocated_bytes + 12 * MIB)
    assert [(row.allocator, row.fits) for row in tight] == [
        ("default", False), ("expandable", False), ("emptied", True)
    ]  # fmt: skip
    of = {"model": "LM", "device": "h100", "steps": 20, "shapes": 9, "batch": 2, "tokens": None, "largest": 1}
    found = Certificate(**of, rows=tuple(tight), plans=())  # type: ignore[arg-type]
    assert found.advice[0] == "It fits with torch.cuda.empty_cache() after each batch."


@pytest.mark.usefixtures("no_cublas_workspaces")
def test_the_largest_size_is_that_of_playing_every_size() -> None:
    net = LM(layers=1, dim=64, heads=2, vocab=1024)
    drawing, spec = Drawing(read_lengths(drawn(20), None), 5, pad_to_multiple_of=32), resolve_device("h100")
    steps = SizedStep(Recordings(net, make_batch, spec, {"loss_fn": cross_entropy}).at, drawing.shapes())

    def runs(n: int, room_bytes: int) -> _Runs:
        here = drawing.of_size(n)
        return _Runs("LM", steps, Room(room_bytes, True), here.shapes(), here, Request())

    needs = {n: max(row.needs for row in runs(n, 2**40)._rows("as it is")[:1]) for n in range(1, 6)}
    assert len(set(needs.values())) > 2
    for room in {need - 1 for need in needs.values()}:  # 5 does not fit, and is not looked for
        fits = [n for n in needs if n < 5 and runs(n, room)._rows("as it is")[0].fits]
        assert runs(5, room)._largest_size() == max(fits, default=0)


class WithPositions(LM):
    """Slices a table of positions. At its full length that is no slice, but an alias."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward((tokens + torch.arange(64)[None][:, : tokens.shape[1]]) % 64)


@pytest.mark.parametrize(
    ("shape", "net"),
    [(shape, model()) for shape in ((3, 70), (5, 1))]
    + [(shape, WithPositions(2, 32, 2, 64)) for shape in ((3, 64), (3, 40))],
)
def test_a_step_of_any_shape_equals_its_recording(shape: tuple[int, int], net: LM) -> None:
    recordings = []

    def record(n: int, seq: int) -> sacplan.Profile:
        recordings.append((n, seq))
        return sacplan.profile(net, make_batch(n, seq), cross_entropy, ADAMW, device="cpu")

    computed, recorded = SizedStep(record, [(4, 64), (4, 1), shape]).at(*shape), record(*shape)
    assert computed.recorded.storage_bytes == recorded.recorded.storage_bytes
    assert computed.peak_bytes == recorded.peak_bytes
    assert computed.fingerprint == recorded.fingerprint
    assert (recordings.count(shape) == 1) == (
        shape not in ((5, 1), (3, 64))
    )  # most are not recorded themselves


class Reader(LM):
    """Reads tokens behind the patches of an image, with one position interpolated for each patch."""

    def __init__(self) -> None:
        super().__init__(2, 32, 2, 64)
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.positions = nn.Parameter(torch.zeros(1, 32, 6, 6))

    def forward(self, tokens: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        seen = self.patches(images)
        seen = seen + F.interpolate(self.positions, size=seen.shape[-2:], mode="bilinear")
        h = torch.cat([seen.flatten(2).mT, self.embed(tokens)], 1)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h[:, -tokens.shape[1] :]))


def read_and_seen(n: int, seq: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(n, seq, dtype=torch.long), torch.zeros(n, 3, height, width)


def reading_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(*batch).flatten(0, 1), batch[0].flatten())


def collated(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, images = zip(*samples, strict=True)
    height, width = (max(image.shape[d] for image in images) for d in (1, 2))
    padded = [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    return pad_sequence(list(tokens), batch_first=True), torch.stack(padded)


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", [24, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_a_run_on_texts_with_images_of_many_sizes(n_steps: int) -> None:
    rng = np.random.default_rng(0)
    heights = 8 * rng.integers(3, 13, 2 * n_steps)
    widths = heights - 8 * rng.integers(0, 3, 2 * n_steps)
    sizes = np.stack([rng.integers(4, 40, 2 * n_steps), heights, widths], axis=1)
    samples: Any = [tuple(one[0] for one in read_and_seen(1, *size)) for size in sizes.tolist()]

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(samples, 2, shuffle=True, generator=generator, collate_fn=collated)

    def peak(plans: Sequence[sacplan.Plan] = ()) -> int:
        # The peak lies in the forward pass, in which the loop holds the loss of the step before, a float.
        return max(run_peaks(Reader(), iter(loader()), n_steps, ADAMW, reading_loss, plans)) - 4

    how: dict[str, Any] = {"loss_fn": reading_loss, "optimizer": ADAMW}
    (whole,) = certify(Reader(), read_and_seen, loader(), "cpu", **how).rows
    assert whole.allocated_bytes == peak()
    budget = f"{int(0.85 * whole.allocated_bytes)}B"
    found = certify(Reader(), read_and_seen, sizes, "cpu", budget=budget, batch=2, buckets=3, **how)
    plain, one, several = found.rows
    assert plain.allocated_bytes == whole.allocated_bytes
    assert plain.allocated_at == whole.allocated_at
    assert len(whole.allocated_at.shape) == 4
    assert one.fits
    assert several.fits
    assert 0 < several.recompute_flops < one.recompute_flops
    assert peak([plan for _, plan in found.plans]) == several.allocated_bytes <= several.limit_bytes


class Halving(nn.Sequential):
    """Halves height and width three times."""

    def __init__(self) -> None:
        halves = (nn.Conv2d(3 * 4**i, 3 * 4 ** (i + 1), 3, 2, 1) for i in range(3))
        super().__init__(*(nn.Sequential(half, nn.ReLU()) for half in halves))


@pytest.mark.parametrize(
    ("device", "shape", "is_computed"),
    [
        ("h100", (3, 40, 72), True),
        ("h100", (1, 72, 40), True),
        ("h100", (3, 44, 72), False),
        ("h100", (2, 72, 41), False),
        ("cpu", (3, 40, 72), False),
    ],
)
def test_a_step_on_images_of_any_size_equals_its_recording(
    device: str, shape: tuple[int, ...], is_computed: bool
) -> None:
    """Also where three halves of a height are no whole number, and with the CPU's kernels, which follow no line."""
    recordings = []

    def record(*shape: int) -> sacplan.Profile:
        recordings.append(shape)
        n, height, width = shape
        return sacplan.profile(Halving(), torch.zeros(n, 3, height, width), optimizer=ADAMW, device=device)

    steps = SizedStep(record, [(4, 96, 96), (4, 64, 80), (4, 8, 16)])
    computed, recorded = steps.at(*shape), record(*shape)
    assert computed.recorded.storage_bytes == recorded.recorded.storage_bytes
    assert computed.peak_bytes == recorded.peak_bytes
    assert computed.fingerprint == recorded.fingerprint
    assert recordings.count(shape) == 2 - is_computed


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (torch.zeros(3, 7), (3, 7)),
        ({"x": torch.zeros(3, 7, 5), "y": torch.zeros(3)}, (3, 7)),
        ((torch.zeros(2, 3, 8, 9), torch.zeros(2, 8, 9)), (2, 8, 9)),
        ({"input_ids": torch.zeros(2, 5), "pixel_values": torch.zeros(2, 3, 8, 9)}, (2, 5, 8, 9)),
        ({"input_ids": torch.zeros(2, 5), "pixel_values": torch.zeros(40, 588)}, ()),
        (torch.zeros(4), ()),
    ],
)
def test_sizes_are_read_off_a_batch(batch: Any, shape: tuple[int, ...]) -> None:
    assert shape_of_batch(batch) == shape


def test_what_is_left_beside_a_run() -> None:
    net, spec = LM(layers=1, dim=64, heads=2, vocab=1024), resolve_device("h100")
    found = certify(net, make_batch, [256, 64], spec, cross_entropy, batch=1)
    *awake, emptied = found.rows
    for row in awake:
        assert row.left_share is not None
        # The highest share, in hundredths, beside which the run and what is outside of the allocator still fit.
        outside = spec.memory_bytes - row.limit_bytes
        for share, fits in ((row.left_share, True), (row.left_share + 0.01, False)):
            assert (outside + row.needs + share * spec.memory_bytes <= spec.memory_bytes) == fits
    # An engine that sleeps while the trainer steps has all but what is there between two steps: less than a step takes,
    # and no less than weights, gradients and the batch.
    assert emptied.left_share is not None
    assert emptied.left_share >= awake[0].left_share
    held = 2 * sum(4 * p.numel() for p in net.parameters()) + 8 * 256
    idle = emptied.limit_bytes - (emptied.left_share - 0.01) * spec.memory_bytes
    assert idle >= held
    (tight,) = certify(net, make_batch, [256, 64], spec, cross_entropy, batch=1, budget="1GiB").rows
    assert tight.left_share is None


def test_batches_are_those_of_the_rules() -> None:
    lengths = read_lengths([5, 9, 2, 7, 3], None)
    assert Drawing(lengths, 2, seed=None).shapes() == [(2, 9), (2, 7), (1, 3)]
    assert Drawing(lengths, 2, seed=None, drop_last=True).shapes() == [(2, 9), (2, 7)]
    assert Drawing(lengths, 2, seed=None, pad_to_multiple_of=8).shapes() == [(2, 16), (2, 8), (1, 8)]
    assert Drawing(lengths, 2, seed=None, pack=10).shapes() == [(2, 10), (1, 10)]
    assert Drawing(lengths, None, tokens=18, seed=None).shapes() == [(2, 9), (2, 7), (1, 3)]
    assert len(Drawing(lengths, 2, epochs=3).shapes()) == 9
    images = read_lengths({(8, 3): 1, (4, 9): 2}, None)
    assert Drawing(images, 2, seed=None).shapes() == [(2, 8, 9), (1, 4, 9)]
    assert Drawing(images, None, tokens=72, seed=None).shapes() == [(1, 8, 3), (2, 4, 9)]
    assert Drawing(((4,),) * 6, 3, seed=1).shapes() == [(3, 4)] * 2


def test_a_data_loader_is_read_for_its_shapes() -> None:
    net, lengths = model(), drawn(12)
    generator = torch.Generator().manual_seed(0)
    loader = loader_of(lengths, generator)
    before, state = generator.get_state(), torch.get_rng_state()
    read = certify(net, make_batch, loader, "cpu", cross_entropy, ADAMW)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), state)
    counted = certify(net, make_batch, lengths, "cpu", cross_entropy, ADAMW, batch=4)
    assert read.rows == counted.rows
    with pytest.raises(PlanError, match="pack= with a data loader"):
        certify(model(), make_batch, loader, "cpu", pack=64)


@pytest.mark.parametrize(
    ("lengths", "how", "said"),
    [
        ([], {"batch": 2}, "lengths is empty"),
        ([3, 0, 4], {"batch": 2}, r"lengths\[1\] is 0, and a sample has 1 token or more"),
        (
            {64: 2, 128: 1},
            {"batch": 2, "longest": 100},
            r"lengths\[2\] is 128, and the model has 100 positions",
        ),
        ({64: -1}, {"batch": 2}, "lengths cannot be read as integers"),
        ({64: 2**30}, {"batch": 2}, "they count more than 16,777,216 samples"),
        ([4], {"batch": 2, "epochs": 2**30}, "Give fewer epochs"),
        ([4], {"batch": 2, "seed": -1}, "seed=-1 must be from 0"),
        ([1.5, 2.0], {"batch": 2}, "must be integers in one dimension"),
        ([[3, 4], [5]], {"batch": 2}, "lengths cannot be read as integers"),
        ([[3, 4], [5, 0]], {"batch": 2}, r"lengths\[1\] is 5 x 0, and"),
        ([[3, 4]], {"batch": 2, "pack": 8}, "one length for each sample"),
        ([4], {}, "give one of them"),
        ([4], {"batch": 2, "tokens": 8}, "give one of them"),
        ([4], {"batch": 0}, "batch=0 must be 1 or more"),
        ([4], {"tokens": 3}, "the longest sample has 4"),
        ([4], {"pack": 8, "tokens": 8}, "neither tokens="),
        ([4], {"batch": 1, "pack": 200, "longest": 100}, "a batch has 200 tokens in a row"),
        ([4], {"batch": 2, "drop_last": True}, "1 samples make no batch of 2"),
        ([4], {"tokens": 8, "buckets": 2}, "buckets=2, tokens=8"),
        ([4], {"batch": 2, "evaluation": [4]}, "evaluate_every=None"),
        ([4], {"batch": 2, "evaluate_every": 5}, "evaluate_every=5: give the lengths"),
        ([4], {"batch": 2, "evaluation": [4], "evaluate_every": 0}, "1 or more"),
        ([4], {"batch": 2, "evaluation": [4], "evaluate_every": 1, "evaluation_batch": 0}, "batch=0 must be"),
        ([4], {"batch": 2, "evaluation": [4], "evaluate_every": 1, "techniques": ["offload"]}, "host copies"),
        ([4], {"batch": 1, "rule": "longest"}, "unexpected keyword argument 'rule'"),
    ],
)
def test_what_is_no_run_is_refused(lengths: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        certify(model(), make_batch, lengths, "cpu", **how)


def qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {
        "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    tokens = {
        "image_token_id": 60,
        "vision_start_token_id": 61,
        "vision_end_token_id": 62,
        "video_token_id": 63,
    }
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config)


def illustrated(n: int, text: int, height: int, width: int) -> dict[str, torch.Tensor]:
    """Texts with an image of so many patches each, four of which are a token."""
    patches = height * width
    ids = torch.ones(n, 2 + patches // 4 + text, dtype=torch.long)
    ids[:, 1], ids[:, 2 : 2 + patches // 4] = 61, 60
    return {
        "input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": (ids == 60).int(),
        "pixel_values": torch.zeros(n * patches, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, height, width]] * n),
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_of_qwen2_vl_on_images_of_many_sizes() -> None:
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(8, 60)), *(2 * rng.integers(2, 9, 2)).tolist()) for _ in range(8)]
    peaks = run_peaks(qwen(), (illustrated(1, *size) for size in sizes), len(sizes), ADAMW)
    (row,) = certify(qwen(), illustrated, sizes, "cpu", optimizer=ADAMW, batch=1, seed=None).rows
    assert row.allocated_bytes == max(peaks)
    assert row.allocated_at.step == peaks.index(max(peaks))
