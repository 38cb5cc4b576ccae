"""Pins: the ops and modules that a plan must leave alone, given as patterns and checked against the recorded step.

    plan = sacplan.plan(profile, "60%", keep=["*.router", "aten.topk"], never=["vision_tower.*"])

How a pattern is read:

- One that starts with ``aten.`` or ``prims.``, or has ``::`` in it, names *ops*. It matches (``fnmatch``) the name
  with the overload, ``aten.topk.default``, or without it, ``aten.topk``. ``::`` is read as a dot, so that ops of other
  namespaces can be named: ``mylib::scan`` matches ``mylib.scan.default``.
- Any other names *modules*, as ``named_modules()`` does. With ``*``, ``?`` or ``[`` it is a pattern for the whole name
  (``*`` also matches dots), else it is the name itself. What is inside of a module that matches is matched too, by
  name and by call: ``keep=["encoder"]`` holds for ``encoder.layers.0`` and for a module from elsewhere that runs in
  ``encoder``. ``vision_tower.*`` matches what is inside of ``vision_tower``, not the module itself.

``keep``: the outputs of ops of that name, and of any op in these modules, are never discarded. ``never``: the same for
these modules, and neither they nor anything around or inside of them is a unit, so nothing watches their ops.
A module around such a module is planned for by the units that are left inside of it. Its own ops, outside of these
units, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from sacplan.core.elements import names_module
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.near import did_you_mean
from sacplan.core.program import ROOT_SCOPE, Phase, Program
from sacplan.errors import PlanError

_NAMESPACES = ("aten.", "prims.")


@dataclass(frozen=True, slots=True)
class Pins:
    """Patterns, and the ops and modules of one step that they match.

    Attributes:
        keep, never: as given.
        kept_ops: recorded forward ops that must not run again: pinned, or with no module around them that may be
            a unit.
        named_ops: those of ``kept_ops`` that are pinned.
        widest_units: by scope, the outermost module call, itself or around it, that may be a unit; ``ROOT_SCOPE`` where
            there is none. None where all may: nothing is in ``never``, and no module was compiled on its own.
        compiled_ops, compiled_calls: ops and calls in modules that are compiled on their own.
    """

    keep: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    kept_ops: frozenset[int] = frozenset()
    widest_units: tuple[int, ...] | None = None
    named_ops: frozenset[int] = frozenset()
    compiled_ops: frozenset[int] = frozenset()
    compiled_calls: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.keep) or self.widest_units is not None

    @property
    def said(self) -> str:
        """Why ops and modules are left alone, in words."""
        named = (("keep", self.keep), ("never", self.never))
        words = [f"{argument}={list(patterns)!r}" for argument, patterns in named if patterns]
        # Modules may be left alone without a pattern, because of how the model was made.
        if not words or (self.widest_units is not None and not self.never):
            words.append(
                "modules compiled on their own or made by TorchScript, around which there is no unit"
            )
        return " and ".join(words)

    @property
    def key(self) -> tuple[frozenset[int], tuple[int, ...] | None]:
        """Equal for pins that leave the same ops and modules alone."""
        return self.kept_ops, self.widest_units

    @property
    def outside(self) -> Pins:
        """The pins for a technique that leaves compiled modules alone."""
        if self.widest_units is None or not self.compiled_calls:
            return self
        widest = tuple(
            ROOT_SCOPE if scope in self.compiled_calls else unit
            for scope, unit in enumerate(self.widest_units)
        )
        kept, named = self.kept_ops | self.compiled_ops, self.named_ops | self.compiled_ops
        return replace(self, kept_ops=kept, named_ops=named, widest_units=widest)

    def widest_unit(self, scope: int) -> int:
        """Return the widest unit of a scope, or ``ROOT_SCOPE`` where there is none or every module may be a unit."""
        if scope == ROOT_SCOPE or self.widest_units is None:
            return ROOT_SCOPE
        return self.widest_units[scope]

    def may_be_discarded_in(self, scope: int) -> bool:
        """Whether a module call, or one around it, may be a unit."""
        return self.widest_units is None or self.widest_units[scope] != ROOT_SCOPE

    def may_be_a_unit(self, program: Program, fqn: str) -> bool:
        """Whether nothing that is left alone runs around or inside of a module, in any of its calls."""
        return all(map(self.may_be_discarded_in, program.calls[fqn]))

    def units_in(self, program: Program, fqn: str) -> list[str]:
        """Return the module; if it must not be a unit, the outermost modules in it that may be, in execution order."""
        if self.may_be_a_unit(program, fqn):
            return [fqn]
        # Calls that are their own widest unit are the outermost ones that may be units.
        widest_units = [scope for scope in range(len(program.scopes)) if self.widest_unit(scope) == scope]
        inside = [s for s in widest_units if not set(program.calls[fqn]).isdisjoint(program.ancestors(s))]
        return list(dict.fromkeys(program.scopes[scope].fqn for scope in inside))


NO_PINS = Pins()


def resolve_pins(
    program: Program, fingerprint: Fingerprint, keep: Sequence[str], never: Sequence[str]
) -> Pins:
    """Match the patterns against a recorded step.

    Raises:
        PlanError: a pattern matches nothing, or is no pattern; the message lists near names.
    """
    # Malformed patterns are refused first. Where nothing is to be left alone the step is not looked at.
    keep, never = _patterns("keep", keep), _patterns("never", never)
    compiled = _compiled(program, fingerprint)
    scripted = fingerprint.setup.scripted
    checkpointed = fingerprint.setup.checkpointed
    if not keep and not never and not compiled and not scripted and not checkpointed:
        return NO_PINS
    known = _Names(program, fingerprint)
    kept_ops: set[int] = set()
    kept_modules: set[str] = set()
    for pattern in keep:
        if _names_ops(pattern):
            kept_ops.update(known.ops(pattern))
        else:
            kept_modules.update(known.modules(pattern, "keep"))
    # TorchScript modules are left alone as if ``never`` named them. Compiled ones may be units themselves; only modules
    # around them may not.
    left_alone = {fqn for pattern in never for fqn in known.modules(pattern, "never")}
    alone = _scopes_of(program, left_alone.union(scripted))
    widest_units = _widest_units(program, alone, compiled) if never or compiled or scripted else None
    # Modules that the step itself checkpoints are kept, as if ``keep`` named them.
    pinned = alone | _scopes_of(program, kept_modules.union(checkpointed))
    forward = [i for i, op in enumerate(program.ops) if op.phase == Phase.FORWARD]
    named_ops = kept_ops.union(i for i in forward if program.ops[i].scope in pinned)
    kept_ops = set(named_ops)
    if widest_units is not None:
        # No unit holds these ops, so nothing could run them again.
        scopes = ((i, program.ops[i].scope) for i in forward)
        kept_ops.update(i for i, s in scopes if s == ROOT_SCOPE or widest_units[s] == ROOT_SCOPE)
    how = fingerprint.setup.compiled
    calls = frozenset(_scopes_of(program, () if how is None else how.modules))
    inside = frozenset(i for i, op in enumerate(program.ops) if op.scope in calls)
    if how is not None:
        kept_ops.update(i for i in inside if program.ops[i].name in how.untraced)
    found = Pins(keep, never, frozenset(kept_ops), widest_units, frozenset(named_ops), inside, calls)
    # A compiled graph runs as it was recorded: nothing of it is rewritten.
    return found.outside if how is not None and how.recorded else found


def _patterns(argument: str, patterns: Sequence[str]) -> tuple[str, ...]:
    # A string is a sequence, too: it would be read as patterns of one letter each.
    if isinstance(patterns, str):
        raise PlanError(
            f"{argument}={patterns!r} is one string. Give a list of patterns: {argument}=[{patterns!r}]."
        )
    found = tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, str) or not pattern:
            raise PlanError(
                f"{argument} has {pattern!r} in it; a pattern is a text such as '*.router', which names modules, "
                "or 'aten.topk', which names ops. '*' is every module."
            )
        if argument == "never" and _names_ops(pattern):
            raise PlanError(
                f"never has {pattern!r} in it, which names ops; never takes modules. What an op makes stays with "
                f"keep=[{pattern!r}]."
            )
    return found


def _names_ops(pattern: str) -> bool:
    return pattern.startswith(_NAMESPACES) or "::" in pattern


class _Names:
    """The modules and ops of the forward pass that patterns can match."""

    def __init__(self, program: Program, fingerprint: Fingerprint) -> None:
        self._program = program
        parameters = (name.rpartition(".")[0] for name, _, _ in fingerprint.parameters)
        called = [scope.fqn for scope in program.scopes]
        # A container that is never called, or a module that this batch does not reach, is a module still.
        self._modules = list(dict.fromkeys(_with_outer((*called, *parameters))))
        self._ops: dict[str, list[int]] = {}
        self._later: set[str] = set()
        for i, op in enumerate(program.ops):
            if op.phase == Phase.FORWARD:
                self._ops.setdefault(op.name, []).append(i)
            else:
                self._later.add(op.name)

    def modules(self, pattern: str, argument: str) -> list[str]:
        """Return the modules that match the pattern, without what is inside of them."""
        found = [name for name in self._modules if names_module(pattern, name)]
        if not found:
            message = f"{argument}: {pattern!r} matches nothing. It was read as the name of a module."
            message += did_you_mean(pattern, self._modules)
            # Whoever writes ``topk`` or ``*.topk`` may have meant the op, and left out its namespace.
            ops = [name for name in self._packets() if name.partition(".")[2] == pattern.strip("*.")]
            if ops:
                message += f" To name an op, write {ops[0]!r}."
            raise PlanError(f"{message} See sacplan.plan for how patterns are read.")
        return found

    def ops(self, pattern: str) -> list[int]:
        """Return the recorded forward ops that match the pattern."""
        dotted = pattern.replace("::", ".")
        found = [i for name, ops in self._ops.items() if _matches(name, dotted) for i in ops]
        if not found:
            message = f"keep: {pattern!r} matches nothing. It was read as the name of an op."
            if any(_matches(name, dotted) for name in self._later):
                message += " One of that name runs only after the forward pass, where nothing is discarded."
            else:
                message += did_you_mean(dotted, self._packets())
            raise PlanError(f"{message} See sacplan.plan for how patterns are read.")
        # Views have no memory of their own, so keeping them keeps nothing.
        if not any(self._program.ops[i].writes or self._program.ops[i].mutates for i in found):
            raise PlanError(
                f"keep: {pattern!r} names ops that make nothing of their own, only views of what other ops made. Name "
                "the op that makes the tensor, or the module that it runs in."
            )
        return found

    def _packets(self) -> list[str]:
        return list(dict.fromkeys(_packet(name) for name in self._ops))


def _packet(name: str) -> str:
    """Return ``aten.mm`` for ``aten.mm.default``."""
    return name.rpartition(".")[0]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(_packet(name), pattern)


def _with_outer(names: Iterable[str]) -> Iterable[str]:
    """Yield each name after those of the modules around it, of which ``""``, the model, is the first."""
    for name in names:
        yield ""
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            yield ".".join(parts[:depth])


def _scopes_of(program: Program, modules: Iterable[str]) -> set[int]:
    """Return the calls of these modules, and every call inside of one."""
    wanted = set(modules)
    found: set[int] = set()
    for i, scope in enumerate(program.scopes):  # a call comes after the one around it
        # Inside by call or by name: a module may be called outside of the module that holds it.
        if scope.parent in found or not wanted.isdisjoint(_with_outer((scope.fqn,))):
            found.add(i)
    return found


def _compiled(program: Program, fingerprint: Fingerprint) -> set[int]:
    """Return the calls of modules compiled on their own: in a unit around them they would not run compiled."""
    how = fingerprint.setup.compiled
    if how is None:
        return set()
    found = {call for fqn in how.modules for call in program.calls.get(fqn, ())}
    # Each call from a broken module lies in a graph of its own: no unit is around that graph.
    scopes = program.scopes
    return found | {i for i, s in enumerate(scopes) if s.parent >= 0 and scopes[s.parent].fqn in how.broken}


def _widest_units(program: Program, alone: set[int], compiled: set[int]) -> tuple[int, ...]:
    """Return ``Pins.widest_units``.

    A module with a call in or around a module that is left alone is no unit in any of its calls: a recipe belongs to a
    module, not to a call.
    """
    # Barred are the modules left alone, and all around them or around compiled ones. Of the other calls, the outermost
    # around a scope, or the scope, is its widest unit.
    scopes = program.scopes
    barred = {scopes[scope].fqn for scope in alone}
    barred.update(scopes[a].fqn for scope in alone | compiled for a in program.ancestors(scope))
    found = program.outermost_calls(barred)
    return tuple(found[i] for i in range(len(scopes)))
