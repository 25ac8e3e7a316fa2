"""Bundles: the folder that carries a model to a device, how it is made, and how it is read again."""
