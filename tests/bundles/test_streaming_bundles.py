"""Bundles that stream their weights: what is exported is what runs, within the limit, to the same bits."""

import functools
import json
import operator
import re
import shutil

import numpy as np
import pytest
import torch
from oracles.children import python
from torch import nn

import torchedge
from torchedge.bundles.onnx_models import METADATA
from torchedge.cli import main
from torchedge.errors import InputError, LimitError
from torchedge.streaming.plans import PLANS

LIMIT = 3.25
"""MiB"""


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        *(layer for _ in range(8) for layer in (nn.Linear(1024 if _ == 0 else 512, 512), nn.GELU())),
        nn.Linear(512, 10),
    ).eval()


@pytest.fixture(scope="module")
def image():
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def preloading(wide, image, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundles") / "preloading"
    return torchedge.export(wide, image, out=out, device="local-cpu", onnx=False)


@pytest.fixture(scope="module")
def streaming(wide, image, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundles") / "streaming"
    return torchedge.export(wide, image, out=out, device="local-cpu", memory_limit=LIMIT, onnx=False)


@pytest.fixture
def copied(tmp_path, streaming):
    return shutil.copytree(streaming.path, tmp_path / "bundle")


@pytest.mark.slow
def test_a_streaming_bundle_computes_the_same_bits_within_its_limit(wide, image, preloading, streaming):
    (expected,) = preloading.run(image.numpy())
    for _ in range(2):
        (output,) = streaming.run(image.numpy())
        assert output.tobytes() == expected.tobytes()
    with torch.no_grad():
        np.testing.assert_allclose(expected, wide(image).numpy(), rtol=1e-4, atol=1e-5)
    assert preloading.manifest.memory.total_bytes > LIMIT * 2**20 >= streaming.manifest.memory.total_bytes
    with streaming.place(profile=True) as runner:
        runner.step(image.numpy())
        measured = runner.measured()
    assert measured.allocated_bytes == streaming.manifest.memory.total_bytes
    assert measured.memory.peak.total <= measured.allocated_bytes
    text = str(streaming)
    assert "streaming" in text and "for staging" in text
    state = wide.state_dict()
    assert streaming.state_dict().keys() == preloading.state_dict().keys() <= state.keys()
    np.testing.assert_array_equal(streaming.state_dict()["4.weight"], state["4.weight"].numpy())


@pytest.mark.parametrize(
    ("reads", "loading"), [("plain", "copy"), ("mmap", "copy"), ("direct", "kernel"), ("plain", "slot")]
)
def test_any_bundle_of_an_inference_streams_under_a_limit(image, preloading, reads, loading):
    (expected,) = preloading.run(image.numpy())
    with preloading.place(memory_limit=LIMIT, reads=reads, loading=loading) as runner:
        assert runner.streams
        assert runner.step(image.numpy())[0].tobytes() == expected.tobytes()
    with preloading.place(memory_limit="1GiB") as runner:
        assert not runner.streams
        assert runner.step(image.numpy())[0].tobytes() == expected.tobytes()


def test_a_limit_too_small_names_one_that_works(image, preloading, streaming):
    for bundle in (preloading, streaming):
        with pytest.raises(LimitError, match="smallest memory limit that works") as error:
            bundle.place(memory_limit="4KiB")
        with bundle.place(memory_limit=f"{error.value.works_bytes}B") as runner:
            runner.step(image.numpy())


def test_weights_lie_in_the_order_of_loading(streaming):
    entries = {name: e for name, e in streaming.header.entries.items() if not name.startswith("~")}
    stored = sorted(entries, key=lambda name: entries[name].start)
    schedule = streaming.schedule
    loaded = [*schedule.preload, *schedule.streamed]
    assert stored == [schedule.program.tensors[index].name for index in loaded]


def test_onnx_has_the_plan_and_its_order(wide, image, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnx_ir", minversion="1.1")  # what the extra asks for
    bundle = torchedge.export(wide, image, out=tmp_path / "b", device="local-cpu", memory_limit=LIMIT)
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    assert PLANS.parse("metadata", json.loads(metadata[METADATA])) == bundle.plan.plan
    offsets = {
        tensor.name: int(next(entry.value for entry in tensor.external_data if entry.key == "offset"))
        for tensor in model.graph.initializer
        if tensor.external_data
    }
    schedule = bundle.schedule
    names = [schedule.program.tensors[index].name for index in (*schedule.preload, *schedule.streamed)]
    stored = sorted(offsets, key=offsets.__getitem__)
    assert [name for name in stored if name in names] == [name for name in names if name in stored]
    assert len(offsets) >= 8


def test_plans_of_other_programs_are_refused(wide, image, tmp_path):
    plan = torchedge.plan(wide, image, device="local-cpu", memory_limit=LIMIT)
    bundle = torchedge.export(wide, image, out=tmp_path / "a", device="local-cpu", plan=plan, onnx=False)
    assert bundle.plan.plan == plan.plan
    other = torch.cat([image, image])
    with pytest.raises(InputError, match="model, example, device or precision differ"):
        torchedge.export(wide, other, out=tmp_path / "b", device="local-cpu", plan=plan, onnx=False)
    with pytest.raises(InputError, match="expected one of them"):
        torchedge.export(wide, image, out=tmp_path / "b", plan=plan, memory_limit=LIMIT, onnx=False)
    with pytest.raises(InputError, match="expected memory_limit for a training step"):
        torchedge.export(wide, image, out=tmp_path / "b", mode="train", plan=plan, onnx=False)


def early(reads):
    """Return reads of which the first that waits for copies begins before the last of them."""
    first = next(place for place, read in enumerate(reads) if read["after"])
    return [{**read, "after": read["after"] - (place == first)} for place, read in enumerate(reads)]


DAMAGES = {
    "another program": ("plan", "program", lambda _: "0" * 64),
    "no program": ("plan", "program", lambda _: ""),
    "a late load": ("plan", "loads", 0, "layer", lambda layer: layer + 1),
    "another use": ("instance", "weights", -1, "first_use", lambda layer: layer - 1),
    "little staging memory": ("staging_bytes", lambda _: 1),
    "overlapping places": ("arena", "offsets", lambda places: [[tensor, 0] for tensor, _ in places]),
    "a missing place": ("arena", "offsets", lambda places: places[:-1]),
    "a moved copy": ("loads", "run", 0, "copies", 0, "place", 0, lambda at: at + 4096),
    "a place of five numbers": ("loads", "run", 0, "copies", 0, "place", lambda _: [0, 0, 1, 1, 1]),
    "a late copy": ("loads", "run", 0, "copies", 0, "after", lambda launch: launch + 1),
    "an early copy": ("loads", "run", -1, "copies", -1, "after", lambda launch: launch - 1),
    "another tensor": ("loads", "run", 0, "copies", 0, "tensor", lambda tensor: tensor + 1),
    "a missing copy": ("loads", "run", lambda reads: reads[:-1]),
    "an early read": ("loads", "run", early),
    "a read elsewhere": ("loads", "preload", 0, "offset", lambda offset: offset + 4096),
    "a read outside of staging memory": ("loads", "run", 0, "at", lambda at: at + 2**40),
    "a negative place": ("loads", "run", 0, "at", lambda _: -4096),
    "no wait": ("loads", "waits", lambda waits: [0 if count == max(waits) else count for count in waits]),
    "too few waits": ("loads", "waits", lambda waits: waits[:-1]),
}
"""Where a plan is damaged, and what stands there then."""


@pytest.mark.sampled(11)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_plans_are_refused(copied, reseal, damage):
    path = copied / "streaming_plan.json"
    document = json.loads(path.read_text())
    *way, last, change = DAMAGES[damage]
    holder = functools.reduce(operator.getitem, way, document)
    holder[last] = change(holder[last])
    path.write_text(json.dumps(document))
    reseal(copied, "streaming_plan.json")
    with pytest.raises(InputError, match="export the model again"):
        torchedge.load_bundle(copied)


def test_memory_in_the_manifest_is_that_of_the_plan(copied):
    path = copied / "manifest.json"
    document = json.loads(path.read_text())
    document["memory"]["staging_bytes"] += 4096
    document["memory"]["total_bytes"] += 4096
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="memory"):
        torchedge.load_bundle(copied)


@pytest.mark.slow
def test_the_snippet_of_the_documentation_streams(wide, image, preloading, checkout, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    text = (checkout / "docs" / "streaming-how.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"torchedge": torchedge, "model": wide, "example": image, "image": image.numpy()}
    exec(next(snippet for snippet in snippets if "torchedge.export(" in snippet), names)
    assert names["bundle"].run(names["image"])[0].tobytes() == preloading.run(image.numpy())[0].tobytes()
    assert names["measured"].allocated_bytes == names["bundle"].schedule.memory.total_bytes
    assert (tmp_path / "trace.json").is_file() and (tmp_path / "memory.png").is_file()


# the command line -------------------------------------------------------------------------------------------


def test_runs_stream_on_the_command_line(preloading, tmp_path, capsys):
    bundle, trace = str(preloading.path), tmp_path / "trace.json"
    plot = tmp_path / "memory.svg"
    options = ["--random", "--memory-limit", "3.25MiB", "--trace", str(trace), "--plot", str(plot)]
    assert main(["run", bundle, *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["streaming"]["allocated_bytes"] <= LIMIT * 2**20
    assert json.loads(trace.read_text())["traceEvents"]
    assert plot.read_text().startswith("<?xml")
    assert main(["run", bundle, "--random", "--memory-limit", "3.25MiB", "--time"]) == 0
    assert "waiting for weights" in capsys.readouterr().out
    assert main(["run", bundle, "--random", "--memory-limit", "4KiB"]) == 3
    assert "works" in capsys.readouterr().err
    assert main(["run", bundle, "--random", "--trace", str(trace)]) == 2
    assert "all weights" in capsys.readouterr().err


@pytest.mark.slow
def test_exports_stream_on_the_command_line(tmp_path, capsys):
    out, nets = str(tmp_path / "b"), tmp_path / "nets.py"
    nets.write_text(
        "from torch import nn\ndef wide():\n    return nn.Sequential(*[nn.Linear(512, 512) for _ in 'abcd'])"
    )
    options = ["export", f"{nets}:wide", "--device", "local-cpu", "--input-size", "512", "--no-onnx"]
    assert main([*options, "--out", out, "--memory-limit", "1KiB"]) == 3
    assert "works" in capsys.readouterr().err
    assert main([*options, "--out", out, "--memory-limit", "4MiB"]) == 0
    assert "streaming" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_only_runs_a_bundle_plans_in_another_one(preloading):
    code = (
        "import sys\nfrom torchedge.bundles.bundle import Bundle\nfrom torchedge.errors import LimitError\n"
        f"bundle = Bundle.open({str(preloading.path)!r})\n"
        f"print(bundle.schedules_within({LIMIT})['infer'].memory.total_bytes)\n"
        "try:\n    bundle.schedules_within('4KiB')\n"
        "except LimitError as error:\n    print(error.works_bytes)\n"
        "print(*{'torch', 'scipy'} & set(sys.modules))"
    )
    total, works, *heavy = python("-c", code).stdout.split()
    assert int(total) == preloading.schedules_within(LIMIT)["infer"].memory.total_bytes and heavy == []
    with pytest.raises(LimitError) as error:
        preloading.schedules_within("4KiB")
    assert int(works) == error.value.works_bytes
