"""What stands for a GPU or board without a profile: judged by published figures, and named in a note."""

import copy
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchedge
from torchedge.devices import Provenance, find_device, match_device, stand_in
from torchedge.devices.stand_ins import _CARDS

NET = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))


@pytest.mark.parametrize(
    ("reported", "memory", "nearest", "bandwidth"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, "rtx-3090", 360),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384, "rtx-3090", 512),
        ("NVIDIA GeForce RTX 4070 SUPER", 12282, "rtx-4080", 504),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-4090", 1792),
        ("GeForce GTX 1080 Ti", 11178, "rtx-2080ti", 484),
        ("Quadro RTX 6000", 24220, "nvidia-t4", 672),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "nvidia-l40s", 960),
        ("NVIDIA RTX A6000", 49140, "nvidia-a10", 768),
        ("Tesla V100-SXM2-32GB", 32510, "nvidia-v100", 900),
        ("Tesla P100-PCIE-16GB", 16280, "nvidia-v100", 732),
        ("NVIDIA A10G", 23028, "nvidia-a10", 600),
        ("NVIDIA A30", 24169, "nvidia-a100", 933),
        ("NVIDIA H100 NVL", 95830, "nvidia-h100", 3938),
        ("NVIDIA B200", 183359, "nvidia-h200", 7700),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 81559, "nvidia-h100", 3352),
        ("NVIDIA Jetson AGX Xavier Developer Kit", 31918, "jetson-xavier-nx", 136.5),
        ("NVIDIA Jetson AGX Thor Developer Kit", 125772, "jetson-agx-orin", 273),
        ("NVIDIA Jetson TX1", 3964, "jetson-nano", 25.6),
    ],
)
def test_the_nearest_profile_has_the_card_s_memory_and_published_rates(reported, memory, nearest, bandwidth):
    device = stand_in(reported, memory)
    assert device.folder.name == nearest
    assert device.value("memory_mib") == memory
    assert device.value("bandwidth_gb_s") == pytest.approx(bandwidth)
    assert device.value("usable_memory_mib") < memory
    prediction = torchedge.predict(NET, 4, device, input_size=(3, 8, 8))
    assert prediction.provenance is Provenance.ASSUMED
    assert nearest in prediction.notes[0] or any(nearest in note for note in prediction.notes)
    assert any("estimate" in note and reported in note for note in prediction.notes)
    assert prediction.device_memory_mib <= memory
    assert copy.deepcopy(device) == device


def test_a_faster_card_of_a_generation_is_predicted_to_be_faster():
    net = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(8)])
    times = [
        torchedge.predict(
            net, 64, stand_in(f"NVIDIA GeForce RTX {name}", 12288), input_size=(64, 56, 56)
        ).latency.value
        for name in ("3050", "3060", "3070", "3080", "3090 Ti")
    ]
    assert times == sorted(times, reverse=True)


def test_published_names_stand_for_a_profile():
    for card in _CARDS[::9]:
        device = stand_in(
            f"NVIDIA {'Jetson ' * card.generation.startswith('jetson')}{' '.join(card.words)}", 8192.0
        )
        assert device is not None and device.value("memory_mib") == 8192
        old = card.generation in ("kepler", "maxwell", "pascal")
        assert not (old and "peak_fp16_matrix_gflops" in device.figures)


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [((7, 5), {"nvidia-t4"}), ((8, 6), {"nvidia-a10"}), ((9, 0), {"nvidia-h100", "nvidia-h100-pcie"})],
)
def test_the_generation_of_an_unknown_name_follows_from_its_capability(capability, nearest):
    device = stand_in("NVIDIA Graphics Device", 24000.0, capability)
    assert device.folder.name in nearest or match_device("NVIDIA Graphics Device") is not None


@pytest.mark.parametrize("name", ["AMD Radeon RX 7900", "llvmpipe", "", "Intel(R) Arc(TM)"])
def test_other_vendors_have_no_stand_in(name):
    assert stand_in(name, 8192.0) is None


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device that PyTorch reports; none at first, and no board."""
    state = SimpleNamespace(name=None, memory=12288, board=None)
    monkeypatch.delenv("TORCHEDGE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: state.name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: state.name)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index=0: SimpleNamespace(total_memory=state.memory * 2**20, major=8, minor=6),
    )
    monkeypatch.setattr("torchedge.api.board_name", lambda: state.board)
    return state


def test_the_default_is_the_gpu_then_the_jetson_then_the_processor(gpu):
    assert torchedge.Predictor().device.name == "local-cpu"
    gpu.name = "NVIDIA GeForce RTX 3060"
    assert torchedge.Predictor().device.folder.name == "rtx-3090"
    gpu.name, gpu.memory = "NVIDIA GeForce RTX 3090", 24576
    prediction = torchedge.predict(NET, 4, input_size=(3, 8, 8))
    assert prediction.device == "rtx-3090"
    assert not any("stands for" in note for note in prediction.notes)
    gpu.name, gpu.board = None, "NVIDIA Jetson AGX Xavier Developer Kit"
    assert torchedge.Predictor().device.folder.name == "jetson-xavier-nx"
    gpu.board = "NVIDIA Jetson TX2 Developer Kit"
    assert torchedge.Predictor().device.name == "jetson-tx2"
    gpu.board = "Some Board Rev 1.0"
    assert torchedge.Predictor().device.name == "local-cpu"


def test_a_card_in_a_board_that_is_no_jetson_is_the_card(gpu):
    gpu.name, gpu.memory, gpu.board = "NVIDIA L4", 23034, "Some Arm Server"
    assert torchedge.Predictor().device.name == "nvidia-l4"


def test_a_named_device_is_never_replaced(gpu):
    gpu.name = "NVIDIA GeForce RTX 3060"
    for name in ("jetson-tx2", "local-cpu", "rtx-4090"):
        assert torchedge.Predictor(name).device == find_device(name)
    with pytest.raises(torchedge.DeviceError, match="unknown"):
        torchedge.Predictor("rtx-3060-super-duper")


def test_a_search_takes_a_stand_in_to_its_workers():
    device = stand_in("NVIDIA GeForce RTX 3060", 12288.0)
    again = ForkingPickler.loads(ForkingPickler.dumps(device))  # as to a worker
    one, two = (torchedge.predict(NET, 4, d, input_size=(3, 8, 8)) for d in (device, again))
    assert again == device and one.to_dict() == two.to_dict()
