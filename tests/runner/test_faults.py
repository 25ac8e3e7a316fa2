"""Reads, writes, allocations and drivers that fail: one line, no leak, and the old file or the new one."""

import os
import resource
import signal
import subprocess
from dataclasses import replace

import pytest
from runner.test_runner import batches_of

import torchedge
from torchedge.storage.tensors import write_tensors

pytest.importorskip("pyopencl")

OLD = b"the state of yesterday"


@pytest.fixture(scope="module")
def shim(shims):
    """A library that fails on demand, in front of the OpenCL library that the runner would open."""
    return shims("faults")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs."""
    return tmp_path_factory.mktemp("cache") / "opencl"


@pytest.fixture
def start(native, shim, cache, training, batch, tmp_path):
    """Train one step with a fault, and save over an old state."""
    bundle = torchedge.load_bundle(training)
    inputs = tmp_path / "inputs.safetensors"
    write_tensors(inputs, batches_of(bundle, [tensor.numpy() for tensor in batch], 1)[0])
    (tmp_path / "state").mkdir()
    state, log = tmp_path / "state" / "state.safetensors", tmp_path / "objects"

    def call(fault, path=training):
        state.write_bytes(OLD)
        log.unlink(missing_ok=True)
        faulty = replace(
            native, cache=tmp_path / "nothing" if "Program" in fault else cache,
            environment={
                **native.environment, "LD_PRELOAD": str(shim), "TORCHEDGE_OPENCL": str(shim),
                "FAULT": fault, "FAULT_PATH": str(path), "FAULT_LOG": str(log),
            },
        )  # fmt: skip
        done = faulty.start(training, "--device", native.device, "--inputs", inputs, "--save", state)
        objects = int(log.read_text()) if log.exists() else None
        others = [file for file in state.parent.iterdir() if file != state]
        return done, state.read_bytes(), objects, others

    return call


@pytest.mark.slow
def test_short_reads_and_writes_are_completed(start, tmp_path):
    done, new, objects, others = start("none:fail:0")
    assert (done.returncode, objects, others) == (0, 0, []) and new != OLD, done.stderr
    for fault, path in (("pread:short:1", "weights.safetensors"), ("write:short:1", tmp_path / "state")):
        done, state, objects, others = start(fault, path)
        assert (done.returncode, objects, others) == (0, 0, []) and state == new, done.stderr


FAULTS = [
    *[(f"pread:fail:{n}", "training") for n in (1, 20)],
    *[(f"{call}:fail:1", "state") for call in ("write", "fsync", "rename")],
    *[
        (f"{call}:fail:1", "")
        for call in ("clCreateContext", "clCreateCommandQueue", "clCreateProgramWithSource")
    ],
    *[(f"{call}:fail:1", "") for call in ("clBuildProgram", "clFinish")],
    *[(f"clCreate{what}:fail:{n}", "") for what, n in (("Buffer", 7), ("Kernel", 9))],
    *[(f"clEnqueue{what}:fail:{n}", "") for what, n in (("NDRangeKernel", 12), ("WriteBuffer", 3))],
    ("clEnqueueReadBuffer:fail:1", ""),
    *[(f"malloc:fail:{n}", "training/") for n in (1, 16)],
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("fault", "path"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_a_failure_is_one_line_and_leaves_nothing(start, tmp_path, fault, path):
    done, state, objects, others = start(
        fault, {"state": tmp_path / "state", "training": "training/"}.get(path, path)
    )
    assert done.returncode == 2, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert (state, objects, others) == (OLD, 0, [])


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_old_state_or_the_new_one(start, tmp_path):
    _, new, _, _ = start("none:fail:0")
    states, folder = [], tmp_path / "state"
    for call in ("write", "fsync", "rename"):
        number = 1
        while True:
            done, state, _, others = start(f"{call}:kill:{number}", folder)
            for file in others:  # of the process that ended
                file.unlink()
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert state in (OLD, new), f"{call} {number}"
            states.append(state)
            number += 1 if call != "write" or number < 3 else 9
    assert len(states) > 5 and set(states) == {OLD, new}


@pytest.mark.slow
def test_a_full_disk_is_one_line(native, training, batch, tmp_path):
    bundle = torchedge.load_bundle(training)
    inputs, state = tmp_path / "inputs.safetensors", tmp_path / "state.safetensors"
    write_tensors(inputs, batches_of(bundle, [tensor.numpy() for tensor in batch], 1)[0])
    words = [training, "--device", native.device, "--inputs", inputs]
    assert native.start(*words).returncode == 0  # compiled programs are in the cache

    def start(*more):
        return subprocess.run(
            [str(word) for word in (native.program, *words, *more, "--cache", native.cache)],
            env={**os.environ, **native.environment}, capture_output=True, text=True, check=False,
            preexec_fn=lambda: (
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
            ),
        )  # fmt: skip

    if start().returncode:
        pytest.skip("the driver writes files of its own when it takes a compiled program")
    for option in ("--save", "--outputs"):
        state.write_bytes(OLD)
        done = start(option, state)
        assert done.returncode == 2 and "cannot be written" in done.stderr, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and state.read_bytes() == OLD  # a driver may have lines of its own
        assert [file.name for file in tmp_path.iterdir() if file.name.startswith("state.")] == [state.name]
