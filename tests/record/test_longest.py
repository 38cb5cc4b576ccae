"""The largest batch of a data loader, found from its samples: no batch of any epoch is larger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import sacplan
from sacplan.record.longest import FEW, LongestBatch
from tests.support.steps import mean_square


class Texts(Dataset[torch.Tensor]):
    """Samples of given lengths; counts how often each is looked at."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.looks = [0] * len(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.looks[index] += 1
        torch.rand(1)  # as augmentation does
        return torch.ones(self.lengths[index], dtype=torch.long)


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = pad_sequence(samples, batch_first=True)
    return {"ids": ids, "mask": ids != 0}


def flat(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"ids": torch.cat(samples)[None], "offsets": torch.tensor([0, *map(len, samples)]).cumsum(0)}


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(
    lengths=lengths, rows=st.integers(1, 6), seed=st.integers(0, 3), collate=st.sampled_from([padded, flat])
)
def test_no_batch_of_an_epoch_is_larger(lengths: list[int], rows: int, seed: int, collate: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(Texts(lengths), rows, shuffle=True, collate_fn=collate, generator=generator)
    largest = LongestBatch(loader)()["ids"].shape
    for _ in range(2):
        for batch in loader:
            assert all(n <= most for n, most in zip(batch["ids"].shape, largest, strict=True))


def test_lengths_of_packed_texts_keep_out_no_tokens() -> None:
    """As TRL packs: a row of many short texts has the most elements, and a row of one text the most tokens."""
    rows = [(93, 9), (96, 1), (96, 2), (90, 3)]
    samples = [{"ids": [0] * tokens, "seq_lengths": [1] * texts} for tokens, texts in rows]

    def one_behind_the_other(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.cat([torch.tensor(one[name]) for one in samples])[None] for name in samples[0]}

    batch = LongestBatch(DataLoader(samples, 2, collate_fn=one_behind_the_other))()  # type: ignore[arg-type]
    assert batch["ids"].shape == (1, 192)


def test_it_holds_padding_where_that_changes_no_shape() -> None:
    """A mask without padding is dropped by models, and other kernels run."""
    batch = LongestBatch(DataLoader(Texts([7, 7, 7, 2, 7]), 3, collate_fn=padded))()
    assert batch["ids"].shape == (3, 7)
    assert not batch["mask"].all()
    assert LongestBatch(DataLoader(Texts([7, 7, 7, 2, 7]), 3, collate_fn=flat))()["ids"].shape == (1, 21)


def test_the_loader_and_all_generators_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    data = Texts(list(range(1, 20)))
    loader = DataLoader(data, 4, shuffle=True, collate_fn=padded, generator=generator)
    model = torch.nn.Embedding(2, 8)
    before = torch.get_rng_state(), generator.get_state()
    profile = sacplan.profile(model, loader, lambda m, b: m(b["ids"]).mean(), device="cpu")
    assert profile.fingerprint.batch[0][1] == (4, 19)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    assert sum(data.looks) <= len(data) + 8  # each for its size, and those of two batches


def test_samples_of_one_size_are_not_all_looked_at() -> None:
    data = Texts([5] * 10_000)
    assert LongestBatch(DataLoader(data, 8, collate_fn=padded))()["ids"].shape == (8, 5)
    assert sum(data.looks) <= FEW + 16


def test_batches_of_a_sampler_of_ones_own() -> None:
    """Short samples come in larger batches: the one with the most elements is taken."""

    class ByTokens(BatchSampler):
        def __init__(self, data: Texts) -> None:
            self.data, self.random = data, RandomSampler(data)
            self.epochs = 0

        def __iter__(self) -> Any:
            self.epochs += 1
            batch: list[int] = []
            for i in sorted(self.random, key=lambda i: self.data.lengths[i]):
                if batch and (len(batch) + 1) * self.data.lengths[i] > 24:
                    yield batch
                    batch = []
                batch.append(i)
            yield batch

    data = Texts([2] * 12 + [9, 11, 12, 4, 4, 4, 5, 6])
    sampler = ByTokens(data)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=padded)
    state = torch.get_rng_state()
    largest = LongestBatch(loader)()["ids"].numel()
    assert sampler.epochs == 0  # put back, with the generators
    assert torch.equal(state, torch.get_rng_state())
    assert largest == max(batch["ids"].numel() for batch in loader)


def test_a_set_that_makes_its_own_batches() -> None:
    loader = DataLoader(Texts([3, 9, 4]), batch_size=None)
    assert LongestBatch(loader)().shape == (9,)


def test_a_set_smaller_than_a_batch() -> None:
    assert LongestBatch(DataLoader(Texts([3, 9]), 4, collate_fn=padded))()["ids"].shape == (4, 9)


def test_fit_and_max_batch_take_a_loader() -> None:
    loader = DataLoader([torch.ones(n, 16) for n in (2, 8, 5)], 2, collate_fn=lambda s: pad_sequence(s, True))
    model = torch.nn.Linear(16, 16)
    found = sacplan.fit(model, loader, "cpu", mean_square, "sgd", sizes=False)
    like = sacplan.profile(model, torch.ones(2, 8, 16), mean_square, torch.optim.SGD, device="cpu")
    assert (found.batch, found.rows[0].peak_bytes) == (2, like.peak_bytes)
    most = sacplan.max_batch(model, loader, "64KiB", "cpu", loss_fn=mean_square, at_most=4)
    assert most.batch_size == 4


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.ones(3)])


@pytest.mark.parametrize(
    ("data", "why"), [(Stream(), "no length"), (Texts([]), "empty")], ids=["stream", "empty"]
)
def test_what_cannot_be_looked_at_is_said(data: Any, why: str) -> None:
    with pytest.raises(sacplan.errors.TraceError, match=f"{why}.*largest size"):
        sacplan.profile(torch.nn.Linear(3, 3), DataLoader(data), device="cpu")
