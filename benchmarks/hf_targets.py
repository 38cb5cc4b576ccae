"""Every model type of transformers as an ``hf:`` target: its config.json made small, on disk, built and profiled.

    python -m benchmarks.hf_targets                  # all; into benchmarks/results/hf_targets.json
    python -m benchmarks.hf_targets llava whisper    # these alone, printed
    python -m benchmarks.hf_targets --resume         # what an interrupted run has not done yet

The row of a type says what became of it: "profiled", or the stage that failed and its message. "no config": no rule of
``small_configs`` makes a small one. "refused": the command line says that it has no batch (or no class) for it.
"not built": transformers itself fails, mostly because of a package that is not installed. "failed": anything else.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import configuration_auto

import sacplan
from benchmarks import common, small_configs
from benchmarks.common import RESULTS, describe, machine, write_results
from benchmarks.compatibility import outcomes
from sacplan._cli.exits import TargetError
from sacplan._cli.options import HfOptions
from sacplan._cli.targets import load_target, users_code

FIGURES = RESULTS / "hf_targets.json"
SECONDS = 180

PROFILED, NO_CONFIG, NOT_BUILT, REFUSED, FAILED = "profiled", "no config", "not built", "refused", "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model type.

    Attributes:
        loss: whether the model has one of its own.
        peak_bytes: of a bfloat16 step on an H100.
    """

    model_type: str
    status: str
    reason: str = ""
    model_class: str = ""
    task: str = ""
    loss: bool = False
    parameters: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


def outcome_of(model_type: str) -> Outcome:
    """Write a small configuration, and load and profile it as the command line does."""
    began = time.perf_counter()

    def ended(status: str, **more: Any) -> Outcome:
        return Outcome(model_type, status, **more, seconds=round(time.perf_counter() - began, 2))

    with tempfile.TemporaryDirectory() as directory:
        try:
            small_configs.config_of(model_type).save_pretrained(directory)
        except Exception as error:  # whatever a configuration raises, the row is about that
            return ended(NO_CONFIG, reason=_line(error))
        try:
            target = load_target(f"hf:{directory}", HfOptions(batch=2))
            with users_code(target.name):
                profile = sacplan.profile(
                    target.model, target.batch, target.loss_fn, target.optimizer, device="h100"
                )
        except TargetError as error:
            # with a cause: transformers raised, and not what was said on our own account
            reason = _line(error).replace(directory, "config.json")
            return ended(REFUSED if error.__cause__ is None else NOT_BUILT, reason=reason)
        except Exception as error:
            return ended(FAILED, reason=_line(error))
    facts = target.facts
    return ended(
        PROFILED,
        model_class=facts["model"],
        task=facts["task"],
        loss="loss" not in facts,
        parameters=facts["parameters"],
        peak_bytes=profile.peak_bytes,
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _lost(model_type: str, reason: str, seconds: float) -> Outcome:
    return Outcome(model_type, FAILED, reason, seconds=round(seconds, 2))


def _print(o: Outcome) -> None:
    words = f"{o.model_class} ({o.task}) {o.peak_bytes:,} B" if o.status == PROFILED else o.reason
    print(f"{o.model_type:>32} {o.status}: {words}, {o.seconds} s", flush=True)


def summary(found: list[Outcome]) -> dict[str, int]:
    """How many of each status, and how many of the profiled ones have a loss of their own."""
    counts = dict(sorted(Counter(o.status for o in found).items()))
    return {"model_types": len(found), **counts, "with_own_loss": sum(o.loss for o in found)}


def model_types() -> list[str]:
    """All that have a configuration class, in an order drawn once: what a part of a run did is a fair sample."""
    found = sorted(configuration_auto.CONFIG_MAPPING_NAMES)
    random.Random(0).shuffle(found)
    return found


def read(path: Path = FIGURES) -> tuple[dict[str, Any], list[Outcome]]:
    """A file of figures: what it says of the run, and its outcomes."""
    data = json.loads(path.read_text())
    return data, [Outcome(**row) for row in data.pop("rows")]


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where sacplan failed."""
    parser = common.parser(__doc__)
    parser.add_argument("names", nargs="*", help="model types (default: all)", metavar="name")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that the file already has")
    arguments = parser.parse_args(argv)
    path = arguments.json or (None if arguments.names else FIGURES)
    found: dict[str, Outcome] = {}
    if arguments.resume and path is not None and path.exists():
        found = {o.model_type: o for o in read(path)[1]}
    torch.set_num_threads(1)
    print(describe(machine()))
    names = [n for n in arguments.names or model_types() if n not in found]
    for outcome in outcomes(names, arguments.jobs, SECONDS, outcome_of, _lost):
        found[outcome.model_type] = outcome
        _print(outcome)
        ordered = [found[name] for name in sorted(found)]
        write_results(path, [asdict(o) for o in ordered], row_a_line=True, summary=summary(ordered))
    print(summary(list(found.values())))
    return int(any(o.status == FAILED for o in found.values()))


if __name__ == "__main__":
    sys.exit(main())
