"""`torchedge export`: models written as bundles of kernels and weights."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli import options
from torchedge.cli.console import Progress, answer, warn
from torchedge.cli.options import (
    MODEL_HELP,
    PATH,
    SIZE,
    WHOLE,
    Choice,
    command,
    load_named,
    refuse_given,
    whole,
)
from torchedge.errors import InputError, check_rate, clipped

if TYPE_CHECKING:
    import torch

    from torchedge.graphs import Mode

LOSSES = ("cross-entropy", "mse", "model")
_OPTIMIZERS: dict[str, tuple[str, float, dict[str, float]]] = {
    "sgd-momentum": ("SGD", 0.01, {"momentum": 0.9}),
    "sgd": ("SGD", 0.01, {}),
    "adam": ("Adam", 0.001, {}),
    "adamw": ("AdamW", 0.001, {}),
}
"""By name: the class in torch.optim, the learning rate by default, further options."""

_TRAINING_ONLY = ("loss", "optimizer", "lr", "accumulation")
_GENERATING_ONLY = ("quantize", "lora", "chunk", "cache_dtype", "tokenizer")
_NOT_GENERATING = ("mode", "input_size", "seq_len", "onnx", "check")
_MAX_WEIGHTS = 2**36


@command(
    "export",
    notes=f"{MODEL_HELP} The last two hold no weights that could be exported.",
    examples=[
        "torchedge export squeezenet1_1 --device mali --out squeezenet --weights state.safetensors",
        "torchedge export nets.py:small -d adreno -o small --mode train --optimizer adam --lr 0.001",
        "torchedge export hf:FOLDER -d adreno -o lm --max-length 512 --quantize int4",
    ],
)
@click.argument("model")
@click.option("--out", "-o", type=PATH, required=True, metavar="FOLDER", help="Folder to make.")
@options.device
@options.batch_size
@options.input_size
@options.seq_len
@click.option("--mode", type=Choice(["train", "infer"]), default="infer", help="Training step or inference.")
@click.option(
    "--weights",
    type=PATH,
    metavar="FILE",
    help="A .safetensors file of the model's state, or a .gguf file. [default: those of hf:FOLDER, or "
    "random ones]",
)
@click.option(
    "--max-length",
    type=whole(2),
    help="Export a language model that generates: tokens of a prompt and its continuation.",
)
@click.option(
    "--tokenizer",
    type=PATH,
    metavar="FILE",
    help="With --max-length: a tokenizer.json to put into the bundle. [default: that of hf:FOLDER]",
)
@click.option("--quantize", type=Choice(["int8", "int4"]), help="With --max-length: format of weights.")
@click.option("--lora", type=whole(), help="With --max-length: also train adapters of this rank.")
@click.option(
    "--chunk", type=whole(2), help="With --max-length: tokens of a prompt that run at once. [default: 64]"
)
@click.option(
    "--cache-dtype",
    type=Choice(["float32", "float16"]),
    help="With --max-length: of keys and values. [default: float32]",
)
@click.option("--seed", type=whole(0), default=0, help="Seed of random weights and dropout.")
@click.option("--loss", type=Choice(LOSSES), help="With --mode train: the loss. [default: cross-entropy]")
@click.option(
    "--optimizer",
    type=Choice(list(_OPTIMIZERS)),
    help="With --mode train: the optimizer. [default: sgd-momentum]",
)
@click.option("--lr", type=float, metavar="RATE", help="With --mode train: the learning rate.")
@click.option("--accumulation", type=WHOLE, help="With --mode train: batches to an update. [default: 1]")
@options.precision
@click.option(
    "--tuner",
    type=Choice(["fixed", "model"]),
    help="What chooses schedules and layouts of kernels. [default: model, where the device's profile has "
    "coefficients of kernels, and for training steps on phones]",
)
@click.option("--memory-limit", type=SIZE, help="Stream weights: the most memory a run allocates.")
@click.option("--onnx/--no-onnx", default=True, help="Also write model.onnx.")
@click.option("--check", is_flag=True, help="Record results of every launch for torchedge-run --check.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
def export(
    model: str,
    out: Path,
    device: str | None,
    batch_size: int,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    mode: Mode,
    weights: Path | None,
    seed: int,
    memory_limit: str | None,
    onnx: bool,
    force: bool,
    max_length: int | None,
    **others: Any,  # noqa: ANN401 - _TRAINING_ONLY, _GENERATING_ONLY, precision, tuner, check
) -> None:
    """Write a model as OpenCL kernels and weights for a device.

    A bundle is a folder with the model's kernels, their launches, the weights as the device will hold them,
    and model.onnx. With --mode train, a run is a whole training step: forward, backward, update. The device
    need not be connected: the program is checked against the limits in its profile. Without --weights, the
    model's own code draws them. With --memory-limit, the bundle has a streaming plan: runs load weights while
    they compute. With --max-length, the bundle is a language model that generates text. The exit status is 3
    if no plan stays within the limit. `torchedge run` runs the bundle.
    """
    from torchedge import api
    from torchedge.bundles.exporting import STAGES, check_free
    from torchedge.tracing.hub_configs import split_config

    training = {name: others.pop(name) for name in _TRAINING_ONLY}
    generating = {name: value for name in _GENERATING_ONLY if (value := others.pop(name)) is not None}
    if mode != "train":
        refuse_given(_TRAINING_ONLY, "without --mode train; add that, or omit it")
    if training["lr"] is not None:
        check_rate("--lr", training["lr"])
    if max_length is None:
        refuse_given(_GENERATING_ONLY, "without --max-length; add that, or omit it")
    else:
        refuse_given(_NOT_GENERATING, "beside --max-length, which exports generation; omit one of them")
    check_free(out, force)
    target = api.choose_device(device)
    module, label = _load(model, weights, seed)
    same: dict[str, Any] = {
        "out": out,
        "device": target,
        "seed": seed,
        "name": label,
        "memory_limit": memory_limit,
    }
    onnx &= max_length is None
    stages = [stage for stage in STAGES if stage != "model.onnx" or onnx]
    with Progress(len(stages), f"export {label}") as progress, contextlib.redirect_stdout(sys.stderr):
        same |= {"force": force, "progress": progress.begin}
        if max_length is not None:
            others.pop("check")
            if model.startswith("hf:") and (file := split_config(model)[0] / "tokenizer.json").is_file():
                generating.setdefault("tokenizer", file)
            bundle = api.export_lm(
                module, max_length=max_length, batch=batch_size, **generating, **same, **others
            )
        else:
            example = _example(module, input_size, seq_len, batch_size, seed)
            step = _step(model, module, example, training) if mode == "train" else {}
            step["accumulation"] = training["accumulation"] or 1
            bundle = api.export(module, example, mode=mode, onnx=onnx, **same, **step, **others)
    answer(bundle.document(), lambda: print(bundle), written=bundle.path)


def _load(text: str, weights: Path | None, seed: int) -> tuple[torch.nn.Module, str]:
    import torch

    from torchedge.tracing.copies import in_float32
    from torchedge.tracing.gguf_files import load_gguf
    from torchedge.tracing.hub_configs import has_weights, split_config

    torch.manual_seed(seed)
    model, label = load_named(text, weights=True)
    model = in_float32(model)
    if weights is None:
        own = text.startswith("hf:") and has_weights(split_config(text)[0])
        if not own and not text.rpartition(":")[0].endswith(".py"):
            warn(f"the weights of {label} are random (seed {seed}); --weights FILE sets them")
        return model, label
    if weights.suffix == ".gguf":
        return load_gguf(model, weights), label
    from torchedge.storage.tensors import read_tensors

    arrays, _ = read_tensors(weights, max_bytes=_MAX_WEIGHTS, finite=False)
    try:
        model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    except RuntimeError as error:
        raise InputError(
            f"{weights}: does not fit {label} ({clipped(str(error))}); expected its state_dict"
        ) from error
    return model, label


def _example(
    model: torch.nn.Module,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    batch_size: int,
    seed: int,
) -> Any:  # noqa: ANN401 - any pytree
    """Return inputs of the batch size: random numbers, and zeros for integers."""
    import torch
    from torch.utils._pytree import tree_map

    from torchedge.tracing.capturing import CaptureRequest, arguments_of, resized
    from torchedge.tracing.sequence_lengths import LengthFamily

    example = getattr(model, "example_inputs", None) if input_size is None else None
    if seq_len is not None:
        request = CaptureRequest(model, example=example, input_size=input_size)
        example, input_size = LengthFamily(request).at(seq_len).example, None
    args, kwargs, _ = arguments_of(model, example, input_size)
    generator = torch.Generator().manual_seed(seed)

    def filled(leaf: Any) -> Any:  # noqa: ANN401 - a leaf of any kind
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)

    args, kwargs = tree_map(filled, resized((args, kwargs), batch_size))
    return kwargs if kwargs and not args else args


def _step(text: str, model: torch.nn.Module, example: Any, training: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - any pytree
    """Return loss, targets and optimizer as `torchedge.export` takes them."""
    import torch

    make, rate, options = _OPTIMIZERS[training["optimizer"] or "sgd-momentum"]
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError(f"{text} has no parameter that requires a gradient; expected some to train")
    lr = rate if training["lr"] is None else training["lr"]
    step: dict[str, Any] = {"optimizer": getattr(torch.optim, make)(trained, lr=lr, **options)}
    if training["loss"] == "model":
        step["loss"] = "model"
    elif training["loss"] == "mse":
        from torchedge.bundles.onnx_models import eager_outputs

        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        outputs = eager_outputs(model, args, kwargs)
        step |= {"loss": torch.nn.functional.mse_loss, "targets": torch.zeros_like(outputs[0])}
    return step
