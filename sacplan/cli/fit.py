"""The command ``fit``: one verdict about a step and a device, and what to do."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from sacplan.cli import options as o
from sacplan.cli import sources
from sacplan.cli.command import command
from sacplan.cli.exits import INFEASIBLE
from sacplan.cli.output import CommandResult, rows_table, stage
from sacplan.cli.show import facts_of, target_facts
from sacplan.cli.targets import users_code
from sacplan.core.budget import format_bytes
from sacplan.integrations.hf.target import NAMED, ModelOptions, given

if TYPE_CHECKING:
    from sacplan import FitRow, Verdict


SCHEMA_VERSION = 1
"""Raised where a field of ``docs/ci.md`` is removed or changes its meaning."""

_OMITTED = ("solver", "techniques", "at_most")
_FACTS = (
    "model", "parameters", "batch", "seq", "optimizer", "device", "memory_bytes", "budget_bytes", "budget",
    "larger_devices", "computed", "accumulation_steps", "devices", "compiled", "remarks", "fits",
    "advice", "code",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FitOptions(o.CapacityOptions):
    """What is asked of ``fit`` in addition to a limit and a device."""

    devices: Annotated[int | None, o.option("devices_to_fit")] = None
    sizes: Annotated[bool, o.option("sizes")] = True
    routing: o.Routed = None
    host_budget: o.HostBudget = None


@command(
    "fit",
    "Does it fit, and what to do.",
    examples=[
        "sacplan fit hf:gpt2 --seq 512 --batch 4 --device rtx-4090",
        "sacplan fit hf:gpt2 --device l40s,h100,24GB --no-sizes",
        "sacplan fit train.py:make --device cpu --budget 2GiB --json",
    ],
    omit=_OMITTED,
)
def fit(target: o.Target, *, asked: FitOptions, hf: o.HfOptions) -> CommandResult:
    """Whether a training step fits a device: as it is, with a plan, a chunked loss, another optimizer.

    The exit code is 3 if it does not fit as it is; with several devices, if it fits none of them as it is. Several
    devices, as in --device l40s,h100, get a line each. Targets other than hf:... need make_batch.
    """
    devices = (asked.device or o.DEFAULT_DEVICE).split(",")
    answers = [_answer(target, device.strip(), asked, hf) for device in devices]
    if len(answers) == 1:
        return answers[0].result(asked.sizes)
    facts = {"command": "fit", "answers": [answer.facts for answer in answers]}
    fits = any(answer.found.fits for answer in answers)
    return CommandResult(facts, [_devices(answers, asked.sizes)], exit_code=0 if fits else INFEASIBLE)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The verdict about a device, with its facts and the most positions of the model."""

    found: Verdict
    facts: dict[str, Any]
    most: int | None

    def result(self, sizes: bool) -> CommandResult:
        """Return the result of the command for one device."""
        found = self.found
        shown: list[Table | str] = [found.sentence, "", _table(self, sizes), *found.advice, *found.remarks]
        if line := self.facts["run"]:
            shown += ["", f"$ {line}"]
        if found.code:
            shown += ["", found.code]
        return CommandResult(self.facts, shown, found.computed, 0 if found.fits else INFEASIBLE)


def _answer(target: str, device: str, asked: FitOptions, hf: ModelOptions) -> _Answer:
    import sacplan
    from sacplan.integrations.hf.models import positions
    from sacplan.questions.on_ranks import read_devices

    device_name, number = read_devices(device, asked.devices or 1)
    spec = sources.device_of(device_name)
    loaded, make_batch = sources.sized_target("fit", target, spec, hf)
    seq = loaded.facts.get("seq")
    # By name if the target's facts have one, since rows and the recommended command use the name.
    optimizer: Any = loaded.optimizer
    if loaded.facts:
        optimizer = None if loaded.facts["optimizer"] == "none" else loaded.facts["optimizer"]
    # No sequence beyond the model's positions is tried: it could not run.
    most = None if seq is None else positions(loaded.model)
    with stage("recording and planning", long=True), users_code(f"the step of {target}"):
        verdict = sacplan.fit(
            loaded.model, make_batch if seq is None else functools.partial(of_length, make_batch, seq), spec,
            loaded.loss_fn, optimizer, devices=number, batch=int(hf.batch or 1), seq=seq, longest=most,
            name=_named(target, hf), **given(asked, "device", "devices", *_OMITTED),
        )  # fmt: skip
    more = [] if asked.routing is None else ["--routing", asked.routing]
    more += [word for pattern in asked.compile or () for word in ("--compile", pattern)]
    more += [] if asked.host_budget is None else ["--host-budget", asked.host_budget]
    facts = {
        "command": "fit",
        "schema_version": SCHEMA_VERSION,
        **target_facts(loaded),
        **facts_of(verdict, _FACTS),
        "outside": [one._asdict() for one in verdict.outside],
        "verdict": verdict.sentence,
        "rows": [row.figures() for row in verdict.rows],
        "recommended": verdict.recommended and verdict.recommended.figures(),
        "run": _command(target, verdict, hf, more),
    }
    return _Answer(verdict, facts, most)


def _named(target: str, hf: ModelOptions) -> str:
    """Return what the verdict calls the model: its name, and the adapters and 4-bit weights that it was given."""
    adapters = [] if hf.lora is None else [f"LoRA {hf.lora}"]
    name = target.partition(":")[2] if target.startswith(NAMED) else target
    return ", ".join([name, *adapters, *(["4-bit weights"] if hf.load_in_4bit else [])])


def of_length(make_batch: Callable[[int], Any], seq: int | None, batch: int, *sizes: int) -> Any:
    """Return a batch with another length of its sequences, height and width of its images, or all three.

    The batch holds zeros: only shapes matter to the recording.
    """
    length = seq if len(sizes) == 2 else sizes[0]
    image = sizes[-2:] if len(sizes) > 1 else ()

    def resized(tensor: Any) -> Any:
        if image and tensor.dim() == 4:  # samples x channels x height x width
            return tensor.new_zeros(*tensor.shape[:2], *image)
        # Any dimension of this size is taken for the sequence, except the first: a batch may be just as large.
        shape = [length if d > 0 and n == seq else n for d, n in enumerate(tensor.shape)]
        return tensor.new_zeros(shape)

    return {name: resized(tensor) for name, tensor in make_batch(batch).items()}


def _command(target: str, verdict: Verdict, hf: ModelOptions, more: list[str]) -> str:
    """Return the command line that makes the recommended plan; ``""`` if there is none."""
    from sacplan.techniques.registry import DEFAULT_TECHNIQUES

    best = verdict.recommended
    # Nothing fits, or no plan is needed.
    if best is None or best.way == "as it is":
        return ""
    # The command line has no options for this spread.
    if best.spread and not best.flags:
        return ""
    # With ``--mesh``, the batch is that of all ranks together; the verdict has that of each device.
    given = {**hf.given(), "batch": verdict.batch * (verdict.devices if "--mesh" in best.flags else 1)}
    # Other targets make their optimizer themselves, so no option could change it.
    if target.startswith(NAMED):
        given["optimizer"] = best.optimizer
    words = ["sacplan", "plan", target, *o.written(given).split(), "--device", verdict.device]
    words += [] if verdict.budget is None else ["--budget", verdict.budget]
    words += [] if verdict.accumulation_steps == 1 else ["--grad-accum", str(verdict.accumulation_steps)]
    words += best.flags
    if best.techniques != DEFAULT_TECHNIQUES:
        words += [word for name in best.techniques for word in ("--technique", name)]
    return " ".join([*map(shlex.quote, [*words, *more]), "-o", "plan.json"])


def _devices(answers: list[_Answer], sizes: bool) -> Table:
    """Return a line for each device: without a plan, and with what is recommended."""

    def cells(verdict: Verdict) -> dict[str, str]:
        row = verdict.recommended or verdict.rows[0]
        return {
            "device": verdict.device,
            "limit": format_bytes(row.limit_bytes),
            "unplanned": "fits" if verdict.fits else f"no, by {verdict.rows[0].over}",
            "best": f"{row.optimizer}, {row.way}" if row.fits else "nothing fits",
            "needs": format_bytes(row.reserved_bytes or row.peak_bytes),
            "step": "" if row.step_ms is None else f"{row.step_ms:.1f}",
            "largest": _at_least(row.largest_batch, row) if sizes else "",
        }

    return rows_table("fit on devices", [cells(answer.found) for answer in answers])


def _table(answer: _Answer, sizes: bool) -> Table:
    verdict = answer.found
    rows = verdict.shown(sizes)
    # A rank has a buffer outside of the allocator for each axis of its mesh, so meshes differ in limits.
    has_limits = len({row.limit_bytes for row in rows}) > 1
    has_seq = sizes and verdict.seq is not None and verdict.devices == 1

    def cells(row: FitRow) -> dict[str, str]:
        # A row that is the same as another one repeats no figures.
        peak, reserved, host = (
            format_bytes(n) if n and row.same_as is None else ""
            for n in (row.peak_bytes, row.reserved_bytes, row.host_bytes)
        )
        return {
            "optimizer": row.optimizer,
            "spread": row.spread,
            "way": row.way,
            "peak": peak or "the same",
            "reserved": reserved,
            "limit": format_bytes(row.limit_bytes) if has_limits else "",
            "host": host,
            "fits": "yes" if row.fits else f"no, by {row.over}",
            "step": "" if row.step_ms is None or row.same_as is not None else f"{row.step_ms:.1f}",
            "largest": _at_least(row.largest_batch, row) if sizes else "",
            "longest": _at_least(row.longest_seq, row, answer.most) if has_seq else "",
        }

    return rows_table("fit", [cells(row) for row in rows])


def _at_least(size: int | None, row: FitRow, most: int | None = None) -> str:
    """Return a size, ``?`` if unknown; with a ``+`` where a plan for each size, as of ``max-batch``, may find more."""
    return "?" if size is None else f"{size}{'+' if size and row.techniques and size != most else ''}"
