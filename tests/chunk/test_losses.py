"""Steps whose loss runs in slices, against the plain step: losses, and what people do with logits and losses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.errors import ChunkError
from tests.support.chunks import VOCAB, allocations, chunked, close, loops_of, step
from tests.support.slow import slow_after
from tests.zoo.language_models import LM, Tempered, tokens
from tests.zoo.language_models import cross_entropy as plain_loss
from tests.zoo.layers import FromFunction

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture
def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=1, dim=32, heads=2, vocab=VOCAB)


@pytest.fixture
def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return tokens(2, 48, VOCAB)


# --- losses outside of the model


def shifted(model: nn.Module, x: torch.Tensor, ignored: int = -100, **how: object) -> torch.Tensor:
    logits, labels = model(x)[:, :-1], x.masked_fill(x % 3 == 0, ignored)[:, 1:]
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.flatten(), ignore_index=ignored, **how)  # type: ignore[arg-type]


def transposed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), x)


def weighted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, VOCAB)
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten(), weight=weight)


def with_z_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x).float()
    z = logits.logsumexp(-1)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten()) + 1e-3 * (z**2).mean()


def by_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = x % 4 != 0
    losses = F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="none").view_as(x)
    return (losses * mask).sum() / mask.sum()


def target(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(9)
    return torch.randn(*x.shape, VOCAB)


def against_a_teacher(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    student, teacher = F.log_softmax(model(x) / 2, -1), F.log_softmax(target(x) / 2, -1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def smooth(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(model(x), target(x))


def picked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens, as in preference losses."""
    scores = model(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1)
    first, second = scores.sum(-1)
    return -F.logsigmoid(0.1 * (first - second))


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()),
    "shifted and ignored": shifted,
    "label smoothing": lambda m, x: shifted(m, x, label_smoothing=0.1),
    "smoothing and another ignored": lambda m, x: shifted(m, x, 5, label_smoothing=0.1),
    "sum": lambda m, x: shifted(m, x, reduction="sum"),
    "z-loss": with_z_loss,
    "by token": by_token,
    "distilled": against_a_teacher,
    "squared": lambda m, x: F.mse_loss(m(x), target(x)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("slices", "device"), slow_after(1, [(3, "h100"), (8, "cpu")]))
def test_a_loss_outside_of_the_model(
    model: LM, batch: torch.Tensor, name: str, slices: int, device: str
) -> None:
    plain = step(model, batch, LOSSES[name])
    with chunked(model, slices=slices):
        got = step(model, batch, LOSSES[name])
        assert loops_of(model) == 1
    close(got, plain, near=("head.",))
    assert_predicted(model, batch, LOSSES[name], slices, device)


def assert_predicted(model: nn.Module, batch: torch.Tensor, loss_fn: Loss, slices: int, device: str) -> None:
    """What the slices are said to take is what a fake step takes."""
    profile = sacplan.profile(model, batch, loss_fn, device=device)
    plan = plan_with(profile, [Chunk("head", "rest", slices, 1)])
    seen = sacplan.verify(model, batch, plan, loss_fn)
    assert not seen.differences
    assert seen.peak_bytes == plan.peak_bytes
    assert seen.step_ms == pytest.approx(plan.planned_ms, rel=1e-6)


@pytest.mark.parametrize(("loss_fn", "loops"), [(weighted, 1), (picked, 2), (transposed, 1), (smooth, 1)])
def test_a_loss_whose_rows_are_only_close(model: LM, batch: torch.Tensor, loss_fn: Loss, loops: int) -> None:
    """A sum over all slices is a factor of the gradient, or a kernel goes along the sliced dimension."""
    plain = step(model, batch, loss_fn)
    with chunked(model):
        got = step(model, batch, loss_fn)
        assert loops_of(model) == loops
    close(got, plain, near=("",), rtol=2e-6)
    assert_predicted(model, batch, loss_fn, 8, "cpu")


def distilled() -> FromFunction:
    """With a frozen copy of other weights, as for DPO."""
    student, teacher = (
        nn.Sequential(nn.Embedding(VOCAB, 32), nn.LayerNorm(32), nn.Linear(32, VOCAB)) for _ in range(2)
    )
    teacher.requires_grad_(False)
    return FromFunction(lambda self, x: self.student(x), student=student, teacher=teacher)


def preferred(model: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """The loss of DPO: differences of sums of log-probabilities."""

    def summed(scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1).sum(-1)

    with torch.no_grad():
        reference = summed(model.teacher(x))
    better = summed(model(x)) - reference
    return -F.logsigmoid(0.1 * (better[:2] - better[2:])).mean()


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_as_far_from_float64_as_the_plain_step_s(seed: int) -> None:
    """The promise where a loss loses digits by itself: docs/chunks.md, "Which gradients are the same bits"."""
    torch.manual_seed(seed)
    model, x = distilled(), torch.randint(0, VOCAB, (4, 96))
    exact = step(copy.deepcopy(model).double(), x, preferred)

    def error(found: dict[str, torch.Tensor]) -> float:
        del found["loss"]
        return max(float((g.double() - exact[n]).norm() / exact[n].norm()) for n, g in found.items())

    plain = error(step(model, x, preferred))
    for slices in (2, 4, 7, 16):
        with chunked(model, "student.2", slices):
            assert error(step(model, x, preferred)) <= 3 * max(plain, 1e-6)


# --- what people do with logits and losses


def test_logits_that_nobody_reads_are_never_whole(model: LM, batch: torch.Tensor) -> None:
    batch = tokens(2, 64, VOCAB)
    logits_bytes = batch.numel() * VOCAB * 4
    plain_sizes, plain_peak = allocations(lambda: step(model, batch, plain_loss))
    assert max(plain_sizes) == logits_bytes
    with chunked(model, slices=16):
        sizes, peak = allocations(lambda: step(model, batch, plain_loss))
    assert max(sizes) < logits_bytes / 3
    assert plain_peak - peak > 2 * logits_bytes


def test_logits_may_be_read_before_and_after_the_backward_pass(model: LM, batch: torch.Tensor) -> None:
    model.eval()
    expected = model(batch).detach()
    with chunked(model):
        logits = model(batch)
        assert torch.equal(logits.detach() + 0, expected)
        again = model(batch)
        loss = F.cross_entropy(again.flatten(0, 1), batch.flatten())
        predicted = again.argmax(-1)
        accuracy = (predicted == batch).float().mean()
        loss.backward()
        assert torch.equal(predicted, expected.argmax(-1))
        assert accuracy.item() == (expected.argmax(-1) == batch).float().mean().item()
        assert torch.equal(torch.as_tensor(again.detach().numpy()), expected)
        assert torch.equal(torch.tensor(again.tolist()), expected)
        assert repr(again.detach()) == repr(expected)
        assert torch.equal(copy.deepcopy(again.detach()), expected)
        assert again[0, 3, 7].item() == expected[0, 3, 7].item()


def test_logits_of_changed_weights_are_an_error(model: LM, batch: torch.Tensor) -> None:
    with chunked(model):
        logits = model(batch)
        F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
        with torch.no_grad():
            model.head.weight.add_(1)
        with pytest.raises(ChunkError, match="changed in place"):
            logits.sum().item()


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_loss_is_a_number(model: LM, batch: torch.Tensor, when: str) -> None:
    model.eval()
    expected = plain_loss(model, batch).item()
    with chunked(model):
        loss = plain_loss(model, batch)
        if when == "after":
            loss.backward()
        assert loss.item() == float(loss.detach()) == pytest.approx(expected, rel=2e-6)
        assert f"{loss:.3f}" == f"{expected:.3f}"
        assert f"{expected:.3f}"[:4] in str(loss)
        assert (loss.detach() / 2).item() == loss.item() / 2
        running = torch.zeros(())
        running += loss.detach()
        assert running == loss
        if when == "before":
            loss.backward()
        assert loops_of(model) == (2 if when == "before" else 1)


def test_without_gradients_nothing_is_lazy(model: LM, batch: torch.Tensor) -> None:
    with chunked(model), torch.no_grad():
        assert type(model(batch)) is torch.Tensor
    with chunked(model), torch.inference_mode():
        assert type(model(batch)) is torch.Tensor


def test_another_size_than_planned(model: LM) -> None:
    """Slices are of the length that the call has."""
    with chunked(model, slices=7):
        for shape in ((1, 5), (3, 50), (2, 7), (1, 1)):
            x = tokens(*shape, VOCAB)
            got = step(model, x, plain_loss)
            handle = model.head.__dict__.pop("forward")
            close(got, step(model, x, plain_loss), near=("",), rtol=2e-6)
            model.head.__dict__["forward"] = handle


def test_an_input_that_does_not_fit_runs_plainly(model: LM, batch: torch.Tensor) -> None:
    plain = step(model, batch, plain_loss)
    with chunked(model, dim=3) as installed:
        got = step(model, batch, plain_loss)
        assert all(torch.equal(got[n], t) for n, t in plain.items())
        assert "on an input of shape (2, 48, 32)" in str(installed.differences[0])
        installed.forget_differences()
        assert not installed.differences


def test_an_op_without_a_rule_sees_whole_tensors(model: LM, batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).cumsum(1).square().mean()

    plain = step(model, batch, loss_fn)
    with chunked(model) as installed:
        got = step(model, batch, loss_fn)
        assert "aten.cumsum.default on whole tensors" in str(installed.differences[0])
    close(got, plain, near=("head.",), rtol=2e-6)


# --- autograd


@pytest.mark.filterwarnings("ignore:Using backward..:UserWarning")
def test_second_derivatives_are_refused_by_name(model: LM, batch: torch.Tensor) -> None:
    with chunked(model), pytest.raises(ChunkError, match="create_graph"):
        plain_loss(model, batch).backward(create_graph=True)


def test_a_frozen_head(model: LM, batch: torch.Tensor) -> None:
    model.head.requires_grad_(False)
    plain = step(model, batch, plain_loss)
    with chunked(model):
        close(step(model, batch, plain_loss), plain, near=("head.",))


def test_parameters_outside_of_the_module_get_real_gradients(batch: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = Tempered(layers=1, dim=32, heads=2, vocab=VOCAB)
    seen = []
    for p in (model.temperature, model.bias):
        p.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    plain = step(model, batch, plain_loss)
    seen.clear()
    with chunked(model):
        for _ in range(2):  # what watches the gradients is gone after a step
            got = step(model, batch, plain_loss)
            close(got, plain, near=("head.", "temperature", "bias"), rtol=2e-6)
    assert seen == [torch.Tensor] * 4
    assert not model.bias._backward_hooks


def test_the_same_head_twice(model: LM, batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = model.norm(model.embed(x))
        first, second = model.head(h), model.head(h.flip(1))
        loss = F.cross_entropy(first.flatten(0, 1), x.flatten())
        return (loss + F.cross_entropy(second.flatten(0, 1), x.flatten())) / 2

    plain = step(model, batch, loss_fn)
    with chunked(model) as installed:
        close(step(model, batch, loss_fn), plain, near=("head.",))
        assert loops_of(model) == 1  # of the second call
        assert not installed.differences


def test_writing_in_place(model: LM, batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        doubled = logits * 2
        logits.mul_(3).add_(1)
        return F.cross_entropy((logits + doubled).flatten(0, 1), x.flatten())

    plain = step(model, batch, loss_fn)
    with chunked(model):
        close(step(model, batch, loss_fn), plain, near=("head.",))

        def through_a_view(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            logits = model(x) * 1
            logits[:, :, 5:] = -1e4
            return F.cross_entropy(logits.flatten(0, 1), x.flatten())

        with pytest.raises(ChunkError, match="clone"):
            step(model, batch, through_a_view)


def test_writing_to_a_loss(model: LM, batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = plain_loss(model, x)
        before = loss.detach()
        half = before / 2
        loss /= 4
        assert before.item() == loss.item()
        assert half.item() == pytest.approx(2 * loss.item())
        return loss

    model.eval()
    plain = step(model, batch, loss_fn)
    with chunked(model):
        close(step(model, batch, loss_fn), plain, near=("head.",))
        loss = plain_loss(model, batch)
        loss /= 4
        loss.backward()
        logged = loss.detach()
        logged.mul_(3)
        assert loss.item() == logged.item() == pytest.approx(3 * plain["loss"].item())


def test_hooks_fire_once_and_see_what_they_would(model: LM, batch: torch.Tensor) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(*args: object) -> None:
            tensor = args[-1]
            while isinstance(tensor, tuple):
                tensor = tensor[0]
            seen.append((name, tuple(tensor.shape)))

        return hook

    head = model.head
    handles = [
        head.register_forward_pre_hook(note("pre")),
        head.register_forward_hook(note("forward")),
        head.register_full_backward_hook(note("backward")),
        head.register_full_backward_pre_hook(note("backward pre")),
        head.weight.register_hook(note("gradient")),
        head.weight.register_post_accumulate_grad_hook(note("accumulated")),
        model.norm.register_full_backward_hook(note("norm")),
    ]
    plain, expected = step(model, batch, plain_loss), list(seen)
    seen.clear()
    with chunked(model):
        got = step(model, batch, plain_loss)
        assert loops_of(model) == 1
    close(got, plain, near=("head.",))
    assert sorted(seen) == sorted(expected)
    assert len({name for name, _ in seen}) == len(handles) == len(seen)


def test_a_hook_that_changes_the_gradient_of_logits(model: LM, batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        logits.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
        logits.retain_grad()
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())

    plain = step(model, batch, loss_fn)
    with chunked(model):
        close(step(model, batch, loss_fn), plain, near=("head.",))


def test_saved_tensor_hooks_around(model: LM, batch: torch.Tensor) -> None:
    plain = step(model, batch, plain_loss)
    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
        torch.autograd.graph.save_on_cpu(),
    ):
        with chunked(model), hooks:
            close(step(model, batch, plain_loss), plain, near=("head.",))
