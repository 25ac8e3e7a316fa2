"""Time of one row times a matrix by the format of its weights: float32, int8, int4. No GPU is needed.

    python benchmarks/quantised_decoding.py [--sizes 2048 5632] [--rounds 20]

The formats run in turns; the least time of each counts.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from harness import options_of

import torchedge

FORMATS = {"float32": None, "int8": None, "int4": 32}


def main() -> None:
    """Print a line for each format."""
    parser = options_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs=2, default=(2048, 5632))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    inner, outer = options.sizes
    model = torch.nn.Sequential(torch.nn.Linear(inner, outer, bias=False)).eval()
    x = torch.randn(1, inner)
    with tempfile.TemporaryDirectory() as folder:
        bundles = {}
        for name, group in FORMATS.items():
            net = model if name == "float32" else torchedge.quantize(model, name, group=group)
            torchedge.export(net, x, device="local-cpu", out=Path(folder) / name, onnx=False)
            bundles[name] = torchedge.load_bundle(Path(folder) / name)
        best = dict.fromkeys(bundles, float("inf"))
        for _ in range(options.rounds):
            for name, bundle in bundles.items():
                for _ in range(3):
                    start = time.perf_counter()
                    bundle.run(x.numpy())
                    best[name] = min(best[name], time.perf_counter() - start)
        for name, seconds in best.items():
            size = (bundles[name].path / "weights.safetensors").stat().st_size
            ratio = best["float32"] / seconds
            print(f"{name:8} {1e3 * seconds:7.2f} ms  {ratio:5.2f} times float32's speed  {size:>10,} bytes")


if __name__ == "__main__":
    main()
