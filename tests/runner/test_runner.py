"""The native runner gets the bits of Python's executor."""

import json
import re

import numpy as np
import pytest
import torch
from drivers.networks import changed, drawn

import torchedge
from torchedge.storage.tensors import read_tensors, write_tensors

pytest.importorskip("pyopencl")

STEPS = 20
NETWORKS = {"cnn": "adreno-740", "graph": "mali-g715", "gpt": "local-cpu"}


def batches_of(bundle, arrays, count):
    names = [port.name for port in bundle.inputs]
    return [dict(zip(names, [changed(a, k) for a in arrays], strict=True)) for k in range(count)]


def assert_same(bundle, batches, outputs):
    """Hold outputs of steps against the executor's, bit by bit."""
    for k, batch in enumerate(batches):
        for port, array in zip(bundle.outputs, bundle.run(*batch.values()), strict=True):
            assert array.tobytes() == outputs[f"{k}.{port.name}"].tobytes(), f"step {k}: {port.name}"


def hold_training(native, bundle, arrays, tmp_path):
    """Train in two processes, the second from the state that the first saved, against one executor."""
    batches, first, second = (
        batches_of(bundle, arrays, STEPS),
        tmp_path / "7.safetensors",
        tmp_path / "20.safetensors",
    )
    lr = ("--set", "lr=0.03125")
    outputs = native.run(bundle.path, tmp_path, batches[:7], *lr, "--save", first)
    later = native.run(bundle.path, tmp_path, batches[7:], "--load", first, "--save", second)
    outputs |= {
        f"{int(k) + 7}.{name}": array
        for (k, _, name), array in ((n.partition("."), a) for n, a in later.items())
    }
    bundle.runner.set("lr", 0.03125)
    assert_same(bundle, batches, outputs)
    state, metadata = read_tensors(second, finite=False)
    assert metadata["batches"] == str(STEPS) and float(metadata["hyperparameter.lr"]) == 0.03125
    held = bundle.runner.executor.held
    assert {t.name for t in held if t.role in ("parameter", "buffer", "state")} == set(state)
    for name, array in state.items():
        assert array.tobytes() == bundle.runner.read(name).tobytes(), name


def test_an_inference_has_the_executor_s_bits(native, inference, batch, tmp_path):
    bundle = torchedge.load_bundle(inference)
    batches = batches_of(bundle, [batch[0].numpy()], 3)
    assert_same(bundle, batches, native.run(inference, tmp_path, batches))


@pytest.mark.slow
def test_packed_weights_have_the_executor_s_bits_within_a_limit(native, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).eval()
    quantized, x = torchedge.quantize(net, "int4", group=32, zero_points=True), torch.randn(1, 512)
    folder = tmp_path / "bundle"
    torchedge.export(quantized, x, device="local-cpu", out=folder, onnx=False, memory_limit="640KiB")
    bundle = torchedge.load_bundle(folder)
    batches = batches_of(bundle, [x.numpy()], 3)
    assert_same(bundle, batches, native.run(folder, tmp_path, batches))


def test_training_goes_on_from_a_saved_state_with_the_executor_s_bits(native, training, batch, tmp_path):
    hold_training(native, torchedge.load_bundle(training), [tensor.numpy() for tensor in batch], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "device"), NETWORKS.items())
def test_training_has_the_executor_s_bits(native, network, device, tmp_path):
    case = drawn(network)
    bundle = torchedge.export(
        case.model, case.inputs, out=tmp_path / "bundle", device=device, mode="train", targets=case.targets,
        loss=case.loss, accumulation=2, onnx=False,
    )  # fmt: skip
    hold_training(native, bundle, [tensor.numpy() for tensor in (*case.inputs, case.targets)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"precision": "float16"}, {"tuner": "model"}])
def test_inferences_have_the_executor_s_bits(native, settings, tmp_path):
    case = drawn("wide")
    bundle = torchedge.export(
        case.model, case.inputs, out=tmp_path / "bundle", device="adreno-740", onnx=False, **settings
    )
    batches = batches_of(bundle, [tensor.numpy() for tensor in case.inputs], 3)
    assert_same(bundle, batches, native.run(bundle.path, tmp_path, batches))


def test_a_bundle_is_described(native, training):
    done = native.start(training, "--device", native.device)
    assert done.returncode == 0, done.stderr
    described, bundle = json.loads(done.stdout), torchedge.load_bundle(training)
    for key, ports in (("inputs", bundle.inputs), ("outputs", bundle.outputs)):
        assert [(p["name"], tuple(p["shape"]), p["dtype"]) for p in described[key]] == [
            (port.name, port.shape, port.dtype) for port in ports
        ]
    assert described["hyperparameters"] == dict(bundle.manifest.hyperparameters)
    assert described["sha256"] == bundle.manifest.sha256


def test_weights_that_python_saved_are_loaded(native, training, batch, tmp_path):
    bundle, file = torchedge.load_bundle(training), tmp_path / "weights.safetensors"
    batches = batches_of(bundle, [tensor.numpy() for tensor in batch], 1)
    weights = {name: array + 1 for name, array in bundle.state_dict().items()}
    write_tensors(file, weights)
    saved = tmp_path / "saved.safetensors"
    native.run(training, tmp_path, batches, "--load", file, "--save", saved, "--set", "lr=0")
    state, _ = read_tensors(saved, finite=False)
    parameters = {t.name for t in bundle.program.tensors if t.role == "parameter"}
    assert parameters and all(state[name].tobytes() == weights[name].tobytes() for name in parameters)


def test_wrong_calls_are_refused_in_one_line(native, training, batch, tmp_path):
    bundle = torchedge.load_bundle(training)
    images, classes = (tensor.numpy() for tensor in batch)
    names = [port.name for port in bundle.inputs]
    file = tmp_path / "inputs.safetensors"
    on = ("--device", native.device)
    for arrays, message in (
        ((images, classes + 10), "holds 13 at element 0; expected classes or indices from 0 to 9"),
        ((images, classes.astype(np.int32)), r"int32\[2\]; expected int64\[2\]"),
        ((images[:1], classes), r"float32\[1, 3, 8, 8\]; expected float32\[2, 3, 8, 8\]"),
    ):
        write_tensors(file, dict(zip(names, arrays, strict=True)))
        assert re.search(message, native.refusal(training, *on, "--inputs", file)), message
    write_tensors(file, {names[0]: images})
    assert f"holds no {names[1]}" in native.refusal(training, *on, "--inputs", file)
    write_tensors(file, dict(zip(names, (images, classes), strict=True)))
    for words, message in (
        (("--set", "momentun=1"), "no hyperparameter momentun"),
        (("--load", file), "expected a state of this model"),
        (("--save", tmp_path / "no folder" / "x"), "cannot be written"),
        (("--memory-limit", 1000), "use a limit of at least"),
        (("--sha256", "0" * 64), "it is another bundle"),
        (("--device", "no such device"), "fits no device"),
        (("--nonsense",), "is no option"),
    ):
        assert message in native.refusal(training, *on, "--inputs", file, *words), message


def test_figures_give_the_quartiles_of_steps_and_the_process_s_memory(native, inference, batch, tmp_path):
    inputs, port = tmp_path / "inputs.safetensors", torchedge.load_bundle(inference).inputs[0].name
    write_tensors(inputs, {port: batch[0].numpy()})
    peaks = []
    for steps in (1, 2, 1003):
        ballast = b"x" * (1 << 29 if steps == 1003 else 1)  # resident in this process, not in the runner's
        words = ("--device", native.device, "--inputs", inputs, "--steps", steps, "--figures")
        figures = json.loads(native.start(inference, *words).stdout)
        names = ("lower_quartile_step_ms", "median_step_ms", "upper_quartile_step_ms")
        quartiles, last = [figures[name] for name in names], figures["step_ms"]
        assert figures["steps"] == steps and 0 < quartiles[0] <= quartiles[1] <= quartiles[2]
        if steps <= 2:  # the times are known: the last one, and the mean's other
            times = [2 * figures["mean_step_ms"] - last, last]
            assert quartiles == pytest.approx(np.quantile(times, (0.25, 0.5, 0.75)))
        peaks.append(figures["peak_bytes"])
        assert 1 << 20 < figures["built_peak_bytes"] <= peaks[-1]
        del ballast
    assert peaks[2] < peaks[1] + (1 << 28)
