"""The step of one rank, as a rewrite of the step of the whole model, for each of the three that may run it.

A step on several ranks is run by one of three, and each has buffers that the others do not have:

- sacplan (``sacplan.apply`` with a mesh; ``_shard``): an op gathers the parameter that it reads, and the copy lives
  until the next redistribution on that axis of the mesh; a gradient is reduced by itself as soon as it is there.
- FSDP2 (``fully_shard.py``): a unit gathers all its parameters before its forward and its backward, one unit ahead in
  the backward pass; the outermost unit keeps them from forward to backward; a unit's gradients are reduced together
  after its backward.
- DDP (``ddp.py``): parameters are replicated, and gradients are held twice, as gradients and in buckets.

They are separate rewrites and not schedules of one, since the ops differ, too:

- sacplan starts from a step on the batch of all ranks, and runs ops on placed tensors. Tensors made of the batch before
  it meets a parameter are replicated. Gradients are added up out of place. A parameter stays replicated if the ranks
  divide none of its dimensions. Under autocast a shard is cast before it is gathered.
- FSDP2 and DDP start from a step on the batch of one rank, and run its ops on plain tensors, unchanged. FSDP2 pads
  shards, and autocast casts the unsharded parameter. A mixed-precision policy of FSDP2 casts shards before they are
  gathered, so its step is recorded with parameters of another type (``_record/mixed_precision.py``).

All three share the costs of the links and the clocks of computation and collectives
(``_shard/costs.py``, ``_shard/overlap.py``).
``tests/ranks/test_run_by.py`` takes the differences of their peaks apart, buffer by buffer.
"""
