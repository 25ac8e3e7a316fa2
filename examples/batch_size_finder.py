"""Find batch sizes before running anything: the largest that fits, how sure that is, and the fastest.

    python examples/batch_size_finder.py
    python examples/batch_size_finder.py resnet50 --device jetson-tx2 --limit 4096 --optimizer adamw

MODEL is what `torchedge predict` takes: a torchvision or timm name, file.py:factory, an .onnx or .pt2 file.
A batch size that was found by trying until memory runs out leaves no margin for the next run. Here the margin
is a number: the confidence with which a run stays within the limit, going by the device's measurements.
"""

import argparse
import sys

import torchedge


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="mobilenet_v2", metavar="MODEL")
    parser.add_argument("--device", default="jetson-tx2")
    parser.add_argument("--limit", type=float, metavar="MIB", help="default: the device's memory")
    parser.add_argument("--optimizer", default="sgd-momentum")
    arguments = parser.parse_args()

    predictor = torchedge.Predictor(arguments.device)
    one = predictor.predict(arguments.model, optimizer=arguments.optimizer)
    room = arguments.limit if arguments.limit is not None else one.device_memory_mib
    print(f"{one.model} with {arguments.optimizer} on {one.device} ({one.provenance}), {room:,.0f} MiB")
    for confidence in (0.5, 0.9, 0.95, 0.99):
        largest = one.max_batch_size(arguments.limit, confidence=confidence)
        print(f"  largest batch size that fits at {confidence:.0%} confidence: {largest or 'none'}")

    largest = one.max_batch_size(arguments.limit)
    if not largest:
        sys.exit(f"not even one sample fits into {room:,.0f} MiB; choose a smaller model or input")
    sizes = sorted({2**k for k in range(largest.bit_length())} | {largest})
    table = predictor.predict_many([arguments.model], sizes, optimizer=arguments.optimizer)
    rates = 1e3 * table.batch_sizes / table.latency[0]
    print("batch size  samples a second  Γ MiB")
    for size, rate, memory in zip(sizes, rates, table.memory[0], strict=True):
        print(f"{size:>10}  {rate:>16.1f}  {memory:>5.0f}")
    best = int(rates.argmax())
    enough = next(size for size, rate in zip(sizes, rates, strict=True) if rate >= 0.95 * rates[best])
    print(f"{enough} samples a step already give 95 % of the speed of {sizes[best]}")


if __name__ == "__main__":
    main()
