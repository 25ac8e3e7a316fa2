"""Latency under load fitted to rows of a known law: found, monotone, scored; damaged tables are refused."""

import gzip
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from oracles.streaming_programs import program_of_amounts

from torchedge.cli import main
from torchedge.devices import Provenance, find_device
from torchedge.errors import ProfileError
from torchedge.forests.trees import evaluate
from torchedge.profiling import load_fitting
from torchedge.profiling.load_fitting import fit_loads, read_loads, score_loads
from torchedge.storage import file_sha256
from torchedge.streaming.capacities import (
    FILE,
    THRESHOLDS,
    load_features,
    load_model_of,
    loading_way,
    rate_capacities,
)
from torchedge.streaming.rates import derive_rates, kernel_rates
from torchedge.streaming.schedules import works_of

ENVIRONMENT = {
    "row": "environment",
    "probe": "load_probe 1",
    "device": "Acme 7",
    "driver": "1.0",
    "texture": "image2d",
    "command": "load_probe.py --repeats 9 --device 0",
    "date": "2026-11-20",
}
FLOPS_MS, BYTES_MS, COPY_MS = 1e9, 4e7, 2e7
RATIOS = (0, 0.125, 0.25, 0.5, 1, 2, 4, 8)


def law(flops, nbytes, extra):
    """A kernel computes and copies at the same time; what it moves and what is copied share the memory."""
    return 0.004 + np.maximum(flops / FLOPS_MS, nbytes / BYTES_MS + extra / COPY_MS)


def row(kernel, load_class, size, flops_per_byte, **given):
    input_bytes, output_bytes = size, size // 2
    flops = flops_per_byte * (input_bytes + output_bytes)
    times = [(int(r * size), float(law(flops, input_bytes + output_bytes, r * size))) for r in RATIOS]
    return {
        "kernel": kernel,
        "class": load_class,
        "size": [size],
        "flops": flops,
        "input_bytes": input_bytes,
        "output_bytes": output_bytes,
        "global": [output_bytes // 8],
        "local": [64],
        "loads": [[extra, ms, ms] for extra, ms in times],
        "runs": 9,
        **given,
    }


def rows():
    """A table of three kernels of each class over sizes, two work-groups; the larger is a tenth slower."""
    found = [ENVIRONMENT]
    densities = {"elemental": (1, 2, 4), "reusable": (60, 100, 150), "hierarchical": (5, 8, 10)}
    for load_class, kernels in densities.items():
        for density in kernels:
            for exponent in range(14, 25):
                made = row(f"{load_class}{density}", load_class, 1 << exponent, density)
                slower = [[extra, 1.1 * ms, 1.1 * least] for extra, ms, least in made["loads"]]
                found += [made, {**made, "local": [16, 16], "loads": slower}]
    copies = [
        {"kernel": "copy", "size": [size], "local": [64], "ms": size / COPY_MS} for size in (2**20, 2**26)
    ]
    return [*found, *copies, {**copies[-1], "local": [256], "ms": 9.0}]


def write(path, lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("loads") / "loads.jsonl.gz", rows())


@pytest.fixture(scope="module")
def table(file):
    return read_loads(file)


@pytest.fixture(scope="module")
def forests(table):
    pytest.importorskip("sklearn")
    return fit_loads(table)


def test_the_table_is_read(table):
    assert len(table.cases) == 198 and (table.points, table.disturbed) == (198 * 8, 0)
    assert table.copy_gb_s == pytest.approx(2**26 / COPY_MS * COPY_MS / (2**26 / COPY_MS) / 1e6)
    assert table.environment == {
        key: ENVIRONMENT[key] for key in ("device", "driver", "texture", "command", "date")
    }
    case = table.of_class("reusable")[1]
    assert (case.kernel, case.size, case.work.work_items, case.work.group_items) == (
        "reusable60",
        (1 << 14,),
        1024,
        256,
    )
    assert case.increases[0] == 0 and case.extra_bytes[-1] == 8 << 14


@pytest.mark.slow
def test_the_law_is_found_on_sizes_left_out(table, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(load_fitting, "FOLDS", 4)
    score = score_loads(table, "reusable")
    assert score["sizes"] == 33 and score["median"] < 4 and score["mean"] < 8
    assert 5 < score["at_capacity"] < 25  # the threshold is 20 %
    assert 70 < score["share"] < 130
    # The law hides loads behind arithmetic, the threshold does not.
    assert score["at_threshold"] < score["at_capacity"]
    assert "at_capacity" not in score_loads(table, "hierarchical")


def test_predictions_never_fall_with_the_load(table, forests):
    for load_class in THRESHOLDS:
        for case in table.of_class(load_class)[::7]:
            extra = np.linspace(0, 2 * case.extra_bytes[-1], 400)
            assert (
                np.diff(evaluate(forests[load_class], load_features(case.work, case.alone_ms, extra))) >= 0
            ).all()


def test_rates_of_kernels_are_found(table):
    rates = table.rates_of("reusable")  # bound by arithmetic, FLOPS_MS
    assert rates.gflops == pytest.approx(FLOPS_MS / 1e6, rel=0.06) and rates.us == pytest.approx(4, rel=0.2)
    rates = table.rates_of("elemental")
    assert rates.gb_s == pytest.approx(BYTES_MS / 1e6, rel=0.06) and rates.us == pytest.approx(4, rel=0.2)


def test_operations_count_as_the_fastest_work_group(forests):
    assert {forest.metadata["group_items"] for forest in forests.values()} == {"64"}


def test_disturbed_points_are_left_out(tmp_path):
    lines = rows()
    lines[1]["loads"][3][1] *= 40  # its shortest run was forty times faster
    lines[2]["loads"][0][1] *= 40  # the kernel alone: nothing to compare with
    read = read_loads(write(tmp_path / "loads.jsonl", lines))
    assert (len(read.cases), read.points, read.disturbed) == (197, 198 * 8, 9)
    assert len(read.cases[0].times_ms) == 7


def test_failed_kernels_and_a_second_start_are_passed_over(tmp_path):
    lines = rows()
    failed = {"kernel": "conv", "size": [1], "local": [16, 16], "reason": "OUT_OF_RESOURCES"}
    read = read_loads(
        write(tmp_path / "loads.jsonl", [*lines, {**ENVIRONMENT, "date": "2026-11-21"}, failed])
    )
    assert len(read.cases) == 198 and read.environment["date"] == "2026-11-20"


def changed(**given):
    return json.dumps({**row("add", "elemental", 1 << 20, 1), **given})


WRONG = {
    "not JSON": "{",
    "a list": "[]",
    "another table": '{"id": "resnet18", "mode": "train"}',
    "another device": json.dumps({**ENVIRONMENT, "device": "Acme 8"}),
    "no command": json.dumps({key: ENVIRONMENT[key] for key in ENVIRONMENT if key != "command"}),
    "unknown class": changed(**{"class": "free"}),
    "no loads": changed(loads=[]),
    "no baseline": changed(loads=[[8, 1.0, 1.0], [16, 1.0, 1.0]]),
    "falling loads": changed(loads=[[0, 1.0, 1.0], [16, 1.0, 1.0], [8, 1.0, 1.0]]),
    "two numbers": changed(loads=[[0, 1.0], [16, 1.0]]),
    "no time": changed(loads=[[0, 0.0, 0.0], [16, 1.0, 1.0]]),
    "without end": changed(flops=1).replace('"flops": 1', '"flops": 1e999'),
    "not a number": changed(flops=1).replace('"flops": 1', '"flops": NaN'),
    "yes": changed(flops=True),
    "text": changed(input_bytes="many"),
    "a thousand digits": changed(flops=1).replace('"flops": 1', '"flops": ' + "1" * 1000),
    "many sizes": changed(size=[1] * 100),
    "huge launch": changed(**{"global": [10**17] * 3}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_named(line, tmp_path):
    file = write(tmp_path / "loads.jsonl", [ENVIRONMENT, changed(), line])
    with pytest.raises(
        ProfileError, match=r"loads\.jsonl line 3: .*(a row of measured loads \(.*streaming|JSON|64 bits)"
    ):
        read_loads(file)


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(ProfileError, match='has no row "environment", expected it first'):
        read_loads(write(tmp_path / "none.jsonl", [changed()]))
    few = [line for line in rows() if line.get("class") != "reusable" or line["size"][0] < 1 << 15]
    with pytest.raises(ProfileError, match=r"3 reusable kernels of different sizes .* expected at least 4"):
        read_loads(write(tmp_path / "few.jsonl", few))


@pytest.mark.slow
def test_the_command_writes_a_profile_that_plans_with_it(file, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    monkeypatch.setattr(load_fitting, "FOLDS", 2)
    out, again = tmp_path / "mine", tmp_path / "second" / "mine"
    again.parent.mkdir()
    for folder in (out, again):
        assert (
            main(["fit", "loads", str(file), "--device", "jetson-tx2", "--out", str(folder), "--json"]) == 0
        )
    printed = json.loads(capsys.readouterr().out.split("\n}\n")[0] + "}")
    assert printed["device"] == "jetson-tx2" and set(printed["loading"]["accuracy"]) == set(THRESHOLDS)
    device = find_device(out)
    told = device.profile["loading"]
    assert told["sha256"] == file_sha256(out / FILE, max_bytes=2**23)
    assert (told["provenance"], told["measured"], told["date"]) == ("measured", "2026-11-20", "1970-01-02")
    assert told["command"] == "torchedge fit loads loads.jsonl.gz --device jetson-tx2 --out mine"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }
    kept = {path.name for path in find_device("jetson-tx2").folder.iterdir()}
    assert {path.name for path in out.iterdir()} == kept | {FILE}
    figure = device.figure("unified_to_texture_gb_s")
    assert figure.provenance is Provenance.MEASURED and "2026-11-20" in figure.source
    program = program_of_amounts([("reusable", 10**9, 2 * 10**6, 10**6)])
    capacities = rate_capacities(program, device)
    assert capacities.provenance is Provenance.MEASURED
    nbytes = load_model_of(device).capacity_bytes(works_of(program)[0], capacities.latencies_ms[0])
    assert capacities.chunks[0] == nbytes // 2**18


@pytest.mark.slow
def test_rates_and_the_fastest_way_go_into_the_profile(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    from torchedge.profiling.load_fitting import fit_device_loads
    from torchedge.profiling.profile_folders import write_profile

    monkeypatch.setattr(load_fitting, "FOLDS", 2)
    lines = rows()
    for place in (1, 2):
        times = {"bytes": 8, "alone": 1.0, "copy": 1.5, "kernel": 2.0, "slot": 1.25}
        lines[place]["ways"] = {**times, "copy": 1.5 if place == 1 else 6.0}
    disk = {"row": "disk", "bytes": 2 * 10**9, "ms": 1000.0, "direct": True}
    host = [{"row": "launch", "us": 7.5}, {"row": "host", "launch_us": 5.5, "transfer_us": 12.5}]
    file = write(tmp_path / "loads.jsonl", [*lines, disk, *host])
    table = read_loads(file)
    assert table.disk_gb_s == pytest.approx(2) and table.launch_us == 7.5
    assert {way: np.exp(mean) for way, mean in table.ways.items()} == pytest.approx(
        {"copy": 3, "kernel": 2, "slot": 1.25}
    )
    before = find_device("adreno-750")
    device = write_profile(tmp_path / "out", before, {}, loading=fit_device_loads(file, before, tmp_path))
    assert device.value("disk_read_gb_s") == pytest.approx(2)
    assert device.figure("disk_read_gb_s").provenance is Provenance.MEASURED
    assert device.value("unified_to_texture_gb_s") == pytest.approx(COPY_MS / 1e6)
    told = device.profile["loading"]
    assert (told["way"], told["launch_us"]) == ("slot", 7.5)
    rates = derive_rates(device)
    assert (rates.host_launch_ms, rates.host_transfer_ms) == (0.0055, 0.0125)
    assert rates.host_transfer.provenance is Provenance.MEASURED
    assert derive_rates(before).host_transfer.provenance is Provenance.ASSUMED
    assert dict(told["slowed_by"]) == {"copy": 200.0, "kernel": 100.0, "slot": 25.0}
    assert (loading_way(device), loading_way(before)) == ("slot", "copy")
    assert dict(told["kernels"]["reusable"]) == asdict(table.rates_of("reusable"))
    assert kernel_rates(device)[0]["reusable"] == table.rates_of("reusable")
    assert kernel_rates(before)[0]["reusable"] != table.rates_of("reusable")


def test_a_profile_with_another_way_is_refused():
    device = replace(find_device("adreno-750"), profile={"loading": {"way": "by hand"}})
    with pytest.raises(ProfileError, match=r"has way 'by hand', expected one of copy, kernel, slot"):
        loading_way(device)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the folder's name is not that of a device; add --device NAME"),
        (["--device", "nonesuch"], "device 'nonesuch' is unknown"),
        (["--device", "jetson-tx2"], "not a row of measured loads"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, tmp_path, capsys):
    file = write(tmp_path / "loads.jsonl", ["{}"])
    assert main(["fit", "loads", str(file), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
