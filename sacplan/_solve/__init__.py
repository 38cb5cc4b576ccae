"""Choose one option for each choice of a problem made of numbers: integer program, greedy, uniform."""
