"""Replace files atomically: what the package writes for a user goes to a temporary file, which is then renamed.

A reader finds all of the old contents or all of the new ones at any moment, and a failure leaves the old ones. Two
writers at once are fine: the contents are those of the last one to finish.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a name to write to; when the block ends, that file takes the place of ``path``.

        with replacing("curve.csv") as part:
            frame.to_csv(part)

    If the block raises, what it wrote is removed and ``path`` stays as it was. A file that exists keeps its
    permissions; if it is not writable, a ``PermissionError`` is raised as by ``open``. A symbolic link stays a link:
    its target is replaced. Anything but a regular file (``/dev/stdout``, a pipe) is written to directly.

    Nothing is synchronized to disk: this is about readers, not about power cuts.
    """
    path = Path(path)
    try:
        path = Path(os.path.realpath(path))
        mode = path.stat().st_mode
    except FileNotFoundError:
        # A new file has no permissions to keep, and gets those of the process.
        mode = None
    except ValueError as error:  # a null byte, which no name of a file has
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path)) from error
    if mode is not None and not stat.S_ISREG(mode):
        yield path
        return
    # Raised here, where the message names the file that was asked for: later it would name the temporary one.
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(path.parent if mode is None else path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    # In the same directory, since renaming is atomic within a file system only. The name is random, since several
    # threads, processes or machines may write at once. Some writers go by the suffix, so it is kept.
    part = path.with_name(f".{secrets.token_hex(8)}-{path.name[-128:]}")
    try:
        yield part
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file as ``replacing`` does, compressed where its name ends in ``.gz``."""
    with replacing(path) as part:
        # Without a time stamp, so that equal contents give equal files.
        part.write_bytes(gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)
