"""One call of an op: its arguments by name, its tensors, and a key by shapes and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sacplan.torch_compat.ops import arguments_by_name, op_traits


def is_tensor(value: Any) -> bool:
    """Whether something is a tensor, or describes one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def flat_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in arguments or results: nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flat_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat_tensors(item)
    elif is_tensor(value):
        yield value


@dataclass(eq=False)
class Call:
    """One call of an op. Tensors may be anything with ``shape`` and ``dtype``.

    Attributes:
        func: the op.
        args, kwargs: as a dispatch mode is given them.
        returned: what the call returns.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    returned: Any = None

    @property
    def name(self) -> str:
        """Name of the op, without namespace and overload."""
        return str(self.func._schema.name).partition("::")[2]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults included, in the order of the schema."""
        return arguments_by_name(self.func, self.args, self.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @cached_property
    def named_inputs(self) -> tuple[tuple[str, Any], ...]:
        """The tensors in arguments, each with the name of the argument that it stands in."""
        # ``arguments`` is in the order of the schema, whose first names are those of the positional arguments.
        given = (*zip(self.arguments, self.args, strict=False), *self.kwargs.items())
        return tuple((name, t) for name, value in given for t in flat_tensors(value))

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The tensors in arguments: by position, then by keyword, lists flattened."""
        return (*flat_tensors(self.args), *flat_tensors(self.kwargs))

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The tensors returned, in order."""
        return tuple(flat_tensors(self.returned))

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Which of ``inputs`` the call writes in place."""
        # By identity: comparing tensors would run ops, and equal ones may still be two arguments.
        written = {id(t) for t in flat_tensors(op_traits(self.func).written(self.args, self.kwargs))}
        return tuple(i for i, t in enumerate(self.inputs) if id(t) in written)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls with arguments and results of the same shapes and types."""
        return (self.func, frozen(self.args), frozen(self.kwargs), frozen(self.returned))


def frozen(value: Any) -> Any:
    """Return arguments as a hashable key, with tensors by shape and type."""
    if is_tensor(value):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(frozen(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, frozen(item)) for name, item in value.items())
    # With the type, since 1, 1.0 and True are equal and hash alike.
    return (type(value), value)
