"""Time of one row times a matrix by the format of its weights: float32, int8, int4. No GPU is needed.

    python benchmarks/quantised_decoding.py [--inner 2048] [--outer 5632] [--rounds 20]

The formats run in turns; the least time of each counts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from harness import options_of, taken_ms

import torchedge

FORMATS = {"float32": None, "int8": None, "int4": 32}


def main() -> None:
    """Print a line for each format."""
    options = options_of(__doc__, inner=2048, outer=5632, rounds=20).parse_args()
    torch.manual_seed(0)
    inner, outer = options.inner, options.outer
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
                best[name] = min(best[name], *taken_ms(lambda bundle=bundle: bundle.run(x.numpy()), 3))
        for name, ms in best.items():
            size = (bundles[name].path / "weights.safetensors").stat().st_size
            ratio = best["float32"] / ms
            print(f"{name:8} {ms:7.2f} ms  {ratio:5.2f} times float32's speed  {size:>10,} bytes")


if __name__ == "__main__":
    main()
