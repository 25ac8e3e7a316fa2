"""The check of a trace by the Trace Event Format that Chrome and Perfetto read."""

import json
import math
from collections import defaultdict
from itertools import pairwise


def check_trace(path):
    """Return the complete events of a trace file by the name of their thread; assert that all are valid.

    Events of one thread have to nest: here, one ends before the next begins.
    """
    document = json.loads(path.read_text())
    assert set(document) <= {"traceEvents", "displayTimeUnit"} and document["displayTimeUnit"] in ("ms", "ns")
    names, threads = {}, defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
            continue
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["ph"] == "X" and event["dur"] >= 0 and isinstance(event["tid"], int)
            threads[event["tid"]].append(event)
    assert len(set(names.values())) == len(names)
    for events in threads.values():
        events.sort(key=lambda event: event["ts"])
        for first, second in pairwise(events):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3  # us
    return {names[thread]: events for thread, events in threads.items()}
