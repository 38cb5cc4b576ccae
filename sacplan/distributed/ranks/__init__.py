"""How a step is spread over ranks by ``fully_shard`` or DistributedDataParallel: what a user says, and PyTorch's calls.

The step of a rank is recorded with these calls (``profiling/tracing.py``); nothing of what they do is modelled here but
for what plans must respect: where parameters are gathered (``unit_limits.py``).
"""
