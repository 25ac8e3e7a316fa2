"""Prints the launches of inferences of one sample, by load class, and how many values their products fuse.

    python benchmarks/lowering_launches.py --target mobile resnet18 llama-2-13b

Networks are those of torchvision (at 224 px) and of FlashMem, on the meta device; nothing runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from harness import options_of

from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.lowering.targets import TARGETS
from torchedge.tracing.paper_models import PAPER_MODELS, build_paper_model
from torchedge.tracing.vision import import_torchvision

NETWORKS = (
    "resnet18", "resnet-50", "mobilenet_v2", "densenet121", "vit_b_16", "swin_t", "sam-2", "gpt-neo-small",
    "llama-2-13b", "sd-unet",
)  # fmt: skip


def network(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a network and its positional and keyword arguments."""
    if name in PAPER_MODELS:
        model = build_paper_model(name)
        example: Any = model.example_inputs
        return (model, (), dict(example)) if isinstance(example, Mapping) else (model, example, {})
    with torch.device("meta"):
        return import_torchvision().models.get_model(name, weights=None), (torch.zeros(1, 3, 224, 224),), {}


def main() -> None:
    """Print one line a network."""
    parser = options_of(__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--target", choices=sorted(TARGETS), default="cpu")
    options = parser.parse_args()
    print("| network | launches | reusable | hierarchical | elemental | kernels | values in products |")
    print("|---|---|---|---|---|---|---|")
    for name in options.networks:
        model, args, kwargs = network(name)
        lowered = lower_inference(capture_inference_step(model, args, kwargs), TARGETS[options.target])
        program = lowered.program
        classes = Counter(program.kernels[launch.kernel].load_class for launch in program.launches)
        counts = [classes[kind] for kind in ("reusable", "hierarchical", "elemental")]
        fused = sum(len(launch.values) for launch in lowered.fused)
        figures = [len(program.launches), *counts, len(program.kernels), fused]
        print(f"| {name} | {' | '.join(f'{figure:,}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
