"""Drivers with extensions of vendors, or small allocations: the runner asks for no more than they list."""

from dataclasses import replace

import pytest
import torch
from runner.test_runner import assert_same, batches_of, hold_training

import torchedge

pytest.importorskip("pyopencl")

HINTS = "cl_qcom_perf_hint cl_qcom_priority_hint cl_khr_priority_hints"
RECORDS = "cl_qcom_recordable_queues"


@pytest.fixture(scope="module")
def shim(shims):
    return shims("vendor")


@pytest.fixture
def run(native, shim, inference, batch, tmp_path):
    """Run three steps on a driver with these variables; return what it was asked for."""
    bundle = torchedge.load_bundle(inference)
    log = tmp_path / "log"

    def call(*words, extensions="", **variables):
        log.write_text("")
        variables = {f"VENDOR_{name.upper()}": str(value) for name, value in variables.items()}
        variables |= {"VENDOR_LOG": str(log), "VENDOR_EXTENSIONS": extensions}
        variables |= {"LD_PRELOAD": str(shim), "TORCHEDGE_OPENCL": str(shim)}
        faked = replace(native, environment={**native.environment, **variables})
        batches = batches_of(bundle, [batch[0].numpy()], 3)
        assert_same(bundle, batches, faked.run(inference, tmp_path, batches, *words))
        return log.read_text().splitlines()

    return call


def test_hints_are_given_where_the_device_lists_them(run):
    fast = ["context 40c2 40c3", "context 40c9 40ca", "queue 1096 1"]
    assert run("--hint", "fast", extensions=HINTS) == fast
    assert run("--hint", "sparing", extensions=HINTS) == [
        "context 40c2 40c5", "context 40c9 40cc", "queue 1096 4"
    ]  # fmt: skip
    assert run("--hint", "fast", extensions="cl_qcom_perf_hint") == fast[:1]
    assert run("--hint", "fast", "--hint", "record") == run(extensions=HINTS + RECORDS) == []
    assert run("--hint", "fast", extensions=HINTS, refuses=1) == fast  # and goes on without


def test_a_step_is_recorded_once_where_the_device_records(run, inference):
    launches = len(torchedge.load_bundle(inference).program.launches)
    lines = ["recording", f"{launches} launches", *["replay"] * 3, "released"]
    assert run("--hint", "record", extensions=RECORDS) == lines


@pytest.mark.slow
def test_an_arena_larger_than_an_allocation_lies_in_pieces(native, shim, tmp_path):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
    x, classes = torch.randn(64, 32), torch.randint(0, 32, (64,))
    bundle = torchedge.export(
        torch.nn.Sequential(*layers), x, out=tmp_path / "bundle", device="local-cpu", mode="train",
        targets=classes, onnx=False,
    )  # fmt: skip
    program = bundle.program
    most = max(tensor.nbytes for tensor in program.tensors) + 127
    assert 2 * most < program.arena.nbytes
    variables = {"VENDOR_ALLOCATION": str(most), "LD_PRELOAD": str(shim), "TORCHEDGE_OPENCL": str(shim)}
    small = replace(native, environment={**native.environment, **variables})
    hold_training(small, bundle, [x.numpy(), classes.numpy()], tmp_path)
    words = ("--device", native.device, "--steps", 1)
    assert "one allocation takes" in replace(
        small, environment={**small.environment, "VENDOR_ALLOCATION": "1000"}
    ).refusal(bundle.path, *words)
