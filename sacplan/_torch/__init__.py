"""The boundary to PyTorch: private APIs, and what the schema of an op says."""

from sacplan._torch.versions import check_torch

check_torch()
