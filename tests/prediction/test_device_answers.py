"""Models that ask for their device get the answers of the device that is predicted, not of this machine."""

import threading
import warnings

import pytest
import torch
from torch import nn

import torchedge

X = torch.zeros(512, 256)


class Layers(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 256)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def both(model, x):
    return model.second(model.first(x))


def under(context):
    def run(model, x):
        with context(x):
            return both(model, x)

    return run


def predicted(run, device="nvidia-h200", amp=None, batch_size=512):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchedge.predict(
            Layers(run), batch_size, device, example=X, amp=amp, loss=lambda out: out.float().sum()
        )


HALF = {
    "context": under(lambda x: torch.autocast("cuda", torch.bfloat16)),
    "type of the input": under(lambda x: torch.autocast(x.device.type, torch.bfloat16)),
    "torch.amp": under(lambda x: torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)),
    "torch.cuda.amp": under(lambda x: torch.cuda.amp.autocast(dtype=torch.bfloat16)),
    "decorator": lambda m, x: torch.autocast("cuda", torch.bfloat16)(both)(m, x),
}


@pytest.mark.parametrize("name", HALF)
def test_autocast_inside_a_model_counts_as_on_the_device(name):
    large = {"batch_size": 1 << 17}  # the device sets the pace
    plain, inside = predicted(both, **large), predicted(HALF[name], **large)
    around = predicted(both, amp="bfloat16", **large)
    assert inside.latency.value == pytest.approx(around.latency.value, rel=0.01)
    assert inside.latency.value < plain.latency.value
    # the casts of weights end with the autocast inside of the model, and with the step around it
    slack = 2 * 256 * 256 * 2 / 2**20
    assert inside.allocated.value == pytest.approx(around.allocated.value, abs=slack)
    assert inside.allocated.value != plain.allocated.value


def test_autocast_of_cuda_is_off_on_a_processor_and_that_of_the_processor_off_on_cuda():
    of_cuda, of_cpu = HALF["context"], under(lambda x: torch.autocast("cpu", torch.bfloat16))
    assert predicted(of_cuda, "local-cpu").allocated.value == predicted(both, "local-cpu").allocated.value
    assert predicted(of_cpu, "local-cpu").allocated.value != predicted(both, "local-cpu").allocated.value
    assert predicted(of_cpu).allocated.value == predicted(both).allocated.value
    assert any('torch.autocast("cuda")' in note for note in predicted(of_cuda, "local-cpu").notes)


def test_autocast_that_a_model_disables_stays_off_under_amp():
    off = under(lambda x: torch.autocast("cuda", enabled=False))
    disabled, plain = predicted(off, amp="bfloat16"), predicted(both)
    assert disabled.latency.value == plain.latency.value
    assert disabled.allocated.value == plain.allocated.value


def test_nested_autocast_follows_the_innermost():
    def run(model, x):
        with torch.autocast("cuda", torch.bfloat16):
            x = model.first(x)
            with torch.autocast("cuda", enabled=False):
                return model.second(x.float())

    large = 1 << 17  # the device sets the pace
    mixed = predicted(run, batch_size=large)
    times = [predicted(each, batch_size=large).latency.value for each in (HALF["context"], both)]
    assert times[0] < mixed.latency.value < times[1]
    assert any("50 % in bfloat16" in note for note in mixed.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch disables no autocast here")
def test_an_autocast_that_pytorch_disabled_before_the_capture_is_noted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        earlier = torch.autocast("cuda", torch.bfloat16)
    [note] = [n for n in predicted(earlier(both)).notes if "before the capture" in n]
    assert "counted as disabled; make it inside of forward" in note
    for run in (HALF["context"], HALF["decorator"]):
        assert not any("before the capture" in note for note in predicted(run).notes)


def test_streams_of_cuda_do_nothing():
    def run(model, x):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(torch.cuda.current_stream()):
            return both(model, x)

    assert predicted(run).allocated.value == predicted(both).allocated.value


QUERIES = {
    "x.is_cuda": lambda m, x: x.is_cuda,
    "x.device": lambda m, x: x.device.type == "cuda",
    "x.get_device()": lambda m, x: x.get_device() == 0,
    "x.is_cpu": lambda m, x: not x.is_cpu,
    "x.device of a parameter": lambda m, x: next(m.parameters()).device == torch.device("cuda:0"),
    "torch.cuda.is_available()": lambda m, x: torch.cuda.is_available(),
    "torch.cuda.device_count()": lambda m, x: torch.cuda.device_count() == 1,
    "torch.backends.cudnn.is_available()": lambda m, x: torch.backends.cudnn.is_available(),
    "torch.backends.cuda.is_built()": lambda m, x: torch.backends.cuda.is_built(),
    "torch.version.cuda": lambda m, x: torch.version.cuda is not None,
    "torch.cuda.get_arch_list()": lambda m, x: "sm_90" in torch.cuda.get_arch_list(),
    "torch.backends.cudnn.version()": lambda m, x: (torch.backends.cudnn.version() or 0) >= 90000,
    "torch.backends.cuda.is_flash_attention_available()": (
        lambda m, x: torch.backends.cuda.is_flash_attention_available()
    ),
    "x.type()": lambda m, x: x.type() == "torch.cuda.FloatTensor",
}


@pytest.mark.parametrize("question", QUERIES)
def test_queries_answer_for_the_predicted_device_with_a_note(question):
    def run(model, x):
        return both(model, x) if QUERIES[question](model, x) else model.first(x)

    on_gpu, on_cpu = predicted(run), predicted(run, "local-cpu")
    assert on_gpu.allocated.value == predicted(both).allocated.value
    first = predicted(lambda m, x: m.first(x), "local-cpu")
    assert on_cpu.allocated.value == first.allocated.value
    asked = question.partition(" of ")[0]
    for prediction, label in ((on_gpu, "nvidia-h200"), (on_cpu, "local-cpu")):
        assert any(asked in note and f"as on {label}" in note for note in prediction.notes), prediction.notes


def test_figures_of_the_device_come_from_its_profile():
    def run(model, x):
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        assert total == properties.total_memory > free > 0
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
        large = total > 100 * 2**30 and torch.cuda.get_device_capability() >= (9, 0)
        return both(model, x) if large else model.first(x)

    assert predicted(run).allocated.value == predicted(both).allocated.value
    small = predicted(lambda m, x: m.first(x), "jetson-tx2")
    assert predicted(run, "jetson-tx2").allocated.value == small.allocated.value


def test_a_processor_has_no_properties_of_cuda():
    with pytest.raises(torchedge.CaptureError, match="No CUDA GPUs are available"):
        predicted(lambda m, x: both(m, x) * torch.cuda.get_device_properties(0).major, "local-cpu")


def test_tensors_made_on_the_device_and_moves_to_it_cost_no_copy():
    def run(model, x):
        mask = torch.ones(256, device=x.device) + torch.ones(256, device="cuda")
        return both(model, x.cuda() * mask.to(x.device))

    def plain(model, x):
        mask = torch.ones(256) + torch.ones(256)
        return both(model, x * mask)

    assert predicted(run).allocated.value == predicted(plain).allocated.value
    assert not any("asks for the device" in note for note in predicted(run).notes)


def test_other_threads_and_later_code_see_the_machine():
    seen = []

    def run(model, x):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.is_available()))
        thread.start()
        thread.join()
        return both(model, x)

    before = (torch.cuda.is_available, torch.version.cuda, torch.autocast.__enter__)
    predicted(run)
    assert before == (torch.cuda.is_available, torch.version.cuda, torch.autocast.__enter__)
    assert set(seen) == {torch.cuda.is_available()}


def test_graphs_captured_without_a_device_are_of_a_processor():
    model = Layers(lambda m, x: both(m, x) if x.is_cuda else m.first(x))
    assert len(torchedge.capture(model, X, mode="infer", device="nvidia-h200").ops) == 2
    graph = torchedge.capture(model, X, mode="infer")
    assert len(graph.ops) == 1
    assert any("as on a CPU" in note for note in graph.notes)


def test_a_graph_of_another_device_is_noted():
    asking = Layers(lambda m, x: both(m, x) if x.is_cuda else m.first(x))
    off = Layers(under(lambda x: torch.autocast("cpu", torch.bfloat16)))
    for model in (asking, off):
        graphs = [torchedge.capture(model, X, device=device) for device in (None, "nvidia-h200")]
        for graph, device in zip(graphs, ("nvidia-h200", "local-cpu"), strict=True):
            notes = torchedge.predict(graph, 4, device).notes
            assert any("was captured as on" in note and device in note for note in notes)
        for graph, device in zip(graphs, ("local-cpu", "nvidia-h200"), strict=True):
            assert not any("was captured as on" in note for note in torchedge.predict(graph, 4, device).notes)
    plain = torchedge.capture(Layers(both), X)
    assert not any("captured as on" in note for note in torchedge.predict(plain, 4, "nvidia-h200").notes)


class Sequences(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.table, self.wide, self.decide = nn.Embedding(50, 32), nn.Linear(32, 2048), decide

    def forward(self, ids):
        x = self.table(ids)
        return self.wide(x) if self.decide(x) else x


@pytest.mark.slow
@pytest.mark.parametrize("decide", [lambda x: x.is_cuda, lambda x: x.shape[0] > 8], ids=["device", "batch"])
def test_lengths_are_those_of_the_device_and_the_batch(decide):
    ids = torch.zeros(2, 40, dtype=torch.int64)

    def allocated(family, device, batch_size):
        return torchedge.predict(family, batch_size, device, seq_len=32).allocated.value

    loss = {"loss": lambda out: out.sum()}
    family = torchedge.capture_lengths(Sequences(decide), ids, **loss)
    for device in ("nvidia-h200", "local-cpu", "nvidia-h200"):
        for batch_size in (4, 16):
            right = torchedge.predict(
                Sequences(decide), batch_size, device, example=ids[:, :32], **loss
            ).allocated.value
            assert allocated(family, device, batch_size) == right
            own = torchedge.predict(Sequences(decide), batch_size, device, example=ids, seq_len=32, **loss)
            assert own.allocated.value == right


def test_lengths_of_a_model_that_asks_nothing_are_captured_once():
    family = torchedge.capture_lengths(Sequences(lambda x: True), torch.zeros(2, 40, dtype=torch.int64))
    first = family.on(torchedge.find_device("nvidia-h200"), 4)
    assert family.on(torchedge.find_device("local-cpu"), 8) is first


def test_simulation_of_no_device_is_that_of_cuda():
    asking = Layers(lambda m, x: both(m, x) if x.is_cuda else m.first(x))
    options = {"example": X, "loss": lambda out: out.sum()}
    simulated = torchedge.simulate(asking, 512, **options)
    assert simulated.allocated_mib == torchedge.simulate(Layers(both), 512, **options).allocated_mib
