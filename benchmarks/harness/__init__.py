"""What the benchmarks are built from.

- ``command``: the command line, the first line of output, and the loop over cases.
- ``results``: files of figures, written and read.
- ``table``: tables in text and in Markdown, and on pages of the docs.
- ``sweep``: many models by name, each in a process of its own.
- ``plans``: plans for a number of bytes, where none may be feasible.
- ``steps``: real steps, measured and compared bit by bit.
- ``played``: a recorded step, played on the caching allocator from the start of a run.
- ``processes``: work in other processes, with limits on time and memory.
"""
