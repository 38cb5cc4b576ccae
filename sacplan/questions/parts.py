"""The peak of a step in a few parts with plain names: parameters, saved activations, copies of the logits, ..."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sacplan.core.budget import format_bytes
from sacplan.core.names import short_op
from sacplan.core.program import ROOT_SCOPE, Phase, Program, StorageKind
from sacplan.profiling.profile import Profile
from sacplan.questions.alive import Origins, alive_at

_IN_A_LIST = re.compile(
    r"(?:(.+?)\.)?(\d+)(?:\.|$)"
)  # the list and the place of the outermost numbered module
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LOSS = "aten._log_softmax.default"
_SCORES = ("aten._softmax.default", "aten._safe_softmax.default")
_PLAIN = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.BUFFER: "buffers",
    StorageKind.GRADIENT: "gradients",
}
_PHASES = {
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.OPTIMIZER: "in the optimizer's step",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what is alive at the peak.

    Attributes:
        what: Its name in words.
        n_bytes: Its bytes.
    """

    what: str
    n_bytes: int

    def __str__(self) -> str:
        return f"{self.what} {format_bytes(self.n_bytes)}"


def peak_in_words(profile: Profile, program: Program) -> str:
    """Return a sentence on when the peak is, and on what is alive then. Parts below 1% are added up as the rest."""
    peak_bytes, parts = program.footprint.peak_bytes, parts_of(profile, program)
    shown = [part for part in parts if part.n_bytes >= peak_bytes / 100]
    rest = peak_bytes - sum(part.n_bytes for part in shown)
    said = [*map(str, shown), *([f"the rest {format_bytes(rest)}"] if rest else [])]
    return f"The peak, {format_bytes(peak_bytes)}, is {moment_of(profile, program)}. Alive then: {', '.join(said)}."


def parts_of(profile: Profile, program: Program) -> tuple[Part, ...]:
    """Return everything that is alive at the peak in parts, the largest first. Their bytes add up to the peak.

    Args:
        profile: The profile of the step.
        program: The program of the step, with a plan or without.
    """
    optimizer = (profile.fingerprint.setup.optimizer or "the optimizer").partition("(")[0]
    at = program.footprint.peak_op
    words = _Words(program, optimizer)
    found: dict[str, list[int]] = defaultdict(list)
    for s in alive_at(program, at):
        found[words.of(s)].append(s)
    sizes = program.liveness.alive(at)
    parts = [
        Part(words.counted(what, storages), sum(sizes[s] for s in storages))
        for what, storages in found.items()
    ]
    # A step without ops has no op at its peak (-1), and so no workspace.
    workspace = program.ops[at].workspace_bytes if at >= 0 else 0
    parts.append(Part(f"workspace of {short_op(program.ops[at].name)}", workspace))
    return tuple(sorted((part for part in parts if part.n_bytes), key=lambda part: -part.n_bytes))


def moment_of(profile: Profile, program: Program) -> str:
    """Return phase, op and module of the peak in words."""
    at = program.footprint.peak_op
    when = _PHASES[program.ops[at].phase]
    if program.ops[at].phase == Phase.OPTIMIZER:
        return when
    module, name, again = Origins(profile, program).made_by(at)
    return f"{when}, at {name} of {module}{', which runs again' if again else ''}"


class _Words:
    """Names the part that a storage belongs to.

    A recording has no names for tensors, so logits and attention scores are recognised by their number of elements:
    whatever is as large as the input of the loss counts as a copy of the logits.
    """

    def __init__(self, program: Program, optimizer: str) -> None:
        self.program, self.optimizer = program, optimizer
        # Several tensors may share a storage, some as views of a part: the largest one counts.
        self.elements: dict[int, int] = defaultdict(int)
        for tensor in program.tensors:
            s = tensor.storage
            self.elements[s] = max(self.elements[s], math.prod(tensor.shape))
        forward = [op for op in program.ops if op.phase == Phase.FORWARD]
        self.logits = {self._of_tensor(op.inputs[0]) for op in forward if op.name == _LOSS}
        self.scores = {self._of_tensor(op.outputs[0]) for op in forward if op.name in _SCORES}
        self.initial = frozenset(program.initial)

    def _of_tensor(self, tensor: int) -> int:
        return math.prod(self.program.tensors[tensor].shape)

    def of(self, s: int) -> str:
        """Return the name of the part that a storage belongs to, as a template for ``counted``.

        ``#`` stands for the number of storages. ``@`` is followed by the list whose layers are to be counted.
        """
        program, kind = self.program, self.program.storage_kinds[s]
        # From what is certain to what is guessed. Sizes come before phases, since forward and backward pass both make
        # copies of the logits.
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind == StorageKind.OPTIMIZER_STATE:
            return f"{self.optimizer}'s state"
        writer = program.writer.get(s)
        if writer is None:
            if s in self.initial:
                return "the batch and what else is there before the step"
            return "workspaces of libraries" if kind == StorageKind.OTHER else "made unseen"
        op = program.ops[writer]
        if op.phase == Phase.OPTIMIZER:
            return f"{self.optimizer}'s temporaries"
        elements = self.elements[s]
        if elements in self.logits:
            return "# of the logits"
        if elements in self.scores:
            return "attention scores"
        if op.recomputes >= 0:
            return "activations made again"
        if op.phase == Phase.BACKWARD:
            return "temporaries of the backward pass"
        found = _IN_A_LIST.match(self._module(writer))
        if kind == StorageKind.ACTIVATION:
            return f"saved activations of @{found[1] or ''}" if found else "other saved activations"
        return "temporaries of the forward pass"

    def _module(self, op: int) -> str:
        scope = self.program.ops[op].scope
        return "" if scope == ROOT_SCOPE else self.program.scopes[scope].fqn

    def counted(self, what: str, storages: Iterable[int]) -> str:
        """Fill in the template of a part: how many storages, or how many layers, it has."""
        storages = list(storages)
        if what.startswith("#"):
            n = len(storages)
            said = _NUMBERS[n] if n < len(_NUMBERS) else str(n)
            return f"{said} {'copy' if n == 1 else 'copies'}{what[1:]}"
        said, in_layers, name = what.partition("@")
        if not in_layers:
            return what
        # By number in the list: each layer saves several activations, and counts once.
        places = {
            match[2] for s in storages if (match := _IN_A_LIST.match(self._module(self.program.writer[s])))
        }
        layers = f"{len(places)} layer{'s' if len(places) > 1 else ''}"
        return f"{said}{layers} ({name})" if name else f"{said}{layers}"
