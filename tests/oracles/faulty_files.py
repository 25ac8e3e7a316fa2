"""Files of weights, whole and with faults, and the outputs of runs with all weights loaded."""

import threading

from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import open_raw


def write_file(path, arrays, padding=40):
    """Write packed arrays one after the other, at odd offsets; return their places."""
    places, content = {}, b""
    for name, array in arrays.items():
        content += b"\x7f" * padding
        places[name] = (len(content), array.nbytes)
        content += array.tobytes()
    path.write_bytes(content)
    return places


def preloaded_outputs(made, data, *inputs):
    with Executor(made) as executor:
        executor.load(data)
        return executor.run(*inputs)


class FaultyFile:
    """A file whose reads go through `fault(number, offset, array)`: it raises, or returns the most bytes."""

    def __init__(self, path, reads, fault):
        self.file, self.fault, self.count, self.lock = open_raw(path, reads), fault, 0, threading.Lock()
        self.closed = False

    def read_into(self, offset, into):
        with self.lock:
            self.count += 1
            number = self.count
        result = self.fault(number, offset, into)
        count = self.file.read_into(offset, into)
        return count if result is None else min(count, result)

    def state(self):
        return self.file.state()

    def close(self):
        self.closed = True
        self.file.close()
