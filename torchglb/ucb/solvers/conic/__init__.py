"""The optimistic program as a cone program: cvxpy, the oracle, and cvxpylayers, a layer."""
