"""Stage 6: a fake step with the plan, or a measured one."""
