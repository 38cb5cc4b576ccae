"""``profile``: one step of a model, recorded for a device; the model is left as it was."""
