"""Time whole training steps by kinds of kernels, beside PyTorch on the same device.

    python benchmarks/lowering_steps.py --out steps.jsonl  # everything, on the first OpenCL device
    python benchmarks/lowering_steps.py --out steps.jsonl networks  # networks at batch 16 x 224 px
    python benchmarks/lowering_steps.py --out steps.jsonl group_norm_112 lstm_32
    python benchmarks/lowering_steps.py --out small.jsonl --small  # small sizes, for a processor

Each case runs in a process of its own; one that is in --out already is only printed, so that a run that was
cut goes on where it ended. The optimizer is SGD with momentum, float32. torchedge: medians of the steps' wall
time, of the time in which the host hands the launches over (both also with parts of the arena as arguments),
and of the sum of the kernels' own times; seconds to lower and to compile, numbers of kernels and launches,
how far the first loss is from PyTorch's. PyTorch: the median wall time of a step, on CUDA with TF32 off where
it is there. Below a case stand its kinds of kernels and its slowest launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torchedge.runtime import Executor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 7
"""Steps that are timed."""
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Case:
    """A model, one batch and the loss."""

    model: nn.Module
    batch: Batch
    loss: Loss


class GroupNormUNet(nn.Module):
    """A small UNet of two levels: convolutions, GroupNorm, SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = self._block(3, width), self._block(width, 2 * width)
        self.middle, self.up = self._block(2 * width, 2 * width), self._block(3 * width, width)
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(channels: int, filters: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before in (channels, filters):
            layers += [nn.Conv2d(before, filters, 3, padding=1), nn.GroupNorm(8, filters), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return pictures from pictures."""
        wide = self.first(x)
        deep = self.middle(self.down(nn.functional.max_pool2d(wide, 2)))
        return self.last(self.up(torch.cat([nn.functional.interpolate(deep, scale_factor=2), wide], 1)))


class Gpt(nn.Module):
    """A small decoder: learned positions, pre-norm blocks, a causal mask, the embedding as the last layer."""

    def __init__(self, vocabulary: int, width: int, blocks: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (batch x tokens, vocabulary) of tokens (batch, tokens)."""
        y = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return (self.norm(y) @ self.words.weight.T).flatten(0, 1)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.project, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.between, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.project(self.before(x)).view(batch, tokens, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Recurrent(nn.Module):
    """A recurrent layer, the last step's output alone."""

    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.layer = kind(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, width) of (batch, steps, width)."""
        return self.layer(x)[0][:, -1]


def _squares(y: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return ((y - goal) ** 2).mean()


def _norm(norm: nn.Module, channels: int, side: int, batch: int) -> Case:
    x = torch.randn(batch, 8, side, side)
    return Case(nn.Sequential(nn.Conv2d(8, channels, 1), norm), (x, torch.tensor(0.3)), _squares)


def _weight(channels: int, side: int, batch: int) -> Case:
    model = nn.Sequential(nn.Conv2d(8, channels, 1), nn.Conv2d(channels, channels, 3, padding=1, bias=False))
    return Case(model, (torch.randn(batch, 8, side, side), torch.tensor(0.3)), _squares)


def _tokens(rows: int, tokens: int, *, alike: bool = False) -> Case:
    x = torch.full((tokens,), 7) if alike else torch.randint(0, rows, (tokens,))
    return Case(nn.Embedding(rows, 256), (x, torch.tensor(0.3)), _squares)


def _steps(kind: type[nn.RNNBase], steps: int) -> Case:
    return Case(Recurrent(kind, 128), (torch.randn(16, steps, 128), torch.randn(16, 128)), _squares)


def _vision(name: str, batch: int, side: int) -> Case:
    from torchedge.tracing.vision import import_torchvision

    model = getattr(import_torchvision().models, name)()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    data = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    return Case(model, data, nn.functional.cross_entropy)


def _unet(batch: int, side: int) -> Case:
    data = torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side)
    return Case(GroupNormUNet(32), data, _squares)


def _gpt(batch: int, tokens: int) -> Case:
    x = torch.randint(0, 8192, (batch, tokens))
    return Case(Gpt(8192, 384, 6, tokens), (x, x.roll(-1, 1).flatten()), nn.functional.cross_entropy)


def cases(*, small: bool) -> dict[str, Callable[[], Case]]:
    """Return what makes each case, by its name. small: sizes that suit a processor."""
    batch, less, side = (2, 4, 32) if small else (16, 1, 224)
    by_name: dict[str, Callable[[], Case]] = {
        "group_norm_112": lambda: _norm(nn.GroupNorm(8, 32), 32, 112 // less, batch),
        "group_norm_28": lambda: _norm(nn.GroupNorm(32, 256), 256, 28 // less, batch),
        "instance_norm_56": lambda: _norm(nn.GroupNorm(64, 64), 64, 56 // less, batch),
        "one_group_56": lambda: _norm(nn.GroupNorm(1, 64), 64, 56 // less, batch),
        "batch_norm_112": lambda: _norm(nn.BatchNorm2d(32), 32, 112 // less, batch),
        "batch_norm_7": lambda: _norm(nn.BatchNorm2d(1280), 1280, 7, batch),
        "layer_norm_96": lambda: Case(
            nn.Sequential(nn.Linear(8, 96), nn.LayerNorm(96)),
            (torch.randn(batch * 3136 // less, 8), torch.tensor(0.3)), _squares,
        ),
        "softmax_49": lambda: Case(
            nn.Sequential(nn.Linear(8, 49), nn.Softmax(-1)),
            (torch.randn(batch * 64 * 3 * 49 // less, 8), torch.tensor(0.3)), _squares,
        ),
        "embedding_8192_2048": lambda: _tokens(8192, 2048 // less),
        "embedding_50257_16384": lambda: _tokens(50257 // less, 16384 // less),
        "embedding_alike": lambda: _tokens(8192, 8192 // less, alike=True),
        "weight_56": lambda: _weight(64, 56 // less, batch),
        "weight_28": lambda: _weight(128, 28 // less, batch),
        "weight_14": lambda: _weight(256, 14 // less, batch),
        "weight_7": lambda: _weight(512, 7, batch),
        "lstm_8": lambda: _steps(nn.LSTM, 8),
        "lstm_32": lambda: _steps(nn.LSTM, 32),
        "gru_32": lambda: _steps(nn.GRU, 32),
        "rnn_32": lambda: _steps(nn.RNN, 32),
    }  # fmt: skip
    for name in NETWORKS[:-2]:
        by_name[name] = lambda name=name: _vision(name, batch, side)
    by_name["unet"] = lambda: _unet(batch, side)
    by_name["gpt"] = lambda: _gpt(batch, 32 if small else 256)
    return by_name


NETWORKS = (
    "resnet18", "mobilenet_v2", "efficientnet_b0", "densenet121", "convnext_tiny", "swin_t", "unet", "gpt",
)  # fmt: skip


def _median(call: Callable[[], object], count: int) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def _launched(executor: Executor) -> tuple[float, float]:
    """Return the median milliseconds of a step, and those in which its launches are handed over."""
    walls, hosts = [], []
    for _ in range(STEPS + 2):
        began = time.perf_counter()
        executor.launch()
        hosts.append(1e3 * (time.perf_counter() - began))
        executor.finish()
        walls.append(1e3 * (time.perf_counter() - began))
    return statistics.median(walls), statistics.median(hosts)


def measure_torchedge(case: Case, target: str) -> dict[str, object]:
    """Return what a step of ours takes."""
    from torchedge.lowering.assembly import lower
    from torchedge.lowering.rules import all_rules
    from torchedge.lowering.targets import target_for
    from torchedge.opencl import choose_device
    from torchedge.runtime import Executor
    from torchedge.tracing.steps import capture_step

    began = time.perf_counter()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9)
    captured = capture_step(
        case.model, case.batch[:1], targets=case.batch[1:], loss=case.loss, optimizer=optimizer,
        keep=frozenset(all_rules()),
    )  # fmt: skip
    program = lower(captured.step, target or target_for(choose_device()))
    lowered = time.perf_counter()
    arrays = [t.numpy() for t in case.batch]
    weights = {name: tensor.detach().numpy() for name, tensor in captured.tensors.items()}
    with Executor(program, profile=True) as executor:
        executor.load(weights)
        loss = float(executor.run(*arrays)[0])
        compiled = time.perf_counter()
        sums, kinds, each = [], [], []
        for _ in range(STEPS):
            executor.launch()
            times = executor.timings()
            sums.append(sum(t.ns for t in times) / 1e6)
            kinds.append(Counter())
            for t in times:
                kinds[-1][t.kind] += t.ns / 1e6
            each.append([t.ns / 1e6 for t in times])
    walls, hosts = [], []
    for whole in (None, False):  # as the executor chooses, then with parts of the arena
        with Executor(program, whole_arena=whole) as executor:
            executor.load(weights)
            executor.run(*arrays)
            wall, host = _launched(executor)
            walls.append(wall)
            hosts.append(host)
    medians = [statistics.median(column) for column in zip(*each, strict=True)]
    slowest = sorted(range(len(medians)), key=lambda k: -medians[k])[:12]
    launches = program.launches
    return {
        "device": executor.context.device.name,
        "loss": loss,
        "wall_ms": walls[0],
        "host_ms": hosts[0],
        "parts_ms": walls[1],
        "parts_host_ms": hosts[1],
        "kernels_ms": statistics.median(sums),
        "lower_s": lowered - began,
        "first_step_s": compiled - lowered,
        "kernels": len(program.kernels),
        "launches": len(launches),
        "kinds": {k: statistics.median([c[k] for c in kinds]) for k in kinds[0]},
        "counts": Counter(program.kernels[launch.kernel].kind for launch in launches),
        "slowest": [
            [
                medians[k],
                program.kernels[launches[k].kernel].kind,
                launches[k].reference,
                list(launches[k].global_size),
                list(launches[k].local_size or ()),
                [list(program.tensors[t].shape) for t in launches[k].tensors][:6],
                launches[k].nbytes,
                launches[k].flops,
            ]
            for k in slowest
        ],
    }


def measure_torch(case: Case) -> dict[str, float]:
    """Return the first loss and the milliseconds of PyTorch's step."""
    model, (x, y) = case.model.to(DEVICE), (t.to(DEVICE) for t in case.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = case.loss(model(x), y)
        loss.backward()
        optimizer.step()
        if not losses:
            losses.append(loss.item())
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    return {"torch_loss": losses[0], "torch_ms": _median(step, STEPS + 2)}


def measure(name: str, target: str, *, small: bool) -> dict[str, object]:
    """Return the figures of one case."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    case = cases(small=small)[name]()
    theirs = copy_of(case)
    return {"name": name, **measure_torchedge(case, target), **measure_torch(theirs), "torch": DEVICE}


def copy_of(case: Case) -> Case:
    """Return a case with weights of its own."""
    import copy

    return Case(copy.deepcopy(case.model), case.batch, case.loss)


def show(row: dict) -> None:
    """Print one case."""
    if "error" in row:
        print(f"{row['name']}: {(row['error'].splitlines() or ['ended'])[-1]}")
        return
    ratio = row["wall_ms"] / row["torch_ms"]
    off = abs(row["loss"] - row["torch_loss"]) / max(1e-9, abs(row["torch_loss"]))
    print(
        f"{row['name']} on {row['device']}: {row['wall_ms']:.2f} ms ({row['kernels_ms']:.2f} ms in kernels, "
        f"{row['host_ms']:.2f} ms of the host; with parts of the arena {row['parts_ms']:.2f} and "
        f"{row['parts_host_ms']:.2f} ms), "
        f"PyTorch {row['torch_ms']:.2f} ms ({row['torch']}), {ratio:.2f} times; "
        f"{row['kernels']} kernels, {row['launches']} launches, "
        f"lowered in {row['lower_s']:.1f} s, first step {row['first_step_s']:.1f} s; loss off by {off:.0e}"
    )
    for kind, ms in sorted(row["kinds"].items(), key=lambda item: -item[1])[:9]:
        print(f"    {ms:9.3f} ms  {row['counts'][kind]:4d} x {kind}")
    for ms, kind, reference, sizes, group, shapes, nbytes, flops in row["slowest"][:6]:
        rate = f"{nbytes / ms / 1e6:.0f} GB/s, {flops / ms / 1e6:.0f} GFLOP/s"
        print(f"      {ms:9.3f} ms  {kind}: {reference}; {sizes} by {group}; {rate}; {shapes}")


def main() -> None:
    """Measure what is missing and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases, or `networks` or `cases` for all of them")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines: figures by case")
    parser.add_argument("--target", default="", help="device class to lower for, by default the device's")
    parser.add_argument("--small", action="store_true", help="sizes that suit a processor")
    parser.add_argument("--seconds", type=float, default=240, help="longest time of one case")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.target, small=arguments.small)))
        return
    known = list(cases(small=arguments.small))
    wanted = [n for name in arguments.names or known for n in _names(name, known)]
    rows = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()]
        if arguments.out.exists()
        else []
    )
    finished = {row["name"]: row for row in rows if "error" not in row}
    for name in wanted:
        if name not in finished:
            with arguments.out.open("a") as file:
                row = _child(name, arguments)
                file.write(json.dumps(row) + "\n")
            finished[name] = row
        show(finished[name])
        sys.stdout.flush()


def _names(name: str, known: list[str]) -> list[str]:
    if name == "networks":
        return list(NETWORKS)
    if name == "cases":
        return [n for n in known if n not in NETWORKS]
    if name not in known:
        raise SystemExit(f"no case {name!r}; expected networks, cases or some of {', '.join(known)}")
    return [name]


def _child(name: str, arguments: argparse.Namespace) -> dict:
    command = [
        sys.executable,
        __file__,
        "--out",
        str(arguments.out),
        "--child",
        name,
        "--target",
        arguments.target,
    ]
    command += ["--small"] if arguments.small else []
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "error": f"took longer than {arguments.seconds:.0f} s"}
    if ended.returncode:
        return {"name": name, "error": ended.stderr[-3000:]}
    row: dict = json.loads(ended.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
