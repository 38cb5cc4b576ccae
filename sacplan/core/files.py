"""Write and read files of frozen values: JSON with a kind, a schema version and a checksum, validated when read.

    write(path, {"what": "plan", "schema_version": 4, ...})
    plan = load(path, PlanFile, "plan", 4, PlanError)

A file gives the value that was written, or an error of the family. ``docs/files.md`` says what is in the files.
"""

from __future__ import annotations

import csv
import gzip
import json
import reprlib
import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sacplan.core.writing import write_bytes
from sacplan.errors import SacplanError

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A number of bytes, operations or occurrences, or an index."""

MaybeIndex = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""An index; -1 where there is none."""

Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1)]
Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

LARGEST_FILE = 2**30
"""Largest file that is read, in bytes of JSON; the profile of Llama-3-8B has 2 MB."""

_WIDTH = 160  # an object or list is written on one line if that is shorter than this

T = TypeVar("T")


class _FileHead(msgspec.Struct):
    """The fields that tell kinds and versions of files apart, whatever else is in them."""

    what: Any = None
    schema_version: Any = None


def load(path: str | Path, kind: type[T], what: str, schema_version: int, error: type[SacplanError]) -> T:
    """Read and validate a file, decompressed where its name ends in ``.gz``.

    Args:
        path: the file.
        kind: the type that it must hold; a validation error says where it does not.
        what, schema_version: the file's own ``what`` and ``schema_version``.
        error: raised for everything that is wrong with the contents. A file that cannot be opened is an ``OSError``.
    """
    path = Path(path)
    again = f"Make the {what} again and `.save()` it."
    try:
        data = read(path)
        # The head first: for a file of another kind or version, validation would only complain about some field.
        head = msgspec.json.decode(data, type=_FileHead)
        if (head.what, head.schema_version) == (what, schema_version):
            found = msgspec.json.decode(data, type=kind)
            json.loads(data, object_pairs_hook=_once)  # msgspec accepts an object with the same key twice
            return found
    # Damaged compression, damaged or invalid JSON (these are ValueErrors), too deep nesting, invalid values. Of
    # ``OSError`` only ``BadGzipFile`` is caught: a missing file is no damaged file, and its error passes through.
    except (EOFError, RecursionError, SacplanError, ValueError, gzip.BadGzipFile, zlib.error) as problem:
        raise error(f"{path} is not a sacplan {what}: {_sentence(problem)} {again}") from problem
    if head.what != what:
        raise error(f"{path} holds {reprlib.repr(head.what)}, not a sacplan {what}. {again}")
    raise error(
        f"{path} has schema_version {reprlib.repr(head.schema_version)}; this sacplan reads {schema_version}. "
        f"Make the {what} again with this version."
    )


def read(path: Path) -> bytes:
    """Return the JSON in a file. The size is limited, since a few bytes of gzip may expand to any size."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        # One byte more than allowed is enough to know that the file is too large.
        data: bytes = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE // 2**20} MiB")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ``ValueError`` if it has a key twice, since parsers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has the key {reprlib.repr(key)} twice in one object")
    return found


def table_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of the package (CSV, with comments after ``#``), by the names in its first line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def write(path: str | Path, data: Any) -> None:
    """Write JSON for people, compressed where the name ends in ``.gz``."""
    write_bytes(path, (_laid_out(data) + "\n").encode())


def write_compact(path: str | Path, value: Any) -> None:
    """Write JSON for programs, compressed where the name ends in ``.gz``."""
    write_bytes(path, msgspec.json.encode(value))


def _laid_out(value: Any, indent: int = 0, key: str = "") -> str:
    """Return ``value`` as JSON: on one line if it fits, else one entry per line."""
    line = key + json.dumps(value, allow_nan=False)
    # Text, numbers and empty containers cannot be broken up, however long the line is.
    if not value or not isinstance(value, (dict, list, tuple)) or indent + len(line) < _WIDTH:
        return line
    inner = indent + 2
    if isinstance(value, dict):
        entries = [_laid_out(v, inner, f"{json.dumps(k)}: ") for k, v in value.items()]
        start, end = "{", "}"
    else:
        entries = [_laid_out(v, inner) for v in value]
        start, end = "[", "]"
    separator = f"\n{' ' * inner}"
    return f"{key}{start}{separator}{f',{separator}'.join(entries)}\n{' ' * indent}{end}"


def _sentence(problem: Exception) -> str:
    return str(problem).rstrip(".") + "."
