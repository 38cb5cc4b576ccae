"""Tensor parallelism: which modules ``parallelize_module`` may cut so that ranks still compute what the model does."""
