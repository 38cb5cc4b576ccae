"""A plan in Lightning's Trainer: same fit, the predicted peak, and nothing left behind."""

from __future__ import annotations

import collections
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sacplan
from tests.support.plans import discarding

L = pytest.importorskip("lightning")

from sacplan.integrations.lightning import PlanCallback, profile_trainer, step_arguments  # noqa: E402
from tests.support.lightning import quiet_trainer  # noqa: E402
from tests.support.slow import slow_after  # noqa: E402
from tests.support.steps import bit_equal  # noqa: E402
from tests.zoo.language_models import LM  # noqa: E402

VOCAB = 128


class Module(L.LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.model = LM(layers=2, dim=32, heads=2, vocab=VOCAB)
        self.automatic_optimization = not manual
        self.losses: list[torch.Tensor] = []

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.automatic_optimization:
            loss = self.loss(batch)
        else:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def loader(batch_size: int = 8) -> Any:
    tokens = torch.randint(0, VOCAB, (64, 32), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(tokens, batch_size=batch_size)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture
def module() -> Module:
    torch.manual_seed(0)
    return Module()


def trainer(*callbacks: Any, **options: Any) -> Any:
    return quiet_trainer(*callbacks, **{"max_steps": 3} | options)


def fit(module: Module, *callbacks: Any, **options: Any) -> list[torch.Tensor]:
    """Losses and weights after the fit; validation comes before it and every two batches."""
    module.losses.clear()
    torch.manual_seed(5)
    trainer(*callbacks, val_check_interval=2, **options).fit(module, loader(), loader())
    return [*module.losses, *module.parameters()]


def planned_modules(module: torch.nn.Module) -> list[str]:
    return [fqn for fqn, m in module.named_modules() if "forward" in vars(m)]


@pytest.mark.parametrize(
    "options",
    slow_after(
        1,
        [
            {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
            {},
            {"precision": "bf16-mixed"},
            {"accumulate_grad_batches": 2},
        ],
    ),
    ids=lambda options: "+".join(options) or "plain",
)
def test_a_planned_fit_is_the_same_fit_in_the_predicted_memory(
    module: Module, options: dict[str, Any]
) -> None:
    plain = copy.deepcopy(module)
    arguments = step_arguments(trainer(**options), module, loader())
    profile = sacplan.profile(**arguments, device="cpu")
    plan = sacplan.plan(profile, "70%", solver="greedy")
    assert plan.units
    assert sacplan.verify(**arguments, plan=plan).peak_bytes == plan.peak_bytes

    slack = (
        4 * 8 * 32 * options.get("accumulate_grad_batches", 1) * 8
    )  # batches that the two others do not hold
    observer = PlanCallback(sacplan.plan(profile, "200%"))
    expected = fit(plain, observer, **options)
    assert max(observer.peaks_bytes) == pytest.approx(profile.peak_bytes, abs=slack)
    callback = PlanCallback(plan)
    assert bit_equal(fit(module, callback, **options), expected)
    assert max(callback.peaks_bytes) == pytest.approx(plan.peak_bytes, abs=slack)
    assert len(callback.peaks_bytes) == 2 * options.get("accumulate_grad_batches", 1)
    assert not planned_modules(module)


def test_manual_optimization(module: Module) -> None:
    module.automatic_optimization = False
    plain = copy.deepcopy(module)
    with pytest.raises(sacplan.errors.TraceError, match=r"optimizes manually.*loss_fn"):
        profile_trainer(trainer(), module, loader())
    profile = sacplan.profile(
        module,
        next(iter(loader())),
        loss_fn=lambda module, batch: module.loss(batch),
        optimizer=module.configure_optimizers(),
        device="cpu",
    )
    plan = sacplan.plan(profile, "70%", solver="greedy")
    callback = PlanCallback(plan)
    assert bit_equal(fit(module, callback), fit(plain))
    assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, abs=256)


def test_a_plan_for_a_part_of_the_module(module: Module) -> None:
    plain = copy.deepcopy(module)
    profile = sacplan.profile(
        module.model,
        next(iter(loader())),
        loss_fn=lambda model, tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
        optimizer=torch.optim.AdamW,
        device="cpu",
        accumulation_steps=2,  # Lightning has the gradients of the step before until the forward pass is over
    )
    plan = sacplan.plan(profile, "75%", solver="greedy")
    assert plan.units
    callback = PlanCallback(plan, submodule="model")
    assert bit_equal(fit(module, callback), fit(plain))
    with pytest.raises(sacplan.errors.PlanMismatch):
        fit(module, PlanCallback(plan))
    with pytest.raises(sacplan.errors.PlanError, match=r"no submodule 'net'; its children are 'model'"):
        fit(module, PlanCallback(plan, submodule="net"))


@pytest.fixture(scope="module")
def plan() -> sacplan.Plan:
    profile = profile_trainer(trainer(), Module(), loader(), device="cpu")
    return sacplan.plan(profile, "70%", solver="greedy")


def test_profiling_does_not_touch_the_module(module: Module) -> None:
    fitting = trainer(precision="bf16-mixed", accumulate_grad_batches=2)
    before = {fqn: dict(vars(m)) for fqn, m in module.named_modules()}
    state = torch.get_rng_state()
    profile_trainer(fitting, module, loader())
    assert module.losses == []
    assert {fqn: dict(vars(m)) for fqn, m in module.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())
    profile_trainer(fitting, module, loader(), device="cpu", trace="real")
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.slow
def test_checkpoints_and_resuming(module: Module, plan: sacplan.Plan, tmp_path: Path) -> None:
    plain = copy.deepcopy(module)

    def saving(name: str) -> Any:
        return L.pytorch.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1)

    def state(name: str) -> dict[str, Any]:
        (path,) = (tmp_path / name).glob("*step=2.ckpt")
        return torch.load(path, weights_only=False)["state_dict"]

    expected = fit(plain, saving("plain"), enable_checkpointing=True, max_steps=4)
    found = fit(module, saving("planned"), PlanCallback(plan), enable_checkpointing=True, max_steps=4)
    assert bit_equal(found, expected)
    assert list(state("planned")) == list(state("plain"))
    assert bit_equal(list(state("planned").values()), list(state("plain").values()))

    resumed, plain = Module(), Module()
    (path,) = (tmp_path / "planned").glob("*step=2.ckpt")
    for m, callbacks in ((resumed, [PlanCallback(plan)]), (plain, [])):
        torch.manual_seed(7)
        trainer(*callbacks, max_steps=4).fit(m, loader(), ckpt_path=path, weights_only=False)
    assert bit_equal(list(resumed.parameters()), list(plain.parameters()))


def test_a_fit_that_fails_leaves_no_plan_behind(module: Module, plan: sacplan.Plan) -> None:
    class Failing(L.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            assert planned_modules(pl_module)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(module, PlanCallback(plan), Failing())
    assert not planned_modules(module)
    assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_a_compiled_model_keeps_its_plan(module: Module, plan: sacplan.Plan) -> None:
    def run(units: Any) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        mine = copy.deepcopy(module)
        callback = PlanCallback(discarding(plan, units, budget_bytes=None), watch_steps=3, tolerance=1.0)
        torch.manual_seed(5)
        mine.model.compile(backend="aot_eager")
        trainer(callback).fit(mine, loader())
        return list(mine.parameters()), callback.peaks_bytes[2]  # the first compiles

    (expected, peak), (found, planned_peak) = run({}), run(plan.discarded)
    assert bit_equal(found, expected)
    assert planned_peak < 0.9 * peak


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Forgetful(Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses = collections.deque(maxlen=0)  # each real step before the measured one would add its own


class AsDict(Module):
    def training_step(self, batch: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": super().training_step(batch, 0), "extra": 1}

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}


class Without(Module):
    def configure_optimizers(self) -> Any:
        return None


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.embed.parameters()), torch.optim.SGD(self.model.head.parameters())]


class Skipping(Module):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None


def test_forms_of_modules_and_batches() -> None:
    fitting = trainer()
    momenta = sum(p.numel() * 4 for p in Module().parameters())
    scheduled = profile_trainer(fitting, Scheduled(), loader(), device="cpu").peak_bytes
    assert profile_trainer(fitting, AsDict(), Data(), device="cpu").peak_bytes == scheduled
    assert (
        scheduled - profile_trainer(fitting, Without(), [next(iter(loader()))], device="cpu").peak_bytes
        >= momenta
    )
    with pytest.raises(sacplan.errors.TraceError, match="made 2 optimizers"):
        profile_trainer(fitting, Two(), loader())
    with pytest.raises(sacplan.errors.TraceError, match="returned NoneType without a loss"):
        profile_trainer(fitting, Skipping(), loader())
    with pytest.raises(sacplan.errors.TraceError, match="no batch"):
        profile_trainer(fitting, Module(), [])


def test_a_module_that_lightning_converts() -> None:
    fitting = trainer(precision="bf16-true")
    with pytest.raises(sacplan.errors.TraceError, match=r"bf16-true.*model\.embed\.weight.*module\.to"):
        profile_trainer(fitting, Module(), loader())
    module = Module().to(torch.bfloat16)
    plan = sacplan.plan(profile_trainer(fitting, module, loader(), device="cpu"), "70%", solver="greedy")
    callback = PlanCallback(plan)
    fit(module, callback, precision="bf16-true")
    assert callback.peaks_bytes[1] == plan.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_step_of_a_compiled_module_is_recorded_compiled() -> None:
    trainer = quiet_trainer()
    batch, how = [torch.randint(0, VOCAB, (4, 64))], {"modules": ["model"], "backend": "aot_eager"}
    asked = profile_trainer(trainer, Forgetful(), batch, device="cpu", compile=how)
    already = Forgetful()
    already.model.compile(backend="aot_eager")
    assert profile_trainer(trainer, already, batch, device="cpu").peak_bytes == asked.peak_bytes
    plan = sacplan.plan(asked, "85%")
    assert plan.units
    seen = sacplan.verify(**step_arguments(trainer, Forgetful(), batch), plan=plan, run="real")
    assert seen.peak_bytes == plan.peak_bytes
    assert seen.within_budget
