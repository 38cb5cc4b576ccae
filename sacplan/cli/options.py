"""Every argument and option of the command line, declared once.

``HfOptions``, ``StepOptions`` and ``CapacityOptions`` are groups of options. A command takes a group as one parameter
(see ``command.py``), and the command line gets an option for each of its fields. A group is a dataclass whose fields
are annotated with options, or one of the library with the options beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from sacplan.device.devices import DEFAULT_DEVICE as DEFAULT_DEVICE
from sacplan.integrations.hf.target import ModelOptions
from sacplan.profiling.optimizer_names import NONE, named_optimizer

Runtime = Literal["cost-model", "benchmark"]
Run = Literal["fake", "real"]
DTYPES = ("bfloat16", "float16", "float32")


def option(*names: str, help: str, **settings: Any) -> Any:
    """Declare an option whose help text states the default itself."""
    return typer.Option(*names, help=help, show_default=False, **settings)


def size_in_gib(text: str) -> str:
    """Return a budget as the library reads it: on the command line, a number is GiB, as in Python."""
    try:
        float(text)
    except ValueError:
        # It has a unit, such as 24GB or 70%, which the library reads.
        return text
    return f"{text}GiB"


# Short names, among them those of torch itself: ``torch.half`` and ``torch.float``.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype_name(text: str) -> str:
    """Return the name of a dtype as torch has it.

    Raises:
        typer.BadParameter: There is none of that name for a model.
    """
    name = text.lower().removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in DTYPES:
        short = ", ".join(f"{alias} for {full}" for alias, full in _DTYPES.items())
        raise typer.BadParameter(f"{text!r} is none of {', '.join(DTYPES)} ({short}).")
    return name


def storage_name(text: str) -> str:
    """Return the name of a type that bitsandbytes stores 4-bit weights as.

    Raises:
        typer.BadParameter: It stores them as none of that name.
    """
    return "uint8" if text.lower().removeprefix("torch.") == "uint8" else dtype_name(text)


def output(what: str) -> Any:
    """Declare ``-o`` for the thing that is saved."""
    return option("--output", "-o", metavar="FILE", help=f"Where to save {what}.")


TARGET = "A model and a batch: FILE.py:FUNCTION, MODULE:FUNCTION, hf:NAME, hf:CONFIG.json or diffusers:NAME."
Target = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET, show_default=False)]
Source = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|PROFILE", help=f"{TARGET} Or a saved profile (.json, .json.gz).", show_default=False
    ),
]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="A saved plan.", show_default=False)]
Force = Annotated[bool, option("--force", help="Overwrite files that sacplan did not write.")]
Json = Annotated[bool, option("--json", help="One JSON object on stdout, and nothing else there.")]
Debug = Annotated[bool, option("--debug", help="Show the traceback of an error.")]
Objective = Annotated[Literal["time", "flops"], typer.Option(help="What to recompute the least of.")]
BUDGET = (
    "Peak of the whole step: 22GiB (or 22), 24GB, or a share of the unplanned peak, 70%. "
    "Default: the step fits the device, with what torch reserves there and 1.2% to spare."
)
Budget = Annotated[str | None, option(metavar="SIZE", parser=size_in_gib, help=BUDGET)]
Headroom = Annotated[
    str | None,
    option(
        metavar="SIZE",
        help="Without a budget: how much of the device's memory to leave free, a share of it or bytes, 5% or 2GiB. "
        "Default on a CPU: 15%.",
    ),
]
HostBudget = Annotated[
    str | None,
    option(
        metavar="SIZE",
        parser=size_in_gib,
        help="Memory of the host for each device, 200GiB or a share. Default: that of common machines with the device.",
    ),
]
Solver = Annotated[str, typer.Option(metavar="NAME", help="best, milp, greedy, uniform or rotor.")]
Techniques = Annotated[
    list[str] | None,
    option(
        "--technique",
        metavar="NAME",
        help="What a plan may do: recompute, offload (let tensors wait in the host's memory), or chunk (run ops in "
        "slices; gradients are then close, not bit-equal). May be repeated. Default: all that keep gradients "
        "bit-equal.",
    ),
]
Keep = Annotated[
    list[str] | None,
    option(
        metavar="PATTERN",
        help="Never discard what these ops or modules made ('aten.topk', '*.router'). May be repeated.",
    ),
]
Never = Annotated[
    list[str] | None,
    option(
        metavar="PATTERN", help="Leave these modules alone altogether ('vision_tower.*'). May be repeated."
    ),
]
Points = Annotated[int, typer.Option(min=2, metavar="N", help="How many budgets the frontier has.")]
DEVICE = (
    "What the step will run on: a name (see sacplan devices), a memory size (24GB), cuda, cpu, or the file of a "
    "DeviceSpec. Default: "
)
Device = Annotated[
    str | None, option(metavar="NAME", help=f"{DEVICE}{DEFAULT_DEVICE}; a saved profile has its own.")
]
ACCUM = "Micro-batches whose gradients an optimizer step adds up; --batch is one of them. Default: 1"
GradAccum = Annotated[int | None, option("--grad-accum", min=1, metavar="N", help=f"{ACCUM}.")]
ROUTING = "Of a mixture of experts: as many tokens to each, or all to the same ones. Default: balanced"
Routed = Annotated[Literal["balanced", "worst"] | None, option("--routing", help=f"{ROUTING}.")]
Compiled = Annotated[
    list[str] | None,
    option(
        "--compile",
        metavar="PATTERN",
        help="Of the step as torch.compile runs it: modules that are compiled, each by itself ('model.layers.*'); "
        "without a pattern the whole model. May be repeated.",
    ),
]
MESH = (
    "dp=2,tp=4: ranks of each axis, the slowest links first. 8, or 8xh100: the best mesh of so many devices"
)
Mesh = Annotated[
    str | None,
    option(
        metavar="MESH",
        help=f"Spread the step over ranks: {MESH}. The batch is that of all together, the budget that of each.",
        rich_help_panel="Several devices",
    ),
]
# The help lists options for several devices and for ``hf:`` targets in panels of their own.
_ranks = functools.partial(option, rich_help_panel="Several devices")
_hf = functools.partial(option, rich_help_panel="hf: targets")


def optimizer_name(text: str) -> str:
    """Return the name of an optimizer that the user means; ``none`` stays.

    Raises:
        typer.BadParameter: there is none.
    """
    try:
        # "none" is a choice on the command line, and no optimizer of the table.
        return NONE if text.lower() == NONE else named_optimizer(text).name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How to record a step. A field is None if its option is not given."""

    device: Device = None
    runtime: Annotated[
        Runtime | None,
        option(help="Times predicted kernel by kernel, or each distinct op timed here. Default: cost-model."),
    ] = None
    trace: Annotated[
        Run | None,
        option(
            help="Record a fake step, which needs no hardware and computes nothing, or a real one here. "
            "Default: fake."
        ),
    ] = None
    mode: Annotated[
        Literal["train", "inference"] | None,
        option(
            help="Forward, backward and optimizer step, or the forward pass alone, without the target's loss and "
            "optimizer. Default: train."
        ),
    ] = None
    grad_accum: Annotated[
        int | None,
        option("--grad-accum", min=1, metavar="N", help=f"{ACCUM}; with a plan or a saved profile, its own."),
    ] = None
    routing: Routed = None
    compile: Compiled = None
    world_size: Annotated[
        int | None,
        _ranks(
            min=1,
            metavar="N",
            help="Ranks that the step is spread over; batch, budget and peaks are those of one rank. "
            "Run by DDP (DistributedDataParallel), unless --fsdp-unit is given. Default: 1; a saved profile has its "
            "own.",
        ),
    ] = None
    fsdp_unit: Annotated[
        list[str] | None,
        _ranks(
            metavar="PATTERN",
            help="Run by FSDP2: modules on which fully_shard is called ('model.layers.*'); '' is the model itself. "
            "May be repeated.",
        ),
    ] = None


# The first name is ours. The others are those of training scripts, so that they can be typed by habit.
BATCH_NAMES, SEQ_NAMES = ("--batch", "--batch-size"), ("--seq", "--seq-len", "--max-seq")
BATCH = "Samples; also of a target with make_batch. Default: 1, for layouts one for each rank"
SEQ = "Tokens in a sample, in the longest where they differ. Default: 1024, or fewer if the model has fewer positions"
DTYPE = "Of parameters and activations: bf16, fp16 or fp32. Default: bfloat16, or float16 for a device that has none"
OPTIMIZER = (
    "adamw, adamw-fused (no temporaries), adamw-8bit, paged-adamw-8bit, adafactor, muon, lion, sgd, none or another; "
    "its state and its step count. Default: adamw"
)
FETCH = (
    "Fetch the config.json of a name that is neither known nor in the local cache from the hub, and no other file. "
    "Default: ask on a terminal, else do not"
)
LORA_HELP = (
    "Train adapters of PEFT, in float32, and freeze the model: r=16, or r=16,alpha=32,dropout=0.05,"
    "targets=q_proj+v_proj. The step runs under autocast. Default targets: all linear layers"
)
IN_4BIT = "Quantize linear layers as QLoRA does: NF4 of bitsandbytes with double quantization"
STORAGE = (
    "Type that 4-bit weights are stored as, with --load-in-4bit. A float, as in recipes for FSDP (bfloat16), lets "
    "Accelerate shard them; nothing is then made float32. Default: uint8"
)


def _hf_options(after: str) -> dict[str, Any]:
    """Return an option for each field of ``ModelOptions``; ``after`` ends the help of each."""
    return {
        "batch": _hf(*BATCH_NAMES, min=1, metavar="N", help=BATCH + after),
        "seq": _hf(*SEQ_NAMES, min=1, metavar="N", help=SEQ + after),
        "dtype": _hf(metavar="NAME", parser=dtype_name, help=DTYPE + after),
        "optimizer": _hf(metavar="NAME", parser=optimizer_name, help=OPTIMIZER + after),
        "attn": _hf(help=f"Attention. Default: what transformers chooses{after}"),
        "lora": _hf(metavar="r=N", help=LORA_HELP + after),
        "load_in_4bit": _hf("--load-in-4bit", help=IN_4BIT + after),
        "bnb_4bit_quant_storage": _hf(metavar="NAME", parser=storage_name, help=STORAGE + after),
        "fetch": _hf("--fetch/--no-fetch", help=f"{FETCH}."),
    }


HfOptions = Annotated[ModelOptions, _hf_options(".")]
PlannedHfOptions = Annotated[ModelOptions, _hf_options("; with a plan, the plan's.")]
"""For commands on a plan: its file supplies the options that are not given."""


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """How much memory a step may take on a device, and how it is planned."""

    # Not ``Budget``, whose help offers a share of the peak: here are several steps, each with its own peak.
    budget: Annotated[
        str | None,
        option(
            metavar="SIZE",
            parser=size_in_gib,
            help="Peak of the whole step: 22GiB or 24GB (no share: there are several steps). "
            "Default: the step fits the device, with what torch reserves there.",
        ),
    ] = None
    device: Annotated[str | None, option(metavar="NAME", help=f"{DEVICE}{DEFAULT_DEVICE}.")] = None
    headroom: Headroom = None
    solver: Solver = "best"
    technique: Techniques = None


@dataclass(frozen=True, slots=True)
class CapacityOptions(BudgetOptions):
    """How to search for a batch size."""

    grad_accum: GradAccum = None
    compile: Compiled = None
    at_most: Annotated[int | None, option(min=1, metavar="N", help="Try no larger batch.")] = None


def written(options: dict[str, Any]) -> str:
    """Write options as on the command line: ``--seq 48 --dtype float32``. One that is True is a name alone."""
    return " ".join(
        _flag(name) if value is True else f"{_flag(name)} {value}" for name, value in options.items()
    )


def named(options: dict[str, Any]) -> str:
    """Join the names of options for a sentence: ``--seq and --dtype``."""
    return " and ".join(map(_flag, options))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
