"""The exact round of a growing history: most rounds need no pass over it at all."""
