"""Campaigns: a grid of pruned networks measured on a device by a stand-alone probe, through a transport."""
