"""The work of a search is bounded by counts: what cannot run in slices is found out once, and so is what can."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sacplan
from sacplan.solvers.greedy import Greedy
from sacplan.solvers.problem import Problem, Solution
from sacplan.techniques.chunk import rest
from tests.zoo.language_models import cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.SacplanWarning")


class Landmarks(nn.Module):
    """Attention by landmarks (Nystromformer): an inverse by iteration, which cannot run in slices of the tokens."""

    def __init__(self, dim: int, landmarks: int = 4) -> None:
        super().__init__()
        self.qkv, self.landmarks = nn.Linear(dim, 3 * dim), landmarks

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        few_q, few_k = (y.unflatten(1, (self.landmarks, -1)).mean(2) for y in (q, k))
        kernel = (few_q @ few_k.mT).softmax(-1)
        inverse, eye = kernel.mT / kernel.sum(-2).max(), torch.eye(self.landmarks)
        for _ in range(2):
            product = kernel @ inverse
            inverse = inverse @ (2 * eye - product)
        return (q @ few_k.mT).softmax(-1) @ inverse @ ((few_q @ k.mT).softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, mixer: type[nn.Module], dim: int = 16, vocab: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.mixers = nn.ModuleList(mixer(dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            y = y + mixer(norm(y))
        out: Tensor = self.head(y)
        return out


@pytest.mark.slow
def test_rehearsals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rehearsed twice for one step, and few chunks for a step in which others are settled."""
    rehearsed: Counter[Any] = Counter()
    steps: list[Any] = []
    rehearse = rest._rehearsed

    def counted(span: Any, device: Any) -> Any:
        steps.append(span.program)  # alive, so that no other one has its id
        rehearsed[id(span.program), span.chunk] += 1
        return rehearse(span, device)

    monkeypatch.setattr(rest, "_rehearsed", counted)
    torch.manual_seed(0)
    profile = sacplan.profile(Model(Landmarks), torch.randint(0, 32, (4, 16)), cross_entropy, device="cpu")
    sacplan.plan(profile, "smallest", techniques=("recompute", "chunk"))
    assert max(rehearsed.values()) == 1
    assert sum(rehearsed.values()) <= 19


class Counting:
    """A solver that counts how often it is asked."""

    name = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def solve(self, problem: Problem) -> Solution | None:
        self.asked += 1
        return Greedy().solve(problem)

    def smallest(self, problem: Problem) -> Solution:
        self.asked += 1
        return Greedy().smallest(problem)


def test_searches_with_all_techniques_are_bounded() -> None:
    """A wider choice of techniques asks the narrower ones, but not each of them for as long as alone."""
    torch.manual_seed(0)
    profile = sacplan.profile(Model(Landmarks), torch.randint(0, 32, (4, 16)), cross_entropy, device="cpu")
    smallest: dict[tuple[str, ...], int] = {}
    for techniques, most in ((("recompute", "chunk"), 8), (("recompute", "chunk", "offload"), 18)):
        solver = Counting()
        smallest[techniques] = sacplan.plan(profile, "smallest", solver, techniques=techniques).peak_bytes
        assert solver.asked <= most
    alone, together = smallest.values()
    assert together <= alone
