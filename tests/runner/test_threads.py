"""Threads share a handle while weights stream: ThreadSanitizer finds no race of the runner's own."""

import os
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
    ignored = "".join(f"called_from_lib:{name}\nrace:{name}\n" for name in DRIVERS)
    (tmp_path / "races").write_text(ignored)  # drivers are built without the sanitizer
    ports = [
        (p.name, int(np.prod(p.shape)) * np.dtype(p.dtype).itemsize)
        for p in (*bundle.inputs, *bundle.outputs)
    ]
    done = subprocess.run(
        [str(word) for word in (program, bundle.path, native.device, *ports[0], *ports[1])],
        env={**os.environ, **native.environment, "TSAN_OPTIONS": f"suppressions={tmp_path / 'races'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ThreadSanitizer" not in done.stderr
