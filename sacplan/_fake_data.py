"""Values and sizes that depend on data, in a step that has none: explicit rules, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def data_rules() -> Iterator[None]:
    yield
