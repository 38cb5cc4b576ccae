"""Rewrites that every recording gets: in-place versions, and the workspaces of libraries."""
