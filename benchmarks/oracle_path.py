"""Puts the checkout and the tests' oracles on the path: import it before the oracles."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT)]
