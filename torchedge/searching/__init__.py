"""Search for networks that fit a device: spaces of candidates, constraints, evolution."""
