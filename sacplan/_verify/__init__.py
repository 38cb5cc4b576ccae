"""Run one step with a plan applied, fake or measured."""
