"""The recorded step as a program: storages, tensors, ops, module calls and events; who is alive when; patches."""
