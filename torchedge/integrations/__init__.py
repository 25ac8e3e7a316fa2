"""Predictions inside the tools that people train with: transformers, Lightning and accelerate."""
