"""The time that computation waits is that of a simulation, event by event, written apart from the planner."""

from __future__ import annotations

import dataclasses
import heapq

import pytest
import torch

import sacplan
from sacplan._device.links import Link
from sacplan._offload.executor.parcels import Parcel
from sacplan._offload.timing import PLANNED_SHARE
from sacplan._program.program import Event, Program
from sacplan._techniques import rewritten
from tests.support.steps import grads_of
from tests.zoo import language_models as models


def simulated_ms(program: Program, link: Link) -> float:
    """Return the time of a step with two queues of copies, by a loop over what happens next.

    Only the order of the ops, their own times and the sizes of the copies are taken from the program.
    """
    ops = [program.ops[arg] for code, arg in program.events if code == Event.OP]
    rate = PLANNED_SHARE * link.bandwidth_bytes_per_s / 1e3
    now, at = 0.0, 0
    waiting: dict[str, list[tuple[int, float]]] = {"out": [], "back": []}  # (storage, ms that it takes)
    running: dict[str, int] = {}
    done: set[int] = set()
    happens: list[tuple[float, str]] = []  # when a copy of a queue ends

    def begin(queue: str) -> None:
        if queue in running or not waiting[queue]:
            return
        storage, ms = waiting[queue].pop(0)
        running[queue] = storage
        heapq.heappush(happens, (now + ms, queue))

    def pass_to(time: float) -> None:
        nonlocal now
        while happens and happens[0][0] <= time:
            now, queue = heapq.heappop(happens)
            done.add(running.pop(queue))
            begin(queue)
        now = max(now, time)

    while at < len(ops):
        op = ops[at]
        at += 1
        if op.name in ("sacplan.copy_to_host", "sacplan.copy_to_device"):
            queue = "out" if op.name.endswith("host") else "back"
            source = op.reads[0] if queue == "out" else op.writes[0]
            waiting[queue].append((op.writes[0], program.storage_bytes[source] / rate + link.latency_s * 1e3))
            begin(queue)
        elif op.name.startswith("sacplan.wait"):
            while op.reads[0] not in done:
                pass_to(happens[0][0])
        else:
            pass_to(now + op.time_ms)
    return now


@pytest.mark.parametrize(("gb_per_s", "share"), [(4, "85%"), (48, "80%"), (48, "60%")])
def test_a_plan_takes_as_long_as_its_simulation(gb_per_s: float, share: str) -> None:
    torch.manual_seed(0)
    model, batch = models.LM(layers=4, vocab=32), torch.randint(0, 32, (16, 128))
    link = Link("of the test", gb_per_s * 1e9, 2.5e-6)
    spec = dataclasses.replace(sacplan.DeviceSpec.of("h100 without workspaces"), host_link=link)
    profile = sacplan.profile(model, batch, models.cross_entropy, device=spec)
    plan = sacplan.plan(profile, share, techniques=("offload",))
    assert plan.offloaded
    program = rewritten(profile.program, plan.decisions, profile.spec)
    assert plan.step_ms + plan.added_ms == pytest.approx(simulated_ms(program, link), rel=1e-6)
    if gb_per_s < 10:  # a slow link is waited for
        assert plan.added_ms > 0


def test_copies_back_that_begin_together_go_in_the_order_in_which_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, batch = models.LM(layers=3, vocab=32), torch.randint(0, 32, (8, 32))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="cpu")
    plan = sacplan.plan(profile, "60%", techniques=("recompute", "offload"))
    program = rewritten(profile.program, plan.decisions, profile.spec)
    sent: list[int] = []  # the copies on the host, in the order in which they are made
    source: dict[int, int] = {}  # by copy on the device, its place among these
    begun, needed = [], []
    together: list[list[int]] = [[]]  # copies back with no other op between them
    for op in (program.ops[arg] for code, arg in program.events if code == Event.OP):
        if op.name == "sacplan.copy_to_device":
            source[op.writes[0]] = sent.index(op.reads[0])
            begun.append(source[op.writes[0]])
            together[-1].append(begun[-1])
            continue
        together.append([])
        if op.name == "sacplan.copy_to_host":
            sent.append(op.writes[0])
        elif op.name == "sacplan.wait_for_copy_to_device":
            needed.append(source[op.reads[0]])
    assert max(map(len, together)) > 1
    for group in together:
        assert group == sorted(group, key=needed.index)

    # The executor puts them on the link in the order that the clocks have.
    parcels: list[Parcel] = []
    run: list[int] = []
    make, fetch = Parcel.__init__, Parcel.fetch

    def noted(self: Parcel, tensor: torch.Tensor) -> None:
        make(self, tensor)
        parcels.append(self)

    def fetched(self: Parcel) -> None:
        if self._copy is None:
            run.append(next(i for i, one in enumerate(parcels) if one is self))
        fetch(self)

    monkeypatch.setattr(Parcel, "__init__", noted)
    monkeypatch.setattr(Parcel, "fetch", fetched)
    with sacplan.apply(model, plan):
        grads_of(model, batch, models.cross_entropy)
    assert run == begun
