"""Single kernels and networks of GPUs that nothing was fitted to, predicted from the H200's measurements."""

import csv
import gzip
from collections import Counter

import kernel_sums
import numpy as np
import pytest
import unseen_gpus
from kernel_sums import kernels_of, network_graph, summed_ms
from unseen_gpus import LAWS, card, fit_law, kernel_errors, read_kernels, scaled

from torchedge.prediction.latency import rates
from torchedge.prediction.profiles import MATRICES


def write(folder, operator, rows):
    (folder / "gpu-kernels").mkdir(exist_ok=True)
    with gzip.open(folder / "gpu-kernels" / f"{operator}.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_kernels_that_wait_for_their_launch_are_omitted(tmp_path):
    rows = [
        {"device": "Tesla T4", "b": 64, "h": 1024 * n, "ms": 0.03 * n, "kernel_name": "k"} for n in (1, 3, 9)
    ]
    write(tmp_path, "ln", rows)
    (gpu, kernels), *others = read_kernels(tmp_path, "ln", 100).items()
    assert gpu == "Tesla T4" and not others and kernels.ms.tolist() == [0.27]
    assert kernels.batch.tolist() == [64] and kernels.work[0].passes.sum() == 9 * 1024


def test_a_convolution_and_a_product_are_counted_as_the_predictor_counts_them(tmp_path):
    common = {"device": "Tesla T4", "b": 4, "kernel_name": "k"}
    conv = {"in_channels": 8, "out_channels": 16, "kernel": 3, "size": 9, "stride": 2, "padding": 1}
    write(tmp_path, "conv", [{**common, **conv, "ms": ms} for ms in (0.1, 1)])
    write(tmp_path, "bmm", [{**common, "m": 5, "n": 6, "k": 7, "ms": ms} for ms in (0.1, 1)])
    (conv,), (product,) = (
        read_kernels(tmp_path, operator, 9)["Tesla T4"].work for operator in ("conv", "bmm")
    )
    assert conv.products[0, :6].tolist() == [8, 16, 9, 2, 81, 25] and not conv.of_matrices
    assert product.products[0, :6].tolist() == [7, 6, 1, 1, 5, 5] and product.of_matrices


@pytest.mark.parametrize(("law", "within"), [("share", 0.3), ("products", 0.8)])
def test_laws_make_kernels_of_gpus_left_out_err_less_than_the_ratio_of_peaks(shared_data, law, within):
    fits = fit_law(shared_data, law, 1500)
    shipped = {name: getattr(rates, name) for name in LAWS[law][2][0]}
    errors = {gpu: [np.mean(np.abs(logs)) for logs in (f.bias, f.before)] for gpu, f in fits.items() if gpu}
    assert len(errors) == 5
    after, before = np.mean(list(errors.values()), axis=0)
    assert after < within * before
    if law == "products":  # its power limits a T4, as the P4 and the V100 show
        assert errors["Tesla T4"][0] < 0.7 * errors["Tesla T4"][1] > 0.3
    assert {name: pytest.approx(value, rel=0.15) for name, value in fits[None].constants.items()} == shipped


def test_products_of_matrices_are_scaled_from_those_of_transformers(shared_data):
    kernels = read_kernels(shared_data, "linear", 3000)
    for gpu in ("NVIDIA A100-PCIE-40GB", "Tesla V100-PCIE-32GB"):
        plain, kind = (
            abs(np.median(kernel_errors(kernels[gpu], scaled(card(gpu), "train", kind), "train")))
            for kind in (None, MATRICES)
        )
        assert kind < 0.1 < plain


def test_kernels_of_a_transformer_are_those_of_its_layers(monkeypatch):
    monkeypatch.setitem(
        kernel_sums.NETWORKS, "small", ("GPT2", {"n_embd": 64, "n_layer": 1, "n_head": 2}, 256)
    )
    forward, step = (kernels_of(network_graph("small", 256, mode), 3) for mode in ("infer", "train"))
    rows = 3 * 256
    assert forward["linear", (1, rows, 192, 64)] == 1 and forward["bmm", (6, 256, 256, 32)] == 1
    assert forward["softmax", (6 * 256, 256)] == 1 and forward["ln", (rows, 64)] == 3
    assert forward["linear", (1, rows, 50257, 64)] == 1
    flops = {name: sum(2 * n * np.prod(size) for (op, size), n in kernels.items() if op in ("linear", "bmm"))
             for name, kernels in (("forward", forward), ("step", step))}  # fmt: skip
    assert flops["step"] == 3 * flops["forward"]


def test_kernels_take_as_long_as_the_nearest_in_proportion_to_their_work(tmp_path):
    sizes = [(64, 1024), (64, 2048), (128, 2048), (256, 2048), (256, 4096)]
    rows = [{"device": "T", "b": b, "h": h, "ms": b * h / 1e6, "kernel_name": "k"} for b, h in sizes]
    write(tmp_path, "ln", [*rows, {**rows[0], "b": 1, "h": 1, "ms": 0.01}])
    ms = summed_ms(tmp_path, "T", Counter({("ln", (128, 4096)): 2}))
    assert ms == pytest.approx(2 * 128 * 4096 / 1e6, rel=0.1)  # the shortest call's launch is off


def test_the_commands_print_tables(shared_data, capsys):
    unseen_gpus.kernels(shared_data, 400, peaks=True)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("linear, ") for line in lines) == 10  # five GPUs, training and inference
    unseen_gpus.print_law(shared_data, "share", 400)
    assert capsys.readouterr().out.splitlines()[-1].startswith("none")
