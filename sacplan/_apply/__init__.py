"""Apply the decisions of a plan to a model."""
