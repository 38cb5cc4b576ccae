"""Stage 4: propose, replay on the recording, tighten; the plan is the cheapest that holds."""
