"""Chunks: a stretch of ops that runs in slices of one dimension."""
