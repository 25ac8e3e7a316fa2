"""The examples, each run as a user would run it; the notebook's printed output is that of its cells today.

`TORCHEDGE_UPDATE_README=1 python -m pytest -n0 tests/test_examples.py` writes the notebook's output anew.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest

EXAMPLES = {
    "batch_size_finder.py",
    "before_training.py",
    "fine_tune_language_model.py",
    "fit_my_device.py",
    "latency_memory_tradeoff.py",
    "ofa_search.py",
    "prune_until_it_fits.py",
    "search_widths.py",
    "stream_gpt_neo.py",
    "test_features_example.py",
    "train_on_opencl.py",
    "two_models_one_phone.py",
    "whats_in_memory.py",
}


@pytest.fixture
def run(checkout, tmp_path):
    """Run an example in a fresh process; return its exit status, output and errors."""

    def call(name, *words):
        path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
        home = str(tmp_path / "home")
        own = {k: v for k, v in os.environ.items() if k not in ("TORCHEDGE_DEVICE", "TORCHEDGE_DEBUG")}
        ended = subprocess.run(
            [sys.executable, str(checkout / "examples" / name), *words],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=300,
            check=False,
            cwd=tmp_path,
            env={
                **own,
                "PYTHONPATH": path,
                "PYTHONIOENCODING": "utf-8",
                "MPLBACKEND": "Agg",
                "TORCHEDGE_HOME": home,
            },
        )
        return ended.returncode, ended.stdout, ended.stderr

    return call


def test_every_example_is_run_here(checkout):
    assert {file.name for file in (checkout / "examples").glob("*.py")} == EXAMPLES
    assert [file.name for file in (checkout / "examples").glob("*.ipynb")] == ["tour.ipynb"]


@pytest.mark.slow
def test_training_starts_where_it_fits(run):
    pytest.importorskip("sklearn")
    status, out, err = run(
        "before_training.py", "--device", "local-cpu", "--batch-size", "64", "--limit", "4096"
    )
    assert status == 0, err
    assert "batch size 64 (asked for: 64) fits into 4,096 MiB on local-cpu" in out
    losses = [float(x) for x in re.findall(r"loss in step \d+: ([\d.]+)", out)]
    assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.slow
def test_training_is_refused_where_nothing_fits(run):
    status, out, err = run("before_training.py", "--device", "jetson-tx2", "--limit", "100")
    assert status == 1 and out == ""
    assert re.fullmatch(
        r"not started: one sample already asks for [\d,]+ MiB on jetson-tx2, 100 MiB .*\n", err
    )


@pytest.mark.slow
def test_the_search_finds_a_network_within_limits(run):
    status, out, err = run("search_widths.py", "--tries", "20", "--memory", "3072", "--latency", "1200")
    assert status == 0, err
    tries, large, slow = map(int, re.search(r"(\d+) networks: (\d+) too large, (\d+) too slow", out).groups())
    assert tries == 20 and large > 0 and slow > 0 and large + slow < 20
    assert re.search(r"best: widths \(\d+(, \d+){3}\), depths \(\d(, \d){3}\), [\d,]+ parameters", out)
    assert float(re.search(r"ms \([\d,.]+ to ([\d,.]+)\)", out)[1].replace(",", "")) <= 1200


@pytest.mark.slow
def test_a_sub_network_is_searched_and_built(run):
    status, out, err = run("ofa_search.py", "--iterations", "2")
    assert status == 0, err
    limits = re.findall(r"([\d,.]+) of ([\d,.]+) (?:ms|MiB)", out)
    assert len(limits) == 3
    assert all(float(a.replace(",", "")) <= float(b.replace(",", "")) for a, b in limits)
    assert re.search(r"built: [\d.]+ million parameters, images of \d+ pixels, output \(1, 1000\)", out)
    assert len(re.findall(r"^  [\d.]+ at [\d,]+ MiB$", out, re.MULTILINE)) >= 3


@pytest.mark.slow
def test_a_network_is_pruned_until_it_fits(run):
    _need_torchvision()
    status, out, err = run("prune_until_it_fits.py", "--iterations", "8", "--limit", "1850")
    assert status == 0, err
    before, after = (
        float(x.replace(",", "")) for x in re.findall(r"^(?:un)?pruned: +([\d,]+) MiB", out, re.MULTILINE)
    )
    assert after < before and after <= 1850
    counts = re.search(r"([\d.]+) million parameters became ([\d.]+) million", out)
    assert float(counts[2]) < float(counts[1]) and re.search(r"trained for a step: loss \d", out)


@pytest.mark.slow
def test_batch_sizes_are_found_with_a_margin(run):
    _need_torchvision()
    status, out, err = run("batch_size_finder.py", "squeezenet1_1", "--limit", "3000")
    assert status == 0, err
    largest = [int(x) for x in re.findall(r"at \d+% confidence: (\d+)", out)]
    assert len(largest) == 4 and largest == sorted(largest, reverse=True) and largest[0] > largest[3]
    assert re.search(r"\d+ samples a step already give 95 % of the speed of \d+", out)
    status, _, err = run("batch_size_finder.py", "squeezenet1_1", "--limit", "300")
    assert status == 1 and "not even one sample fits into 300 MiB" in err


@pytest.mark.slow
def test_what_is_in_memory(run, tmp_path):
    pytest.importorskip("matplotlib")
    _need_torchvision()
    status, out, err = run("whats_in_memory.py", "step.png", "--batch-size", "8")
    assert status == 0, err
    assert out.startswith("resnet18, batch 8: ") and "the peak is in backward: " in out
    assert re.search(r"saved_activations +[\d.]+ MiB", out) and "MiB  conv1 [conv2d]" in out
    sizes = dict(re.findall(r"^  (SGD|SGD with momentum|AdamW) +([\d.]+) MiB", out, re.MULTILINE))
    assert float(sizes["SGD"]) < float(sizes["SGD with momentum"]) < float(sizes["AdamW"])
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trainer", "compile"])
def test_digits_are_learnt_through_opencl_as_in_pytorch(run, tmp_path, way):
    for package in ("pyopencl", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    status, out, err = run("train_on_opencl.py", "--way", way)
    assert status == 0, err
    assert re.search(r"^OpenCL   300 steps in [\d.]+ s, last loss [\d.]+$", out, re.MULTILINE)
    found = re.search(r"test accuracy: OpenCL ([\d.]+) %, PyTorch ([\d.]+) %, difference ([\d.]+)", out)
    ours, theirs, difference = map(float, found.groups())
    assert min(ours, theirs) > 95 and difference <= 0.5
    assert (tmp_path / "train_on_opencl.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_language_model_learns_within_a_third_of_its_memory(run, tmp_path, monkeypatch):
    for package in ("pyopencl", "transformers", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.setenv("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")  # most of the time is compilation
    for variable in ("POCL_CACHE_DIR", "TORCHEDGE_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    words = ("--layers", "1", "--length", "32", "--pretraining", "30", "--steps", "150")
    status, out, err = run("fine_tune_language_model.py", *words)
    assert status == 0, err
    first, last = map(
        float, re.search(r"^Python: +([\d.]+) in the first .*, ([\d.]+) in", out, re.M).groups()
    )
    assert last < first
    limit, held = map(float, re.search(r"limit is ([\d.]+) MiB, ([\d.]+) are held", out).groups())
    assert held <= limit and "\n    def " in out
    assert (tmp_path / "fine_tune_language_model.png").read_bytes().startswith(b"\x89PNG")


def _need_streaming(*packages):
    for package in ("matplotlib", "scipy", *packages):
        pytest.importorskip(package)


@pytest.mark.slow
def test_a_gpt_neo_is_planned_within_a_budget(run, tmp_path):
    _need_streaming("transformers")
    words = ("out", "--model", "gpt-neo-small", "--limit")
    status, out, err = run("stream_gpt_neo.py", *words, "300MiB")
    assert status == 0, err
    assert re.search("proven optimal|above the optimum|no bound is known", out)
    assert len(re.findall(r"^ +\d+ \S+ at .* chunks, first of ", out, re.M)) == 5
    document = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert document["allocated"]["total_bytes"] <= document["memory_limit_bytes"] == 300 << 20
    for name in ("memory.png", "gantt.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    status, out, err = run("stream_gpt_neo.py", *words, "50MiB")
    assert status == 3 and out == "" and re.fullmatch(r"\S+ does not run within .* works is .*\n", err)


@pytest.mark.slow
def test_latency_is_traded_for_memory(run, tmp_path):
    _need_streaming()
    _need_torchvision()
    status, out, err = run("latency_memory_tradeoff.py", "out.png", "--model", "resnet-50")
    assert status == 0, err
    rows = [
        [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) (?:MiB|ms)", line)[-5:]]
        for line in out.splitlines()[2:-1]
    ]
    preloaded, _, _, integrated, execution = zip(*rows, strict=True)
    assert len(rows) == 8 and preloaded[0] < preloaded[-1]
    assert integrated[0] < integrated[-1] and execution[0] >= execution[-1]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_models_share_a_phone(run, tmp_path):
    _need_streaming("transformers")
    words = ("lanes.png", "--models", "depth-anything-small", "gpt-neo-small", "--limit")
    status, out, err = run("two_models_one_phone.py", *words, "300MiB")
    assert status == 0, err
    apart, together = (
        [float(x) for x in re.search(rf"^{label} +(\d+) ms.*; ([\d.]+) MiB$", out, re.MULTILINE).groups()]
        for label in ("one at a time", "planned together")
    )
    assert together[0] < apart[0] and together[1] <= 300
    assert float(re.search(r"gpt-neo-small: .* ([\d.]+) MiB by the models before", out)[1]) > 100
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")
    status, out, err = run("two_models_one_phone.py", *words, "60MiB")
    assert status == 3 and out == "" and re.search(r"\S+ does not run within .* works", err)


def test_the_notebook_prints_what_it_shows(checkout, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))
    file = checkout / "examples" / "tour.ipynb"
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(
        notebook["cells"]
    )
    names, shown, printed = {"__name__": "__main__"}, [], []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, start=1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"tour.ipynb cell {count}", "exec"), names)
        printed.append(out.getvalue())
        shown.append("".join(line for output in cell["outputs"] for line in output["text"]))
        text = out.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        cell["execution_count"] = count
    if os.environ.get("TORCHEDGE_UPDATE_README"):
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        assert printed == shown
    assert names["picture"]._repr_png_().startswith(b"\x89PNG")


def _need_torchvision():
    from torchedge.tracing.sources import prepare_torchvision

    prepare_torchvision()
    pytest.importorskip("torchvision")


@pytest.mark.slow
def test_a_device_of_ones_own_is_measured_fitted_and_predicted(run, tmp_path):
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    _need_torchvision()
    status, out, err = run("fit_my_device.py", "mine")
    assert status == 0, err
    steps = [line.split()[2] for line in out.splitlines() if line.startswith("$ torchedge ")]
    assert steps == ["campaign", "accuracy", "predict"]
    assert "24 points: 24 measured" in out
    errors = re.findall(r"^(?:training|inference) memory: \w+, errs by (\d+) %", out, re.MULTILINE)
    assert len(errors) == 2 and max(map(int, errors)) <= 10
    assert (tmp_path / "mine" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "resnet34: training step on my-device" in out
