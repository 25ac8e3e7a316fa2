"""Adapt a language model to another kind of text in a third of its training memory, then let it write.

    python examples/fine_tune_language_model.py            # draws fine_tune_language_model.png
    python examples/fine_tune_language_model.py --layers 1 --length 32 --steps 60    # quicker

Nothing is downloaded. A small Llama, whose tokens are bytes, first learns the English of Python's reference
in PyTorch: in place of a model that others have trained. Then its weights become int4, adapters of low rank
(LoRA) learn the Python code of the standard library within the limit, and the bundle of the result writes.

Needs an OpenCL device, for which PoCL or Intel's runtime makes the processor, matplotlib for the picture, and
transformers for the model: `pip install 'torchedge[all]' transformers`.
"""

import argparse
import inspect
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from torch import nn

import torchedge
from torchedge.tracing.vision import prepare_torchvision


class Adapted(nn.Module):
    """A frozen layer, and a product of two small matrices that learns what to add to it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + self.up(self.down(x))
        return added


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """English and Python code, as bytes."""
    import tarfile
    import typing
    from pydoc_data import topics

    code = "".join(inspect.getsource(module) for module in (argparse, inspect, tarfile, typing))
    english = "".join(topics.topics.values())
    return torch.tensor([*english.encode()]), torch.tensor([*code.encode()])


def batches(
    text: torch.Tensor, shape: tuple[int, int], steps: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Pieces of a text, the same ones each time."""
    generator = torch.Generator().manual_seed(seed)
    size, length = shape
    for _ in range(steps):
        begins = torch.randint(len(text) - length, (size, 1), generator=generator)
        ids = text[begins + torch.arange(length)]
        yield {"input_ids": ids, "labels": ids}


def pretrain(model: nn.Module, text: torch.Tensor, length: int, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in batches(text, (8, length), steps, seed=1):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adapted(model: nn.Module) -> nn.Module:
    """A copy whose weights are frozen int4, with adapters in all layers of attention and MLP."""
    small = torchedge.quantize(model, "int4", group=32).requires_grad_(False)
    layers = [(name, layer) for name, layer in small.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        if name.endswith("_proj"):
            small.set_submodule(name, Adapted(layer))
    return small


def draw(english: list[float], code: list[float], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    begin = 0
    for losses, color, label in (
        (english, "#999999", "all weights learn English, PyTorch"),
        (code, "#0072B2", "adapters learn Python, torchedge"),
    ):
        bits = torch.tensor(losses) / math.log(2)
        places = torch.arange(begin, begin + len(bits))
        wide = max(1, len(bits) // 20)
        axes.plot(places, bits, color=color, linewidth=0.6, alpha=0.4)
        axes.plot(places[wide - 1 :], bits.unfold(0, wide, 1).mean(1), color=color, linewidth=2, label=label)
        begin += len(bits)
    axes.set(title="Loss of each step", xlabel="step", ylabel="bits a byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e3e3", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, nargs="?", default=Path("fine_tune_language_model.png"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=48, help="bytes of a text")
    parser.add_argument("--pretraining", type=int, default=400, help="steps in PyTorch")
    parser.add_argument("--steps", type=int, default=400, help="steps of the adapters")
    parser.add_argument("--device", help="default: the first GPU, else the first device")
    arguments = parser.parse_args()

    prepare_torchvision()  # transformers imports torchvision, which may be of another build than PyTorch
    import transformers

    torch.set_num_threads(1)  # for so small a network, threads wait for each other longer than they work
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    english, code = texts()
    before = pretrain(model, english, arguments.length, arguments.pretraining)
    print(f"English: {mean(before[:10]):.2f} in the first ten steps, {mean(before[-10:]):.2f} in the last")

    weights = sum(p.numel() for p in model.parameters())
    whole = 16 * weights  # weights, gradients and AdamW's two averages, without activations
    limit = whole // 3
    small = adapted(model)
    optimizer = torch.optim.AdamW([p for p in small.parameters() if p.requires_grad], lr=3e-3)
    steps = [*batches(code, (2, arguments.length), arguments.steps, seed=2)]
    with torchedge.Trainer(
        small, steps[0], loss="model", optimizer=optimizer, device=arguments.device, memory_limit=f"{limit}B"
    ) as trainer:
        after = [trainer.step(batch) for batch in steps]
        held = trainer.memory
    print(f"Python:  {mean(after[:10]):.2f} in the first ten steps, {mean(after[-10:]):.2f} in the last")
    print(
        f"{weights:,} weights would train in {whole / 2**20:.1f} MiB and activations; the limit is "
        f"{limit / 2**20:.1f} MiB, {held.total / 2**20:.1f} are held with activations: {held}"
    )

    with tempfile.TemporaryDirectory() as folder:
        bundle = torchedge.export_lm(
            small.eval(), "local-cpu", out=Path(folder) / "lm", max_length=256, chunk=16
        )
        prompt = b"    def "
        written = bundle.generate(prompt, 240, temperature=0.6, seed=1)
    print((prompt + bytes(written)).decode(errors="replace"))
    draw(before, after, arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
