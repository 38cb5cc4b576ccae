"""A step as a program: storages, tensors, ops, module calls and events; what is alive when; patches."""
