"""`torchedge plan` on instances: what it prints and writes, its exit status, and what it refuses.

The solver stands aside: an exhaustive search takes its place.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.exhaustive_plans import best_plan, smallest_memory
from oracles.random_instances import CHUNK_BYTES, layer, weight

from torchedge.cli import DOES_NOT_FIT, main
from torchedge.streaming.instances import Instance, write_instance
from torchedge.streaming.plans import ChunkLoad, OverlapPlan, read_plan, write_plan
from torchedge.streaming.verification import verify_plan

INSTANCE = Instance(
    CHUNK_BYTES,
    tuple(layer(n, 2) for n in range(1, 6)),
    (weight(0, 4, 1, 5), weight(1, 3, 3, 3), weight(2, 2, 5, 5)),
    m_peak_chunks=4,
    name="toy",
)
TIGHT = replace(INSTANCE, memory_chunks=5)


def solve(instance):
    plan = best_plan(instance)
    if plan.status == "INFEASIBLE":
        reason = {"reason": "the limit is too low", "smallest_memory_chunks": smallest_memory(instance)}
        return replace(plan, solver=reason)
    return plan


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """A folder with files to plan, and a solver."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchedge.streaming.solving.planner.solve", solve)
    strategies = {"always-next": careless, "same-type": wrong}
    monkeypatch.setattr("torchedge.streaming.plans.STRATEGIES", strategies)
    write_instance("toy.json", INSTANCE)
    write_instance("tight.json", TIGHT)
    write_plan("good.json", best_plan(INSTANCE))
    write_plan("bad.json", replace(best_plan(INSTANCE), objective=1.0))
    return tmp_path


def careless(instance):
    """Everything is loaded by the layer before, whatever it can."""
    loads = tuple(ChunkLoad(w.name, w.first_use - 1, w.chunks, 0) for w in instance.weights[1:])
    return OverlapPlan("FEASIBLE", 0.9 * 4 + 0.1 * 2, None, ("w0",), loads, 3, {"strategy": "careless"})


def wrong(instance):
    return replace(careless(instance), preload=())


def test_a_plan_is_printed_and_written(run):
    out = run("plan", "instance", "toy.json", "--out", "plan.json")
    plan = read_plan("plan.json")
    assert plan == best_plan(INSTANCE) and verify_plan(INSTANCE, plan).ok
    for row in (
        "toy: 5 layers, 3 weights, lambda 0.9, M_peak 0.00391 MiB",
        "status            OPTIMAL",
        "objective             3.9",
        "gap                   0 %",
        "streamed weights   2 of 3",
        "all weights             9  0.00879",
        "preloaded               4  0.00391",
        "in flight at most       3  0.00293",
        "the plan keeps all rules",
        "written to plan.json",
    ):
        assert row in out, out
    assert "seconds" in out and max(map(len, out.splitlines())) <= 80


def test_packed_files_and_no_file(run):
    write_instance("toy.json.gz", INSTANCE)
    run("plan", "instance", "toy.json.gz", "-o", "plan.json.gz")
    assert read_plan("plan.json.gz").status == "OPTIMAL"
    before = sorted(Path().iterdir())
    assert "written" not in run("plan", "instance", "toy.json")
    assert sorted(Path().iterdir()) == before


KEYS = {
    *("instance", "status", "objective", "lower_bound", "gap", "weights", "streamed_weights", "seconds"),
    *("accepted", "problems", "total_chunks", "total_mib", "preloaded_chunks", "preloaded_mib"),
    *("peak_chunks", "peak_mib"),
}


def test_json(run):
    document = json.loads(run("plan", "instance", "toy.json", "--json", "--out", "plan.json"))
    assert set(document) == KEYS and document["accepted"] and document["problems"] == []
    assert (document["preloaded_chunks"], document["peak_chunks"]) == (4, 3)
    assert read_plan("plan.json").objective == document["objective"]


def test_no_plan_within_the_memory_limit(run):
    out = run("plan", "instance", "tight.json", "--out", "plan.json", status=DOES_NOT_FIT)
    assert "there is no plan: the limit is too low" in out
    assert "the smallest memory limit that works is 7 chunks (0.00684 MiB)" in out
    assert read_plan("plan.json").status == "INFEASIBLE"
    document = json.loads(run("plan", "instance", "tight.json", "--json", status=DOES_NOT_FIT))
    assert document["reason"] == "the limit is too low" and document["smallest_memory_chunks"] == 7


def test_nothing_to_stream(run):
    write_instance("empty.json", replace(INSTANCE, weights=(), m_peak_chunks=None))
    out = run("plan", "instance", "empty.json")
    assert "no limits" in out and "0 of 0" in out


def test_a_careless_strategy_is_warned_of(run, capsys):
    assert main(["plan", "instance", "toy.json", "--strategy", "always-next", "-o", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert "warning: always-next breaks limits: (C3) layer 2 loads 3 chunks" in err
    assert "problem: (C3) layer 2 loads 3 chunks" in out and "the plan breaks rules" in out
    assert read_plan("plan.json").solver == {"strategy": "careless"}


def test_verifying(run):
    out = run("plan", "verify", "good.json", "toy.json")
    assert "the plan keeps all rules" in out and "seconds                 -" in out
    out = run("plan", "verify", "bad.json", "toy.json", status=DOES_NOT_FIT)
    assert "problem: objective is 1.0, in fact 3.9" in out and "the plan breaks rules" in out
    document = json.loads(run("plan", "verify", "bad.json", "toy.json", "--json", status=DOES_NOT_FIT))
    assert document["accepted"] is False and document["problems"] == ["objective is 1.0, in fact 3.9"]


def test_many_problems_are_cut_short(run):
    write_plan("bad.json", replace(best_plan(INSTANCE), loads=(ChunkLoad("w9", 1, 1, 0),) * 500))
    out = run("plan", "verify", "bad.json", "toy.json", status=DOES_NOT_FIT)
    assert out.count("problem: ") == 21 and "problem: and 81 more" in out


# what cannot be meant ---------------------------------------------------------------------------------------


TOY = ("plan", "instance", "toy.json")
WRONG = {
    "no such form": (("plan", "gpt-neo-1.3b"), "for example `torchedge plan model gpt-neo-1.3b`"),
    "no instance": (("plan", "verify", "good.json"), "INSTANCE"),
    "no such file": (("plan", "instance", "nowhere.json"), "nowhere.json"),
    "a folder": (("plan", "instance", "."), "regular file"),
    "a plan for an instance": (
        ("plan", "instance", "good.json"),
        "the overlap instance has the unknown key 'loads'",
    ),
    "an instance for a plan": (("plan", "verify", "toy.json", "toy.json"), "unknown key"),
    "no such plan": (("plan", "verify", "nowhere.json", "toy.json"), "nowhere.json"),
    "a strategy's plan that is none": ((*TOY, "--strategy", "same-type", "--out", "x.json"), "(C0) 'w0'"),
    "over the instance": ((*TOY, "--out", "./toy.json"), "is the instance itself"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_in_one_line(case, refused):
    words, says = WRONG[case]
    before = Path("toy.json").read_bytes()
    line = refused(*words)
    assert says in line, line
    assert not Path("x.json").exists() and Path("toy.json").read_bytes() == before


def test_a_plan_that_the_verifier_refuses_is_not_written(monkeypatch, refused):
    wrong = replace(best_plan(INSTANCE), peak_chunks=1)
    monkeypatch.setattr("torchedge.streaming.solving.planner.solve", lambda instance: wrong)
    assert "peak_chunks is 1, in fact 3" in refused(*TOY, "--out", "x.json")
    assert not Path("x.json").exists()


def test_strategies_are_those_of_the_library(monkeypatch):
    from torchedge.cli.planning import STRATEGIES

    monkeypatch.undo()
    from torchedge.streaming import plans

    assert tuple(plans.STRATEGIES) == STRATEGIES
