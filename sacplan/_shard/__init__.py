"""Sharding: the ops of a step spread over a mesh of ranks.

``mesh.py`` and ``placements.py`` say where tensors lie, ``strategies.py`` how an op may run, from its factor rule.
``costs.py`` says what it takes to move tensors between ranks. ``emit.py`` prints a sharding as code of other tools, and
``tp_plans.py`` reads the tensor-parallel plans of Hugging Face.
"""
