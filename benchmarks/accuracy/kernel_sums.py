"""Times of whole transformers from the times of similar single kernels: a stand-in for measured networks.

A step's kernels follow from its graph; the backward pass of a product is two products of transposed shapes.
Each takes as long as the nearest kernels of the public table (gpu-kernels) by sizes, in proportion to the
work, without the launch that the table's short calls wait for.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch

from torchedge import capture
from torchedge.arrays import FloatArray
from torchedge.graphs import FLOATING, ForwardGraph, Mode, Op
from torchedge.graphs.sizes import Affine
from torchedge.tracing.vision import prepare_torchvision

Kernel = tuple[str, tuple[int, ...]]
"""A table of gpu-kernels and sizes in its columns."""

NETWORKS: Mapping[str, tuple[str, Mapping[str, int], int]] = {
    "bert-large": ("Bert", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                            "intermediate_size": 4096}, 512),
    "gpt2-large": ("GPT2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}, 1024),
    "opt-1.3b": ("OPT", {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
                         "ffn_dim": 8192, "word_embed_proj_dim": 2048}, 1024),
    "gpt3-xl": ("GPT2", {"n_embd": 2048, "n_layer": 24, "n_head": 16}, 1024),
    "gpt3-2.7b": ("GPT2", {"n_embd": 2560, "n_layer": 32, "n_head": 32}, 1024),
}  # fmt: skip
"""Family of transformers, sizes, longest sequence."""
CLASSES = {"Bert": "BertForSequenceClassification", "GPT2": "GPT2LMHeadModel", "OPT": "OPTForCausalLM"}

TABLE_OF = {"softmax": "softmax", "layer_norm": "ln", "gelu": "gelu", "tanh": "tanh", "relu": "relu"}
COPIES = frozenset(("clone", "contiguous", "where", "masked_fill", "cat", "embedding", "pow"))
LEAST = 20_000
"""Elements of the smallest tensor whose kernel counts."""
NEIGHBOURS = 5


def network_graph(name: str, seq_len: int, mode: Mode) -> ForwardGraph:
    """Return the graph of a network with eager attention, in float32."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    prepare_torchvision()
    import transformers

    family, sizes, _ = NETWORKS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    config.use_cache = False
    with torch.device("meta"):
        model = getattr(transformers, CLASSES[family])(config)
    inputs = {"input_ids": torch.zeros(2, seq_len, dtype=torch.long)}
    if mode == "infer":
        return capture(model.eval(), inputs, mode="infer", name=name)
    shape = (2,) if family == "Bert" else (2, seq_len)
    inputs["labels"] = torch.zeros(shape, dtype=torch.long)
    return capture(model.train(), inputs, mode="train", loss="model", name=name)


def kernels_of(graph: ForwardGraph, batch_size: int) -> Counter[Kernel]:
    """Return the kernels of a step: products, and sweeps over tensors that are not small."""
    kernels: Counter[Kernel] = Counter()
    for op in graph.ops:
        if op.outputs:
            kernels.update(_kernels(graph, op, batch_size))
    if graph.loss is not None:  # gradients that meet at a value are added
        users = Counter(index for op in graph.ops for index in op.inputs if index is not None)
        for index, count in users.items():
            value, sizes = graph.values[index], _shape(graph, index, batch_size)
            if value.role == "activation" and value.dtype in FLOATING and prod(sizes) >= LEAST:
                kernels["add", (prod(sizes[:-1]), sizes[-1])] += count - 1
    return +kernels


def _shape(graph: ForwardGraph, index: int, batch_size: int) -> tuple[int, ...]:
    sizes = graph.values[index].shape
    return tuple(s.at(batch_size) if isinstance(s, Affine) else s for s in sizes)


def _kernels(graph: ForwardGraph, op: Op, batch_size: int) -> Counter[Kernel]:
    out, *inputs = (
        _shape(graph, index, batch_size) for index in (op.outputs[0], *op.inputs) if index is not None
    )
    trains, elements = graph.loss is not None, prod(out)
    if op.kind in ("linear", "addmm", "matmul"):
        table = "bmm" if op.kind == "matmul" else "linear"
        inner = inputs[op.kind == "addmm"][-1]
        batch = prod(out[:-2]) if table == "bmm" else 1
        m, n, k = prod(out[:-1]) // batch, out[-1], inner
        shapes = ((m, n, k), (m, k, n), (k, n, m) if table == "bmm" else (n, k, m))
        products = Counter((table, (batch, *sizes)) for sizes in shapes[: 3 if trains else 1])
        if trains and len(inputs) > 2:  # the gradient of the bias reads half of what a sweep moves
            products["mulu", (max(m // 2, 1), n)] += 1
        return products
    if op.kind == "cross_entropy_loss" and len(inputs[0]) == 2:
        return Counter([("softmax", inputs[0]), ("add", inputs[0])])
    if elements < LEAST:
        return Counter()
    sweep = (elements // out[-1], out[-1])
    whole = sum(prod(size) == elements for size in inputs)
    table, backward = "", Counter[str]()
    if op.kind in TABLE_OF:
        table = TABLE_OF[op.kind]
        backward = Counter({"ln": 2} if table == "ln" else {"add": 1})
    elif op.kind in ("add", "sub", "mul", "div"):
        table = "add" if whole > 1 else "mulu"
        backward = Counter({table: 1} if op.kind in ("mul", "div") else {})
    elif op.kind in COPIES:
        table, backward = "mulu", Counter({"mulu": 1})
    elif op.kind == "dropout" and trains:
        table, backward = "add", Counter({"add": 1})
    names = Counter({table: 1} if table else {}) + (backward if trains and table else Counter())
    return Counter({(name, sweep): count for name, count in names.items()})


@dataclass(frozen=True)
class _Table:
    """Kernels of one operator on one GPU: log2 of sizes (R, S), ms (R,), the shortest of them."""

    sizes: FloatArray
    ms: FloatArray
    floor: float


@cache
def _tables(data: Path, operator: str) -> Mapping[str, _Table]:
    with gzip.open(data / "gpu-kernels" / f"{operator}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    columns = [name for name in rows[0] if name not in ("device", "ms", "kernel_name")]
    tables = {}
    for gpu in sorted({row["device"] for row in rows}):
        own = [row for row in rows if row["device"] == gpu]
        sizes = np.log2([[float(row[name]) for name in columns] for row in own])
        ms = np.array([float(row["ms"]) for row in own])
        tables[gpu] = _Table(sizes, ms, float(ms.min()))
    return tables


def summed_ms(data: Path, gpu: str, kernels: Counter[Kernel]) -> float:
    """Return the time of kernels on a GPU of the public table, ms."""
    total = 0.0
    for (operator, sizes), count in kernels.items():
        table = _tables(data, operator)[gpu]
        away = table.sizes - np.log2(sizes)  # (R, S)
        near = np.argsort((away**2).sum(axis=1))[:NEIGHBOURS]
        alone = np.maximum(table.ms[near] - table.floor, table.ms[near] / 10)
        total += count * float(np.exp(np.mean(np.log(alone) - np.log(2) * away[near].sum(axis=1))))
    return total
