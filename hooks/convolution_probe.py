#!/usr/bin/env python3
"""Measures single convolutions: workspaces beside the tensors, and times, of the library's default algorithm.

    python3 convolution_probe.py SHAPES.jsonl [--out ROWS.jsonl]

One file, Python 3.6 or newer, PyTorch 1.10 or newer with CUDA; torchedge is not needed. SHAPES has a line for
each convolution:

    {"inputs": 64, "outputs": 128, "groups": 1, "kernel": [3, 3], "stride": [1, 1], "padding": [1, 1],
     "dilation": [1, 1], "size": [56, 56], "batch": 32}

and each output row repeats such a line and adds, for each of forward, backward_x (gradient of the input) and
backward_w (of the weights), the workspace in MiB (2^20 bytes: peak of allocated memory minus the tensors) and
the median time in ms, queued behind a busy kernel so that it is the device's. Values do not matter; numbers
are fp32, with PyTorch's default settings.
Two more keys are optional: "dtype" ("bfloat16", "float16") and "channels_last": true.
"""

import argparse
import json
import statistics
import sys
import time

MIB = 2.0**20
MOST_CACHED = 16 * 2**30
BUSY_CYCLES = 2000000
PHASES = ("forward", "backward_x", "backward_w")


def rounded(tensor):
    """Return the bytes of a tensor in the caching allocator."""
    return -(-tensor.numel() * tensor.element_size() // 512) * 512


def tensor(size, shape, device="cuda"):
    """Return a random tensor in the dtype and layout of a convolution."""
    import torch

    layout = torch.channels_last if shape.get("channels_last") else torch.contiguous_format
    x = torch.randn(size, device=device, dtype=getattr(torch, shape.get("dtype", "float32")))
    return x.contiguous(memory_format=layout)


def measure(shape, repeats):
    """Return workspaces and median times of one convolution; without repeats, times are None."""
    import torch

    spatial = [shape["stride"], shape["padding"], shape["dilation"]]
    weight_size = [shape["outputs"], shape["inputs"] // shape["groups"]] + shape["kernel"]
    x, weight = tensor([shape["batch"], shape["inputs"]] + shape["size"], shape), tensor(weight_size, shape)
    convolve = torch.ops.aten.convolution
    y = convolve(x, weight, None, *spatial, False, [0, 0], shape["groups"])
    gradient = torch.randn_like(y)

    def run(phase):
        if phase == "forward":
            return convolve(x, weight, None, *spatial, False, [0, 0], shape["groups"])
        mask = [phase == "backward_x", phase == "backward_w", False]
        options = (None, *spatial, False, [0, 0], shape["groups"], mask)
        return next(
            t for t in torch.ops.aten.convolution_backward(gradient, x, weight, *options) if t is not None
        )

    row = dict(shape)
    del y
    for phase in PHASES:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = rounded(run(phase))
        row[phase + "_workspace_mib"] = round((torch.cuda.max_memory_allocated() - before - result) / MIB, 4)
        marks = []
        if repeats:
            torch.cuda._sleep(BUSY_CYCLES)
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(phase)
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in marks]
        row[phase + "_ms"] = float("{:.4g}".format(statistics.median(times))) if times else None
    return row


def main():
    """Read shapes, measure, write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", help="file with one convolution a line; - reads standard input")
    parser.add_argument("--out", help="file to append rows to (default: standard output)")
    parser.add_argument("--repeats", type=int, default=4, help="timed runs of each phase; 0: no times")
    parser.add_argument("--seconds", type=float, help="stop before the line that begins after that time")
    arguments = parser.parse_args()
    began = time.time()
    import torch

    if not torch.cuda.is_available():
        sys.exit("convolution_probe: this PyTorch sees no GPU; workspaces are measured on one")
    out = open(arguments.out, "a") if arguments.out else sys.stdout
    with sys.stdin if arguments.shapes == "-" else open(arguments.shapes) as file:
        for number, line in enumerate(file, 1):
            if arguments.seconds is not None and time.time() - began > arguments.seconds:
                break
            try:
                shape = json.loads(line)
            except ValueError as error:
                sys.exit("convolution_probe: line {} is not a convolution: {}".format(number, error))
            try:
                row = measure(shape, arguments.repeats)
            except (RuntimeError, KeyError, TypeError) as error:
                row = dict(shape, reason=" ".join(str(error).split())[:200])
            if not arguments.repeats or torch.cuda.memory_reserved() > MOST_CACHED:
                torch.cuda.empty_cache()
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
