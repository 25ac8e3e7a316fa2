"""`torchedge.plan`: any model, any limit, and what comes back."""

import json
import re
from dataclasses import replace

import pytest
import torch
from oracles.streaming_programs import streamed_chain
from torch import nn

import torchedge
from torchedge.devices import find_device
from torchedge.errors import DeviceError, InputError, LimitError, PlanError
from torchedge.lowering.inference import lower_model
from torchedge.streaming.instances import INSTANCES
from torchedge.streaming.planning import StreamingPlan, plan_program, trade_off
from torchedge.streaming.plans import PLANS, always_next, preload_everything, read_plan, write_plan
from torchedge.streaming.schedules import make_schedule
from torchedge.streaming.verification import verify_plan

pytest.importorskip("scipy")
pytest.importorskip("scipy")

KIB = 1024
PHONE = "adreno-750"


def mlp(width=512, depth=6):
    """Layers of a MiB each."""
    return nn.Sequential(*(x for _ in range(depth) for x in (nn.Linear(width, width), nn.ReLU())))


def convnet():
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )


OPTIONS = {"input_size": (512,), "device": PHONE, "chunk": "64KiB"}


@pytest.fixture(scope="module")
def planned():
    return torchedge.plan(mlp(), **OPTIONS)


def test_a_plan_comes_back_with_its_run(planned):
    assert isinstance(planned, StreamingPlan)
    assert planned.status == "OPTIMAL" and planned.plan.objective == pytest.approx(planned.plan.lower_bound)
    assert verify_plan(planned.instance, planned.plan).ok
    assert planned.timeline.latency_ms < planned.preloading.latency_ms
    assert planned.timeline.preloaded_bytes < planned.preloading.preloaded_bytes / 2
    assert planned.timeline.allocated_bytes == planned.schedule.memory.total_bytes
    assert planned.timeline.memory.peak.total <= planned.timeline.allocated_bytes
    assert planned.memory_limit is None and planned.relaxation == 1
    weights = 4 * sum(p.numel() for p in mlp().parameters() if p.dim() == 2)
    assert planned.weight_bytes == planned.preloading.preloaded_bytes == weights


def test_layers_are_launches_of_the_program(planned):
    program = lower_model(mlp(), find_device(PHONE), input_size=(512,))
    assert planned.program.digest == program.digest == planned.plan.program
    assert len(planned.instance.layers) == len(program.launches)
    names = [f"{launch.scope} {program.kernels[launch.kernel].name}".strip() for launch in program.launches]
    assert [row.name for row in planned.layers] == names
    stored = {t.name: t.nbytes for t in program.tensors if t.role == "parameter" and "weight" in t.name}
    assert {weight.name: weight.nbytes for weight in planned.instance.weights} == stored


def test_a_plan_beside_another_program_is_refused(planned):
    other = lower_model(mlp(), find_device(PHONE), input_size=(3, 512))
    with pytest.raises(PlanError, match="with other kernels, shapes or precision than Sequential"):
        make_schedule(other, planned.instance, planned.plan, 2**16)


def test_the_table_of_layers(planned):
    rows = planned.layers
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row.loaded_chunks for row in rows) == sum(load.chunks for load in planned.plan.loads)
    assert all(row.loaded_chunks <= row.capacity_chunks and row.start_ms <= row.end_ms for row in rows)
    assert all(bool(row.loads) == (row.loaded_chunks > 0) for row in rows)
    assert rows[-1].end_ms == planned.timeline.latency_ms
    assert any(text.endswith(")") and "weight (" in text for row in rows for text in row.loads)


def test_weights_may_be_on_the_meta_device(planned):
    with torch.device("meta"):
        model = mlp()
    assert torchedge.plan(model, **OPTIONS).plan == planned.plan
    assert all(p.is_meta for p in model.parameters())


def test_an_example_does_as_well(planned):
    assert torchedge.plan(mlp(), torch.zeros(1, 512), device=PHONE, chunk="64KiB").plan == planned.plan
    with pytest.raises(InputError, match="expected one of them"):
        torchedge.plan(mlp(), torch.zeros(1, 512), **OPTIONS)


def test_measured_launches_replace_the_roofline(planned):
    times = [0.5 * (1 + n % 3) for n in range(len(planned.program.launches))]
    plan = plan_program(planned.program, find_device(PHONE), launch_ms=times)
    assert [layer.latency_ms for layer in plan.instance.layers] == times
    assert plan.timeline.layers.alone_ms.tolist() == times


def test_a_model_is_left_as_it_was():
    model = convnet().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torchedge.plan(model, input_size=(3, 16, 16), device=PHONE, effort=0.1)
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mib", [3.2, 3.6, 4, 5, 6, 8, 16])
def test_a_limit_is_kept_by_the_run(mib):
    limited = torchedge.plan(mlp(), memory_limit=f"{mib}MiB", **OPTIONS)
    assert limited.timeline.allocated_bytes <= limited.memory_limit == int(mib * 2**20)
    assert verify_plan(limited.instance, limited.plan).ok
    assert f"memory limit {mib:.1f} MiB, of which" in flat(limited)


def test_the_limit_that_is_named_works():
    with pytest.raises(LimitError, match="The smallest memory limit that works is") as caught:
        torchedge.plan(mlp(), memory_limit="1KiB", **OPTIONS)
    works = caught.value.works_bytes
    assert torchedge.plan(mlp(), memory_limit=f"{works}B", **OPTIONS).timeline.allocated_bytes <= works
    with pytest.raises(LimitError):
        torchedge.plan(mlp(), memory_limit=f"{int(0.98 * works)}B", **OPTIONS)
    assert isinstance(caught.value, torchedge.PlanError)


def test_lambda_weighs_preloading():
    cheap = torchedge.plan(mlp(), lam=0.0, **OPTIONS)
    assert cheap.streamed_weights == 0 and cheap.plan.objective == 0
    assert "streamed no weights objective" in flat(cheap)


def test_programs_made_by_hand():
    program = streamed_chain(8, 256, flops=10**7)
    plan = plan_program(program, find_device(PHONE), chunk="16KiB")
    assert plan.instance.residency == "weights" and plan.plan.preload == ("w0",)
    limited = plan_program(program, find_device(PHONE), chunk="16KiB", memory_limit="900KiB")
    assert limited.schedule.memory.total_bytes <= 900 * KIB
    bare = streamed_chain(1, 1)
    assert plan_program(bare, find_device(PHONE)).status == "OPTIMAL"


def test_several_settings_trade_latency_for_memory():
    steps = []
    points = trade_off(
        streamed_chain(12, 256, flops=10**7),
        find_device(PHONE),
        chunk="16KiB",
        progress=lambda: steps.append(1),
    )
    assert len(points) == len(steps) == 7 and {point.lam for point in points} >= {0.9, 0.03}
    sizes = [point.plan.timeline.allocated_bytes for point in points]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


# what is written and drawn ----------------------------------------------------------------------------------


def test_json_holds_the_plan_and_its_instance(planned, tmp_path):
    text = planned.to_json(tmp_path / "all.json")
    document = json.loads(text)
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8")) == document
    plan = PLANS.parse("text", document["plan"])
    assert plan == planned.plan and INSTANCES.parse("text", document["instance"]) == planned.instance
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == planned.plan
    assert document["program"] == planned.program.digest
    assert document["predicted"]["latency_ms"] == planned.timeline.latency_ms
    assert {"capacities", "notes", "relaxation", "memory_limit_bytes", "device"} <= set(document)
    assert (
        "plan" not in planned.summary() and planned.summary()["streamed_weights"] == planned.streamed_weights
    )


def flat(plan):
    """Its text, each run of blanks one."""
    return " ".join(str(plan).split())


def test_a_gantt_chart_of_some_layers(planned):
    pytest.importorskip("matplotlib")
    assert "layers 2 to 3" in planned.plot("gantt", layers=(2, 3)).axes[0].get_title(loc="left")
    with pytest.raises(InputError, match="memory, gantt, comparison"):
        planned.plot("pie")


# strategies -------------------------------------------------------------------------------------------------


def test_strategies_plan_the_same_program(planned):
    naive = plan_program(planned.program, find_device(PHONE), chunk="64KiB", strategy=preload_everything)
    assert naive.streamed_weights == 0 and "no bound is known" in str(naive)
    assert naive.timeline.latency_ms == planned.preloading.latency_ms
    wide = lower_model(mlp(2048, 2), find_device(PHONE), input_size=(2048,))
    eager = plan_program(wide, find_device(PHONE), chunk="64KiB", strategy=always_next)
    assert any("always-next breaks rules of the overlap problem: (C3)" in note for note in eager.notes)


# what cannot be meant ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("memory_limit", "lots", "memory_limit is 'lots'; expected a number of MiB"),
        ("memory_limit", 0, "1 byte to 1 PiB"),
        ("m_peak", "500XB", "m_peak is '500XB'"),
        ("chunk", None, "chunk is None"),
        ("chunk", "0KiB", "chunk is '0KiB'"),
        ("lam", 1.5, "lambda"),
        ("lam", float("nan"), "lambda"),
        ("precision", "int4", "float32, float16"),
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


def test_a_graph_is_no_model():
    graph = torchedge.capture(mlp(), mode="infer", input_size=(512,))
    with pytest.raises(InputError, match=r"model is a ForwardGraph; expected a torch\.nn\.Module"):
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
    assert names["plan"].timeline.allocated_bytes <= 80 * 2**20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "gantt.png"]
