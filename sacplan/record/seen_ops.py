"""A cache of ops that a fake step ran before on arguments of the same layout: their costs, and the layout of outputs.

A fake step of a deep model is the ops of one layer over and over. FakeTensorMode has such a cache too
(``torch/_subclasses/fake_tensor.py``), but it is general, and takes most of the time of a trace. Here an op is looked
up once, for its outputs, its FLOPs, its time and its workspace.

A hit must give what the op would have given. So an op is only in the cache if sizes, strides and types alone decide its
outputs: aten's functions, views and in-place ops on plain fake tensors, where no value that ``data_rules`` follows goes
in and none is decided. (``zeros_like`` and its relatives decide none if they make more floats than are followed: an
optimizer's state, of hundreds of parameters.) All others (data-dependent sizes, factories, ops that change a tensor's
storage, other tensor classes) go the long way.

Figures are those of one trace, whose cost model may be its own. Layouts of outputs are the same in every trace with the
same kernels and settings (``_here``), so the process keeps them: a model that is recorded again, or rehearsed in
slices, asks no fake kernel twice. No shorter-lived value could hold them, since two calls of ``profile`` share nothing.
So whatever a fake kernel reads, other than its arguments, has to be in ``_here`` or in the key of an op:
``test_outputs_that_are_kept_are_those_of_the_setting_of_the_process`` goes through the settings of torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan.device.kernels import active_device
from sacplan.record.fake_data import DataRules
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.fake_kernels import entered_kernels
from sacplan.torch_compat.fake_tensors import fake_device_of, fake_empty_strided
from sacplan.torch_compat.local_tensors import is_deferred
from sacplan.torch_compat.ops import op_traits, tensors_in
from sacplan.torch_compat.private import is_plain, storage_key

_VALUES = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_FILLED = frozenset((torch.ops.aten.empty_like.default, torch.ops.aten.zeros_like.default))
"""Ops on a tensor whose values do not matter: ``data_rules`` decides those of the result, unless it is too large."""
_FIRST_ARGUMENT = object()  # an output that is the first argument itself
_UNLIKE = object()  # an output that cannot be made from layouts

ArgumentLayout = tuple[bool, torch.Size, tuple[int, ...], int, torch.dtype]
"""An output: whether it is a view of the first argument, its size, stride, storage offset and type."""


class SeenOutputs(NamedTuple):
    """How to make the outputs of an op on arguments of one layout.

    Attributes:
        func: the op, kept alive: its identity is in the key, and must not be given to another one.
        outputs: layouts of results, and values that are no tensors.
        wrap: tuple or list; None for a single tensor.
    """

    func: Any
    outputs: list[Any]
    wrap: type | None


_MOST_KEPT = 50_000
_kept: dict[Hashable, dict[Any, SeenOutputs]] = {}
"""Outputs by what they depend on apart from the op and its arguments (``_here``), for the life of the process."""


def _here() -> Hashable:
    """Return all that decides what fake kernels return, apart from their arguments and what is in every key."""
    return (
        active_device(),
        entered_kernels(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
    )


def _kept_here() -> dict[Any, SeenOutputs]:
    # Emptied now and then in a process that goes through many models, rather than growing for ever.
    if sum(map(len, _kept.values())) > _MOST_KEPT:
        _kept.clear()
    return _kept.setdefault(_here(), {})


class Figures(NamedTuple):
    """``flops``, ``time_ms``, ``workspace_bytes`` and ``arguments`` of an ``Op``."""

    flops: int
    time_ms: float
    workspace_bytes: int
    arguments: str


@dataclass(eq=False)
class SeenOp:
    """What one trace knows of an op on arguments of one layout.

    Attributes:
        key: see ``SeenOps.key``.
        figures: None until it has run.
        layouts: numbers of its tensors' layouts (``TensorTable``), inputs first; None until one call was recorded.
        outputs: None where they cannot be made from layouts, or it has not run.
    """

    key: Any
    outputs: SeenOutputs | None
    figures: Figures | None = None
    layouts: tuple[int, ...] | None = None


class SeenOps:
    """The ops that one trace has had.

    Args:
        mode: the FakeTensorMode that runs.
        rules: the mode right above, or None; no other mode is between FakeTensorMode and the recorder.
    """

    def __init__(self, mode: FakeTensorMode, rules: DataRules | None) -> None:
        self._mode = mode
        self._rules = rules
        self._seen: dict[Any, SeenOp] = {}
        self._kept = _kept_here()
        self._of_parameters = self._others = False  # what the op that is looked up has as arguments
        self._eligible: dict[int, tuple[Any, bool, bool]] = {}  # by the op's identity: hashing one is slow

    def key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return everything that the outputs depend on; None where that is not known, and the op takes the long way."""
        entry = self._eligible.get(id(func))
        if entry is None:
            entry = self._eligible[id(func)] = (func, *self._eligibility(func))
        _, eligible, is_view = entry
        if not eligible or (func in _FILLED and not self._is_not_followed(args, kwargs)):
            return None
        # Whether gradients are on is in the key: oneDNN's LSTM returns a workspace only then. So is the default type,
        # which a quotient of integers has.
        parts: list[Any] = [id(func), torch.is_grad_enabled(), torch.get_default_dtype()]
        # The values of a view are those of its storage, whether they are known or not: nothing has to be followed.
        known = not is_view and self._rules is not None and self._rules.knows_values
        self._others = func in _FILLED
        self._of_parameters = False
        if not self._add(args, parts, known):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._add((value,), parts, known):
                return None
        # What is made of parameters alone has values that may be asked for, and takes the long way.
        return None if self._of_parameters and not self._others else tuple(parts)

    def _eligibility(self, func: Any) -> tuple[bool, bool]:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
            return False, False
        # Factories have no tensor argument, and may depend on defaults that are not in the key. Ops that change a
        # tensor's sizes have an input that the key does not describe any more.
        traits = op_traits(func)
        eligible = (
            any("Tensor" in str(a.type) for a in func._schema.arguments)
            and not traits.resizes
            and (DataRules.leaves_alone(func) or func in _FILLED)
        )
        return eligible, func.is_view and not traits.written_names

    def _is_not_followed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a new tensor like the first argument is too large for the rules to follow its values."""
        # With another type or device, the new tensor is not known to be as large.
        like = args[0]
        return (
            type(like) is FakeTensor
            and kwargs.get("dtype") in (None, like.dtype)
            and kwargs.get("device") in (None, like.fake_device)
            and (self._rules is None or not self._rules.follows(like))
        )

    def _add(self, values: Iterable[Any], parts: list[Any], known: bool) -> bool:
        for v in values:
            kind = type(v)
            if kind is FakeTensor:
                # A value that is known may decide the output, and must be followed.
                if v.constant is not None or not is_plain(v):
                    return False
                if known and self._rules is not None and self._rules.knows(v):
                    if not self._rules.is_of_parameters(v):
                        return False
                    self._of_parameters = True
                else:
                    self._others = True
                parts += (v.shape, v.stride(), v.storage_offset(), v.dtype, v.fake_device)
            elif kind in _VALUES:
                parts += (kind, v)
            elif kind is tuple or kind is list or kind is torch.Size:
                parts += (kind, len(v))
                if not self._add(v, parts, known):
                    return False
            else:
                return False
        return True

    def look_up(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SeenOp | None:
        """Return the entry of an op, a new one if this trace has not had it; None if the op takes the long way."""
        key = self.key(func, args, kwargs)
        if key is None:
            return None
        entry = self._seen.get(key)
        if entry is None:
            kept = self._kept.get(key)  # of an earlier trace
            entry = self._seen[key] = SeenOp(key, kept if kept is not None and kept.func is func else None)
        return entry

    def observe(self, seen: SeenOp, call: Call) -> None:
        """Keep what an op has returned, if it can be made again from layouts alone."""
        if seen.outputs is not None:
            return
        args, out = call.args, call.returned
        kind = type(out)
        wrap = kind if kind is tuple or kind is list else None
        values = out if wrap is not None else (out,)
        inputs = {storage_key(t.untyped_storage()) for t in tensors_in((args, call.kwargs))}
        base = storage_key(args[0].untyped_storage()) if args and type(args[0]) is FakeTensor else None
        layouts = []
        for v in values:
            layout = self._layout(v, args, inputs, base)
            if layout is _UNLIKE:
                return  # only the figures are looked up
            layouts.append(layout)
        seen.outputs = self._kept[seen.key] = SeenOutputs(call.func, layouts, wrap)

    def _layout(self, v: Any, args: Sequence[Any], inputs: set[int], base: int | None) -> Any:
        """Return how to make one output; ``_UNLIKE`` unless it is new, a view of the first argument, or that itself."""
        if type(v) in _VALUES:
            return v
        if args and v is args[0]:
            return _FIRST_ARGUMENT
        if (
            type(v) is not FakeTensor
            or v.constant is not None
            or v.fake_device.type != "cpu"
            or not is_plain(v)
            or any(v is a for a in args)
        ):
            return _UNLIKE
        storage = v.untyped_storage()
        key = storage_key(storage)
        layout: ArgumentLayout = (key == base, v.shape, v.stride(), int(v.storage_offset()), v.dtype)
        if key == base:
            return layout
        elements = 1 + sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True)) if v.numel() else 0
        # A new output must fill its storage from the start, or the storage that is made for it has another size.
        if key in inputs or layout[3] or storage.nbytes() != elements * v.element_size():
            return _UNLIKE
        inputs.add(key)  # a second output on the same storage is no new one
        return layout

    def make(self, seen: SeenOutputs, args: tuple[Any, ...]) -> Any:
        """Return the outputs of an op that was seen, for other arguments of the same layout."""
        made = [self._made(output, args) for output in seen.outputs]
        return made[0] if seen.wrap is None else seen.wrap(made)

    def _made(self, output: Any, args: tuple[Any, ...]) -> Any:
        if type(output) is not tuple:
            return args[0] if output is _FIRST_ARGUMENT else output
        is_view, size, stride, offset, dtype = output
        storage = args[0].untyped_storage() if is_view else None
        return fake_empty_strided(self._mode, size, stride, dtype, storage, offset)


class LookingUp(TorchDispatchMode):
    """Looks ops up ahead of a step, as the recorder does in it: parameters of many layers are sharded alike."""

    def __init__(self, mode: FakeTensorMode, rules: DataRules) -> None:
        super().__init__()
        self._seen = SeenOps(mode, rules)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = fake_device_of(func, args)
        if device is not None:
            return device
        if is_deferred(types):
            return NotImplemented
        kwargs = kwargs or {}
        seen = self._seen.look_up(func, args, kwargs)
        if seen is not None and seen.outputs is not None:
            return self._seen.make(seen.outputs, args)
        out = func(*args, **kwargs)
        if seen is not None:
            self._seen.observe(seen, Call(func, args, kwargs, out))
        return out
