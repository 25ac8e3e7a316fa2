"""A process of `build_processes`: builds the share on its standard input and leaves binaries in the cache.

Its argument is the device's `place_of`. One that gets no share within a minute ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.compiling import build_text
from torchedge.opencl.contexts import DeviceContext, open_context
from torchedge.opencl.platforms import describe, device_at, handles


def main() -> int:
    """Build the share; texts that do not build are left to the caller, who reports them."""
    index = device_at(sys.argv[1])
    context = open_context(describe(handles()[index], index))
    patience = threading.Timer(60, os._exit, (1,))
    patience.daemon = True
    patience.start()
    order = json.loads(sys.stdin.buffer.read() or '{"cache": null, "share": []}')
    patience.cancel()
    folder = order["cache"]
    cache = BinaryCache(Path(folder["folder"]), folder["max_bytes"]) if folder else None
    built = []
    for text, runs in order["share"]:
        try:
            built.append((build_text(context, text, cache), runs))
        except context.cl.Error:
            continue
    try_kernels(context, built)
    return 0


def try_kernels(context: DeviceContext, built: Sequence[tuple[Any, Sequence[dict[str, Any]]]]) -> None:
    """Run one work-group of kernels; all their tensors lie in one buffer, whose content is of no use."""
    cl = context.cl
    sizes = [nbytes for _, runs in built for run in runs for nbytes in run["buffers"]]
    if not sizes:
        return
    buffer = cl.Buffer(context.context, cl.mem_flags.READ_WRITE, max(sizes))
    for program, runs in built:
        for run in runs:
            kernel, group = cl.Kernel(program, run["kernel"]), tuple(run["local_size"])
            kernel.set_args(*[buffer] * len(run["buffers"]), *map(np.int32, run["numbers"]))
            cl.enqueue_nd_range_kernel(context.queue, kernel, group, group)
            context.queue.finish()


if __name__ == "__main__":
    raise SystemExit(main())
