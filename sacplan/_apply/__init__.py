"""``apply``: put the decisions of a plan on a model."""
