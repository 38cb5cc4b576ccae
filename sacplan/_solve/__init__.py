"""Stage 3: solvers that choose, each by its own model of memory."""
