"""`torchedge plan MODEL`: one model, a queue of several, or one at several settings."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchedge.cli.console import Progress, check_plot, check_target, print_json, print_wrapped, save_figure
from torchedge.errors import InputError, LimitError

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.graphs import ForwardGraph
    from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["run_model", "run_queue", "run_sweep"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for, read and checked; sizes in bytes."""

    device: Device
    memory_limit: int | None
    m_peak: int | None
    chunk: int
    options: dict[str, Any]


def run_model(arguments: argparse.Namespace) -> int:
    """Plan one model; return 0, or 3 where no plan stays within the memory limit."""
    from torchedge.cli.planning_texts import layer_lines
    from torchedge.streaming.planning import plan_graph

    asked = _read(arguments)
    strategy = None
    if arguments.strategy is not None:
        from torchedge.cli.planning_instances import find_strategy

        strategy = find_strategy(arguments.strategy)
    try:
        with Progress(2, "planning") as progress:
            graph = _capture(arguments.models[0], arguments, progress)
            progress.doing(f"planning {graph.name}")
            found = plan_graph(
                graph,
                asked.device,
                memory_limit=asked.memory_limit,
                m_peak=asked.m_peak,
                chunk=asked.chunk,
                strategy=strategy,
                **asked.options,
            )
            progress.step()
    except LimitError as error:
        return _too_small(error, arguments)
    written = _write(found, arguments)
    if arguments.json:
        print_json(found.summary() | ({"layers": _layers(found)} if arguments.layers else {}))
        return 0
    print(found)
    if arguments.layers:
        print("", *layer_lines(found), sep="\n")
    for line in written:
        print_wrapped(line)
    return 0


def run_queue(arguments: argparse.Namespace) -> int:
    """Plan models that run one after the other; return 0, or 3 where one does not fit by itself."""
    from torchedge.cli.planning_texts import queue_document, queue_lines
    from torchedge.streaming.planning import plan_graph
    from torchedge.streaming.queues import plan_queue_within
    from torchedge.streaming.solving import solve

    asked = _read(arguments)
    limit = asked.memory_limit or 0
    models: list[StreamingPlan] = []
    try:
        with Progress(2 * len(arguments.models) + 1, "planning") as progress:
            for text in arguments.models:
                graph = _capture(text, arguments, progress)
                progress.doing(f"planning {graph.name}")
                models.append(
                    plan_graph(
                        graph,
                        asked.device,
                        memory_limit=limit,
                        m_peak=asked.m_peak,
                        chunk=asked.chunk,
                        **asked.options,
                    )
                )
                progress.step()
            progress.doing("planning them together")
            found = plan_queue_within(models, limit, partial(solve, effort=asked.options["effort"]))
            progress.step()
    except LimitError as error:
        return _too_small(error, arguments)
    if arguments.plot is not None:
        from torchedge.streaming.figures import draw_lanes

        save_figure(draw_lanes(found.lanes, limit_bytes=limit), arguments.plot)
    if arguments.json:
        print_json(queue_document(found, models, limit))
        return 0
    print("\n".join(queue_lines(found, models, limit)))
    if arguments.plot is not None:
        print_wrapped(f"drawn to {arguments.plot}")
    return 0


def run_sweep(arguments: argparse.Namespace) -> int:
    """Plan one model at several lambdas and M_peaks."""
    from torchedge.cli.planning_texts import setting, sweep_document, sweep_lines
    from torchedge.streaming.planning import SETTINGS, trade_off

    asked = _read(arguments)
    options = {key: value for key, value in asked.options.items() if key != "lam"}
    with Progress(1 + SETTINGS, "planning") as progress:
        graph = _capture(arguments.models[0], arguments, progress)
        progress.doing(f"sweeping {graph.name}")
        points = trade_off(
            graph, asked.device, m_peak=asked.m_peak, chunk=asked.chunk, progress=progress.step, **options
        )
    if arguments.plot is not None:
        from torchedge.streaming.figures import draw_tradeoff

        title = f"{graph.name} on {asked.device.name}, simulated"
        figure = draw_tradeoff([(setting(p), p.plan.timeline) for p in points], title=title)
        save_figure(figure, arguments.plot)
    if arguments.json:
        print_json(sweep_document(points))
        return 0
    print("\n".join(sweep_lines(points)))
    if arguments.plot is not None:
        print_wrapped(f"drawn to {arguments.plot}")
    return 0


# what is asked for ------------------------------------------------------------------------------------------


def _read(arguments: argparse.Namespace) -> _Asked:
    """Check everything that can be checked before a model is captured."""
    from torchedge.api import choose_device
    from torchedge.streaming.capacities import CHUNK_BYTES, LAMBDA, M_PEAK_BYTES
    from torchedge.streaming.planning import check_rates

    limit = None if arguments.memory_limit is None else _size("--memory-limit", arguments.memory_limit)
    m_peak: int | None = M_PEAK_BYTES
    if arguments.m_peak is not None:
        m_peak = None if arguments.m_peak.lower() == "none" else _size("--m-peak", arguments.m_peak)
    chunk = CHUNK_BYTES if arguments.chunk is None else _size("--chunk", arguments.chunk)
    for option, path in (("--out", arguments.out), ("--write-instance", arguments.write_instance)):
        if path is not None:
            check_target(option, path)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    targets = [
        p.absolute() for p in (arguments.out, arguments.write_instance, arguments.plot) if p is not None
    ]
    if len(set(targets)) < len(targets):
        raise InputError(
            f"{targets[0].name} is to be written twice; choose another name for one of the files"
        )
    device = choose_device(arguments.device)
    check_rates(device)
    options = {
        "lam": LAMBDA if arguments.lam is None else arguments.lam,
        "precision": arguments.precision or "float16",
        "fusion": arguments.fusion or "adaptive",
        "effort": 1.0 if arguments.effort is None else arguments.effort,
    }
    return _Asked(device, limit, m_peak, chunk, options)


def _size(option: str, text: str) -> int:
    from torchedge.streaming.budgets import parse_bytes

    if re.fullmatch(r"[\s0-9.]*", text):
        raise InputError(
            f"{option} is {text[:40]!r}; expected a number with its unit, such as 500MiB or 256KiB"
        )
    return parse_bytes(text, option)


def _capture(text: str, arguments: argparse.Namespace, progress: Progress) -> ForwardGraph:
    from torchedge.cli.options import capture_named

    progress.doing(f"capturing {text}")
    (graph,) = capture_named(text, mode="infer", input_size=arguments.input_size, batch_sizes=[1])
    progress.step()
    return graph


# what came out ----------------------------------------------------------------------------------------------


def _too_small(error: LimitError, arguments: argparse.Namespace) -> int:
    from torchedge.cli.console import DOES_NOT_FIT

    if arguments.json:
        print_json({"status": "INFEASIBLE", "reason": str(error), "works_bytes": error.works_bytes})
    else:
        print_wrapped(str(error))
    return DOES_NOT_FIT


def _write(found: StreamingPlan, arguments: argparse.Namespace) -> list[str]:
    """Write what was asked for; return a line for each file."""
    lines = []
    if arguments.out is not None:
        from torchedge.streaming.plans import write_plan

        write_plan(arguments.out, found.plan)
        lines.append(f"written to {arguments.out}")
    if arguments.write_instance is not None:
        from torchedge.streaming.instances import write_instance

        write_instance(arguments.write_instance, found.instance)
        lines.append(f"its instance is written to {arguments.write_instance}")
    if arguments.plot is not None:
        save_figure(found.plot(arguments.picture or "memory"), arguments.plot)
        lines.append(f"drawn to {arguments.plot}")
    return lines


def _layers(found: StreamingPlan) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [asdict(row) for row in found.layers]
