"""Programs on OpenCL devices: memory, launches and what comes back."""

from torchedge.runtime.executors import Executor, LaunchTime

__all__ = ["Executor", "LaunchTime"]
