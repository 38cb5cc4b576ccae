"""The step of one rank, as a rewrite of the step of the whole model, for each of the two that may run it.

A step on several ranks is run by FSDP2 or by DDP, and each has buffers that the other does not have:

- FSDP2 (``fully_shard.py``): a unit gathers all its parameters before its forward and its backward, one unit ahead in
  the backward pass; the outermost unit keeps them from forward to backward; a unit's gradients are reduced together
  after its backward.
- DDP (``ddp.py``): parameters are replicated, and gradients are held twice, as gradients and in buckets.

Both start from a step on the batch of one rank, and run its ops unchanged, on plain tensors or on the parts of a rank
that ``parallelize_module`` has made (``_shard/sharding.py``): such a step is recorded as it is. FSDP2 pads shards, and
autocast casts the unsharded parameter. A mixed-precision policy of FSDP2 casts shards before they are gathered, so its
step is recorded with parameters of another type (``_record/mixed_precision.py``).

Both share the costs of the links and the clocks of computation and collectives
(``_shard/costs.py``, ``_shard/overlap.py``).
"""
