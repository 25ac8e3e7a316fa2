"""Plan GPT-Neo 1.3B, 4.9 GiB of weights, within a fifth of that of a phone's memory.

    python examples/stream_gpt_neo.py streamed --model gpt-neo-1.3b --limit 900MiB

Nothing is downloaded, and no weight takes memory here: the model is built on the meta device. Written are
the plan (plan.json: which launch loads which chunks of which weight) and two pictures of the predicted run.
They need matplotlib (`pip install 'torchedge[plots]'`), the model needs transformers (`torchedge[dev]`).
"""

import argparse
import sys
from pathlib import Path

import torchedge
from torchedge.errors import PlanError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where to write the plan and the pictures")
    parser.add_argument("--model", default="gpt-neo-1.3b", help="or gpt-neo-small, gpt-neo-2.7b")
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--limit", default="900MiB", help="all that a run may allocate (default 900MiB)")
    arguments = parser.parse_args()

    try:
        plan = torchedge.plan(arguments.model, device=arguments.device, memory_limit=arguments.limit)
    except PlanError as error:  # it names the smallest limit that works
        print(error, file=sys.stderr)
        sys.exit(3)
    print(plan)

    print("the launches that load most:")
    for row in sorted(plan.layers, key=lambda row: -row.loaded_chunks)[:5]:
        loaded = f"{row.loaded_chunks} of {row.capacity_chunks} chunks"
        print(f"  {row.number:>4} {row.name} at {row.start_ms:,.1f} ms: {loaded}, first of {row.loads[0]}")

    arguments.folder.mkdir(parents=True, exist_ok=True)
    plan.to_json(arguments.folder / "plan.json")
    plan.plot("memory").savefig(arguments.folder / "memory.png")
    middle = len(plan.layers) // 2  # a few layers in the middle: of all of them one sees little
    chart = plan.plot("gantt", layers=(middle, min(middle + 15, len(plan.layers))))
    chart.savefig(arguments.folder / "gantt.png")
    print(f"written to {arguments.folder}: plan.json, memory.png, gantt.png")


if __name__ == "__main__":
    main()
