"""Execute a notebook: ``python notebooks/execute.py IN.ipynb OUT.ipynb``. Fails if a cell fails.

Start it in the root of the repository, so that the notebooks can import ``examples``. What changes from run to run is
left out of OUT, so that a diff shows only real changes: times of execution, the version of Python, log lines of torch's
profiler, progress bars, and a warning of tqdm.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_QUIET = {
    "KINETO_LOG_LEVEL": "99",  # these are written to stderr from C++, with times
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",  # progress bars leave blanks
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm's, where there are no widgets; it has a path in it
}


def main(source: Path, target: Path) -> None:
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": "."}},
        record_timing=False,
        coalesce_streams=True,
    ).execute(env={**os.environ, **_QUIET})
    notebook.metadata.language_info.pop("version", None)
    nbformat.validate(notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
