"""Rewrites that every step gets: in-place versions, and the workspaces of libraries."""
