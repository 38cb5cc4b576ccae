"""Models spread over ranks: shardings and their costs, PyTorch's calls, and which modules may be cut."""
