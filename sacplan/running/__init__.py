"""A plan put on a model, and one step run with it, fake or measured."""
