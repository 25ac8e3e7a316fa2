"""Single kernels and networks of GPUs that nothing was fitted to, predicted from the H200's measurements."""

import csv
import gzip
from collections import Counter

import numpy as np
import pytest
import unseen_gpus
from kernel_sums import summed_ms
from unseen_gpus import LAWS, fit_law, read_kernels

from torchedge.prediction.latency import rates


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


@pytest.mark.slow
@pytest.mark.parametrize(("law", "within"), [("share", 0.3), ("products", 0.8)])
def test_laws_make_kernels_of_gpus_left_out_err_less_than_the_ratio_of_peaks(shared_data, law, within):
    fits = fit_law(shared_data, law, 4000)
    shipped = {name: getattr(rates, name) for name in LAWS[law][2][0]}
    errors = {gpu: [np.mean(np.abs(logs)) for logs in (f.bias, f.before)] for gpu, f in fits.items() if gpu}
    assert len(errors) == 5
    after, before = np.mean(list(errors.values()), axis=0)
    assert after < within * before
    if law == "products":  # its power limits a T4, as the P4 and the V100 show
        assert errors["Tesla T4"][0] < 0.7 * errors["Tesla T4"][1] > 0.25
    assert {name: pytest.approx(value, rel=0.15) for name, value in fits[None].constants.items()} == shipped


def test_kernels_take_as_long_as_the_nearest_in_proportion_to_their_work(tmp_path):
    sizes = [(64, 1024), (64, 2048), (128, 2048), (256, 2048), (256, 4096)]
    rows = [{"device": "T", "b": b, "h": h, "ms": b * h / 1e6, "kernel_name": "k"} for b, h in sizes]
    write(tmp_path, "ln", [*rows, {**rows[0], "b": 1, "h": 1, "ms": 0.01}])
    ms = summed_ms(tmp_path, "T", Counter({("ln", (128, 4096)): 2}))
    assert ms == pytest.approx(2 * 128 * 4096 / 1e6, rel=0.1)  # the shortest call's launch is off


@pytest.mark.slow
def test_the_commands_print_tables(shared_data, capsys):
    unseen_gpus.kernels(shared_data, 400, peaks=True)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("linear, ") for line in lines) == 10  # five GPUs, training and inference
    unseen_gpus.print_law(shared_data, "share", 400)
    assert capsys.readouterr().out.splitlines()[-1].startswith("none")
