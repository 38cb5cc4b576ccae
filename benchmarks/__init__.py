"""Commands that measure what sacplan promises and costs: ``python -m benchmarks.NAME``.

Each file here is a command. ``docs/figures.md`` lists them with the files in ``results`` that they write. What they
share is in folders:

- ``harness``: command lines, files of figures, tables, plans for a number of bytes, measured steps, processes.
- ``models``: the models and batches that are trained.

One file is no command: ``rivals.py`` (``frontier``).
"""
