"""Fine-tune a Llama by LoRA in int4, resident and streamed, beside peft on PyTorch in float32.

    python benchmarks/language_model_tuning.py [--layers 12] [--hidden 768] [--limits 0.8 0.6]

Adapters of rank 16 in all linear layers but the head, AdamW, batch 1. Each line is a process of its own:
memory, its part of peft's, the median time of a step, and the losses of the first and last step. PyTorch runs
on CUDA where it is there (peak of allocated memory), else on the processor (growth of resident memory);
torchedge on its default OpenCL device, whose memory is counted to the byte. --limits are shares of what the
int4 model takes without one; weights that a limit does not hold are read from a file twice a step.
"""

from __future__ import annotations

import resource
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from harness import apart, options_of, print_rows, timed_steps
from llamas import llama

import torchedge
from torchedge.tracing.vision import prepare_torchvision

RANK = 16


def main() -> None:
    """Print a line for each way to train."""
    parser = options_of(
        __doc__, layers=12, hidden=768, intermediate=2048, vocabulary=32000, length=256, steps=6
    )
    parser.add_argument("--limits", type=float, nargs="*", default=[0.8])
    options = parser.parse_args()

    def run(function: Any, *given: Any) -> Any:  # noqa: ANN401
        result = apart(function, options, *given)
        return result if not isinstance(result, str) else sys.exit(result)

    theirs, own = run(_peft), run(_ours, None)
    ways = [("peft, float32", theirs), ("torchedge, int4", own)]
    for share in options.limits:
        limit = int(share * own[0])
        ways.append((f"torchedge, int4, at most {limit / 2**20:,.0f} MiB", run(_ours, limit)))
    rows = [
        (
            way,
            f"{nbytes / 2**20:,.1f}",
            f"{nbytes / theirs[0]:.3f}",
            f"{ms:.1f}",
            f"{ms / own[1]:.2f}",
            f"{losses[0]:.4f} {losses[-1]:.4f}",
        )
        for way, (nbytes, ms, losses) in ways
    ]
    print_rows(("", "MiB", "of peft's", "ms a step", "of resident int4", "losses"), rows)


def _adapted(options: Namespace, quantized: bool) -> Any:  # noqa: ANN401
    """Return a Llama with adapters, the same ones in each process; `lora_B` does not begin at zero."""
    prepare_torchvision()
    import peft

    base = llama(options.hidden, options.layers, options.vocabulary, options.length, options.intermediate)
    base = torchedge.quantize(base, "int4", group=32) if quantized else base
    torch.manual_seed(1)
    config = peft.LoraConfig(r=RANK, target_modules=r".*(_proj)", init_lora_weights=False)
    return peft.get_peft_model(base, config).train()


def _batch(options: Namespace) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, options.vocabulary, (1, options.length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _peft(options: Namespace) -> tuple[int, float, list[float]]:
    """Return bytes, ms and losses of PyTorch in float32, TF32 off."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.empty(1, device=device)
    before = _resident()
    model = _adapted(options, False).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    batch = {name: tensor.to(device) for name, tensor in _batch(options).items()}

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    seconds, losses = timed_steps(step)(options.steps)
    nbytes = torch.cuda.max_memory_allocated() if device == "cuda" else _peak() - before
    return nbytes, 1e3 * statistics.median(seconds[1:]), losses


def _ours(options: Namespace, limit: int | None) -> tuple[int, float, list[float]]:
    """Return bytes, ms and losses of torchedge with int4 weights, within a limit."""
    model, batch = _adapted(options, True), _batch(options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    text = None if limit is None else f"{limit}B"
    with torchedge.Trainer(model, batch, optimizer=optimizer, memory_limit=text) as trainer:
        seconds, losses = timed_steps(lambda: float(trainer.step(batch)))(options.steps)
        return trainer.memory.total, 1e3 * statistics.median(seconds[1:]), losses


def _resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    """Return the most that was resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
