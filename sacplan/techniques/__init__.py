"""Techniques, which save memory: what one is, what their executors share, each of them, and the list."""
