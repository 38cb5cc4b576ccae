"""Sharding: the ops of a step spread over a mesh of ranks.

``mesh.py`` and ``placements.py`` describe layouts. ``strategies.py`` says how an op may run, from its factor rule, and
``choose.py`` how it does run. ``costs.py`` has the times of collectives and redistributions. ``program.py`` makes the
program of one rank, with ``rank/``, and ``executor/`` runs a sharded model. ``emit.py`` prints a sharding as code of
other tools, and ``tp_plans.py`` reads the tensor-parallel plans of Hugging Face.
"""
