"""Latency against memory: what a model takes as more of its weights are preloaded (FlashMem, Fig. 8).

    python examples/latency_memory_tradeoff.py tradeoff.png --model gpt-neo-1.3b

Lambda weighs preloaded weights against loading early, M_peak limits what is in flight: the lower either, the
more is preloaded. Then the layers wait less, and the first of them starts later. The plot needs matplotlib
(`pip install 'torchedge[plots]'`), the model transformers (`pip install 'torchedge[dev]'`).
"""

import argparse
from pathlib import Path

from torchedge.devices import find_device
from torchedge.lowering.inference import lower_model
from torchedge.streaming.figures import draw_tradeoff
from torchedge.streaming.planning import trade_off
from torchedge.streaming.simulation import RunTimeline

MIB = 2**20
ROW = "{:<8}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}"


def figures(run: RunTimeline) -> list[str]:
    sizes = (run.preloaded_bytes, run.memory.average.total, run.allocated_bytes)
    times = (run.latency_ms, run.execution_ms)
    return [*(f"{size / MIB:,.0f} MiB" for size in sizes), *(f"{time:,.0f} ms" for time in times)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, help="file to draw to: .png, .pdf or .svg")
    parser.add_argument("--model", default="gpt-neo-1.3b", help="what `torchedge plan` takes")
    parser.add_argument("--device", default="adreno-750")
    arguments = parser.parse_args()

    device = find_device(arguments.device)
    program = lower_model(arguments.model, device)
    name, settings = program.name, trade_off(program, device)

    print(f"{name} on {arguments.device}")
    print(ROW.format("lambda", "M_peak", "preloaded", "average", "allocated", "integrated", "execution"))
    points = []
    for setting in settings:
        m_peak = f"{(setting.m_peak or 0) / MIB:,.1f} MiB"
        print(ROW.format(f"{setting.lam:g}", m_peak, *figures(setting.plan.timeline)))
        points.append((f"lambda {setting.lam:g}, M_peak {m_peak}", setting.plan.timeline))
    print(ROW.format("all", "preloaded", *figures(settings[0].plan.preloading)))
    draw_tradeoff(points, title=f"{name} on {arguments.device}, simulated").savefig(arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
