"""Print how fast predictions are and what they cost in memory: `python benchmarks/prediction_speed.py`.

Every figure that is a ratio is measured in this one run; medians of several repetitions. Times are those of
the processor (of all threads): what an idle machine takes, wherever others use it, too. Needs torchvision and
transformers.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import apart


def median_ms(function: Callable[[int], object], times: int) -> float:
    """Return the median time of `function(i)`, ms."""
    return statistics.median(times_ms(function, range(times)))


def times_ms(function: Callable[[int], object], arguments: Sequence[int]) -> list[float]:
    """Return the times of calls and of the processes that they start, ms."""
    taken = []
    gc.collect()
    for argument in arguments:
        start = os.times()
        begun = time.process_time()
        function(argument)
        own, end = time.process_time() - begun, os.times()
        children = end.children_user + end.children_system - start.children_user - start.children_system
        taken.append(1e3 * (own + children))
    return taken


FIRST = 25
"""Sizes of which the median is printed apart: what later ones need is computed and loaded in them."""


def measure_sizes(what: str, predict: Callable[[int], object], sizes: range, target: str) -> None:
    """Print the time of a network's first sizes apart from that of later ones, each predicted once."""
    taken = times_ms(predict, sizes)
    line(f"{what}, first {FIRST}", f"{statistics.median(taken[:FIRST]):.2f} ms", "")
    line("  the slowest of them (with all that is loaded once)", f"{max(taken[:FIRST]):.0f} ms", "")
    line("  later ones", f"{statistics.median(taken[FIRST:]):.2f} ms", target)


def process_ms(code: str, times: int = 7) -> float:
    """Return the median time of a fresh interpreter that runs `code`, ms."""
    command = [sys.executable, "-c", code]
    return median_ms(lambda _: subprocess.run(command, check=True), times)


def traced_mib(before: str, code: str) -> tuple[float, float]:
    """Return what `code` keeps and takes at most after `before` ran, MiB of Python and numpy memory."""
    program = (
        f"import tracemalloc\n{before}\ntracemalloc.start()\n{code}\n"
        "print(*(n / 2**20 for n in tracemalloc.get_traced_memory()))"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    kept, most = map(float, out.stdout.split()[-2:])
    return kept, most


def line(what: str, value: str, target: str) -> None:
    """Print one row of the table."""
    print(f"{what:<66}{value:>14}   {target}")


VISION = ("resnet50", "mobilenet_v2", "efficientnet_b0", "convnext_tiny", "vit_b_16")


def measure_vision(device: str) -> None:
    """Time networks never seen before against torch.fx.symbolic_trace, and other batch sizes of one."""
    import torch

    import torchedge
    from torchedge.tracing.vision import import_torchvision

    predictor = torchedge.Predictor(device)
    for name in VISION:
        models = [getattr(import_torchvision().models, name)() for _ in range(9)]
        predictor.predict(models[0], 32)
        torch.fx.symbolic_trace(models[0])
        pairs = []
        for model in models[1:]:
            pairs.append(
                (
                    median_ms(lambda _, m=model: torch.fx.symbolic_trace(m), 3),
                    median_ms(lambda _, m=model: predictor.predict(m, 32), 3),
                )
            )
        print_ratio(name, "torch.fx.symbolic_trace", pairs, "at most 1.5")
    with torch.device("meta"):
        graph = torchedge.capture(import_torchvision().models.resnet50())
    measure_sizes(
        "another batch size of a captured resnet50",
        lambda batch: predictor.predict(graph, batch),
        range(4, 130),
        "under 1 ms",
    )


def print_ratio(name: str, tracer: str, pairs: list[tuple[float, float]], target: str) -> None:
    """Print the medians of (traced, predicted) ms, and of their ratios."""
    traced, predicted = (statistics.median(column) for column in zip(*pairs, strict=True))
    line(f"{tracer}({name})", f"{traced:.1f} ms", "")
    line(f"Predictor.predict({name}), never seen before", f"{predicted:.1f} ms", "")
    line("  ratio", f"{statistics.median(p / t for t, p in pairs):.2f}", target)


def measure_language(device: str) -> None:
    """Time language models never seen before against make_fx; torch.fx.symbolic_trace fails on them."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    import torchedge

    ids = torch.zeros(1, 512, dtype=torch.int64, device="meta")
    example = {"input_ids": ids.new_zeros(ids.shape, device="cpu")}
    predictor = torchedge.Predictor(device)
    for name, build in language_models().items():
        with torch.device("meta"):
            models = [build() for _ in range(4)]
        predictor.predict(models[0], 4, example=example)
        pairs = []
        for model in models[1:]:
            pairs.append(
                (
                    median_ms(lambda _, m=model: make_fx(lambda x: m(input_ids=x)[0])(ids), 1),
                    median_ms(lambda _, m=model: predictor.predict(m, 4, example=example), 3),
                )
            )
        print_ratio(name, "make_fx", pairs, "at most 2")


def language_models() -> dict[str, Callable[[], Any]]:
    """Return how to build each language model from a configuration."""
    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()  # transformers imports torchvision
    import transformers

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    llama = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, **heads}
    return {
        "GPT-2-medium": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        ),
        "BERT-base": lambda: transformers.BertForSequenceClassification(transformers.BertConfig()),
        "Llama, 16 layers": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
    }


def measure_lengths(device: str) -> None:
    """Time other batch sizes and lengths of a GPT-2-medium, in a process that has predicted nothing else."""
    import torch

    import torchedge

    with torch.device("meta"):
        model = language_models()["GPT-2-medium"]()
    ids = torch.zeros(1, 512, dtype=torch.int64)
    predictor = torchedge.Predictor(device)
    family = torchedge.capture_lengths(model, {"input_ids": ids, "labels": ids})
    predictor.predict(family, 2, seq_len=500)
    measure_sizes(
        "another batch size of a captured GPT-2-medium",
        lambda batch: predictor.predict(family, batch, seq_len=500),
        range(4, 80),
        "under 2 ms",
    )
    measure_sizes(
        "another sequence length of it",
        lambda length: predictor.predict(family, 4, seq_len=length),
        range(200, 326),
        "under 2 ms",
    )


def measure_many(device: str) -> None:
    """Time 10,000 rows through predict_many."""
    import torch

    import torchedge
    from torchedge.tracing.vision import import_torchvision

    resnet50 = import_torchvision().models.resnet50
    predictor = torchedge.Predictor(device)
    with torch.device("meta"):
        graphs = [
            torchedge.capture(resnet50(width_per_group=w))
            for w in (32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
        ]
    predictor.predict_many(graphs, [4, 16, 64, 256])
    taken = median_ms(lambda _: predictor.predict_many(graphs, range(1, 1001)), 5)
    line("predict_many, 10 networks at 1,000 batch sizes", f"{1e7 / taken:,.0f} /s", "over 20,000 a second")


def measure_cost(device: str) -> None:
    """Measure imports, the loaded profile and the simulation in fresh processes."""
    import torchedge

    torch_ms, both_ms = process_ms("import torch"), process_ms("import torch, torchedge")
    line("import torchedge on top of import torch", f"{100 * (both_ms / torch_ms - 1):+.1f} %", "under 10 %")
    folder = Path(torchedge.find_device(device).folder)
    size = sum(f.stat().st_size for f in folder.iterdir()) / 2**20
    line(f"files of the profile {device}", f"{size:.2f} MiB", "under 6 MiB")
    base = (
        "import torch, torchedge, torchedge.api, safetensors.numpy\n"
        "from torchedge.prediction.profiles import load_models"
    )
    kept, _ = traced_mib(base, f"x = load_models(torchedge.find_device({device!r}))")
    line("memory of a loaded profile", f"{kept:.1f} MiB", "under 4 MiB")
    build = (
        "import warnings; warnings.simplefilter('ignore'); import torch, torchedge, torchedge.api\n"
        "from torchedge.tracing.vision import import_torchvision\n"
        "torch.set_default_device('meta'); m = import_torchvision().models.resnet50()"
    )
    _, most = traced_mib(build, "p = torchedge.simulate(m, 32)")
    line("memory of capturing and simulating a ResNet-50 step", f"{most:.1f} MiB", "under 50 MiB")


def main(device: str = "jetson-tx2") -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    line("what", "measured", "target")
    measure_vision(device)
    measure_language("nvidia-h200")
    apart(measure_lengths, "nvidia-h200")
    measure_many(device)
    measure_cost(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
