"""Workspaces of a device's convolution library in the simulation, and as a file of its profile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchedge.devices import find_device, write_device
from torchedge.errors import ProfileError
from torchedge.forests.trees import write_forests
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.simulation import simulate
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.workspaces import (
    FILE,
    NAMES,
    PHASES,
    SUM,
    TABLE,
    WORKSPACE_FEATURES,
    WorkspaceModel,
    load_workspaces,
    sum_bytes,
    sum_geometry,
    tensor_bytes,
    workspace_features,
    write_workspaces,
)
from torchedge.prediction.predictor import device_settings
from torchedge.storage import file_sha256, read_toml
from torchedge.tracing.capturing import capture

pytest.importorskip("sklearn")
MIB = 2**20
PLAIN = StepSettings(optimizer="none")


def forest(ratio, names=WORKSPACE_FEATURES):
    from torchedge.profiling.forest_fitting import fit_forest

    rows = np.random.default_rng(0).random((30, len(names)))
    return fit_forest(rows, np.full(30, ratio), feature_names=names, trees=1)


def model(**ratios):
    """Workspaces of so many times a convolution's tensors, by phase."""
    return WorkspaceModel({phase: forest(ratio) for phase, ratio in ratios.items()})


def rounded(count):
    """Bytes of float32 numbers as the allocator hands them out."""
    return -(-4 * count // 512) * 512


def taken_by(tape, *, sums=False):
    """The workspaces of a tape's convolutions, or of its sums, in order."""
    return [NAMES[n] for n in tape.scratch.names if (NAMES[n] == SUM) == sums]


def one_convolution(mode):
    module = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten())
    return capture(module, input_size=(3, 16, 16), mode=mode)


def network(groups=1):
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, groups=groups), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return capture(module, input_size=(3, 32, 32))


NETWORK = network()
ONE = model(forward=1.0, backward_x=1.0, backward_w=1.0)


def peak(graph, batch, settings):
    return int(write_tape(graph, settings).peak_bytes(np.array([batch]))[0])


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_peak_of_one_convolution_is_its_tensors_and_the_workspace(batch):
    x, w, y = batch * 3 * 16 * 16, 8 * 3 * 3 * 3, batch * 8 * 14 * 14
    under = replace(PLAIN, workspaces=model(forward=1.0))
    tensors = rounded(x) + rounded(w) + rounded(y)
    assert peak(one_convolution("infer"), batch, under) == tensors + rounded(x + w + y)
    assert peak(one_convolution("infer"), batch, PLAIN) == tensors


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_workspace_of_the_weight_gradient_comes_while_it_is_computed(batch):
    x, w, y = batch * 3 * 16 * 16, 8 * 3 * 3 * 3, batch * 8 * 14 * 14
    found = [
        peak(one_convolution("train"), batch, replace(PLAIN, workspaces=model(backward_w=ratio)))
        for ratio in (10.0, 20.0)
    ]
    assert found[1] - found[0] == rounded(20 * (x + w + y)) - rounded(10 * (x + w + y))
    tensors = (
        rounded(x) + 2 * rounded(w) + rounded(y)
    )  # the input, weights with gradient, the output's gradient
    scalars = found[0] - tensors - rounded(10 * (x + w + y))
    assert 0 < scalars <= 2048  # targets, the loss and its gradient


def test_phases_are_those_that_run():
    first = write_tape(one_convolution("train"), replace(PLAIN, workspaces=ONE))
    assert taken_by(first) == ["forward", "backward_w"]  # images need no gradient
    both = write_tape(NETWORK, replace(PLAIN, workspaces=ONE))
    phases = taken_by(both)
    assert phases[:2] == ["forward", "forward"] and sorted(phases[2:]) == ["backward_w"] * 2 + ["backward_x"]


@given(
    st.integers(1, 300), st.sampled_from(["none", "sgd-momentum", "adam"]), st.sampled_from([0.1, 1.0, 3.0])
)
@examples(max_examples=25)
def test_workspaces_never_lower_the_peak(batch, optimizer, ratio):
    plain = StepSettings(optimizer=optimizer)
    under = replace(plain, workspaces=model(forward=ratio, backward_x=ratio, backward_w=ratio))
    assert peak(NETWORK, batch, under) >= peak(NETWORK, batch, plain)
    assert peak(NETWORK, batch, replace(plain, workspaces=WorkspaceModel({}))) == peak(NETWORK, batch, plain)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
@examples(max_examples=15)
def test_many_batch_sizes_at_once_equal_one_by_one(batches):
    tape = write_tape(NETWORK, replace(PLAIN, workspaces=ONE))
    together = tape.peak_bytes(np.array(batches)).tolist()
    assert together == [peak(NETWORK, batch, replace(PLAIN, workspaces=ONE)) for batch in batches]


def test_the_profile_of_a_step_names_the_workspace():
    profile = simulate(NETWORK, 64, replace(PLAIN, workspaces=model(backward_x=50.0)))
    assert profile.breakdown["workspace"] > 0.5 * profile.live_mib
    assert "workspace of" in profile.largest[0][0] and "(backward_x)" in profile.largest[0][0]
    assert profile.live_mib <= profile.allocated_mib <= profile.reserved_mib


def test_depthwise_convolutions_take_none():
    tape = write_tape(network(groups=32), replace(PLAIN, workspaces=ONE))
    assert taken_by(tape) == ["forward", "backward_w"]  # of the first, dense one
    grouped = write_tape(network(groups=2), replace(PLAIN, workspaces=ONE))
    assert len(taken_by(grouped)) == 5


def kinds_taken(module, example, settings=PLAIN):
    tape = write_tape(capture(module, example=example), replace(settings, workspaces=ONE))
    return {name[: -len(next(p for p in PHASES if name.endswith(p)))] for name in taken_by(tape)}


def test_kinds_are_those_that_run():
    image, line = torch.zeros(2, 8, 16, 16), torch.zeros(2, 8, 64)
    assert kinds_taken(nn.Conv2d(8, 4, 3), image) == {""}
    assert kinds_taken(nn.Conv2d(8, 4, 3), image, replace(PLAIN, amp="bfloat16")) == {"half-"}
    assert kinds_taken(nn.Conv2d(8, 4, 3).bfloat16(), image.bfloat16()) == {"half-"}
    last = nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)
    assert kinds_taken(last, image) == {"last-"}
    assert kinds_taken(last, image, replace(PLAIN, amp="float16")) == {"half-last-"}
    assert kinds_taken(nn.Conv1d(8, 4, 3), line) == {"line-"}
    assert kinds_taken(nn.Conv1d(8, 4, 3).half(), line.half()) == {"half-line-"}


def test_depthwise_convolutions_in_channels_last_are_the_librarys():
    module = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8))
    image, taken = torch.zeros(2, 8, 16, 16), {}
    for layout in (torch.contiguous_format, torch.channels_last):
        tape = write_tape(
            capture(module.to(memory_format=layout), example=image), replace(PLAIN, workspaces=ONE)
        )
        taken[layout] = taken_by(tape)
        assert len(taken_by(tape, sums=True)) == 2 * (layout == torch.channels_last)
    assert taken[torch.contiguous_format] == ["forward", "backward_w"]
    assert taken[torch.channels_last] == [f"last-{PHASES[phase]}" for phase in (0, 0, 1, 2, 2)]


def test_sums_take_what_an_h200_was_seen_to_take():
    """Biases of depthwise convolutions in channels_last (PyTorch 2.11): 98, 50, 30.63 and 24.5 MiB."""
    measured = {(100352, 128): 98.0, (25088, 256): 49.0, (6272, 640): 30.625, (25088, 128): 24.5}
    for (rows, columns), mib in measured.items():
        assert sum_bytes(rows, columns, 132) == mib * MIB
    assert sum_bytes(100352, 128, 0) == sum_bytes(64, 4096, 132) == sum_bytes(300, 2**22, 132) == 0


@pytest.mark.parametrize(
    ("part", "whole", "fastest", "expected"),
    [
        ((8,), (5, 7, 8), -1, (35, 8)),
        ((1, 7, 8), (5, 7, 8), -1, (5, 56)),
        ((5, 1, 8), (5, 7, 8), -1, (7, 40)),
        ((8, 1, 1), (5, 8, 3, 4), 1, (60, 8)),
        ((5, 8, 1, 1), (5, 8, 3, 4), 1, (12, 40)),
        ((5, 8, 1, 1), (5, 8, 3, 4), -1, None),
        ((5, 7, 8), (5, 7, 8), -1, None),
        ((4, 8), (2, 5, 8), -1, None),
        ((), (5, 7), -1, None),
        ((), (), -1, None),
    ],
)
def test_rows_and_columns_of_a_sum(part, whole, fastest, expected):
    geometry = sum_geometry(part, whole, fastest)
    assert (geometry and geometry[:2]) == expected


def test_sums_of_rows_are_those_that_run():
    tokens = torch.zeros(2, 5, 8)
    for module, count in ((nn.Linear(8, 4), 1), (nn.Linear(8, 4, bias=False), 0)):
        tape = write_tape(capture(module, example=tokens), replace(PLAIN, workspaces=ONE))
        assert len([] if tape.scratch is None else taken_by(tape, sums=True)) == count
    under = replace(PLAIN, workspaces=WorkspaceModel({}, units=132))
    graph = capture(nn.Linear(8, 128), example=torch.zeros(2, 8))
    for rows in (64, 100352):
        tape = write_tape(graph, under)
        assert sum_bytes(rows, 128, 132) in tape.bytes_at(np.array([rows]))[tape.scratch.storages, 0]
    assert peak(graph, 100352, under) > peak(graph, 100352, PLAIN)


class Doubled(nn.Module):
    """A layer on twice its input, which autograd keeps for the layer alone."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(128, 128), reentrant

    def doubled(self, x):
        return self.layer(x * 2)

    def forward(self, x):
        x = x + self.layer.bias
        if self.reentrant is None:
            return self.doubled(x)
        return checkpoint(self.doubled, x, use_reentrant=self.reentrant)


def test_a_sum_behind_a_checkpoint_runs_without_what_the_call_read():
    """An H200's ViT-B/16: 1,448.3 MiB at batch 32 with checkpoints, 1,483 if it were held, 1,446 without."""
    for reentrant in (None, True, False):
        graph = capture(Doubled(reentrant), example=torch.zeros(2, 128))
        tape = write_tape(graph, replace(PLAIN, workspaces=WorkspaceModel({}, units=132)))
        events = [("free " * (e < 0) + tape.labels[abs(e) - 1]).split(" [")[0] for e in tape.events.tolist()]
        product = next(label for label in events if label.startswith("free mul"))
        freed = len(events) - 1 - events[::-1].index(product)
        assert (freed < events.index("partial sums of layer")) == (reentrant is False)


def test_kinds_that_were_not_measured_take_none():
    half = replace(PLAIN, amp="bfloat16")
    assert peak(NETWORK, 64, replace(half, workspaces=ONE)) == peak(NETWORK, 64, half)
    taken = replace(half, workspaces=model(**{"half-backward_w": 1.0}))
    assert peak(NETWORK, 64, taken) > peak(NETWORK, 64, half)


def test_ratios_of_next_to_nothing_and_below_are_none():
    geometry = np.array([[8.0, 16, 32, 1, 9, 1, 2, 256, 256]])
    assert tensor_bytes(geometry)[0] == 4 * (8 * 16 * 256 + 8 * 32 * 256 + 32 * 16 * 9)
    assert workspace_features(geometry).shape == (1, len(WORKSPACE_FEATURES))
    for ratio, expected in ((-1.0, 0), (0.01, 0), (0.5, int(tensor_bytes(geometry)[0] / 2))):
        assert model(forward=ratio).bytes_of("forward", geometry).tolist() == [expected]
    assert model(forward=1.0).bytes_of("backward_x", geometry).tolist() == [0]
    assert ONE.bytes_of("forward", np.empty((0, 9))).tolist() == []


# as a file --------------------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path):
    """Write a profile's folder with workspaces, perhaps other forests than those, and return its device."""

    def make(forests=None):
        folder = tmp_path / "made-up"
        folder.mkdir(exist_ok=True)
        written = write_workspaces(folder, ONE)
        if forests is not None:
            write_forests(folder / FILE, forests)
            written = file_sha256(folder / FILE, max_bytes=MIB)
        document = dict(read_toml(find_device("rtx-2080ti").folder / "device.toml"))
        tables = {TABLE: {"provenance": "measured", "sha256": written}}
        write_device({**document, "name": "made-up", "aliases": [], "profile": tables}, folder)
        return find_device(folder)

    return make


def test_a_profile_gives_back_what_was_written(device):
    geometry = np.random.default_rng(1).integers(1, 200, (20, 9)).astype(float)
    found = device_settings(device(), None).workspaces
    for phase in PHASES:
        assert found.bytes_of(phase, geometry).tolist() == ONE.bytes_of(phase, geometry).tolist()


def test_given_workspaces_stand_before_the_profiles(device):
    other = WorkspaceModel({})
    assert device_settings(device(), replace(PLAIN, workspaces=other)).workspaces is other


def test_a_device_without_measurements_has_sums_alone_where_it_is_a_card_of_nvidia():
    model = load_workspaces(find_device("rtx-2080ti"))
    assert model is not None and (model.forests, model.units, model.resident) == ({}, 68, 1024)
    for name in ("jetson-tx2", "adreno-740", "local-cpu"):
        assert load_workspaces(find_device(name)) is None


def test_a_damaged_file_is_refused(device):
    made = device()
    path = made.folder / FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=r"its sha256 differs.*rebuild the profile with `torchedge fit`"):
        load_workspaces(made)


@pytest.mark.parametrize(
    ("forests", "said"),
    [
        ({"forward": forest(1.0)}, "expected backward_x too"),
        (dict.fromkeys(PHASES, forest(1.0, WORKSPACE_FEATURES[::-1])), "forest forward"),
        (dict.fromkeys(PHASES, forest(1.0, WORKSPACE_FEATURES[:-1])), "forest forward"),
    ],
    ids=["a phase missing", "other order", "fewer features"],
)
def test_forests_made_for_something_else_are_refused(device, forests, said):
    with pytest.raises(ProfileError, match=said):
        load_workspaces(device(forests))


class Tokens(nn.Module):
    """Reads tokens as an image, as they lie or copied, with a convolution."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied, self.conv = copied, nn.Conv2d(64, 128, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.transpose(1, 2).view(-1, 64, 28, 28)
        return self.conv(image.contiguous() if self.copied else image)


def test_tokens_read_as_an_image_take_the_workspace_of_channels_last():
    last = nn.Conv2d(64, 128, 3, padding=1).to(memory_format=torch.channels_last)
    tokens, copied = (workspaces_of(capture(Tokens(c), torch.zeros(2, 784, 64))) for c in (False, True))
    plain = nn.Conv2d(64, 128, 3, padding=1)
    assert tokens == workspaces_of(capture(last, input_size=(64, 28, 28)))
    assert copied == workspaces_of(capture(plain, input_size=(64, 28, 28)))
    assert tokens != copied


def workspaces_of(graph):
    """Return the bytes of a step's workspaces at a batch size of 16."""
    tape = write_tape(graph, device_settings(find_device("nvidia-h200"), None))
    return tape.scratch.bytes_at([16]).ravel().tolist()
