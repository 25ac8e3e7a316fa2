"""Readers of staging memory do jobs in order, and hand errors over."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from torchedge.runtime.staging import Readers
from torchedge.streaming.schedules import FileRead


@pytest.mark.parametrize("faults", [(), (2,), (0, 5)])
def test_readers_do_jobs_in_order_and_hand_over_what_the_source_raises(faults):
    class Source:
        """Bytes that are the address; faults raise."""

        def read(self, address, needed, into):
            if address in faults:
                raise ValueError(f"at {address}")
            into[:needed] = address

    staging = np.zeros(2**16, np.uint8)
    pool = SimpleNamespace(open=lambda at, events: None, view=lambda at, nbytes: staging[at : at + nbytes])
    readers = Readers(Source(), pool)
    reads = [FileRead(number, 2, 4096 * number, 0, ()) for number in range(8)]
    for number, read in enumerate(reads):
        readers.submit(number, read, [])
    seen, failed = set(), []
    for _ in reads:
        try:
            number, start, end = readers.next_done(wait=True)
        except ValueError as error:
            failed.append(str(error))
        else:
            seen.add(number)
            assert start <= end and (staging[4096 * number :][:2] == number).all()
    assert sorted(failed) == [f"at {address}" for address in faults]
    assert seen == set(range(8)) - set(faults) and readers.next_done(wait=False) is None
    readers.submit(0, reads[1], [])
    readers.cancel()
    assert readers.next_done(wait=False) is None
    readers.close()
    readers.close()
