"""What a search is given wrongly is refused before it starts, in a line that says what is expected."""

import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import CaptureError, InputError
from torchedge.searching.pruning_space import PruningSpace
from torchedge.searching.spaces import SearchSpace

SPACE = PruningSpace(nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)), (3, 32, 32))
LIMITS = {"training_memory": 1e5}


@pytest.fixture
def space():
    return SPACE


def score(encodings):
    return [e["0"] for e in encodings]


def run(space, **options):
    settings = {"device": "jetson-tx2", "population": 4, "iterations": 2, **options}
    return torchedge.search(space, LIMITS, settings.pop("score", score), **settings)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({}, "expected a dict with some of"),
        (None, "constraints is None"),
        ({"training_memroy": 5}, "did you mean training_memory"),
        ({"speed": 5}, "expected some of inference_latency"),
        ({"training_memory": 0}, "expected 1 byte to 1 PiB"),
        ({"training_latency": "5"}, "expected a positive number of ms"),
        ({"training_memory": True}, "expected a number of MiB"),
        ({"training_memory": float("nan")}, "expected a number of MiB"),
    ],
)
def test_wrong_constraints_are_refused(space, constraints, message):
    with pytest.raises(InputError, match=message):
        torchedge.search(space, constraints, score, device="jetson-tx2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": (1, 2)}, "one whole number"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"population": 1}, "population is 1"),
        ({"iterations": -1}, "iterations is -1"),
        ({"mutation": 0}, "mutation is 0"),
        ({"parents": 1.5}, "parents is 1.5"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": "two"}, "workers is 'two'"),
        ({"confidence": 0.3}, "confidence is 0.3"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"score": 3}, "score is an int"),
        ({"score": lambda e: 1.0}, "gave 1.0 for .* candidates; expected one number each"),
        ({"score": lambda e: ["x"] * len(e)}, "expected one number each"),
        ({"score": lambda e: [float("nan")] * len(e)}, "score gave nan for"),
    ],
)
def test_wrong_options_are_refused(space, options, message):
    with pytest.raises(InputError, match=message):
        run(space, **options)


def test_a_score_of_one_encoding(space):
    found = run(space, score=lambda encoding: score([encoding])[0], batched=False)
    assert found.best == run(space).best


def test_a_score_may_be_a_column_of_a_tensor_with_a_gradient(space):
    weights = torch.ones(1, requires_grad=True)
    found = run(space, score=lambda e: torch.tensor(score(e), dtype=torch.float)[:, None] * weights)
    assert found.best == run(space).best


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("resnet18", "space is a str; expected a SearchSpace"),
        (SearchSpace, "space is the class SearchSpace; expected one made of it"),
        (type("Empty", (SearchSpace,), {"build": lambda self, e: None, "choices": {}})(), "choices is {}"),
        (
            type("Flat", (SearchSpace,), {"build": lambda self, e: None, "choices": {"a": ()}})(),
            "a list of choices",
        ),
    ],
)
def test_wrong_spaces_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        run(given)


class Broken(SearchSpace):
    choices = {"inputs": (3, 5), "fails": (False, True)}  # noqa: RUF012
    input_size = (3, 8, 8)

    def build(self, encoding):
        if encoding["fails"]:
            raise RuntimeError("not this one")
        return nn.Conv2d(encoding["inputs"], 4, 3)


@pytest.mark.parametrize(
    ("encoding", "error", "message"),
    [
        (
            {"inputs": 3, "fails": True},
            InputError,
            r"Broken.build\(.*True.*RuntimeError: not this one; every",
        ),
        ({"inputs": 5, "fails": False}, CaptureError, r"the candidate .*'inputs': 5.* cannot be captured"),
    ],
)
def test_candidates_that_cannot_be_are_named(encoding, error, message):
    with pytest.raises(error, match=message):
        Broken().graph(encoding)
    assert Broken().graph({"inputs": 3, "fails": False}).name == "space"


def test_a_second_search_on_one_journal_is_refused(space, tmp_path):
    pytest.importorskip("fcntl")
    journal, refused = tmp_path / "search.jsonl", []

    def second(progress):
        with pytest.raises(InputError, match="another torchedge is writing"):
            run(space, journal=journal)
        refused.append(progress)

    first = run(space, journal=journal, progress=second)
    assert refused and run(space, journal=journal).best.encoding == first.best.encoding
