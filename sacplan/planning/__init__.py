"""``plan``: propose, rewrite, measure, correct; the cheapest plan within the budget."""
