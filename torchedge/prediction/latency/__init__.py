"""How long a step takes: an analytic time model with fitted coefficients and a forest that corrects it."""
