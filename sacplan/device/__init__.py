"""The target device: its kernels, allocator and workspaces, and how long its ops take."""
