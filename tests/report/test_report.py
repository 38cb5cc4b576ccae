"""Reports: what they say adds up to the peak, byte for byte."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import OrderedDict
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.budget import format_bytes
from sacplan.core.call_sites import ops_of
from sacplan.core.program import Phase, StorageKind
from sacplan.profiling.timeline import timeline_of
from sacplan.report.modules import module_rows
from sacplan.report.panels import Panel
from sacplan.techniques.recompute.rewrite import discarded_ops, recomputed
from tests.support.plans import discarding
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

LAYERS = 4


@pytest.fixture(scope="module", params=["h100", "cpu"])
def case(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A step with dropout and an optimizer; on a CPU recipes keep generator states."""
    return _case(request.param)


@pytest.fixture(scope="module")
def gpu() -> SimpleNamespace:
    case = _case("h100")
    case.frame = sacplan.frontier(case.profile, points=4)
    return case


def _case(device: str) -> SimpleNamespace:
    profile = sacplan.profile(
        LM(layers=LAYERS), tokens(), loss_fn=cross_entropy, optimizer=torch.optim.AdamW, device=device
    )
    smallest = sacplan.plan(profile, "smallest")
    budget = (profile.peak_bytes + 2 * smallest.peak_bytes) // 3
    return SimpleNamespace(profile=profile, plan=sacplan.plan(profile, f"{budget}B"), smallest=smallest)


def _plans(case: SimpleNamespace) -> list[sacplan.Plan | None]:
    return [None, case.plan, case.smallest]


# --- what is alive at the peak ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_alive_adds_up_to_the_peak(case: SimpleNamespace) -> None:
    for plan in _plans(case):
        peak_bytes = case.profile.peak_bytes if plan is None else plan.peak_bytes
        for top in (None, 3, 20):
            frame = sacplan.Report(case.profile, plan).alive_at_peak(top)
            assert frame["bytes"].sum() == peak_bytes
            assert len(frame) <= (top or len(frame)) + 1
        whole = sacplan.Report(case.profile, plan).alive_at_peak(None)
        assert (whole["bytes"] == whole["count"] * whole["each_bytes"]).all()
        assert whole["bytes"].is_monotonic_decreasing


def _first_ops_discarded(profile: sacplan.Profile, count: int | None = None) -> sacplan.Plan:
    """A plan that keeps nothing that the model's first ops make, or all of them, whatever that does to the peak."""
    program = profile.program
    sites = [site for _, _, site in ops_of(program.sequence(program.calls[""][0]))][:count]
    found = profile.footprint({"": dict.fromkeys(sites, 1)})
    return discarding(
        sacplan.plan(profile, "100%"),
        {"": dict.fromkeys(sites, 1)},
        profile,
        peak_bytes=found.peak_bytes,
        recompute_ms=found.recompute_ms,
    )


def test_generator_states_have_their_own_row_on_a_cpu() -> None:
    def noise() -> nn.Module:
        """What it draws is saved; CPU dropout writes in place."""
        return FromFunction(lambda self, x: x * torch.bernoulli(torch.sigmoid(x)))

    model = nn.Sequential(nn.Linear(64, 256), noise(), nn.GELU(), noise(), nn.Linear(256, 8))
    profile = sacplan.profile(model, torch.randn(4096, 64), device="cpu")
    plan = _first_ops_discarded(profile, 3)  # up to the first draw
    frame = sacplan.Report(profile, plan).alive_at_peak(None)
    states = frame[frame["kind"] == "generator state"]["bytes"]
    (size,) = {op.state_bytes for op in profile.program.ops if op.state_bytes}
    assert frame["bytes"].sum() == plan.peak_bytes
    assert states.item() == size


def test_layers_share_a_row(gpu: SimpleNamespace) -> None:
    frame = sacplan.Report(gpu.profile).alive_at_peak(None)
    activations = frame[(frame["kind"] == "activation") & frame["module"].str.startswith("layers.*")]
    assert (activations["count"] % LAYERS == 0).any()
    parameters = frame[(frame["kind"] == "parameter") & (frame["module"] == "layers.*.qkv")]
    assert sorted(parameters["count"]) == [LAYERS, LAYERS]  # weights and biases
    assert set(frame[frame["kind"] == "optimizer state"]["module"]) == {"(optimizer)"}


def test_a_recomputed_tensor_is_called_one() -> None:
    model = nn.Sequential(
        nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 8)
    )
    profile = sacplan.profile(model, torch.randn(8192, 64))
    plan = _first_ops_discarded(profile)
    frame = sacplan.Report(profile, plan).alive_at_peak(None)
    assert frame["bytes"].sum() == plan.peak_bytes
    assert frame[frame["recomputed"]]["bytes"].sum() > 0


def test_a_plan_of_another_profile_is_refused(gpu: SimpleNamespace) -> None:
    other = sacplan.profile(LM(layers=2), tokens(), loss_fn=cross_entropy)
    no_optimizer = sacplan.profile(LM(layers=LAYERS), tokens(), loss_fn=cross_entropy)
    for profile, said in ((other, "other parameters"), (no_optimizer, "device, optimizer or loss")):
        with pytest.raises(sacplan.errors.PlanMismatch, match=said):
            sacplan.Report(profile, gpu.plan)
        with pytest.raises(sacplan.errors.PlanMismatch, match=said):
            sacplan.Report(profile).memory_figure([gpu.plan])


# --- modules ------------------------------------------------------------------------------------------------


def test_the_table_adds_up(case: SimpleNamespace) -> None:
    program = case.profile.program
    saved = {s for s in program.handle_storages if s in program.writer}
    saved = {s for s in saved if program.ops[program.writer[s]].phase == Phase.FORWARD}
    saved_bytes = sum(program.storage_bytes[s] for s in saved)
    without = sacplan.Report(case.profile).module_table()
    assert without["kept_bytes"].sum() == saved_bytes
    assert without["discarded_bytes"].sum() == 0
    assert without["forward_ms"].sum() == pytest.approx(case.profile.forward_ms)
    for plan in (case.plan, case.smallest):
        table = sacplan.Report(case.profile, plan).module_table()
        assert table["recompute_ms"].sum() == pytest.approx(plan.recompute_ms)
        assert table["recompute_share"].sum() == pytest.approx(1)
        # what recipes start from is held besides what autograd asked for
        assert table["kept_bytes"].sum() + table["discarded_bytes"].sum() >= saved_bytes
        assert table["discarded_bytes"].sum() > 0
        assert ((table["why"] == "discarded") == (table["discarded_bytes"] > table["kept_bytes"])).all()


def test_kept_and_discarded_are_what_is_alive_when_the_backward_begins(case: SimpleNamespace) -> None:
    """Of the model's own tensors; the plan's figures against those of the step without it."""
    program = case.profile.program

    def alive(decisions: dict) -> int:
        line = timeline_of(recomputed(program, decisions))
        return int(line["total_bytes"][line.index[line["phase"] == "backward"][0] - 1])

    table = sacplan.Report(case.profile, case.plan).module_table()
    states = sum(program.ops[i].state_bytes for i in discarded_ops(program, case.plan.discarded))
    without = sacplan.Report(case.profile).module_table()
    saved = int(without["kept_bytes"].sum() - table["kept_bytes"].sum())
    assert abs(alive({}) - alive(case.plan.discarded) - saved) <= states


def test_reasons() -> None:
    parts = {
        "inner": nn.Linear(64, 256),
        "sum": FromFunction(lambda self, x: torch.cumsum(x, 1)),  # on CUDA its bits vary
        "act": nn.GELU(),
        "drop": nn.Identity(),
        "out": nn.Linear(256, 8),
    }
    profile = sacplan.profile(nn.Sequential(OrderedDict(parts)), torch.randn(4096, 64))
    why = sacplan.Report(profile, sacplan.plan(profile, "smallest")).module_table()["why"]
    assert why["drop"] == "keeps nothing for the backward pass"
    assert why["sum"] == "kept: cumsum must not run a second time"
    assert why["act"] == "kept"


def test_a_tensor_written_in_place_is_said_to_be() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.data.mul_(2)  # autograd counts no version for that, so what it was before cannot be told apart
        return self.b(torch.nn.functional.gelu(h))

    model = FromFunction(forward, a=nn.Linear(64, 256), b=nn.Linear(256, 8))
    profile = sacplan.profile(model, torch.randn(4096, 64))
    why = {row.module: row.why for row in module_rows(profile)}
    assert why["a"] == "kept: mul_ writes it in place"


# --- timeline -----------------------------------------------------------------------------------------------


def test_the_timeline_is_the_step_on_a_time_axis(case: SimpleNamespace) -> None:
    for plan in _plans(case):
        decisions = plan.discarded if plan else {}
        found = case.profile.footprint(decisions)
        panel = Panel("", recomputed(case.profile.program, decisions), None)
        line, by_kind = panel.timeline, panel.timeline[[kind.name.lower() for kind in StorageKind]]
        assert panel.peak_bytes == found.peak_bytes
        assert (by_kind.sum(axis=1) == line["total_bytes"]).all()
        assert (by_kind >= 0).all(axis=None)
        assert panel.end_ms == pytest.approx(case.profile.program.step_ms + found.recompute_ms)
        again = [case.profile.program.ops[i].name for i in found.again]
        assert line["op"][line["recomputed"]].tolist() == again
        assert line["start_ms"].is_monotonic_increasing
        assert [phase for phase, _, _ in panel.phase_spans()] == ["forward", "backward", "optimizer"]


# --- figures ------------------------------------------------------------------------------------------------


def test_the_stack_is_what_is_alive(gpu: SimpleNamespace) -> None:
    figure = sacplan.Report(gpu.profile, gpu.plan).memory_figure()
    assert len(figure.axes) == 2
    for axis, decisions in zip(figure.axes, ({}, gpu.plan.discarded), strict=True):
        line = timeline_of(recomputed(gpu.profile.program, decisions))
        highest = line["total_bytes"].max()
        drawn = {artist.get_label(): artist for artist in axis.lines}
        alive = drawn["alive"].get_ydata() * 2**20
        assert np.allclose(alive[:-1], line["total_bytes"], atol=1)
        top = max(area.get_path().vertices[:, 1].max() for area in axis.patches)
        assert top * 2**20 == pytest.approx(highest)
        assert drawn[f"budget {format_bytes(gpu.plan.budget_bytes)}"].get_ydata()[0] * 2**20 == pytest.approx(
            gpu.plan.budget_bytes
        )
        assert drawn["peak"].get_ydata()[0] * 2**20 == pytest.approx(highest)
        assert axis.get_xlim()[1] >= gpu.profile.program.step_ms + gpu.plan.recompute_ms
    assert len(sacplan.Report(gpu.profile).memory_figure().axes) == 1


def test_the_frontier_shows_every_row(gpu: SimpleNamespace) -> None:
    figure = sacplan.Report(gpu.profile, gpu.plan, gpu.frame).frontier_figure()
    (axis,) = figure.axes
    drawn = {str(artist.get_label()): artist for artist in axis.lines}
    for solver, rows in gpu.frame[gpu.frame["status"] != "policy"].groupby("solver"):
        assert sorted(drawn[solver].get_xdata() * 2**20) == pytest.approx(sorted(rows["peak_bytes"]))
        assert sorted(drawn[solver].get_ydata() / 100) == pytest.approx(sorted(rows["recompute_share"]))
    (legend,) = figure.legends
    named = {text.get_text() for text in legend.get_texts()}
    policies = {*gpu.frame["solver"][gpu.frame["status"] == "policy"]}
    assert named >= {*policies, "this plan"}
    marks = {line.get_label(): line.get_marker() for line in axis.lines if line.get_label() in policies}
    assert len({*marks.values()}) == len(policies)  # each can be told from the others
    assert not axis.texts  # on the lines, there is no room for any
    solvers = named - {"lower bound", "this plan", *policies}
    assert solvers == {*gpu.frame["solver"][gpu.frame["status"] != "policy"]}
    assert drawn["this plan"].get_xdata()[0] * 2**20 == pytest.approx(gpu.plan.peak_bytes)


def test_what_cannot_be_drawn_is_refused(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sacplan.errors.PlanError, match="'recompute_share'"):
        sacplan.Report(gpu.profile, None, gpu.frame.drop(columns="recompute_share"))
    with pytest.raises(sacplan.errors.PlanError, match="no rows"):
        sacplan.Report(gpu.profile, frontier=gpu.frame.iloc[:0])
    with pytest.raises(sacplan.errors.PlanError, match="has no frontier"):
        sacplan.Report(gpu.profile).frontier_figure()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (sacplan.Report.memory_figure, lambda report: report.html):
        with pytest.raises(sacplan.errors.PlanError, match=r"pip install 'sacplan\[plot\]'"):
            draw(sacplan.Report(gpu.profile))


# --- page ---------------------------------------------------------------------------------------------------

_VOID = {"meta", "br", "link", "input", "img", "hr", "path", "polyline"}


class _Checker(HTMLParser):
    """Tags that close, and what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        urls = [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.fetched += [url for url in urls if not url.startswith("data:")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def _read(html: str) -> tuple[_Checker, str]:
    checker = _Checker()
    checker.feed(html)
    assert checker.open == []
    return checker, " ".join(" ".join(checker.text).split())


def test_the_page_is_whole_and_fetches_nothing(gpu: SimpleNamespace, tmp_path: Path) -> None:
    path = sacplan.Report(gpu.profile, gpu.plan, gpu.frame).write(tmp_path / "report.html")
    html = path.read_text(encoding="utf-8")
    checker, text = _read(html)
    assert not checker.fetched
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(set(ids)) == len(ids)
    assert {i for i in re.findall(r'"#(\w+)"|url\(#(\w+)\)', html) for i in i if i} <= set(ids)
    assert "$" not in text
    for said in (
        "LM on h100",
        "Memory over the step",
        "Frontier",
        "Modules",
        "no schedule with this peak takes less",
        "Alive at the peak",
        "layers.*",
    ):
        assert said in text
    for solver in gpu.frame["solver"]:
        assert solver in text


def test_the_page_needs_neither_plan_nor_frontier(gpu: SimpleNamespace) -> None:
    _, text = _read(sacplan.Report(gpu.profile).html)
    assert "without a plan" not in text.partition("Modules")[0]
    assert "Frontier" not in text
    unplanned = sacplan.plan(gpu.profile, "100%")
    _, text = _read(sacplan.Report(gpu.profile, unplanned).html)
    assert "0.0% less than" in text


def test_names_of_modules_are_text() -> None:
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Linear(64, 64))
    model.add_module("a&b", nn.GELU())
    model.add_module("out", nn.Linear(64, 8))
    html = sacplan.Report(sacplan.profile(model, torch.randn(4096, 64))).html
    _, text = _read(html)
    assert "<script>alert(1)</script>" in text
    assert "<script>alert" not in html
    assert "a&amp;b" in html


def test_assumptions_are_shown(gpu: SimpleNamespace) -> None:
    profile = dataclasses.replace(gpu.profile, rules=("a mask is taken to select half of its values",))
    assert "a mask is taken to select half" in _read(sacplan.Report(profile).html)[1]
