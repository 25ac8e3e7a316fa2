"""The time of steps under torch.compile: kernels and bytes by closed forms, and whole predictions."""

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.devices import find_device
from torchedge.errors import InputError
from torchedge.graphs.partitions import PartGraph, Partition, PartOp
from torchedge.prediction.latency.compiled_work import compiled_work, with_fused
from torchedge.prediction.latency.rates import compiled_rates
from torchedge.prediction.latency.roofline import named, pack, phase_times, prior_mean, step_time, work_times
from torchedge.prediction.latency.workload import FUSED_COLUMNS, LAUNCHES, count_work, update_cost, updated_at
from torchedge.prediction.memory.settings import StepSettings
from torchedge.tracing.partitions import partition

SIZE, ROW = 4096, 512
ARGUMENT = PartOp("input", sizes=(SIZE,), elements=1024, rows=1024)
H200 = find_device("nvidia-h200")
CHAIN = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def pointwise(*sources):
    return PartOp("pointwise", tuple((s, 0) for s in sources), (SIZE,), 1024, 1024)


def library(*sources):
    return PartOp("kernel", tuple((s, 0) for s in sources), (SIZE,), 1024, 1024)


def column_sum(source, *, split):
    return PartOp("reduction", ((source, 0),), (ROW,), 1024, 4, inner=False, split=split)


def parts(*ops, results, batch_size=2, recorded=False):
    graph = PartGraph(ops, tuple((position, 0) for position in results))
    nothing = PartGraph((), ())
    return Partition(batch_size, None, graph, nothing, (), (), frozenset(), 0, recorded=recorded)


def work_of(model=CHAIN, **settings):
    graph = torchedge.capture(model, input_size=(64,))
    return updated_at(count_work(graph), update_cost(StepSettings(**settings)))


def forward(*ops, results, **options):
    """Return the amounts of a forward graph by name, at a batch size of two."""
    fused = compiled_work(work_of(), parts(*ops, results=results, **options)).fused
    return dict(zip(FUSED_COLUMNS, fused[0], strict=True))


def test_a_chain_of_element_wise_operators_is_one_kernel_that_reads_and_writes_once():
    amounts = forward(ARGUMENT, pointwise(0), pointwise(1), pointwise(2), results=[3])
    assert amounts == {
        "moved": 2 * SIZE / 2, "fixed": 0, "generated": 1, "launches": 1, "arguments": 1, "replayed": 0,
    }  # fmt: skip


def test_a_call_of_a_library_is_launched_but_moves_no_bytes_of_generated_kernels():
    amounts = forward(ARGUMENT, pointwise(0), library(1), pointwise(2), results=[3])
    assert amounts["generated"] == 2 and amounts["launches"] == 3
    assert amounts["moved"] == 4 * SIZE / 2


def test_a_split_reduction_is_two_kernels_behind_the_one_that_computes_what_it_sums():
    ops = (ARGUMENT, library(0), pointwise(1))
    whole, split = (forward(*ops, column_sum(2, split=s), results=[2, 3]) for s in (False, True))
    assert (whole["generated"], split["generated"]) == (1, 3)
    assert whole["moved"] == (2 * SIZE + ROW) / 2
    assert split["moved"] == whole["moved"] + SIZE / 2  # its first kernel reads the buffer that was stored


def test_sums_of_the_same_inputs_share_their_first_kernel():
    ops = (ARGUMENT, library(0), column_sum(1, split=True), column_sum(1, split=True))
    assert forward(*ops, results=[2, 3])["generated"] == 3


def test_rows_of_a_table_are_read_and_not_the_table():
    table = PartOp("input", sizes=(1000 * SIZE,), elements=1000 * 1024, rows=1000 * 1024)
    assert forward(table, pointwise(0), results=[1])["moved"] == 2 * SIZE / 2


def test_recorded_graphs_are_replays_without_launches():
    amounts = forward(ARGUMENT, library(0), pointwise(1), results=[2], recorded=True)
    assert (amounts["launches"], amounts["arguments"], amounts["replayed"]) == (0, 0, 1)
    assert amounts["generated"] == 1


@pytest.mark.parametrize(("optimizer", "accesses"), [("sgd", 6), ("sgd-momentum", 11), ("adamw", 21)])
def test_an_update_moves_what_its_calls_read_and_write(optimizer, accesses):
    eager = work_of(optimizer=optimizer, weight_decay=1e-2)
    work = compiled_work(eager, parts(ARGUMENT, results=[0]))
    elements = sum(p.numel() for p in CHAIN.parameters())
    assert work.fused[2, FUSED_COLUMNS.index("fixed")] == pytest.approx(4 * accesses * elements, rel=1e-4)
    parameter = LAUNCHES.index("parameter")
    assert (
        work.launches[parameter] == eager.launches[parameter]
        and work.launches.sum() == work.launches[parameter]
    )
    assert not work.passes.any() and np.array_equal(work.products, eager.products)


def test_both_lanes_of_compiled_and_eager_rows_add_up():
    eager = work_of()
    compiled = compiled_work(eager, parts(ARGUMENT, pointwise(0), results=[1]))
    p, rates = named(prior_mean(H200)), compiled_rates(H200)
    rows = pack([eager, compiled], np.array([0, 1, 1]), np.array([2.0, 2.0, 8.0]))
    plain = work_times(rows, p)
    times = with_fused(rows, plain, rates)
    assert times.busy[0] == plain.busy[0] and times.launch[0] == plain.launch[0]
    names, host, device = zip(*phase_times(rows, times, p), strict=True)
    assert names == ("forward", "backward", "update")
    np.testing.assert_allclose(sum(device), times.busy)
    np.testing.assert_allclose(sum(host), times.launch)
    moved = rates.byte * SIZE  # a sample's: half of what is read and written at a batch size of two
    assert times.fused[2, 0, 0] - times.fused[1, 0, 0] == pytest.approx(6 * moved)
    busy = np.array([10.0, 10.0])
    sharp = step_time(busy, np.array([5.0, 10.0]), p | {"overlap": rates.overlap}) - np.exp(p["step"])
    assert sharp[0] == pytest.approx(10, rel=0.01) and 10 < sharp[1] < 11


def test_rates_follow_the_bandwidth_and_the_launch_of_a_device():
    fast, slow = compiled_rates(H200), compiled_rates(find_device("jetson-tx2"))
    bandwidths = [find_device(n).figures["bandwidth_gb_s"].value for n in ("nvidia-h200", "jetson-tx2")]
    assert slow.byte / fast.byte == pytest.approx(bandwidths[0] / bandwidths[1])
    assert slow.launch > fast.launch and fast.argument > fast.replayed


class Images(nn.Module):
    """Convolutions with norms between them. groups: of the second one."""

    def __init__(self, groups=1, width=128):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, groups=groups), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x).mean((2, 3))


@pytest.mark.parametrize(("groups", "width", "expected"), [(1, 128, True), (2, 128, False), (1, 32, False)])
def test_images_lie_in_channels_last_where_inductor_decides_so(groups, width, expected):
    switch = torch._C._get_mkldnn_enabled()
    split = partition(Images(groups, width), (torch.empty(4, 3, 16, 16),), {}, 4, None, own_loss=False)
    assert split.channels_last is expected
    assert torch._C._get_mkldnn_enabled() == switch
    assert (
        any(op.split for op in split.forward.ops) == expected
    )  # statistics of few dense rows are one kernel


def test_sums_to_few_results_are_split():
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    split = partition(model, (torch.empty(512, 256),), {}, 512, None, own_loss=False)
    sums = [op for op in split.backward.ops if op.role == "reduction"]
    assert [op.split for op in sums] == [True, True]  # the gradients of both biases
    few = partition(model, (torch.empty(16, 256),), {}, 16, None, own_loss=False)
    assert not any(op.split for op in few.backward.ops)


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


OPTIONS = {
    "batch_size": 4,
    "device": "nvidia-h200",
    "example": torch.zeros(1, 16, 64),
    "loss": lambda y: y.mean(),
}


@pytest.mark.slow
def test_compiled_steps_take_the_host_less_time_and_recorded_ones_least():
    steps = [torchedge.predict(transformer(), compile=c, **OPTIONS) for c in (False, True, "reduce-overhead")]
    eager, compiled, recorded = steps
    assert eager.latency.value > compiled.latency.value > recorded.latency.value
    host = {s.phase: s.busy_ms for s in recorded.timeline.spans if s.lane == "host"}
    assert host["forward"] > host["backward"] == 0
    assert recorded.allocated == compiled.allocated and recorded.reserved.value >= compiled.reserved.value
    assert compiled.unsupported == recorded.unsupported == ()
    advice = [[n for n in p.notes if "waits for the host" in n] for p in steps]
    assert "torch.compile or CUDA graphs" in advice[0][0] and "optimizer or CUDA graphs" in advice[1][0]
    assert not any("CUDA graphs shorten" in note for note in advice[2])


@pytest.mark.slow
def test_a_slower_host_takes_longer_and_a_known_one_narrows_the_interval():
    usual, slow = (
        torchedge.predict(transformer(), compile=True, **OPTIONS | {"device": device})
        for device in (H200, H200.on_host(20.0))
    )
    assert slow.latency.value > 1.5 * usual.latency.value
    assert slow.latency.high / slow.latency.low < usual.latency.high / usual.latency.low


@pytest.mark.slow
def test_a_mode_of_torch_compile_with_cuda_graphs_is_recognised():
    asked = torchedge.predict(transformer(), compile="reduce-overhead", **OPTIONS)
    wrapped = torch.compile(transformer(), mode="reduce-overhead")
    inside = transformer()
    inside.compile(mode="reduce-overhead")
    for model in (wrapped, inside):
        assert torchedge.predict(model, **OPTIONS).latency.value == pytest.approx(asked.latency.value)
    plain = torchedge.predict(torch.compile(transformer()), **OPTIONS)
    assert plain.latency.value > asked.latency.value


def test_an_unknown_mode_is_refused():
    with pytest.raises(
        InputError, match="compile is 'max-autotune'; expected True, False or 'reduce-overhead'"
    ):
        torchedge.predict(CHAIN, 2, input_size=(64,), compile="max-autotune")


@pytest.mark.slow
def test_several_predictions_are_those_of_each_batch_size():
    predictor, options = torchedge.Predictor("nvidia-h200"), {"example": torch.zeros(1, 16, 64)}
    options |= {"loss": OPTIONS["loss"], "compile": True}
    table = predictor.predict_many([transformer()], [2, 16], **options)
    assert table.unsupported == ((),) and table.batch_sizes.tolist() == [2, 16]
    for column, size in enumerate((2, 16)):
        alone = predictor.predict(transformer(), size, **options)
        assert table.allocated[0, column] == alone.allocated.value
        assert table.latency[0, column] == alone.latency.value


@pytest.mark.slow
def test_compiled_settings_are_advised_where_triton_has_the_device():
    options = {"example": OPTIONS["example"], "loss": OPTIONS["loss"]}
    advice = torchedge.advise(transformer(), 64, "nvidia-h200", **options)
    compiled = [s for s in advice.settings if s.compile]
    assert {s.changes for s in compiled} >= {("compile",)}
    (alone,) = [s for s in compiled if s.changes == ("compile",)]
    prediction = torchedge.predict(transformer(), 64, "nvidia-h200", compile=True, **options)
    assert alone.update_ms == prediction.latency.value
    old = torchedge.advise(transformer(), 64, "jetson-tx2", **options)
    assert not any(s.compile for s in old.settings)


@pytest.mark.slow
def test_a_report_says_which_figures_are_those_of_eager_pytorch(tmp_path):
    options = {**OPTIONS, "out": tmp_path / "step.html", "compile": True}
    prediction = torchedge.report(transformer(), **options)
    page = (tmp_path / "step.html").read_text()
    assert prediction.unsupported == ()
    assert "torch.compile</p>" in page and "Memory over the step in eager PyTorch" in page
