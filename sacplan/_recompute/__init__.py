"""The technique "recompute": what may be discarded, at what price, as a rewrite and as an executor."""
