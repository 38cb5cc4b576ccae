"""The technique "offload": what is kept for the backward pass waits on the host."""
