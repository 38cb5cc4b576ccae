"""Agreement of ranks on random numbers and the batch: without it, replicated tensors would differ.

Each rank draws replicated numbers by itself, from its own generators, so these have to agree. Yet many programs seed
each rank differently, once or in every step. When a step begins, ranks compare their generators; if these differ, all
take over the state of rank 0. DTensor does the same (``torch.distributed.tensor._random``), but only once. After each
draw all generators agree again (``Grid.drawing``). A draw that is made again, by a recipe or under
``torch.utils.checkpoint``, starts from a saved state, and so gives the same numbers on each rank, too.

In the first step ranks also compare what the model is called with, and then every plain tensor that an op takes
together with a sharded one, such as labels: plain tensors count as replicated. All ranks see the same digests, so they
all raise, and none of them waits in a collective for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from sacplan._torch.dtensors import DTensor
from sacplan._torch.fake_tensors import active_fake_mode
from sacplan._torch.private import modes_off
from sacplan.errors import PlanMismatch

_DIGEST = 16  # bytes
_PIECE = 1 << 20  # bytes of a tensor that are copied to the host at once


class Agreement:
    """Keeps the ranks of one model in agreement.

    Args:
        device_type: of the mesh, whose collectives take tensors there.
        check: whether batches are compared, or only generators.
    """

    def __init__(self, device_type: str, check: bool) -> None:
        self._device_type, self._check = device_type, check
        self._shared: list[torch.Generator] = []  # those that are known to agree in this step
        self._checked: set[tuple[bool, bool]] = set()
        # The plain tensors of the step that is checked, and their versions; None in other steps.
        self._seen: WeakIdKeyDictionary | None = None

    def begin(
        self, module: torch.nn.Module, fqn: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the generators agree, and compare what is passed; call it before a forward pass, on all ranks.

        A call of the model begins a step. Of a part of the model, that is only a call where none has begun.

        Raises:
            PlanMismatch: ranks were given tensors of other shapes, or in the first step of other values.
        """
        # A part of the model runs within a step that has begun; under fake tensors there is nobody to compare with.
        if (fqn and self._shared) or active_fake_mode() is not None:
            return
        # The first step of each mode is checked: training and evaluation have different batches.
        mode = module.training, torch.is_grad_enabled()
        is_first = self._check and mode not in self._checked
        self._checked.add(mode)
        self._seen = WeakIdKeyDictionary() if is_first else None
        # A program may have seeded its generators since the last step.
        self._shared.clear()
        with modes_off():
            given = list(_named(args, kwargs)) if self._check else []
            shapes = _digest_of(f"{name} {_described(value)}".encode() for name, value in given)
            # Shapes in every step, since ranks with other shapes would wait for each other for ever. Values
            # once, since they cost a copy to the host.
            values = _digest_of(part for _, t in given for part in _bytes_of(t)) if is_first else b""
            found = self._make_agree(self._defaults(), shapes + values)
            if any(theirs != found[0] for theirs in found):
                self._raise(f"the call of {_module(fqn)}", given, is_first)
        for _, t in given:
            self._remember(t)

    def end(self) -> None:
        """Forget what was compared, after a backward pass: the program may seed its ranks anew."""
        self._shared.clear()
        self._seen = None

    def share(self, generator: torch.Generator) -> None:
        """Make ranks agree on a generator before they draw replicated numbers, once in a step."""
        # Agreed on in this step already, or nothing is drawn.
        if any(known is generator for known in self._shared) or active_fake_mode() is not None:
            return
        with modes_off():
            self._make_agree([generator], b"")

    @property
    def is_checking(self) -> bool:
        """Whether plain tensors are compared in this step."""
        return self._seen is not None

    def check_plain(self, op: str, module: str, tensors: Iterable[torch.Tensor]) -> None:
        """In the first step, compare the plain tensors that an op reads together with sharded ones.

        Raises:
            PlanMismatch: they differ between ranks.
        """
        if active_fake_mode() is not None:
            return
        new = [t for t in tensors if self._remember(t)]
        # All ranks run the same ops on the same tensors, so all return here or none: the collective below
        # stays paired.
        if not new:
            return
        with modes_off():
            given = [(f"the tensor of shape {tuple(t.shape)}", t) for t in new]
            found = _exchanged(_digest_of(part for t in new for part in _bytes_of(t)), self._device_type)
            if any(theirs != found[0] for theirs in found):
                self._raise(f"{op} in {_module(module)}", given, True)

    def _remember(self, t: Any) -> bool:
        """Whether a plain tensor has not been compared, or was written since."""
        if self._seen is None or not isinstance(t, torch.Tensor) or isinstance(t, DTensor):
            return False
        version = -1 if t.is_inference() else t._version
        # Compared already, and not written since.
        if self._seen.get(t) == version:
            return False
        self._seen[t] = version
        return True

    def _defaults(self) -> list[torch.Generator]:
        found = [torch.default_generator]
        if self._device_type != "cpu":
            module = torch.get_device_module(self._device_type)
            found.append(module.default_generators[module.current_device()])
        return found

    def _make_agree(self, generators: Sequence[torch.Generator], more: bytes) -> list[bytes]:
        """Compare generators, and set those that differ to the state of rank 0; returns what ranks sent as ``more``."""
        state = _states(generators)
        sent = _exchanged(_digest_of([state.numpy().tobytes()]) + more, self._device_type)
        # All ranks see the same digests, so all take part in the broadcast or none.
        if any(theirs[:_DIGEST] != sent[0][:_DIGEST] for theirs in sent):
            state = state.to(self._device_type)
            dist.broadcast(state, src=0)
            state = state.cpu()
            for generator in generators:
                own, state = state.split(
                    [len(generator.get_state()), len(state) - len(generator.get_state())]
                )
                generator.set_state(own.clone())
        self._shared += generators
        return [theirs[_DIGEST:] for theirs in sent]

    def _raise(self, where: str, given: Sequence[tuple[str, Any]], with_values: bool) -> None:
        """Say which ranks differ in what. Called on all ranks."""
        mine = [(n, _described(v), _digest_of(_bytes_of(v)) if with_values else b"") for n, v in given]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        first = everyone[0]
        # Every rank comes here, as all have seen the same digests: one more collective is safe.
        others = [rank for rank, theirs in enumerate(everyone) if theirs != first]
        theirs = everyone[others[0]]
        ours, other = next(((a, b) for a, b in zip(first, theirs, strict=False) if a != b), (None, None))
        if ours is None or other is None or ours[0] != other[0]:
            what = f"what is passed ({len(first)} values on rank 0, {len(theirs)} on rank {others[0]})"
        elif ours[1] != other[1]:
            what = f"{ours[0]} ({ours[1]} on rank 0, {other[1]} on rank {others[0]})"
        else:
            what = f"the values of {ours[0]}"
        raise PlanMismatch(
            f"in {where}, ranks differ in {what}: {', '.join(map(str, others))} from rank 0. With a plan on a "
            "mesh each rank is given the same whole batch, and computes its own part of it. Make the batch from the "
            "same seed on each rank, and leave out a DistributedSampler."
        )


def _module(fqn: str) -> str:
    return f"module {fqn!r}" if fqn else "the model"


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values in the arguments of a call, with names for errors; mappings in the order of their keys."""
    for i, value in enumerate(args):
        yield from _inside(f"argument {i}", value)
    for name in sorted(kwargs):
        yield from _inside(f"argument {name!r}", kwargs[name])


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _inside(f"{name}[{key!r}]", value[key])
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _inside(f"{name}[{i}]", item)
    else:
        yield name, value


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__


def _bytes_of(value: Any) -> Iterator[bytes]:
    """Yield the values of a plain tensor in pieces, so that nothing as large as the tensor is allocated on its device.

    Ranks have other parts of a DTensor. A tensor that is not strided, or has no values, has no digest.
    """
    # Nothing to compare, or parts that are meant to differ.
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.numel():
        return
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return
    t = value.detach()
    for dim, stride in enumerate(t.stride()):  # an expanded mask is read once
        if stride == 0:
            t = t.narrow(dim, 0, 1)
    pieces = t.reshape(-1).split(max(1, _PIECE // t.element_size())) if t.is_contiguous() else _rows(t)
    for piece in pieces:
        yield piece.resolve_conj().resolve_neg().contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _rows(t: torch.Tensor) -> Iterator[torch.Tensor]:
    if t.dim() <= 1 or t.nbytes <= _PIECE:
        yield t.reshape(-1)
        return
    for row in t.unbind(0):
        yield from _rows(row)


def _digest_of(parts: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        found.update(part)
    return found.digest()


def _states(generators: Sequence[torch.Generator]) -> torch.Tensor:
    return torch.cat([generator.get_state() for generator in generators])


def _exchanged(mine: bytes, device_type: str) -> list[bytes]:
    """Return what each rank passes, which has one length on all."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device_type)
    found = torch.empty(dist.get_world_size() * len(mine), dtype=torch.uint8, device=device_type)
    dist.all_gather_into_tensor(found, sent)
    whole = found.cpu().numpy().tobytes()
    return [whole[i : i + len(mine)] for i in range(0, len(whole), len(mine))]
