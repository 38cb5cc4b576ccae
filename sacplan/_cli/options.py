"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from sacplan._cli.group import set_debug, set_json
from sacplan._cli.hf import DEFAULT_BATCH, DEFAULT_DTYPE, DEFAULT_OPTIMIZER, DEFAULT_SEQ

DEFAULT_DEVICE = "h100"


class Runtime(str, Enum):
    """Where times come from."""

    COST_MODEL = "cost-model"
    BENCHMARK = "benchmark"


class Mode(str, Enum):
    """On fake tensors or on real ones."""

    FAKE = "fake"
    REAL = "real"


class Objective(str, Enum):
    """What is recomputed the least of."""

    TIME = "time"
    FLOPS = "flops"


class Dtype(str, Enum):
    """Of an ``hf:`` model."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Optimizer(str, Enum):
    """Of an ``hf:`` target."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw-fused"
    SGD = "sgd"
    NONE = "none"


class Attn(str, Enum):
    """Attention of an ``hf:`` model."""

    SDPA = "sdpa"
    EAGER = "eager"


_HF = "Of hf: targets"

TARGET = "A model and a batch: FILE.py:FUNCTION, MODULE:FUNCTION, hf:NAME or hf:CONFIG.json."
TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET, show_default=False)]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|PROFILE",
        help=f"{TARGET} Or a saved profile (.json, .json.gz).",
        show_default=False,
    ),
]
_DEVICE = (
    "What the step will run on: a name (see sacplan devices), cuda, cpu, or the file of a DeviceSpec. "
    f"Default: {DEFAULT_DEVICE}"
)
_OF_A_PROFILE = "; of a saved profile, its own."
TargetDeviceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"{_DEVICE}.", show_default=False)
]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help=_DEVICE + _OF_A_PROFILE, show_default=False)
]
RuntimeOption = Annotated[
    Runtime | None,
    typer.Option(
        help="Times from a roofline of the device, or each distinct op timed here. Default: cost-model.",
        show_default=False,
    ),
]
TraceModeOption = Annotated[
    Mode | None,
    typer.Option(
        "--trace",
        help="Record a fake step, which needs no hardware and computes nothing, or a real one here. "
        "Default: fake.",
        show_default=False,
    ),
]
_RANKS = "Of several devices"
_WORLD_SIZE = (
    "Ranks that the step is spread over; batch, budget and peaks are those of one rank. DistributedDataParallel, "
    "unless --fsdp-unit is given. Default: 1"
)
TargetWorldSizeOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help=f"{_WORLD_SIZE}.", rich_help_panel=_RANKS, show_default=False),
]
WorldSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help=_WORLD_SIZE + _OF_A_PROFILE, rich_help_panel=_RANKS, show_default=False
    ),
]
FsdpUnitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fsdp-unit",
        metavar="PATTERN",
        help="Modules on which fully_shard is called ('model.layers.*'); '' is the model itself. May be repeated.",
        rich_help_panel=_RANKS,
        show_default=False,
    ),
]
BudgetHelp = "Peak of the whole step: 22GiB, 24GB, or a share of the unplanned peak, 70%."
SolverOption = Annotated[str, typer.Option(metavar="NAME", help="best, milp, greedy, uniform or rotor.")]
ObjectiveOption = Annotated[Objective, typer.Option(help="What to recompute the least of.")]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Never discard what these ops or modules made ('aten.topk', '*.router'). May be repeated.",
        show_default=False,
    ),
]
NeverOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Leave these modules alone altogether ('vision_tower.*'). May be repeated.",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"Samples; also of a target with make_batch. Default: {DEFAULT_BATCH}.",
        rich_help_panel=_HF,
        show_default=False,
    ),
]
SeqOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"Tokens of a sample. Default: {DEFAULT_SEQ}, or what the model has positions for.",
        rich_help_panel=_HF,
        show_default=False,
    ),
]
PlansBatchOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Samples. Default: the plan's.", rich_help_panel=_HF, show_default=False
    ),
]
PlansSeqOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tokens of a sample. Default: the plan's.",
        rich_help_panel=_HF,
        show_default=False,
    ),
]
PlansDtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Of parameters and activations. Default: the plan's.", rich_help_panel=_HF, show_default=False
    ),
]
_OPTIMIZERS = "adamw, adamw-fused (no temporaries), sgd or none; its state and its step count."
PlansOptimizerOption = Annotated[
    Optimizer | None,
    typer.Option(
        metavar="NAME", help=f"{_OPTIMIZERS} Default: the plan's.", rich_help_panel=_HF, show_default=False
    ),
]
PlansAttnOption = Annotated[
    Attn | None,
    typer.Option(help="Attention. Default: the plan's.", rich_help_panel=_HF, show_default=False),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help=f"Of parameters and activations. Default: {DEFAULT_DTYPE}.",
        rich_help_panel=_HF,
        show_default=False,
    ),
]
OptimizerOption = Annotated[
    Optimizer | None,
    typer.Option(
        metavar="NAME",
        help=f"{_OPTIMIZERS} Default: {DEFAULT_OPTIMIZER}.",
        rich_help_panel=_HF,
        show_default=False,
    ),
]
AttnOption = Annotated[
    Attn | None,
    typer.Option(
        help="Attention. Default: what transformers chooses.", rich_help_panel=_HF, show_default=False
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Overwrite files that sacplan did not write.", show_default=False)
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object on stdout, and nothing else there.",
        callback=set_json,
        is_eager=True,
        show_default=False,
    ),
]
DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error.",
        callback=set_debug,
        is_eager=True,
        show_default=False,
    ),
]


def output_option(what: str) -> Any:
    """``-o``, where it may be left out."""
    return typer.Option("--output", "-o", metavar="FILE", help=what, show_default=False)
