"""Recipes: run again just the ops that a discarded tensor needs, when autograd asks for it."""
