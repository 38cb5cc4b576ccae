"""Do fake tensors have the sizes, strides and storages that a CPU's kernels return, op by op?

    python -m benchmarks.op_metadata             # PyTorch's op database, forward and backward: minutes
    python -m benchmarks.op_metadata xlogy       # an op of it, all that differs

Each op that is dispatched, in the backward pass too, runs for real and on fake copies of its arguments: same sizes,
strides, storage offsets and shared storages. What it returns is compared: size, type, strides (of dimensions of size 1
too: kernels look at them when they choose a memory format), storage offset, bytes of the storage, and whose storage it
is. Arguments are contiguous, transposed, channels last, expanded, slices of larger tensors, the first row of them, or
one of them is and the others are not.

A row is an op of which torch's own fake kernel differs: an example, which rule of ``sacplan/device/layouts.py`` puts
it right, and what differs with the rules. The command ends with an error if something does that ``LEFT`` does not
explain. Needs ``expecttest``, which ``torch.testing._internal`` imports.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.harness.command import Parser
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.steps import on_one_thread, tensors_of
from sacplan.device.cost import op_key
from sacplan.device.kernels import device_kernels
from sacplan.device.layouts import rule_of
from sacplan.device.op_kernels import Call
from sacplan.record.fake_copy import FakeCopier
from sacplan.record.fake_data import DataRules
from sacplan.record.fake_rules import needs_an_answer
from sacplan.torch_compat.fake_kernels import torchs_own_fake
from sacplan.torch_compat.fake_tensors import fake_device_of
from sacplan.torch_compat.ops import is_ordinary_tensor, tensors_in
from sacplan.torch_compat.private import storage_key

LEFT = {
    "aten._embedding_bag.default": "a CPU returns empty indices where a sum needs none; the fake kernel has them",
    "aten._fft_c2c.default": "an expanded input of equal strides: MKL's order of the dimensions; same bytes",
    "aten._fft_r2c.default": "an expanded input of equal strides: MKL's order of the dimensions; same bytes",
    "aten.div.Tensor": "an expanded operand of another type is copied first: a stride of a size of 1; same bytes",
    "aten.index_put.default": "a stride of a size of 1; same bytes",
    "aten.lift_fresh.default": "returns its argument, of which FakeTensorMode makes a fake tensor",
    "aten.rot90.default": "a stride of a size of 1, of the copy that is turned; same bytes",
}
"""What may differ, and why it does no harm."""

SAMPLES_LOOKED_AT = 100
"""Samples of an op that are made to find some with elements: the first ones of ``unfold`` are all empty."""

Difference = tuple[str, str, str]
"""The name of what differs, its real value, and its value on a fake tensor."""


def described(out: Any, inputs: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Describe each tensor that an op returned by what must be equal."""
    own: dict[int, str] = {}
    for i, t in enumerate(inputs):
        own.setdefault(storage_key(t.untyped_storage()), f"argument {i}")
    found = []
    for i, t in enumerate(tensors_in(out)):
        storage = t.untyped_storage()
        whose = own.setdefault(storage_key(storage), f"output {i}")
        same = next((f"argument {k}" for k, a in enumerate(inputs) if a is t), "new")
        found.append(
            {
                "shape": tuple(t.shape),
                "dtype": str(t.dtype),
                "stride": t.stride() if t.numel() else (),
                "offset": int(t.storage_offset()),
                "bytes": storage.nbytes(),
                "storage": whose,
                "tensor": same,
            }
        )
    return found


class CompareMetadata(TorchDispatchMode):
    """A dispatch mode that compares each op; run real steps in it.

    Attributes:
        differences: by op, what differs, each with the arguments of the first call.
        torchs_own: the same of torch's own fake kernel, for ops that have a rule.
        calls: by op, how many different calls were compared.
        not_compared: by op, why some calls were not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mode = FakeTensorMode(allow_non_fake_inputs=False, static_shapes=True)
        self._seen: set[Any] = set()
        self.differences: dict[str, dict[Difference, str]] = defaultdict(dict)
        self.torchs_own: dict[str, dict[Difference, str]] = defaultdict(dict)
        self.calls: Counter[str] = Counter()
        self.not_compared: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # FakeTensorMode asks for a fake tensor's device by an op, and other namespaces have no kernels to compare.
        if fake_device_of(func, args) is not None or func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
        if not inputs or not all(is_ordinary_tensor(t) for t in inputs):
            return func(*args, **kwargs)
        key = (op_key(Call(func, args, kwargs)), tuple(t.storage_offset() for t in inputs))
        if key in self._seen:
            return func(*args, **kwargs)
        self._seen.add(key)
        rules = DataRules()
        with self._mode, rules:
            copier = FakeCopier(rules)
            fake_args, fake_kwargs = tree_map_only(torch.Tensor, copier.tensor, (args, kwargs))
        arguments = ", ".join(f"{tuple(t.shape)}/{t.stride()}" for t in inputs)
        before = [t.untyped_storage() for t in inputs]  # keeps their addresses theirs
        out = func(*args, **kwargs)
        if not all(is_ordinary_tensor(t) for t in tensors_in(out)):
            return out
        name = str(func)
        fake_inputs = list(tensors_in((fake_args, fake_kwargs)))
        real = described(out, inputs)
        try:
            if rule_of(func) is not None:
                own = described(torchs_own_fake(self._mode, func, fake_args, fake_kwargs), fake_inputs)
                self._compare(func, real, own, self.torchs_own[name], arguments)
            with self._mode, rules:
                fake = described(func(*fake_args, **fake_kwargs), fake_inputs)
        except Exception as error:  # whatever a fake kernel raises is what the table is to say
            self.not_compared[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return out
        del before
        self.calls[name] += 1
        self._compare(func, real, fake, self.differences[name], arguments)
        return out

    @staticmethod
    def _compare(
        func: Any,
        real: list[dict[str, Any]],
        fake: list[dict[str, Any]],
        differences: dict[Difference, str],
        arguments: str,
    ) -> None:
        if len(real) != len(fake):
            differences.setdefault(("outputs", str(len(real)), str(len(fake))), arguments)
            return
        for r, f in zip(real, fake, strict=True):
            if r["shape"] != f["shape"] and needs_an_answer(func):
                continue  # a size that depends on data follows a rule
            for what in r if r["bytes"] or f["bytes"] else ("shape", "dtype"):
                if r[what] != f[what]:
                    differences.setdefault((what, str(r[what]), str(f[what])), arguments)

    def found(self) -> dict[str, dict[Difference, str]]:
        """Return what differs although the rules are on, by op."""
        return {name: found for name, found in self.differences.items() if found}


# --- arguments in other layouts ---------------------------------------------------------------------------


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() >= 2 else t


def _outer_transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() >= 3 else t


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if t.dim() == 3:
        return t.movedim(1, -1).contiguous().movedim(-1, 1)
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


def _expanded(t: torch.Tensor) -> torch.Tensor:
    return t[:1].clone().expand(t.shape) if t.dim() and t.shape[0] > 1 else t


def _sliced(t: torch.Tensor) -> torch.Tensor:
    if not t.dim():
        return torch.stack([t, t])[1]
    larger = torch.cat([t[:1], t, t[:1]]) if t.shape[0] else t
    larger = torch.cat([larger, larger], dim=-1)
    return larger[1:-1, ..., : t.shape[-1]] if t.dim() > 1 else larger[1 : 1 + t.shape[0]]


def _one_row(t: torch.Tensor) -> torch.Tensor:
    return t[:1].clone() if t.dim() > 1 else t


def _one_row_of_transposed(t: torch.Tensor) -> torch.Tensor:
    return _transposed(t)[:1] if t.dim() > 1 else t


def _one_image_in_channels_last(t: torch.Tensor) -> torch.Tensor:
    """Return an image as linear layers, ``transpose`` and ``view`` leave one: its first stride is that of the view."""
    if t.dim() < 3:
        return t
    made = _channels_last(t[:1])
    return made.as_strided(made.shape, (made.shape[1], *made.stride()[1:]))


_Change = Callable[[torch.Tensor], torch.Tensor]
"""A tensor in another layout, with the same values or the first row of them."""


def _changed(change: _Change, which: Callable[[int], bool]) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Apply a change to some of the arguments, by position, and copy the others."""
    return lambda t, i: change(t) if which(i) else t.clone()


_CHANGES: dict[str, _Change] = {
    "transposed": _transposed, "outer transposed": _outer_transposed, "channels last": _channels_last,
    "expanded": _expanded, "sliced": _sliced, "one row": _one_row,
    "one row of transposed": _one_row_of_transposed, "one image in channels last": _one_image_in_channels_last,
}  # fmt: skip
LAYOUTS = (
    {"contiguous": _changed(torch.clone, lambda i: True)}
    | {name: _changed(change, lambda i: True) for name, change in _CHANGES.items()}
    | {f"first {name}": _changed(change, lambda i: i == 0) for name, change in _CHANGES.items()}
    | {f"others {name}": _changed(change, lambda i: i > 0) for name, change in _CHANGES.items()}
)
"""(tensor, which argument it is) to the same values in another layout."""
GRADIENTS: dict[str, _Change] = {
    "contiguous": torch.ones_like,
    "expanded": lambda t: torch.ones((), dtype=t.dtype).expand(t.shape),
    "transposed": lambda t: _transposed(torch.ones(t.shape, dtype=t.dtype)),
    "channels last": lambda t: _channels_last(torch.ones(t.shape, dtype=t.dtype)),
}


def laid_out(change: Callable[[torch.Tensor, int], torch.Tensor], value: Any) -> tuple[Any, bool]:
    """Lay out the tensors of a sample, as leaves; also return whether that changed one of them."""
    changed = False
    positions = itertools.count()

    def new(t: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        if not is_ordinary_tensor(t):
            return t
        with torch.no_grad():
            made = change(t.detach(), next(positions))
        changed |= made.stride() != t.stride() or made.storage_offset() != t.storage_offset()
        return made.requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, new, value), changed


def run_with_backward(run: Callable[[], Any], leaves: list[torch.Tensor]) -> None:
    """Run forward, and backward with gradients in several layouts where there is something to differentiate."""
    outs = [t for t in tensors_of(run()) if t.requires_grad and is_ordinary_tensor(t)]
    wanted = [t for t in leaves if t.requires_grad]
    if outs and wanted:
        for gradient in GRADIENTS.values():
            grads = [gradient(t.detach()) for t in outs]
            torch.autograd.grad(outs, wanted, grads, allow_unused=True, retain_graph=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of an op, with the attributes of the database's ``SampleInput``."""

    input: torch.Tensor
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoreOfAnOp:
    """An op, or a way to call it, that the database lacks, with the attributes of its ``OpInfo``."""

    name: str
    op: Callable[[torch.Tensor], Any]
    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 3, 5),)
    supports_autograd: bool = True

    def supported_dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def sample_inputs_func(
        self, op: Any, device: str, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[Sample]:
        for shape in self.shapes:
            yield Sample(torch.rand(shape, device=device, dtype=dtype, requires_grad=requires_grad))


MORE = (
    MoreOfAnOp("fold", lambda x: F.fold(x, (6, 6), 3), ((2, 18, 16), (18, 16))),
    MoreOfAnOp("add a number", lambda x: x + 1.0), MoreOfAnOp("subtract from a number", lambda x: 1.0 - x),
    MoreOfAnOp("multiply by a number", lambda x: x * 2.0), MoreOfAnOp("divide by a number", lambda x: x / 2.0),
    MoreOfAnOp("compare with a number", lambda x: x > 0.5),
    MoreOfAnOp("integers as floats", lambda x: (x > 0.5).long() * 0.5 + x),
    MoreOfAnOp("where", lambda x: torch.where(x > 0.5, x, x * 2)),
    MoreOfAnOp("tokens to an image", lambda x: x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape)),
    MoreOfAnOp("group_norm", lambda x: F.group_norm(x, 2)),
    MoreOfAnOp("interpolate", lambda x: F.interpolate(x, scale_factor=2.0)),
)  # fmt: skip


def samples(op: Any, dtype: torch.dtype, limit: int) -> Iterator[Any]:
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = ((s.input, s.args, s.kwargs) for s in op.sample_inputs_func(op, "cpu", dtype, grad))
    kept = (s for s in itertools.islice(found, SAMPLES_LOOKED_AT) if all(t.numel() for t in tensors_in(s)))
    yield from itertools.islice(kept, limit)


def sweep(
    compare: CompareMetadata, ops: Iterable[Any], dtypes: Sequence[torch.dtype], limit: int
) -> dict[str, str]:
    """Run ops of the database; return those that do not run, and why not."""
    failed = {}
    with device_kernels("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, dtype in itertools.product(ops, dtypes):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            for given, (layout, change) in itertools.product(samples(op, dtype, limit), LAYOUTS.items()):
                (x, args, kwargs), changed = laid_out(change, given)
                if not changed and layout != "contiguous":
                    continue
                leaves = list(tensors_in((x, args, kwargs)))
                try:
                    with compare:
                        run_with_backward(functools.partial(op.op, x, *args, **kwargs), leaves)
                except Exception as error:  # a layout that the op refuses, or an op for another device
                    if layout == "contiguous":
                        failed[op.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return failed


def table(compare: CompareMetadata) -> list[Row]:
    """Return a row for each op of which something differs, with torch's own fake kernel or with the rules."""
    rows = []
    for name in sorted(compare.calls):
        left = compare.differences[name]
        own = compare.torchs_own.get(name) or left
        if own:
            what, real, fake = next(iter(own))
            rows.append(
                {
                    "op": name,
                    "calls": compare.calls[name],
                    "differs": what,
                    "real": real,
                    "fake": fake,
                    "arguments": own[what, real, fake],
                    "rule": rule_of_name(name),
                    "left": [
                        f"{' '.join(difference)} for {arguments}" for difference, arguments in left.items()
                    ],
                    "reason": LEFT.get(name) if left else None,
                }
            )
    return rows


def rule_of_name(name: str) -> str | None:
    _, packet, overload = name.split(".")
    return rule_of(getattr(getattr(torch.ops.aten, packet), overload)) if name.startswith("aten.") else None


@on_one_thread
def main() -> None:
    parser = Parser(__doc__, "op_metadata.json")
    parser.add_argument(
        "ops", nargs="*", help="names in the database (default: all; the others write no table)"
    )
    given = parser.begin()
    from torch.testing._internal.common_methods_invocations import op_db

    ops = [op for op in (*op_db, *MORE) if not given.ops or op.name in given.ops]
    start = time.perf_counter()
    compare = CompareMetadata()
    failed = sweep(compare, ops, (torch.float32, torch.bfloat16, torch.complex64), limit=3)
    rows = table(compare)
    for row in rows:
        print(
            f"{row['op']}: {row['differs']} {row['real']} is {row['fake']} for {row['arguments']}; {row['rule']}"
        )
        for left in row["left"]:
            print("    left:", left)
    totals = {
        "database_ops": len(ops), "aten_ops": len(compare.calls), "calls": sum(compare.calls.values()),
        "differ_in_torch": len(rows), "differ_with_rules": sum(bool(row["left"]) for row in rows),
    }  # fmt: skip
    print(totals, f"{time.perf_counter() - start:.0f} s")
    if not given.ops:
        write_results(given.json, rows, **totals, not_compared=compare.not_compared, failed=failed)
    new = sorted(set(compare.found()) - set(LEFT))
    if new:
        raise SystemExit(f"These differ, and nothing says why: {', '.join(new)}")


if __name__ == "__main__":
    main()
