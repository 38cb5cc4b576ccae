"""``apply``: puts the decisions of a plan on a model."""
