"""Print how fast predictions are and what they cost in memory: `python benchmarks/prediction_speed.py`.

Every figure that is a ratio is measured in this one run; medians of several repetitions. Needs
torchvision and transformers.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def median_ms(function: Callable[[int], object], times: int) -> float:
    """Return the median time of `function(i)`, ms."""
    taken = []
    gc.collect()
    for index in range(times):
        start = time.perf_counter()
        function(index)
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


FIRST = 25
"""Sizes in which what a network's later sizes need is computed, and the compiled replay is loaded."""


def measure_sizes(what: str, predict: Callable[[int], object], sizes: range, target: str) -> None:
    """Print the time of a network's first sizes apart from that of later ones, each predicted once."""
    gc.collect()
    taken = []
    for size in sizes:
        start = time.perf_counter()
        predict(size)
        taken.append(1e3 * (time.perf_counter() - start))
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


def measure_one(device: str) -> None:
    """Time a network never seen before against torch.fx.symbolic_trace, and another batch size."""
    import torch

    import torchedge
    from torchedge.tracing.vision import import_torchvision

    models = [import_torchvision().models.resnet50() for _ in range(9)]
    predictor = torchedge.Predictor(device)
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
    traced, predicted = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(p / t for t, p in pairs)
    line("torch.fx.symbolic_trace(resnet50)", f"{traced:.1f} ms", "")
    line("Predictor.predict(resnet50, 32), never seen before", f"{predicted:.1f} ms", "")
    line("  ratio", f"{ratio:.2f}", "at most 1.5")
    graph = torchedge.capture(models[0])
    measure_sizes(
        "another batch size of a captured graph",
        lambda batch: predictor.predict(graph, batch),
        range(4, 130),
        "under 1 ms",
    )


def measure_language(device: str) -> None:
    """Time a GPT-2-medium never seen before."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    import torchedge

    models, example = gpt2_medium(6)
    ids = torch.zeros(1, 512, dtype=torch.int64, device="meta")
    predictor = torchedge.Predictor(device)
    predictor.predict(models[0], 4, example=example)
    traced = median_ms(lambda _: make_fx(lambda x: models[0](input_ids=x, labels=x).loss)(ids), 3)
    predicted = median_ms(lambda i: predictor.predict(models[1 + i], 4, example=example), 5)
    forward = median_ms(lambda _: models[0](input_ids=ids, labels=ids), 5)
    line("GPT-2-medium's forward pass on meta tensors", f"{forward:.0f} ms", "")
    line("make_fx of it (torch.fx.symbolic_trace fails)", f"{traced:.0f} ms", "")
    line("Predictor.predict(GPT-2-medium, 4), never seen before", f"{predicted:.0f} ms", "")
    line("  ratio to make_fx", f"{predicted / traced:.2f}", "at most 2")


def gpt2_medium(count: int) -> tuple[list[Any], dict[str, Any]]:
    """Return so many modules without values, and an example."""
    import torch

    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()  # transformers imports torchvision
    import transformers

    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    with torch.device("meta"):
        models = [transformers.GPT2LMHeadModel(config) for _ in range(count)]
    ids = torch.zeros(1, 512, dtype=torch.int64)
    return models, {"input_ids": ids, "labels": ids}


def measure_lengths(device: str) -> None:
    """Time other batch sizes and lengths of a GPT-2-medium, in a process that has predicted nothing else."""
    import torchedge

    models, example = gpt2_medium(1)
    predictor = torchedge.Predictor(device)
    family = torchedge.capture_lengths(models[0], example)
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
    measure_one(device)
    measure_language("nvidia-h200")
    fresh = multiprocessing.get_context("spawn").Process(target=measure_lengths, args=("nvidia-h200",))
    fresh.start()
    fresh.join()
    measure_many(device)
    measure_cost(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
