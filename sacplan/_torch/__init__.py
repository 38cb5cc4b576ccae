"""The boundary to torch: private APIs, and what the schema of an op says."""
