"""`torchedge export` and `torchedge run`: bundles of kernels and weights, written and run."""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli import options
from torchedge.cli.console import (
    Progress,
    check_target,
    number,
    print_json,
    print_table,
    print_wrapped,
    shorten,
    warn,
)
from torchedge.cli.options import MODEL_HELP, PATH, SIZE, WHOLE, Whole, command, load_named
from torchedge.errors import InputError
from torchedge.storage.pictures import check_picture, save_picture

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from torchedge.bundles.bundle import Bundle, Runner
    from torchedge.bundles.manifests import Port
    from torchedge.graphs import Mode

LOSSES = ("cross-entropy", "mse", "model")
OPTIMIZERS = ("sgd-momentum", "sgd", "adam", "adamw")
_RATES = {"sgd": 0.01, "sgd-momentum": 0.01, "adam": 0.001, "adamw": 0.001}
_TRAINING_ONLY = ("loss", "optimizer", "lr", "accumulation")
_MAX_WEIGHTS = 2**36
_ROWS = 12
"""Losses and kernels that are printed."""
_FIGURES = ("min", "mean", "max")
_HEADER_BYTES = 2**16


# export -----------------------------------------------------------------------------------------------------


@command(
    "export",
    notes=f"{MODEL_HELP} The last two hold no weights that could be exported.",
    examples=[
        "torchedge export squeezenet1_1 --device mali --out squeezenet --weights state.safetensors",
        "torchedge export nets.py:small -d adreno -o small --mode train --optimizer adam --lr 0.001",
    ],
)
@click.argument("model")
@click.option("--out", "-o", type=PATH, required=True, metavar="FOLDER", help="Folder to make.")
@options.device
@options.batch_size
@options.input_size
@click.option(
    "--mode", type=click.Choice(["train", "infer"]), default="infer", help="Training step or inference."
)
@click.option("--weights", type=PATH, metavar="FILE", help="A .safetensors file of the model's state.")
@click.option("--seed", type=Whole(0), default=0, help="Seed of random weights and dropout.")
@click.option(
    "--loss", type=click.Choice(LOSSES), help="With --mode train: the loss. [default: cross-entropy]"
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="With --mode train: the optimizer. [default: sgd-momentum]",
)
@click.option("--lr", type=float, metavar="RATE", help="With --mode train: the learning rate.")
@click.option("--accumulation", type=WHOLE, help="With --mode train: batches to an update. [default: 1]")
@click.option(
    "--precision",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    help="Of large intermediates and of an inference's weights; kernels compute in float32.",
)
@click.option("--memory-limit", type=SIZE, help="Stream weights: the most memory a run allocates.")
@click.option("--onnx/--no-onnx", default=True, help="Also write model.onnx.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
def export(
    model: str,
    out: Path,
    device: str | None,
    batch_size: int,
    input_size: tuple[int, ...] | None,
    mode: Mode,
    weights: Path | None,
    seed: int,
    precision: Any,  # noqa: ANN401 - a Literal
    memory_limit: int | None,
    onnx: bool,
    force: bool,
    as_json: bool,
    **training: Any,  # noqa: ANN401 - loss, optimizer, lr, accumulation
) -> None:
    """Write a model as OpenCL kernels and weights for a device.

    A bundle is a folder with the model's kernels, their launches, the weights as the device will hold them,
    and model.onnx. With --mode train, a run is a whole training step: forward, backward, update. The device
    need not be connected: the program is checked against the limits in its profile. Without --weights, the
    model's own code draws them. With --memory-limit, the bundle has a streaming plan: runs load weights while
    they compute. The exit status is 3 if no plan stays within the limit. `torchedge run` runs the bundle.
    """
    from torchedge import api
    from torchedge.bundles.exporting import STAGES, check_free

    _check_training(mode, training)
    check_free(out, force)
    target = api.choose_device(device)
    module, label = _load(model, weights, seed)
    example = _example(module, input_size, batch_size, seed)
    step = _step(model, module, example, training) if mode == "train" else {}
    stages = [stage for stage in STAGES if stage != "model.onnx" or onnx]
    with Progress(len(stages), f"export {label}") as progress, contextlib.redirect_stdout(sys.stderr):

        def tell(stage: str) -> None:
            if stage != stages[0]:
                progress.step()
            progress.doing(stage)

        bundle = api.export(
            module,
            example,
            out=out,
            device=target,
            mode=mode,
            seed=seed,
            name=label,
            onnx=onnx,
            accumulation=training["accumulation"] or 1,
            precision=precision,
            memory_limit=memory_limit,
            force=force,
            progress=tell,
            **step,
        )
    if as_json:
        print_json(_document(bundle))
    else:
        print(bundle)
        print(f"written to {bundle.path}")


def _document(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle's manifest, and the counts of its program, as plain data."""
    from torchedge.bundles.manifests import MANIFESTS

    return {
        "path": str(bundle.path),
        **MANIFESTS.document(bundle.manifest),
        "kernels": len(bundle.program.kernels),
        "launches": len(bundle.program.launches),
    }


def _check_training(mode: str, training: dict[str, Any]) -> None:
    for name in _TRAINING_ONLY:
        if training[name] is not None and mode != "train":
            raise InputError(f"--{name} is given without --mode train; add that, or leave --{name} out")
    rate = training["lr"]
    if rate is not None and not 0 <= rate < math.inf:
        raise InputError(f"--lr is {rate}; expected a number from 0 on")


def _load(text: str, weights: Path | None, seed: int) -> tuple[torch.nn.Module, str]:
    import torch

    torch.manual_seed(seed)
    model, label = load_named(text, weights=True)
    if weights is None:
        if not text.rpartition(":")[0].endswith(".py"):
            warn(f"the weights of {label} are random (seed {seed}); --weights FILE sets them")
        return model, label
    from torchedge.storage.tensors import read_tensors

    arrays, _ = read_tensors(weights, max_bytes=_MAX_WEIGHTS, finite=False)
    try:
        model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{weights}: does not fit {label} ({reason[:200]}); expected its state_dict"
        ) from error
    return model, label


def _example(model: torch.nn.Module, input_size: tuple[int, ...] | None, batch_size: int, seed: int) -> Any:  # noqa: ANN401 - any pytree
    """Return inputs of the batch size: random numbers, and zeros for integers."""
    import torch
    from torch.utils._pytree import tree_map

    from torchedge.tracing.capturing import arguments_of, resized

    args, kwargs, _ = arguments_of(model, getattr(model, "example_inputs", None), input_size)
    generator = torch.Generator().manual_seed(seed)

    def filled(leaf: Any) -> Any:  # noqa: ANN401 - a leaf of any kind
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)

    args, kwargs = tree_map(filled, resized((args, kwargs), batch_size))
    return kwargs if kwargs and not args else args


def _step(text: str, model: torch.nn.Module, example: Any, training: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - any pytree
    """Return loss, targets and optimizer as `torchedge.export` takes them."""
    import torch

    name = training["optimizer"] or OPTIMIZERS[0]
    rate = _RATES[name] if training["lr"] is None else training["lr"]
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError(f"{text} has no parameter that requires a gradient; expected some to train")
    optimizer: torch.optim.Optimizer
    if name in ("adam", "adamw"):
        optimizer = (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(trained, lr=rate)
    else:
        optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9 if name == "sgd-momentum" else 0.0)
    step: dict[str, Any] = {"optimizer": optimizer}
    if training["loss"] == "model":
        step["loss"] = "model"
    elif training["loss"] == "mse":
        from torchedge.bundles.onnx_models import eager_outputs

        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        outputs = eager_outputs(model, args, kwargs)
        step |= {"loss": torch.nn.functional.mse_loss, "targets": torch.zeros_like(outputs[0])}
    return step


# run --------------------------------------------------------------------------------------------------------


@command(
    "run",
    examples=[
        "torchedge run squeezenet",
        "torchedge run squeezenet --input image.npy --out scores.npy --device gpu",
        "torchedge run small --random --steps 100 --save trained.safetensors --time",
    ],
)
@click.argument("bundle", type=PATH)
@click.option("--input", "-i", "inputs", multiple=True, metavar="[NAME=]FILE", help="A .npy file; repeat it.")
@click.option("--random", is_flag=True, help="Feed random numbers (zeros for integers).")
@click.option("--out", "-o", type=PATH, metavar="FILE", help="Write outputs (.npy, .npz).")
@click.option("--steps", "-n", type=WHOLE, default=1, help="Number of runs.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a hyperparameter, as lr=0.1."
)
@click.option("--save", type=PATH, metavar="FILE", help="Write the trained weights (.safetensors).")
@click.option("--time", "timed", is_flag=True, help="Print the time of steps and kernels.")
@click.option("--memory-limit", type=SIZE, help="Most memory a run allocates: stream weights if needed.")
@click.option(
    "--reads",
    type=click.Choice(["plain", "mmap", "direct"]),
    default="plain",
    help="How streamed weights are read; direct: past the page cache.",
)
@click.option(
    "--loading",
    type=click.Choice(["copy", "kernel", "slot"]),
    default="copy",
    help="How they get into the device's memory: copy commands, loading kernels, slots of kernels.",
)
@click.option("--trace", type=PATH, metavar="FILE", help="Write a streaming run as a Perfetto trace (.json).")
@click.option("--plot", type=PATH, metavar="FILE", help="Draw the memory of a streaming run over time.")
@click.option("--device", "-d", help="OpenCL device: its number, type or a part of its name.")
def run(
    bundle: Path,
    inputs: tuple[str, ...],
    random: bool,
    out: Path | None,
    steps: int,
    settings: tuple[str, ...],
    save: Path | None,
    timed: bool,
    memory_limit: int | None,
    reads: Any,  # noqa: ANN401 - a Literal
    loading: Any,  # noqa: ANN401 - a Literal
    trace: Path | None,
    plot: Path | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Run an exported bundle through OpenCL.

    Every file in it is checked first. Without inputs, the bundle and its inputs are described. --input is one
    array each, in order or as NAME=FILE, of the bundle's shape and data type (float64 serves as float32). A
    training step prints the loss of each step; --save writes the weights by PyTorch's names. --out writes the
    last output (.npy), or all of them (.npz). `torchedge devices --opencl` lists devices.

    A bundle that was exported with --memory-limit streams its weights, and any bundle of an inference does
    under a --memory-limit that its weights exceed; --time, --trace and --plot then also give the measured
    memory, disk reads and copies. The exit status is 3 if no plan stays within the limit.
    """
    from torchedge.bundles.bundle import Bundle
    from torchedge.storage.tensors import write_tensors

    opened = Bundle.open(bundle)
    _check_files(opened, out, save, trace, plot)
    if inputs and random:
        raise InputError("--random is given beside --input; expected one of them")
    if not inputs and not random and opened.inputs:
        _describe(opened, as_json)
        return
    arrays = _random(opened.inputs) if random else _read(opened.inputs, inputs)
    profile = timed or trace is not None or plot is not None
    with opened.place(
        device, memory_limit=memory_limit, reads=reads, loading=loading, profile=profile
    ) as runner:
        if (trace or plot) and not runner.streams:
            raise InputError(
                f"{'--trace' if trace else '--plot'} is given, and all weights of {bundle} stay on the "
                "device; expected a streaming run: pass a smaller --memory-limit"
            )
        for name, value in map(_setting, settings):
            runner.set(name, value)
        outputs, losses, times = _run_steps(opened, runner, arrays, steps)
        result: dict[str, Any] = {
            "model": opened.manifest.model,
            "mode": opened.manifest.mode,
            "device": runner.executor.context.device.name,
            "steps": steps,
            "outputs": [_summary(port, array) for port, array in zip(opened.outputs, outputs, strict=True)],
        }
        if opened.trains:
            result["losses"] = losses
        if timed:
            result["step_ms"] = statistics.median(times)
            result["kernels"] = _kernel_times(runner)
        if profile and runner.streams:
            measured = runner.measured()
            result["streaming"] = {**measured.document(), "text": str(measured)}
            if trace is not None:
                measured.trace(trace)
            if plot is not None:
                save_picture(measured.plot(), plot)
        if save is not None:
            write_tensors(save, runner.state_dict())
    if out is not None:
        _write(out, opened, outputs)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _check_files(
    bundle: Bundle, out: Path | None, save: Path | None, trace: Path | None, plot: Path | None
) -> None:
    """Refuse files that could not be written, before the work."""
    several = len(bundle.outputs) > 1
    for option, path, suffixes in (
        ("--out", out, (".npz",) if several else (".npy", ".npz")),
        ("--save", save, (".safetensors",)),
        ("--trace", trace, (".json",)),
    ):
        if path is not None:
            if path.suffix.lower() not in suffixes:
                raise InputError(f"{option} is {path}; expected a file that ends in {' or '.join(suffixes)}")
            check_target(option, path)
    if plot is not None:
        check_picture("--plot", plot)


def _describe(bundle: Bundle, as_json: bool) -> None:
    if as_json:
        print_json(_document(bundle))
        return
    print(bundle)
    files = " ".join(f"--input {port.name}.npy" for port in bundle.inputs)
    print_wrapped(f"run it with {files}, or --random")


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"--set is {text}; expected NAME=VALUE with a number, such as lr=0.1") from None


def _random(ports: Sequence[Port]) -> list[npt.NDArray[Any]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return [
        draw.standard_normal(port.shape).astype(port.dtype)
        if np.dtype(port.dtype).kind == "f"
        else np.zeros(port.shape, port.dtype)
        for port in ports
    ]


def _read(ports: Sequence[Port], inputs: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Return the arrays in files, in the bundle's order."""
    names = [port.name for port in ports]
    expected = ", ".join(f"{port.name} {port.dtype}{list(port.shape)}" for port in ports)
    files: dict[str, str] = {}
    for text in inputs:
        name, equals, file = text.partition("=")
        if not equals or name not in names:
            free = [name for name in names if name not in files]
            name, file = free[0] if free else "", text
        if not name or name in files:
            raise InputError(f"--input {text} is one too many; expected {expected}")
        files[name] = file
    missing = [name for name in names if name not in files]
    if missing:
        raise InputError(f"no --input is given for {', '.join(missing)}; expected {expected}")
    return [_array(Path(files[port.name]), port) for port in ports]


def _array(path: Path, port: Port) -> npt.NDArray[Any]:
    import numpy as np

    from torchedge.storage.documents import read_bytes

    most = 8 * max(1, int(np.prod(port.shape, dtype=np.int64))) * 2 + _HEADER_BYTES
    try:
        array = np.load(io.BytesIO(read_bytes(path, max_bytes=most)), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"{path}: is no .npy file of numbers ({reason}); write it with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: holds several arrays; expected one, as numpy.save writes it")
    return array


def _write(path: Path, bundle: Bundle, outputs: list[npt.NDArray[Any]]) -> None:
    import numpy as np

    from torchedge.storage.documents import write_bytes

    file = io.BytesIO()
    if path.suffix.lower() == ".npz":
        named = {port.name: array for port, array in zip(bundle.outputs, outputs, strict=True)}
        np.savez(file, **named)  # type: ignore[arg-type]
    else:
        np.save(file, outputs[0])
    write_bytes(path, file.getvalue())


def _run_steps(
    bundle: Bundle, runner: Runner, arrays: list[npt.NDArray[Any]], steps: int
) -> tuple[list[npt.NDArray[Any]], list[float], list[float]]:
    """Return the last outputs, the loss of each step, and the ms of each step."""
    losses, times = [], []
    outputs: list[npt.NDArray[Any]] = []
    with Progress(steps, f"run {bundle.manifest.model}", remaining=True) as progress:
        for _ in range(steps):
            start = time.perf_counter()
            outputs = runner.step(*arrays)
            times.append(1000 * (time.perf_counter() - start))
            if bundle.trains:
                losses.append(float(outputs[0]))
                progress.note(f"loss {losses[-1]:.4g}")
            progress.step()
    return outputs, losses, times


def _summary(port: Port, output: npt.NDArray[Any]) -> dict[str, Any]:
    import numpy as np

    summary: dict[str, Any] = {"name": port.name, "shape": list(output.shape), "dtype": str(output.dtype)}
    if output.size and output.dtype.kind in "fiu":
        mean = float(output.mean(dtype=np.float64))
        summary |= {"min": float(output.min()), "mean": mean, "max": float(output.max())}
    if output.ndim == 2 and output.dtype.kind == "f" and output.shape[1] > 1:
        summary["argmax"] = output.argmax(axis=1)[:16].tolist()
    return summary


def _kernel_times(runner: Runner) -> list[dict[str, Any]]:
    """Return the kernels of the last step by their time, longest first."""
    kernels: dict[str, dict[str, Any]] = {}
    for item in runner.timings():
        fresh = {"kernel": item.kernel, "kind": item.kind, "launches": 0, "ms": 0.0}
        row = kernels.setdefault(item.kernel, fresh)
        row["launches"] += 1
        row["ms"] += item.ns / 1e6
    return sorted(kernels.values(), key=lambda row: -row["ms"])


def _print(result: dict[str, Any]) -> None:
    step = "training step" if result["mode"] == "train" else "inference"
    several = f", {result['steps']} steps" if result["steps"] > 1 else ""
    print_wrapped(f"{result['model']}: {step} on {result['device']}{several}")
    if "losses" in result:
        losses = result["losses"]
        shown = losses if len(losses) <= _ROWS else losses[:: -(-len(losses) // _ROWS)]
        print_wrapped(" ".join(f"{loss:.5g}" for loss in shown), first="loss ", rest="     ")
        if shown[-1] != losses[-1]:
            print(f"last {losses[-1]:.5g}")
    else:
        rows = []
        for output in result["outputs"]:
            figures = [f"{output[key]:.5g}" if key in output else "-" for key in _FIGURES]
            rows.append(
                [output["name"], output["dtype"], "x".join(map(str, output["shape"])) or "1", *figures]
            )
        print_table(["output", "dtype", "shape", *_FIGURES], rows, left=3)
        for output in result["outputs"]:
            if "argmax" in output:
                print_wrapped(f"{output['name']}: highest at {', '.join(map(str, output['argmax']))}")
    if "streaming" in result:
        print(result["streaming"]["text"])
    if "step_ms" in result:
        print(f"median step {number(result['step_ms'])} ms; kernels of the last step:")
        total = sum(row["ms"] for row in result["kernels"]) or 1.0
        rows = [
            [
                shorten(row["kernel"], 31),
                shorten(row["kind"], 17),
                str(row["launches"]),
                f"{row['ms']:.3f}",
                f"{100 * row['ms'] / total:.1f}",
            ]
            for row in result["kernels"][:_ROWS]
        ]
        print_table(["kernel", "kind", "launches", "ms", "%"], rows, left=2)
