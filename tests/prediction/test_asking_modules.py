"""Modules that ask for batch size and device, against eager steps of what they run as on CUDA."""

import random

import numpy as np
import pytest
import torch
from oracles.asking_modules import Asking, Step, drawn
from oracles.broad_parts import LAYERS
from oracles.fake_cpu import run_training_on_fake_cpu
from oracles.rich_parts import RICH
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchedge.devices import find_device
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import CaptureRequest, capture_request

WIDTH = 256


def loss(output):
    return output.float().square().sum()


def difference(steps, batch):
    """Return predicted over counted peak, and the notes of the prediction."""
    with torch.device("meta"):
        asking, answered = Asking(steps, WIDTH, asks=True), Asking(steps, WIDTH, asks=False)
        x = torch.empty(batch, WIDTH)
    device = find_device("nvidia-h200")
    graph = capture_request(CaptureRequest(asking, batch, example=x, loss=loss, device=device))
    tape = write_tape(graph, StepSettings(backend="cpu", attention="math"))
    with sdpa_kernel(SDPBackend.MATH):
        oracle = run_training_on_fake_cpu(
            answered, ((x,), {}), loss, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)
        )
    return int(tape.peak_bytes(np.array([batch]))[0]) / oracle.peak, graph.notes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("seed", "wide"), [(2, False), (10, False), (16, False), (0, True), (5, True)])
def test_peaks_are_those_of_a_run_on_the_device(seed, wide):
    for batch in (16, 4096):
        assert difference(drawn(seed, wide), batch)[0] == pytest.approx(1, rel=0.02), f"batch {batch}"


def nested(seed):
    """Return steps with checkpoints up to four deep."""
    source = random.Random(seed)

    def block(depth):
        return tuple(step(depth) for _ in range(source.randint(1, 3)))

    def step(depth):
        kind = source.choice(["linear", "residual", "activation", "cast"] + ["checkpoint"] * 3 * bool(depth))
        if kind == "checkpoint":
            return Step(kind, None, (block(depth - 1),))
        return Step(kind, {"linear": (512, False), "activation": "tanh", "cast": torch.bfloat16}.get(kind))

    return (Step("linear", (512, False)), *[step for _ in range(3) for step in block(4)])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(12))
def test_peaks_of_checkpoints_inside_of_checkpoints_are_exact(seed):
    ratio, notes = difference(nested(seed), 4096)
    assert ratio == pytest.approx(1, rel=0.001)
    assert not [note for note in notes if "checkpoint" in note]


def test_what_runs_without_gradients_in_a_checkpoint_runs_again():
    body = (Step("normed", None, ()), Step("plain", "detached", ()), Step("plain", "without gradients", ()))
    steps = (Step("cast", torch.float16, ()), Step("checkpoint", None, (body,)))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


@pytest.mark.parametrize(
    "body",
    [
        (Step("wide", ("cumsum", False)), Step("linear", (512, False))),  # cumsum asks for nothing
        (Step("plain", "alias"), Step("linear", (512, False)), Step("activation", "relu")),
        (Step("own", "attributes"), Step("wide", ("reciprocal", False))),
        (Step("residual"), Step("own", "attributes"), Step("own", "one of several")),
    ],
)
def test_a_checkpoint_drops_its_inputs_with_the_last_node_that_asks_and_what_its_second_run_makes(body):
    steps = (Step("linear", (1024, False)), Step("checkpoint", None, (body,)))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


def within(*body, argument=None):
    return Step("checkpoint", argument, (body,))


CAST, WIDE = Step("cast", torch.bfloat16), Step("cast", torch.float32)


@pytest.mark.parametrize(
    "body",
    [
        (Step("residual"), within(CAST)),
        (Step("residual"), within(within(CAST)), within(CAST), Step("activation", "tanh"), within(CAST)),
        (Step("residual"), within(Step("residual"), within(CAST)), within(WIDE), Step("plain", "joined")),
        (within(CAST), Step("plain", "joined")),
    ],
)
def test_a_checkpoint_keeps_what_it_reads_inside_of_another_one_whatever_it_runs(body):
    steps = (Step("linear", (512, False)), Step("cast", torch.float16), within(*body))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


def test_a_sum_in_float32_of_half_precision_runs_backward_in_half_precision():
    region = Step("autocast", (True, "bfloat16", "named"), ((Step("linear", (1024, True)),
              Step("wide", ("cumsum", True)), Step("plain", "masked")),))  # fmt: skip
    steps = (Step("linear", (512, False)), within(region))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


def test_a_note_names_what_autocast_refuses_on_the_device():
    step = Step("autocast", (True, "float16", "named"), ((CAST, Step("plain", "joined")),))
    with pytest.raises(RuntimeError, match="autocast::prioritize"), torch.autocast("cpu", torch.float16):
        torch.cat([torch.ones(2, dtype=torch.bfloat16)] * 2)
    with torch.device("meta"):
        asking, x = Asking((Step("linear", (512, False)), step), WIDTH, asks=True), torch.empty(16, WIDTH)
    graph = capture_request(
        CaptureRequest(asking, 16, example=x, loss=loss, device=find_device("nvidia-h200"))
    )
    (note,) = [note for note in graph.notes if "refuses" in note]
    assert note.startswith("autocast to float16 refuses cat of bfloat16 tensors at asking_modules.py:")


def test_a_reentrant_checkpoint_runs_again_what_it_ran_without_gradients():
    for body in (
        [Step("plain", "without gradients")],
        [Step("residual"), Step("plain", "without gradients")],
    ):
        steps = (Step("linear", (512, False)), within(*body, argument="reentrant"))
        assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


def test_gradients_pass_a_reentrant_checkpoint_inside_of_another_one():
    inner = within(Step("layer", "caching"), argument="reentrant")
    outer = within(Step("linear", (512, False)), inner, Step("residual"), argument="reentrant")
    ratio, notes = difference((Step("linear", (256, False)), outer), 16)
    assert ratio == pytest.approx(1, rel=0.02)  # weights, their gradients and momentum
    assert [note for note in notes if "inside of another one" in note]


def test_what_a_second_run_adds_is_no_sum_of_the_engine():
    body = (Step("own", "stops"), Step("hooked", (512, False)), Step("wide", ("pow", False)))
    steps = (Step("linear", (1024, False)), Step("cast", torch.float16), within(*body))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


AROUND = {
    "narrow": lambda part: (part, Step("linear", (256, False))),
    "checkpoint": lambda part: (within(part), Step("linear", (256, False))),
    "plain": lambda part: (part, Step("linear", (512, False))),
    "reentrant": lambda part: (within(Step("residual"), part, Step("residual"), argument="reentrant"),),
    "half": lambda part: (Step("cast", torch.float16), part, Step("residual")),
}


@pytest.mark.parametrize(
    ("part", "around"),
    [
        ("running maximum", "plain"),  # keeps its input
        ("gathered", "plain"),  # its derivative writes into zeros, which has no copy
        ("mish", "plain"),
        ("entries written", "half"),
        ("switched", "reentrant"),
        ("hooked", "plain"),
        ("conjugated", "narrow"),  # most operators copy conjugated views
        ("conjugated result", "narrow"),  # gradients are conjugated views too
        ("loss cosine embedding", "checkpoint"),  # an input gets several gradients of one call
        ("loss cosine embedding of two", "narrow"),
        ("loss multilabel margin", "narrow"),
        ("extremes", "narrow"),
        ("decomposed", "checkpoint"),  # a gradient of one of three outputs alone
        ("taken along", "checkpoint"),  # its second run stops inside of the call
        ("dropped to a mean", "checkpoint"),
        ("long caching", "narrow"),  # a table that later steps do not make
    ],
)
def test_peaks_of_what_users_write_are_exact(part, around):
    step = Step("layer" if part in LAYERS else "broad", part)
    steps = (Step("linear", (512, False)), *AROUND[around](step))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.001)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("around", ["narrow", "checkpoint"])
@pytest.mark.parametrize("part", sorted(RICH))
def test_peaks_of_layers_that_users_write(part, around):
    steps = (Step("linear", (512, False)), *AROUND[around](Step("rich", part)))
    assert difference(steps, 4096)[0] == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("part", "around", "batch"),
    [
        ("transposed in place", "narrow", 4096),
        ("quantized", "checkpoint", 4096),  # zeros for a result without gradient come before its second run
        ("old spectral norm", "reentrant", 16),  # an attribute of the first run goes where the second sets it
    ],
)
def test_peaks_of_layers_are_exact(part, around, batch):
    steps = (Step("linear", (512, False)), *AROUND[around](Step("rich", part)))
    assert difference(steps, batch)[0] == pytest.approx(1, rel=0.001)


def test_a_spectral_norm_is_captured_under_autocast():
    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LAYERS["spectral"](64).layer

        def forward(self, x):
            with torch.autocast("cuda", torch.bfloat16):
                return self.layer(x)

    with torch.device("meta"):
        model, x = Cast(), torch.empty(16, 64)
    graph = capture_request(CaptureRequest(model, 16, example=x, device=find_device("nvidia-h200")))
    (product,) = [op for op in graph.ops if "dot" in op.kind]
    assert {graph.values[index].dtype for index in product.inputs} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "kinds"),
    [
        (range(5), {}),
        (range(1000, 1010), {"wide": True}),
        (range(2000, 2010), {"wide": True, "broad": True}),
        (range(7400, 7410), {"wide": True, "broad": True, "rich": True}),
    ],
)
def test_no_module_of_many_differs(seeds, kinds):
    for seed in seeds:
        for batch in (16, 4096):
            found, notes = difference(drawn(seed, **kinds), batch)
            within = 1 / 3 if any("by up to a third" in note for note in notes) else 0.02
            assert found == pytest.approx(1, rel=within), f"seed {seed} at {batch}"
