#!/usr/bin/env python3
"""Runs a command until its standard input ends.

    python3 leash.py LOCK COMMAND...

When standard input ends (the parent process or the connection is gone), the command and its children are
killed, so that no measurement overlaps with the next run. LOCK is a file: a second leash on it waits until
the command of the first has ended, at most a minute. Standard library, Python 3.6 or newer, POSIX.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

WAIT_SECONDS = 60.0
BUSY, NO_COMMAND = 75, 127


def main() -> None:
    """Take the lock, run the command, exit with its status."""
    if len(sys.argv) < 3:
        sys.exit("leash: expected LOCK COMMAND...")
    with open(sys.argv[1], "w") as lock:
        take(lock.fileno())
        try:
            child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            sys.stderr.write(f"leash: cannot run {sys.argv[2]}: {error.strerror}\n")
            sys.exit(NO_COMMAND)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: end(child))
        threading.Thread(target=follow, args=(child,), daemon=True).start()
        while os.read(0, 4096):
            pass
        end(child)


def take(lock: int) -> None:
    """Wait for the lock; give up after a minute."""
    begun = time.time()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.time() - begun > WAIT_SECONDS:
                sys.stderr.write("leash: another run is measuring on this device\n")
                sys.exit(BUSY)
            time.sleep(0.1)


def follow(child: subprocess.Popen) -> None:
    """Exit when the command exits, with its status."""
    status = child.wait()
    os._exit(status if status >= 0 else 128 - status)


def end(child: subprocess.Popen) -> None:
    """Kill the command and every process in its session."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    os._exit(128 + signal.SIGHUP)


if __name__ == "__main__":
    main()
