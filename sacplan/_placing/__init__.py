"""The search for placements: an integer program on the values of a step, one axis of a mesh after the other."""
