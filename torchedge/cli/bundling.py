"""`torchedge export`: a model as a folder of kernels, launches and weights for one device."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import MODEL_HELP, add_json, shape, whole
from torchedge.cli.console import Progress, print_json, warn
from torchedge.cli.options import load_named
from torchedge.errors import InputError

if TYPE_CHECKING:
    import torch

    from torchedge.bundles.bundle import Bundle

NAME = "export"
SUMMARY = "write a model as OpenCL kernels and weights for a device"
DESCRIPTION = f"""\
Write a bundle: a folder with the model's OpenCL kernels, their launches, the
weights as the device will hold them, and model.onnx. With --train a run is a
whole training step: forward, backward, update. The device need not be here: the
program is held against the limits in its profile. `torchedge run` executes it.

{MODEL_HELP}
The last two hold no weights that could be exported. Weights are as the model's
own code draws them, after --seed, unless --weights gives them."""

LOSSES = ("cross-entropy", "mse", "model")
OPTIMIZERS = ("sgd-momentum", "sgd", "adam", "adamw")
_RATES = {"sgd": 0.01, "sgd-momentum": 0.01, "adam": 0.001, "adamw": 0.001}
_MAX_WEIGHTS = 2**36


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--out", "-o", type=Path, required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument("--device", "-d", help="name, alias or profile folder; see `torchedge devices`")
    parser.add_argument("--batch-size", "-b", type=whole, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--input-size",
        type=shape,
        metavar="CxHxW",
        help="shape of one sample, such as 3x224x224 (default: the model's own)",
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="a .safetensors file of the model's state"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random weights (default 0)")
    parser.add_argument("--train", action="store_true", help="a training step instead of an inference")
    parser.add_argument("--loss", metavar="NAME", help=f"with --train: {', '.join(LOSSES)} (the first)")
    parser.add_argument(
        "--optimizer", metavar="NAME", help=f"with --train: {', '.join(OPTIMIZERS)} (the first)"
    )
    parser.add_argument("--lr", type=float, metavar="RATE", help="with --train: the learning rate")
    parser.add_argument(
        "--accumulate", type=whole, metavar="N", help="with --train: batches to an update (default 1)"
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "float16"),
        default="float32",
        help="of large intermediates; kernels compute in float32",
    )
    parser.add_argument("--no-onnx", action="store_true", help="write no model.onnx")
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export and print what was written."""
    from torchedge.api import choose_device, export
    from torchedge.bundles.exporting import STAGES, check_free

    _check(arguments)
    check_free(arguments.out, arguments.force)
    device = choose_device(arguments.device)
    model, label = _load(arguments)
    example = _example(model, arguments)
    options = _training(model, example, arguments) if arguments.train else {}
    stages = [stage for stage in STAGES if stage != "model.onnx" or not arguments.no_onnx]
    with Progress(len(stages), f"export {label}") as progress, contextlib.redirect_stdout(sys.stderr):

        def tell(stage: str) -> None:
            if stage != stages[0]:
                progress.step()
            progress.doing(stage)

        bundle = export(
            model,
            example,
            out=arguments.out,
            device=device,
            train=arguments.train,
            seed=arguments.seed,
            name=label,
            onnx=not arguments.no_onnx,
            accumulate=arguments.accumulate or 1,
            precision=arguments.precision,
            force=arguments.force,
            progress=tell,
            **options,
        )
    if arguments.json:
        print_json(document(bundle))
    else:
        print(bundle)
        print(f"written to {bundle.path}")
    return 0


def document(bundle: Bundle) -> dict[str, Any]:
    """Return what a bundle is as plain data: its manifest, and what the program counts."""
    from torchedge.bundles.manifests import MANIFESTS

    return {
        "path": str(bundle.path),
        **MANIFESTS.document(bundle.manifest),
        "kernels": len(bundle.program.kernels),
        "launches": len(bundle.program.launches),
    }


def _check(arguments: argparse.Namespace) -> None:
    for name, words in (
        ("loss", LOSSES),
        ("optimizer", OPTIMIZERS),
        ("lr", None),
        ("accumulate", None),
    ):
        value = getattr(arguments, name)
        if value is not None and not arguments.train:
            raise InputError(f"--{name} is given without --train; expected it for a training step alone")
        if value is not None and words is not None and value not in words:
            raise InputError(f"--{name} is {value!r}; expected one of {', '.join(words)}")
    if arguments.lr is not None and not 0 <= arguments.lr < float("inf"):
        raise InputError(f"--lr is {arguments.lr}; expected a number from 0 on")


def _load(arguments: argparse.Namespace) -> tuple[torch.nn.Module, str]:
    import torch

    torch.manual_seed(arguments.seed)
    model, label = load_named(arguments.model, weights=True)
    if arguments.weights is None:
        if not arguments.model.rpartition(":")[0].endswith(".py"):
            warn(f"the weights of {label} are random (seed {arguments.seed}); --weights FILE gives others")
        return model, label
    from torchedge.storage.tensors import read_tensors

    arrays, _ = read_tensors(arguments.weights, max_bytes=_MAX_WEIGHTS, finite=False)
    try:
        model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{arguments.weights}: does not fit {label} ({reason[:200]}); give its state_dict"
        ) from error
    return model, label


def _example(model: torch.nn.Module, arguments: argparse.Namespace) -> Any:  # noqa: ANN401 - any pytree
    """Return inputs of the batch size: random numbers, zeros where integers are meant."""
    import torch
    from torch.utils._pytree import tree_map

    from torchedge.tracing.capturing import arguments_of, resized

    args, kwargs, _ = arguments_of(model, getattr(model, "example_inputs", None), arguments.input_size)
    generator = torch.Generator().manual_seed(arguments.seed)

    def filled(leaf: Any) -> Any:  # noqa: ANN401 - a leaf of any kind
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)

    args, kwargs = tree_map(filled, resized((args, kwargs), arguments.batch_size))
    return kwargs if kwargs and not args else args


def _training(model: torch.nn.Module, example: Any, arguments: argparse.Namespace) -> dict[str, Any]:  # noqa: ANN401
    """Return loss, targets and optimizer as `torchedge.export` takes them."""
    import torch

    name = arguments.optimizer or OPTIMIZERS[0]
    rate = _RATES[name] if arguments.lr is None else arguments.lr
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError(
            f"{arguments.model} has no parameter that requires a gradient; expected some to train"
        )
    optimizer: torch.optim.Optimizer
    if name in ("adam", "adamw"):
        optimizer = (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(trained, lr=rate)
    else:
        optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9 if name == "sgd-momentum" else 0.0)
    options: dict[str, Any] = {"optimizer": optimizer}
    if arguments.loss == "model":
        options["loss"] = "model"
    elif arguments.loss == "mse":
        from torchedge.bundles.onnx_models import eager_outputs

        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        outputs = eager_outputs(model, args, kwargs)
        options |= {"loss": torch.nn.functional.mse_loss, "targets": torch.zeros_like(outputs[0])}
    return options
