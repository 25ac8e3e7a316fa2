"""Steps of users' own code: captured up to the first update, predicted as the same step by hand."""

import json
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import torchedge
from torchedge import cli
from torchedge.devices import find_device

DEVICE = "nvidia-h200"
SCRIPT = """
import argparse
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--accumulation", type=int, default=1)
    options = parser.parse_args()
    device = torch.device("cuda")
    first = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()]
    net = nn.Sequential(*first, nn.Flatten(), nn.Linear(28800, 10)).cuda()
    data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=options.amp)
    total = 0.0
    for number, (x, y) in enumerate(DataLoader(data, batch_size=options.batch, pin_memory=True)):
        x, y = x.to(device, non_blocking=True), y.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=options.amp):
            out = net(x)
            loss = functional.cross_entropy(out, y) / options.accumulation
        scaler.scale(loss).backward()
        total += loss.item()
        if (number + 1) % options.accumulation == 0:
            scaler.unscale_(adam)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(adam)
            raise AssertionError("an update ran")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(28800, 10)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "batch", "settings"),
    [
        ([], 16, {}),
        (["--batch", "8", "--amp"], 8, {"amp": "bfloat16"}),
        (["--batch", "4", "--accumulation", "3"], 4, {"accumulation": 3}),
    ],
)
def test_a_script_is_predicted_as_its_step_by_hand(script, capsys, arguments, batch, settings):
    host = ["--operator-us", "4"]  # a fast one, on which the device sets more of the pace
    assert cli.main(["predict", script, "-d", DEVICE, *host, "--json", "--", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_size"], found["optimizer"]) == (batch, "adamw")
    assert found["accumulation"] == settings.get("accumulation", 1)
    model = net()
    adam = torch.optim.AdamW(model.parameters())
    device = find_device(DEVICE).on_host(4)
    expected = torchedge.predict(model, batch, device, input_size=(3, 32, 32), optimizer=adam, **settings)
    assert found["allocated"]["value"] == pytest.approx(expected.allocated.value, rel=0.03)
    clipping = 0.45 if "accumulation" not in settings else 0.15  # of a step of few operators
    assert -0.15 < found["latency"]["value"] / expected.latency.value - 1 < clipping


def test_nothing_is_trained_and_everything_is_put_back():
    model, before = net(), (nn.Module.__call__, torch.compile, torch.load, DataLoader.__iter__)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = next(iter(DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.zeros(8).long()), 4)))
    with torchedge.watch(device=DEVICE) as step:
        functional.cross_entropy(model(x.cuda()), y.to("cuda:0")).backward()
        sgd.step()
        raise AssertionError("the block goes on")
    assert step.prediction.batch_size == 4 and step.prediction.fits()
    assert step.predict("jetson-tx2").device == "jetson-tx2"
    assert before == (nn.Module.__call__, torch.compile, torch.load, DataLoader.__iter__)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not sgd.state
    functional.cross_entropy(model(x), y).backward()  # a real step runs as ever
    sgd.step()
    with pytest.raises(ZeroDivisionError), torchedge.watch(device=DEVICE):
        model(x)
        raise ZeroDivisionError
    assert before == (nn.Module.__call__, torch.compile, torch.load, DataLoader.__iter__)
    assert type(model(x)) is torch.Tensor


def test_what_lies_beside_the_step_does_not_matter():
    """A lazy layer of other code, modules that move to a format alone, a model that is tried first."""
    others = nn.LazyLinear(3), nn.Conv2d(3, 4, 3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with torchedge.watch(DEVICE) as step:
        others[1].to(memory_format=torch.channels_last)
        assert net(torch.zeros(1, 3, 8, 8)).shape[1] == 144
        net(torch.zeros(32, 3, 8, 8)).sum().backward()
        optimizer.step()
    assert step.batch_size == 32
    (note,) = [note for note in step.graph.notes if "left out" in note]
    assert note == "calls of modules whose results nothing reads are left out (Sequential)"


def test_several_devices_are_named():
    with torchedge.watch(DEVICE) as step:
        net = nn.Sequential(nn.Linear(4, 4).to("cuda"), nn.Linear(4, 2).to(torch.device("cuda", 1)))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(torch.zeros(8, 4, device="cuda:0")).sum().backward()
        optimizer.step()
    expected = "the code names several devices (cuda:0, cuda:1): all is predicted as on one"
    assert expected in step.graph.notes


@pytest.mark.parametrize("through", [lambda p: p, lambda p: p.data])
def test_an_update_by_hand_ends_the_step(through):
    net, passes = nn.Linear(4, 2), 0
    with torchedge.watch(DEVICE) as step, torch.no_grad():
        for _ in range(100):
            with torch.enable_grad():
                net(torch.zeros(32, 4)).sum().backward()
            passes += 1
            for p in net.parameters():
                through(p).sub_(0.1 * p.grad)
    assert passes == 1 and step.settings.accumulation == 1
    assert "no optimizer stepped: the update is not counted" in step.graph.notes


def test_a_block_without_a_step_is_refused():
    with pytest.raises(torchedge.CaptureError, match="calls no module that learns"), torchedge.watch(DEVICE):
        torch.zeros(3)


def test_backward_passes_that_differ_are_added():
    g, d = nn.Linear(16, 64), nn.Linear(64, 1)
    adam = torch.optim.Adam(d.parameters())
    loss = nn.BCEWithLogitsLoss()
    with torchedge.watch(device=DEVICE) as step:
        loss(d(torch.randn(8, 64)), torch.ones(8, 1)).backward()
        loss(d(g(torch.randn(8, 16)).detach()), torch.zeros(8, 1)).backward()
        adam.step()
    assert step.graph.is_whole_step
    assert any("2 backward passes" in note for note in step.prediction.notes)


STOPS = {
    "no finite loss": lambda output, loss: not torch.isfinite(loss),
    "an output that is not a number": lambda output, loss: torch.isnan(output).any(),
    "no finite output": lambda output, loss: not torch.isfinite(output).all(),
    "inverted": lambda output, loss: ~torch.isfinite(loss),
    "a large loss": lambda output, loss: loss > 1e4,
    "no finite number": lambda output, loss: not math.isfinite(loss.item()),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("condition", STOPS)
def test_a_loop_that_stops_at_a_loss_without_a_value_does_not_stop(condition):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchedge.watch(DEVICE) as step:
        for _ in range(3):
            output = model(torch.randn(16, 8))
            loss = output.square().mean()
            if STOPS[condition](output, loss):
                break
            loss.backward()
            optimizer.step()
    assert step.batch_size == 16


def test_a_fault_in_a_module_names_the_script_too(tmp_path, capsys):
    (tmp_path / "parts.py").write_text("def fail():\n    raise ValueError('no data')\n")
    (tmp_path / "train.py").write_text("import parts\n\nparts.fail()\n")
    assert cli.main(["predict", str(tmp_path / "train.py"), "-d", DEVICE]) == 2
    assert "train.py:3, parts.py:2: ValueError: no data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n\nraise ValueError('no data')\n", "train.py:3: ValueError: no data"),
        ("import sys\nsys.exit(2)\n", "before its first optimizer.step\\(\\)"),
        ("x = 1\n", "calls no module that learns"),
        ("def broken(:\n", "train.py:1: SyntaxError"),
    ],
)
def test_faults_of_a_script_are_one_line(tmp_path, capsys, text, message):
    (tmp_path / "train.py").write_text(text)
    assert cli.main(["predict", str(tmp_path / "train.py"), "-d", DEVICE]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert re.search(message, error)


def test_what_a_script_decides_is_no_option(script, capsys):
    assert cli.main(["predict", script, "-b", "8"]) == 2
    assert "--batch-size is given with the script" in capsys.readouterr().err
