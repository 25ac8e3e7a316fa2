"""Latency on GPUs that nobody measured, scaled from the H200's: the figures of docs/unseen-gpus.md.

    python benchmarks/accuracy/unseen_gpus.py kernels|sweeps|share|products|transformers|eager|networks
        DATA [--rows N] [--every N] [--peaks]

DATA is the folder that holds gpu-kernels, pytorch-gpu-benchmark and rtx3090-train. `kernels` predicts single
kernels of five GPUs in float32. `sweeps` prints what kernels over large tensors reach of the bandwidth.
`share` and `products` fit the constants of `rates` to their convolutions and linear layers, each GPU left out
in turn; those of products to GPUs from Volta on. `transformers` predicts whole transformers with constants
chosen without the GPU, and holds them against the times of similar single kernels. `eager` predicts steps of
the H200 as those of a GPU that nobody measured. `networks` predicts whole training steps of seven GPUs, none
of which anything was fitted to. `--peaks` shows rates in the ratio of peaks, and one set of coefficients for
all steps. `--write` puts the interval of `networks` into the relative's profile. Each takes one to six
minutes.
"""

from __future__ import annotations

import csv
import gzip
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
from kernel_sums import NETWORKS, kernels_of, network_graph, summed_ms
from public_tables import STEP_SETTINGS, load_timm_model
from tables import options_of

from torchedge import capture, find_device
from torchedge.arrays import FloatArray
from torchedge.devices import DEVICE_FILE, TRANSFER_TABLE, Device, usual_host, write_device
from torchedge.graphs import Mode
from torchedge.prediction.analysis import analyse
from torchedge.prediction.intervals import weighted_quantiles
from torchedge.prediction.latency import rates
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import named, pack, work_times
from torchedge.prediction.latency.workload import (
    DEPTHWISE_COLUMNS,
    LAUNCHES,
    PASSES,
    PRODUCT_COLUMNS,
    Workload,
    count_work,
)
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.profiles import (
    CHANNELS_LAST,
    MATRICES,
    complete_models,
    read_relative,
    under_precision,
)
from torchedge.profiling.datasets import read_dataset
from torchedge.profiling.latency_fitting import one_thread
from torchedge.storage import read_toml
from torchedge.tracing.sources import load_model

CARDS: Mapping[str, Mapping[str, float]] = {
    name: dict(
        zip(
            ("compute_units", "compute_capability", "power_w", "peak_fp32_gflops", "bandwidth_gb_s",
             "peak_tf32_gflops", "peak_fp16_gflops", "peak_fp16_matrix_gflops"), figures, strict=False,
        )
    )
    for name, figures in {
        "NVIDIA A100-PCIE-40GB": (108, 8.0, 250, 19500, 1555),
        "NVIDIA A100 80GB PCIe": (108, 8.0, 300, 19500, 1935),
        "Tesla V100-PCIE-32GB": (80, 7.0, 250, 14000, 900),
        "Tesla P100-PCIE-16GB": (56, 6.0, 250, 9300, 732),
        "Tesla T4": (40, 7.5, 70, 8100, 320),
        "Tesla P4": (20, 6.1, 75, 5500, 192),
        "a100-sxm4-40gb": (108, 8.0, 400, 19500, 1555, 156000),
        "gtx1080ti": (28, 6.1, 250, 11340, 484),
        "rtx2080ti": (68, 7.5, 250, 13450, 616, 13450, 26900, 107600),
        "titanrtx": (72, 7.5, 280, 16312, 672, 16312, 32600, 130500),
        "titanv": (80, 7.0, 250, 14900, 653, 14900, 29800, 110000),
        "titanxp": (30, 6.1, 250, 12150, 548),
    }.items()
}  # fmt: skip
"""Published figures of cards: multiprocessors, compute capability, W, GFLOP/s in float32, GB/s, then GFLOP/s
of TF32, half and half matrix units. The kernels of the first six were measured without TF32."""

Constants = Mapping[str, float]
"""Constants of `rates` by name."""

PEAKS: Constants = {"VECTOR_SHARE": 0.0, "NARROW_GAIN": 1.0, "WATT_GFLOPS": float("inf")}
"""With these every rate is in the ratio of peaks."""

LAWS: Mapping[str, tuple[str, str | None, Sequence[Constants]]] = {
    "share": ("conv", None, [{"VECTOR_SHARE": i / 20} for i in range(17)]),
    "products": (
        "linear",
        MATRICES,
        [
            {"NARROW_GAIN": 1 + i / 50, "WATT_GFLOPS": 50.0 * j}
            for i in range(16)
            for j in (8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 24, 30, 60)
        ],
    ),
}
"""The operator and kind of steps that each law is fitted to, and the constants to choose from."""

OLDEST: Mapping[str, float] = {"share": 0.0, "products": 7.0}
"""The least compute capability of the GPUs that a law is fitted to: on Pascal PyTorch's library multiplies
matrices by kernels that were made for Maxwell."""

LAYERS = (256, 16384)
"""Linear layers count whose rows are not fewer and whose sides lie within, as those of networks."""
FLOOR = 4.0
"""Kernels count that take this many times as long as the shortest of their operator and GPU: the others time
launches."""
SWEEPS = {"add": 3, "mul": 3, "mulu": 2, "gelu": 2, "relu": 2, "softmax": 2, "ln": 2}
"""Operators over whole tensors: accesses of an element that they cannot do without."""
LARGE = 8_000_000
"""Elements of the smallest tensor that is no matter of launches and caches."""
SWEPT_ON = tuple(name for name in CARDS if name.startswith(("NVIDIA", "Tesla")) and "80GB" not in name)
PASS_OF = {"ln": "norm", "softmax": "norm", "gelu": "activation", "relu": "activation", "tanh": "activation",
           "add": "binary", "mul": "binary", "addu": "binary", "mulu": "binary"}  # fmt: skip


def card(name: str) -> Device:
    """Return a device of which the figures in `CARDS` alone are known, scaled from the H200."""
    like = find_device("nvidia-v100")
    given = like.figures["peak_fp32_gflops"]
    figures = {n: f for n, f in like.figures.items() if not n.startswith(("peak_", "bandwidth_"))}
    figures |= {n: replace(given, value=float(value)) for n, value in CARDS[name].items()}
    return replace(
        like, name=name, figures=figures, profile={"relative": "nvidia-h200"}, fingerprint=f"card {name}"
    )


def scaled(device: Device, mode: Mode, kind: str | None = None, precision: str | None = None) -> LatencyModel:
    """Return the latency scaled from a device's relative, of a kind where that has one."""
    relative = read_relative(device, mode)
    assert relative is not None
    if kind is not None:
        relative = replace(relative, latency=relative.kinds.get((kind, None), relative.latency))
    return under_precision(complete_models(device, mode, None, None, relative), device, precision).latency


def with_constants(constants: Constants) -> AbstractContextManager[object]:
    """Scale with other constants of `rates`."""
    return patch.dict(vars(rates), constants)


# single kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """Kernels of one operator on one GPU: work of each, its batch size and its time in ms, both (R,)."""

    work: Sequence[Workload]
    batch: FloatArray
    ms: FloatArray


def read_kernels(data: Path, operator: str, rows: int) -> dict[str, Kernels]:
    """Return kernels by GPU: every so many of the operator's, those that are not bound by their launch."""
    with gzip.open(data / "gpu-kernels" / f"{operator}.csv.gz", "rt") as lines:
        table = list(csv.DictReader(lines))
    if operator == "linear":
        least, most = LAYERS
        table = [
            row
            for row in table
            if int(row["m"]) >= least and all(least <= int(row[side]) <= most for side in "nk")
        ]
    drawn = np.random.default_rng(0).permutation(len(table))[:rows]
    by_gpu: dict[str, list[dict[str, str]]] = {}
    for place in sorted(drawn.tolist()):
        by_gpu.setdefault(table[place]["device"], []).append(table[place])
    kernels = {}
    for gpu, chosen in by_gpu.items():
        least = FLOOR * min(float(row["ms"]) for row in chosen)
        chosen = [row for row in chosen if float(row["ms"]) >= least]
        times, batches = (np.array([float(row[column]) for row in chosen]) for column in ("ms", "b"))
        kernels[gpu] = Kernels([work_of(operator, row) for row in chosen], batches, times)
    return kernels


def work_of(operator: str, row: Mapping[str, str]) -> Workload:
    """Return the work of one kernel, with the gradients of both factors of a product."""
    size = {name: float(value) for name, value in row.items() if name not in ("device", "kernel_name", "ms")}
    passes, products = np.zeros((len(PASSES) + 1, 2)), np.zeros((0, len(PRODUCT_COLUMNS)))
    if operator == "conv":
        after = (size["size"] + 2 * size["padding"] - size["kernel"]) // size["stride"] + 1
        shape = (size["in_channels"], size["out_channels"], size["kernel"] ** 2, size["stride"])
        products = np.array([[*shape, size["size"] ** 2, after**2, 1, 1, 1, 1, 0, 1, 1, 0]])
    elif operator in PASS_OF:
        passes[PASSES.index(PASS_OF[operator]), 0] = size["h"]
    else:
        products = np.array([[size["k"], size["n"], 1, 1, size["m"], size["m"], 1, 1, 1, 1, 1, 1, 1, 0]])
    return Workload(
        products, np.zeros((0, len(DEPTHWISE_COLUMNS))), passes, np.zeros(len(LAUNCHES) + 1), True
    )


def kernel_errors(kernels: Kernels, model: LatencyModel, mode: Mode) -> FloatArray:
    """Return (R,) the log of predicted over measured; of training a third of all three products."""
    work = [replace(w, training=mode == "train") for w in kernels.work]
    rows = pack(work, np.arange(len(work)), kernels.batch)
    busy = work_times(rows, named(model.coefficients, model.excess)).busy
    return np.asarray(np.log(busy / (3 if mode == "train" else 1) / kernels.ms))


def print_errors(name: str, errors: FloatArray, more: str = "") -> None:
    """Print the number of rows, their mean error and the bias in the median, %."""
    mean, bias = np.mean(np.abs(np.exp(errors) - 1)), np.exp(np.median(errors)) - 1
    print(f"{name:<44}{len(errors):>6}{100 * mean:>9.1f}{100 * bias:>+9.1f}{more}")


def kernels(data: Path, rows: int, peaks: bool) -> None:
    """Print the error of every operator on every GPU, for training and inference."""
    print(f"{'operator, GPU, mode':<44}{'rows':>6}{'mean, %':>9}{'bias, %':>9}")
    for operator in ("linear", "bmm", "conv", *PASS_OF):
        kind = None if operator == "conv" or peaks else MATRICES
        for gpu, chosen in read_kernels(data, operator, rows).items():
            for mode in ("train", "infer"):
                with with_constants(PEAKS if peaks else {}):
                    model = scaled(card(gpu), mode, kind)
                print_errors(f"{operator}, {gpu}, {mode}", kernel_errors(chosen, model, mode))


def sweeps(data: Path) -> None:
    """Print the part of the bandwidth that kernels over large tensors reach, and the error of a GPU left out.

    A GPU's times are predicted by the median part of the other GPUs.
    """
    print(f"{'part reached, error':<24}" + "".join(f"{gpu.split()[-1]:>22}" for gpu in SWEPT_ON))
    for operator, accesses in SWEEPS.items():
        with gzip.open(data / "gpu-kernels" / f"{operator}.csv.gz", "rt") as lines:
            table = [row for row in csv.DictReader(lines) if int(row["b"]) * int(row["h"]) >= LARGE]
        parts: dict[str, FloatArray] = {}
        for gpu in SWEPT_ON:
            sizes = [(int(r["b"]) * int(r["h"]), float(r["ms"])) for r in table if r["device"] == gpu]
            elements, ms = np.array(sizes).T
            parts[gpu] = 4e-6 * accesses * elements / ms / CARDS[gpu]["bandwidth_gb_s"]
        line = f"{operator:<24}"
        for gpu, part in parts.items():
            others = np.median([np.median(p) for name, p in parts.items() if name != gpu])
            line += f"{np.median(part):>14.2f}{100 * np.mean(np.abs(part / others - 1)):>6.0f} %"
        print(line)


@dataclass(frozen=True)
class Fit:
    """Constants chosen without a GPU, and its median log bias (train, infer) with them and by the peaks."""

    constants: Constants
    bias: FloatArray
    before: FloatArray


def fit_law(data: Path, law: str, rows: int) -> dict[str | None, Fit]:
    """Return the constants of a law that make kernels err least, by the GPU left out (None: none)."""
    operator, kind, choices = LAWS[law]
    biases: dict[str, FloatArray] = {}
    measured = find_device("nvidia-h200")
    for gpu, chosen in read_kernels(data, operator, rows).items():
        errors, known = [], dict[tuple[tuple[float, float], ...], list[float]]()
        for constants in (PEAKS, *choices):
            with with_constants(constants):
                given = tuple(map(rates.product_rates, (card(gpu), measured)))
                if given not in known:
                    models = {mode: scaled(card(gpu), mode, kind) for mode in ("train", "infer")}
                    known[given] = [
                        float(np.median(kernel_errors(chosen, models[mode], mode))) for mode in models
                    ]
            errors.append(known[given])
        biases[gpu] = np.array(errors)  # (1 + choices, modes)
    fits: dict[str | None, Fit] = {}
    for gpu in (*biases, None):
        others = np.stack(
            [
                b[1:]
                for name, b in biases.items()
                if name != gpu and CARDS[name]["compute_capability"] >= OLDEST[law]
            ]
        )
        best = int(np.abs(others).mean(axis=(0, 2)).argmin())
        own = others.mean(axis=0) if gpu is None else biases[gpu][1:]
        fits[gpu] = Fit(choices[best], own[best], own[0] if gpu is None else biases[gpu][0])
    return fits


def print_law(data: Path, law: str, rows: int) -> None:
    """Print the constants of a law, and what they give on the GPU left out."""
    head = f"{'training, %':>13}{'inference, %':>14}   ratio of peaks, %"
    names = tuple(LAWS[law][2][0])
    print(f"{'GPU left out':<26}" + "".join(f"{name:>16}" for name in names) + head)
    for gpu, fit in fit_law(data, law, rows).items():
        line = f"{gpu or 'none':<26}" + "".join(f"{fit.constants[name]:>16.2f}" for name in names)
        if gpu is not None:
            bias, before = (100 * (np.exp(logs) - 1) for logs in (fit.bias, fit.before))
            line += f"{bias[0]:>+13.0f}{bias[1]:>+14.0f}   {before[0]:+.0f}, {before[1]:+.0f}"
        print(line)


def print_transformers(data: Path, rows: int) -> None:
    """Print the errors of whole transformers against sums of kernels, without and with the law of products.

    A GPU's constants are those chosen without it.
    """
    fits = fit_law(data, "products", rows)
    none: Constants = {name: PEAKS[name] for name in LAWS["products"][2][0]}
    logs: dict[tuple[str, Mode, bool], list[float]] = {}
    for name, (_, _, longest) in NETWORKS.items():
        for seq_len, mode in product((longest // 4, longest), ("train", "infer")):
            graph = network_graph(name, seq_len, mode)
            work = [analyse(graph).work_under(StepSettings(optimizer="none"))]
            for batch, gpu in product((2048 // seq_len, 8192 // seq_len), fits):
                if gpu is None:
                    continue
                ms = summed_ms(data, gpu, kernels_of(graph, batch))
                for constants in (none, fits[gpu].constants):
                    with with_constants(constants):
                        model = scaled(card(gpu), mode, MATRICES)
                    value = model.predict(work, np.zeros(1, dtype=int), np.array([float(batch)])).value[0]
                    logs.setdefault((gpu, mode, constants is none), []).append(float(np.log(value / ms)))
    print(f"{'GPU left out, mode':<44}{'rows':>6}{'mean, %':>9}{'bias, %':>9}   by the peak: mean, bias, %")
    for (gpu, mode, by_peak), errors in logs.items():
        if not by_peak:
            before = np.array(logs[gpu, mode, True])
            mean, bias = np.mean(np.abs(np.exp(before) - 1)), np.exp(np.median(before)) - 1
            print_errors(f"{gpu}, {mode}", np.array(errors), f"   {100 * mean:.1f}, {100 * bias:+.1f}")


def print_eager() -> None:
    """Print errors of the H200's steps with eager attention, predicted as those of an unmeasured GPU."""
    device = find_device("nvidia-h200")
    measured, rows = device.measured_operator_us, read_dataset(device.folder / "campaign" / "settings")
    assert measured is not None and rows.launch_us is not None
    unseen = replace(device, profile={"relative": device.name}, fingerprint="as unseen")
    models = {mode: scaled(unseen, mode, MATRICES) for mode in ("train", "infer")}
    print(f"{'mode, networks':<44}{'rows':>6}{'mean, %':>9}{'bias, %':>9}")
    logs: dict[str, list[float]] = {}
    for row, label in enumerate(rows.id.tolist()):
        mode: Mode = "train" if rows.mode[row] == "train" else "infer"
        network = rows.networks[label]
        if network.setting != "eager":
            continue
        work = [analyse(rows.graph_of(label, mode)).work_under(network.settings)]
        model = replace(models[mode], host=float(rows.launch_us[row]) / measured)
        value = model.predict(work, np.zeros(1, dtype=int), rows.batch[row : row + 1].astype(float)).value
        assert network.job is not None
        which = "of kernel_sums" if network.job["network"] in NETWORKS else "others"
        logs.setdefault(f"{mode}, {which}", []).append(float(np.log(value[0] / rows["latency"][row])))
    for name, errors in sorted(logs.items()):
        print_errors(name, np.array(errors))


# whole networks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Log errors (R,) of whole networks on one card, in one precision, layout and kind."""

    card: str
    what: str
    logs: FloatArray


def networks(data: Path, every: int, peaks: bool, write: Path | None) -> None:
    """Print the errors of training steps by GPU, precision and layout, and how many an interval holds.

    The interval of a card is the 90 % quantile of the other cards' errors, each line of them counting once.
    """
    with with_constants(PEAKS if peaks else {}):
        lines = [*_torchvision(data, peaks), *_timm(data, every, peaks)]
    print(f"{'GPU, precision':<44}{'rows':>6}{'mean, %':>9}{'bias, %':>9}  inside, %")
    for line in lines:
        half = half_width([other for other in lines if other.card != line.card])
        inside = 100 * np.mean(np.abs(line.logs) <= half)
        print_errors(f"{line.card}, {line.what}", line.logs, f"{inside:>11.0f}")
    half = half_width(lines)
    print(f"90 % of all errors, each line counting once, are below a factor of {np.exp(half):.2f}")
    if write is not None:
        document = dict(read_toml(write / DEVICE_FILE))
        document["profile"] = dict(document["profile"]) | {
            TRANSFER_TABLE: {
                "latency_error": round(half, 2),
                "datasets": ["gpu-kernels", "pytorch-gpu-benchmark", "rtx3090-train"],
                "gpus": len({line.card for line in lines}),
                "rows": sum(len(line.logs) for line in lines),
                "command": "benchmarks/accuracy/unseen_gpus.py networks DATA --write",
            }
        }
        write_device(document, write)


def half_width(lines: Sequence[Errors]) -> float:
    """Return the 90 % quantile of absolute log errors, each line counting once."""
    sizes = np.concatenate([np.abs(line.logs) for line in lines])
    weights = np.concatenate([np.full(len(line.logs), 1 / len(line.logs)) for line in lines])
    return float(weighted_quantiles(sizes, weights, np.array([0.9]))[0])


def _torchvision(data: Path, peaks: bool) -> Iterator[Errors]:
    labels: dict[tuple[str, str, str], list[float]] = {}
    with open(data / "pytorch-gpu-benchmark" / "train_ms.csv") as lines:
        for row in csv.DictReader(lines):
            labels.setdefault((row["precision"], row["gpu"], row["model"]), []).append(
                float(row["ms_median"])
            )
    works: dict[tuple[str, str | None], Workload] = {}
    for name in sorted({model for _, _, model in labels}):
        graph = capture(load_model(name)[0], input_size=(3, 224, 224), mode="train", name=name)
        for amp in (None, "float16"):
            settings = StepSettings(optimizer="none", amp=amp)
            works[name, amp] = analyse(graph).work_under(settings)
    for precision, amp in (("fp32", None), ("fp16", "float16")):
        for gpu in (name for name in CARDS if name[0].islower()):
            if amp is not None and "peak_fp16_matrix_gflops" not in CARDS[gpu]:
                continue  # cards whose half precision is slower than float32, or is not published here
            names = [n for p, g, n in labels if (p, g) == (precision, gpu)]
            measured = np.array([statistics.median(labels[precision, gpu, n]) for n in names])
            work, batch = [works[n, amp] for n in names], np.full(len(names), 12.0)
            predicted = _predict(card(gpu), work, batch, amp, None, peaks)
            yield Errors(gpu, precision, np.log(predicted / measured))


def _timm(data: Path, every: int, peaks: bool) -> Iterator[Errors]:
    with open(data / "rtx3090-train" / "steps.csv") as lines:
        table = {(row["model"], row["layout"]): row for row in csv.DictReader(lines)}
    works = {}
    for name in sorted({name for name, _ in table})[::every]:
        row = table.get((name, "nchw"))
        found = "no row" if row is None else load_timm_model(
            name, int(float(row["image_size"])), float(row["param_count_m"])
        )  # fmt: skip
        if not isinstance(found, str):
            works[name] = count_work(lower_precision(found.graph, STEP_SETTINGS))
    device = replace(find_device("rtx-3090"), profile={"relative": "nvidia-h200"}, fingerprint="as unseen")
    for layout, kind in (("nchw", None), ("nhwc", CHANNELS_LAST)):
        rows = [
            (works[name], row) for (name, where), row in table.items() if name in works and where == layout
        ]
        work, batch = [w for w, _ in rows], np.array([float(row["batch_size"]) for _, row in rows])
        measured = np.array([float(row["step_ms"]) for _, row in rows])
        logs = np.log(_predict(device, work, batch, "float16", kind, peaks) / measured)
        matrices = np.array([w.of_matrices for w in work])
        for what, chosen in (("convolutions", ~matrices), ("matrices", matrices)):
            yield Errors("rtx-3090", f"float16 autocast, {layout}, {what}", logs[chosen])


def _predict(
    device: Device,
    work: Sequence[Workload],
    batch: FloatArray,
    precision: str | None,
    kind: str | None,
    peaks: bool,
) -> FloatArray:
    measured = find_device("nvidia-h200")
    met, described = usual_host(measured), measured.measured_operator_us
    host = 1.0 if met is None or described is None else met[0] / described
    model = replace(scaled(device, "train", None if peaks else kind, precision), host=host)
    matrices = None if peaks else replace(scaled(device, "train", MATRICES, precision), host=host)
    return replace(model, matrices=matrices).predict(work, np.arange(len(work)), batch).value


def main() -> None:
    """Run one of the commands."""
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("kernels", "sweeps", *LAWS, "transformers", "eager", "networks"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=8000, help="single kernels an operator, of all GPUs")
    parser.add_argument("--every", type=int, default=4, help="take one in so many networks of rtx3090-train")
    parser.add_argument("--peaks", action="store_true", help="scale by the ratio of peaks, without kinds")
    parser.add_argument("--write", type=Path, metavar="PROFILE", help="write the interval into this profile")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with one_thread():
        if arguments.what == "kernels":
            kernels(arguments.data, arguments.rows, arguments.peaks)
        elif arguments.what == "sweeps":
            sweeps(arguments.data)
        elif arguments.what == "eager":
            print_eager()
        elif arguments.what in LAWS:
            print_law(arguments.data, arguments.what, arguments.rows)
        elif arguments.what == "transformers":
            print_transformers(arguments.data, arguments.rows)
        else:
            networks(arguments.data, arguments.every, arguments.peaks, arguments.write)


if __name__ == "__main__":
    main()
