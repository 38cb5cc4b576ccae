"""The boundary to PyTorch: private APIs, and what the schema of an op says."""
