"""One thread: the models are small, and threads that wait for one another on a busy machine cost minutes."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
