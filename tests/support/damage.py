"""Files that are damaged: bytes that are lost or changed, and contents of another form."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def set_to(*keys: Any, to: Any) -> Callable[[Any], None]:
    """A change of contents: another value at a place."""

    def change(data: Any) -> None:
        _at(data, keys[:-1])[keys[-1]] = to

    return change


def damaged_contents(contents: bytes, data: st.DataObject, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """What JSON holds, with a key or an entry that is missing, of another type, unknown, or there twice."""
    changed = json.loads(contents)
    *outer, key = data.draw(st.sampled_from(_places_in(contents)))
    inside = _at(changed, outer)
    kind = data.draw(st.sampled_from(["delete", "replace", "repeat", "add"]))
    if kind == "delete":
        del inside[key]
    elif kind == "replace":
        inside[key] = data.draw(values)
    elif kind == "repeat" and isinstance(inside, list):
        inside.insert(data.draw(st.integers(0, len(inside))), copy.deepcopy(inside[key]))
    elif isinstance(inside, dict):
        inside[data.draw(st.text(max_size=9))] = data.draw(values)
    return changed


def _at(data: Any, keys: Any) -> Any:
    return functools.reduce(lambda inside, key: inside[key], keys, data)


@functools.cache
def _places_in(contents: bytes) -> list[tuple[Any, ...]]:
    return list(_places(json.loads(contents)))


def _places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*here, key)
        yield from _places(value[key], (*here, key))
