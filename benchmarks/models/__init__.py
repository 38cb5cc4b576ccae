"""Models and batches that benchmarks and tests train.

- ``cases``: a model with its batch, loss and optimizer, and the language models that several benchmarks plan for.
- ``hf_models``: some thirty architectures of transformers with small configs, by hand; ``small_configs``: all of
  them, by rule.
- ``zoo_models``: timm, torchvision, diffusers, torch_geometric and PEFT.
- ``gpu_models``: the same kinds of models in torch alone, for a machine that has nothing else.
- ``chunk_models``: language models whose head and loss make the peak.
- ``random_blocks``: blocks that do what is hard to recompute.
- ``op_samples``: PyTorch's op database as steps.
- ``published_steps``: whole steps that others have measured on GPUs, by family (``published_language``,
  ``published_hf``, ``published_vision``); ``published_step``: what one is; ``published_networks``: their models.
"""
