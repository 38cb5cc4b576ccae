"""Chunks on a model: tensors that are not computed until somebody asks, and the loop over slices that computes them."""
