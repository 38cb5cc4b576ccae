"""Run one step under FakeTensorMode, or on real tensors, and record it as a program."""
