"""``plan``: propose, rewrite, measure, correct; the cheapest plan that holds the budget."""
