"""Reports: what a plan does to a step, as tables, figures, a page and a trace."""
