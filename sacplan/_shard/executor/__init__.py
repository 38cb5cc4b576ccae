"""Execution of a sharding: parameters are DTensors whose ops run as ``choose.py`` says.

``grid.py``: the ranks of a mesh as one of them sees them; ``prepare.py``: how a call runs, worked out once;
``placed.py``: the tensors and their ops; ``install.py``: on and off a model.
"""
