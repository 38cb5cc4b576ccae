"""Meshes of ranks: how PyTorch spreads a model over one, the strategies of an op, and the time of collectives."""
