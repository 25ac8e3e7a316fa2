"""Stands for adb: a phone is a folder, FAKE_HOME, in whose shell this machine's programs run.

FAKE_PHONES: JSON of states by serial, as `adb devices` prints them; the messages are those of adb's sources.
FAKE_FAULT: "cut" loses the connection halfway through a file, "full" is a phone without room.
"""

import json
import os
import subprocess
import sys

UNAUTHORIZED = """adb: device unauthorized.
This adb server's $ADB_VENDOR_KEYS is not set
Try 'adb kill-server' if that seems wrong.
Otherwise check for a confirmation dialog on your device."""
FULL = "cat() { head -c 64; echo 'cat: xwrite: No space left on device' >&2; return 1; }; "


def fail(text: str) -> None:
    sys.exit(sys.stderr.write(text + "\n") and 1)


def choose(phones: dict[str, str], serial: str | None) -> None:
    """End as adb does, unless exactly one phone is meant and ready."""
    if serial is None and len(phones) != 1:
        fail("adb: more than one device/emulator" if phones else "adb: no devices/emulators found")
    if serial is not None and serial not in phones:
        fail(f"adb: device '{serial}' not found")
    state = phones[serial or next(iter(phones))]
    if state != "device":
        fail(UNAUTHORIZED if state == "unauthorized" else f"adb: device {state}")


def shell(line: str) -> int:
    os.makedirs(os.environ["FAKE_HOME"], exist_ok=True)
    line = line.replace("/data/local/tmp/", "")  # which this machine has not
    fault = os.environ.get("FAKE_FAULT")
    command = ["/bin/sh", "-c", (FULL if fault == "full" else "") + line]
    if fault == "cut" and ".part" in line:
        data = sys.stdin.buffer.read()
        subprocess.run(
            command, cwd=os.environ["FAKE_HOME"], input=data[: len(data) // 2], capture_output=True
        )
        fail("error: closed")
    return subprocess.call(command, cwd=os.environ["FAKE_HOME"])


def main(words: list[str]) -> int:
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(json.dumps(words) + "\n")
    phones = json.loads(os.environ.get("FAKE_PHONES", '{"ABC123": "device"}'))
    if words == ["devices"]:
        print("List of devices attached")
        print("".join(f"{serial}\t{state}\n" for serial, state in phones.items()))
        return 0
    serial = words[1] if words[:1] == ["-s"] else None
    words = words[2:] if serial else words
    choose(phones, serial)
    if words[:2] != ["shell", "-T"] or len(words) != 3:
        fail(f"adb: unknown command {words[0]}")
    return shell(words[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
