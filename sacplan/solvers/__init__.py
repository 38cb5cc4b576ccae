"""Solvers of problems that are made of numbers: one option for each choice. Integer program, greedy."""
