"""An OpenCL device as compiled graphs share it: context, queue, copies of PyTorch's tensors."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torchedge.lowering.targets import Target, target_for
from torchedge.opencl import ClDevice, DeviceContext, open_context
from torchedge.runtime.residents import Residents
from torchedge.runtime.transfers import Transfers


@dataclass(frozen=True, eq=False)
class OpenDevice:
    """A device in use. lock: one graph at a time runs on it."""

    context: DeviceContext
    transfers: Transfers
    residents: Residents
    target: Target
    lock: threading.RLock = field(default_factory=threading.RLock)

    def computes(self, dtype: str) -> bool:
        """Return whether kernels on the device take tensors of a dtype."""
        if dtype == "float64":
            return self.context.device.double
        return not dtype.startswith(("bfloat", "complex", "float8"))


_open: dict[int, OpenDevice] = {}


def open_device(query: ClDevice | str | int | None = None) -> OpenDevice:
    """Return this process's one `OpenDevice` of a device; raises what `open_context` raises."""
    context = open_context(query)
    found = _open.get(context.device.index)
    if found is None or found.context is not context:
        transfers = Transfers(context, context.queue)
        residents = Residents(context, transfers)
        found = OpenDevice(context, transfers, residents, target_for(context.device))
        _open[context.device.index] = found
    return found
