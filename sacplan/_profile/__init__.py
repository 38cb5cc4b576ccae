"""``profile``: one step of the user's model, recorded for a device, nothing of the user's touched."""
