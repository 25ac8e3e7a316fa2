"""Threads share a handle while weights stream: ThreadSanitizer finds no race of the runner's own."""

import os
import re
import subprocess

import numpy as np
import pytest
import torch
from runner.conftest import DRIVERS, SOURCE
from runner.test_streaming import LIMIT, Deep

import torchedge

pytest.importorskip("pyopencl")


@pytest.mark.slow
def test_threads_share_a_streaming_handle_without_a_race(build, native, tmp_path):
    library = build("-D", "TORCHEDGE_THREADS=ON").parent
    torch.manual_seed(0)
    numbers = torch.randint(0, 300, (2, 5))
    bundle = torchedge.export(
        Deep().eval(), numbers, out=tmp_path / "bundle", device="local-cpu", onnx=False, memory_limit=LIMIT
    )
    bundle.run(numbers.numpy())  # kernels are in the driver's cache
    program = tmp_path / "threads"
    words = ["c++", "-std=c++17", "-fsanitize=thread", "-g", SOURCE.parents[1] / "tests/runner/threads.cpp"]
    linked = ["-I", SOURCE / "include", "-L", library, "-ltorchedge", f"-Wl,-rpath,{library}"]
    subprocess.run([*words, *linked, "-o", program], check=True)
    # A name of `called_from_lib` may be part of one library's name alone.
    alone = [name for name in DRIVERS if name != "libLLVM"]
    ignored = "".join([f"called_from_lib:{n}\n" for n in alone] + [f"race:{n}\n" for n in DRIVERS])
    (tmp_path / "races").write_text(ignored)  # drivers are built without the sanitizer
    ports = [
        (p.name, int(np.prod(p.shape)) * np.dtype(p.dtype).itemsize)
        for p in (*bundle.inputs, *bundle.outputs)
    ]
    options = f"exitcode=0:suppressions={tmp_path / 'races'}"
    done = subprocess.run(
        [str(word) for word in (program, bundle.path, native.device, *ports[0], *ports[1])],
        env={**os.environ, **native.environment, "TSAN_OPTIONS": options},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # A driver's own threads are not seen to wait for each other: what counts are accesses of the runner.
    reports = done.stderr.split("WARNING: ThreadSanitizer")[1:]
    # So is what the driver shares with threads that it has created, even where its frames have no names.
    races = []
    for report in reports:
        accesses, *created = re.split(r"  Thread T\d+ .*created by", report)
        driven = any(name in stack for name in DRIVERS for stack in created)
        if "/export/runner/" in accesses.split("Location is")[0] and not driven:
            races.append(report)
    assert not races, races[0]
