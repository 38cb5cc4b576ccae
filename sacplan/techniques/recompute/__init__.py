"""The technique "recompute": what can be discarded and at what cost, the rewrite, and the executor."""
