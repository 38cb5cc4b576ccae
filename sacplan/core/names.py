"""Write names of modules and ops for people: layers that repeat share a name, ops are without their namespace."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from sacplan.core.elements import names_module, outermost, pattern_of
from sacplan.core.files import table_of
from sacplan.core.near import did_you_mean
from sacplan.core.program import ROOT_SCOPE, Phase, Program
from sacplan.errors import TraceError

OUTSIDE = "(outside the model)"
OPTIMIZER = "(optimizer)"

# By the name without namespace, overload and ``_backward``, as ``short_op`` looks it up.
_NAMES = {row["op"]: row["name"] for row in table_of(Path(__file__).with_name("op_names.csv"))}


def matching_modules(names: Sequence[str], patterns: Iterable[str], argument: str) -> tuple[str, ...]:
    """Return the modules that match patterns (``*`` matches dots, too), by pattern; of nested matches the outermost.

    Raises:
        TraceError: a pattern matches nothing; the message lists near names.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        # ``layers.*`` matches what is inside of a layer as well; only the layer is meant.
        matches = outermost(name for name in names if names_module(pattern, name))
        if not matches:
            known = f" Modules are {', '.join(map(repr, filter(None, names[:6])))}."
            raise TraceError(
                f"{argument}: no module matches {pattern!r}.{did_you_mean(pattern, names) or known} Patterns are "
                'matched whole, "*" also matches dots, and "" is the model itself.'
            )
        found.update(dict.fromkeys(matches))
    return tuple(found)


def pattern_over(fqns: Iterable[str]) -> str:
    """Return one name for several modules of the same pattern: ``*`` stands for the numbers that differ.

    Modules whose names are only numbers are listed: ``"0, 2"``.
    """
    names = list(dict.fromkeys(fqns))
    parts = zip(*(name.split(".") for name in names), strict=True)
    pattern = ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
    # A pattern of stars alone, as in an ``nn.Sequential``, tells nothing, so a few names are listed instead.
    return pattern if any(c.isalpha() for c in pattern) or len(names) > 6 else ", ".join(names)


def _numbers_of(fqns: Iterable[str]) -> str:
    """Return the numbers by which modules of a pattern differ, as ranges: ``"0-2,5"``; "" if several parts differ."""
    paths = [fqn.split(".") for fqn in fqns]
    differing = [set(part) for part in zip(*paths, strict=True) if len(set(part)) > 1]
    # Where several parts differ, ranges of each would also name modules that are not meant.
    if len(differing) != 1:
        return ""
    numbers = sorted(map(int, differing[0]))
    # numbers of one run have the same distance from their place in the list
    grouped = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[n for _, n in run] for _, run in grouped]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def one_name(names: Sequence[str]) -> str:
    """Return one name for names of one pattern: with the numbers by which they differ, or ``*`` if several parts do."""
    # Several ranges stand in braces, as a shell would expand them.
    numbers = _numbers_of(names) if len(names) > 1 else ""
    shown = f"{{{numbers}}}" if "," in numbers else numbers or "*"
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else shown for parts in columns)


def folded_names(modules: Iterable[str]) -> tuple[str, ...]:
    """Return one name for the modules of each pattern: ``model.layers.0-31.mlp``."""
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_pattern[pattern_of(module)].append(module)
    return tuple(one_name(same) for same in by_pattern.values())


def braced(names: Sequence[str]) -> list[str]:
    """Write names that differ in one part as one, as a shell would expand it: ``attn.{q_proj,k_proj}.lora_A``."""
    found = [name.split(".") for name in names]
    for i in range(max(map(len, found), default=0)):
        alike: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
        for parts in found:
            # A name of one part, or without a part ``i``, is left alone.
            rest = (*parts[:i], "*", *parts[i + 1 :]) if 1 < len(parts) > i else tuple(parts)
            alike[rest].append(parts)
        found = [
            same[0]
            if len(same) == 1
            else [*same[0][:i], f"{{{','.join(parts[i] for parts in same)}}}", *same[0][i + 1 :]]
            for same in alike.values()
        ]
    return [".".join(parts) for parts in found]


def module_of(program: Program, op: int) -> str | None:
    """Return the module whose forward an op belongs to: "" for the model itself, None outside of any."""
    scope = program.ops[op].scope
    return None if scope == ROOT_SCOPE else program.scopes[scope].fqn


def shown_module(program: Program, op: int, model: str) -> str:
    """Return the module of an op as reports show it; ``model`` stands for the model itself."""
    module = module_of(program, op)
    if module is not None:
        return module or model
    return OPTIMIZER if program.ops[op].phase == Phase.OPTIMIZER else OUTSIDE


def short_op(name: str) -> str:
    """Return a short name of an op.

    ``"aten.mm.default"`` becomes ``"matmul"``, ``"aten.add_.Tensor"`` ``"add_"``, ``"sacplan.copy_to_host"`` ``"copy to
    host"``.
    """
    parts = name.split(".")
    if parts[0] == "sacplan":  # an op that a plan adds
        return parts[1].replace("_", " ")
    if parts[0] != "aten" or len(parts) < 2:
        return name.removesuffix(".default")
    # What follows ``_backward`` in a name such as ``_softmax_backward_data`` is dropped.
    bare, backward, _ = parts[1].partition("_backward")
    shown = "attention" if "attention" in bare else _NAMES.get(bare, bare)
    return f"{shown} backward" if backward else shown


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which ``layers.10`` comes after ``layers.9``."""
    # Numbers compare by value, and come before words.
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split("."))
