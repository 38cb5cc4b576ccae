"""The program of one rank, a file for each thing to know while ``sacplan/_shard/program.py`` goes through the events.

``local_runs.py``: the ops that run on a rank for a call or a redistribution. ``draft.py``: the events and ops of the
rank as they are written. ``tensors.py``: the layout of each tensor. ``storages.py``: which storage stands for a
recorded one, and when it is freed. ``saved.py``: the tensors that autograd has saved. ``moves.py``: redistributions,
and the copies that they leave. ``gradients.py``: when a gradient is complete. ``exposed.py``: the time of collectives
that computation does not hide.
"""
