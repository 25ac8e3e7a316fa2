"""`torchedge.plan`: any model, any limit, and what comes back."""

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from oracles.inference_graphs import make_graph
from torch import nn

import torchedge
from torchedge.devices import find_device
from torchedge.errors import DeviceError, InputError, LimitError
from torchedge.streaming.fusion import fuse
from torchedge.streaming.instances import INSTANCES
from torchedge.streaming.layering import lay_out
from torchedge.streaming.planning import plan_graph
from torchedge.streaming.plans import PLANS, read_plan, write_plan
from torchedge.streaming.strategies import always_next, preload_everything
from torchedge.streaming.streaming_plans import StreamingPlan
from torchedge.streaming.verification import verify_plan

pytest.importorskip("ortools")
pytest.importorskip("scipy")

KIB = 1024
PHONE = "adreno-750"


def mlp(width=512, depth=6):
    """Layers of half a MiB each in half precision."""
    return nn.Sequential(*(x for _ in range(depth) for x in (nn.Linear(width, width), nn.ReLU())))


def convnet():
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )


OPTIONS = {"input_size": (512,), "device": PHONE, "chunk": "64KiB"}


@pytest.fixture(scope="module")
def found():
    return torchedge.plan(mlp(), **OPTIONS)


def test_a_plan_comes_back_with_its_run(found):
    assert isinstance(found, StreamingPlan)
    assert found.status == "OPTIMAL" and found.plan.objective == pytest.approx(found.plan.lower_bound)
    assert verify_plan(found.instance, found.plan).ok
    assert found.timeline.latency_ms < found.preloading.latency_ms
    assert found.timeline.preloaded_bytes < found.preloading.preloaded_bytes / 5
    assert found.memory_limit is None and found.relaxation == 1
    assert found.preloaded_mib == found.timeline.preloaded_bytes / 2**20
    weights = sum(p.numel() for p in mlp().parameters())
    assert found.graph.weight_bytes == 2 * weights and found.preloading.preloaded_bytes == 2 * weights


def test_the_table_of_layers(found):
    rows = found.layers
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row.loaded_chunks for row in rows) == sum(load.chunks for load in found.plan.loads)
    assert all(row.loaded_chunks <= row.capacity_chunks and row.start_ms <= row.end_ms for row in rows)
    assert all(bool(row.loads) == (row.loaded_chunks > 0) for row in rows)
    assert rows[-1].end_ms == found.timeline.latency_ms
    assert any(text.endswith(")") and "weight (" in text for row in rows for text in row.loads)


def test_weights_may_be_on_the_meta_device(found):
    with torch.device("meta"):
        model = mlp()
    assert torchedge.plan(model, **OPTIONS).plan == found.plan
    assert all(p.is_meta for p in model.parameters())


def test_an_example_a_graph_and_a_file_do_as_well(found):
    assert torchedge.plan(mlp(), torch.zeros(1, 512), device=PHONE, chunk="64KiB").plan == found.plan
    graph = torchedge.capture(mlp(), mode="infer", input_size=(512,), batch_size=1)
    assert torchedge.plan(graph, device=find_device(PHONE), chunk=64 * KIB).plan == found.plan


def test_a_model_is_left_as_it_was():
    model = convnet().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torchedge.plan(model, input_size=(3, 16, 16), device=PHONE, effort=0.1)
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("mib", [2.1, 2.3, 2.5, 2.7, 3, 4, 8])
def test_a_limit_is_kept_by_the_run(mib):
    limited = torchedge.plan(mlp(), memory_limit=f"{mib}MiB", **OPTIONS)
    assert limited.timeline.memory.peak.total <= limited.memory_limit == int(mib * 2**20)
    assert verify_plan(limited.instance, limited.plan).ok
    assert f"memory limit   {mib:.1f} MiB, of which" in str(limited)


def test_the_limit_that_is_named_works():
    with pytest.raises(LimitError, match="a memory limit of") as caught:
        torchedge.plan(mlp(), memory_limit=KIB, **OPTIONS)
    works = caught.value.works_bytes
    limited = torchedge.plan(mlp(), memory_limit=works, **OPTIONS)
    assert limited.timeline.memory.peak.total <= works
    assert isinstance(caught.value, torchedge.PlanError)


def test_the_same_plan_comes_out_again(found):
    assert torchedge.plan(mlp(), **OPTIONS).to_json() == found.to_json()


def test_precision_sets_what_is_stored():
    sizes = {
        name: torchedge.plan(mlp(), precision=name, **OPTIONS).graph.weight_bytes
        for name in ("float16", "float32", "model")
    }
    assert sizes["float32"] == sizes["model"] == 2 * sizes["float16"]


def test_lambda_weighs_preloading():
    cheap = torchedge.plan(mlp(), lam=0.0, **OPTIONS)
    assert cheap.streamed_weights == 0 and cheap.plan.objective == 0
    assert "streamed no weights objective" in flat(cheap)


def test_kernels_are_fused_as_asked():
    graph = torchedge.capture(convnet(), mode="infer", input_size=(3, 16, 16), batch_size=1)
    counts = {
        name: len(plan_graph(graph, find_device(PHONE), fusion=name, effort=0.1).graph.operations)
        for name in ("none", "all", "adaptive")
    }
    laid = lay_out(graph)
    assert counts["none"] == len(laid.operations) and counts["all"] == len(fuse(laid).operations)
    assert counts["all"] <= counts["adaptive"] <= counts["none"]


def test_graphs_made_by_hand():
    rows = [("op0", "embedding", [], 4000, ["w0"])]
    rows += [(f"op{n}", "linear", [f"op{n - 1}"], 4000, [f"w{n}"]) for n in range(1, 8)]
    graph = make_graph(*rows, weight_bytes=300_000)
    made = plan_graph(graph, find_device(PHONE), fusion="none", chunk=KIB, residency="weights")
    assert made.instance.residency == "weights" and made.plan.preload[:1] == ("w0",)
    limit = plan_graph(graph, find_device(PHONE), fusion="none", chunk=KIB, memory_limit=1_300_000)
    assert limit.timeline.memory.peak.total <= 1_300_000
    assert plan_graph(make_graph(("op", "relu", [], 8, [])), find_device(PHONE)).status == "OPTIMAL"


# what is written and drawn ----------------------------------------------------------------------------------


def test_json_holds_the_plan_and_its_instance(found, tmp_path):
    text = found.to_json(tmp_path / "all.json")
    document = json.loads(text)
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8")) == document
    plan = PLANS.parse("text", document["plan"])
    assert plan == found.plan and INSTANCES.parse("text", document["instance"]) == found.instance
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == found.plan
    assert document["simulated"]["latency_ms"] == found.timeline.latency_ms
    assert {"capacities", "notes", "relaxation", "memory_limit_bytes", "device"} <= set(document)
    assert "plan" not in found.summary() and found.summary()["streamed_weights"] == found.streamed_weights


def flat(plan):
    """Its text, each run of blanks one."""
    return " ".join(str(plan).split())


def test_the_text_says_what_counts(found):
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    peak = f"{found.timeline.memory.peak.total / 2**20:,.1f} MiB"
    for words in (
        f"on {PHONE}",
        "proven optimal",
        "lambda 0.9, M_peak 500.0 MiB",
        "preloading everything",
        "waiting for the disk",
        f"{found.timeline.latency_ms:,.1f} ms",
        peak,
        "(published)",
        "(assumed)",
        "loaded while layers run",
    ):
        assert words in flat(found), words
    assert "memory limit" not in text


def test_the_text_of_a_limit_and_of_a_gap(found):
    tight = torchedge.plan(mlp(), memory_limit="2.1MiB", **OPTIONS)
    assert tight.rates.staging_bytes < 16 * 2**20 and "are read ahead" in flat(tight)
    budgeted = replace(
        found.budgeted,
        plan=replace(found.plan, status="FEASIBLE", lower_bound=found.plan.objective * 0.99),
        relaxation=1.5,
    )
    text = flat(replace(found, budgeted=budgeted, memory_limit=2**30, notes=("take care",)))
    assert "at most 1 % above the optimum" in text and "1.5 times their capacity" in text
    assert text.endswith("note take care")


@pytest.mark.parametrize("kind", ["memory", "gantt", "comparison"])
def test_pictures(found, kind):
    figures = pytest.importorskip("matplotlib.figure")
    figure = found.plot(kind)
    assert isinstance(figure, figures.Figure)
    figure.savefig(io.BytesIO(), format="svg")


def test_a_gantt_chart_of_some_layers(found):
    pytest.importorskip("matplotlib")
    assert "layers 2 to 3" in found.plot("gantt", layers=(2, 3)).axes[0].get_title(loc="left")
    with pytest.raises(InputError, match="memory, gantt, comparison"):
        found.plot("pie")


# strategies -------------------------------------------------------------------------------------------------


def test_strategies_plan_the_same_kernels(found):
    graph = torchedge.capture(mlp(), mode="infer", input_size=(512,), batch_size=1)
    naive = plan_graph(graph, find_device(PHONE), chunk="64KiB", strategy=preload_everything)
    assert naive.graph.operations == found.graph.operations and naive.streamed_weights == 0
    assert "no bound is known" in str(naive)
    wide = torchedge.capture(mlp(2048, 2), mode="infer", input_size=(2048,), batch_size=1)
    eager = plan_graph(wide, find_device(PHONE), chunk="64KiB", strategy=always_next)
    assert any("always-next breaks rules of the overlap problem: (C3)" in note for note in eager.notes)


# what cannot be meant ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("memory_limit", "lots", "memory_limit is 'lots'; expected bytes"),
        ("memory_limit", 0, "1 byte to 1 PiB"),
        ("m_peak", "500MB", "m_peak is '500MB'"),
        ("chunk", None, "chunk is None"),
        ("chunk", "0KiB", "chunk is '0KiB'"),
        ("lam", 1.5, "lambda"),
        ("lam", float("nan"), "lambda"),
        ("precision", "int4", "float16, float32, model"),
        ("fusion", "some", "adaptive, all, none"),
        ("effort", 0, "effort is 0"),
        ("effort", float("nan"), "effort is nan"),
    ],
)
def test_options_that_make_no_sense(option, value, says):
    with pytest.raises(InputError, match=says):
        torchedge.plan(mlp(), **{**OPTIONS, option: value})


def test_a_device_without_storage():
    phone = find_device(PHONE)
    figures = {name: figure for name, figure in phone.figures.items() if name != "disk_read_gb_s"}
    with pytest.raises(
        DeviceError, match=r"gives no disk_read_gb_s.*add \[figures.disk_read_gb_s\].*device.toml"
    ):
        torchedge.plan(mlp(), input_size=(512,), device=replace(phone, figures=figures))
    with pytest.raises(DeviceError, match="adreno-750"):
        torchedge.plan(mlp(), input_size=(512,), device="adreno-75O")


def test_a_graph_of_training():
    graph = torchedge.capture(mlp(), input_size=(512,))
    with pytest.raises(InputError, match="captured for training"):
        torchedge.plan(graph, device=PHONE)


def test_the_snippet_of_the_documentation_runs(checkout, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    text = (checkout / "docs" / "streaming.md").read_text(encoding="utf-8")
    snippet = next(
        s for s in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "torchedge.plan(" in s
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippet, names)
    assert names["plan"].timeline.memory.peak.total <= 48 * 2**20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "gantt.png"]
