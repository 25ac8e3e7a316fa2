"""Print what exporting a training step takes, in a fresh process: `python benchmarks/lowering_export.py`.

The process imports, builds the model, captures loss, backward pass and update, lowers, writes, exports and
runs ONNX, and reads the bundle back. Wall-clock time counts what else runs on the machine; processor time
does not. Memory is the largest resident set. Needs torchvision, onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import options_of

CHILD = """
import json, sys, time
start, stages = time.process_time(), []
import torch, torchedge
from torchedge.tracing.vision import import_torchvision

name, device, batch, size, onnx, out = json.loads(sys.argv[1])
torch.manual_seed(0)
model = import_torchvision().models.get_model(name, weights=None)
example = torch.randn(batch, 3, size, size)

def told(stage):
    stages.append((stage, time.perf_counter(), time.process_time()))

told("import, build")
told("eager")
bundle = torchedge.export(model, example, out=out, device=device, mode="train", onnx=onnx, progress=told)
told("end")
memory = bundle.manifest.memory
rows = [[a, t - s, q - p] for (a, s, p), (_, t, q) in zip(stages[1:], stages[2:])]
rows.insert(0, ["import, build", 0.0, stages[0][2] - start])
print(json.dumps({
    "stages": rows, "kernels": len(bundle.program.kernels), "launches": len(bundle.program.launches),
    "resident": memory.resident_bytes, "arena": memory.arena_bytes, "live": memory.live_bytes,
    "onnx": dict(bundle.manifest.onnx),
}))
"""


def measure(arguments: argparse.Namespace, out: Path) -> tuple[dict[str, object], float, float, float]:
    """Export in a child; return what it told, seconds of the clock and of processors, and peak MiB."""
    request = [arguments.model, arguments.device, arguments.batch_size, arguments.size]
    request += [not arguments.no_onnx, str(out)]
    command = [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(request)]
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(child.returncode)
    seconds = time.perf_counter() - start
    return json.loads(text.splitlines()[-1]), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Print one table a run."""
    parser = options_of(__doc__, batch_size=1, size=224, runs=3)
    parser.add_argument("--model", default="resnet50", help="a torchvision name (default resnet50)")
    parser.add_argument("--device", default="adreno")
    parser.add_argument("--no-onnx", action="store_true")
    arguments = parser.parse_args()
    print(f"{arguments.model}, training step, batch {arguments.batch_size}, for {arguments.device}")
    print("the aim: under 20 s and 3 GiB for a training step of resnet50")
    for run in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            told, seconds, processors, peak = measure(arguments, Path(folder) / "bundle")
        load = os.getloadavg()[0]
        print(
            f"run {run + 1}: {seconds:.1f} s, {processors:.1f} s of processors, peak {peak:,.0f} MiB "
            f"(load of the machine {load:.1f}, {os.cpu_count()} processors)"
        )
    print("stages of the last run, seconds (of processors):")
    for stage, clock, used in told["stages"]:  # type: ignore[attr-defined]
        print(f"  {stage:<14} {clock:6.1f} ({used:.1f})")
    mib = {name: told[name] / 2**20 for name in ("resident", "arena", "live")}  # type: ignore[operator]
    print(f"{told['kernels']} kernels, {told['launches']} launches; onnx: {told['onnx']}")
    print(
        f"device memory: {mib['resident']:.1f} MiB stay, arena {mib['arena']:.1f} MiB "
        f"(alive at once {mib['live']:.1f})"
    )


if __name__ == "__main__":
    main()
