"""Values and sizes that depend on data, in a step that has none: followed where known, ruled, or refused.

A fake step has shapes and no data. Most of what a model asks of its data while it runs is about small
integers, and many of those are known: the batch's token ids and masks, what ``arange`` and ``full`` make, and
everything computed from them. So :class:`DataRules`, a dispatch mode over FakeTensorMode, keeps their values
beside the fake tensors (by storage, so that views and in-place writes need no bookkeeping), and answers
``nonzero``, ``x[mask]``, ``.item()``, ``unique`` and the like with them. What only floats could tell follows
the rules that :func:`data_rules` documents; what has no rule is a ``DataDependentError``.

Real ops run on the known values only. None of them draws random numbers, none touches the user's tensors,
and no weight is copied: integers and booleans are followed up to 256 MiB a tensor, floats up to a million
elements.

Errors are raised where they happen. That is safe here, unlike in ops that autograd records from C++
(an exception in a dispatch mode can abort the interpreter there): tried on torch 2.13 for every op that
can raise one.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan._record.fake_rules import (
    ANSWERS,
    CHANGES_STORAGE,
    CONTENTS_UNDEFINED,
    DECISIONS,
    IN_PLACE_SPREADS,
    NO_ANSWER,
    UNKNOWN,
    answer_if_known,
    is_float,
    needs_an_answer,
)
from sacplan._torch.ops import op_traits, tensors_in
from sacplan._torch.private import is_plain, storage_key
from sacplan.errors import DataDependentError, SacplanWarning

MAX_INTEGER_BYTES = 2**28
MAX_FLOATS = 2**20

DESCRIPTIONS = {
    "zeros": "an array of floats that are not known is all zeros",
    "balanced": "what is chosen by score (topk, argmax, multinomial) is spread evenly over the candidates",
    "in order": "what is sorted by a value that is not known is taken to be in order already",
    "even spread": "random numbers are spread evenly over their range",
    "finite": "floats are taken to be finite",
    "all elements": "a mask that is not known is true everywhere, and selects every element (an upper bound)",
    "unit value": "a float that is read as a Python number is taken to be 1.0",
}


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule that decided a size or a value.

    Attributes:
        rule: its name, see ``data_rules``.
        op: the op whose result it decided.
        where: module, line and function of the code that called it.
    """

    rule: str
    op: str
    where: str

    def __str__(self) -> str:
        assumed = f"assumed ({self.rule}): {DESCRIPTIONS[self.rule]}"
        return f"{self.where}: the result of {self.op} depends on data; {assumed}"


@contextmanager
def data_rules() -> Iterator[DataRules]:
    """Inside a FakeTensorMode: values that are known are followed, the others obey the rules below.

    **Known** are the integers, booleans and small floats of a batch of real tensors and of real buffers,
    what factories make (``arange``, ``zeros``, ``full``, ``torch.tensor``), and what ops make of these alone.
    Sizes and values that depend on them are exact: padding masks, image-token masks, sequence lengths, an
    optimizer's step count. A batch on the meta device has no values.

    **Rules**, where a value comes out of floats, which are not known in general. Each gives the expected
    memory or an upper bound of it:

    ``balanced``
        The indices of ``topk``, ``argmax``, ``argmin``, ``max`` and ``min`` along a dimension, and of
        ``multinomial`` are spread evenly: slot j of row r chooses candidate (r * k + j) mod n. Each of n
        experts so gets tokens * k / n rows, up to one: the expected memory with balanced routing.
        Lopsided routing takes more.
    ``in order``
        ``sort`` and ``argsort`` of values that are not known return the order that is there. Sizes that
        follow are exact, since a permutation has no other.
    ``even spread``
        ``rand``, ``rand_like``, ``uniform_``, ``bernoulli``, ``randint`` and ``randperm`` give numbers
        spread evenly over their range, a single one its middle. ``torch.rand([]) < p`` (LayerDrop) is
        true for p > 1/2: the likelier outcome, and for small p, where the layer runs, the larger one.
        Masks drawn at random have the expected share.
    ``finite``
        ``isnan``, ``isinf`` and comparisons of a float with itself or with infinity see finite numbers.
    ``all elements``
        ``nonzero``, ``torch.where(mask)``, ``x[mask]`` and ``masked_select`` with a mask that is not
        known take every element: an upper bound. So ``mask.all()`` and ``mask.any()`` are true; the truth
        of a single comparison has no rule.
    ``unit value``
        ``.item()`` of a float (a loss that is logged, a norm) is 1.0.
    ``zeros``
        ``.numpy()`` of floats is all zeros. An assignment made from them (``linear_sum_assignment``) has
        the right size, which does not depend on the costs.

    Integers and booleans without a known value or a rule (``bool(loss > 1)``, ``int(lengths.max())`` of a
    meta batch, ``unique`` of floats) are a ``DataDependentError``.

    Each application is kept in ``applied`` of the value that is yielded, and on exit there is one
    ``SacplanWarning`` for each rule and place in the code that called for it.

    Raises:
        DataDependentError: names the op, the place in the code, and what to try.
    """
    rules = DataRules()
    with rules, _PythonValues(rules):
        yield rules
    for applied in rules.applied:
        warnings.warn(f'{applied}. trace="real" uses the data.', SacplanWarning, stacklevel=3)


class _Known:
    """The values of one fake storage."""

    __slots__ = ("rules", "storage", "watch")

    def __init__(
        self, storage: torch.UntypedStorage, rules: dict[str, None], watch: weakref.ref[Any]
    ) -> None:
        self.storage = storage
        self.rules = rules  # that they rest on
        self.watch = watch


class DataRules(TorchDispatchMode):
    """The mode behind ``data_rules``; the innermost mode but FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}
        self._applied: dict[tuple[str, str], AppliedRule] = {}
        self._paused = 0
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
        """Inside, of what ops make no array of floats is followed, just single ones: an optimizer's step counts."""
        before, self._max_floats = self._max_floats, 1
        try:
            yield
        finally:
            self._max_floats = before

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        self._known.clear()

    # --- values that are known -------------------------------------------------------------------

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Remember that the storage of ``fake`` holds what that of ``real`` does, if it is worth it."""
        if (
            isinstance(real, (FakeTensor, torch.nn.Parameter))
            or real.device.type == "meta"
            or not is_plain(real)
        ):
            return
        most = MAX_FLOATS * real.element_size() if is_float(real) else MAX_INTEGER_BYTES
        if real.untyped_storage().nbytes() > most:
            return
        with no_dispatch():
            storage = real.untyped_storage().clone()
            self._set(fake, storage if storage.device.type == "cpu" else storage.cpu(), {})

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a fake tensor holds, if that is known; a view, not to be written to."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        if not is_plain(tensor):
            return None
        known = self._known.get(storage_key(tensor.untyped_storage()))
        if known is None:
            return None
        with no_dispatch():
            return _view(known.storage, tensor)

    @property
    def knows_values(self) -> bool:
        """Whether any value is known now."""
        return bool(self._known)

    def knows(self, fake: torch.Tensor) -> bool:
        """Whether the values of the storage of a fake tensor are known."""
        return storage_key(fake.untyped_storage()) in self._known

    @staticmethod
    def leaves_alone(func: Any) -> bool:
        """Whether an op is left to FakeTensorMode where the values of its arguments are not known."""
        return not (needs_an_answer(func) or func in ANSWERS or func in DECISIONS or func in CHANGES_STORAGE)

    def as_fake_like(
        self,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        value: torch.Tensor | None,
        rules: dict[str, None],
    ) -> torch.Tensor:
        """A new fake tensor that holds ``value``; None for not known."""
        with self.paused():
            fake = torch.empty_strided(size, stride, dtype=dtype)
        if value is not None:
            self._attach(fake, value, rules)
        return fake

    def rules_of(self, tensors: Iterable[torch.Tensor]) -> dict[str, None]:
        """The rules that the known values of these tensors rest on."""
        found: dict[str, None] = {}
        for t in tensors:
            known = self._known.get(storage_key(t.untyped_storage())) if isinstance(t, FakeTensor) else None
            if known is not None:
                found.update(known.rules)
        return found

    def _set(self, fake: torch.Tensor, storage: torch.UntypedStorage, rules: dict[str, None]) -> None:
        fake_storage = fake.untyped_storage()
        key = storage_key(fake_storage)
        known_by_key = self._known
        self._known[key] = _Known(
            storage, rules, weakref.ref(fake_storage, lambda _: known_by_key.pop(key, None))
        )

    def _forget(self, fake: torch.Tensor) -> None:
        if isinstance(fake, FakeTensor) and is_plain(fake):
            self._known.pop(storage_key(fake.untyped_storage()), None)

    def _attach(self, fake: torch.Tensor, value: torch.Tensor, rules: dict[str, None]) -> None:
        """``value`` in the layout of ``fake``, which has a storage of its own."""
        if not isinstance(fake, FakeTensor) or not is_plain(fake) or fake.shape != value.shape:
            return
        if not self._worth_following(fake) or fake.untyped_storage().nbytes() > MAX_INTEGER_BYTES:
            return
        with no_dispatch(), torch.no_grad():
            nbytes = fake.untyped_storage().nbytes()
            own = value.untyped_storage()
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

    def _worth_following(self, t: torch.Tensor) -> bool:
        if is_float(t):
            return t.numel() <= self._max_floats
        return t.numel() * t.element_size() <= MAX_INTEGER_BYTES

    # --- dispatch ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if needs_an_answer(func):
            answer = ANSWERS.get(func, answer_if_known)(self, func, args, kwargs)
            if answer is not NO_ANSWER:
                return answer
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refusal(func, args, kwargs) from error
        self.follow(func, args, kwargs, out)
        return out

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        traits = op_traits(func)
        if traits.written_names:
            self._follow_write(func, traits, args, kwargs)
            return
        fresh = [
            t
            for t in tensors_in(out)
            if isinstance(t, FakeTensor) and self._worth_following(t) and is_plain(t)
        ]
        if not fresh:
            return
        inputs = list(tensors_in((args, kwargs)))
        own = {storage_key(t.untyped_storage()) for t in inputs}
        fresh = [t for t in fresh if storage_key(t.untyped_storage()) not in own]
        if not fresh:
            return  # a view: its storage is known, or not
        decide = DECISIONS.get(func)
        values: Any
        if decide is not None and (
            traits.random or func in CONTENTS_UNDEFINED or self._values(inputs) is None
        ):
            values, rule = decide(self, args, kwargs, out)
            rules = {rule: None} if rule else {}
        elif traits.random or torch.Tag.nondeterministic_seeded in func.tags:
            return
        else:
            result = self.run_on_values(func, args, kwargs, inputs)
            values = None if result is NO_ANSWER else tuple(tensors_in(result))
            rules = self.rules_of(inputs)
        if values is None:
            return
        for fake, value in zip(tensors_in(out), values, strict=True):
            if value is not UNKNOWN and any(fake is f for f in fresh):
                self._attach(fake, value, rules)

    def _follow_write(self, func: Any, traits: Any, args: Any, kwargs: Any) -> None:
        written = traits.written(args, kwargs)
        targets = [t for t in tensors_in(written) if isinstance(t, FakeTensor) and is_plain(t)]
        known = [k for t in targets if (k := self._known.get(storage_key(t.untyped_storage()))) is not None]
        if not known:
            return
        if torch.Tag.inplace_view in func.tags or func in CHANGES_STORAGE:
            if func in CHANGES_STORAGE:
                for t in targets:
                    self._forget(t)
            return
        inputs = list(tensors_in((args, kwargs)))
        random = traits.random or torch.Tag.nondeterministic_seeded in func.tags
        if random and func in IN_PLACE_SPREADS:
            value = self.value(targets[0])
            assert value is not None
            with no_dispatch(), torch.no_grad():
                IN_PLACE_SPREADS[func](
                    value, *args[1:], **{k: v for k, v in kwargs.items() if k != "generator"}
                )
            known[0].rules["even spread"] = None
            return
        if random or self.run_on_values(func, args, kwargs, inputs) is NO_ANSWER:
            for t in targets:
                self._forget(t)
            return
        rules = self.rules_of(inputs)
        for k in known:
            k.rules = {**k.rules, **rules}

    def _values(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
        values = []
        for t in tensors:
            value = self.value(t)
            if value is None:
                return None
            values.append(value)
        return values

    def run_on_values(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """The op on known values; ``NO_ANSWER`` where one is not known, or the op cannot."""
        if self._values(inputs) is None:
            return NO_ANSWER
        real_args, real_kwargs = self._real(args), self._real(kwargs)
        try:
            with no_dispatch(), torch.no_grad():
                return func(*real_args, **real_kwargs)
        except Exception:
            return NO_ANSWER

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.value(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._real(v) for v in value)
        if isinstance(value, dict):
            return {k: self._real(v) for k, v in value.items()}
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    # --- answers and refusals ------------------------------------------------------------------------

    def apply_rules(self, rules: Iterable[str], func: Any) -> None:
        """Note that these rules decided the result of ``func``, called from where we are."""
        where = ""
        for rule in rules:
            where = where or call_site()
            self._applied.setdefault((rule, where), AppliedRule(rule, str(func), where))

    def as_fake(self, value: torch.Tensor, rules: dict[str, None]) -> torch.Tensor:
        """A fake tensor of the same shape that is known to hold ``value``."""
        return self.as_fake_like(value.shape, value.stride(), value.dtype, value, rules)

    def refusal(self, func: Any, args: Any, kwargs: Any) -> DataDependentError:
        """What to raise where there is neither a value nor a rule."""
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in tensors_in((args, kwargs)))
        return DataDependentError(
            f"{call_site()}: the result of {func} ({shapes}) depends on data, which a fake trace does not "
            'have, and there is no rule for it. Use trace="real", or give the batch as real tensors (its '
            "integers are then followed), or keep this branch out of the step that is profiled."
        )


class _PythonValues(TorchFunctionMode):
    """Calls that read a tensor without dispatching an op: ``torch.tensor`` of tensors, and ``numpy``."""

    def __init__(self, rules: DataRules) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKES_OF_NUMBERS and args and isinstance(args[0], (list, tuple)):
            return func(_as_numbers(args[0]), *args[1:], **kwargs)
        if func in _GIVES_ARRAY and isinstance(args[0], FakeTensor):
            array = self._array(func, args[0])
            dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
            return array if dtype is None or func is torch.Tensor.numpy else array.astype(dtype)
        if (
            func is torch.Tensor.__format__
            and isinstance(args[0], FakeTensor)
            and args[0].dim() == 0
            and self._rules.value(args[0]) is not None
        ):
            return format(args[0].item(), args[1])
        return func(*args, **kwargs)

    def _array(self, func: Any, tensor: torch.Tensor) -> Any:
        value = self._rules.value(tensor)
        name = f"Tensor.{func.__name__}"
        if value is not None:
            self._rules.apply_rules(self._rules.rules_of([tensor]), name)
        elif is_float(tensor):
            self._rules.apply_rules(("zeros",), name)
        else:
            raise self._rules.refusal(name, (tensor,), {})
        with no_dispatch():
            if value is None:
                value = torch.zeros(tensor.shape, dtype=tensor.dtype)
            return value.clone().numpy()


_MAKES_OF_NUMBERS: frozenset[Any] = frozenset((torch.tensor, torch.as_tensor))
_GIVES_ARRAY: frozenset[Any] = frozenset((torch.Tensor.numpy, torch.Tensor.__array__))


def _as_numbers(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.tolist()
    if isinstance(value, (list, tuple)) and any(isinstance(v, (FakeTensor, list, tuple)) for v in value):
        return [_as_numbers(v) for v in value]
    return value


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())


_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    "<",
)


def call_site() -> str:
    """Module, line and function of the innermost frame outside torch and sacplan."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '?')}, line {frame.f_lineno}, in {frame.f_code.co_name}"
