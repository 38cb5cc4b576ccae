"""Questions about many plans: how a peak trades against time, what fits, what to use, and what would help."""
