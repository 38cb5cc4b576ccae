"""Chunks on a model: tensors that are not computed until somebody asks, and the loop over slices that computes them.

The engine is ``values.py`` (what a lazy tensor stands for), ``lazy.py`` (how ops are deferred) and ``loop.py`` (what
runs). In a live training step, ``forward.py`` stands in for a module's forward and ``entry.py`` is where autograd meets
a region. In inference, ``stretch.py`` finds the ops of a stretch and ``collected.py`` makes them nodes of the engine,
since they are cut only when the last of them is there.

A planner drives the same engine op by op, on fake tensors and without autograd, and sees in its recorder what the loop
runs:

    region = SlicedRegion(size=4096, slices=16, on_whole=refuse)   # told of ops that have to see whole tensors
    lazy = root(region, hidden, Axis(dim=1, outer=1, size=4096, inner=1))
    logits = defer(aten.mm.default, (lazy, weight), {})         # nothing runs, and no dispatch mode sees it
    ...                                                         # the other ops, forward and backward, in order
    loss, gradient = compute([loss.value, gradient.value])      # one loop
"""
