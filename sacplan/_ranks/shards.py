"""The shard of each parameter on a rank, and the unit of ``fully_shard`` that the parameter belongs to.

    units = resolve_units(["layers.*", ""], program)
    owned = owners(parameters_of(program, fingerprint.local_parameters), units, program)

A parameter belongs to the innermost unit around it. Its shard is a slice of dim 0 as ``torch.chunk`` cuts it,
padded to the size of the first one. Buffers of all-gathers and reduce-scatters have that size times the ranks.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch

from sacplan._device.devices import DeviceSpec
from sacplan._program.fingerprint import FingerprintEntry
from sacplan._program.mixed_precision import MixedPrecision
from sacplan._program.program import Phase, Program, StorageKind, is_inside
from sacplan._program.rewriting import Table
from sacplan.errors import TraceError

_FROZEN = "frozen "


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model, as it is on a single device.

    Attributes:
        name: in ``named_parameters()``; a tied parameter goes by its first name.
        storage: of the program.
        shape: of the unsharded parameter.
        dtype: for example ``"torch.float32"``.
        trainable: whether it requires a gradient.
        compute_dtype: type in which a unit gathers it, and in which modules see it; empty: ``dtype``.
    """

    name: str
    storage: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    compute_dtype: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)

    @property
    def compute_itemsize(self) -> int:
        """Bytes of one element while it is gathered, and of its gradient."""
        return itemsize(self.compute_dtype or self.dtype)

    @property
    def is_cast(self) -> bool:
        """Whether a unit gathers it in another type than its own."""
        return self.compute_dtype not in ("", self.dtype)

    @property
    def n_bytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return prod(self.shape) * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient before that is reduced."""
        return prod(self.shape) * self.compute_itemsize

    def shard_elements(self, shards: int) -> int:
        """Return the elements of the largest shard, to which the others are padded."""
        return -(-self.shape[0] // shards) * prod(self.shape[1:])

    def shard_bytes(self, shards: int) -> int:
        """Return the bytes of the largest shard."""
        return self.shard_elements(shards) * self.itemsize

    def gathered_bytes(self, shards: int) -> int:
        """Return the bytes of all shards together in the type in which they are gathered, padding included."""
        return shards * self.shard_elements(shards) * self.compute_itemsize

    def is_padded(self, shards: int) -> bool:
        """Whether the ranks do not divide the first dimension."""
        return self.shape[0] % shards != 0


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of ``"torch.float32"`` or ``"float32"``."""
    size: int = getattr(torch, dtype.rpartition(".")[2]).itemsize
    return size


def parameters_of(program: Program, entries: Sequence[FingerprintEntry]) -> tuple[Parameter, ...]:
    """Return the parameters of a recorded step from name, shape and dtype (``Fingerprint.local_parameters``).

    The recorder takes the storages of parameters before all others, in the order of ``named_parameters()``.

    Raises:
        TraceError: parameters share storages without being the same parameter, or the entries are of another model.
    """
    # Parameters and storages are paired by position alone, so the counts must agree. They do not if two
    # parameters are views of one storage.
    storages = sorted(s for s in program.initial if program.storage_kinds[s] == StorageKind.PARAMETER)
    if len(storages) != len(entries):
        raise TraceError(
            f"the recording has {len(storages)} storages of parameters and the model {len(entries)} parameters. "
            "Parameters that are views of one storage cannot be sharded; give each its own, or plan for one device."
        )
    found = []
    for storage, (name, shape, dtype) in zip(storages, entries, strict=True):
        trainable = not dtype.startswith(_FROZEN)
        p = Parameter(name, storage, shape, dtype.removeprefix(_FROZEN), trainable)
        # Not equality: the allocator rounds storages up. A storage that is too small is one of another model.
        if p.n_bytes > program.storage_bytes[storage]:
            raise TraceError(
                f"parameter {name!r} takes {p.n_bytes} bytes, its storage in the recording has "
                f"{program.storage_bytes[storage]}. Is the recording of this model?"
            )
        found.append(p)
    return tuple(found)


def parameter_bytes(
    program: Program,
    parameters: Iterable[Parameter],
    rank_bytes: Sequence[int] | Table[int],
    spec: DeviceSpec,
) -> dict[str, int]:
    """Return the bytes of the parameters of each module, on one rank.

    Args:
        program: of the whole model.
        parameters: those whose size differs on the rank; others may be among them.
        rank_bytes: by storage, its size on the rank.
        spec: the device; its allocator's rounding counts.
    """
    found: dict[str, int] = dict(program.parameter_bytes)
    for p in parameters:
        saved = spec.round_up(p.n_bytes) - rank_bytes[p.storage]
        for fqn in found:
            if is_inside(p.name, fqn):
                found[fqn] -= saved
    return found


def resolve_units(patterns: Sequence[str], program: Program) -> tuple[str, ...]:
    """Return the modules that patterns name, in the order of ``named_modules()``; ``""`` is the model itself.

    A pattern is matched with ``fnmatch`` (``*`` also matches dots) against modules that are called in the step;
    of nested matches of one pattern the outermost counts. Units nest by naming both: ``["layers.*", "layers.*.mlp"]``.

    Raises:
        TraceError: a pattern that matches nothing; it lists near names.
    """
    if isinstance(patterns, str) or not patterns:
        raise TraceError(
            f"the units of FSDP2 are {patterns!r}; give a list of patterns for module names, such as "
            '["layers.*", ""] ("" is the model itself), or None for DistributedDataParallel.'
        )
    called = program.calls
    chosen: set[str] = set()
    for pattern in patterns:
        matches = {fqn for fqn in called if fnmatchcase(fqn, pattern)}
        if not matches:
            raise TraceError(_unknown(pattern, program))
        # ``*`` also matches dots, so ``layers.*`` matches what is inside of a layer as well; only the layer
        # is meant.
        chosen.update(fqn for fqn in matches if not any(is_inside(fqn, other) for other in matches))
    # The keys are in the order of ``named_modules()``.
    names = {fqn: i for i, fqn in enumerate(program.parameter_bytes)}
    return tuple(sorted(chosen, key=lambda fqn: names.get(fqn, len(names))))


def _unknown(pattern: str, program: Program) -> str:
    uncalled = [f for f in program.parameter_bytes if fnmatchcase(f, pattern)]
    if uncalled:
        return (
            f"units: {pattern!r} matches {_listed(uncalled[:3])}, but no module of that name is called in the "
            "step. fully_shard gathers where a module is called; name the modules inside of it instead, such as "
            f"{uncalled[0] + '.*'!r}."
        )
    names = [fqn for fqn in program.calls if fqn]
    near = difflib.get_close_matches(pattern, names, n=4, cutoff=0.4)
    near += [fqn for fqn in names if fqn.endswith("." + pattern) and fqn not in near][:3]
    return (
        f"units: no module matches {pattern!r}; "
        + (f"near names are {_listed(near)}" if near else f"modules are {_listed(names[:6])}")
        + '. Patterns are matched whole, "*" also matches dots, and "" is the model itself.'
    )


def owners(
    parameters: Sequence[Parameter],
    units: Sequence[str],
    program: Program,
    policy: MixedPrecision | None = None,
    ignored: Collection[str] = (),
) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of each unit, in the order of the units. Those outside of all units are left out.

    ``policy`` says in which type units compute. ``ignored`` are names of parameters that belong to no unit.

    Raises:
        TraceError: a scalar parameter, trainable ones of several types in a unit, or one that is used outside of
            its unit's calls. None of these runs with ``fully_shard``.
    """
    found: dict[str, list[Parameter]] = {unit: [] for unit in units}
    owner_of: dict[int, str] = {}
    unknown = sorted(set(ignored) - {p.name for p in parameters})
    if unknown:
        raise TraceError(f"ignored_params: the model has no parameters {_listed(unknown[:3])}.")
    for p in parameters:
        if p.name in ignored:
            continue
        around = [unit for unit in units if not unit or p.name.startswith(unit + ".")]
        if around:
            # Units around one parameter are nested, so the longest name is the innermost.
            owner = max(around, key=len)
            found[owner].append(p if policy is None else _computing(p, policy))
            owner_of[p.storage] = owner
    for unit, owned in found.items():
        _check_can_be_sharded(unit, owned)
    _check_used_inside(parameters, owner_of, program)
    return {unit: tuple(owned) for unit, owned in found.items() if owned}


def _computing(p: Parameter, policy: MixedPrecision) -> Parameter:
    return dataclasses.replace(
        p, compute_dtype=f"torch.{policy.compute_dtype(p.dtype.removeprefix('torch.'))}"
    )


def _check_can_be_sharded(unit: str, owned: Sequence[Parameter]) -> None:
    # A scalar has no dimension to shard: ``fully_shard`` raises for it (``_fsdp_init.py``).
    scalar = next((p.name for p in owned if not p.shape), None)
    if scalar is not None:
        raise TraceError(
            f"parameter {scalar!r} is a scalar, which fully_shard does not shard. Make it a tensor of one element, "
            "of shape (1,)."
        )
    # One reduce-scatter takes all gradients of a unit, so ``_init_mp_dtypes`` in ``_fsdp_param_group.py``
    # raises for several types. Frozen parameters have no gradient and may differ.
    dtypes = sorted({p.dtype for p in owned if p.trainable})
    if len(dtypes) > 1:
        raise TraceError(
            f"unit {unit!r} holds parameters of {' and '.join(dtypes)}: fully_shard reduces the gradients of a "
            "unit together and wants one type. Convert them, or make the modules of the other type units of "
            "their own."
        )


def _check_used_inside(
    parameters: Sequence[Parameter], owner_of: Mapping[int, str], program: Program
) -> None:
    names = {p.storage: p.name for p in parameters}
    inside: dict[int, frozenset[str]] = {}
    for op in program.ops:
        used = [s for s in op.reads if owner_of.get(s, "")]
        # Only the forward pass is checked. The backward pass of a call reads what its forward read, and is
        # gathered for.
        if not used or op.phase != Phase.FORWARD:
            continue
        if op.scope not in inside:
            # Outside of all calls, as in a loss function, no unit is gathered, not even the model itself.
            scopes = [op.scope, *program.ancestors(op.scope)] if op.scope >= 0 else []
            inside[op.scope] = frozenset(program.scopes[s].fqn for s in scopes)
        for s in used:
            if owner_of[s] not in inside[op.scope]:
                where = program.scopes[op.scope].fqn if op.scope >= 0 else "the loss"
                raise TraceError(
                    f"parameter {names[s]!r} belongs to the unit {owner_of[s]!r} and is used in {where!r}, where "
                    "fully_shard does not gather it. Is it shared, or read from outside? Give both modules the "
                    'same unit: leave them to the model itself, units=[..., ""].'
                )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
