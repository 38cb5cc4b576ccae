"""The step of one rank under ``fully_shard`` or DistributedDataParallel, as a rewrite of the whole model's."""
