"""Every argument and option of the command line, declared once: ``options.csv`` has names and help, this their types.

``HfOptions``, ``StepOptions`` and ``CapacityOptions`` are groups of options. A command takes a group as one parameter
(see ``command.py``), and the command line gets an option for each of its fields. A group is a dataclass whose fields
are annotated with options, or a dataclass of the library with the options next to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sacplan.core.files import table_of
from sacplan.device.devices import DEFAULT_DEVICE as DEFAULT_DEVICE
from sacplan.integrations.hf.target import ModelOptions
from sacplan.profiling.optimizer_names import NONE, named_optimizer

Runtime = Literal["cost-model", "benchmark"]
Run = Literal["fake", "real"]
DTYPES = ("bfloat16", "float16", "float32")

_ROWS = {row["name"]: row for row in table_of(Path(__file__).with_name("options.csv"))}


def option(name: str, after: str = ".", **settings: Any) -> Any:
    """Declare an option of ``options.csv``, whose help text ends in ``after`` and states the default itself."""
    row = _ROWS[name]
    declared: dict[str, Any] = {
        "help": row["help"] + after,
        "metavar": row["metavar"] or None,
        "min": int(row["min"]) if row["min"] else None,
        "rich_help_panel": row["panel"] or None,
        "show_default": False,
    }
    return typer.Option(*row["flags"].split(), **declared | settings)


def argument(name: str, after: str = ".", metavar: str | None = None) -> Any:
    """Declare an argument of ``options.csv``."""
    row = _ROWS[name]
    return typer.Argument(metavar=metavar or row["metavar"], help=row["help"] + after, show_default=False)


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
        typer.BadParameter: models have no dtype of that name here.
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
        typer.BadParameter: bitsandbytes stores them as no type of that name.
    """
    return "uint8" if text.lower().removeprefix("torch.") == "uint8" else dtype_name(text)


def output(what: str) -> Any:
    """Declare ``-o`` for the thing that is saved."""
    return option("output", f" {what}.")


Target = Annotated[str, argument("target")]
Source = Annotated[
    str, argument("target", ". Or a saved profile (.json, .json.gz).", metavar="TARGET|PROFILE")
]
PlanFile = Annotated[str, argument("plan_file")]
Force = Annotated[bool, option("force")]
Json = Annotated[bool, option("json")]
Debug = Annotated[bool, option("debug")]
Objective = Annotated[Literal["time", "flops"], option("objective", show_default=True)]
Budget = Annotated[str | None, option("budget", parser=size_in_gib)]
HostBudget = Annotated[str | None, option("host_budget", parser=size_in_gib)]
Solver = Annotated[str, option("solver", show_default=True)]
Techniques = Annotated[list[str] | None, option("techniques")]
Keep = Annotated[list[str] | None, option("keep")]
Never = Annotated[list[str] | None, option("never")]
Points = Annotated[int, option("points", show_default=True)]
Routed = Annotated[Literal["balanced", "worst"] | None, option("routing")]
Compiled = Annotated[list[str] | None, option("compile")]
MESH = (
    "dp=2,tp=4: ranks of each axis, the slowest links first. 8, or 8xh100: the best mesh of so many devices"
)
Mesh = Annotated[
    str | None,
    option("mesh", f"{MESH}. The batch is that of all together, the budget that of each."),
]


def optimizer_name(text: str) -> str:
    """Return the name of an optimizer that the user means; ``none`` stays.

    Raises:
        typer.BadParameter: no optimizer has that name.
    """
    try:
        # "none" is a choice on the command line, and no optimizer of the table.
        return NONE if text.lower() == NONE else named_optimizer(text).name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How to record a step. A field is None if its option is not given."""

    device: Annotated[str | None, option("device", f"{DEFAULT_DEVICE}; a saved profile has its own.")] = None
    runtime: Annotated[Runtime | None, option("runtime")] = None
    trace: Annotated[Run | None, option("trace")] = None
    mode: Annotated[Literal["train", "inference"] | None, option("mode")] = None
    accumulation_steps: Annotated[
        int | None, option("accumulation_steps", "; a saved profile has its own.")
    ] = None
    routing: Routed = None
    compile: Compiled = None
    world_size: Annotated[int | None, option("world_size")] = None
    fsdp_unit: Annotated[list[str] | None, option("fsdp_unit")] = None


_PARSERS = {"dtype": dtype_name, "optimizer": optimizer_name, "bnb_4bit_quant_storage": storage_name}


def _hf_options(after: str) -> dict[str, Any]:
    """Return an option for each field of ``ModelOptions``; ``after`` ends the help of each that a plan can supply."""
    names = [f.name for f in fields(ModelOptions)]
    return {
        name: option(name, "." if name == "fetch" else after, parser=_PARSERS.get(name)) for name in names
    }


HfOptions = Annotated[ModelOptions, _hf_options(".")]
PlannedHfOptions = Annotated[ModelOptions, _hf_options("; with a plan, the plan's.")]
"""For commands on a plan: its file supplies the options that are not given."""


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """How much memory a step may take on a device, and how it is planned."""

    # Not ``Budget``, whose help offers a share of the peak: here are several steps, each with its own peak.
    budget: Annotated[str | None, option("budget_of_steps", parser=size_in_gib)] = None
    device: Annotated[str | None, option("device", f"{DEFAULT_DEVICE}.")] = None
    solver: Solver = "best"
    techniques: Techniques = None


@dataclass(frozen=True, slots=True)
class CapacityOptions(BudgetOptions):
    """How to search for a batch size."""

    accumulation_steps: Annotated[int | None, option("accumulation_steps")] = None
    compile: Compiled = None
    at_most: Annotated[int | None, option("at_most")] = None


def written(options: dict[str, Any]) -> str:
    """Write options as on the command line: ``--seq 48 --dtype float32``. An option that is True is a name alone."""
    return " ".join(
        _flag(name) if value is True else f"{_flag(name)} {value}" for name, value in options.items()
    )


def named(options: dict[str, Any]) -> str:
    """Join the names of options for a sentence: ``--seq and --dtype``."""
    return " and ".join(map(_flag, options))


def _flag(name: str) -> str:
    flags = _ROWS[name]["flags"]
    return re.split("[ /]", flags)[0] if flags else f"--{name.replace('_', '-')}"
