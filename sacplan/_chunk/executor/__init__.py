"""Chunks on a model: ops are put off, and run in slices."""
