"""Training steps as plain graphs of ops, and what no schedule of them can beat.

- ``opgraph``: the graph, and its way to and from a recording.
- ``stacks``: graphs of GPT stacks and of multi-layer perceptrons.
- ``optimum``: exact optima and bounds, by integer programs.
"""
