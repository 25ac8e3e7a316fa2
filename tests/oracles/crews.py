"""Threads that begin together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 4


def together(work: Callable[[int], Any], count: int = THREADS) -> Sequence[Any]:
    """Call `work(number)` in so many threads that all begin at once; return the results in order."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(begin, number) for number in range(count)]]
