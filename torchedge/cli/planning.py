"""`torchedge plan`: streaming plans of models, queues and instances, and the verification of plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli import options
from torchedge.cli.console import (
    DOES_NOT_FIT,
    MIB,
    Progress,
    answer,
    print_notes,
    print_table,
    print_wrapped,
    table,
    warn,
)
from torchedge.cli.language_rows import print_language_rows
from torchedge.cli.options import (
    MODEL_HELP,
    PATH,
    PICTURE,
    SIZE,
    Choice,
    Command,
    Group,
    OutputFile,
    TextType,
    number_from,
    or_word,
    unsuitable_size,
    whole,
)
from torchedge.errors import InputError, LimitError
from torchedge.storage.amounts import bytes_of
from torchedge.storage.pictures import save_picture
from torchedge.texts import number

if TYPE_CHECKING:
    from torchedge.bundles.language_plans import LanguageRow
    from torchedge.devices import Device
    from torchedge.lowering.programs import Program
    from torchedge.lowering.targets import Precision
    from torchedge.streaming.instances import Instance
    from torchedge.streaming.planning import QueuePlan, StreamingPlan, Tradeoff
    from torchedge.streaming.plans import OverlapPlan
    from torchedge.streaming.simulation import RunTimeline
    from torchedge.streaming.verification import Verification

STRATEGIES = ("always-next", "same-type", "preload-all")
_MODELS = f"{MODEL_HELP} The models that FlashMem was evaluated on have names, too, such as gpt-neo-1.3b."
_NAME = 30
"""Columns of a layer's or a model's name."""
_SHOWN = 20
"""Problems of a plan that are printed."""


@click.group("plan", cls=Group)
def plan() -> None:
    """Plan inference of models that are larger than the memory.

    An overlap plan (FlashMem) lists the weights to load before the first launch, and the chunks of the others
    that are loaded beside each launch. Plans are verified, and their runs on the device predicted. Needs
    torchedge[plan], but for `plan lm`: memory and time of a language model.
    """


_planning = options.all_of(
    options.device,
    options.input_size,
    options.seq_len,
    click.option(
        "--m-peak",
        type=or_word(SIZE, "none"),
        default="500MiB",
        metavar="SIZE|none",
        help="Most in flight beside preloaded weights.",
    ),
    click.option("--chunk", type=SIZE, default="256KiB", help="Unit of loading."),
    options.precision,
    click.option("--effort", type=number_from(0.01, 1000), default=1.0, help="Effort of the solver."),
    click.option("--plot", type=PICTURE, metavar="FILE", help="Draw to a file (.png, .svg, .pdf)."),
)


def _settings(
    device: str | None,
    precision: Precision,
    m_peak: str,
    **shared: Any,  # noqa: ANN401 - chunk, effort, and others of the command
) -> tuple[Device, Precision, dict[str, Any]]:
    """Return the device, the precision, and the options of `plan_program`."""
    from torchedge.api import choose_device
    from torchedge.streaming.rates import derive_rates

    chosen = choose_device(device)
    derive_rates(chosen)  # fail before the model is captured
    return chosen, precision, {"m_peak": None if m_peak == "none" else m_peak, **shared}


_lambda = click.option(
    "--lambda",
    "lam",
    type=number_from(0, 1),
    default=0.9,
    help="Price of preloading; a higher one takes less memory.",
)
_strategy = click.option(
    "--strategy", type=Choice(STRATEGIES), help="A strategy to compare with, in place of the solver."
)
_out = click.option(
    "--out",
    "-o",
    type=OutputFile(".json", ".json.gz"),
    metavar="PLAN",
    help="Write the plan (.json, .json.gz).",
)


# plan model -------------------------------------------------------------------------------------------------


@plan.command(
    "model",
    cls=Command,
    notes=_MODELS,
    examples=[
        "torchedge plan model gpt-neo-1.3b --device adreno-750 --memory-limit 500MiB",
        "torchedge plan model vit -d adreno-750 --layers --plot run.svg --picture gantt",
        "torchedge plan model nets.py:big -d mali --out plan.json --write-instance instance.json",
    ],
)
@click.argument("model")
@click.option("--memory-limit", type=SIZE, help="All that a run allocates. [default: no limit]")
@_lambda
@_planning
@click.option(
    "--fusion",
    type=Choice(["all", "adaptive"]),
    default="all",
    help="Fuse all element-wise values, or keep those apart whose own kernels pay (slower).",
)
@_strategy
@click.option("--layers", is_flag=True, help="Also print what each layer loads.")
@_out
@click.option(
    "--write-instance",
    type=OutputFile(".json", ".json.gz"),
    metavar="FILE",
    help="Write the overlap problem it solves.",
)
@click.option(
    "--picture", type=Choice(["memory", "gantt", "comparison"]), help="What --plot draws. [default: memory]"
)
def _plan_model(
    model: str,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    strategy: str | None,
    layers: bool,
    out: Path | None,
    write_instance: Path | None,
    plot: Path | None,
    picture: Any,  # noqa: ANN401 - a Literal
    **planning: Any,  # noqa: ANN401 - see _settings, and options of `plan_model`
) -> int:
    """Plan which launch of a model loads which weights.

    The memory limit covers all that a run allocates: weights, inputs and outputs, intermediates, staging
    buffers. The exit status is 3 if no plan stays within it; the smallest limit that works is named.
    """
    from torchedge.lowering.inference import capture_model, target_of_device
    from torchedge.streaming.instances import write_instance as write_problem
    from torchedge.streaming.planning import plan_model
    from torchedge.streaming.plans import STRATEGIES, write_plan

    if picture is not None and plot is None:
        raise InputError("--picture is given without --plot; add --plot FILE")
    paths = [path.absolute() for path in (out, write_instance, plot) if path is not None]
    if len(set(paths)) < len(paths):
        raise InputError("--out, --write-instance and --plot name one file twice; expected a file for each")
    device, precision, shared = _settings(**planning)
    try:
        with Progress(1, f"lowering and planning {model}") as progress, unsuitable_size(input_size):
            target = target_of_device(device, precision=precision)
            result = plan_model(
                capture_model(model, input_size=input_size, seq_len=seq_len),
                target,
                device,
                strategy=None if strategy is None else STRATEGIES[strategy],
                **shared,
            )
            progress.step()
    except LimitError as error:
        return _too_small(error)
    if out is not None:
        write_plan(out, result.plan)
    if write_instance is not None:
        write_problem(write_instance, result.instance)
    if plot is not None:
        save_picture(result.plot(picture or "memory"), plot)
    rows = {"layers": result.layers} if layers else {}

    def show() -> None:
        print(result)
        if layers:
            _print_layers(result)

    files = {"written": out, "instance_written": write_instance, "drawn": plot}
    answer(result.summary() | rows, show, **files)
    return 0


def _lower(
    text: str,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    device: Device,
    precision: Precision,
    progress: Progress,
) -> Program:
    from torchedge.lowering.inference import lower_model

    progress.begin(f"lowering {text}")
    with unsuitable_size(input_size):
        return lower_model(text, device, input_size=input_size, seq_len=seq_len, precision=precision)


def _too_small(error: LimitError) -> int:
    document = {"status": "INFEASIBLE", "reason": str(error), "works_bytes": error.works_bytes}
    answer(document, lambda: print_wrapped(str(error)))
    return DOES_NOT_FIT


def _print_layers(result: StreamingPlan) -> None:
    """Print a row for each layer, and below it the chunks that it loads."""
    head = ["layer", "name", "class", "capacity", "loads", "start ms", "takes ms"]
    rows = [
        [
            str(row.number),
            _end(row.name),
            row.load_class,
            f"{row.capacity_chunks:,}",
            f"{row.loaded_chunks:,}",
            f"{row.start_ms:,.1f}",
            f"{row.end_ms - row.start_ms:.2f}",
        ]
        for row in result.layers
    ]
    first, *lines = table(head, rows, left=3, gap=1)
    print(f"\n{first}")
    for line, row in zip(lines, result.layers, strict=True):
        print(line)
        if row.loads:
            print_wrapped(", ".join(row.loads), first=" " * 6, rest=" " * 6)


def _end(name: str) -> str:
    """Return a name, or its end."""
    return name if len(name) <= _NAME else "…" + name[1 - _NAME :]


# plan queue -------------------------------------------------------------------------------------------------


@plan.command(
    "queue",
    cls=Command,
    notes=_MODELS,
    examples=["torchedge plan queue gpt-neo-small vit --device adreno-750 --memory-limit 200MiB"],
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--memory-limit", type=SIZE, required=True, help="All that a run allocates.")
@_lambda
@_planning
def _plan_queue(
    models: tuple[str, ...],
    memory_limit: str,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    plot: Path | None,
    **planning: Any,  # noqa: ANN401 - see _settings
) -> int:
    """Plan models that run one after the other within one memory limit.

    The exit status is 3 if one of them does not fit by itself.
    """
    from torchedge.streaming.planning import plan_queue

    device, precision, shared = _settings(**planning)
    try:
        with Progress(2 * len(models) + 1, "planning") as progress:
            programs = [_lower(text, input_size, seq_len, device, precision, progress) for text in models]
            progress.begin("planning each model, then all together")
            queue = plan_queue(programs, device, memory_limit=memory_limit, progress=progress.step, **shared)
    except LimitError as error:
        return _too_small(error)
    limit = bytes_of(memory_limit)
    if plot is not None:
        from torchedge.streaming.figures import draw_lanes

        save_picture(draw_lanes(queue.lanes, limit_bytes=limit), plot)
    document = _queue_document(queue, limit)
    answer(document, lambda: _print_queue(queue, document), drawn=plot)
    return 0


def _queue_document(queue: QueuePlan, limit: int) -> dict[str, Any]:
    """Return a queue as plain data: bytes, ms."""

    def run(plans: Sequence[StreamingPlan]) -> dict[str, float]:
        return {
            "latency_ms": sum(plan.timeline.latency_ms for plan in plans),
            "initialisation_ms": sum(plan.timeline.initialisation_ms for plan in plans),
            "allocated_bytes": max(plan.timeline.allocated_bytes for plan in plans),
        }

    return {
        "device": queue.together.device.name,
        "memory_limit_bytes": limit,
        "together": run([queue.together]),
        "one_at_a_time": run(queue.alone),
        "models": [
            {
                **plan.summary(),
                "preloaded_bytes": share.preloaded,
                "bytes_loaded_by_models_before": share.carried,
                "bytes_loaded_by_own_launches": share.own,
            }
            for plan, share in zip(queue.alone, queue.shares, strict=True)
        ],
    }


def _print_queue(queue: QueuePlan, document: dict[str, Any]) -> None:
    """Print the loads of each model by time, and the queue's times beside those of one model at a time."""
    names = [plan.program.name for plan in queue.alone]
    limit = number(document["memory_limit_bytes"] / MIB)
    print_wrapped(f"{', '.join(names)} on {document['device']}, one after the other within {limit} MiB")
    rows = [
        [f"{place}. {_end(name)}", *(number(n / MIB) for n in (share.preloaded, share.carried, share.own))]
        for place, (name, share) in enumerate(zip(names, queue.shares, strict=True), 1)
    ]
    print()
    print_table(["MiB of whole chunks", "preloaded", "by models before", "by its own launches"], rows)
    runs = (document["together"], document["one_at_a_time"])
    figures = [
        ["latency, ms", *(f"{run['latency_ms']:,.1f}" for run in runs)],
        ["  initialisation", *(f"{run['initialisation_ms']:,.1f}" for run in runs)],
        ["memory allocated, MiB", *(f"{run['allocated_bytes'] / MIB:,.1f}" for run in runs)],
    ]
    print()
    print_table(["predicted", "planned together", "one at a time"], figures)
    print_notes(*(plan.notes for plan in queue.alone))


# plan sweep -------------------------------------------------------------------------------------------------


@plan.command(
    "sweep",
    cls=Command,
    notes=_MODELS,
    examples=["torchedge plan sweep gpt-neo-1.3b --device adreno-750 --plot tradeoff.svg"],
)
@click.argument("model")
@_planning
def _plan_sweep(
    model: str,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    plot: Path | None,
    **planning: Any,  # noqa: ANN401 - see _settings
) -> None:
    """Plan a model at several lambdas and M_peaks: latency against memory."""
    from torchedge.streaming.planning import SETTINGS, trade_off

    device, precision, shared = _settings(**planning)
    with Progress(1 + SETTINGS, "planning") as progress:
        program = _lower(model, input_size, seq_len, device, precision, progress)
        progress.begin(f"sweeping {program.name}")
        points = trade_off(program, device, progress=progress.step, **shared)
    if plot is not None:
        from torchedge.streaming.figures import draw_tradeoff

        title = f"{program.name} on {device.name}, simulated"
        save_picture(draw_tradeoff([(_setting(p), p.plan.timeline) for p in points], title=title), plot)
    document = [{"lambda": p.lam, "m_peak_bytes": p.m_peak, **p.plan.summary()} for p in points]
    answer(document, lambda: _print_sweep(points), drawn=plot)


def _print_sweep(points: Sequence[Tradeoff]) -> None:
    first = points[0].plan
    print_wrapped(
        f"{first.program.name} on {first.device.name}: latency (ms) against memory (MiB), simulated from "
        f"{first.timeline.provenance} figures"
    )
    print()
    runs = [(_setting(point), point.plan.timeline) for point in points]
    print_table(
        ["", "preloaded", "average", "allocated", "integrated", "execution"],
        [_figures(name, run) for name, run in [*runs, ("preloading everything", first.preloading)]],
    )


def _setting(point: Tradeoff) -> str:
    peak = "none" if point.m_peak is None else f"{number(point.m_peak / MIB)} MiB"
    return f"lambda {point.lam:g}, M_peak {peak}"


def _figures(name: str, run: RunTimeline) -> list[str]:
    sizes = (run.preloaded_bytes, run.memory.average.total, run.allocated_bytes)
    return [name, *(number(size / MIB) for size in sizes), number(run.latency_ms), number(run.execution_ms)]


# plan lm ----------------------------------------------------------------------------------------------------


def _listed(kind: TextType, word: str = "") -> TextType:
    """Values separated by commas; word: stands for None."""

    def make(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        return tuple([None if word and part.lower() == word else kind.make(part) for part in parts])

    name = f"{kind.name}|{word}" if word else kind.name
    return TextType(f"{name}[,...]", make)


def _weight_format(text: str) -> str:
    if text not in ("int8", "int4"):
        raise InputError(f"{text[:40]!r} is no format of weights; expected int8, int4 or none")
    return text


@plan.command(
    "lm",
    cls=Command,
    notes="MODEL is hf:config.json of a language model of transformers, or a function that returns one.",
    examples=[
        "torchedge plan lm hf:config.json --device adreno-750 --max-length 512,2048 --quantize none,int4",
        "torchedge plan lm hf:small.json hf:large.json -d adreno-750 --max-length 512 --lora none,8 "
        "--quantize none,int8,int4 --memory-limit 6GiB",
        "torchedge plan lm hf:config.json -d local-cpu --max-length 512 --memory-limit none,900MiB --json",
    ],
)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@options.device
@click.option(
    "--max-length", type=_listed(whole(2)), required=True, help="Tokens of a prompt and its continuation."
)
@click.option(
    "--quantize",
    type=_listed(TextType("int8|int4", _weight_format), "none"),
    default="none",
    help="Format of weights.",
)
@click.option(
    "--lora", type=_listed(whole(), "none"), default="none", help="Rank of adapters that it also trains."
)
@click.option(
    "--memory-limit", type=_listed(SIZE, "none"), default="none", help="All that is allocated on the device."
)
@click.option("--chunk", type=whole(2), default=64, help="Tokens of a prompt that run at once.")
@click.option("--batch", type=whole(), default=1, help="Texts that run together.")
@click.option("--encoder-length", type=whole(2), help="Tokens of an encoder's text. [default: --max-length]")
@click.option(
    "--cache-dtype", type=Choice(["float32", "float16"]), default="float32", help="Of keys and values."
)
@options.precision
@click.option(
    "--prompt", type=whole(0), default=0, help="Tokens of the prompt whose time is predicted; 0: up to 64."
)
@click.option("--new-tokens", type=whole(0), default=0, help="Tokens that follow it; 0: up to 64.")
def _plan_lm(
    models: tuple[str, ...],
    device: str | None,
    max_length: tuple[int, ...],
    quantize: tuple[Any, ...],
    lora: tuple[int | None, ...],
    memory_limit: tuple[str | None, ...],
    **same: Any,  # noqa: ANN401 - fields of `LanguageSettings`
) -> int:
    """Predict memory and time of a language model: generation, and a training step of adapters.

    Nothing is exported, and no weight is computed. Several models, and several values, separated by commas,
    give a row for each combination. Within --memory-limit weights that it does not hold are streamed. The
    exit status is 3 if none fits.
    """
    from torchedge.api import choose_device
    from torchedge.bundles.language_plans import LanguageSettings, plan_table

    chosen, named = choose_device(device), {word: options.load_named(word) for word in models}
    choices = {"max_length": max_length, "quantize": quantize, "lora": lora, "memory_limit": memory_limit}
    tables: dict[str, tuple[LanguageRow, ...]] = {}
    with Progress(len(named) * prod(map(len, choices.values())), "planning") as progress:
        settings = LanguageSettings(max(max_length), **same)
        for word, (built, label) in named.items():
            name = label if len(named) == 1 else _short(word)
            name = word if name in tables else name

            def begin(row: LanguageSettings, name: str = name) -> None:
                progress.begin(f"planning {name}: {row}")

            tables[name] = plan_table(built, chosen, settings, choices, begin)
    rows = [row for table in tables.values() for row in table]
    documents = [{"name": name, **row.to_dict()} for name, table in tables.items() for row in table]
    answer(documents[0] if len(rows) == 1 else documents, lambda: print_language_rows(chosen.name, tables))
    return 0 if any(row.plan is not None for row in rows) else DOES_NOT_FIT


def _short(word: str) -> str:
    """Return the name of a model's file, or of the folder of a config.json."""
    path = Path(word.removeprefix("hf:"))
    if not word.startswith("hf:") or path.suffix != ".json":
        return word
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem


# plan instance, plan verify ---------------------------------------------------------------------------------


@plan.command(
    "instance",
    cls=Command,
    examples=[
        "torchedge plan instance instance.json --out plan.json",
        "torchedge plan instance instance.json --strategy always-next",
    ],
)
@click.argument("instance", type=PATH)
@_strategy
@_out
def _plan_instance(instance: Path, strategy: str | None, out: Path | None) -> int:
    """Plan the overlap problem in a file, and verify the plan.

    docs/streaming-files.md describes the file. Strategies may break limits, with a warning. The exit status
    is 3 if there is no plan.
    """
    from torchedge.streaming.instances import read_instance
    from torchedge.streaming.plans import write_plan

    if out is not None and out.exists() and instance.exists() and out.samefile(instance):
        raise InputError(f"--out {out} is the instance itself; choose another name")
    problem = read_instance(instance)
    start = time.perf_counter()
    result, checked = _solve(problem, strategy)
    document = _plan_document(problem, result, checked, time.perf_counter() - start)
    if out is not None:
        write_plan(out, result)
    answer(document, lambda: _print_plan(problem, result, document), written=out)
    return DOES_NOT_FIT if result.status == "INFEASIBLE" else 0


@plan.command("verify", cls=Command, examples=["torchedge plan verify plan.json instance.json"])
@click.argument("plan_file", type=PATH, metavar="PLAN")
@click.argument("instance", type=PATH)
def _verify_plan(plan_file: Path, instance: Path) -> int:
    """Verify that a plan keeps every rule of its instance.

    The exit status is 3 if it breaks one, or if there is no plan.
    """
    from torchedge.streaming.instances import read_instance
    from torchedge.streaming.plans import read_plan
    from torchedge.streaming.verification import verify_plan

    problem, result = read_instance(instance), read_plan(plan_file)
    checked = verify_plan(problem, result)
    document = _plan_document(problem, result, checked, None)
    answer(document, lambda: _print_plan(problem, result, document))
    return DOES_NOT_FIT if result.status == "INFEASIBLE" or not checked.ok else 0


def _solve(instance: Instance, strategy: str | None) -> tuple[OverlapPlan, Verification]:
    """Plan an instance and verify the plan; raises PlanError if it is none."""
    from torchedge.streaming.plans import STRATEGIES
    from torchedge.streaming.solving.planner import solve
    from torchedge.streaming.verification import check_plan, verify_plan

    make = solve if strategy is None else STRATEGIES[strategy]
    with Progress(1, f"planning {instance.name}") as progress:
        result = make(instance)
        progress.step()
    if strategy is None or not verify_plan(instance, result, limits=False).ok:
        return result, check_plan(instance, result)
    checked = verify_plan(instance, result)
    if not checked.ok:
        warn(f"{strategy} breaks limits: {checked.problems[0]}")
    return result, checked


def _plan_document(
    instance: Instance, result: OverlapPlan, checked: Verification, seconds: float | None
) -> dict[str, Any]:
    """Return a plan as plain data; MiB count whole chunks. seconds: None for a plan that was read."""
    document: dict[str, Any] = {
        "instance": instance.name,
        "status": result.status,
        "objective": result.objective,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "weights": len(instance.weights),
        "streamed_weights": len({load.weight for load in result.loads}),
        "seconds": seconds,
        "accepted": checked.ok,
        "problems": list(checked.problems),
    }
    if result.status == "INFEASIBLE":
        smallest = result.solver.get("smallest_memory_chunks")
        return document | {"reason": result.solver.get("reason"), "smallest_memory_chunks": smallest}
    sizes = (instance.total_chunks, checked.preloaded_chunks, checked.peak_chunks)
    for name, chunks in zip(("total", "preloaded", "peak"), sizes, strict=True):
        document |= {f"{name}_chunks": chunks, f"{name}_mib": _mib(instance, chunks)}
    return document


def _print_plan(instance: Instance, result: OverlapPlan, document: dict[str, Any]) -> None:
    limited = (("M_peak", instance.m_peak_chunks), ("memory", instance.memory_chunks))
    limits = [
        f"{name} {number(_mib(instance, chunks))} MiB" for name, chunks in limited if chunks is not None
    ]
    print_wrapped(
        f"{instance.name}: {len(instance.layers):,} layers, {len(instance.weights):,} weights, lambda "
        f"{instance.lam:g}, {' and '.join(limits) or 'no limits'}"
    )
    if "reason" in document:
        print_wrapped(f"there is no plan: {document['reason']}")
        smallest = document["smallest_memory_chunks"]
        if isinstance(smallest, int):
            size = f"{smallest:,} chunks ({number(_mib(instance, smallest))} MiB)"
            print_wrapped(f"the smallest memory limit that works is {size}")
    else:
        seconds = document["seconds"]
        rows = [
            ["status", result.status],
            ["objective", _exact(result.objective)],
            ["lower bound", _exact(result.lower_bound)],
            ["gap", "-" if result.gap is None else f"{100 * result.gap:.3g} %"],
            ["streamed weights", f"{document['streamed_weights']:,} of {document['weights']:,}"],
            ["seconds", "-" if seconds is None else f"{seconds:.2f}"],
        ]
        print_table(["", "plan"], rows)
        print()
        names = {"total": "all weights", "preloaded": "preloaded", "peak": "in flight at most"}
        sizes = [
            [text, f"{document[f'{name}_chunks']:,}", number(document[f"{name}_mib"])]
            for name, text in names.items()
        ]
        print_table(["", "chunks", "MiB"], sizes)
    problems = document["problems"]
    for problem in problems[:_SHOWN]:
        print_wrapped(problem, first="problem: ", rest="  ")
    if len(problems) > _SHOWN:
        print(f"problem: and {len(problems) - _SHOWN} more")
    print("the plan breaks rules" if problems else "the plan keeps all rules")


def _exact(value: float | None) -> str:
    return "-" if value is None else f"{value:,.12g}"


def _mib(instance: Instance, chunks: int) -> float:
    return chunks * instance.chunk_bytes / MIB
