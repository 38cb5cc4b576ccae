"""Files of frozen values: JSON with a kind, a schema version and a checksum, validated when it is read.

    save(path, "plan", 2, PlanFile, plan, PlanError)
    plan = load(path, "plan", 2, PlanFile, PlanError)

What is read is what was written, or an error of the family. ``docs/files.md`` says what is in the files.
"""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sacplan.errors import SacplanError, TraceError

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An integer of bytes, operations or occurrences."""

Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1)]

_WIDTH = 160  # an object or list that fits in a line of that length is written on one

T = TypeVar("T")


class _Head(msgspec.Struct):
    """What tells the kinds and versions of files apart, whatever else is in them."""

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
    data = path.read_bytes()
    again = f"Make the {what} again and `.save()` it."
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        head = msgspec.json.decode(data, type=_Head)
        if (head.what, head.schema_version) == (what, schema_version):
            return msgspec.json.decode(data, type=kind)
    # Damaged compression, damaged or invalid JSON (these are ValueErrors), nesting without end, invalid values.
    except (EOFError, RecursionError, SacplanError, ValueError, gzip.BadGzipFile, zlib.error) as problem:
        raise error(f"{path} is not a sacplan {what}: {_sentence(problem)} {again}") from problem
    if head.what != what:
        raise error(f"{path} holds {reprlib.repr(head.what)}, not a sacplan {what}. {again}")
    raise error(
        f"{path} has schema_version {reprlib.repr(head.schema_version)}; this sacplan reads {schema_version}. "
        f"Make the {what} again with this version."
    )


def write(path: str | Path, data: Any) -> None:
    """Write JSON for people, compressed where the name ends in ``.gz``."""
    path = Path(path)
    text = (_laid_out(data) + "\n").encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def write_compact(path: str | Path, value: Any) -> None:
    """Write JSON for programs, compressed where the name ends in ``.gz``."""
    path = Path(path)
    data = msgspec.json.encode(value)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _laid_out(value: Any, indent: int = 0, key: str = "") -> str:
    """``value`` as JSON: on one line where it fits, else one entry per line."""
    line = key + json.dumps(value, allow_nan=False)
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


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write JSON, compressed where the name ends in ``.gz``."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        json.dump(data, file)


def read_json(path: str | Path, what: str, schema_version: int) -> dict[str, Any]:
    """Read what ``write_json`` wrote; ``TraceError`` where it is something else or of another version."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            data = json.load(file)
    except (ValueError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not a sacplan {what}: {error}. Make it again with `.save()`.") from error
    if not isinstance(data, dict) or data.get("what") != what:
        found = data.get("what") if isinstance(data, dict) else type(data).__name__
        raise TraceError(f"{path} holds {found!r}, not a sacplan {what}.")
    if data.get("schema_version") != schema_version:
        raise TraceError(
            f"{path} has schema_version {data.get('schema_version')!r}; this sacplan reads {schema_version}. "
            f"Make the {what} again with this version."
        )
    return data
