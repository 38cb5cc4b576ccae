"""The classical interface against PyTorch's own trackers and the figure that its example printed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker as TorchMemTracker
from torch.utils.flop_counter import FlopCounterMode

import sacplan
from examples.transformer import Transformer
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

GIB = 2**30


def _watch(model: nn.Module, step) -> sacplan.Graph:  # type: ignore[no-untyped-def]
    trackers = sacplan.MemTracker(), sacplan.RuntimeEstimator(), sacplan.SACEstimator()
    for tracker in trackers:
        with tracker:
            step()
    return sacplan.parse_module_info(sacplan.aggregate_stats(model, *trackers))


def test_the_printed_figure_of_the_seed_example() -> None:
    """PR #137908 printed 2.41 GiB on a GPU; with CUDA's kernels on fake CPU tensors it is 2.4064."""
    with sacplan.fake_device("h100"):
        model, batch = Transformer(), torch.randint(0, 8192, (8, 1024))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        held = None
        tracker = sacplan.MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for i in range(2):
                held = model(batch)
                held.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if i == 0:
                    tracker.reset_mod_stats()
        runtime, sac = sacplan.RuntimeEstimator(), sacplan.SACEstimator()
        with runtime("operator-level-cost-model"):
            model(batch).sum().backward()
        with sac("operator-level-cost-model"):
            model(batch)
        info = sacplan.aggregate_stats(model, tracker, runtime, sac, torch.device("cpu"))
    graph = sacplan.parse_module_info(info)
    peak_bytes, compute_ms = sacplan.get_peak_memory_runtime_baseline(graph)
    assert peak_bytes / GIB == pytest.approx(2.4064, abs=2e-4)
    assert 0.99 * runtime.total_ms < compute_ms < runtime.total_ms  # the loss is outside of the model
    decisions, recompute_ms, planned_bytes = sacplan.sac_milp(graph, memory_budget=1.75)
    assert set(decisions) <= {
        f"layers.{i}" + s for i in range(4) for s in ("", ".attention", ".feed_forward")
    }
    assert planned_bytes <= 1.75 * GIB
    assert 0 < recompute_ms < compute_ms / 3


@pytest.mark.parametrize("optimizer", [False, True])
def test_peak_is_that_of_torchs_tracker(optimizer: bool) -> None:
    def run(tracker, snapshot):  # type: ignore[no-untyped-def]
        with FakeTensorMode():
            model, batch = LM(), tokens()
            adam = torch.optim.Adam(model.parameters(), foreach=True) if optimizer else None

            def step() -> None:
                cross_entropy(model, batch).backward()
                if adam:
                    adam.step()
                    adam.zero_grad()

            step()
            model.zero_grad()
            tracker.track_external(model, batch, *([adam] if adam else []))
            with tracker:
                step()
            return snapshot(tracker)

    ours = run(sacplan.MemTracker("cpu"), lambda t: t.peak_bytes)
    theirs = run(TorchMemTracker(), lambda t: t.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert ours == theirs


def test_flops_are_those_of_torchs_counter() -> None:
    model, batch = LM(), tokens()
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model, batch).backward()
    with sacplan.RuntimeEstimator() as estimator:
        cross_entropy(model, batch).backward()
    assert estimator.flops == counter.get_total_flops()
    assert estimator.mod_runtimes["layers.0"]["fw"] > estimator.mod_runtimes["layers.0.mlp"]["fw"] > 0
    assert estimator.mod_runtimes["layers.0"]["bw"] > 0


def odd() -> nn.Module:
    """Parts called twice, with keywords only, inside a loss, under frozen parameters, without a gradient."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.first(x))
        with torch.no_grad():
            self.ungraded(x)
        return self.keyword(value=self.shared(self.frozen(x)))

    keyword = FromFunction(lambda self, *, value: F.gelu(self.inner(value)), inner=nn.Linear(8, 8))
    return FromFunction(
        forward, first=layer(), shared=layer(), frozen=layer().requires_grad_(False), keyword=keyword,
        ungraded=nn.Sequential(nn.Linear(8, 8)),
    )  # fmt: skip


def test_order_is_the_order_of_execution() -> None:
    model, batch = odd(), torch.randn(4, 8)
    graph = _watch(model, lambda: model(batch).sum().backward())
    assert [n.fqn for n in graph.nodes if not n.is_leaf] == [
        "",
        "first",
        "shared",
        "ungraded",
        "frozen",
        "keyword",
    ]
    assert graph.fw_post_order.index("first") < graph.fw_post_order.index("shared")
    assert graph.fw_post_order[-1] == ""
    with sacplan.MemTracker() as tracker:
        model(batch).sum().backward()
    program = tracker.program
    began = [program.scopes[s].fqn for s in program.backward_order]
    assert [f for f in dict.fromkeys(began) if f in ("first", "shared", "frozen", "keyword")] == [
        "keyword", "shared", "frozen", "first",
    ]  # fmt: skip
    assert "ungraded" not in began
    assert graph["shared"].fw_runtime_per_module > graph["first"].fw_runtime_per_module  # two calls


def test_memory_is_attributed_by_kind() -> None:
    model, batch = LM(), tokens()
    optimizer = torch.optim.Adam(model.parameters())
    cross_entropy(model, batch).backward()
    optimizer.step()
    tracker = sacplan.MemTracker()
    tracker.track_external(model, optimizer, batch)
    with tracker:
        cross_entropy(model, batch).backward()
        optimizer.step()
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    last = tracker.to_frame().iloc[-1]
    assert last["parameter"] == last["gradient"] == n_bytes
    assert last["optimizer_state"] == 2 * n_bytes + 4 * len(list(model.parameters()))
    assert last["other"] == batch.numel() * 8
    assert last["activation"] == 0
    assert set(tracker.to_frame()["phase"]) == {"forward", "backward", "optimizer"}


def test_a_real_backward_after_the_sac_estimator() -> None:
    """On real tensors autograd gets copies, so the user's backward is still right."""
    model, batch = LM(dropout=0.0), tokens()
    cross_entropy(model, batch).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with sacplan.SACEstimator() as sac:
        loss = cross_entropy(model, batch)
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    assert sac.tradeoffs["layers.0"].points
    stats = sac.sac_mod_stats["layers.0"]
    policy = sacplan.get_optimal_checkpointing_policy_per_module(stats, 0.5)
    kept = sum(m for m, keep in zip(stats.memory, policy, strict=True) if keep)
    assert 0 < kept <= 0.5 * sum(stats.memory) + 1


def test_a_module_made_on_the_fly_is_not_counted_as_the_models() -> None:
    model, batch = LM(), tokens()

    def loss_fn(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return nn.CrossEntropyLoss()(m(b).flatten(0, 1), b.flatten())

    profile = sacplan.profile(model, batch, loss_fn=loss_fn)
    assert set(profile.graph.fw_post_order) == {n for n, _ in model.named_modules() if n != "layers"}


def test_estimators_leave_no_hook_behind() -> None:
    model, batch = LM(), tokens()
    with sacplan.SACEstimator():
        model(batch)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
