"""Bundles in turn under one limit: each computes what it computes alone, and loads ahead for the next."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.bundles.queues import BundleQueue, draw_runs
from torchedge.cli import main
from torchedge.errors import InputError, LimitError
from torchedge.storage.amounts import bytes_of

pytest.importorskip("pyopencl")
pytest.importorskip("scipy")

WIDTHS = ((96, 512, 512, 512), (64, 256, 256, 256, 256), (32, 16))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Bundles of linear layers, each with its inputs and what it computes by itself."""
    folder = tmp_path_factory.mktemp("queue")
    rows = []
    for place, widths in enumerate(WIDTHS):
        torch.manual_seed(place)
        pairs = pairwise(widths)
        model = nn.Sequential(*[layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())])
        x = torch.randn(3, widths[0])
        out = folder / f"model{place}"
        bundle = torchedge.export(model, x, out=out, device="local-cpu", name=f"model{place}", onnx=False)
        rows.append((bundle, x.numpy(), bundle.run(x.numpy())[0]))
    return rows


@pytest.fixture(scope="module")
def queue(alone):
    return BundleQueue([bundle for bundle, *_ in alone])


@pytest.fixture(scope="module")
def least(queue):
    """The smallest limit within which the queue runs."""
    with pytest.raises(LimitError, match="smallest memory limit that works") as error:
        queue.plan("4KiB")
    return error.value.works_bytes


def within(limit, least):
    return {"least": f"{least}B", "some": f"{least + 600_000}B", "all": "1GiB"}[limit]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", ["least", "some", "all"])
@pytest.mark.parametrize("loading", ["copy", "slot"])
def test_each_iteration_computes_what_each_bundle_computes_alone(alone, queue, least, limit, loading):
    limit = within(limit, least)
    nbytes = bytes_of(limit)
    assert [port.name for port in queue.inputs] == ["1/input", "2/input", "3/input"]
    with queue.place(memory_limit=limit, reads="direct", loading=loading) as runner:
        for _ in range(3):
            outputs = runner.step(*[x for _, x, _ in alone])
            for output, (*_, expected) in zip(outputs, alone, strict=True):
                assert output.tobytes() == expected.tobytes()
            run = runner.measured()
            assert run.measured.allocated_bytes == runner.plan.schedule.memory.total_bytes <= nbytes
            models = run.models
            assert [model.model for model in models] == ["model0", "model1", "model2"]
            assert sum(model.latency_ms for model in models) == pytest.approx(run.measured.execution_ms)
            assert max(model.peak_bytes for model in models) <= run.measured.memory.peak.total
            assert sum(m.stall_ms for m in models) == pytest.approx(run.measured.stall_ms)


def test_a_model_loads_for_the_next_one(queue, alone, least):
    with queue.place(memory_limit=within("some", least)) as runner:
        runner.step(*[x for _, x, _ in alone])
        first, second, third = runner.measured().models
        streamed = {runner.plan.program.tensors[i].name for i in runner.plan.schedule.streamed}
    assert first.ahead_bytes == 0 < second.ahead_bytes <= second.loaded_bytes
    assert third.ahead_bytes == third.loaded_bytes  # its first launch uses its only matrix
    for place, run in enumerate((first, second, third), 1):
        own = [
            t.nbytes for t in runner.plan.program.tensors if t.name in streamed and t.name[0] == str(place)
        ]
        assert run.loaded_bytes == sum(own)


def test_all_weights_are_preloaded_where_the_limit_allows_it(queue, alone):
    with queue.place(memory_limit="1GiB") as runner:
        runner.step(*[x for _, x, _ in alone])
        assert not runner.plan.schedule.streamed
        assert all(model.loaded_bytes == 0 for model in runner.measured().models)


def test_the_smallest_limit_works_and_less_does_not(queue, least):
    assert queue.plan(f"{least}B").schedule.memory.total_bytes <= least
    with pytest.raises(LimitError):
        queue.plan(f"{least - 2**14}B")  # the smallest is named in hundredths of a MiB


def test_one_bundle_may_come_twice(alone, least):
    (bundle, x, expected), (other, y, wanted), _ = alone
    twice = BundleQueue([bundle, other, bundle])
    with twice.place(memory_limit=f"{2 * least}B") as runner:
        for output, known in zip(runner.step(x, y, x), (expected, wanted, expected), strict=True):
            assert output.tobytes() == known.tobytes()


def test_queues_that_cannot_be(training, alone):
    with pytest.raises(InputError, match="bundle that trains; expected inferences"):
        BundleQueue([alone[0][0], torchedge.load_bundle(training)])
    with pytest.raises(InputError, match="targets none; expected one target"):
        BundleQueue([])


def test_bundles_of_different_device_classes_are_refused(alone, tmp_path):
    other = torchedge.export(
        nn.Linear(4, 4), torch.ones(1, 4), out=tmp_path / "b", device="mali-g77", onnx=False
    )
    with pytest.raises(InputError, match="expected one target for all"):
        BundleQueue([alone[0][0], other])


def test_runs_of_a_queue_are_drawn(queue, alone, least):
    pytest.importorskip("matplotlib")
    runs = []
    with queue.place(memory_limit=within("some", least)) as runner:
        for _ in range(2):
            runner.step(*[x for _, x, _ in alone])
            runs.append(runner.measured())
    axes = draw_runs(runs, 2**20).axes[0]
    total = runs[0].measured.latency_ms + runs[1].measured.execution_ms
    assert axes.get_xlim()[1] == pytest.approx(total)
    with pytest.raises(InputError, match="no runs"):
        draw_runs([])


def test_the_snippet_of_the_documentation_runs(alone, checkout, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    text = (checkout / "docs" / "streaming.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    bundle, x, expected = alone[0]
    for name in ("bundle", "other"):
        (tmp_path / name).symlink_to(bundle.path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    names = {"image": x}
    exec(next(snippet for snippet in snippets if "BundleQueue" in snippet), names)
    assert names["first_output"].tobytes() == names["second_output"].tobytes() == expected.tobytes()
    assert (tmp_path / "queue.png").is_file() and "model0" in capsys.readouterr().out


# the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def words(alone):
    return ["run", *[str(bundle.path) for bundle, *_ in alone]]


def test_queues_run_on_the_command_line(words, alone, least, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = []
    for place, (_, x, _) in enumerate(alone, 1):
        np.save(tmp_path / f"{place}.npy", x)
        files += ["--input", f"{place}/input={tmp_path / f'{place}.npy'}"]
    trace, plot, out = (str(tmp_path / name) for name in ("trace.json", "memory.svg", "out.npz"))
    limit = f"{(least + 600_000) // 1024}KiB"
    options = ["--memory-limit", limit, "--iterations", "10", "--trace", trace, "--plot", plot, "--out", out]
    assert main([*words, *files, *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["allocated_bytes"] <= document["memory_limit_bytes"] <= least + 600_000
    assert 0 < document["average_bytes"] <= document["allocated_bytes"]
    runs = [(run["iteration"], run["model"]) for run in document["runs"]]
    assert runs == [(k, f"model{m}") for k in range(1, 11) for m in range(3)]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "memory.svg").read_text().startswith("<?xml")
    with np.load(out) as outputs:
        for place, (*_, expected) in enumerate(alone, 1):
            np.testing.assert_array_equal(outputs[f"{place}/output"], expected)
    assert main([*words, "--random", "--memory-limit", limit, "--time"]) == 0
    text = capsys.readouterr().out
    assert "model0, model1, model2 in turn" in text and "kernels of the last iteration" in text
    assert max(map(len, text.splitlines())) <= 80


def test_queues_are_described_without_inputs(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "model2: inference" in text and "3/input=FILE" in text
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["bundles"]) == 3


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--random", "--memory-limit", "4KiB"), 3, "smallest memory limit that works"),
        (("--random",), 2, "without --memory-limit"),
        (("--random", "--memory-limit", "9MiB", "--set", "lr=1"), 2, "--set is given with several bundles"),
        (("--random", "--memory-limit", "9MiB", "--save", "w.safetensors"), 2, "--save is given"),
        (("--random", "--memory-limit", "9MiB", "--out", "y.npy"), 2, "ends in .npz"),
        (("--input", "x.npy", "--memory-limit", "9MiB"), 2, "no --input is given for 2/input, 3/input"),
    ],
)
def test_wrong_queues_are_told(words, capsys, options, status, message):
    assert main([*words, *options]) == status
    error = capsys.readouterr().err
    assert message in " ".join(error.split()) and "Traceback" not in error
