"""The Rotor chain solver, and its sequences as decisions."""
