"""The target device: its kernels, allocator, workspaces, and how long its ops take."""
