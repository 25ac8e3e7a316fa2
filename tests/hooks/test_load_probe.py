"""The load probe: kernels compute what they say and copy what they should; its rows, and how it goes on."""

import importlib.util
import json
import math
import sys

import numpy as np
import pytest

from torchedge.profiling.load_fitting import read_loads

EXTRA = (0, 1, 100, 5000)


@pytest.fixture(scope="module")
def probe(checkout):
    spec = importlib.util.spec_from_file_location("load_probe", checkout / "hooks/load_probe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def devices():
    cl = pytest.importorskip("pyopencl")
    try:
        found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error:
        found = []
    return found or pytest.skip("no OpenCL device")


@pytest.fixture(scope="module")
def bench(probe, devices):
    return probe.Bench(devices[0], 1 << 18)


def smallest(probe):
    """The smallest case of each kernel, in one work-group shape."""
    found = {}
    for case in probe.cases(True):
        found.setdefault(case["kernel"], case)
    return found


def expected(case, inputs):
    """What a kernel computes, by numpy in double precision."""
    x, *rest = [array.astype(np.float64) for array in inputs]
    kernel, size = case["kernel"], case["size"]
    if kernel in ("add", "relu"):
        return x + rest[0] if kernel == "add" else np.maximum(x, 0)
    if kernel == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if kernel == "matmul":
        return x.reshape(size[0], size[1]) @ rest[0].reshape(size[1], size[2])
    if kernel == "conv":
        side, c, o = size
        x, w = x.reshape(side + 2, side + 2, c), rest[0].reshape(3, 3, c, o)
        return sum(x[i : i + side, j : j + side] @ w[i, j] for i in range(3) for j in range(3))
    x = x.reshape(size)
    if kernel == "softmax":
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * rest[0] + rest[1]


def texture_of(bench, texels):
    cl = bench.cl
    found = np.empty((-(-texels // 4096), 4096, 4), np.uint16)
    if bench.format:
        cl.enqueue_copy(bench.queue, found, bench.target, origin=(0, 0), region=(4096, len(found)))
    else:
        cl.enqueue_copy(bench.queue, found, bench.target)
    return found.reshape(-1, 4)[:texels]


@pytest.mark.parametrize("name", ["add", "relu", "gelu", "matmul", "conv", "softmax", "layer_norm"])
def test_a_kernel_computes_the_same_under_each_load_and_copies_all_of_it(probe, bench, name):
    case = smallest(probe)[name]
    bench.prepare(case)
    bench.target = bench.texture(max(EXTRA))
    pool = np.empty((bench.most_bytes // 8, 4), np.uint16)
    bench.cl.enqueue_copy(bench.queue, pool, bench.pool)
    wanted = expected(case, bench.host).ravel()
    for texels in EXTRA:
        bench.launch(texels)
        found = np.empty(case["output_bytes"] // 2, np.float16)
        bench.cl.enqueue_copy(bench.queue, found, bench.output)
        assert np.abs(found - wanted).max() <= 1e-3 * max(np.abs(wanted).max(), 1e-3)
        first = bench.first - texels
        assert np.array_equal(texture_of(bench, texels or 1)[:texels], pool[first : first + texels])


def test_what_is_measured_is_what_is_said(probe):
    for case in probe.cases(False):
        assert sum(case["inputs"]) * 2 == case["input_bytes"]
        assert not any(whole % part for whole, part in zip(case["global"], case["local"], strict=True))
    keys = [probe.key_of(case) for case in probe.cases(False)]
    assert len(set(keys)) == len(keys)
    assert {case["class"] for case in probe.cases(True)} == {"elemental", "reusable", "hierarchical"}


@pytest.fixture
def run(probe, devices, tmp_path, monkeypatch):
    """Run the probe on four tiny kernels of each class; return the rows of its file."""
    tiny = []
    for name, case in smallest(probe).items():
        if name in ("relu", "matmul", "softmax"):
            for number in range(4):
                tiny.append(dict(case, size=[*case["size"][:-1], case["size"][-1] + number]))
    monkeypatch.setattr(probe, "cases", lambda quick: tiny)
    monkeypatch.setattr(probe, "POOL_BYTES", 4 << 20)
    monkeypatch.setattr(probe, "WARM_S", 0.0)
    out = tmp_path / "loads.jsonl"

    def start(*more):
        monkeypatch.setattr(sys, "argv", ["load_probe.py", "--out", str(out), "--repeats", "1", *more])
        probe.main()
        return [json.loads(line) for line in out.read_text().splitlines()]

    return start, out


def test_rows_are_read_and_a_second_start_adds_what_is_missing(run, devices):
    start, out = run
    rows = start("--quick")
    assert rows[0]["row"] == "environment" and rows[0]["device"] == devices[0].name.strip()
    assert rows[0]["command"] == "load_probe.py --repeats 1 --quick --device 0"
    assert [len(row["loads"]) for row in rows[1:13]] == [4] * 12
    for row in rows[1:13]:
        assert [extra / row["input_bytes"] for extra, _, _ in row["loads"]] == [0, 0.125, 1, 8]
        assert all(0 < least <= ms for _, ms, least in row["loads"])
    assert [row["kernel"] for row in rows[13:]] == ["copy", "copy"]
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])  # killed while it wrote
    again = start("--quick")
    assert again[:5] == rows[:5] and again[5]["row"] == "environment"
    assert [row.get("kernel") for row in again[6:]] == [row["kernel"] for row in rows[5:]]
    read = read_loads(out)
    assert read.points == 48 and read.copy_gb_s > 0


def test_rows_of_another_measurement_are_not_gone_on_with(run, tmp_path):
    start, out = run
    rows = start("--quick")
    with pytest.raises(SystemExit, match=r"load_probe: .*quick True, now False; choose another --out"):
        start()
    out.write_text(json.dumps(dict(rows[0], device="another")) + "\n")
    with pytest.raises(SystemExit, match=r"device 'another', now '"):
        start("--quick")
    out.write_text('{"id": "resnet18"}\n')
    with pytest.raises(SystemExit, match=r"line 1 is none of this probe's rows"):
        start("--quick")
    with pytest.raises(SystemExit, match=r"--device takes one of: 0 is "):
        start("--device", "99")


def test_without_a_device_it_says_what_to_do(probe, monkeypatch, tmp_path):
    cl = pytest.importorskip("pyopencl")
    monkeypatch.setattr(cl, "get_platforms", list)
    monkeypatch.setattr(sys, "argv", ["load_probe.py", "--out", str(tmp_path / "x.jsonl")])
    with pytest.raises(SystemExit, match=r"^load_probe: OpenCL finds no device; install its driver"):
        probe.main()
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(SystemExit, match=r"^load_probe: needs pyopencl; pip install"):
        probe.main()
    assert not (tmp_path / "x.jsonl").exists()
