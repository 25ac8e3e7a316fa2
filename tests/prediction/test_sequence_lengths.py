"""Sequence length as a free size: a family's graph at a length is the graph captured at that length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles.graph_checks import digest as digest_of
from oracles.graph_checks import verify
from torch import nn

import torchedge
from torchedge.errors import CaptureError, InputError
from torchedge.prediction import demand
from torchedge.prediction.lengths import _through
from torchedge.prediction.memory import compiled_replay
from torchedge.tracing.sequence_lengths import example_length, with_length
from torchedge.tracing.vision import import_torchvision

H200 = {"device": "nvidia-h200"}


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)


def tokens(length=48, batch=2):
    ids = torch.arange(batch * length).reshape(batch, length) % 50
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def transformers_model(name):
    transformers = pytest.importorskip("transformers")
    import_torchvision()  # which transformers imports
    small = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    if name == "GPT2LMHeadModel":
        small = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128,
                 "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    if name == "T5ForConditionalGeneration":
        small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 50,
                 "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
    kind = getattr(transformers, name)
    return kind(kind.config_class(**small))


def sizes(footprint):
    return footprint and [size.elements for size in footprint.sizes]


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "T5ForConditionalGeneration",
     *[pytest.param(name, marks=pytest.mark.slow) for name in
       ("LlamaForCausalLM", "MistralForCausalLM", "RobertaForMaskedLM")]],
)  # fmt: skip
@pytest.mark.parametrize("length", [20, 101])
def test_language_models_at_other_lengths_are_what_capture_gives(name, length):
    model, example = transformers_model(name), tokens()
    if name.startswith("T5"):
        del example["attention_mask"]
    family = torchedge.capture_lengths(model, example)
    graph, captured = family.graph(length), torchedge.capture(model, with_length(example, 48, length))
    assert digest_of(graph) == digest_of(captured)
    assert [sizes(op.footprint) for op in graph.ops] == [sizes(op.footprint) for op in captured.ops]


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    "make", [encoder, lambda: nn.LSTM(32, 16, batch_first=True), lambda: nn.Linear(32, 8)]
)
def test_sequences_of_vectors_at_other_lengths_are_what_capture_gives(make, mode):
    model, x = make(), torch.zeros(3, 40, 32)
    family = torchedge.capture_lengths(model, x, mode=mode)
    for length in (2, 40, 77, 333):
        graph = family.graph(length)
        assert digest_of(graph) == digest_of(torchedge.capture(model, with_length(x, 40, length), mode=mode))
        verify(graph)


def like(prediction):
    """All figures, the latency to nine digits: polynomials of floats round otherwise."""
    latency = prediction.latency
    digits = [f"{x:.9e}" for x in (latency.value, latency.low, latency.high)]
    return {**prediction.to_dict(), "latency": digits}


def test_predictions_at_other_lengths_are_those_of_examples_of_that_length():
    model, x = encoder(), torch.zeros(2, 40, 32)
    family = torchedge.capture_lengths(model, x)
    for length in (16, 96):
        at_once = torchedge.predict(family, 4, seq_len=length, **H200)
        alone = torchedge.predict(model, 4, example=torch.zeros(2, length, 32), **H200)
        by_example = torchedge.predict(model, 4, example=x, seq_len=length, **H200)
        assert like(at_once) == like(by_example) == like(alone)
        limit = alone.needed_mib() + 30
        assert by_example.max_batch_size(limit) == alone.max_batch_size(limit)
        assert torchedge.predict(family, 4, seq_len=40, **H200).max_batch_size(
            limit, seq_len=length
        ) == alone.max_batch_size(limit)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", [{}, {"amp": "bfloat16", "optimizer": "adamw"}, {"mode": "infer"}])
def test_lengths_that_equal_other_sizes_of_the_model_are_predicted_as_their_examples(settings):
    """Of 32 channels, 2 heads of 16, 50 words, 64 inner channels and 128 positions."""
    model = transformers_model("GPT2LMHeadModel")
    family = torchedge.capture_lengths(model, tokens(), mode=settings.get("mode", "train"))
    for length in (2, 16, 32, 50, 64, 128):
        at_length = torchedge.predict(family, 3, seq_len=length, **settings, **H200)
        alone = torchedge.predict(model, 3, example=tokens(length), **settings, **H200)
        assert like(at_length) == like(alone)


def test_another_length_needs_no_graph(monkeypatch):
    family = torchedge.capture_lengths(encoder(), torch.zeros(2, 40, 32))
    predictor = torchedge.Predictor("nvidia-h200")
    first = predictor.predict(family, 4, seq_len=100)
    monkeypatch.setattr(type(family), "graph", None)
    second = predictor.predict(family, 4, seq_len=200)
    assert second.allocated.value > first.allocated.value
    assert second.max_batch_size(20_000) > 4
    assert second.max_batch_size(20_000, seq_len=777) > 4


def test_places_and_categories_have_no_polynomial():
    """Numbers narrower than 64 bits name storages: Gemma2's differ by length in eight bits."""

    @dataclass
    class Sample:
        category: np.ndarray

    lengths = (9, 100, 101, 102, 300)
    for dtype in (np.int8, np.int32):
        assert _through([Sample(np.array([n % 100], dtype)) for n in lengths], lengths) is None


def test_the_longest_sequence_fits_and_the_next_does_not():
    family = torchedge.capture_lengths(encoder(), torch.zeros(2, 40, 32))
    prediction = torchedge.predict(family, 16, seq_len=40, **H200)
    limit = torchedge.predict(family, 16, seq_len=700, **H200).needed_mib() + 1
    longest = prediction.max_seq_len(limit)
    assert longest >= 700
    assert torchedge.predict(family, 16, seq_len=longest, **H200).fits(limit)
    assert not torchedge.predict(family, 16, seq_len=longest + 1, **H200).fits(limit)
    assert prediction.max_seq_len(limit, largest=64) == 64
    assert prediction.max_seq_len(1) == 0


class Loop(nn.Module):
    """A step for each position, as in state-space models without their kernels."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x):
        state, states = x[:, 0], []
        for position in range(x.shape[1]):
            state = torch.tanh(self.cell(state) + x[:, position])
            states.append(state)
        return torch.stack(states, 1)


@pytest.mark.slow
def test_a_structure_that_follows_the_length_is_predicted_as_its_examples():
    model, x = Loop(), torch.zeros(2, 12, 8)
    family = torchedge.capture_lengths(model, x)
    for length in (7, 12, 23, 24, 31):
        at = torchedge.predict(family, 2, seq_len=length, **H200)
        assert (
            at.allocated == torchedge.predict(model, 2, example=with_length(x, 12, length), **H200).allocated
        )


@pytest.mark.slow
def test_the_longest_sequence_of_a_graph_that_grows_needs_a_bound(monkeypatch):
    monkeypatch.setattr(demand, "_MOST_EVENTS", 200)
    p = torchedge.predict(Loop(), 2, example=torch.zeros(2, 12, 8), seq_len=12, **H200)
    with pytest.raises(InputError, match=r"grows with the length.*largest="):
        p.max_seq_len(100_000)
    assert p.max_seq_len(100_000, largest=40) == 40


def test_positions_limit_the_length():
    model = transformers_model("GPT2LMHeadModel")
    family = torchedge.capture_lengths(model, tokens())
    with pytest.raises(InputError, match="seq_len is 129, and GPT2LMHeadModel has 128 positions"):
        family.graph(129)
    assert torchedge.predict(family, 2, seq_len=48, **H200).max_seq_len() == 128


class Positions(nn.Module):
    """A language model that counts its positions in a table of its own, of which no configuration tells."""

    def __init__(self, most, look_up):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(most, 16)
        self.head, self.look_up = nn.Linear(16, 50), look_up

    def forward(self, ids):
        length = ids.shape[1]
        if self.look_up:
            return self.head(self.words(ids) + self.places(torch.arange(length)))
        return self.head(self.words(ids) + self.places.weight[:length])


@pytest.mark.slow
@pytest.mark.parametrize("look_up", [True, False])
def test_a_table_of_positions_that_only_the_code_knows_limits_the_length(look_up):
    model, ids = Positions(96, look_up), torch.full((4, 24), 10**6)  # the example's own values do not count
    found = torchedge.predict(model, 4, example=ids, seq_len=40, **H200)
    wanted = torchedge.predict(model, 4, example=torch.zeros(4, 40, dtype=torch.long), **H200)
    assert (found.memory, found.latency) == (wanted.memory, wanted.latency)
    assert (
        torchedge.predict(model, 4, example=ids, seq_len=96, **H200).allocated.value > wanted.allocated.value
    )
    assert found.max_seq_len("100GiB") == 96
    message = (
        "position 96 in a table of 96; expected at most 96 positions" if look_up else "cannot be captured"
    )
    for options in ({"example": ids, "seq_len": 97}, {"example": torch.zeros(4, 97, dtype=torch.long)}):
        with pytest.raises((InputError, CaptureError), match=message):
            torchedge.predict(model, 4, **options, **H200)


def test_plans_take_a_length():
    model = Positions(96, look_up=True)
    planned = torchedge.plan(model, torch.zeros(1, 24, dtype=torch.long), "adreno-750", seq_len=40)
    assert [t.shape for t in planned.program.tensors if t.role == "input"] == [(1, 40)]


def test_graphs_that_change_with_the_length_are_those_of_their_examples():
    class Windows(nn.Module):
        def forward(self, x):
            return nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 16)).exp()

    class Branch(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.shape[1] > 30 else super().forward(x).exp()

    for model, length in ((Windows(), 50), (Branch(8, 8), 20), (Branch(8, 8), 300)):
        example = torch.zeros(2, 41, 8)
        graph = torchedge.capture_lengths(model, example).graph(length)
        assert digest_of(graph) == digest_of(torchedge.capture(model, torch.zeros(2, length, 8)))
        at_length = torchedge.predict(model, 4, example=example, seq_len=length, **H200)
        assert like(at_length) == like(torchedge.predict(model, 4, example=torch.zeros(2, length, 8), **H200))


def test_examples_are_cut_off_or_go_on_with_their_last_values():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert example_length({"mask": mask}) == 3
    assert with_length({"mask": mask}, 3, 5)["mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert with_length({"mask": mask}, 3, 2)["mask"].tolist() == [[1, 1], [1, 1]]
    assert with_length(torch.zeros(3, 4, 3, 3), 3, 6).shape == (3, 4, 6, 6)


def test_a_model_may_bring_its_own_example():
    model = encoder()
    model.example_inputs = torch.zeros(2, 40, 32)
    predicted = torchedge.predict(model, 2, seq_len=60, **H200)
    assert predicted.memory == torchedge.predict(model, 2, example=torch.zeros(2, 60, 32), **H200).memory


def test_the_size_of_a_sample_has_a_sequence():
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 4))
    by_size, by_example = (
        torchedge.predict(model, 2, seq_len=30, **H200, **arguments)
        for arguments in ({"input_size": (7,)}, {"example": torch.zeros(2, 7, dtype=torch.long)})
    )
    assert by_size.allocated == by_example.allocated


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match="the example has no sequence"):
        torchedge.predict("resnet18", 2, example=torch.zeros(2, 3, 64, 64), seq_len=10, **H200)
    with pytest.raises(InputError, match="seq_len is 1; expected a whole number from 2 on"):
        torchedge.predict(encoder(), 2, example=torch.zeros(2, 40, 32), seq_len=1, **H200)
    with pytest.raises(InputError, match="largest is 0; expected a whole number from 2 on"):
        torchedge.predict(encoder(), 2, example=torch.zeros(2, 40, 32), seq_len=20, **H200).max_seq_len(
            largest=0
        )
    with pytest.raises(InputError, match="predict with seq_len="):
        torchedge.predict(encoder(), 2, example=torch.zeros(2, 40, 32), **H200).max_seq_len(1000)


@pytest.mark.slow
def test_grids_of_batch_sizes_and_lengths_are_predictions_one_by_one():
    models = [
        transformers_model("GPT2LMHeadModel"),
        torchedge.capture_lengths(encoder(), torch.zeros(2, 40, 32)),
    ]
    predictor = torchedge.Predictor("nvidia-h200")
    for model, example in ((models[0], tokens()), (models[1], None)):
        table = predictor.predict_many(
            [model], [2, 5], example=example, seq_len=[20, 48, 64], optimizer="adamw"
        )
        assert table.memory.shape == table.latency.shape == table.out_of_range.shape == (1, 2, 3)
        assert table.seq_lens.tolist() == [20, 48, 64]
        for b, batch_size in enumerate((2, 5)):
            for s, length in enumerate((20, 48, 64)):
                one = predictor.predict(model, batch_size, example=example, seq_len=length, optimizer="adamw")
                assert table.memory[0, b, s] == one.memory.value
                assert table.latency[0, b, s] == pytest.approx(one.latency.value, rel=1e-9)
    with pytest.raises(InputError, match="seq_len is empty"):
        predictor.predict_many([models[1]], [2], seq_len=[])
    with pytest.raises(InputError, match=r"seq_len is 1\.5"):
        predictor.predict_many([models[1]], [2], seq_len=1.5)


@pytest.mark.slow
def test_simulations_and_advice_take_a_length_and_the_dimension_of_the_batch():
    model, example = transformers_model("GPT2LMHeadModel"), tokens()
    at_length = torchedge.simulate(model, 3, example=example, seq_len=20)
    assert at_length.allocated_mib == torchedge.simulate(model, 3, example=tokens(20)).allocated_mib
    advice = torchedge.advise(model, 3, example=example, seq_len=20, **H200)
    expected = torchedge.predict(model, 3, example=tokens(20), **H200)
    assert advice.settings[0].prediction.memory == expected.memory
    layer, x = nn.LSTM(8, 8), torch.zeros(50, 4, 8)
    first = torchedge.simulate(layer, 16, example=x, batch_dim=1)
    assert first.allocated_mib == torchedge.simulate(layer, 16, example=torch.zeros(50, 16, 8)).allocated_mib
    assert torchedge.advise(layer, 16, example=x, batch_dim=1, **H200).fits


def test_the_second_prediction_of_a_family_loads_the_compiled_replay(monkeypatch):
    asked = []
    monkeypatch.setattr(compiled_replay, "_asked", 0)
    monkeypatch.setattr(compiled_replay, "_compiled", lambda: asked.append(True))
    family = torchedge.capture_lengths(encoder(), torch.zeros(2, 48, 32))
    torchedge.predict(family, 2, seq_len=100, **H200)
    assert not asked
    torchedge.predict(family, 3, seq_len=100, **H200)
    assert asked
