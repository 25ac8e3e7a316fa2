"""The solver: plans that are proven optimal where that can be, with a lower bound always."""

from torchedge.streaming.solving.planner import solve

__all__ = ["solve"]
