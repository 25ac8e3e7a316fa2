"""A small dataset in the public format: two networks, five pruning levels, eight batch sizes."""

import csv
import json
from pathlib import Path


def write_small_dataset(folder: Path) -> Path:
    """Write the dataset into a folder and return it."""
    folder.mkdir()
    names = (
        "network",
        "pruning_level",
        "batch_size",
        "memory_fits",
        "gamma_mb",
        "allocated_mb",
        "reserved_mb",
    )
    with (folder / "measurements.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "latency_fits", "phi_ms"])
        for network, level, width in networks():
            for batch in (2, 4, 8, 16, 32, 64, 128, 256):
                size = batch * width / 20
                table.writerow([network, level, batch, 1, 1500 + size, size, 1.2 * size, 1, 10 + size / 3])
            table.writerow([network, level, 512, 0, "", "", "", 0, ""])
    lines = [json.dumps({"network": n, "pruning_level": v, "nodes": nodes(w)}) for n, v, w in networks()]
    (folder / "topologies.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def networks():
    """Network, pruning level, channels."""
    return [(n, v, (100 - v) // s) for n, s in (("one", 4), ("two", 8)) for v in (0, 20, 30, 50, 70)]


def nodes(channels):
    """A network of two convolutions as the dataset describes it."""
    first = {"in_channels": 3, "out_channels": channels, "kernel_size": [3, 3], "stride": [4, 4]}
    second = {"in_channels": channels, "out_channels": channels, "kernel_size": [3, 3], "padding": [1, 1]}
    linear = {"in_features": channels, "out_features": 10}

    def node(name, op, before, **rest):
        return {"name": name, "op": op, "args": [{"node": before}], **rest}

    return [
        {"name": "x", "op": "input"},
        node("a", "module", "x", type="Conv2d", kwargs=first),
        node("r", "function", "a", target="relu", kwargs={}),
        node("b", "module", "r", type="Conv2d", kwargs=second),
        node("p", "module", "b", type="AdaptiveAvgPool2d", kwargs={"output_size": [1, 1]}),
        {**node("f", "function", "p", target="flatten", kwargs={}), "args": [{"node": "p"}, 1]},
        node("l", "module", "f", type="Linear", kwargs=linear),
        node("out", "output", "l"),
    ]
