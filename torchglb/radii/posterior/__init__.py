"""Radii from a prior and a posterior: uniform, Gaussian, centred at the tested parameter, exact."""
