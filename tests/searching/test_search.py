"""What a search promises, held against trying everything; its errors, its seeds, its workers, its journal."""

import itertools
import json
import sys

import numpy as np
import pytest
from torch import nn

import torchedge
from torchedge.errors import InputError, MissingExtraError, ProfileError
from torchedge.prediction.families import FamilyPredictor
from torchedge.searching.driver import gflops_score, pareto
from torchedge.searching.evolution import offspring
from torchedge.searching.pruning_space import PruningSpace
from torchedge.searching.spaces import SearchSpace

DEVICE = "jetson-tx2"
WORTH = (5.0, 2.0, 3.0, 1.0)


def network():
    layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 96, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


SPACE = PruningSpace(network(), (3, 96, 96), ratios=(0.25, 0.5, 0.75, 1), name="small")


@pytest.fixture(scope="module")
def space():
    return SPACE


def score(encodings):
    """Weighted shares of the channels; every one of 256 prunings scores differently."""
    full = (32, 64, 64, 96)
    return [
        sum(w * (k / n) ** 0.7 for w, k, n in zip(WORTH, e.values(), full, strict=True)) for e in encodings
    ]


def everything(space):
    """All candidates with figures and scores, one by one."""
    names = ["inference_latency", "training_memory"]
    device = torchedge.find_device(DEVICE)
    train, infer = FamilyPredictor(device, "train"), FamilyPredictor(device, "infer")
    genes = np.array(list(itertools.product(range(4), repeat=4)), dtype=np.int16)
    ((family, values, _),), ((other, _, _),) = space.sketch(genes, "train"), space.sketch(genes, "infer")
    figures = {
        "training_memory": train.memory([(family, values)], 48),
        "inference_latency": infer.latency([(other, values)], 1),
    }
    encodings = [space.decode(row) for row in genes.tolist()]
    return encodings, np.array(score(encodings)), np.stack([figures[n] for n in names], axis=1), names


def limits_at(percent):
    """Limits below which so many percent of the candidates are, each for itself."""
    _, _, figures, names = everything(SPACE)
    return dict(zip(names, np.percentile(figures, percent, axis=0).tolist(), strict=True))


LIMITS = limits_at(70)


def run(space, limits=None, **options):
    settings = {"device": DEVICE, "batch_size": 48, "population": 20, "iterations": 12, **options}
    return torchedge.search(space, limits or LIMITS, settings.pop("score", score), **settings)


def comparable(found):
    return {key: value for key, value in found.to_dict().items() if key != "seconds"}


def test_it_finds_what_trying_everything_finds(space):
    encodings, scores, figures, names = everything(space)
    valid = (figures <= [LIMITS[n] for n in names]).all(axis=1)
    assert 20 < valid.sum() < 200, "the limits should cut the space"
    found = run(space)
    assert found.feasible and found.violations == () and found.nearest is None
    assert found.best.encoding == encodings[int(np.argmax(np.where(valid, scores, -1)))]
    assert found.best.score == pytest.approx(scores[valid].max())
    assert found.history[-1] == found.best.score and list(found.history) == sorted(found.history)


def test_fronts_of_a_space_seen_whole_are_those_of_trying_everything(space):
    encodings, scores, figures, names = everything(space)
    valid = np.flatnonzero((figures <= [LIMITS[n] for n in names]).all(axis=1))
    found = run(space, population=300)  # so many draws that each candidate is seen
    assert found.counts.evaluated == 256
    for column, name in enumerate(names):
        expected = pareto(scores[valid], figures[valid, column])
        assert [c.encoding for c in found.fronts[name]] == [encodings[valid[k]] for k in expected]


def test_its_figures_are_those_of_predict_on_the_built_module(space):
    found = run(space)
    module = found.build()
    for mode, batch, name, what in (
        ("train", 48, "training_memory", "memory"),
        ("infer", 1, "inference_latency", "latency"),
    ):
        one = torchedge.predict(module, batch, DEVICE, mode=mode, input_size=(3, 96, 96))
        assert found.best.figures[name] == pytest.approx(getattr(one, what).value, rel=1e-9)
        assert getattr(found.predictions[mode], what).value == pytest.approx(
            getattr(one, what).value, rel=1e-9
        )
        assert found.best.figures[name] <= LIMITS[name]


def test_it_ends_when_nothing_new_is_left(space):
    found = run(space, {"training_memory": 1e5}, population=200, iterations=500)
    assert found.counts.evaluated == found.counts.valid == 256 and len(found.history) < 100
    assert found.best.encoding == space.landmarks()[-1]


def test_counts_add_up(space):
    counts = run(space).counts
    assert counts.drawn == counts.known + counts.evaluated
    assert counts.evaluated == counts.valid + sum(counts.rejected.values())


def test_seeds_decide(space):
    first, again, other = run(space, seed=3), run(space, seed=3), run(space, seed=4)
    assert comparable(first) == comparable(again)
    assert first.counts != other.counts


def test_confidence_leaves_a_margin(space):
    device, genes = torchedge.find_device(DEVICE), np.full((1, 4), 2, dtype=np.int16)
    ((family, values, _),) = space.sketch(genes, "train")
    limit = float(FamilyPredictor(device, "train").memory([(family, values)], 48, 0.95)[0])
    limits = {"training_memory": limit}  # what a middling candidate stays below
    plain, sure = run(space, limits), run(space, limits, confidence=0.95)
    assert sure.best.score < plain.best.score
    assert sure.predictions["train"].needed_mib(0.95) <= limit
    assert sure.best.figures["training_memory"] == pytest.approx(sure.predictions["train"].needed_mib(0.95))


def test_what_cannot_be_met_is_named(space):
    _, _, figures, names = everything(space)
    least = dict(zip(names, figures.min(axis=0), strict=True))
    limits = {"training_memory": 0.9 * least["training_memory"], "inference_latency": 1e4}
    found = run(space, limits)
    assert not found.feasible and found.best is None and found.fronts == dict.fromkeys(sorted(limits), ())
    memory = next(v for v in found.violations if v.name == "training_memory")
    assert memory.smallest == pytest.approx(least["training_memory"]) == pytest.approx(memory.nearest)
    assert memory.excess == pytest.approx(memory.nearest - memory.limit)
    assert "cannot be met at all" in str(memory) and "inference_latency φ: met" in str(found)
    assert found.nearest.figures["training_memory"] == memory.nearest
    with pytest.raises(InputError, match="no candidate is within the constraints: training_memory"):
        found.build()


def test_constraints_that_exclude_each_other_are_told_from_impossible_ones():
    """One choice: fast needs much memory, small is slow (a larger image in fewer channels)."""

    class Torn(SearchSpace):
        choices = {"kind": ("wide", "deep")}  # noqa: RUF012
        input_size = (3, 64, 64)

        def build(self, encoding):
            if encoding["kind"] == "wide":
                return nn.Sequential(nn.Conv2d(3, 2048, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            deep = [m for _ in range(40) for m in (nn.Conv2d(3, 3, 3, 1, 1), nn.ReLU(inplace=True))]
            return nn.Sequential(*deep, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    torn = Torn()
    figures = {}
    for kind in ("wide", "deep"):
        one = torchedge.predict(torn.graph({"kind": kind}, "infer"), 1, DEVICE, mode="infer")
        figures[kind] = {"inference_memory": one.memory.value, "inference_latency": one.latency.value}
    low = {name: min(figures[k][name] for k in figures) for name in figures["wide"]}
    high = {name: max(figures[k][name] for k in figures) for name in figures["wide"]}
    assert all(low[name] < high[name] for name in low)
    limits = {name: (low[name] + high[name]) / 2 for name in low}
    found = torchedge.search(torn, limits, lambda e: [0.0] * len(e), device=DEVICE)
    assert not found.feasible
    assert sum("not with the others" in str(v) for v in found.violations) == 1


def test_progress_is_told_after_each_iteration(space):
    told = []
    found = run(space, iterations=4, progress=told.append)
    assert [p.iteration for p in told] == [0, 1, 2, 3, 4] and told[-1].iterations == 4
    assert [p.best for p in told] == list(found.history)
    assert (told[-1].evaluated, told[-1].valid) == (found.counts.evaluated, found.counts.valid)


# workers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(space):
    pytest.importorskip("joblib")
    assert comparable(run(space, workers=2)) == comparable(run(space))


@pytest.mark.slow
def test_dask_takes_the_evaluation_over(space):
    distributed = pytest.importorskip("distributed")
    from joblib import parallel_config

    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        parallel_config(backend="dask", n_jobs=2),
    ):
        found = run(space, workers=None)
    assert comparable(found) == comparable(run(space))


def test_without_joblib_workers_name_the_extra(space, monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torchedge\[search\]'"):
        run(space, workers=2)
    assert run(space, workers=None, iterations=1).feasible


# the journal ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(space, tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "sub" / "search.jsonl"
    return comparable(run(space, journal=path)), path.read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0, 0.001, 0.2, 0.5, 0.77, 0.999, 1])
def test_a_search_killed_anywhere_ends_the_same(space, whole, share, tmp_path):
    expected, data = whole
    path = tmp_path / "search.jsonl"
    path.write_bytes(data[: round(share * len(data))])
    asked = []

    def counting(encodings):
        asked.extend(encodings)
        return score(encodings)

    assert comparable(run(space, journal=path, score=counting)) == expected
    assert path.read_bytes() == data
    assert (len(asked) == 0) == (share == 1)


def test_the_journal_of_another_search_is_refused(space, whole, tmp_path):
    path = tmp_path / "search.jsonl"
    path.write_bytes(whole[1])
    with pytest.raises(InputError, match=r"journal of another search \(limits is"):
        run(space, {**LIMITS, "training_memory": 1800.0}, journal=path)
    with pytest.raises(InputError, match=r"journal of another search \(seed is 0, here 1"):
        run(space, journal=path, seed=1)


@pytest.mark.parametrize(
    "line",
    [
        '{"genes":[[0,0,0,0]],"figures":[[1,2]]}',
        '{"genes":[[0,0,0]],"figures":[[1,2]],"scores":[1]}',
        '{"genes":[[0,0,0,99999999999]],"figures":[[1,2]],"scores":[1]}',
        '{"genes":[[0,0,0,0]],"figures":[[1]],"scores":[1]}',
        '{"genes":"x","figures":[[1,2]],"scores":["y"]}',
        "[1]",
        "{",
        '{"genes":[[0,0,0,0]],"figures":[[1,NaN]],"scores":[1]}',
    ],
)
def test_a_damaged_journal_is_named(space, whole, tmp_path, line):
    path = tmp_path / "search.jsonl"
    path.write_bytes(whole[1].splitlines(keepends=True)[0] + line.encode() + b"\n")
    with pytest.raises((InputError, ProfileError), match=r"search.jsonl line 2"):
        run(space, journal=path)


def test_a_journal_that_cannot_be_written_is_named(space, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run(space, journal=tmp_path / "file" / "search.jsonl")


# parts ------------------------------------------------------------------------------------------------------


class Depths(SearchSpace):
    """A user's own space: two genes and a builder."""

    name = "depths"
    choices = {"depth": (1, 2, 3), "width": (8, 16)}  # noqa: RUF012
    input_size = (3, 32, 32)

    def build(self, encoding):
        layers, channels = [], 3
        for _ in range(encoding["depth"]):
            layers += [nn.Conv2d(channels, encoding["width"], 3, padding=1), nn.ReLU()]
            channels = encoding["width"]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def test_a_space_of_ones_own_needs_choices_and_a_builder():
    found = torchedge.search(
        Depths(), {"training_memory": 1e4}, gflops_score(Depths()), device=DEVICE, population=6
    )
    assert found.best.encoding == {"depth": 3, "width": 16} and found.counts.evaluated == 6
    assert isinstance(found.build(), nn.Sequential)
    assert json.loads(json.dumps(found.to_dict()))["best"]["encoding"] == found.best.encoding
    with pytest.raises(InputError, match="width is 9; expected one of 8, 16"):
        Depths().encode({"depth": 1, "width": 9})
    with pytest.raises(InputError, match="expected a dict of depth, width"):
        Depths().encode([1, 8])


def test_gflops_are_those_of_the_graph(space):
    from torchedge.ops.specs import forward_flops

    encodings = space.landmarks()
    expected = [np.log10(sum(forward_flops(space.graph(e, "infer"))) / 1e9) for e in encodings]
    assert gflops_score(space)(encodings) == pytest.approx(expected, rel=1e-12)


def test_children_have_their_parents_genes_or_mutated_ones():
    parents = np.array([[0] * 50, [1] * 50], dtype=np.int16)
    children = offspring(parents, np.random.default_rng(0), 1000, np.full(50, 4), 0.1)
    mutants, crossed = children[::2], children[1::2]
    assert set(np.unique(crossed)) == {0, 1} and 0.45 < crossed.mean() < 0.55
    assert 0.04 < (mutants > 1).mean() < 0.06 and children.max() == 3


def test_a_front_holds_what_nothing_beats():
    rng = np.random.default_rng(0)
    scores, costs = rng.integers(0, 8, (2, 60)).astype(float)
    front = pareto(scores, costs)
    for row in range(60):
        beaten = (
            (scores >= scores[row]) & (costs <= costs[row]) & ((scores > scores[row]) | (costs < costs[row]))
        ).any()
        twin = any(scores[row] == scores[k] and costs[row] == costs[k] for k in front)
        assert twin != beaten
    assert list(costs[front]) == sorted(costs[front]) and len({(scores[k], costs[k]) for k in front}) == len(
        front
    )
