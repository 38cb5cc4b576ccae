"""One step, run on fake or real tensors, becomes a program."""
