"""The pause of garbage collection: nested, in threads, on errors."""

import gc
import threading

import pytest

from torchedge.storage.locks import collection_paused


@pytest.fixture(autouse=True)
def restored():
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def test_nested_blocks_end_with_the_outermost_one_also_on_errors():
    with pytest.raises(ValueError), collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_what_was_off_stays_off():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_it_comes_back_when_the_last_thread_leaves():
    inside, leave = threading.Event(), threading.Event()

    def work():
        with collection_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    with collection_paused():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()  # the other thread is inside
    leave.set()
    thread.join(60)
    assert gc.isenabled()
