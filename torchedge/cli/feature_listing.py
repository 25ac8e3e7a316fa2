"""`torchedge features`: the numbers a forest sees of a network."""

from __future__ import annotations

import argparse

from torchedge.cli.arguments import MODEL_HELP, add_json, shape, sizes
from torchedge.cli.output import print_json, print_table, print_wrapped

NAME = "features"
SUMMARY = "the prediction features of a model (perf4sight's by default)"
DESCRIPTION = f"""\
Print the prediction features of a model: closed forms of its layers' shapes,
checked against each other in `torchedge.testing`.

{MODEL_HELP}"""

_COLUMNS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--batch-size", "-b", type=sizes, default=(1,), metavar="N[,N...]", help="one or several (default 1)"
    )
    parser.add_argument("--set", dest="feature_set", metavar="NAME", help="a registered feature set")
    parser.add_argument(
        "--input-size", type=shape, metavar="CxHxW", help="shape of one sample, such as 3x224x224"
    )
    parser.add_argument("--mode", default="train", help="train (default) or infer")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compute and print."""
    from torchedge.cli.loading import check_mode, load_named
    from torchedge.prediction.feature_sets import features

    mode = check_mode(arguments.mode)
    model, label = load_named(arguments.model)
    batches = arguments.batch_size
    found = features(
        model, list(batches), feature_set=arguments.feature_set, input_size=arguments.input_size, mode=mode
    )
    values = found.values.tolist()
    if arguments.json:
        columns = values[0] if len(batches) == 1 else [list(column) for column in zip(*values, strict=True)]
        document = {
            "model": label,
            "feature_set": found.feature_set,
            "batch_size": batches[0] if len(batches) == 1 else list(batches),
            "features": dict(zip(found.names, columns, strict=True)),
        }
        print_json(document)
        return 0
    print_wrapped(f"{label}: {len(found.names)} features of {found.feature_set}")
    for start in range(0, len(batches), _COLUMNS):
        part = range(start, min(start + _COLUMNS, len(batches)))
        head = ["batch", *(str(batches[i]) for i in part)]
        rows = [[name, *(_exact(values[i][f]) for i in part)] for f, name in enumerate(found.names)]
        print()
        print_table(head, rows)
    return 0


def _exact(value: float) -> str:
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
