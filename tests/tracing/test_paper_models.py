"""The models of FlashMem's evaluation: found by name, of the right size, captured with what they are fed."""

import sys
from math import prod

import pytest
import torch
from oracles.children import python

from torchedge.errors import InputError, MissingExtraError
from torchedge.tracing.capturing import capture
from torchedge.tracing.paper_models import PAPER_MODELS, build_paper_model
from torchedge.tracing.sources import load_model

PACKAGES = {
    "resnet-50": "torchvision",
    "vit": "vit_pytorch",
    "deepvit": "vit_pytorch",
    "sd-unet": "diffusers",
}


def built(name):
    pytest.importorskip(PACKAGES.get(name, "transformers"))
    return load_model(name)[0]


def gpt_neo(width, depth):
    """Embeddings of tokens and positions (the head is tied), blocks, the last norm."""
    block = 4 * width + 3 * width**2 + width**2 + width + 8 * width**2 + 5 * width
    return (50257 + 2048) * width + depth * block + 2 * width


def llama(width, depth, key_width, inner):
    """Two tables of 32,000 tokens, blocks of attention, gated product and two norms, the last norm."""
    block = 2 * width**2 + 2 * width * key_width + 3 * width * inner + 2 * width
    return 2 * 32000 * width + depth * block + width


def vit_pytorch(depth, mixing):
    """Patches with two norms, class token and positions, blocks, two norms about the classifier."""
    width, inner = 1024, 2048
    block = 4 * width**2 + width + 2 * width * inner + inner + width + 4 * width + mixing
    ends = 2 * 768 + 769 * width + 2 * width + 198 * width + 2 * width + 1000 * (width + 1)
    return ends + depth * block


def vit(width, depth, inner):
    """Patches, class token and positions, blocks with biases everywhere, the last norm."""
    block = 4 * (width**2 + width) + 2 * width * inner + inner + width + 4 * width
    return 769 * width + 198 * width + depth * block + 2 * width


SIZES = {
    "gpt-neo-small": gpt_neo(768, 12),
    "gpt-neo-1.3b": gpt_neo(2048, 24),
    "gpt-neo-2.7b": gpt_neo(2560, 32),
    "resnet-50": 25_557_032,
    "sam-2": 212_703_280,
    "vit": vit_pytorch(12, 0),
    "deepvit": vit_pytorch(24, 16 * 16 + 2 * 16),
    "sd-unet": 859_520_964,
    "whisper-medium": 763_857_920 - 1350 * 1024,  # positions of 3 s, not of 30 s
    "depth-anything-small": 24_785_089,
    "depth-anything-large": 335_315_649,
    "vit-8b": vit(4096, 40, 16384),
    "llama-2-13b": llama(5120, 40, 5120, 13824),
    "llama-2-70b": llama(8192, 80, 1024, 28672),
}
UNREAD = {"depth-anything-small": 384 + 2 * (64 * 64 * 9 + 64)}
"""A mask token for training, and one block that the first of the fusion stages never runs."""


def test_every_model_is_tested():
    assert list(SIZES) == list(PAPER_MODELS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_parameters(name):
    model = built(name)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    assert {t.device.type for t in model.parameters()} == {"meta"}
    assert not model.training


@pytest.mark.parametrize("name", ["resnet-50", "vit", "deepvit", "depth-anything-small", "sd-unet"])
def test_a_model_is_captured_with_the_example_it_carries(name):
    model = built(name)
    graph = capture(model, mode="infer", batch_size=1)
    assert graph.unsupported == ()
    example = model.example_inputs
    fed = [t for t in (example.values() if isinstance(example, dict) else example) if hasattr(t, "shape")]
    assert [graph.values[i].shape for i in graph.inputs] == [tuple(t.shape) for t in fed]
    assert sum(prod(p.shape) for p in graph.parameters) == SIZES[name] - UNREAD.get(name, 0)


def test_an_example_given_goes_before_the_one_carried():
    model = torch.nn.Linear(4, 4)
    model.example_inputs = (torch.zeros(2, 4),)
    assert capture(model, mode="infer", batch_size=1).values[0].shape == (1, 4)
    given = capture(model, torch.zeros(2, 7, 4), mode="infer", batch_size=1)
    assert given.values[given.inputs[0]].shape == (1, 7, 4)
    sized = capture(model, input_size=(5, 4), mode="infer", batch_size=1)
    assert sized.values[sized.inputs[0]].shape == (1, 5, 4)


def test_names_that_are_none():
    with pytest.raises(InputError, match=r"did you mean gpt-neo-2\.7b"):
        load_model("gpt-neo-2.8b")
    with pytest.raises(InputError, match="expected one of gpt-neo-small"):
        build_paper_model("gpt-5")


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("vit", "vit_pytorch.vit", "vit-pytorch"),
        ("sd-unet", "diffusers", "diffusers"),
        ("gpt-neo-small", "transformers", "transformers"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"{package}.*run: pip install {package}$"):
        load_model(name)


CAPTURED = """
import resource, sys
from torchedge.devices import find_device
from torchedge.lowering.inference import lower_model
from torchedge.streaming.schedules import weights_of
from torchedge.tracing.sources import load_model
program = lower_model(load_model(sys.argv[1])[0], find_device("local-cpu"))
stored = sum(weight.nbytes for weight in weights_of(program, 2**18))
print(len(program.launches), stored, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


SMALLER = {"gpt-neo-small", "gpt-neo-1.3b", "vit", "depth-anything-small", "llama-2-13b"}
"""Models whose blocks another one has, in a larger size."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAPER_MODELS if name not in SMALLER])
def test_every_model_can_be_lowered_in_little_memory(name):
    pytest.importorskip(PACKAGES.get(name, "transformers"))
    launches, nbytes, peak = map(int, python("-c", CAPTURED, name).stdout.split()[-3:])
    assert launches > 40
    # Few weights are not read, and of position tables the rows that are; some buffers are read too.
    assert 3.9 * SIZES[name] <= nbytes < 4.1 * SIZES[name]
    assert peak < 8 * 2**20  # KiB
