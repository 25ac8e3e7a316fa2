"""How well this machine's own profile predicts networks that it has never seen: docs/accuracy-limits.md.

    torchedge profile --quick
    python benchmarks/this_processor.py [--fresh] [--seconds 2]

Training steps (SGD with momentum) and inferences of networks of torchvision, of transformers (random weights)
and of written ones, in float32 and under autocast in bfloat16, on all threads. None of them, and no network
of their families, is measured by `torchedge profile`. Each network has a process of its own, as in use: what
the allocator of a process has learnt from others changes its times. Run it on an idle machine.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import apart, options_of, print_rows, taken_ms
from oracles.step_networks import Recurrent
from torch import nn

WARM_UP, FEWEST = 2, 5
POINTS = tuple([(mode, amp) for mode in ("train", "infer") for amp in (None, "bfloat16")])


@dataclass(frozen=True)
class Step:
    """A step: its network, how it is made, its inputs on the CPU and its loss."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Any
    batch: int


@dataclass(frozen=True)
class Row:
    """A measured step, ms; low, high: the predicted interval."""

    name: str
    mode: str
    amp: str | None
    predicted: float
    low: float
    high: float
    measured: float
    provenance: str

    @property
    def error(self) -> float:
        """The relative error, %."""
        return 100 * (self.predicted / self.measured - 1)


def image(batch: int, side: int) -> torch.Tensor:
    """Return images."""
    return torch.randn(batch, 3, side, side)


def vision(name: str, batch: int, side: int, **options: Any) -> Step:  # noqa: ANN401
    """Return a network of torchvision."""
    from torchvision import models

    return Step(f"{name}@{side}", lambda: getattr(models, name)(**options), image(batch, side), batch)


def language(name: str, batch: int, length: int, **config: Any) -> Step:  # noqa: ANN401
    """Return a language model of transformers that computes its own loss."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    made = kind.config_class(**config)
    ids = torch.randint(0, made.vocab_size, (batch, length))
    return Step(f"{name}/{length}", lambda: kind(made), {"input_ids": ids, "labels": ids}, batch)


def steps() -> Iterator[Step]:
    """Yield the steps."""
    small = {"vocab_size": 8000, "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
    yield vision("resnet34", 4, 96)
    yield vision("densenet121", 4, 96)
    yield vision("mobilenet_v3_large", 8, 128)
    yield vision("efficientnet_b0", 8, 96)
    yield vision("shufflenet_v2_x1_0", 16, 128)
    yield vision("vgg11", 4, 96)
    yield vision("convnext_tiny", 2, 128)
    yield vision("regnet_y_400mf", 8, 112)
    yield vision("vit_b_16", 1, 224)
    yield vision("swin_t", 2, 128)
    yield language("LlamaForCausalLM", 2, 128, intermediate_size=1024, **small)
    yield language("GPT2LMHeadModel", 4, 96, vocab_size=8000, n_embd=320, n_layer=4, n_head=5)
    yield language("BertForMaskedLM", 4, 64, intermediate_size=1536, **small)
    mlp = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    yield Step("MLP", lambda: nn.Sequential(*mlp), torch.randn(64, 784), 64)
    yield Step("LSTM", lambda: Recurrent(nn.LSTM, 128, 256, 40, layers=2), torch.randn(16, 40, 128), 16)


def fresh_steps() -> Iterator[Step]:
    """Yield steps that were first measured when drawn networks and model were frozen."""
    small = {"vocab_size": 12000, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    yield vision("wide_resnet50_2", 2, 96)
    yield vision("resnext50_32x4d", 4, 80)
    yield vision("googlenet", 8, 96, aux_logits=False, init_weights=False)
    yield vision("mnasnet1_0", 16, 96)
    yield vision("squeezenet1_1", 16, 160)
    yield vision("efficientnet_v2_s", 2, 128)
    yield vision("maxvit_t", 1, 224)
    yield language("Qwen2ForCausalLM", 1, 256, intermediate_size=768, num_key_value_heads=2, **small)
    yield language("OPTForCausalLM", 2, 160, ffn_dim=1024, word_embed_proj_dim=256, **small)
    yield language("DistilBertForMaskedLM", 8, 48, vocab_size=12000, dim=256, n_layers=3, n_heads=4)
    yield Step("upscaler", lambda: nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(),
        nn.Conv2d(32, 48, 3, padding=1), nn.PixelShuffle(4), nn.AdaptiveAvgPool2d(8), nn.Flatten(),
        nn.Linear(192, 10)), image(4, 96), 4)  # fmt: skip
    yield Step("autoencoder", lambda: nn.Sequential(
        nn.Linear(3000, 2000), nn.SiLU(), nn.Linear(2000, 200), nn.SiLU(), nn.Linear(200, 2000), nn.SiLU(),
        nn.Linear(2000, 3000)), torch.randn(32, 3000), 32)  # fmt: skip


def measure(name: str, seconds: float) -> list[float]:
    """Return the ms of a step by `POINTS`; runs in a process of its own."""
    warnings.filterwarnings("ignore")
    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()
    torch.manual_seed(0)
    step = next(step for step in (*steps(), *fresh_steps()) if step.name == name)
    return [median_ms(run_of(step, mode, amp), seconds) for mode, amp in POINTS]


def run_of(step: Step, mode: str, amp: str | None) -> Callable[[], object]:
    """Return a call that runs a step once."""
    model = step.make().train(mode == "train")
    named = isinstance(step.inputs, dict)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
            out = model(**step.inputs) if named else model(step.inputs)
            if mode != "train":
                return out
            return out.loss if named else nn.functional.cross_entropy(out, target)

    with torch.no_grad():
        shape = None if named else model(step.inputs).shape
    target = None if shape is None else torch.zeros(shape[0], dtype=torch.long)

    def train() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    return train if mode == "train" else torch.no_grad()(forward)


def median_ms(run: Callable[[], object], seconds: float) -> float:
    """Return the median time of a call, ms."""
    end = time.perf_counter() + seconds
    times = taken_ms(run, WARM_UP + FEWEST)
    while time.perf_counter() < end:
        times += taken_ms(run, 1)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    """Print a row a step and the means."""
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for one step")
    parser.add_argument("--fresh", action="store_true", help="networks that no choice was made on")
    parser.add_argument("--device", default="local-cpu")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    import torchedge
    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()

    torch.manual_seed(0)
    predictor = torchedge.Predictor(arguments.device)
    rows: list[Row] = []
    print_rows(["network", "mode", "precision", "predicted", "interval", "measured, ms", "error, %"], [])
    for step in fresh_steps() if arguments.fresh else steps():
        times = apart(measure, step.name, arguments.seconds)
        if isinstance(times, str):
            raise SystemExit(f"{step.name} was not measured: {times}")
        for (mode, amp), measured in zip(POINTS, times, strict=True):
            options: dict[str, Any] = {"mode": mode, "amp": amp, "example": step.inputs}
            if mode == "train" and isinstance(step.inputs, dict):
                options["loss"] = lambda output: output.loss
            result = predictor.predict(step.make(), step.batch, **options)
            latency = result.latency
            row = Row(step.name, mode, amp, latency.value, latency.low, latency.high, measured,
                      str(result.provenance))  # fmt: skip
            rows.append(row)
            interval = f"{row.low:.0f} to {row.high:.0f}"
            figures = (f"{row.predicted:.1f}", interval, f"{measured:.1f}", f"{row.error:+.0f}")
            print_rows([], [(row.name, mode, amp or "float32", *figures)])
    print()
    print_rows(["mode", "precision", "steps", "mean error, %", "bias, %", "worst, %", "inside, %"], [])
    for mode, amp in POINTS:
        some = [row for row in rows if (row.mode, row.amp) == (mode, amp)]
        if not some:
            continue
        errors = np.array([row.error for row in some])
        inside = 100 * np.mean([row.low <= row.measured <= row.high for row in some])
        worst = errors[np.abs(errors).argmax()]
        figures = (f"{np.abs(errors).mean():.1f}", f"{errors.mean():+.1f}", f"{worst:+.0f}", f"{inside:.0f}")
        print_rows([], [(mode, amp or "float32", len(some), *figures)])


if __name__ == "__main__":
    main()
