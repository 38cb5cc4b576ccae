"""Execute a notebook: ``python notebooks/execute.py IN.ipynb OUT.ipynb``. Fails if a cell fails."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main(source: Path, target: Path) -> None:
    notebook = nbformat.read(source, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": "."}}
    ).execute()
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
