"""`python -m torchedge` is the same as the `torchedge` command."""

from __future__ import annotations

import sys

from torchedge.cli import main

if __name__ == "__main__":
    sys.exit(main())
