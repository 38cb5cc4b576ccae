"""The technique ``"chunk"``: ops that run in slices of one dimension."""
