"""A process of `build_processes`: builds the share on its standard input and leaves binaries in the cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.compiling import build_text
from torchedge.opencl.contexts import open_context


def main() -> int:
    """Build the share; texts that do not build are left to the caller, who reports them."""
    share = json.loads(sys.stdin.buffer.read())
    context = open_context(share["device"])
    cache = BinaryCache(Path(share["folder"]), share["max_bytes"])
    for text in share["texts"]:
        try:
            build_text(context, text, cache)
        except context.cl.Error:
            continue
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
