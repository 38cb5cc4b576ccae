"""Stage 2: what each module could discard, at what price, and the module tree with statistics."""
