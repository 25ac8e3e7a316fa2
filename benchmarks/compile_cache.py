"""How long torch.compile takes with backend="torchedge": the first time, and again in another process.

    python benchmarks/compile_cache.py
    python benchmarks/compile_cache.py mobilenet_v2 --batch-size 8 --side 96

Two processes with one empty cache folder, one after the other, each compile a torchvision model and train it
for a few steps. Lowering is what the cache of programs spares; kernels are compiled by the driver when they
are first launched, which its own cache or ours spares. Losses of both processes must be the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import torchedge


def child(name: str, batch_size: int, side: int) -> dict[str, Any]:
    """Compile and train in this process; returns seconds, and the losses as hexadecimal numbers."""
    from torchedge.runtime import backends
    from torchedge.tracing.vision import import_torchvision

    lowering: list[tuple[float, bool]] = []
    original = backends.lowered

    def timed(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        program, cached = original(*args, **options)
        lowering.append((time.perf_counter() - began, cached))
        return program, cached

    backends.lowered = timed
    torch.manual_seed(0)
    model = getattr(import_torchvision().models, name)(num_classes=10)
    compiled = torch.compile(model, backend="torchedge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch_size, 3, side, side), torch.randint(10, (batch_size,))
    steps, losses = [], []
    for _ in range(4):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        steps.append(time.perf_counter() - began)
        losses.append(loss.item().hex())
    return {"steps": steps, "lowering": lowering, "losses": losses}


def main() -> int:
    """Run both processes and print what each took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="resnet18", help="a classification model of torchvision")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--side", type=int, default=64, help="height and width of the images")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.model, arguments.batch_size, arguments.side)))
        return 0
    found = []
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHEDGE_CACHE": folder, "POCL_CACHE_DIR": os.path.join(folder, "pocl")}
        os.mkdir(own["POCL_CACHE_DIR"])
        for title in ("first", "second"):
            command = [sys.executable, __file__, *sys.argv[1:], "--child"]
            ended = subprocess.run(
                command, env={**os.environ, **own}, capture_output=True, text=True, check=True
            )
            found.append(json.loads(ended.stdout.splitlines()[-1]))
            show(title, found[-1])
    same = found[0]["losses"] == found[1]["losses"]
    print(f"torchedge {torchedge.__version__}, torch {torch.__version__}", end="; ")
    print(f"the losses of both are {'equal' if same else 'DIFFERENT'}")
    return 0 if same else 1


def show(title: str, found: dict[str, Any]) -> None:
    """Print one process: its first step holds all compilation, its later ones none."""
    first, *later = found["steps"]
    lowering = sum(seconds for seconds, _ in found["lowering"])
    cached = sum(1 for _, cached in found["lowering"] if cached)
    print(
        f"{title:<7} process: first step {first:6.1f} s, of which lowering {lowering:5.2f} s "
        f"({cached} of {len(found['lowering'])} programs cached); later steps {min(later):.2f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
