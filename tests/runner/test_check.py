"""`torchedge-run --check` names the kernel that a driver gets wrong; one that rounds otherwise passes."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from bundles.conftest import Small
from bundles.test_hostile_bundles import edit

import torchedge
from torchedge.bundles.checks import figures_of

pytest.importorskip("pyopencl")

pytestmark = pytest.mark.slow

PRODUCT = " * (float4)("
WRONG, ROUNDED = " * -(float4)(", " * 1.0000002f * (float4)("


@pytest.fixture(scope="module")
def checked(batch, tmp_path_factory):
    """A bundle that trains, two batches to an update, with the results of its launches."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("check") / "bundle"
    return torchedge.export(
        Small(), batch[0], out=out, device="adreno-740", mode="train", targets=batch[1], accumulation=2,
        onnx=False, check=True,
    )  # fmt: skip


def report(native, folder):
    """Return exit status and report of a check."""
    done = native.start(folder, "--device", native.device, "--check", "--json")
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def driver(bundle, folder, reseal, kernels, product):
    """Return a copy in which these kernels multiply as another driver would."""
    shutil.copytree(bundle.path, folder)
    digests = {}
    for name in kernels:
        path = folder / "kernels" / f"{name}.cl"
        text = path.read_text().replace(PRODUCT, product)
        path.write_text(text)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
        reseal(folder, f"kernels/{name}.cl")

    def change(document):
        for kernel in document["kernels"]:
            kernel["sha256"] = digests.get(kernel["name"], kernel["sha256"])

    for name in ("program.json", "accumulating.json"):
        edit(folder, name, reseal, change)
    return folder


def multiplying(bundle):
    """Return kernels that multiply, in the order in which a check comes to them, with their first launch."""
    first = {}
    for program in reversed(bundle.programs.values()):
        for position, launch in enumerate(program.launches):
            kernel = program.kernels[launch.kernel]
            if PRODUCT in kernel.source:
                first.setdefault(kernel.name, position)
    return first


def test_the_exporting_driver_has_the_bits_and_another_rounding_passes(native, checked, reseal, tmp_path):
    results = sum(
        access != "read"
        for program in checked.programs.values()
        for launch in program.launches
        for access in program.kernels[launch.kernel].access
    )
    code, found = report(native, checked.path)
    assert (code, found["off"], found["results"], found["identical"]) == (0, None, results, results)
    other = driver(checked, tmp_path / "rounded", reseal, multiplying(checked), ROUNDED)
    code, found = report(native, other)
    assert (code, found["off"]) == (0, None), found["off"]
    assert found["results"] == results and found["identical"] < results


def test_a_wrong_kernel_is_named(native, checked, reseal, tmp_path):
    kernels = multiplying(checked)
    assert len(kernels) > 2
    for name in (next(iter(kernels)), list(kernels)[-1]):
        code, found = report(native, driver(checked, tmp_path / name, reseal, [name], WRONG))
        off = found["off"]
        assert (code, off["kernel"], off["launch"]) == (1, name, kernels[name])
        assert abs(off["measured"] - off["expected"]) > off["bound"]


def test_bundles_without_results_or_with_others_are_refused(native, checked, inference, reseal, tmp_path):
    words = ("--device", native.device, "--check")
    assert "export the model with check=True" in native.refusal(inference, *words)
    for change in (
        lambda d: d["program"][0].update(launch=10_000),
        lambda d: d["program"][0].update(tensor=checked.program.inputs[0]),
        lambda d: d["program"][0].update(figures=[0.0]),
        lambda d: d["program"].reverse(),
        lambda d: d.update(schema="torchedge-check-9"),
    ):
        folder = shutil.copytree(checked.path, tmp_path / "changed", dirs_exist_ok=True)
        edit(folder, "check.json", reseal, change)
        assert "check.json" in native.refusal(folder, *words)


def test_figures_of_an_array():
    array = np.array([[1, -2], [np.nan, 4]], np.float32)
    weights = [k * 2654435761 % 2**32 / 2**32 - 0.5 for k in (0, 1, 3)]
    expected = (3.0, 7.0, np.dot(weights, [1, -2, 4]), -2.0, 4.0, 1.0)
    assert figures_of(array) == pytest.approx(expected)
