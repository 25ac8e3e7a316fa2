"""`torchedge run`: bundles run through OpenCL, one or several in turn."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli.console import MIB, WORDS, Progress, answer, json_wanted, print_table, print_wrapped
from torchedge.cli.options import (
    PATH,
    PICTURE,
    SIZE,
    WHOLE,
    Choice,
    OutputFile,
    command,
    opencl_device,
    refuse_given,
)
from torchedge.errors import InputError, OpenCLError
from torchedge.opencl.foreign_caches import pocl_cache
from torchedge.storage.amounts import bytes_of
from torchedge.storage.pictures import save_picture
from torchedge.storage.processes import child_environment
from torchedge.texts import number, shorten

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchedge.bundles.bundle import Bundle, Runner
    from torchedge.bundles.manifests import Port
    from torchedge.bundles.queues import BundleQueue

    Arrays = list[npt.NDArray[Any]]

_ROWS = 12
"""Losses and kernels that are printed."""
_FIGURES = ("min", "mean", "max")
_HOST_OPTIONS = ("reads", "loading", "trace", "plot")
"""Options of Python's executor alone."""
_TEXT_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed")
"""Options of a continued text alone."""
_OF_ONE_BUNDLE = ("settings", "save", "method", "prompt_ids", "prompt", "over")
"""Options that several bundles do not take."""
_OF_A_RUN = ("out", "steps", "settings", "save", "timed", "trace", "plot", "over", "memory_limit", "reads")
"""Options that a description does not take."""
_HEADER_BYTES = 2**16


@command(
    "run",
    examples=[
        "torchedge run squeezenet",
        "torchedge run squeezenet --input image.npy --out scores.npy --device gpu",
        "torchedge run gpt --prompt-ids 15,7,42 --max-new-tokens 16 --temperature 0.8",
        "torchedge run gpt --prompt 'Once upon a time' --tokenizer tokenizer.json",
        "torchedge run small --random --steps 100 --save trained.safetensors --time",
        "torchedge run detector depth --random --memory-limit 200MiB --iterations 10 --plot memory.png",
        "torchedge run squeezenet --random --over adb --runner build/android-arm64/torchedge-run",
    ],
)
@click.argument("bundles", type=PATH, nargs=-1, required=True, metavar="BUNDLE...")
@click.option("--input", "-i", "inputs", multiple=True, metavar="[NAME=]FILE", help="A .npy file; repeat it.")
@click.option("--random", is_flag=True, help="Feed random numbers (zeros for integers).")
@click.option(
    "--out", "-o", type=OutputFile(".npy", ".npz"), metavar="FILE", help="Write outputs (.npy, .npz)."
)
@click.option("--steps", "--iterations", "-n", "steps", type=WHOLE, default=1, help="Number of runs.")
@click.option("--method", metavar="NAME", help="Method of the bundle to run. [default: its first]")
@click.option(
    "--prompt-ids", metavar="IDS", help="Continue these tokens, as 1,2,3 (a language model's bundle)."
)
@click.option("--prompt", metavar="TEXT", help="Continue this text, by its bundle's tokenizer or another.")
@click.option("--tokenizer", type=PATH, metavar="FILE", help="With --prompt: a tokenizer.json.")
@click.option(
    "--max-new-tokens",
    type=WHOLE,
    help="Largest number of tokens to generate. [default: 64, or as many as its caches hold]",
)
@click.option("--temperature", type=float, default=0.0, help="Draw tokens; 0 takes the most likely one.")
@click.option("--top-k", type=WHOLE, help="Draw among this many of the most likely tokens.")
@click.option("--top-p", type=float, help="Draw among the most likely tokens of this probability together.")
@click.option(
    "--stop",
    metavar="IDS",
    help="Tokens that end the text; with --prompt names of them, too. [default with --prompt: the model's]",
)
@click.option("--seed", type=int, default=0, help="Seed of drawn tokens.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a hyperparameter, as lr=0.1."
)
@click.option(
    "--save",
    type=OutputFile(".safetensors"),
    metavar="FILE",
    help="Write the trained weights (.safetensors).",
)
@click.option("--time", "timed", is_flag=True, help="Print the time of steps and kernels.")
@click.option("--memory-limit", type=SIZE, help="Most memory a run allocates: stream weights if needed.")
@click.option(
    "--reads",
    type=Choice(["plain", "mmap", "direct"]),
    default="plain",
    help="How streamed weights are read; direct: past the page cache.",
)
@click.option(
    "--loading",
    type=Choice(["copy", "kernel", "slot"]),
    default="copy",
    help="How they get into the device's memory: copy commands, loading kernels, slots of kernels.",
)
@click.option(
    "--trace",
    type=OutputFile(".json"),
    metavar="FILE",
    help="Write a streaming run as a Perfetto trace (.json).",
)
@click.option("--plot", type=PICTURE, metavar="FILE", help="Draw the memory of a streaming run over time.")
@click.option("--isolated", is_flag=True, help="Run in a child process: a driver that fails ends only it.")
@click.option("--time-limit", type=float, default=600.0, metavar="SECONDS", help="Of an --isolated run.")
@click.option(
    "--over",
    metavar="WAY",
    help="Run on a device without Python: local, ssh://[user@]host[:port], adb or adb:SERIAL.",
)
@click.option("--runner", type=PATH, metavar="FILE", help="The torchedge-run built for the device of --over.")
@click.option("--trust", is_flag=True, help="Also run kernels that the bundle's source is not lowered to.")
@opencl_device
def run(bundles: tuple[Path, ...], isolated: bool, time_limit: float, **given: Any) -> int:  # noqa: ANN401 - the other options
    """Run an exported bundle through OpenCL, or several in turn.

    Every file in it is checked first, and its kernels are compared with those that its source gives. Without
    inputs, the bundle and its inputs are described. --input is one array each, in order or as NAME=FILE, of
    the bundle's shape and data type (float64 serves as float32). A training step prints the loss of each
    step; --save writes the weights by PyTorch's names. --out writes the last output (.npy), or all of them
    (.npz). `torchedge devices --opencl` lists devices.

    A bundle that was exported with --memory-limit streams its weights, and any bundle does under a
    --memory-limit that its weights exceed; --time, --trace and --plot then also give the measured memory,
    disk reads and copies. The exit status is 3 if no plan stays within the limit.

    With --isolated, the run is a process of its own, and a driver that aborts or hangs is one clear error.

    --prompt-ids continues a text of tokens by a bundle of torchedge.export_lm, and prints the new tokens;
    --prompt continues words and prints words.

    Several bundles of inferences run one after the other within one --memory-limit, --iterations times. They
    are planned together: the last launches of one load the first weights of the next. Input NAME of the
    bundle in place k is called k/NAME. Latency, memory and loads of each run are printed; --trace writes the
    last iteration, --plot draws all of them.

    With --over, the bundle and the native runner of --runner are copied to the device, as far as files
    changed, and run there; --device is then a part of a driver's name there, and --save writes the whole
    state (weights, optimizer state, hyperparameters).
    """
    from torchedge.bundles.bundle import Bundle
    from torchedge.bundles.queues import BundleQueue

    if not 0 < time_limit < math.inf:
        raise InputError(f"--time-limit is {time_limit}; expected a number of seconds above 0")
    if isolated:
        words = click.get_current_context().meta[WORDS]
        own = {k for k, word in enumerate(words) if word == "--isolated" or word.startswith("--time-limit")}
        own |= {k + 1 for k, word in enumerate(words) if word == "--time-limit"}
        return run_isolated([word for k, word in enumerate(words) if k not in own], time_limit)
    refuse_given(("time_limit",), "without --isolated; add that, or omit it")
    settings = SimpleNamespace(**given)
    _check(settings, several=len(bundles) > 1)
    opened = [Bundle.open(path, trust=settings.trust) for path in bundles]
    queue = BundleQueue(opened) if len(opened) > 1 else None
    if settings.prompt_ids is not None or settings.prompt is not None:
        return _continue_text(opened[0], settings)
    source = queue or opened[0].method(settings.method)
    inputs, outputs = source.inputs, source.outputs
    if len(outputs) > 1 and settings.out is not None and settings.out.suffix.lower() != ".npz":
        raise InputError(f"--out is {settings.out}; expected a file that ends in .npz for several outputs")
    if inputs and not settings.inputs and not settings.random:
        refuse_given(_OF_A_RUN, "without inputs, which a run takes; add --input FILE or --random")
        _describe(opened, inputs)
        return 0
    arrays = _random(inputs) if settings.random else _read(inputs, settings.inputs)
    if settings.over is not None:
        results, document = _run_over(opened[0], arrays, settings)
    elif queue is None:
        results, document = _run_one(opened[0], arrays, settings)
    else:
        results, document = _run_queue(queue, arrays, settings)
    if settings.out is not None:
        _write(settings.out, outputs, results)
    answer(document, lambda: _print(document) if queue is None else _print_queue(document))
    return 0


def _run_one(bundle: Bundle, arrays: Arrays, options: SimpleNamespace) -> tuple[Arrays, dict[str, Any]]:
    """Run one bundle; return the last outputs, and its figures as plain data."""
    from torchedge.runtime.executors import kernel_times
    from torchedge.storage.tensors import write_tensors

    trace, plot = options.trace, options.plot
    profile = options.timed or trace is not None or plot is not None
    with bundle.place(
        options.device,
        memory_limit=options.memory_limit,
        reads=options.reads,
        loading=options.loading,
        profile=profile,
    ) as runner:
        if (trace or plot) and not runner.streams:
            raise InputError(
                f"{'--trace' if trace else '--plot'} is given, and all weights of {bundle.path} stay on the "
                "device; expected a streaming run: pass a smaller --memory-limit"
            )
        for name, value in map(_setting, options.settings):
            runner.set(name, value)
        outputs, losses, times = _run_steps(bundle, runner, arrays, options)
        document: dict[str, Any] = {
            "model": bundle.manifest.model,
            "mode": bundle.manifest.mode,
            "device": runner.executor.context.device.name,
            "steps": options.steps,
            "outputs": _summaries(bundle.method(options.method).outputs, outputs),
        }
        if bundle.trains:
            document["losses"] = losses
        if options.timed:
            document["step_ms"] = statistics.median(times)
            document["kernels"] = [*map(asdict, kernel_times(runner.timings()))]
        if profile and runner.streams:
            measured = runner.measured()
            document["streaming"] = {**measured.document(), "text": str(measured)}
            if trace is not None:
                measured.trace(trace)
            if plot is not None:
                save_picture(measured.plot(), plot)
        if options.save is not None:
            write_tensors(options.save, runner.state_dict())
    return outputs, document


def _continue_text(bundle: Bundle, options: SimpleNamespace) -> int:
    """Print the tokens or the text that follow a prompt."""
    from torchedge.bundles.generation import Sampling

    words, stream = None, None
    if options.prompt is None:
        prompt = _token_ids("--prompt-ids", options.prompt_ids)
        stop: Sequence[int] = _token_ids("--stop", options.stop or "")
    else:
        words = bundle.tokenizer(options.tokenizer)
        stop = bundle.manifest.ends
        if options.stop is not None:
            names = options.stop.replace(",", " ").split()
            stop = words.numbers([int(name) if name.isdecimal() else name for name in names])
        prompt = words.tokens(options.prompt)
        if sys.stdout.isatty() and not json_wanted():  # a text is read as it grows
            stream = words.pieces(partial(print, end="", flush=True))
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    with bundle.place(options.device, memory_limit=options.memory_limit) as runner:
        start = time.perf_counter()
        tokens = runner.generate(prompt, options.max_new_tokens, sampling, stop, options.seed, stream)
        seconds = time.perf_counter() - start
        document: dict[str, Any] = {
            "model": bundle.manifest.model,
            "device": runner.executor.context.device.name,
            "prompt": len(prompt),
            "tokens": tokens,
        }
    if words is not None:
        document["text"] = words.text(tokens)
    if options.timed:
        document["ms"] = 1000 * seconds

    def show() -> None:
        if stream is not None:
            print()
        else:
            print(document.get("text", ",".join(map(str, tokens))))
        if options.timed:
            print(f"{len(tokens)} tokens after a prompt of {len(prompt)} in {number(1000 * seconds)} ms")

    answer(document, show)
    return 0


def _token_ids(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{name} is {text[:80]!r}; expected whole numbers, as 1,2,3") from None


def _check(options: SimpleNamespace, *, several: bool) -> None:
    """Raise InputError for options that do not go together."""
    if options.inputs and options.random:
        raise InputError("--random is given beside --input; expected one of them")
    if several:
        refuse_given(_OF_ONE_BUNDLE, "with several bundles; expected it with one")
        if options.memory_limit is None and (options.inputs or options.random):
            raise InputError("several bundles are given without --memory-limit; expected one for all of them")
    if options.over is None:
        refuse_given(("runner",), "without --over; expected --over local, ssh://HOST or adb")
    elif options.runner is None:
        raise InputError(
            f"--over {options.over} is given without --runner; expected torchedge-run, built for that device "
            "(docs/runner.md)"
        )
    else:
        elsewhere = (*_HOST_OPTIONS, "method", "prompt_ids", "prompt")
        refuse_given(elsewhere, "with --over, which runs steps of the first method: omit it")
    if options.prompt is None:
        refuse_given(("tokenizer",), "without --prompt, the text to continue: give it, or omit it")
    if options.prompt_ids is None and options.prompt is None:
        refuse_given(
            _TEXT_OPTIONS, "without --prompt-ids or --prompt, what to continue: give one, or omit it"
        )
    else:
        if options.prompt_ids is not None:
            refuse_given(("prompt",), "beside --prompt-ids; expected one of them")
        others = (*_HOST_OPTIONS, "method", "inputs", "random", "out", "steps", "settings", "save")
        given = "--prompt" if options.prompt_ids is None else "--prompt-ids"
        refuse_given(others, f"with {given}, which is only continued: omit one of them")


def _run_over(bundle: Bundle, arrays: Arrays, options: SimpleNamespace) -> tuple[Arrays, dict[str, Any]]:
    """Run one bundle on a device without Python; return the last outputs, and its figures as plain data."""
    from torchedge.profiling.campaigns.transports import open_transport
    from torchedge.profiling.remote_runs import run_there
    from torchedge.storage import cache_folder

    transport = open_transport(options.over, None, cache_folder() / "device")
    limit = None if options.memory_limit is None else bytes_of(options.memory_limit)
    with Progress(options.steps, f"run {bundle.manifest.model}", remaining=True) as progress:
        progress.doing(f"copying to {options.over}")

        def heard(loss: float) -> None:
            progress.note(f"loss {loss:.4g}")
            progress.step()

        run = run_there(
            transport, options.runner, bundle, arrays, steps=options.steps,
            settings=dict(map(_setting, options.settings)), device=options.device or "",
            memory_limit=limit, save=options.save, heard=heard,
        )  # fmt: skip
    outputs = list(run.outputs)
    document: dict[str, Any] = {
        "model": bundle.manifest.model,
        "mode": bundle.manifest.mode,
        "device": run.figures["device"],
        "over": options.over,
        "steps": options.steps,
        "outputs": _summaries(bundle.outputs, outputs),
        "pushed": list(run.pushed),
        "figures": dict(run.figures),
    }
    if bundle.trains:
        document["losses"] = list(run.losses)
    return outputs, document


def _describe(bundles: Sequence[Bundle], inputs: Sequence[Port]) -> None:
    documents = [bundle.document() for bundle in bundles]

    def show() -> None:
        print("\n\n".join(map(str, bundles)))
        files = " ".join(f"--input {port.name}=FILE" for port in inputs)
        print_wrapped(f"run {'it' if len(bundles) == 1 else 'them'} with {files}, or --random")

    answer(documents[0] if len(documents) == 1 else {"bundles": documents}, show)


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"--set is {text}; expected NAME=VALUE with a number, such as lr=0.1") from None


def _random(ports: Sequence[Port]) -> Arrays:
    import numpy as np

    draw = np.random.default_rng(0)
    return [port.drawn(draw) for port in ports]


def _read(ports: Sequence[Port], inputs: Sequence[str]) -> Arrays:
    """Return the arrays in files, in the bundle's order."""
    names = [port.name for port in ports]
    expected = ", ".join(f"{port.name} {port.dtype}{list(port.shape)}" for port in ports)
    files: dict[str, str] = {}
    for text in inputs:
        name, equals, file = text.partition("=")
        if equals and name not in names and not os.path.lexists(text):
            raise InputError(f"--input {text}: the bundle has no input {name!r}; expected {expected}")
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
        reason = "" if "pickle" in reason else f" ({reason})"  # numpy's advice is to load pickles
        raise InputError(f"{path}: is no .npy file of numbers{reason}; make it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: holds several arrays; expected one, as numpy.save writes it")
    return array


def _write(path: Path, ports: Sequence[Port], outputs: Arrays) -> None:
    import numpy as np

    from torchedge.storage.documents import write_bytes

    file = io.BytesIO()
    if path.suffix.lower() == ".npz":
        named = {port.name: array for port, array in zip(ports, outputs, strict=True)}
        np.savez(file, **named)  # type: ignore[arg-type]
    else:
        np.save(file, outputs[0])
    write_bytes(path, file.getvalue())


def _run_steps(
    bundle: Bundle, runner: Runner, arrays: Arrays, options: SimpleNamespace
) -> tuple[Arrays, list[float], list[float]]:
    """Return the last outputs, the loss of each step, and the ms of each step."""
    losses, times = [], []
    outputs: Arrays = []
    with Progress(options.steps, f"run {bundle.manifest.model}", remaining=True) as progress:
        for _ in range(options.steps):
            start = time.perf_counter()
            outputs = runner.step(*arrays, method=options.method)
            times.append(1000 * (time.perf_counter() - start))
            if bundle.trains:
                losses.append(float(outputs[0]))
                progress.note(f"loss {losses[-1]:.4g}")
            progress.step()
    return outputs, losses, times


def _summaries(ports: Sequence[Port], outputs: Arrays) -> list[dict[str, Any]]:
    return [_summary(port, array) for port, array in zip(ports, outputs, strict=True)]


def _summary(port: Port, output: npt.NDArray[Any]) -> dict[str, Any]:
    import numpy as np

    summary: dict[str, Any] = {"name": port.name, "shape": list(output.shape), "dtype": str(output.dtype)}
    if output.size and output.dtype.kind in "fiu":
        mean = float(output.mean(dtype=np.float64))
        summary |= {"min": float(output.min()), "mean": mean, "max": float(output.max())}
    if output.ndim == 2 and output.dtype.kind == "f" and output.shape[1] > 1:
        summary["argmax"] = output.argmax(axis=1)[:16].tolist()
    return summary


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
        _print_outputs(result["outputs"])
    if "figures" in result:
        figures = result["figures"]
        print_wrapped(
            f"{result['over']}: {len(result['pushed'])} files copied; median step "
            f"{number(figures['median_step_ms'])} ms; device memory "
            f"{number(figures['allocated_bytes'] / MIB)} MiB"
        )
    if "streaming" in result:
        print(result["streaming"]["text"])
    if "step_ms" in result:
        print(f"median step {number(result['step_ms'])} ms; kernels of the last step:")
        _print_kernels(result["kernels"])


def _print_outputs(outputs: list[dict[str, Any]]) -> None:
    rows = []
    for output in outputs:
        figures = [f"{output[key]:.5g}" if key in output else "-" for key in _FIGURES]
        rows.append([output["name"], output["dtype"], "x".join(map(str, output["shape"])) or "1", *figures])
    print_table(["output", "dtype", "shape", *_FIGURES], rows, left=3)
    for output in outputs:
        if "argmax" in output:
            print_wrapped(f"{output['name']}: highest at {', '.join(map(str, output['argmax']))}")


def _print_kernels(kernels: list[dict[str, Any]]) -> None:
    total = sum(row["ms"] for row in kernels) or 1.0
    rows = [
        [
            shorten(row["kernel"], 31),
            shorten(row["kind"], 17),
            str(row["launches"]),
            f"{row['ms']:.3f}",
            f"{100 * row['ms'] / total:.1f}",
        ]
        for row in kernels[:_ROWS]
    ]
    print_table(["kernel", "kind", "launches", "ms", "%"], rows, left=2)


# several bundles --------------------------------------------------------------------------------------------


def _run_queue(queue: BundleQueue, arrays: Arrays, options: SimpleNamespace) -> tuple[Arrays, dict[str, Any]]:
    """Run bundles in turn; return the last outputs, and the figures of all runs as plain data."""
    from torchedge.bundles.queues import draw_runs
    from torchedge.runtime.executors import kernel_times

    runs, walls = [], []
    outputs: Arrays = []
    with Progress(1 + options.steps, "run", remaining=True) as progress:
        progress.doing("planning all bundles together")
        limit = bytes_of(options.memory_limit)
        with queue.place(
            options.device, memory_limit=options.memory_limit, reads=options.reads, loading=options.loading
        ) as runner:
            progress.step()
            for iteration in range(1, options.steps + 1):
                progress.doing(f"iteration {iteration}")
                start = time.perf_counter()
                outputs = runner.step(*arrays)
                walls.append(1000 * (time.perf_counter() - start))
                runs.append(runner.measured())
                progress.step()
            last, plan = runs[-1].measured, runner.plan
            document: dict[str, Any] = {
                "models": list(queue.names),
                "device": last.device,
                "iterations": options.steps,
                "memory_limit_bytes": limit,
                "plan": plan.status,
                "initialisation_ms": last.initialisation_ms,
                "iteration_ms": [run.measured.execution_ms for run in runs],
                "wall_ms": walls,
                "predicted_ms": plan.timeline.execution_ms,
                "preloaded_bytes": plan.schedule.memory.preloaded_bytes,
                "allocated_bytes": last.allocated_bytes,
                "allocated": dict(last.allocated),
                "average_bytes": round(statistics.mean(run.memory.average.total for run in runs)),
                "runs": [
                    {"iteration": iteration, **asdict(model)}
                    for iteration, run in enumerate(runs, 1)
                    for model in run.models
                ],
                "outputs": _summaries(queue.outputs, outputs),
            }
            if options.timed:
                document["kernels"] = [*map(asdict, kernel_times(runner.executor.timings()))]
    if options.trace is not None:
        last.trace(options.trace)
    if options.plot is not None:
        save_picture(draw_runs(runs, limit), options.plot)
    return outputs, document


def _print_queue(result: dict[str, Any]) -> None:
    iterations = result["iterations"]
    several = f", {iterations} iterations" if iterations > 1 else ""
    print_wrapped(f"{', '.join(result['models'])} in turn on {result['device']}{several}")
    rows = [
        [
            str(run["iteration"]),
            shorten(run["model"], 24),
            *(f"{run[key]:,.1f}" for key in ("latency_ms", "stall_ms")),
            *(f"{run[key] / MIB:,.1f}" for key in ("loaded_bytes", "ahead_bytes", "peak_bytes")),
        ]
        for run in result["runs"]
    ]
    print_table(["run", "model", "ms", "waiting", "loaded MiB", "ahead", "peak MiB"], rows, left=2)
    print_wrapped(
        f"loading first {number(result['initialisation_ms'])} ms, an iteration "
        f"{number(statistics.median(result['iteration_ms']))} ms (median; predicted "
        f"{number(result['predicted_ms'])}); memory {number(result['allocated_bytes'] / MIB)} MiB allocated "
        f"of {number(result['memory_limit_bytes'] / MIB)}, {number(result['preloaded_bytes'] / MIB)} of it "
        f"preloaded weights, {number(result['average_bytes'] / MIB)} in use on average"
    )
    _print_outputs(result["outputs"])
    if "kernels" in result:
        print("kernels of the last iteration:")
        _print_kernels(result["kernels"])


# a process of its own, whose end by a signal or a hang is one clear error -----------------------------------


def run_isolated(words: Sequence[str], seconds: float) -> int:
    """Run the `torchedge` command with these arguments in a child process, and return its exit status.

    Raises OpenCLError: a signal ended the child, or it ran for longer than `seconds` and was ended.
    """
    sys.stdout.flush()
    child = subprocess.Popen(
        [sys.executable, "-m", "torchedge", *words], env=child_environment(), start_new_session=True
    )
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        raise OpenCLError(
            f"the run took longer than {seconds:g} s and was ended: a kernel or the driver did not return; "
            "pass a larger --time-limit if it only needs more time"
        ) from None
    finally:
        if child.poll() is None:  # end it with all its processes
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
            child.wait()
    if status < 0:
        raise OpenCLError(
            f"signal {-status} ({signal.strsignal(-status)}) ended the run: the OpenCL driver or a kernel "
            f"failed; if other bundles fail, too, empty the driver's cache (PoCL's is {pocl_cache()})"
        )
    return status
