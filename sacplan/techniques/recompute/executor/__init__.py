"""Recipes: run again only the ops that a discarded tensor needs, when autograd asks for it."""
