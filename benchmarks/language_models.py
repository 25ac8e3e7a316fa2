"""Time of a generated token against PyTorch eager with the caches of transformers. No GPU is needed.

    python benchmarks/language_models.py [--layers 4] [--hidden 512] [--vocabulary 8000] [--length 512]

Both continue one text greedily, in turns; the medians of all tokens count. PyTorch runs in as many threads as
the OpenCL device has compute units.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import options_of, print_rows

import torchedge
from torchedge.opencl import open_context
from torchedge.tracing.vision import prepare_torchvision

PROMPT, TURNS = 64, 5


def main() -> None:
    """Print a line for PyTorch and one for each format of weights."""
    parser = options_of(__doc__, layers=4, hidden=512, vocabulary=8000, length=512, tokens=32)
    parser.add_argument("--formats", nargs="+", default=["float32"], choices=("float32", "int8", "int4"))
    options = parser.parse_args()
    prepare_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=11 * options.hidden // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        max_position_embeddings=options.length,
    )
    model = LlamaForCausalLM(config).eval()
    device = open_context().device
    torch.set_num_threads(device.compute_units)
    times: dict[str, list[float]] = {"PyTorch eager": [], **{name: [] for name in options.formats}}
    with tempfile.TemporaryDirectory() as folder:
        bundles = {}
        for name in options.formats:
            quantize: Any = None if name == "float32" else name
            out = Path(folder) / name
            bundles[name] = torchedge.export_lm(
                model, "local-cpu", out=out, max_length=options.length, quantize=quantize
            )
        for turn in range(TURNS + 1):
            ids = torch.randint(0, options.vocabulary, (PROMPT,)).tolist()
            taken = {"PyTorch eager": _eager(model, ids, options.tokens)}
            for name, bundle in bundles.items():
                stamps: list[float] = []
                bundle.generate(ids, options.tokens, stream=lambda _, s=stamps: s.append(time.perf_counter()))
                taken[name] = stamps
            for name, stamps in taken.items() if turn else ():  # the first turn warms up
                times[name] += [1e3 * (b - a) for a, b in pairwise(stamps)]
    eager = statistics.median(times["PyTorch eager"])
    print(
        f"{device.name}, {device.compute_units} compute units; PyTorch in {torch.get_num_threads()} threads"
    )
    rows = [(name, statistics.median(each)) for name, each in times.items()]
    print_rows(
        ("weights", "ms a token", "of PyTorch's"), [(n, f"{ms:.2f}", f"{ms / eager:.2f}") for n, ms in rows]
    )


def _eager(model: Any, ids: list[int], count: int) -> list[float]:  # noqa: ANN401
    """Return when each of the tokens after a prompt was there."""
    stamps, cache, new = list[float](), None, torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            output = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, new = output.past_key_values, output.logits[:, -1:].argmax(-1)
            stamps.append(time.perf_counter())
    return stamps


if __name__ == "__main__":
    main()
