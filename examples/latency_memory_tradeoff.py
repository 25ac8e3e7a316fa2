"""Latency against memory: what a model takes as more of its weights are preloaded (FlashMem, Fig. 8).

    python examples/latency_memory_tradeoff.py tradeoff.png --model gpt-neo-1.3b

Lambda weighs preloaded weights against loading early, M_peak limits what is in flight: the lower either, the
more is preloaded. Then the layers wait less, and the first of them starts later. The plot needs matplotlib
(`pip install 'torchedge[plots]'`), the model transformers (`pip install 'torchedge[dev]'`).
"""

import argparse
from pathlib import Path

import torchedge
from torchedge.streaming.figures import draw_tradeoff
from torchedge.streaming.timelines import Timeline
from torchedge.tracing.sources import load_model

MIB = 2**20
ROW = "{:>12}{:>12}{:>12}{:>12}{:>12}"


def figures(run: Timeline) -> str:
    sizes = (run.preloaded_bytes, run.memory.average.total, run.memory.peak.total)
    times = (run.latency_ms, run.execution_ms)
    return ROW.format(*(f"{size / MIB:,.0f} MiB" for size in sizes), *(f"{time:,.0f} ms" for time in times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, help="file to draw to: .png, .pdf or .svg")
    parser.add_argument("--model", default="gpt-neo-1.3b", help="what `torchedge plan` takes")
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--lambdas", nargs="+", type=float, default=[0.9, 0.2, 0.1, 0.05, 0.03], metavar="L")
    parser.add_argument("--m-peaks", nargs="+", type=int, default=[500, 50, 20], metavar="MIB")
    arguments = parser.parse_args()

    # Captured once; the first lambda with every M_peak, then the first M_peak with every other lambda.
    model, name = load_model(arguments.model)
    graph = torchedge.capture(model, mode="infer", batch_size=1)
    settings = [(arguments.lambdas[0], m_peak) for m_peak in arguments.m_peaks]
    settings += [(lam, arguments.m_peaks[0]) for lam in arguments.lambdas[1:]]

    print(f"{name} on {arguments.device}")
    print(
        f"{'lambda':<8}{'M_peak':>8}" + ROW.format("preloaded", "average", "peak", "integrated", "execution")
    )
    points = []
    for lam, m_peak in settings:
        plan = torchedge.plan(graph, device=arguments.device, lam=lam, m_peak=f"{m_peak}MiB")
        print(f"{lam:<8g}{m_peak:>4} MiB" + figures(plan.timeline))
        points.append((f"lambda {lam:g}, M_peak {m_peak} MiB", plan.timeline))
    print(f"{'all preloaded':<16}" + figures(plan.preloading))
    points.sort(key=lambda point: point[1].memory.average.total)
    draw_tradeoff(points, title=f"{name} on {arguments.device}, simulated").savefig(arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
