"""What a streaming run allocates against the resident memory of its process, on PoCL: the device's memory."""

import json

import pytest
from oracles.children import python
from oracles.streaming_programs import data_of, packed_data, weighted_chain

pytest.importorskip("pyopencl")
pytestmark = pytest.mark.slow

SIZES = [2**22, *[2**22 + 1024 * k for k in range(11)]]
"""Floats of each weight: 12 times 16 MiB."""

SCRIPT = """
import json, re, sys
import numpy as np
from oracles.streaming_programs import instance_of, weighted_chain
from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import FileSource
from torchedge.streaming.schedules import make_schedule
from torchedge.streaming.plans import STRATEGIES

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

strategy, path, places, sizes = json.loads(sys.argv[1])
made = weighted_chain(sizes, count=2)
instance = instance_of(made, 2**20)
schedule = make_schedule(made, instance, STRATEGIES[strategy](instance), 2**23)
x = np.ones(2, np.float32)
with Executor(made):  # what the driver takes once
    pass
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again
before = status("VmRSS")
with Executor(schedule, source=FileSource(path, places), profile=True) as executor:
    outputs = [executor.run(x)[0].tolist() for _ in range(2)]
    run = executor.measured()
    print(json.dumps([status("VmHWM") - before, run.driver.grown_bytes, run.allocated_bytes, outputs]))
"""


def test_the_resident_set_grows_by_what_is_allocated(tmp_path):
    made = weighted_chain(SIZES, count=2)
    path, places, content = tmp_path / "weights.bin", {}, 0
    with path.open("wb") as file:
        for name, array in packed_data(made, data_of(made)).items():
            places[name] = (content, array.nbytes)
            content += file.write(array.tobytes())
    grown, driver, allocated, outputs = {}, {}, {}, {}
    for strategy in ("preload-all", "always-next"):
        argument = json.dumps([strategy, str(path), places, SIZES])
        figures = json.loads(python("-c", SCRIPT, argument).stdout.splitlines()[-1])
        grown[strategy], driver[strategy], allocated[strategy], outputs[strategy] = figures
    assert outputs["preload-all"] == outputs["always-next"]
    for strategy, nbytes in allocated.items():
        assert abs(grown[strategy] - nbytes) < 0.1 * nbytes + 2**24, strategy
        assert abs(driver[strategy] - nbytes) < 0.1 * nbytes + 2**24, strategy
    assert 3 * grown["always-next"] < grown["preload-all"]
