"""Structured pruning: which channels of a captured network go together, and modules without some of them."""
