"""Values of fake tensors that are known in a fake step, and the rules applied so far.

Values are kept by storage, so that views and in-place writes need no bookkeeping. Real ops run on known values only.
None of them draws random numbers, and none touches the user's tensors. No weight is copied: a tensor of integers or
booleans is followed up to 256 MiB, one of floats up to a million elements.

What comes from parameters, buffers and constants alone may decide branches, but never by a rule: if it is not known,
that is an error. What comes from parameters and the batch is an activation, and follows the rules.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from sacplan.core.files import table_of
from sacplan.core.setup import Routing
from sacplan.errors import DataDependentError
from sacplan.torch_compat.ops import tensors_in
from sacplan.torch_compat.private import is_plain, storage_key

NO_ANSWER = object()
"""Neither a value nor a rule: let the op run."""

BATCH = "batch"
"""Among the rules that a value rests on: it comes from the batch."""

PARAMETERS = "parameters"
"""Among the rules that a value rests on: it comes from parameters. It may be in their memory, or not be known."""

MAX_INTEGER_BYTES = 2**28
MAX_FLOATS = 2**20

DESCRIPTIONS = {row["rule"]: row["assumed"] for row in table_of(Path(__file__).with_name("data_rules.csv"))}


_OF_SIZES = ("balanced", "worst", "alike ranks", "even spread", "all elements")


def decides_sizes(sentence: str) -> bool:
    """Whether an applied rule, as text, is one by which tensors may have other sizes than in a real step."""
    return any(is_rule(rule, sentence) for rule in _OF_SIZES)


def is_rule(rule: str, sentence: str) -> bool:
    """Whether an applied rule, as text, is the one of this name."""
    return f"assumed ({rule})" in sentence


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule that decided a size or a value.

    Attributes:
        rule: its name, see ``data_rules``.
        op: the op whose result it decided.
        where: module, line and function of the code that called the op.
    """

    rule: str
    op: str
    where: str

    def __str__(self) -> str:
        assumed = f"assumed ({self.rule}): {DESCRIPTIONS[self.rule]}"
        return f"{self.where}: the result of {self.op} depends on data; {assumed}"


def is_float(t: torch.Tensor) -> bool:
    """Whether the elements are real or complex floats."""
    return t.dtype.is_floating_point or t.dtype.is_complex


@dataclass(eq=False, slots=True)
class _StorageValues:
    """The values of one fake storage."""

    storage: torch.UntypedStorage | None  # None: not known, and if a branch depends on it, that is an error
    rules: dict[str, None]  # that they rest on
    watch: weakref.ref[Any]


class KnownValues:
    """Values by fake storage: the interface between the rules of ``fake_rules.py`` and the mode that follows values.

    Attributes:
        routing: how scores that are not known choose among candidates, see ``data_rules``.
    """

    def __init__(self, routing: Routing = "balanced") -> None:
        super().__init__()
        self.routing = routing
        self._known: dict[int, _StorageValues] = {}  # by ``storage_key``
        # Fakes, each with the user's parameter that it stands for.
        self._parameters: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._applied: dict[tuple[str, str], AppliedRule] = {}  # by name of the rule, and place in the code
        self._paused = 0  # nesting depth
        self._max_floats = MAX_FLOATS

    @property
    def applied(self) -> tuple[AppliedRule, ...]:
        """Every rule that decided something so far, once for each place in the code."""
        return tuple(self._applied.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside are not followed."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def few_floats(self) -> Iterator[None]:
        """Inside, follow single floats only (an optimizer's step count), and no arrays of floats that ops make."""
        before, self._max_floats = self._max_floats, 1
        try:
            yield
        finally:
            self._max_floats = before

    def learn(self, fake: torch.Tensor, real: torch.Tensor, rests_on: Iterable[str] = ()) -> None:
        """Remember that the storage of ``fake`` holds what that of ``real`` does, if that is small."""
        if not is_plain(fake):
            return
        storage = real.untyped_storage()
        most = MAX_FLOATS * real.element_size() if is_float(real) else MAX_INTEGER_BYTES
        # Fake and meta tensors have no values, and those of large ones are not worth their memory.
        unknown = isinstance(real, FakeTensor) or real.device.type == "meta" or storage.nbytes() > most
        with no_dispatch():
            if isinstance(real, torch.nn.Parameter):  # no weight is copied
                self._set(fake, None if unknown else storage.cpu(), {PARAMETERS: None})
                self._parameters.append((weakref.ref(fake), real))
            elif not unknown and is_plain(real):
                self._set(
                    fake,
                    storage.cpu() if storage.device.type != "cpu" else storage.clone(),
                    dict.fromkeys(rests_on),
                )

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a fake tensor, or None if it is not known; a view that must not be written to."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        if not is_plain(tensor):
            return None
        known = self._known.get(storage_key(tensor.untyped_storage()))
        if known is None or known.storage is None:
            return None
        with no_dispatch():
            return _view(known.storage, tensor)

    @property
    def knows_values(self) -> bool:
        """Whether any value is known now."""
        return bool(self._known)

    def knows(self, fake: torch.Tensor) -> bool:
        """Whether the values of a fake tensor's storage are known, or come from parameters."""
        return isinstance(fake, FakeTensor) and storage_key(fake.untyped_storage()) in self._known

    def is_of_parameters(self, fake: torch.Tensor) -> bool:
        """Whether the values of a fake tensor that knows them come from parameters."""
        return PARAMETERS in self._known[storage_key(fake.untyped_storage())].rules

    def as_fake_like(
        self,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        value: torch.Tensor | None,
        rules: dict[str, None],
    ) -> torch.Tensor:
        """Return a new fake tensor that holds ``value``; if this is None, the tensor's value is not known."""
        with self.paused():
            fake = torch.empty_strided(size, stride, dtype=dtype)
        if value is not None:
            self._attach(fake, value, rules)
        return fake

    def assume_statistics(self, model: torch.nn.Module) -> None:
        """Call ``assume_statistic`` for each buffer of a model, and undo what steps wrote to values of parameters."""
        parameters, self._parameters = self._parameters, []
        for fake, real in ((ref(), real) for ref, real in parameters):
            if fake is not None:
                self.learn(fake, real)
        for buffer in model.buffers():
            self.assume_statistic(buffer)

    def assume_statistic(self, buffer: torch.Tensor | None, before: torch.Tensor | None = None) -> None:
        """Let a buffer of one float whose value is not known hold 1.0: it is a running statistic, which steps write.

        Args:
            buffer: what a module gets as its buffer.
            before: the module's buffer so far, whose sign is kept.
        """
        if not isinstance(buffer, FakeTensor) or not is_float(buffer) or buffer.numel() != 1:
            return
        if self.value(buffer) is None:
            old = None if before is None else self.value(before)
            with no_dispatch():
                sign = -1.0 if old is not None and bool((old < 0).all()) else 1.0
                value = torch.full(buffer.shape, sign, dtype=buffer.dtype)
            self._attach(buffer, value, {"unit value": None})

    def rules_of(self, tensors: Iterable[torch.Tensor]) -> dict[str, None]:
        """Return the rules that the known values of these tensors rest on."""
        found: dict[str, None] = {}
        for t in tensors:
            known = self._known.get(storage_key(t.untyped_storage())) if isinstance(t, FakeTensor) else None
            if known is not None:
                found.update(known.rules)
        return found

    def _set(self, fake: torch.Tensor, storage: torch.UntypedStorage | None, rules: dict[str, None]) -> None:
        fake_storage = fake.untyped_storage()
        key = storage_key(fake_storage)
        known_by_key = self._known  # not ``self``: the callback would keep the mode alive
        self._known[key] = _StorageValues(
            storage, rules, weakref.ref(fake_storage, lambda _: known_by_key.pop(key, None))
        )

    def _forget(self, fake: torch.Tensor) -> None:
        if isinstance(fake, FakeTensor) and is_plain(fake):
            self._known.pop(storage_key(fake.untyped_storage()), None)

    def _attach(self, fake: torch.Tensor, value: torch.Tensor, rules: dict[str, None]) -> None:
        """Let ``fake``, which has a storage of its own, hold ``value``, in the layout that ``fake`` has."""
        # A real kernel may return another shape than the fake one, and then its values are not those of ``fake``. Such
        # a tensor is merely not known.
        if not isinstance(fake, FakeTensor) or not is_plain(fake) or fake.shape != value.shape:
            return
        if not self.follows(fake) or fake.untyped_storage().nbytes() > MAX_INTEGER_BYTES:
            return
        with no_dispatch(), torch.no_grad():
            if value._is_zerotensor():
                value = value.clone()  # its storage has no memory
            nbytes = fake.untyped_storage().nbytes()
            own = value.untyped_storage()
            # The storage is taken over unchanged if a view like ``fake`` on it is ``value``; else the values are copied
            # into one that has the layout of ``fake``.
            if (
                value.dtype != fake.dtype
                or value.stride() != fake.stride()
                or value.storage_offset() != fake.storage_offset()
                or own.nbytes() < nbytes
            ):
                own = torch.UntypedStorage(nbytes)
                target = _view(own, fake)
                for dim, stride in enumerate(fake.stride()):
                    if stride == 0 and fake.shape[dim] > 1:  # one element stands for all
                        target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
                target.copy_(value)
            self._set(fake, own, rules)

    def follows(self, t: torch.Tensor) -> bool:
        """Whether a tensor is small enough for its values to be followed."""
        if is_float(t):
            return t.numel() <= self._max_floats
        return t.numel() * t.element_size() <= MAX_INTEGER_BYTES

    def _are_known(self, tensors: Iterable[torch.Tensor]) -> bool:
        return all(self.value(t) is not None for t in tensors)

    def run_on_values(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """Run an op on known values; ``NO_ANSWER`` where one of them is not known, or the op fails.

        An op may fail for good reasons: it has no CPU kernel, or is one of a fake step only. Its result then is not
        known, as if an input were not.
        """
        if not self._are_known(inputs):
            return NO_ANSWER
        real_args, real_kwargs = self._real(args), self._real(kwargs)
        try:
            with no_dispatch(), torch.no_grad():
                return func(*real_args, **real_kwargs)
        except Exception:  # see above: not knowing is always safe, and the op itself has run on fake tensors
            return NO_ANSWER

    def _real(self, value: Any) -> Any:
        # By hand: PyTorch's ``tree_map`` takes several times as long, and an optimizer's counts come here for each
        # parameter.
        if isinstance(value, torch.Tensor):
            return self.value(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._real(v) for v in value)
        if isinstance(value, dict):
            return {k: self._real(v) for k, v in value.items()}
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def apply_rules(self, rules: Iterable[str], func: Any) -> None:
        """Note that these rules decided the result of ``func`` at the present call site."""
        where = ""
        for rule in (rule for rule in rules if rule in DESCRIPTIONS):
            where = where or call_site()
            self._applied.setdefault((rule, where), AppliedRule(rule, str(func), where))

    def as_fake(self, value: torch.Tensor, rules: dict[str, None]) -> torch.Tensor:
        """Return a fake tensor of the same shape that is known to hold ``value``."""
        return self.as_fake_like(value.shape, value.stride(), value.dtype, value, rules)

    def refusal(self, func: Any, args: Any, kwargs: Any) -> DataDependentError:
        """Return the error to raise where there is neither a value nor a rule."""
        inputs = tensors_in((args, kwargs))
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in inputs)
        why = "data, which a fake trace does not have, and there is no rule for it"
        instead = "the batch as real tensors (its integers are then followed)"
        if PARAMETERS in self.rules_of(inputs):
            why = "parameters whose values are not known: large ones, or on the meta device"
            instead = "real parameters"
        return DataDependentError(
            f'{call_site()}: the result of {func} ({shapes}) depends on {why}. Use trace="real", or give {instead}, or '
            "keep this branch out of the step that is profiled."
        )


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())


_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    "<",
)


def call_site() -> str:
    """Return module, line and function of the innermost frame outside torch and sacplan."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '?')}, line {frame.f_lineno}, in {frame.f_code.co_name}"
