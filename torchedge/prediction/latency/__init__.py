"""How long a step takes: an analytic time model with fitted coefficients, corrected by a forest where one was measured."""
