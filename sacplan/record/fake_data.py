"""Decide values and sizes that depend on data in a step that has no data: from known values, by a rule, or not at all.

A fake step has shapes and no data. Most of what a model asks of its data while it runs is about small
integers, and many of those are known: the batch's token ids and masks, the results of ``arange`` and ``full``, and
everything computed from them. So :class:`DataRules`, a dispatch mode over FakeTensorMode, keeps their values
(``fake_values.py``), and answers ``nonzero``, ``x[mask]``, ``.item()``, ``unique`` and the like with them. Results that
depend on floats follow the rules that :func:`data_rules` documents (``fake_rules.py``). A result without a rule
is a ``DataDependentError``.

For each op, in this order: an op that asks for data is answered without running it. Any other op runs on fake tensors,
and then its values are followed: known inputs give known outputs, by running the real op on the values; an op with a
rule gets assumed values; what is written with unknown values is forgotten.

Errors are raised where they happen. That is safe here, unlike in ops that autograd records from C++
(an exception in a dispatch mode can abort the interpreter there): tried on torch 2.13 for every op that
can raise one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from sacplan.core.setup import Routing
from sacplan.errors import SacplanWarning
from sacplan.record.fake_rules import (
    CHANGES_STORAGE,
    CONTENTS_UNDEFINED,
    IGNORES_VALUES,
    UNKNOWN,
    NewArguments,
    answer,
    answer_if_known,
    assume,
    needs_an_answer,
    spread,
)
from sacplan.record.fake_values import BATCH, NO_ANSWER, PARAMETERS, KnownValues, is_float
from sacplan.torch_compat.inductor import is_compiling_dry
from sacplan.torch_compat.local_tensors import Watching, is_deferred
from sacplan.torch_compat.ops import OpTraits, is_between_ranks, op_traits, tensors_in
from sacplan.torch_compat.private import is_plain, storage_key


@contextmanager
def data_rules(routing: Routing = "balanced") -> Iterator[DataRules]:
    """Inside a FakeTensorMode, follow values that are known; all others obey the rules below.

    **Known** are the integers, booleans and small floats of a batch of real tensors and of real buffers,
    the results of factories (``arange``, ``zeros``, ``full``, ``torch.tensor``), and of ops on these alone.
    Sizes and values that depend on them are exact: padding masks, image-token masks, sequence lengths, an
    optimizer's step count. A batch on the meta device has no values. Known as well is what comes from
    **parameters**, buffers and constants alone, such as a curvature that is trained. Of large parameters, and of ones
    on the meta device, such values are not known, and a branch on one is a ``DataDependentError``. What comes from
    parameters and the batch is not computed.

    **Rules**, where a value comes out of floats, which are not known in general. Each gives the expected
    memory or an upper bound of it:

    ``balanced``
        The indices of ``topk``, ``argmax``, ``argmin``, ``max`` and ``min`` along a dimension, and of
        ``multinomial`` are spread evenly: slot j of row r chooses candidate (r * k + j) mod n. Each of n
        experts so gets tokens * k / n rows, up to one: the expected memory with balanced routing.
        Lopsided routing takes more.
    ``worst``
        With ``routing="worst"`` in place of ``balanced``: slot j of every row chooses candidate j, so that k of the
        experts get all tokens, and the others none. Experts are taken to be of one size.
    ``in order``
        ``sort`` and ``argsort`` of values that are not known return the order that is there. Sizes that
        follow are exact, since a permutation keeps them.
    ``alike ranks``
        All ranks choose alike: of an ``all_to_all_single`` of known values, such as the number of tokens for each
        expert, a rank gets from each what it sends to itself.
    ``even spread``
        ``rand``, ``rand_like``, ``uniform_``, ``bernoulli``, ``randint`` and ``randperm`` give numbers
        spread evenly over their range, a single number the middle of it. ``torch.rand([]) < p`` (LayerDrop) is
        true for p > 1/2: the likelier outcome, and for small p, where the layer runs, the larger one.
        Masks drawn at random have the expected share.
    ``finite``
        ``isnan``, ``isinf`` and comparisons of a float with itself or with infinity see finite numbers.
    ``all elements``
        ``nonzero``, ``torch.where(mask)``, ``x[mask]`` and ``masked_select`` with a mask that is not
        known take every element: an upper bound. So ``mask.all()`` and ``mask.any()`` are true; the truth
        of a single comparison has no rule.
    ``checks pass``
        A condition on such values that guards an error, of an ``assert`` or of an ``if`` that only raises, has
        the outcome that lets the step go on. It takes precedence over ``all elements``.
    ``unit value``
        ``.item()`` of a float (a loss that is logged, a norm) is 1.0. So is a buffer of one float that the step has
        set, or that is on the meta device; it keeps its sign. Code that asks whether a running statistic still has
        its initial value, close to 0, is told no.
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
    rules = DataRules(routing)
    handle = register_module_buffer_registration_hook(
        lambda module, name, buffer: rules.assume_statistic(buffer, module._buffers.get(name))
    )
    try:
        with rules, _PythonValues(rules):
            yield rules
    finally:
        handle.remove()
    for applied in rules.applied:
        warnings.warn(f'{applied}. trace="real" uses the data.', SacplanWarning, stacklevel=3)


REAL_TENSOR = "convert all Tensors to FakeTensors"
"""Part of FakeTensorMode's message about a tensor that is not fake (``torch/_subclasses/fake_tensor.py``)."""


class DataRules(KnownValues, Watching):
    """The mode of ``data_rules``. Of all modes, only FakeTensorMode sees an op after it.

    Attributes:
        copier: makes the fake twin of a real tensor that the code holds outside of the model and that is only read.
    """

    def __init__(self, routing: Routing = "balanced") -> None:
        super().__init__(routing)
        self.copier: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        Watching.__exit__(self, exc_type, exc_value, traceback)
        self._known.clear()
        self.copier = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo may compile under this mode: only where the step is to run compiled."""
        return is_compiling_dry()

    @staticmethod
    def leaves_alone(func: Any) -> bool:
        """Whether an op is left to FakeTensorMode where the values of its arguments are not known."""
        return not (needs_an_answer(func) or func in answer or func in assume or func in CHANGES_STORAGE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_deferred(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        # An answer takes the place of the op, which FakeTensorMode would refuse. With ``NewArguments`` the op runs on
        # these, and ``NO_ANSWER`` leaves it to FakeTensorMode, whose refusal is explained below.
        if needs_an_answer(func):
            found = answer.get(func, answer_if_known)(self, func, args, kwargs)
            if isinstance(found, NewArguments):
                args = found.args
            elif found is not NO_ANSWER:
                return found
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refusal(func, args, kwargs) from error
        except AssertionError as error:
            # A real tensor that the model holds outside of its attributes, such as in a global, gets a fake twin.
            if REAL_TENSOR not in str(error) or not self._may_be_adopted(func, args, kwargs):
                raise
            return func(*tree_map_only(torch.Tensor, self._adopted, args), **kwargs)
        self._follow(func, args, kwargs, out)
        return out

    def _may_be_adopted(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the real tensors among the arguments are constants, such as those that a cache of the code holds."""
        # Not a constant: one that is written, whose change would be lost with the twin, and one that is trained, whose
        # gradient would go to the twin. Real tensors among keyword arguments are not replaced (see the caller).
        real = [t for t in tensors_in(args) if not isinstance(t, FakeTensor)]
        return (
            self.copier is not None
            and not op_traits(func).written_names
            and not any(t.requires_grad for t in real)
            and all(isinstance(t, FakeTensor) for t in tensors_in(kwargs))
        )

    def _adopted(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or self.copier is None:
            return tensor
        with self.paused():
            return self.copier(tensor)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Work out the values of an op's new outputs, if its inputs are known or a rule assumes them."""
        traits = op_traits(func)
        # Schemas of collectives do not say that they write parts of all ranks to the first argument. ``allreduce`` and
        # ``broadcast`` leave what is there, since all ranks are taken to have the same.
        if func.namespace == "c10d" and not func._opname.startswith(("allreduce", "broadcast")):
            self._receive(func, args, kwargs, out)
        if traits.written_names:
            self._follow_write(func, traits, args, kwargs)
            return
        # A tensor on an input's storage is a view, or the input itself, and needs no values of its own.
        inputs = tensors_in((args, kwargs))
        taken = {storage_key(t.untyped_storage()) for t in inputs}
        fresh = [
            t
            for t in tensors_in(out)
            if isinstance(t, FakeTensor) and is_plain(t) and storage_key(t.untyped_storage()) not in taken
        ]
        resting_on = {} if func in IGNORES_VALUES else self.rules_of(inputs)
        of_parameters = PARAMETERS in resting_on and self._decides(resting_on, inputs)
        if of_parameters:
            for t in fresh:
                self._set(t, None, resting_on)  # until its value is worked out
        fresh = [t for t in fresh if self.follows(t)]
        if not fresh:
            return  # views, which go by their storage, or too large to follow
        known = (of_parameters or PARAMETERS not in resting_on) and self._are_known(inputs)
        decide = None if of_parameters else assume.get(func)
        values: Any
        is_exchanged = is_between_ranks(func)
        if decide is not None and (traits.random or func in CONTENTS_UNDEFINED or is_exchanged or not known):
            # Known inputs take precedence over a rule, except for random ops, which would draw from the user's
            # generator, for ``empty`` and its relatives, whose contents are arbitrary, and for what other ranks send.
            with no_dispatch():
                values, rule = decide(self, args, kwargs, out)
            rules = ({rule: None} if rule else {}) | (self.rules_of(inputs) if is_exchanged else {})
        elif not known or traits.random or torch.Tag.nondeterministic_seeded in func.tags or is_exchanged:
            return  # not known, or to be known only by drawing numbers or waiting for other ranks
        else:
            result = self.run_on_values(func, args, kwargs, inputs)
            values = None if result is NO_ANSWER else tuple(tensors_in(result))
            rules = self.rules_of(inputs)
        outputs = tensors_in(out)
        if values is None or len(values) != len(outputs):
            return  # the op failed, or its real kernel gave None where the fake one gives a tensor
        for fake, value in zip(outputs, values, strict=True):
            if value is not UNKNOWN and any(fake is f for f in fresh):
                self._attach(fake, value, rules)

    def _receive(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Set the values of a collective's first argument by a rule; if there is none, forget them."""
        with no_dispatch():
            values, rule = assume[func](self, args, kwargs, out) if func in assume else (None, "")
        for t in tensors_in(args[:1]):
            target = self.value(t)
            if values is None or target is None or target.shape != values[0].shape:
                self._forget(t)
                continue
            with no_dispatch():
                target.copy_(values[0])
            self._known[storage_key(t.untyped_storage())].rules.update(
                {rule: None}, **self.rules_of(args[1:2])
            )

    def _decides(self, rules: dict[str, None], inputs: list[torch.Tensor]) -> bool:
        """Whether what comes of these may decide branches: no activation, and no number of an optimizer's own."""
        return BATCH not in rules and self._max_floats > 1 and all(map(self.knows, inputs))

    def _follow_write(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> None:
        """Repeat an op's write in place on the values that are known of its targets, or forget these values."""
        written = traits.written(args, kwargs)
        targets = [t for t in tensors_in(written) if isinstance(t, FakeTensor) and is_plain(t)]
        known = [k for t in targets if (k := self._known.get(storage_key(t.untyped_storage()))) is not None]
        if not known:
            return  # nothing to keep up to date; values that become known by a write are not followed
        # Three ways to go on, in this order: nothing was written but the tensor itself changed; random numbers by their
        # rule; and the same write to the known values, or none of them is known any more.
        # Views keep their storage's values. A tensor that gets another storage, or another size, loses them.
        if torch.Tag.inplace_view in func.tags or func in CHANGES_STORAGE:
            if func in CHANGES_STORAGE:
                for t in targets:
                    self._forget(t)
            return
        inputs = tensors_in((args, kwargs))
        rules = self.rules_of(inputs)
        from_parameters = [k for k in known if PARAMETERS in k.rules]
        follows = not from_parameters or all(map(self.follows, targets))
        random = traits.random or torch.Tag.nondeterministic_seeded in func.tags
        with no_dispatch(), torch.no_grad():
            # These may be in the memory of the user's own parameters, which must not be written to.
            for k in from_parameters if follows else ():
                k.storage = None if k.storage is None else k.storage.clone()
            value = self.value(targets[0]) if random and func in spread and follows else None
            if value is not None:
                spread[func](value, *args[1:], **{k: v for k, v in kwargs.items() if k != "generator"})
                known[0].rules["even spread"] = None
                return
        # ``run_on_values`` runs the op on views of the known storages, so the op writes to them.
        again = follows and not random and not is_between_ranks(func)
        if not again or self.run_on_values(func, args, kwargs, inputs) is NO_ANSWER:
            may_decide = from_parameters and not random and self._decides(rules, inputs)
            for t in targets:
                if may_decide:
                    self._set(t, None, rules)
                else:
                    self._forget(t)
            return
        # What a partial write leaves still rests on the old rules, so the new ones are added to them.
        for k in known:
            k.rules = {**k.rules, **rules}


class _PythonValues(TorchFunctionMode):
    """Answers calls that read a tensor without dispatching an op, so that ``DataRules`` does not see them.

    These are ``torch.tensor`` on tensors, an index that is a list of tensors, ``numpy()``, and formatting a number.
    """

    def __init__(self, rules: DataRules) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKES_OF_NUMBERS and args and isinstance(args[0], (list, tuple)):
            return func(_as_numbers(args[0]), *args[1:], **kwargs)
        if func in _INDEXES and type(args[1]) is tuple:
            # Sequences of tensors in ``x[rows, columns]``: PyTorch reads their values, and makes an index of these.
            index = tuple(_as_numbers(i) if isinstance(i, (list, tuple)) else i for i in args[1])
            return func(args[0], index, *args[2:], **kwargs)
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
        # Known values, zeros for floats, and a refusal for integers: arrays of integers are mostly used as sizes.
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
_INDEXES: frozenset[Any] = frozenset((torch.Tensor.__getitem__, torch.Tensor.__setitem__))


def _as_numbers(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.tolist()
    if isinstance(value, (list, tuple)) and any(isinstance(v, (FakeTensor, list, tuple)) for v in value):
        return [_as_numbers(v) for v in value]
    return value
