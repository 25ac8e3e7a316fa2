"""Prune a network, layer by layer, until its training fits into the memory of a device.

    python examples/prune_until_it_fits.py
    python examples/prune_until_it_fits.py --limit 1800 --latency 300 --batch-size 32

Every group of channels that additions or depthwise convolutions tie together keeps a share of its own. Among
all prunings within the limits, the search takes the one that keeps most of the weights' magnitude; put a
score of your own there if you can measure better what a channel is worth. The pruned network is a copy with
fewer channels: it is trained for a step at the end. Needs torchvision (`pip install 'torchedge[vision]'`).
"""

import argparse
import sys

import torch
from torch import nn

import torchedge
from torchedge.tracing.vision import import_torchvision


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="jetson-tx2")
    parser.add_argument("--limit", type=float, default=1950, metavar="MIB", help="training memory Γ")
    parser.add_argument("--latency", type=float, metavar="MS", help="of a training step Φ")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--image-size", type=int, default=128, metavar="N")
    parser.add_argument("--iterations", type=int, default=40, metavar="N")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = import_torchvision().models.resnet18()
    size = (3, arguments.image_size, arguments.image_size)
    before = torchedge.predict(model, arguments.batch_size, arguments.device, input_size=size)
    print(f"unpruned: {before.memory}, a step {before.latency} on {before.device}")
    space = torchedge.PruningSpace(model, size, round_to=8, name="resnet18")
    print(f"{len(space.choices)} groups may be pruned; not: {', '.join(space.frozen)}")

    limits = {"training_memory": arguments.limit}
    if arguments.latency:
        limits["training_latency"] = arguments.latency
    found = torchedge.search(
        space,
        limits,
        space.kept_norm,
        device=arguments.device,
        batch_size=arguments.batch_size,
        iterations=arguments.iterations,
        confidence=0.9,  # of staying below the limits, however the prediction errs
    )
    if not found.feasible:
        print(found)
        sys.exit(3)
    after = found.predictions["train"]
    share = 100 * found.best.score
    print(f"pruned:   {after.memory}, a step {after.latency}; keeps {share:.0f} % of the weights' magnitude")
    for group, kept in found.best.encoding.items():
        all_of_them = space.choices[group][-1]
        if kept < all_of_them:
            print(f"  {group}: {kept} of {all_of_them} channels")

    pruned = found.build()
    counts = [sum(p.numel() for p in net.parameters()) / 1e6 for net in (model, pruned)]
    print(f"{counts[0]:.1f} million parameters became {counts[1]:.1f} million")
    optimizer = torch.optim.SGD(pruned.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(2, *size), torch.tensor([3, 7])
    loss = nn.functional.cross_entropy(pruned(images), labels)
    loss.backward()
    optimizer.step()
    print(f"trained for a step: loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
