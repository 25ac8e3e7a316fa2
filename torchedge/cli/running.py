"""`torchedge run`: a bundle on an OpenCL device, on arrays from files."""

from __future__ import annotations

import argparse
import io
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import add_json, whole
from torchedge.cli.console import Progress, check_target, number, print_json, print_table, print_wrapped
from torchedge.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from torchedge.bundles.bundle import Bundle, Runner
    from torchedge.bundles.manifests import Port

NAME = "run"
SUMMARY = "run a bundle through OpenCL"
DESCRIPTION = """\
Run a bundle that `torchedge export` wrote on an OpenCL device, after checking
every file in it. Without inputs print what the bundle is and what it takes.

--input gives one array each, in order or as NAME=FILE; shape and dtype are those
that the bundle tells (float64 serves as float32). A training step prints the
loss of each of --steps; --save then writes the trained weights, by PyTorch's
names. --output writes the last output (.npy), or all of them (.npz)."""

_ROWS = 12
_FIGURES = ("min", "mean", "max")
_HEADER_BYTES = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the folder")
    parser.add_argument(
        "--input", "-i", action="append", default=[], metavar="[NAME=]FILE", help="a .npy file; repeat it"
    )
    parser.add_argument("--random", action="store_true", help="feed random numbers (integers: zeros)")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="write outputs (.npy, .npz)")
    parser.add_argument("--steps", "-n", type=whole, default=1, metavar="N", help="run N times (default 1)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a hyperparameter, such as lr=0.1"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the weights (.safetensors)")
    parser.add_argument("--time", action="store_true", help="how long steps and kernels take")
    parser.add_argument("--device", "-d", help="OpenCL device: number, type or part of its name")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run and print."""
    from torchedge.bundles.bundle import Bundle
    from torchedge.storage.tensors import write_tensors

    bundle = Bundle.open(arguments.bundle)
    _check(arguments, bundle)
    if not arguments.input and not arguments.random and bundle.inputs:
        return _show(bundle, arguments.json)
    arrays = _inputs(bundle, arguments)
    with bundle.place(arguments.device, profile=arguments.time) as runner:
        for name, value in map(_setting, arguments.set):
            runner.set(name, value)
        outputs, losses, times = _steps(bundle, runner, arrays, arguments.steps)
        result: dict[str, Any] = {
            "model": bundle.manifest.model,
            "mode": bundle.manifest.mode,
            "device": runner.executor.context.device.name,
            "steps": arguments.steps,
            "outputs": [_summary(port, out) for port, out in zip(bundle.outputs, outputs, strict=True)],
        }
        if bundle.trains:
            result["losses"] = losses
        if arguments.time:
            result["step_ms"] = statistics.median(times)
            result["kernels"] = _kernel_times(runner)
        if arguments.save is not None:
            write_tensors(arguments.save, runner.state_dict())
    if arguments.output is not None:
        _write(arguments.output, bundle, outputs)
    if arguments.json:
        print_json(result)
    else:
        _print(result)
    return 0


def _check(arguments: argparse.Namespace, bundle: Bundle) -> None:
    """Refuse before the work what could not be written after it."""
    several = len(bundle.outputs) > 1
    for option, path, suffixes in (
        ("--output", arguments.output, (".npz",) if several else (".npy", ".npz")),
        ("--save", arguments.save, (".safetensors",)),
    ):
        if path is None:
            continue
        if path.suffix.lower() not in suffixes:
            raise InputError(f"{option} {path}: expected a file that ends in {' or '.join(suffixes)}")
        check_target(option, path)
    if arguments.input and arguments.random:
        raise InputError("--random is given beside --input; expected one of them")


def _show(bundle: Bundle, as_json: bool) -> int:
    from torchedge.cli.bundling import document

    if as_json:
        print_json(document(bundle))
        return 0
    print(bundle)
    print("run it with " + " ".join(f"--input {port.name}.npy" for port in bundle.inputs) + ", or --random")
    return 0


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"--set {text}: expected NAME=VALUE with a number, such as lr=0.1") from None


# arrays in and out ------------------------------------------------------------------------------------------


def _inputs(bundle: Bundle, arguments: argparse.Namespace) -> list[npt.NDArray[Any]]:
    """Return the arrays to feed, in the bundle's order."""
    import numpy as np

    ports = bundle.inputs
    if arguments.random:
        draw = np.random.default_rng(0)
        return [
            draw.standard_normal(port.shape).astype(port.dtype)
            if np.dtype(port.dtype).kind == "f"
            else np.zeros(port.shape, port.dtype)
            for port in ports
        ]
    known = {port.name: port for port in ports}
    files: dict[str, str] = {}
    for text in arguments.input:
        name, equals, file = text.partition("=")
        if not equals or name not in known:
            free = [port.name for port in ports if port.name not in files]
            name, file = free[0] if free else "", text
        if not name or name in files:
            raise InputError(f"--input {text}: is one too many; expected {_wanted(ports)}")
        files[name] = file
    if len(files) < len(ports):
        missing = [port.name for port in ports if port.name not in files]
        raise InputError(f"no --input is given for {', '.join(missing)}; expected {_wanted(ports)}")
    return [_array(Path(files[port.name]), port) for port in ports]


def _wanted(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} {port.dtype}{list(port.shape)}" for port in ports)


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
        named = {port.name: out for port, out in zip(bundle.outputs, outputs, strict=True)}
        np.savez(file, **named)  # type: ignore[arg-type]
    else:
        np.save(file, outputs[0])
    write_bytes(path, file.getvalue())


# running and printing ---------------------------------------------------------------------------------------


def _steps(
    bundle: Bundle, runner: Runner, arrays: list[npt.NDArray[Any]], steps: int
) -> tuple[list[npt.NDArray[Any]], list[float], list[float]]:
    """Return the last outputs, the loss of each step, and how long each took in ms."""
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

    found: dict[str, Any] = {"name": port.name, "shape": list(output.shape), "dtype": str(output.dtype)}
    if output.size and output.dtype.kind in "fiu":
        found |= {
            "min": float(output.min()),
            "mean": float(output.mean(dtype=np.float64)),
            "max": float(output.max()),
        }
    if output.ndim == 2 and output.dtype.kind == "f" and output.shape[1] > 1:
        found["argmax"] = output.argmax(axis=1)[:16].tolist()
    return found


def _kernel_times(runner: Runner) -> list[dict[str, Any]]:
    """Return the kernels of the last step by the time they took, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for item in runner.timings():
        row = found.setdefault(
            item.kernel, {"kernel": item.kernel, "kind": item.kind, "launches": 0, "ms": 0.0}
        )
        row["launches"] += 1
        row["ms"] += item.ns / 1e6
    return sorted(found.values(), key=lambda row: -row["ms"])


def _print(result: dict[str, Any]) -> None:
    step = "training step" if result["mode"] == "train" else "inference"
    several = f", {result['steps']} steps" if result["steps"] > 1 else ""
    print(f"{result['model']}: {step} on {result['device']}{several}")
    if "losses" in result:
        losses = result["losses"]
        shown = losses if len(losses) <= _ROWS else losses[:: -(-len(losses) // _ROWS)]
        print_wrapped(" ".join(f"{loss:.5g}" for loss in shown), first="loss ", rest="     ")
        if shown[-1] != losses[-1]:
            print(f"last {losses[-1]:.5g}")
    else:
        rows = [
            [o["name"], o["dtype"], "x".join(map(str, o["shape"])) or "1", *[_shown(o, k) for k in _FIGURES]]
            for o in result["outputs"]
        ]
        print_table(["output", "dtype", "shape", *_FIGURES], rows, left=3)
        for out in result["outputs"]:
            if "argmax" in out:
                print(f"{out['name']}: highest at {', '.join(map(str, out['argmax']))}")
    if "step_ms" in result:
        print(f"median step {number(result['step_ms'])} ms; kernels of the last step:")
        total = sum(row["ms"] for row in result["kernels"]) or 1.0
        rows = [
            [
                row["kernel"][:31],
                row["kind"][:17],
                str(row["launches"]),
                f"{row['ms']:.3f}",
                f"{100 * row['ms'] / total:.1f}",
            ]
            for row in result["kernels"][:_ROWS]
        ]
        print_table(["kernel", "kind", "launches", "ms", "%"], rows, left=2)


def _shown(output: dict[str, Any], key: str) -> str:
    return f"{output[key]:.5g}" if key in output else "-"
