"""Stage 1: one training step becomes a recording, without a GPU and without touching the model."""
