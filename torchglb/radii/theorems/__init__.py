"""Theorems 3.1 and 3.2, their constants and variants: radii that need no posterior."""
