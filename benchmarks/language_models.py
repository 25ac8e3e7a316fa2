"""Time of a prompt and of a generated token beside PyTorch eager, and llama.cpp. No GPU is needed.

    python benchmarks/language_models.py [--formats float32 int8 int4] [--llama-cpp] [--layers 4]

All continue one text greedily, in turns, and read the same weights: with --llama-cpp (`pip install
llama-cpp-python`, a compiler is needed) those of one GGUF file a format, F32, Q8_0 or Q4_0. Medians of all
turns and tokens. PyTorch and llama.cpp run in as many threads as the OpenCL device has compute units.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import options_of, print_rows
from llamas import llama, stamps_of

import torchedge
from torchedge.opencl import open_context

TYPES = {"float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
"""A format's type in GGUF files: groups of 32 with a scale in float16."""

Run = Callable[[list[int], int], list[float]]
"""Continue a prompt by so many tokens; return when it began and when each token was there."""


def main() -> None:
    """Print a line for each program and format."""
    sizes = {"layers": 4, "hidden": 512, "vocabulary": 8000, "length": 512}
    parser = options_of(__doc__, **sizes, prompt=64, tokens=32, turns=5)
    parser.add_argument("--formats", nargs="+", default=["float32"], choices=TYPES)
    parser.add_argument("--llama-cpp", action="store_true", help="run llama.cpp on the same weights")
    options = parser.parse_args()
    model = llama(options.hidden, options.layers, options.vocabulary, options.length)
    device = open_context().device
    torch.set_num_threads(device.compute_units)
    runs: dict[str, Run] = {"PyTorch eager, float32": _eager(model)}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats:
            net: Any = model
            if options.llama_cpp:
                from oracles.gguf_writing import GGMLQuantizationType, write_gguf

                file = Path(folder) / f"{name}.gguf"
                write_gguf(file, model, GGMLQuantizationType[TYPES[name]], vocabulary=True)
                net = torchedge.load_gguf(model, file)
                runs[f"llama.cpp, {TYPES[name]}"] = _llama_cpp(file, options, device.compute_units)
            elif name != "float32":
                net = torchedge.quantize(model, name, group=32)
            bundle = torchedge.export_lm(
                net, "local-cpu", out=Path(folder) / name, max_length=options.length, chunk=options.prompt
            )
            runs[f"torchedge, {name}"] = partial(stamps_of, bundle)
        first: dict[str, list[float]] = {name: [] for name in runs}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(options.turns + 1):
            ids = torch.randint(0, options.vocabulary, (options.prompt,)).tolist()
            for name, run in runs.items():
                start, *stamps = run(ids, options.tokens)
                if turn:  # the first turn warms up
                    first[name].append(1e3 * (stamps[0] - start))
                    times[name] += [1e3 * (b - a) for a, b in pairwise(stamps)]
    units = f"{device.compute_units} compute units, as many threads"
    print(f"{device.name}, {units}; a prompt of {options.prompt} tokens")
    eager = statistics.median(times["PyTorch eager, float32"])
    titles = ("program, weights", "ms a prompt", "ms a token", "of PyTorch's")
    rows = [(name, statistics.median(first[name]), statistics.median(times[name])) for name in runs]
    print_rows(titles, [(n, f"{ms:.1f}", f"{token:.2f}", f"{token / eager:.2f}") for n, ms, token in rows])


def _eager(model: Any) -> Run:  # noqa: ANN401 - transformers' class
    def run(ids: list[int], count: int) -> list[float]:
        stamps, cache, new = [time.perf_counter()], None, torch.tensor([ids])
        with torch.no_grad():
            for _ in range(count):
                output = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, new = output.past_key_values, output.logits[:, -1:].argmax(-1)
                stamps.append(time.perf_counter())
        return stamps

    return run


def _llama_cpp(file: Path, options: Any, threads: int) -> Run:  # noqa: ANN401 - argparse's
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = options.length
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)

    def run(ids: list[int], count: int) -> list[float]:
        assert silent  # llama.cpp calls it as long as it runs
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        stamps, new = [time.perf_counter()], ids
        for _ in range(count):
            tokens = (llama_cpp.llama_token * len(new))(*new)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(new))):
                raise RuntimeError("llama.cpp could not decode")
            logits = llama_cpp.llama_get_logits_ith(context, -1)
            new = [int(np.ctypeslib.as_array(logits, (options.vocabulary,)).argmax())]
            stamps.append(time.perf_counter())
        return stamps

    return run


if __name__ == "__main__":
    main()
