"""Arguments that people pass: devices and dtypes of torch, examples of either layout, bare limits."""

import contextlib
import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import CaptureError, DeviceError, InputError

NET = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
DEVICE = "jetson-tx2"


class Tagger(nn.Module):
    def __init__(self, batch_first=False, kind=nn.LSTM):
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.recurrent = kind(32, 64, batch_first=batch_first)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0])


TIME_FIRST = torch.zeros(50, 4, dtype=torch.long)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_batch_of_a_recurrent_network_is_where_its_layer_takes_it(kind):
    first = torchedge.capture(Tagger(True, kind), TIME_FIRST.T.contiguous())
    time = torchedge.capture(Tagger(False, kind), TIME_FIRST)
    predictor = torchedge.Predictor("nvidia-a100")
    for batch in (4, 32):
        one, other = (predictor.predict(graph, batch) for graph in (first, time))
        copies = batch * 50 * (32 + 64) * 4 / 2**20  # of its input and output, step by step
        assert one.allocated.value - 2 * copies < other.allocated.value <= one.allocated.value * 1.02
    assert any("dimension 1 of the example is taken as the batch" in note for note in time.notes)
    assert not any("dimension 1" in note for note in first.notes)


@pytest.mark.slow
def test_the_batch_dimension_can_be_named():
    named = torchedge.predict(Tagger(), 8, "nvidia-a100", example=TIME_FIRST, batch_dim=1)
    inferred = torchedge.predict(Tagger(), 8, "nvidia-a100", example=TIME_FIRST)
    forced = torchedge.predict(Tagger(), 8, "nvidia-a100", example=TIME_FIRST, batch_dim=0)
    assert named.allocated == inferred.allocated and not any("dimension 1" in n for n in named.notes)
    assert forced.allocated.value < named.allocated.value
    exported = torchedge.capture(Tagger(), TIME_FIRST, batch_dim=1, method="export")
    alike = torchedge.predict(exported, 8, "nvidia-a100")
    assert alike.allocated.value == pytest.approx(named.allocated.value, rel=0.1)
    with pytest.raises(InputError, match="batch_dim is -1"):
        torchedge.capture(Tagger(), TIME_FIRST, batch_dim=-1)


def test_a_layout_that_is_not_known_is_noted():
    guessed = torchedge.predict(Tagger(), 8, "nvidia-a100", input_size=(50,))
    assert any("batch_dim=1" in note for note in guessed.notes)


def test_an_example_of_another_batch_size_is_noted():
    example = torch.zeros(8, 3, 8, 8)
    note = "the example is 8 samples; the figures are for batch size 1"
    assert note in torchedge.predict(NET, device=DEVICE, example=example).notes
    assert note not in torchedge.predict(NET, 8, DEVICE, example=example).notes
    assert not any("samples" in n for n in torchedge.predict(NET, 4, DEVICE, example=example[:1]).notes)


@pytest.mark.parametrize("device", [torch.device("cuda"), "cuda:0", torch.device("mps")])
def test_a_device_of_torch_that_is_not_here_is_one_line(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="PyTorch sees no CUDA device here; name the device"):
        torchedge.predict(NET, device=device, input_size=(3, 8, 8))


def test_a_device_of_torch_is_its_profile(monkeypatch):
    class Properties:
        total_memory = 40 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    names = ["NVIDIA A100-SXM4-40GB", "NVIDIA Unheard Of"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: names[d if type(d) is int else d.index])
    monkeypatch.setattr("torchedge.api.board_name", lambda: None)
    assert torchedge.Predictor(torch.device("cuda")).device.name == "nvidia-a100"
    assert torchedge.Predictor("cuda:0").device.name == "nvidia-a100"
    assert torchedge.Predictor(torch.device("cpu")).device.name == "local-cpu"
    stand_in = torchedge.predict(NET, device="cuda:1", input_size=(3, 8, 8))
    assert stand_in.provenance.value == "assumed"
    assert any("NVIDIA Unheard Of (40,960 MiB) has no profile" in note for note in stand_in.notes)
    names[1] = "AMD Radeon"
    with pytest.raises(DeviceError, match="AMD Radeon has no profile; name a similar device"):
        torchedge.Predictor("cuda:1")
    with pytest.raises(InputError, match="device is an int; expected a name"):
        torchedge.predict(NET, device=3)


@pytest.mark.parametrize("word", ["bf16", "bfloat16", torch.bfloat16])
def test_autocast_is_named_as_people_do(word):
    named = torchedge.predict(NET, 4, DEVICE, input_size=(3, 8, 8), amp="bfloat16")
    assert torchedge.predict(NET, 4, DEVICE, input_size=(3, 8, 8), amp=word).latency == named.latency
    with pytest.raises(InputError, match="amp is 'bf61'; expected one of bfloat16, float16"):
        torchedge.predict(NET, 4, DEVICE, input_size=(3, 8, 8), amp="bf61")


def test_capture_takes_the_names_that_predict_takes(tmp_path):
    (tmp_path / "nets.py").write_text("from torch import nn\ndef small():\n    return nn.Linear(3, 2)\n")
    assert torchedge.capture(f"{tmp_path}/nets.py:small", input_size=(3,)).name == "nets:small"
    with pytest.raises(InputError, match="no_such_net"):
        torchedge.capture("no_such_net")


def test_limits_are_mib_or_texts_with_a_unit_everywhere(tmp_path):
    example = torch.zeros(1, 3, 8, 8)
    prediction = torchedge.predict(NET, 4, DEVICE, input_size=(3, 8, 8))
    assert prediction.max_batch_size("1G") == prediction.max_batch_size(1024)
    assert prediction.fits("4GiB") and not prediction.fits("64KiB")
    assert torchedge.plan(NET, example, device="local-cpu", memory_limit=300).memory_limit == 300 * 2**20
    nbytes, message = 8 * 2**30, "memory_limit is 8589934592 MiB, more than any device has; numbers are MiB"
    uses = [
        lambda: prediction.fits(nbytes),
        lambda: prediction.max_batch_size(nbytes),
        lambda: torchedge.advise(NET, 4, DEVICE, memory_limit=nbytes, input_size=(3, 8, 8)),
        lambda: torchedge.report(NET, 4, DEVICE, out=tmp_path / "p.html", memory_limit=nbytes),
        lambda: torchedge.plan(NET, example, device="local-cpu", memory_limit=nbytes),
        lambda: torchedge.export(NET, example, out=tmp_path / "b", device="local-cpu", memory_limit=nbytes),
    ]
    for use in uses:
        with pytest.raises(InputError, match=message):
            use()


def test_many_predictions_take_what_one_takes():
    predictor, example = torchedge.Predictor(DEVICE), torch.zeros(2, 3, 8, 8)

    def loss(outputs):
        return outputs.square().sum()

    settings = {"example": example, "loss": loss, "accumulation": 4, "amp": "bf16"}
    many = predictor.predict_many([NET], [2, 8], **settings)
    for column, batch in enumerate((2, 8)):
        one = predictor.predict(NET, batch, **settings)
        assert many.needed[0, column] == pytest.approx(one.needed.value)
        assert many.latency[0, column] == pytest.approx(one.latency.value)
    assert set(many.notes[0]) <= {*predictor.predict(NET, 2, **settings).notes}
    assert many.notes[0] and many.unsupported == ((),)
    with pytest.raises(InputError, match="loss is None; expected a function"):
        predictor.predict_many([NET], 2, example=example, loss=None)


X = torch.zeros(2, 3, 8, 8)
Y = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": lambda outputs: outputs.sum(), "targets": Y}, "takes outputs, and targets are 1; expected"),
        ({"loss": nn.MSELoss(), "targets": (Y, Y)}, "takes input, target, and targets are 2; expected"),
        ({"targets": (Y, Y)}, "targets are 2, and cross entropy takes one"),
        ({"loss": "model"}, "the loss is None"),
        ({"loss": nn.CrossEntropyLoss}, r"loss is the class CrossEntropyLoss; .*pass CrossEntropyLoss\(\)"),
        ({"step": "adam"}, "step is a str; expected a torchedge.TrainingStep"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of float32"),
        ({"checkpointing": True}, "Sequential has no switch for it"),
        ({"batch_dim": 9}, "batch_dim is 9, and no tensor of the example has more than 4 dimensions"),
        ({"example": torch.zeros(0, 3, 8, 8)}, r"empty, of shape \(0, 3, 8, 8\); expected a batch"),
    ],
)
def test_arguments_that_no_step_can_have_are_refused_by_name(arguments, message):
    arguments = {"example": X, **arguments}
    for function in (torchedge.predict, torchedge.simulate):
        with pytest.raises((InputError, CaptureError), match=message):
            function(NET, **arguments)


def scored(outputs, target):
    return nn.functional.cross_entropy(outputs, target)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": nn.CrossEntropyLoss()},
        {"loss": nn.CrossEntropyLoss(), "targets": Y},
        {"loss": scored, "targets": Y},
        {"loss": lambda outputs: scored(outputs, torch.zeros(len(outputs), dtype=torch.long))},
        {"targets": [Y]},
        {"step": torchedge.TrainingStep(loss=scored, targets=Y)},
        {"step": torchedge.TrainingStep(loss="model", accumulation=3), "loss": scored, "targets": Y,
         "accumulation": 1},
    ],
)  # fmt: skip
def test_a_loss_has_one_meaning_with_and_without_targets(options):
    wanted = torchedge.predict(NET, 64, DEVICE, example=X)
    found = torchedge.predict(NET, 64, DEVICE, example=X, **options)
    assert found.allocated.value == pytest.approx(wanted.allocated.value, rel=0.02)
    assert found.latency.value == pytest.approx(wanted.latency.value, rel=0.02)


def test_what_pytorchs_own_losses_compare_with_follows_from_the_outputs():
    value = {"loss": nn.MSELoss()}
    given = {"loss": nn.functional.mse_loss, "targets": torch.zeros(2, 5)}
    for function in (torchedge.predict, torchedge.simulate):
        one, other = (function(NET, 8, DEVICE, example=X, **options) for options in (value, given))
        assert type(one) is type(other)
    with pytest.raises(InputError, match="there are no targets"):  # a training step trains on none of them
        torchedge.Trainer(NET, X, loss=nn.MSELoss(), optimizer=torch.optim.SGD(NET.parameters()))


@pytest.mark.slow
def test_one_step_serves_predictions_training_and_export(tmp_path):
    net = copy.deepcopy(NET)
    step = torchedge.TrainingStep(
        optimizer=torch.optim.AdamW(net.parameters()), loss=scored, targets=Y, accumulation=2
    )
    flat = {"optimizer": step.optimizer, "loss": scored, "targets": Y, "accumulation": 2}
    predicted = torchedge.predict(net, 2, DEVICE, example=X, step=step)
    assert predicted.memory == torchedge.predict(net, 2, DEVICE, example=X, **flat).memory
    assert torchedge.simulate(net, 2, DEVICE, example=X, step=step).peak
    bundle = torchedge.export(net, X, "local-cpu", out=tmp_path / "b", mode="train", step=step, onnx=False)
    assert bundle.manifest.accumulation == 2
    with torchedge.Trainer(net, X, step=step) as trainer:
        assert trainer.step(X, Y) > 0 and trainer.steps == 0
    for option, message in (
        ({"amp": "bf16"}, "amp is 'bfloat16'; expected the default in Trainer"),
        ({"compile": True}, "compile is True; expected the default in Trainer"),
        ({"optimizer": "adam"}, "optimizer is 'adam'; expected one torch.optim.Optimizer"),
        ({"optimizer": [step.optimizer] * 2}, "a list of 2; expected one"),
    ):
        with pytest.raises(InputError, match=message):
            torchedge.Trainer(net, X, step=step, **option)


def test_a_data_type_and_checkpoints_are_put_on_a_copy():
    half = torchedge.predict(NET, 64, DEVICE, example=X, dtype="bf16")
    cast = torchedge.predict(copy.deepcopy(NET).bfloat16(), 64, DEVICE, example=X.bfloat16())
    assert half.memory == cast.memory and NET[0].weight.dtype == torch.float32
    with pytest.raises(InputError, match="convert the model before its optimizer is built"):
        torchedge.predict(NET, 4, example=X, dtype="bf16", optimizer=torch.optim.SGD(NET.parameters()))
    with pytest.raises(InputError, match="captured already; expected"):
        torchedge.predict(torchedge.capture(NET, X), 4, dtype="bf16")


def test_a_dtype_that_a_device_emulates_is_no_faster_than_float32():
    full = torchedge.predict("resnet18", 8, "jetson-tx2")
    emulated = torchedge.predict("resnet18", 8, "jetson-tx2", amp="bfloat16")
    assert emulated.latency.value >= full.latency.value
    note = "states no rate in bfloat16, which PyTorch emulates there or refuses: latency is that of float32"
    assert [note in n for n in emulated.notes].count(True) == 1 and "float16 is computed natively" in str(
        emulated
    )
    many = torchedge.Predictor("jetson-tx2").predict_many(["resnet18"], [8], amp="bf16")
    assert many.latency[0, 0] == emulated.latency.value and any(note in n for n in many.notes[0])
    for device, amp in (("jetson-tx2", "float16"), ("nvidia-h200", "bfloat16")):
        half = torchedge.predict("resnet18", 256, device, amp=amp)
        assert half.latency.value < torchedge.predict("resnet18", 256, device).latency.value
        assert not any("states no rate" in n for n in half.notes)
    pure = torchedge.predict("resnet18", 8, "nvidia-t4", dtype="bf16")
    assert any("nvidia-t4 states no rate in bfloat16" in n for n in pure.notes)
    assert torchedge.find_device("jetson-tx2").native_dtypes == {"float32", "float16"}


def test_a_cpu_has_resident_memory_and_no_allocator_that_reserves(tmp_path):
    prediction = torchedge.predict(NET, 4, "local-cpu", example=X)
    assert "reserved" not in str(prediction)
    assert {meaning for _, _, meaning in prediction.figures} >= {"resident memory of the process"}
    assert "reserved" in str(torchedge.predict(NET, 4, DEVICE, example=X))
    torchedge.report(NET, 4, "local-cpu", out=tmp_path / "p.html", example=X)
    page = (tmp_path / "p.html").read_text()
    assert "resident memory of the process" in page and "allocator" not in page


@pytest.mark.slow
@pytest.mark.parametrize("compile", [torch.compile, lambda net: nn.Sequential(torch.compile(net)), None])
def test_a_compiled_model_is_marked(compile):
    option = {"compile": True} if compile is None else {}
    net = NET if compile is None else compile(NET)
    prediction = torchedge.predict(net, 4, "local-cpu", example=X, **option)
    assert prediction.unsupported == ("torch.compile",)
    assert "that of the same step in eager PyTorch" in str(prediction)
    assert torchedge.simulate(net, 4, example=X, **option).unsupported == ("torch.compile",)


@pytest.mark.parametrize("device", ["nvidia-h200", "jetson-tx2"])
def test_intervals_of_a_compiled_step_of_unknown_graphs_are_as_wide_as_measured(device, monkeypatch):
    def untraced(*args, **kwargs):
        raise torchedge.CaptureError("no single graph")

    monkeypatch.setattr("torchedge.tracing.partitions.partition", untraced)
    eager, compiled = (torchedge.predict(NET, 4, device, example=X, compile=how) for how in (False, True))
    ratios = {"allocated": (0.72, 1.4), "reserved": (0.75, 1.33), "latency": (0.37, 1.78)}
    for name, (least, most) in ratios.items():
        before, after = getattr(eager, name), getattr(compiled, name)
        assert after.value == pytest.approx(before.value * (0.81 if name == "latency" else 1))
        assert after.low <= least * before.value and most * before.value <= after.high
        assert after.low <= before.low and before.high <= after.high
    between = (eager.needed_mib() + compiled.needed_mib()) / 2
    assert eager.fits(between) and not compiled.fits(between)


def test_a_step_without_a_gradient_is_predicted_forward_alone_with_a_note():
    frozen = copy.deepcopy(NET).requires_grad_(False)
    for model, loss in ((frozen, "default"), (NET, lambda outputs: outputs.detach().sum())):
        notes = torchedge.predict(model, 2, example=X, loss=loss).notes
        assert any("no gradient reaches a parameter" in note for note in notes)
    assert not any("no gradient" in note for note in torchedge.predict(NET, 2, example=X).notes)


class Applied(nn.Module):
    """A layer and a function of it and the input."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64), function

    def forward(self, x):
        return self.function(self.layer, x)


@dataclass
class Result:
    scores: torch.Tensor
    hidden: torch.Tensor | None = None


ROWS = torch.zeros(4, 64)


def note(model, example=ROWS, **arguments):
    return " ".join(torchedge.predict(model, 4, "nvidia-h200", example=example, **arguments).notes)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.AdamW])
def test_steps_without_a_gradient_are_predicted_where_workspaces_are_measured(optimizer):
    model = Applied(lambda layer, x: layer(x).detach())
    chosen = optimizer if isinstance(optimizer, str) else optimizer(model.parameters())
    assert "no gradient reaches a parameter" in note(model, optimizer=chosen)


def test_what_a_run_would_refuse_or_a_figure_leaves_out_is_noted():
    linear = nn.Linear(64, 64)
    assert "linear reads float32 and float64" in note(linear, ROWS.double())
    assert "most weights are float64" in note(nn.Linear(64, 64).double(), ROWS.double())
    tokens = torch.zeros(4, 7, dtype=torch.long)
    assert "sparse embeddings" in note(nn.Embedding(9, 64, sparse=True), tokens)
    assert "sparse" not in note(nn.Embedding(9, 64), tokens) + note(linear) and "reads" not in note(linear)


def test_results_in_a_dataclass_are_outputs():
    model = Applied(lambda layer, x: Result(layer(x)))
    plain = Applied(lambda layer, x: layer(x))
    both = [torchedge.predict(m, 4, example=ROWS).allocated for m in (model, plain)]
    assert both[0] == both[1]


def test_a_reason_that_both_ways_of_capture_give_is_given_once():
    with pytest.raises(CaptureError) as caught:
        torchedge.capture(Applied(lambda layer, x: layer(x).argmax(1)), ROWS)
    assert str(caught.value).count("the loss is None") == 1


def test_function_transforms_leave_no_level_behind():
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    for function in (
        lambda layer, x: torch.vmap(lambda row: row * 2)(layer(x)),
        lambda layer, x: torch.func.grad(lambda y: (y @ layer.weight).sum())(x),
    ):
        with contextlib.suppress(CaptureError):
            torchedge.predict(Applied(function), 4, example=ROWS)
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == depth


@pytest.mark.slow
def test_sizes_beyond_what_can_be_counted_are_refused():
    square = Applied(lambda layer, x: layer(x) @ layer(x).T)
    with pytest.raises(InputError, match="handles more than 2 EiB"):
        torchedge.predict(square, 2**31 - 1, example=ROWS)
    prediction = torchedge.predict(square, 4, example=ROWS)
    assert 2**20 < prediction.max_batch_size("1024TiB", largest=2**31 - 1) < 2**31 - 1
    with pytest.raises(InputError, match="expected a whole number from 1 to 2147483647"):
        prediction.max_batch_size(largest=2**40)
    with pytest.raises(InputError, match="elements; expected at most"):
        torchedge.predict(nn.Linear(64, 64), input_size=(2**62, 2**62, 64))
    mistaken = Applied(lambda layer, x: layer(x) @ torch.zeros(64, 10**9, device="meta"))
    with pytest.raises(CaptureError, match="stands for the batch"):
        torchedge.predict(mistaken, 4, example=ROWS, mode="infer")


def test_a_large_parameter_is_no_batch():
    with torch.device("meta"):
        model = nn.Embedding(1_000_000_006, 4)
    prediction = torchedge.predict(model, 4, example=torch.zeros(4, 1, dtype=torch.long), mode="infer")
    assert prediction.allocated.value == pytest.approx(16 * 1_000_000_006 / 2**20, rel=0.01)


@pytest.mark.parametrize("path", [None, 5, b"x", ""])
def test_what_is_no_path_is_refused_by_name(path):
    for function in (
        torchedge.load_bundle,
        lambda out: torchedge.export(NET, X, out=out, device="local-cpu"),
    ):
        with pytest.raises(InputError, match="expected a path"):
            function(path)
    with pytest.raises(InputError, match="File name too long; expected a path"):
        torchedge.load_bundle("a" * 5000)
    if path:
        with pytest.raises(InputError, match=r"device is .*; expected a path"):
            torchedge.find_device(path)


def test_numbers_of_numpy_are_numbers():
    prediction = torchedge.predict(NET, 2, example=X)
    assert prediction.fits(np.float32(4000)) == prediction.fits(np.int64(4000)) == prediction.fits(4000)


def test_an_export_whose_model_fails_on_the_example_says_so(tmp_path):
    with pytest.raises(CaptureError, match="raised RuntimeError on the example"):
        torchedge.export(copy.deepcopy(NET).double(), X, out=tmp_path / "b", device="local-cpu")
