"""Exporting: for devices that are not here, with ONNX, with a plan; what cannot be exported is told."""

import copy
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from oracles.opencl_devices import with_figures
from torch import nn

import torchedge
from torchedge.bundles import exporting, launch_bundles
from torchedge.bundles.bundle import Bundle
from torchedge.errors import (
    CaptureError,
    DeviceError,
    DeviceMemoryError,
    InputError,
    MissingExtraError,
    TorchedgeError,
)
from torchedge.lowering.limits import check_limits, profile_limits
from torchedge.lowering.targets import device_class
from torchedge.opencl import choose_device, open_context


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adreno", "mobile"), ("mali", "mobile"), ("adreno-540", "mobile"), ("mali-g715", "mobile"),
        ("nvidia-h200", "gpu"), ("jetson-tx2", "gpu"), ("local-cpu", "cpu"),
    ],
)  # fmt: skip
def test_devices_have_a_class(name, kind):
    device = torchedge.find_device(name)
    assert device_class(device.kind, device.vendor) == kind


def test_limits_come_from_the_profile():
    limits = profile_limits(torchedge.find_device("adreno-740"))
    assert (limits.image_width, limits.image_height, limits.pitch_texels) == (16384, 16384, 64)
    assert (limits.local_bytes, limits.work_group, limits.allocation_bytes) == (32768, 1024, 2**30)
    assert limits.half_arithmetic and limits.half_images and limits.double is False
    assert limits.sources["image_width"] == "max_image_width, assumed"
    assert set(limits.unknown) == {"work_item_sizes", "offset_bytes"}
    mali = profile_limits(torchedge.find_device("mali-g77"))
    assert mali.work_group == 512 and mali.allocation_bytes is None and mali.address_bytes == 32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["adreno", "mali"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_bundles_for_phones_are_held_against_their_limits(model, batch, tmp_path, device, mode):
    bundle = torchedge.export(model, batch[0], out=tmp_path / "phone", device=device, mode=mode, onnx=False)
    limits = profile_limits(torchedge.find_device(device))
    check_limits(bundle.program, limits)
    assert bundle.program.target == "mobile"
    assert bundle.manifest.target.checked["local_bytes"] == limits.local_bytes == 32768
    assert bundle.manifest.target.unknown == limits.unknown


@pytest.mark.slow
@pytest.mark.parametrize("device", ["adreno", "mali"])
def test_images_of_phones_share_the_arena(tmp_path, device):
    torch.manual_seed(4)
    layers = [(16, 64), (64, 64), (64, 32), (32, 64)]
    deep = nn.Sequential(*[nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in layers])
    x = torch.randn(1, 16, 32, 32)
    bundle = torchedge.export(deep, x, out=tmp_path / "b", device=device, onnx=False)
    storages = {t.layout.storage for t in bundle.program.tensors if t.role == "intermediate"}
    assert "image_buffer" in storages
    assert all(t.layout.row_texels % 64 == 0 for t in bundle.program.tensors)
    memory = bundle.manifest.memory
    assert memory.live_bytes <= memory.arena_bytes <= 1.05 * memory.live_bytes
    with torch.no_grad():
        expected = deep(x).numpy()
    np.testing.assert_allclose(bundle.run(x)[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"max_allocation_mib": 0.01}, r"parameter 4\.weight takes 20480 bytes at once, adreno-740 takes"),
        ({"memory_mib": 0.01}, "program Small takes .* at most 10485 .memory_mib, assumed"),
    ],
)
def test_what_is_beyond_a_device_is_named(model, batch, tmp_path, figures, message):
    with pytest.raises(DeviceError, match=message):
        torchedge.export(
            model, batch[0], out=tmp_path / "b", device=with_figures("adreno-740", **figures), onnx=False
        )
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def deep():
    """Twelve layers of 1 MiB of weights each."""
    torch.manual_seed(2)
    return nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(512, 512), nn.Tanh())]).eval()


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("adreno-740", {"memory_mib": 4, "max_allocation_mib": 1.25}),
        pytest.param("local-cpu", {"memory_mib": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_model_three_times_the_memory_of_a_device_exports_and_runs(deep, tmp_path, name, figures):
    device, x = with_figures(name, **figures), torch.randn(1, 512)
    with pytest.raises(DeviceError, match=r"program Sequential takes 12\d{6} bytes, .* memory_limit"):
        torchedge.export(deep, x, out=tmp_path / "whole", device=device, onnx=False)
    with pytest.raises(DeviceError, match=r"takes at most 4194304 .*; plan it within a lower memory_limit"):
        torchedge.export(deep, x, out=tmp_path / "over", device=device, memory_limit="6MiB", onnx=False)
    torchedge.export(deep, x, out=tmp_path / "b", device=device, memory_limit="3.5MiB", onnx=False)
    bundle = torchedge.load_bundle(tmp_path / "b")
    memory = bundle.manifest.memory
    assert memory.total_bytes <= 3.5 * 2**20
    assert memory.largest_bytes <= figures.get("max_allocation_mib", 4) * 2**20
    own = replace(open_context().device, global_bytes=4 * 2**20, allocation_bytes=5 * 2**18)
    plan = torchedge.plan(deep, x, device=device, memory_limit="3.5MiB")
    with torch.no_grad():
        expected = deep(x).numpy()
    for place in (bundle.place, lambda chosen: nullcontext(plan)):
        with place(own) as runner:  # with the arena of a processor in pieces
            ran = runner.step(x) if runner is not plan else plan.run(x, device=own).outputs
        np.testing.assert_allclose(ran[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(DeviceMemoryError, match="has 1000000 in all"):
        bundle.place(replace(own, global_bytes=1_000_000))


def test_a_device_with_little_gets_small_kernels_and_a_bundle_for_more_is_refused_there(
    model, batch, tmp_path
):
    small = with_figures("adreno-740", max_work_group_size=8, local_memory_kib=2)
    bundle = torchedge.export(model, batch[0], out=tmp_path / "small", device=small, onnx=False)
    assert max(prod(launch.local_size) for launch in bundle.program.launches) <= 8
    assert Bundle.open(tmp_path / "small").program.digest == bundle.program.digest  # lowered again
    large = torchedge.export(model, batch[0], out=tmp_path / "large", device="adreno-740", onnx=False)
    here = replace(choose_device(), work_group=8, work_item_sizes=(8, 8, 8))
    with pytest.raises(DeviceError, match=r"kernel .* has work-groups of .* at most 8; lower or export"):
        large.place(here)


# onnx -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_onnx_model_computes_the_same(model, batch, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    bundle = torchedge.export(
        model, batch[0], out=tmp_path / "b", device="local-cpu", mode="train", targets=batch[1]
    )
    told = bundle.manifest.onnx
    assert told["checked_by"].startswith("onnx ") and told["run_by"].startswith("onnxruntime ")
    assert 0 <= told["largest_difference"] < 1e-5
    session = runtime.InferenceSession(str(tmp_path / "b" / "model.onnx"))
    assert [i.name for i in session.get_inputs()] == ["input"]
    (found,) = session.run(None, {"input": batch[0].numpy()})
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        expected = model.eval()(batch[0]).numpy()
    model.train(modes[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert str(tmp_path).encode() not in (tmp_path / "b" / "model.onnx").read_bytes()
    assert os.getcwd().encode() not in (tmp_path / "b" / "model.onnx").read_bytes()


@pytest.mark.slow
def test_every_tensor_that_a_model_returns_is_an_onnx_output_of_its_own(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            x, z = inputs["x"], inputs["z"]
            y = x * self.weight
            z.add_(1)
            named = {"same": x, "again": x.contiguous(), "weight": self.weight, "one": y, "two": y, "sum": z}
            named |= {"mul": y + 1, "same_output": y - 1}  # names of values within, and of no value
            return {**named, "states": [x - 1, x - 2], "count": x.dim(), "text": "t", "none": None}

    x, z = torch.randn(2, 3), torch.zeros(2, 3)
    bundle = torchedge.export(Everything(), ({"x": x, "z": z},), out=tmp_path / "b", device="local-cpu")
    assert not z.any()
    session = runtime.InferenceSession(str(tmp_path / "b" / "model.onnx"))
    names = [port.name for port in bundle.outputs]
    assert names == [
        *("same", "again", "weight", "one", "two", "sum", "mul", "same_output"),
        *("states_0", "states_1"),
    ]
    names[2] += "_output"  # the weight itself has this name
    assert names == [port.name for port in session.get_outputs()]
    fed = {port.name: tensor.numpy() for port, tensor in zip(session.get_inputs(), (x, z), strict=True)}
    expected = [x, x, torch.ones(3), x, x, z + 1, x + 1, x - 1, x - 1, x - 2]
    for arrays in (session.run(None, fed), bundle.run(x, z)):
        for array, tensor in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, tensor)


class Counting(nn.Module):
    """Counts its calls in a buffer, or writes into a weight, which PyTorch's exporter crashes at."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.way == "assigned":
            self.calls = self.calls + 1
        elif self.way == "in place":
            self.calls += 1
        else:
            self.layer.weight.data.mul_(0.9)
        return self.layer(x) * self.calls


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["assigned", "in place", "a weight"])
def test_a_model_that_changes_what_it_keeps_has_no_onnx_model(way, tmp_path):
    pytest.importorskip("onnxscript")
    eager = Counting(way)
    eager.calls += 1
    bundle = torchedge.export(copy.deepcopy(eager), torch.ones(2, 4), out=tmp_path / "b", device="local-cpu")
    assert "states" in bundle.manifest.onnx["left_out"] and not (tmp_path / "b" / "model.onnx").exists()
    for _ in range(3):
        (output,) = bundle.run(np.ones((2, 4), np.float32))
        np.testing.assert_allclose(output, eager(torch.ones(2, 4)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lstms_with_projections_are_steps_in_onnx(tmp_path):
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    layer = nn.LSTM(2, 3, proj_size=1, bidirectional=True)
    bundle = torchedge.export(layer, torch.randn(2, 1, 2), out=tmp_path / "b", device="local-cpu")
    assert 0 <= bundle.manifest.onnx["largest_difference"] < 1e-5
    graph = onnx.load(tmp_path / "b" / "model.onnx").graph
    assert "LSTM" not in {node.op_type for node in graph.node}  # it has no input for the projection


def refuse(*_, **__):
    raise RuntimeError("\nno such operator\nsecond line")


@pytest.mark.parametrize(
    ("target", "instead", "message"),
    [
        pytest.param(
            "onnxruntime.InferenceSession", refuse,
            r"onnxruntime cannot run model.onnx of Small \(RuntimeError: no such op", marks=pytest.mark.slow,
        ),
        pytest.param(
            "torchedge.bundles.exporting.eager_outputs", lambda *a: [torch.ones(2, 10)],
            "computes something else than PyTorch", marks=pytest.mark.slow,
        ),
        (
            "torch.onnx.export", refuse,
            "PyTorch cannot export Small to ONNX .RuntimeError: no such operator.; pass onnx=False",
        ),
    ],
    ids=["not run", "another result", "not written"],
)  # fmt: skip
def test_a_model_without_a_right_onnx_form_is_refused(
    model, batch, tmp_path, monkeypatch, target, instead, message
):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(target, instead)
    with pytest.raises(CaptureError, match=message):
        torchedge.export(model, batch[0], out=tmp_path / "b", device="local-cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_missing_packages_are_named(model, batch, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*pip install 'torchedge\[onnx\]'"):
        torchedge.export(model, batch[0], out=tmp_path / "b", device="local-cpu")


@pytest.mark.slow
def test_without_onnxruntime_the_manifest_says_so(model, batch, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    bundle = torchedge.export(model, batch[0], out=tmp_path / "b", device="local-cpu")
    assert "onnxruntime is not installed" in bundle.manifest.onnx["run_by"]


# a plan -----------------------------------------------------------------------------------------------------


def test_a_streaming_plan_goes_along(batch, tmp_path):
    pytest.importorskip("scipy")
    wide = nn.Sequential(nn.Flatten(), nn.Linear(192, 2048), nn.ReLU(), nn.Linear(2048, 10))
    one = batch[0][:1]
    plan = torchedge.plan(wide, one, device="adreno", memory_limit="16MiB")
    assert plan.schedule.memory.total_bytes <= 16 * 2**20
    bundle = torchedge.export(wide, one, out=tmp_path / "b", device="adreno", plan=plan, onnx=False)
    file = torchedge.load_bundle(tmp_path / "b").plan
    assert (file.plan, file.instance) == (plan.plan, plan.instance)
    assert bundle.schedule.memory == plan.schedule.memory
    assert torchedge.export(wide, one, out=tmp_path / "c", device="adreno", onnx=False).plan is None
    with pytest.raises(InputError, match=r"plan is a dict; expected what torchedge\.plan returns"):
        torchedge.export(wide, one, out=tmp_path / "d", device="adreno", plan={}, onnx=False)


# the folder -------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_only_where_asked(model, batch, tmp_path):
    out = tmp_path / "b"
    out.mkdir()

    def export(**options):
        return torchedge.export(model, batch[0], out=out, device="local-cpu", onnx=False, **options)

    export()
    with pytest.raises(InputError, match="is there already; expected a new folder: pass force"):
        export()
    (out / "mine.txt").write_text("kept until then")
    export(force=True)
    assert not (out / "mine.txt").exists() and [p.name for p in tmp_path.iterdir()] == ["b"]
    (out / "manifest.json").unlink()
    with pytest.raises(InputError, match="is a folder but no bundle, and is not replaced"):
        export(force=True)
    for wrong, message in (
        (out / "program.json", "is a file"),
        (tmp_path / "no" / "b", "there is no folder"),
    ):
        with pytest.raises(InputError, match=message):
            torchedge.export(model, batch[0], out=wrong, device="local-cpu", onnx=False)


def test_a_folder_that_cannot_be_written_is_told_before_the_work(model, batch, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(InputError, match="is not writable"):
        torchedge.export(model, batch[0], out=tmp_path / "b", device="local-cpu", onnx=False)


def test_a_failure_leaves_what_was_there(model, batch, tmp_path, monkeypatch):
    out = tmp_path / "b"
    torchedge.export(model, batch[0], out=out, device="local-cpu", onnx=False)
    before = {p: p.read_bytes() for p in out.rglob("*.*")}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch_bundles, "write_weights", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
        torchedge.export(model, batch[0], out=out, device="local-cpu", onnx=False, force=True)
    assert {p: p.read_bytes() for p in out.rglob("*.*")} == before
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


# what is given ----------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Two heads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight, x + self.weight


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(4, 2, device="meta"), {}, "2 weights on the meta device .weight."),
        (lambda: nn.Linear(4, 2), {"accumulation": 2}, "accumulation is given without mode='train'"),
        (lambda: nn.Linear(4, 2), {"accumulation": 0, "mode": "train"}, "accumulation is 0"),
        (Scores, {"mode": "train"}, r"returns tensors of shapes \[3, 4\], \[3, 4\], for which no targets"),
        (nn.ReLU, {"mode": "train"}, "no parameter that requires a gradient"),
        (lambda: nn.Linear(5, 2), {}, "."),
        (lambda: nn.Linear(4, 2).bfloat16(), {"example": torch.zeros(3, 4).bfloat16()}, "is bfloat16"),
    ],
)
def test_what_cannot_be_exported_is_told(tmp_path, make, options, message):
    options = {"example": torch.zeros(3, 4), "device": "local-cpu", **options}
    with pytest.raises(TorchedgeError, match=message) as caught:
        torchedge.export(make(), options.pop("example"), out=tmp_path / "b", onnx=False, **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_stages_are_told(model, batch, tmp_path):
    told = []
    torchedge.export(
        model, batch[0], out=tmp_path / "b", device="local-cpu", onnx=False, progress=told.append
    )
    assert told == [stage for stage in exporting.STAGES if stage != "model.onnx"]


def test_the_tuner_of_a_bundle_is_an_argument(tmp_path):
    model, x = torch.nn.Linear(64, 64), torch.zeros(64, 64)
    with pytest.raises(InputError, match="expected 'fixed' or 'model' for a bundle"):
        torchedge.export(
            model, x, out=tmp_path / "measured", device="adreno-640", onnx=False, tuner="measured"
        )
    by_model = torchedge.export(model, x, out=tmp_path / "model", device="adreno-640", onnx=False)
    assert any("coefficients are partly" in note for note in by_model.manifest.notes)
    fixed = torchedge.export(model, x, out=tmp_path / "fixed", device="adreno-640", onnx=False, tuner="fixed")
    assert not any("coefficients" in note for note in fixed.manifest.notes)


@pytest.mark.slow
def test_a_training_step_for_a_phone_is_tuned_by_assumed_coefficients_and_says_so(model, batch, tmp_path):
    def notes(place, mode, tuner):
        out = tmp_path / str(place)
        bundle = torchedge.export(
            model, batch[0], out=out, device="adreno-750", mode=mode, tuner=tuner, onnx=False
        )
        return [note for note in bundle.manifest.notes if "coefficients are partly assumed" in note]

    assert notes(0, "train", None) and notes(1, "infer", "model")
    assert not notes(2, "train", "fixed") and not notes(3, "infer", None)


def test_a_training_step_whose_batch_does_not_fit_takes_it_in_parts(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
    x, target = torch.randn(48, 16), torch.randn(48, 4)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchedge.TrainingStep(
        loss=nn.functional.mse_loss, optimizer=optimizer, targets=target, accumulation=2
    )
    whole = torchedge.plan(model, x, "local-cpu", step=step)
    plan = torchedge.plan(model, x, "local-cpu", step=step, memory_limit=f"{int(0.7 * whole.total_bytes)}B")
    assert whole.parts == 1 < plan.parts and plan.to_dict()["parts"] == plan.parts
    assert f"in {plan.parts} parts" in str(plan) and whole.runs.keys() == plan.runs.keys()
    assert plan.total_bytes <= 0.7 * whole.total_bytes
    asked = {"mode": "train", "step": step, "memory_limit": f"{int(0.7 * whole.total_bytes)}B"}
    bundle = torchedge.export(model, x, "local-cpu", out=tmp_path / "b", onnx=False, **asked)
    manifest, size = bundle.manifest, 48 // plan.parts
    assert manifest.memory.total_bytes == plan.total_bytes
    assert manifest.accumulation == 2 * plan.parts and manifest.inputs[0].shape == (size, 16)
    assert any(f"runs in {plan.parts} parts of {size}" in note for note in manifest.notes)
    updates = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        (nn.functional.mse_loss(eager(x), target) / 2).backward()
        for part, wanted in zip(x.split(size), target.split(size), strict=True):
            bundle.train_step(part.numpy(), wanted.numpy())
    updates.step()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(bundle.state_dict()[name]), value, msg=name)


@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_programs_that_accumulate_and_update_share_one_arena(tmp_path, limit):
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), torch.zeros(64, 16)
    sizes = []
    for accumulation in (1, 2):
        bundle = torchedge.export(
            model, x, "local-cpu", out=tmp_path / f"{accumulation}", mode="train", onnx=False,
            accumulation=accumulation, memory_limit=limit,
        )  # fmt: skip
        runner = bundle.place()
        made = {memory.int_ptr for e in runner.executors.values() for memory in e._arena.buffers}
        first = {memory.int_ptr for memory in runner.executor._arena.buffers}
        assert made == first
        sizes.append(bundle.manifest.memory.arena_bytes)
    assert sizes[1] <= 1.1 * sizes[0]
