"""Where the time of a model's first step goes, and what a second process spares.

    python benchmarks/first_step.py                                  # ResNet-18, MobileNetV2 and others
    python benchmarks/first_step.py resnet18 --batch-size 16 --side 224
    python benchmarks/first_step.py resnet18 --compile --batch-size 4 --side 64    # by torch.compile
    python benchmarks/first_step.py whisper-tiny                     # an inference
    python benchmarks/first_step.py --collect                        # garbage is collected while lowering

Each process trains a torchvision model for two steps (`Trainer`, SGD with momentum), or runs an inference
twice. The first process begins with empty caches, the second one with those that it left; PoCL's own cache
lies in the same temporary folder. Results of both must be the same to the bit. Stages: importing (PyTorch,
torchedge, the model); capture; lowering, of which rendering kernels; build (the driver's compiler, in
processes where that is much work); load (allocation, weights, the program where it needs no capture); enqueue
(what else the first run takes beside the second one, where PoCL compiles what is left; with --compile also
all that torch.compile does and the loading). Where the second process captures or lowers again, what the log
says about it stands below it. Seconds of wall time, then of processor time of all threads and
processes, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness import options_of


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


BEGAN = time.perf_counter(), processor_seconds()
MODELS = ("resnet18", "mobilenet_v2", "efficientnet_b0", "densenet121")
INFERENCES = ("whisper-tiny",)
STAGES = ("import", "capture", "lower", "render", "build", "load", "enqueue", "first step", "second run")


class Clock:
    """Wall and processor seconds of stages, which may run several times; `inside` ones count twice."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {stage: [0.0, 0.0] for stage in STAGES}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        began = time.perf_counter(), processor_seconds()
        yield
        self.add(name, time.perf_counter() - began[0], processor_seconds() - began[1])

    def add(self, name: str, wall: float, processor: float) -> None:
        """Add seconds to a stage."""
        self.stages[name][0] += wall
        self.stages[name][1] += processor

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls count for a stage."""

        def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            with self.stage(name):
                return function(*args, **options)

        return call


def child(name: str, batch_size: int, side: int, device: str | None, by_compile: bool) -> dict[str, Any]:
    """Run a model twice in this process; returns seconds by stage and numbers of kernels."""
    clock, reasons = Clock(), Messages()
    logging.getLogger("torchedge").addHandler(reasons)
    logging.getLogger("torchedge").setLevel(logging.DEBUG)
    import torch

    from torchedge.lowering import assembly
    from torchedge.runtime import executors

    torch.manual_seed(0)
    prepare = inference if name in INFERENCES else compiling if by_compile else training
    open_model = prepare(clock, name, batch_size, side, device)
    clock.add("import", time.perf_counter() - BEGAN[0], processor_seconds() - BEGAN[1])
    assembly.write_kernels = clock.timed("render", assembly.write_kernels)  # type: ignore[assignment]
    executors.compile_kernels = clock.timed("build", executors.compile_kernels)  # type: ignore[assignment]
    began = time.perf_counter(), processor_seconds()
    describe, run = open_model()
    opened = time.perf_counter() - began[0], processor_seconds() - began[1]
    inside = [sum(clock.stages[stage][k] for stage in ("capture", "lower", "build")) for k in (0, 1)]
    runs, results = [], []
    for _ in range(2):
        start = time.perf_counter(), processor_seconds()
        results.append(run())
        runs.append((time.perf_counter() - start[0], processor_seconds() - start[1]))
    first, second = runs
    for k in (0, 1):
        later = sum(clock.stages[stage][k] for stage in ("capture", "lower", "build")) - inside[k]
        clock.stages["load"][k] = opened[k] - inside[k]
        clock.stages["enqueue"][k] = first[k] - second[k] - later
        clock.stages["first step"][k] = opened[k] + first[k]
        clock.stages["second run"][k] = second[k]
    reports = describe()
    return {
        "stages": clock.stages,
        "launches": sum(report.launches for report in reports),
        "kernels": sum(report.kernels for report in reports),
        "device": reports[0].device,
        "reasons": reasons.texts,
        "results": [float(result).hex() for result in results],
    }


class Messages(logging.Handler):
    """What is logged, as texts."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Add the text of a message."""
        self.texts.append(record.getMessage())


def training(clock: Clock, name: str, batch_size: int, side: int, device: str | None) -> Callable[[], Any]:
    """Return a function that opens a Trainer and returns its reports and its step."""
    import torch

    from torchedge.runtime import trainers

    model, x, y = problem(name, batch_size, side)
    trainers.lowered = clock.timed("lower", trainers.lowered)
    trainers.capture_step = clock.timed("capture", trainers.capture_step)

    def open_model() -> tuple[Any, Callable[[], float]]:
        trainer = trainers.Trainer(
            model,
            x,
            y,
            loss=torch.nn.functional.cross_entropy,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            device=device,
        )
        return trainer.report, lambda: trainer.step(x, y)

    return open_model


def compiling(clock: Clock, name: str, batch_size: int, side: int, device: str | None) -> Callable[[], Any]:
    """Return a function that opens nothing and returns the reports and the step of torch.compile."""
    import torch

    import torchedge
    from torchedge.runtime import backends

    model, x, y = problem(name, batch_size, side)
    options = {"device": device} if device else {}
    compiled = torch.compile(model, backend="torchedge", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    backends.lowered = clock.timed("lower", backends.lowered)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return lambda: (torchedge.program_reports, step)


def problem(name: str, batch_size: int, side: int) -> tuple[Any, Any, Any]:
    """Return a torchvision model, random images and labels."""
    import torch

    from torchedge.tracing.vision import import_torchvision

    model = getattr(import_torchvision().models, name)(num_classes=10)
    return model, torch.randn(batch_size, 3, side, side), torch.randint(10, (batch_size,))


def inference(clock: Clock, name: str, batch_size: int, side: int, device: str | None) -> Callable[[], Any]:
    """Return a function that opens an inference on zeros, with random weights."""
    import numpy as np
    from streaming_runs import whisper_tiny

    from torchedge.lowering.inference import capture_inference_step, lower_inference
    from torchedge.lowering.targets import target_for
    from torchedge.opencl import open_context
    from torchedge.runtime import Executor
    from torchedge.runtime.executors import report_on

    model, example = whisper_tiny()

    def open_model() -> tuple[Any, Callable[[], float]]:
        with clock.stage("capture"):
            captured = capture_inference_step(model.eval(), (), example)
        chosen = open_context(device).device
        with clock.stage("lower"):
            program = lower_inference(captured, target_for(chosen)).program
        executor = Executor(program, chosen)
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        inputs = [program.tensors[index] for index in program.inputs]
        zeros = [np.zeros(tensor.shape, tensor.dtype) for tensor in inputs]
        return lambda: [report_on(executor)], lambda: float(
            np.sum(executor.step(*zeros)[0], dtype=np.float64)
        )

    return open_model


def main() -> int:
    """Run both processes of each model and print what each took."""
    parser = options_of(__doc__, batch_size=2, side=224)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--device", help="OpenCL device: a number, a type or a part of its name")
    parser.add_argument("--compile", action="store_true", help="by torch.compile instead of Trainer")
    parser.add_argument("--collect", action="store_true", help="let Python collect garbage while lowering")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        (name,) = arguments.models
        if arguments.collect:
            gc.disable = lambda: None
        print(
            json.dumps(child(name, arguments.batch_size, arguments.side, arguments.device, arguments.compile))
        )
        return 0
    options = [f"--batch-size={arguments.batch_size}", f"--side={arguments.side}"]
    options += [f"--device={arguments.device}"] if arguments.device else []
    options += ["--compile"] * arguments.compile + ["--collect"] * arguments.collect
    print(f"{'':<28}" + "".join(f"{stage:>12}" for stage in STAGES))
    different = 0
    for name in arguments.models:
        different += not compare(name, options)
    return 1 if different else 0


def compare(name: str, options: list[str]) -> bool:
    """Run a model in two processes and print both; returns whether their results are the same to the bit."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHEDGE_CACHE": folder, "POCL_CACHE_DIR": os.path.join(folder, "pocl")}
        own["CUDA_CACHE_PATH"] = own["POCL_CACHE_DIR"]
        os.mkdir(own["POCL_CACHE_DIR"])
        for process in ("first", "second"):
            command = [sys.executable, __file__, name, *options, "--child"]
            ended = subprocess.run(
                command, env={**os.environ, **own}, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                print(ended.stderr[-2000:])
                return False
            results.append(json.loads(ended.stdout.splitlines()[-1]))
            show(name, process, results[-1])
    return bool(results[0]["results"] == results[1]["results"])


def show(name: str, process: str, result: dict[str, Any]) -> None:
    """Print one process: wall seconds, then processor seconds."""
    if process == "first":
        print(f"{name} on {result['device']}: {result['launches']} launches of {result['kernels']} kernels")
    for k, kind in enumerate(("wall", "processor")):
        row = "".join(f"{result['stages'][stage][k]:12.2f}" for stage in STAGES)
        print(f"  {process + ' process, ' + kind:<26}{row}", flush=True)
    for text in result["reasons"] if process == "second" else ():
        print(f"    {text}")


if __name__ == "__main__":
    raise SystemExit(main())
