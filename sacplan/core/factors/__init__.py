"""Which dimensions of an op's tensors belong together, so that it may run in slices of them.

Every dimension of every tensor of an op is a product of factors. A factor passes through to the outputs, is reduced, or
is blocked. The notion is that of Shardy's sharding rules: what may be sliced in time may be sharded in space.

``rule.py`` says what a rule is and finds the one of a call, ``axes.py`` cuts tensors along factors, and the other
modules have the formulas by subject, each of shapes alone. Importing the package registers them.
"""

from sacplan.core.factors import (
    attention,
    convolutions,
    gathers,
    losses,
    norms,
    pointwise,
    products,
    reductions,
    views,
)

__all__ = [
    "attention",
    "convolutions",
    "gathers",
    "losses",
    "norms",
    "pointwise",
    "products",
    "reductions",
    "views",
]
