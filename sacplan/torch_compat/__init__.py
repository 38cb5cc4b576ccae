"""The boundary to PyTorch: private APIs, and what the schema of an op says."""

from sacplan.torch_compat.versions import check_torch

check_torch()
