"""Time whole training steps by kinds of kernels, beside PyTorch on the same device.

    python benchmarks/lowering_steps.py --out steps.jsonl  # everything, on the first OpenCL device
    python benchmarks/lowering_steps.py --out steps.jsonl networks  # networks at batch 16 x 224 px
    python benchmarks/lowering_steps.py --out steps.jsonl --tuners fixed model measured --jobs 4 networks
    python benchmarks/lowering_steps.py --out small.jsonl --small  # small sizes, for a processor

Each case runs in a process of its own; `--jobs` of them lower and compile by one tuner at once, then one
after the other measures, before the next tuner begins. Rows that are in --out already are only printed, so
that a run that was cut goes on where it ended.
The optimizer is SGD with momentum, float32. torchedge, by each tuner: medians of the steps' wall time, of the
time in which the host hands the launches over, and of the sum of the kernels' own times; seconds to lower and
to compile, beside the other jobs; numbers of kernels and launches; how far the first loss is from PyTorch's,
and all first gradients from those in float64 (norm of the errors over norm). PyTorch: the median wall time of
a step, on CUDA with TF32 off where it is there. Below a case stand its kinds of kernels and its slowest
launches.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from harness import Worker, options_of, read_rows, taken_ms
from oracles.step_networks import FSRCNN, GroupNormUNet, Recurrent, SmallGPT, without_dropout
from torch import nn

if TYPE_CHECKING:
    from torchedge.graphs.steps import Step
    from torchedge.lowering.programs import Program
    from torchedge.lowering.tuning import KernelCandidate
    from torchedge.runtime import Executor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 7
"""Steps that are timed."""
LISTED = 15
"""Slowest launches of a program that a row holds."""
TOGETHER = 2000
"""Most kernels that are compiled before the first one is timed."""
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass
class Case:
    """A model, one batch and the loss."""

    model: nn.Module
    batch: Batch
    loss: Loss


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
    return Case(Recurrent(kind, 128, 128), (torch.randn(16, steps, 128), torch.randn(16, 128)), _squares)


def vision(name: str, batch: int, side: int) -> Case:
    """Return a network of torchvision without dropout, and random images."""
    from torchedge.tracing.vision import import_torchvision

    sized = {"image_size": side} if name.startswith("vit") else {}
    model = without_dropout(getattr(import_torchvision().models, name)(**sized))
    data = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    return Case(model, data, nn.functional.cross_entropy)


def _unet(batch: int, side: int) -> Case:
    data = torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side)
    return Case(GroupNormUNet(32), data, _squares)


def _fsrcnn(batch: int, side: int) -> Case:
    return Case(
        FSRCNN(), (torch.randn(batch, 1, side, side), torch.randn(batch, 1, 2 * side, 2 * side)), _squares
    )


def _gpt(batch: int, tokens: int) -> Case:
    x = torch.randint(0, 8192, (batch, tokens))

    def loss(output: dict[str, torch.Tensor], goal: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), goal)

    return Case(SmallGPT(8192, 384, 6, tokens, heads=6), (x, x.roll(-1, 1).flatten()), loss)


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
    for name in NETWORKS[:-3]:
        by_name[name] = lambda name=name: vision(name, batch, side)
    by_name["unet"] = lambda: _unet(batch, side)
    by_name["fsrcnn"] = lambda: _fsrcnn(batch, side // 2)
    by_name["gpt"] = lambda: _gpt(batch, 32 if small else 256)
    return by_name


NETWORKS = (
    "resnet18", "mobilenet_v2", "efficientnet_b0", "densenet121", "convnext_tiny", "swin_t", "vit_b_16",
    "unet", "fsrcnn", "gpt",
)  # fmt: skip


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


@dataclass
class Variant:
    """A program of a case: what chose its schedules, and how long lowering and compiling took."""

    tuner: str
    program: Program
    lower_s: float
    compile_s: float


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the processes of all cases share."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lowered_by(tuner: str, step: Step, arguments: argparse.Namespace) -> Variant:
    """Return a step's program, compiled. tuner: fixed, model or measured, with "-image" for textures."""
    from torchedge.devices import match_device
    from torchedge.errors import TorchedgeError
    from torchedge.lowering.assembly import lower
    from torchedge.lowering.targets import TARGETS, target_for, with_tuner
    from torchedge.opencl import compile_kernels, open_context
    from torchedge.runtime import Executor
    from torchedge.runtime.kernel_times import CachedTimes

    context = open_context()
    device, kind = context.device, tuner.removesuffix("-image")
    plain = TARGETS[arguments.target] if arguments.target else target_for(device, "fixed")
    chosen = with_tuner(plain, match_device(device.name) if device.kind != "cpu" else None, kind)
    if kind != tuner:
        chosen = replace(chosen, storage="image")
    times = CachedTimes(context)

    def timer(kernels: Sequence[Sequence[KernelCandidate]]) -> list[list[float]]:
        texts = {s.kernel.name: s.kernel.source for kernel in kernels for of, _ in kernel for s in of}
        if len(texts) > TOGETHER and len(kernels) > 1:  # what is timed stays known if the run is cut
            return [ms for kernel in kernels for ms in timer([kernel])]
        with suppress(TorchedgeError):
            compile_kernels(context, texts)
        with locked(arguments.out.with_suffix(".lock")):
            return times(kernels)

    began = time.perf_counter()
    program = lower(step, chosen, timer=timer if kind == "measured" else None)
    ended = time.perf_counter()
    Executor(program).close()
    return Variant(tuner, program, ended - began, time.perf_counter() - ended)


def measure_variant(
    variant: Variant, case: Case, weights: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]
) -> dict[str, object]:
    """Return what a step takes, and how far its first gradients are from exact ones."""
    from torchedge.runtime import Executor

    program, arrays = variant.program, [t.numpy() for t in case.batch]
    with Executor(program, profile=True) as executor:
        executor.load(weights)
        loss = float(executor.run(*arrays)[0])
        states = {name: executor.read(f"optimizer.{name}.momentum_buffer") for name in exact}
        sums, kinds, each = [], [], []
        for _ in range(STEPS):
            executor.launch()
            times = executor.timings()
            sums.append(sum(t.ns for t in times) / 1e6)
            kinds.append(Counter())
            for t in times:
                kinds[-1][t.kind] += t.ns / 1e6
            each.append([t.ns / 1e6 for t in times])
        device = executor.context.device.name
    with Executor(program) as executor:
        executor.load(weights)
        executor.run(*arrays)
        wall, host = _launched(executor)
    medians = [statistics.median(column) for column in zip(*each, strict=True)]
    launches = program.launches
    slowest = sorted(range(len(launches)), key=lambda k: -medians[k])[:LISTED]
    return {
        "tuner": variant.tuner,
        "device": device,
        "loss": loss,
        "gradients_off": gradients_off(states, exact),
        "wall_ms": wall,
        "host_ms": host,
        "kernels_ms": statistics.median(sums),
        "lower_s": variant.lower_s,
        "compile_s": variant.compile_s,
        "kernels": len(program.kernels),
        "launches": len(launches),
        "images": sum(tensor.layout.storage == "image" for tensor in program.tensors),
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
        "each": [[round(ms, 5), launch.reference] for ms, launch in zip(medians, launches, strict=True)],
    }


def gradients_off(gradients: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> float:
    """Return the norm of all gradients' errors over that of all gradients."""
    errors = sum(float(np.square(gradients[name] - exact[name]).sum()) for name in exact)
    return float(np.sqrt(errors / sum(float(np.square(g).sum()) for g in exact.values())))


def measure_torch(case: Case, exact: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Return the first loss, its gradients' error, the ms of PyTorch's step, and its slowest kernels."""
    model, (x, y) = case.model.to(DEVICE), (t.to(DEVICE) for t in case.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss(model(x), y)
        loss.backward()
        optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return loss

    first = step().item()
    off = gradients_off(gradients_of(model), exact)
    step(), step()
    ms = statistics.median(taken_ms(step, STEPS + 2))
    row = {"torch": DEVICE, "torch_loss": first, "torch_gradients_off": off, "torch_ms": ms}
    if DEVICE == "cuda":
        with torch.profiler.profile(record_shapes=True) as profile:
            step()
        table = sorted(profile.key_averages(True), key=lambda e: -e.self_device_time_total)[:LISTED]
        row["torch_slowest"] = [
            [e.self_device_time_total / 1e3, e.key[:80], e.count, str(e.input_shapes)] for e in table
        ]
    return row


def gradients_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the gradients of a model's parameters in float64."""
    return {name: p.grad.double().cpu().numpy() for name, p in model.named_parameters()}


def exact_gradients(case: Case) -> dict[str, np.ndarray]:
    """Return the gradients of the first step, computed in float64."""
    model = case.model.double().to(DEVICE)
    x, y = (t.double().to(DEVICE) if t.is_floating_point() else t.to(DEVICE) for t in case.batch)
    case.loss(model(x), y).backward()
    return gradients_of(model)


def child(pipe: Connection, name: str, tuners: Sequence[str], arguments: argparse.Namespace) -> None:
    """For each tuner: lower and compile a case, say so, and answer what then comes with a row."""
    from torchedge.lowering.rules import all_rules
    from torchedge.tracing.steps import capture_step

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    case = cases(small=arguments.small)[name]()
    theirs, double = copy_of(case), copy_of(case)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9)
    captured = capture_step(
        case.model, case.batch[:1], targets=case.batch[1:], loss=case.loss, optimizer=optimizer,
        keep=frozenset(all_rules()),
    )  # fmt: skip
    weights = {name: tensor.detach().numpy() for name, tensor in captured.tensors.items()}
    exact: dict[str, np.ndarray] = {}
    row: dict[str, object] = {"name": name}
    for tuner in tuners:
        variant = lowered_by(tuner, captured.step, arguments)
        pipe.send("ready")
        pipe.recv()
        if not exact:
            exact = exact_gradients(double)
            row.update(measure_torch(theirs, exact))
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
        pipe.send({**row, **measure_variant(variant, case, weights, exact)})


def copy_of(case: Case) -> Case:
    """Return a case with weights of its own."""
    return Case(copy.deepcopy(case.model), case.batch, case.loss)


def show(row: dict, *, kernels: bool) -> None:
    """Print one row, with its kinds of kernels and slowest launches."""
    off = abs(row["loss"] - row["torch_loss"]) / max(1e-9, abs(row["torch_loss"]))
    print(
        f"{row['name']} on {row['device']}, {row['tuner']}: {row['wall_ms']:.2f} ms "
        f"({row['kernels_ms']:.2f} ms in kernels, {row['host_ms']:.2f} ms of the host), "
        f"PyTorch {row['torch_ms']:.2f} ms ({row['torch']}), {row['wall_ms'] / row['torch_ms']:.2f} times; "
        f"{row['kernels']} kernels, {row['launches']} launches, {row['images']} images, "
        f"lowered in {row['lower_s']:.1f} s, compiled in {row['compile_s']:.1f} s; loss off by {off:.0e}, "
        f"gradients by {row['gradients_off']:.0e} (PyTorch {row['torch_gradients_off']:.0e})"
    )
    if not kernels:
        return
    for kind, ms in sorted(row["kinds"].items(), key=lambda item: -item[1])[:6]:
        print(f"    {ms:9.3f} ms  {row['counts'][kind]:4d} x {kind}")
    for ms, kind, reference, sizes, group, shapes, nbytes, flops in row["slowest"][:6]:
        rate = f"{nbytes / ms / 1e6:.0f} GB/s, {flops / ms / 1e6:.0f} GFLOP/s"
        print(f"      {ms:9.3f} ms  {kind}: {reference}; {sizes} by {group}; {rate}; {shapes}")


def main() -> None:
    """Measure what is missing and print everything."""
    parser = options_of(__doc__)
    parser.add_argument(
        "names", nargs="*", help="cases, `networks` or `cases`; with tuners of their own: gpt=fixed,measured"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines: figures by case and tuner")
    parser.add_argument(
        "--target",
        default="",
        help="device class to lower for, without limits; by default the device's own target",
    )
    parser.add_argument("--tuners", nargs="+", default=["fixed"], help="fixed, model, measured; -image")
    parser.add_argument("--small", action="store_true", help="sizes that suit a processor")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are lowered and compiled at once")
    parser.add_argument("--seconds", type=float, default=240, help="longest time of all cases")
    arguments = parser.parse_args()
    known = list(cases(small=arguments.small))
    tuners: dict[str, list[str]] = {}
    for name, _, own in (word.partition("=") for word in arguments.names or known):
        for each in _names(name, known):
            tuners[each] = own.split(",") if own else arguments.tuners
    finished: dict[str, list[dict]] = {name: [] for name in tuners}
    for row in read_rows(arguments.out):
        finished.setdefault(row["name"], []).append(row)
    missing = {
        name: [tuner for tuner in own if tuner not in [row["tuner"] for row in finished[name]]]
        for name, own in tuners.items()
    }
    names = [name for name, own in missing.items() if own]
    deadline = time.monotonic() + arguments.seconds
    for first in range(0, len(names), arguments.jobs):
        chosen = names[first : first + arguments.jobs]
        workers = {name: Worker(child, name, missing[name], arguments) for name in chosen}
        while workers:  # all prepare at once, then one after the other measures
            workers = {name: one for name, one in workers.items() if answer(name, one, deadline)}
            with locked(arguments.out.with_suffix(".lock")):
                for name, one in workers.items():
                    if row := answer(name, one, deadline, "measure"):
                        finished[name].append(row)
                        with arguments.out.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    for name in tuners:
        for row in finished[name]:
            show(row, kernels=row is finished[name][-1])


def answer(name: str, worker: Worker, deadline: float, *question: str) -> Any:  # noqa: ANN401 - "ready" or a row
    """Return what a case says next, asked or not; None where it has ended or takes too long."""
    try:
        return worker.answer(max(0.1, deadline - time.monotonic()), *question)
    except EOFError:
        return None
    except TimeoutError:
        print(f"{name} took too long", flush=True)
        return None


def _names(name: str, known: list[str]) -> list[str]:
    if name == "networks":
        return list(NETWORKS)
    if name == "cases":
        return [n for n in known if n not in NETWORKS]
    if name not in known:
        raise SystemExit(f"no case {name!r}; expected networks, cases or some of {', '.join(known)}")
    return [name]


if __name__ == "__main__":
    main()
