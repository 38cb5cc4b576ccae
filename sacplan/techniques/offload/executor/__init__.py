"""Carries offloading out: copies of saved tensors on the host, on streams of their own."""
