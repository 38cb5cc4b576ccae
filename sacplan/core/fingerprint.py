"""Identify the model and the batch of a plan: names, shapes and types of parameters and of the batch's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from msgspec import Struct, structs

from sacplan.core.files import Count, Name
from sacplan.core.model_calls import ModelCall, tensor_paths
from sacplan.core.setup import Setup
from sacplan.errors import PlanError, PlanMismatch
from sacplan.torch_compat.compiling import compiled_in_place
from sacplan.torch_compat.distributed_modules import unwrapped
from sacplan.torch_compat.local_tensors import local_part, stands_for_another

FingerprintEntry = tuple[Name, tuple[Count, ...], Name]
"""Name, shape and dtype."""


class Fingerprint(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The identity of a model and a batch, as far as a plan depends on it.

    Attributes:
        model_class: name of the model's class.
        parameters: name, shape and dtype (``"frozen "`` before it where no gradient is wanted). The shape of a DTensor
            is the global one, so that a plan that one rank made applies on all of them.
        batch: path, shape and dtype of each tensor.
        local_shapes: of parameters that are DTensors, on the rank that made this. Not compared: on the last ranks they
            may be smaller.
        setup: how the recorded step was set up. A difference causes a ``SacplanWarning`` only.
        calls: the different calls of the model in the step. Not compared either: a watched model says where a later
            call takes more.
        target: the arguments from which the command line made the model and the batch, if it can make them again.
    """

    model_class: Name
    parameters: tuple[FingerprintEntry, ...]
    batch: tuple[FingerprintEntry, ...]
    setup: Setup = Setup()
    target: Mapping[Name, Count | str] | None = None
    local_shapes: Mapping[Name, tuple[Count, ...]] | None = None
    calls: tuple[ModelCall, ...] = ()

    @classmethod
    def of(cls, model: torch.nn.Module, batch: Any) -> Fingerprint:
        """Make the fingerprint of a model and a batch (real, meta or fake)."""
        batches, model = _tensors(batch), unwrapped(model)
        return cls(type(model).__name__, _parameters(model), batches, local_shapes=local_shapes_of(model))

    @property
    def rows(self) -> int:
        """The number of samples in the batch: dimension 0 of its first tensor that has dimensions.

        Raises:
            PlanError: no tensor of the batch has a dimension.
        """
        for _, shape, _ in self.batch:
            if shape:
                return int(shape[0])
        raise PlanError("the batch has no tensor with a dimension, so it cannot be spread over ranks.")

    @property
    def calls_or_batch(self) -> tuple[ModelCall, ...]:
        """The calls of the model; if the loss calls only parts of it, one call made of the batch."""
        batch = tuple((path, shape) for path, shape, _ in self.batch if shape)
        return self.calls or (ModelCall(batch, with_gradients=True),)

    @property
    def n_parameters(self) -> int:
        """Number of elements of all parameters of the whole model."""
        return sum(prod(shape) for _, shape, _ in self.parameters)

    @property
    def dtype(self) -> str:
        """Type that most elements of parameters have, such as ``"bfloat16"``; empty without parameters."""
        elements = Counter[str]()
        # By elements, since norms and biases of another type may be many parameters of few elements.
        for _, shape, dtype in self.parameters:
            elements[dtype.removeprefix("frozen ").removeprefix("torch.")] += prod(shape)
        return elements.most_common(1)[0][0] if elements else ""

    @property
    def batch_in_words(self) -> str:
        """``"16 sequences of 1,024 tokens"``, ``"64 images of 224 x 224"``, or type and shape of the first tensor."""
        shapes = {path: shape for path, shape, _ in self.batch}
        # The names that models of transformers give to tokens and to images.
        ids = next((s for path, s in shapes.items() if "input_ids" in path and len(s) == 2), None)
        images = next((s for path, s in shapes.items() if "pixel_values" in path and len(s) == 4), None)
        if ids is not None:
            return f"{_number(ids[0], 'sequence')} of {ids[1]:,} tokens"
        if images is not None:
            return f"{_number(images[0], 'image')} of {images[2]} x {images[3]}"
        if not self.batch:
            return "no tensors"
        _, shape, dtype = self.batch[0]
        return f"{dtype.removeprefix('torch.')} {list(shape)}"

    def is_of_same(self, other: Fingerprint) -> bool:
        """Whether another fingerprint is of the same model and batch.

        ``target``, ``setup``, ``calls`` and ``local_shapes`` are not compared.
        """
        # They change no shapes that a plan depends on: ``target`` says how to make the model, ``setup`` and ``calls``
        # only warn, and ranks whose ``local_shapes`` differ have the same plan.
        ours, theirs = (
            structs.replace(fingerprint, target=None, setup=Setup(), calls=(), local_shapes=None)
            for fingerprint in (self, other)
        )
        return ours == theirs

    def check_model(self, model: torch.nn.Module) -> None:
        """Raise ``PlanMismatch``, which names the first difference, if the model is another one."""
        with compiled_in_place(model) as model:
            _compare("parameter", self.parameters, _parameters(model), f"a {self.model_class}")

    def check_batch(self, batch: Any) -> None:
        """Raise ``PlanMismatch``, which names the first difference, if the batch has another shape."""
        _compare("batch tensor", self.batch, _tensors(batch), "another batch")


def _parameters(model: torch.nn.Module) -> tuple[FingerprintEntry, ...]:
    return tuple(
        (name, tuple(p.shape), ("" if p.requires_grad else "frozen ") + str(p.dtype))
        for name, p in unwrapped(model).named_parameters()
    )


def _number(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("s" if n != 1 else "")


def local_shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Return, by name, the local shapes of the parameters that are DTensors; None if there are none."""
    found = {
        name: tuple(local_part(p).shape)
        for name, p in unwrapped(model).named_parameters()
        if stands_for_another(p)
    }
    # None, the default, is left out of files.
    return found or None


def _tensors(batch: Any) -> tuple[FingerprintEntry, ...]:
    """Return path, shape and type of the tensors of a batch: numbers, texts and others are not part of its identity."""
    return tuple((path, tuple(t.shape), str(t.dtype)) for path, t in tensor_paths(batch, "batch"))


def _compare(
    what: str, planned: Sequence[FingerprintEntry], here: Sequence[FingerprintEntry], whose: str
) -> None:
    # The first difference in order is the one to report: a missing entry shifts all that follow.
    for old, new in zip(planned, here, strict=False):
        if old != new:
            raise PlanMismatch(
                f"this plan was made for {whose}: the first {what} that differs is {old[0]!r} {old[1]} {old[2]} in "
                f"the plan, here {new[0]!r} {new[1]} {new[2]}. Make a plan for this one with sacplan.plan."
            )
    # All pairs agree, so the first difference is the next entry of the longer sequence.
    if len(planned) != len(here):
        longer = planned if len(planned) > len(here) else here
        name = longer[min(len(planned), len(here))][0]
        where = "only in the plan" if longer is planned else "not in the plan"
        raise PlanMismatch(
            f"this plan was made for {whose}: it has {len(planned)} {what}s, here are {len(here)}; the first that "
            f"differs is {name!r}, {where}. Make a plan for this one with sacplan.plan."
        )
