"""The technique "chunk": run a stretch of ops in slices of one dimension."""
