"""Threads that wait in a driver: one for each thread that asks, gone with it, and none of a parent's."""

import os
import threading
import time

import pytest

from torchedge.opencl.waiting import _waiter


def waiting_threads():
    return [thread for thread in threading.enumerate() if thread.name == "opencl-wait"]


def test_errors_come_back_and_the_next_call_is_made():
    made = []
    with pytest.raises(ZeroDivisionError):
        _waiter().run(lambda: 1 / 0)
    _waiter().run(lambda: made.append(threading.current_thread().name))
    assert made == ["opencl-wait"]


def test_a_waiting_thread_ends_with_the_one_that_asked():
    _waiter().run(lambda: None)
    before = len(waiting_threads())
    asking = [threading.Thread(target=lambda: _waiter().run(lambda: None)) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    for _ in range(1000):  # they are told to end, and need a moment
        if len(waiting_threads()) == before:
            break
        time.sleep(0.01)
    assert len(waiting_threads()) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_waits_by_a_thread_of_its_own():
    _waiter().run(lambda: None)
    child = os.fork()
    if child == 0:
        made = []
        _waiter().run(lambda: made.append(1))
        os._exit(7 if made else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
