"""Search the sub-networks of Once-for-All's ResNet-50 for the best one that a Jetson TX2 can train and run.

    python examples/ofa_search.py
    python examples/ofa_search.py --training-memory 3000 --inference-latency 35 --iterations 500 --workers 2

Three hard limits, as in section 6.4 of the perf4sight paper: memory of training at batch size 32, memory and
latency of inference at batch size 1. No candidate is built or run; the winner is built at the end.

The score here is a stand-in: a smooth formula that grows with depth, width and image size and has never seen
an image. Put your accuracy predictor in its place, a function of a list of encodings: with the published
weights, Once-for-All's own (`ofa.nas.accuracy_predictor`) reads the same encoding.
"""

import argparse
import math
import sys

import torch

import torchedge

WIDTHS = (0.65, 0.8, 1.0)
BASE_DEPTHS = (2, 2, 4, 2)


def stand_in(encodings: list[dict]) -> list[float]:
    """What stands in for accuracy, in percent: more of everything is better, each time by less."""
    scores = []
    for encoding in encodings:
        capacity, first = 0.0, 0
        for stage, (base, depth) in enumerate(zip(BASE_DEPTHS, encoding["d"][1:], strict=True)):
            width = WIDTHS[encoding["w"][stage + 2]]
            capacity += sum(math.sqrt(width * e) for e in encoding["e"][first : first + base + depth])
            first += base + 2
        scores.append(70 + 10 * (1 - math.exp(-capacity / 6)) + 3 * math.log2(encoding["image_size"] / 224))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="jetson-tx2")
    parser.add_argument("--training-memory", type=float, default=3300, metavar="MIB")
    parser.add_argument("--inference-memory", type=float, default=1200, metavar="MIB")
    parser.add_argument("--inference-latency", type=float, default=40, metavar="MS")
    parser.add_argument("--iterations", type=int, default=30, metavar="N", help="the paper: 500")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    arguments = parser.parse_args()

    found = torchedge.search(
        torchedge.OFAResNet50Space(),
        constraints={
            "training_memory": arguments.training_memory,
            "inference_memory": arguments.inference_memory,
            "inference_latency": arguments.inference_latency,
        },
        score=stand_in,
        device=arguments.device,
        batch_size=32,
        iterations=arguments.iterations,
        workers=arguments.workers,
    )
    print(found)
    if not found.feasible:
        sys.exit(3)

    print("score against training memory:")
    front = found.fronts["training_memory"]
    for candidate in front[:: max(len(front) // 8, 1)]:
        print(f"  {candidate.score:.2f} at {candidate.figures['training_memory']:,.0f} MiB")

    network = found.build().eval()
    parameters = sum(p.numel() for p in network.parameters())
    size = found.best.encoding["image_size"]
    with torch.no_grad():
        shape = tuple(network(torch.zeros(1, 3, size, size)).shape)
    print(f"built: {parameters / 1e6:.1f} million parameters, images of {size} pixels, output {shape}")


if __name__ == "__main__":
    main()
