"""Which model types of transformers can be named as an ``hf:`` target, and profiled?

    python -m benchmarks.hf_targets                  # all; into benchmarks/results, and published in the docs
    python -m benchmarks.hf_targets llama vit        # these alone, printed
    python -m benchmarks.hf_targets --resume         # what an interrupted run has not done yet
    python -m benchmarks.hf_targets --table          # publish the figures that are there

For each model type the default configuration of its class is saved as a folder, and given to the command line's own
loader as ``hf:FOLDER``, with no other option. Nothing is computed and nothing is downloaded: a batch is made, and one
training step is profiled for an H100 without weights. Widths are those of the defaults; of layers that are alike two
are kept, which makes the sweep several times faster and changes nothing about the batch. A few models do not train in
bfloat16, or not on a single sample (batch norm over features): for these, the option of the command line that changes
that is tried. Where the library's defaults do not run, because the parts of a model do not agree in size, the
configuration that ``models/small_configs.py`` makes of them by rule is tried as well.

A row is a model type. One without a step says why, in the words of the last error of its default configuration.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import configuration_auto

import sacplan
from benchmarks.harness.processes import Limits
from benchmarks.harness.results import GIB, ROOT, Row, describe
from benchmarks.harness.sweep import Sweep
from benchmarks.harness.table import csv_text, markdown_table
from benchmarks.models import small_configs
from sacplan.integrations.hf import models as hf
from sacplan.integrations.hf.target import ModelOptions

DEVICE = "h100"
_LIMITS = Limits(seconds=240.0, items=25)
_NO_OPTIONS = ModelOptions()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one model type.

    Attributes:
        model_type: as in ``config.json``.
        configuration: "default", or "small" where the defaults do not run; "" where neither does.
        options: of the command line, where it does not run without.
        model_class, task, inputs: of the model that was made.
        loss: "its own", or "the sum of its outputs" where it has none.
        peak_bytes: of the step on an H100, with one sample or as ``options`` say.
        reason: why there is no step, or why the configuration is a small one.
    """

    model_type: str
    configuration: str = ""
    options: str = ""
    model_class: str = ""
    task: str = ""
    inputs: str = ""
    loss: str = ""
    peak_bytes: int = 0
    reason: str = ""

    @property
    def profiled(self) -> bool:
        return bool(self.configuration)

    def __str__(self) -> str:
        """Write the outcome as a line."""
        figures = f"{self.configuration} {self.model_class} {self.inputs} {self.peak_bytes / GIB:.2f} GiB"
        return f"{self.model_type:>28} {figures if self.profiled else self.reason}"

    def as_row(self) -> Row:
        """Return the row of the file."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: Row) -> Outcome:
        """Return the outcome of a row of the file."""
        return cls(**row)


def parts() -> tuple[str, ...]:
    """Return the model types that no auto class builds: they exist as parts of other models."""
    return tuple(sorted(set(configuration_auto.CONFIG_MAPPING_NAMES) - set(small_configs.model_types())))


def outcome_of(model_type: str) -> Outcome:
    """Make the target from the defaults, else from a small configuration, and profile its step."""
    transformers.logging.set_verbosity_error()
    config_class = configuration_auto.CONFIG_MAPPING[model_type]
    try:
        defaults = json.loads(config_class().to_json_string(use_diff=False))
    except Exception as error:  # the class has no defaults
        return _small(model_type, _line(error))
    try:
        return _profiled(model_type, "default", shallow(defaults))
    except Exception as error:  # whatever it is, it is what the row is about
        reason = _line(error)
    if (helps := _option_against(reason)) is not None:
        with contextlib.suppress(Exception):  # then the row has the error without it
            return _profiled(model_type, "default", shallow(defaults), reason, helps)
    if shallow(defaults) != defaults:
        try:  # some need all of their layers
            return _profiled(model_type, "default", defaults)
        except Exception as error:
            reason = _line(error)
    return _small(model_type, reason)


_AGAINST = (
    (r"expected scalar type|Unsupported dtype|same dtype", ModelOptions(dtype="float32")),
    (r"Expected more than 1 value per channel", ModelOptions(batch=2)),
)
"""What errors of models say that an option of the command line is against, and this option."""


def _option_against(reason: str) -> ModelOptions | None:
    return next((helps for said, helps in _AGAINST if re.search(said, reason)), None)


def _small(model_type: str, reason: str) -> Outcome:
    try:
        small = small_configs.small_config(configuration_auto.CONFIG_MAPPING[model_type])
        return _profiled(model_type, "small", json.loads(small.to_json_string(use_diff=False)), reason)
    except Exception:  # the row says what the library's own configuration does
        return Outcome(model_type, reason=reason)


_DEPTH = re.compile(
    r"(\w+_)?(n|num)_(hidden_|encoder_|decoder_)?layers?|(\w+_)?depth|(encoder|decoder)_layers|layers"
)
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_BY_LAYER = "per_layer_config"
_LAYERS = 2


def shallow(config: Any) -> Any:
    """Return the values of a configuration with at most two layers of each tower, nested ones too."""
    if not isinstance(config, dict):
        return config
    made = {name: shallow(value) for name, value in config.items()}
    depth = made.get("num_hidden_layers")
    for name, value in made.items():
        if isinstance(value, int) and not isinstance(value, bool) and _DEPTH.fullmatch(name):
            made[name] = min(value, _LAYERS)
        # A list may have one entry for each layer.
        elif isinstance(value, list) and (name in _KINDS or len(value) == depth):
            made[name] = value[:_LAYERS]
        elif name == _BY_LAYER and isinstance(value, dict):
            made[name] = {layer: own for layer, own in value.items() if int(layer) < _LAYERS}
    return made


def _profiled(
    model_type: str,
    configuration: str,
    values: dict[str, Any],
    reason: str = "",
    options: ModelOptions = _NO_OPTIONS,
) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values), encoding="utf-8")
        target = hf.build(f"hf:{folder}", options, "meta")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", sacplan.SacplanWarning
        )  # what a fake step assumes, which fit says too
        profile = sacplan.profile(target.model, target.batch, None, target.optimizer, device=DEVICE)
    facts = target.facts
    return Outcome(
        model_type,
        configuration,
        options=" ".join(f"--{name} {value}" for name, value in options.given().items()),
        model_class=facts["model"],
        task=facts["task"],
        inputs=", ".join(name for name in target.batch if name not in ("labels", "return_loss")),
        loss=facts.get("loss", "its own"),
        peak_bytes=profile.peak_bytes,
        reason=reason,
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "config.json", text)  # of a folder that is gone
    # ``build`` names the folder, and says last what to do instead.
    told = text.partition("no batch could be made (")[2].rpartition("). ")[0]
    return (told or f"{type(error).__name__}: {text}")[:300]


def lost(model_type: str, reason: str, seconds: float) -> Outcome:
    """Return the outcome where a process died or took too long."""
    return Outcome(model_type, reason=reason)


def summary(found: Iterable[Outcome]) -> str:
    """Sum up all outcomes in one sentence."""
    found = list(found)
    done = [o for o in found if o.profiled]
    small = sum(o.configuration == "small" for o in done)
    own = sum(o.loss == "its own" for o in done)
    helped = sum(bool(o.options) for o in done)
    return (
        f"{len(done)} of {len(found)} model types have a batch and a profiled step, {len(done) - small} from their "
        f"default configuration and {small} from a small one; {own} have a loss of their own, and {helped} need an "
        "option"
    )


# --- what the docs publish -------------------------------------------------------------------------------------------


def table(about: dict[str, Any], found: Iterable[Outcome]) -> str:
    """Write one row per model type, as CSV."""
    heads = ("model_type", "class", "configuration", "options", "reads", "loss", "why_no_step", "error")
    rows = [(*_cells(o), *(("", "") if o.profiled else (why(o.reason), o.reason))) for o in found]
    parts = [
        (name, *[""] * 5, "no auto class builds it: it is a part of other models", "")
        for name in about["parts"]
    ]
    return csv_text(heads, [*rows, *parts])


def _cells(o: Outcome) -> tuple[str, ...]:
    return o.model_type, o.model_class, o.configuration, o.options, o.inputs, o.loss


def block(about: dict[str, Any], found: list[Outcome]) -> str:
    """Write the part of the page that is made of the figures: the sum, options, and why there is no step."""
    left = about["model_types"] - len(found)
    lines = [f"{summary(found)}.{f' {left} others were not tried yet.' if left else ''}", ""]
    lines += [f"{describe(about['machine'])}; {about['date']}.", ""]
    by_options = attrgetter("options")
    for option, names in groupby(sorted((o for o in found if o.options), key=by_options), key=by_options):
        lines += [f"- `{option}`: {', '.join(f'`{o.model_type}`' for o in names)}"]
    reasons = Counter(
        re.sub(r"the library \S+, which", "a library that", why(o.reason)) for o in found if not o.profiled
    )
    counted = ((reason, str(n)) for reason, n in reasons.most_common())
    return "\n".join([*lines, "", markdown_table("no step because | model types", counted)])


_WHY = json.loads((ROOT / "benchmarks" / "data" / "hf_target_errors.json").read_text(encoding="utf-8"))
"""What errors say of a model type, and the same in words. The first that matches counts."""


def why(reason: str) -> str:
    """Say in words why a model type has no step."""
    for said, words in _WHY:
        if found := re.search(said, reason):
            return found.expand(words)
    return "its default configuration does not run"


SWEEP = Sweep("hf_targets", Outcome, outcome_of, lost, summary, _LIMITS, block, table)


def main(argv: list[str] | None = None) -> None:
    """Run the sweep, and write the file after each model type."""
    known = small_configs.model_types()
    _, arguments = SWEEP.parse(__doc__, argv, known)
    SWEEP.run(arguments, arguments.names or known, model_types=len(known), parts=parts())


if __name__ == "__main__":
    main()
