"""Single kernels and networks of GPUs that nothing was fitted to, predicted from the H200's measurements."""

import csv
import gzip

import numpy as np
import pytest
import unseen_gpus
from unseen_gpus import SHARES, card, kernel_errors, read_kernels, scaled, vector_share

from torchedge.prediction.latency import roofline
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


def test_convolutions_of_gpus_left_out_err_less_than_by_the_ratio_of_peaks(shared_data):
    errors = {share: {} for share in SHARES.tolist()}
    for gpu, chosen in read_kernels(shared_data, "conv", 1500).items():
        for share in errors:
            with vector_share(share):
                errors[share][gpu] = [
                    abs(np.median(kernel_errors(chosen, scaled(card(gpu), mode), mode)))
                    for mode in ("train", "infer")
                ]
    for left_out in errors[0.0]:
        others = {
            share: np.mean([e for gpu, e in by_gpu.items() if gpu != left_out])
            for share, by_gpu in errors.items()
        }
        best = min(others, key=others.__getitem__)
        assert best == pytest.approx(roofline.VECTOR_SHARE, abs=0.06), left_out
        assert np.mean(errors[best][left_out]) < 0.3 * np.mean(errors[0.0][left_out]), left_out


def test_products_of_matrices_are_scaled_from_those_of_transformers(shared_data):
    kernels = read_kernels(shared_data, "linear", 3000)
    for gpu in ("NVIDIA A100-PCIE-40GB", "Tesla V100-PCIE-32GB"):
        plain, kind = (
            abs(np.median(kernel_errors(kernels[gpu], scaled(card(gpu), "train", kind), "train")))
            for kind in (None, MATRICES)
        )
        assert kind < 0.1 < plain


def test_the_commands_print_tables(shared_data, capsys):
    unseen_gpus.kernels(shared_data, 400, peaks=True)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("linear, ") for line in lines) == 10  # five GPUs, training and inference
    unseen_gpus.share(shared_data, 400)
    assert capsys.readouterr().out.splitlines()[-1].startswith("none")
