"""Plans as data and as files."""

import gzip
import json

import pytest
from hypothesis import given
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import instances

from torchedge.errors import InputError, ProfileError, TorchedgeError
from torchedge.streaming.plans import (
    MAX_FILE_BYTES,
    PLANS,
    ChunkLoad,
    OverlapPlan,
    read_plan,
    write_plan,
)

LOADS = (ChunkLoad("w0", 2, 2, 1), ChunkLoad("w0", 1, 1, 0))
PLAN = OverlapPlan("FEASIBLE", 2.1, 1.5, ("w2",), LOADS, 3, {"strategy": "mine", "n": [1]})


@given(instances())
def test_what_is_written_reads_back(tmp_path, instance):
    plan = best_plan(instance)
    for name in ("p.json", "p.json.gz"):
        write_plan(tmp_path / name, plan)
        assert read_plan(tmp_path / name) == plan


def test_two_runs_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_plan(tmp_path / name, PLAN)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(2.0, 1.5, 0.25), (2.0, 2.0, 0.0), (2.0, 2.1, 0.0), (0.0, 0.0, 0.0), (0.0, -1.0, 0.0), (2.0, -1.0, 1.0)],
)
def test_gaps(objective, bound, gap):
    assert OverlapPlan("FEASIBLE", objective, bound, (), (), 0).gap == gap


def test_no_gap_without_a_bound():
    assert OverlapPlan("FEASIBLE", 2.0, None, (), (), 0).gap is None
    assert OverlapPlan("INFEASIBLE", None, None, (), (), 0).gap is None


def test_a_solver_may_only_tell_what_json_holds(tmp_path):
    with pytest.raises(ProfileError, match="JSON"):
        write_plan(
            tmp_path / "p.json", OverlapPlan("FEASIBLE", 1.0, 1.0, (), (), 0, {"seconds": float("nan")})
        )
    assert not list(tmp_path.iterdir())


WRONG = {
    "no status": (("status",), ..., "the overlap plan has no 'status'"),
    "no solver": (("solver",), ..., "the overlap plan has no 'solver'"),
    "unknown key": (("comment",), 1, "the overlap plan has the unknown key 'comment'"),
    "unknown status": (("status",), "UNKNOWN" * 1000, "expected one of OPTIMAL, FEASIBLE, INFEASIBLE"),
    "number for a status": (("status",), 3, "status is 3; expected one of OPTIMAL"),
    "text for an objective": (("objective",), "2.1", "objective is '2.1'; expected a number or null"),
    "truth for an objective": (("objective",), True, "objective is True; expected a number or null"),
    "list for a bound": (("lower_bound",), [], "lower_bound is []; expected a number or null"),
    "text to preload": (("preload",), "w2", "preload is 'w2'; expected a list"),
    "number to preload": (("preload", 0), 2, "preload[0] is 2; expected printable text"),
    "object of loads": (("loads",), {}, "loads is {}; expected a list"),
    "a number for a load": (("loads", 1), 7, "loads[1] is 7; expected an object"),
    "load without a layer": (("loads", 1, "layer"), ..., "loads[1] has no 'layer'"),
    "load with more": (("loads", 0, "bytes"), 1, "loads[0] has the unknown key 'bytes'"),
    "load of a number": (("loads", 0, "weight"), 1, "loads[0].weight is 1; expected printable text"),
    "fractional chunks": (("loads", 0, "chunks"), 1.0, "loads[0].chunks is 1.0; expected a whole number"),
    "truth for chunks": (("loads", 0, "chunks"), True, "loads[0].chunks is True; expected a whole number"),
    "no peak": (("peak_chunks",), None, "peak_chunks is None; expected a whole number"),
    "list for a solver": (("solver",), [], "solver is []; expected an object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_entries_are_named(case, tmp_path):
    where, value, says = WRONG[case]
    made = json.loads(json.dumps(PLANS.document(PLAN)))
    *way, last = where
    entry = made
    for step in way:
        entry = entry[step]
    if value is ...:
        del entry[last]
    else:
        entry[last] = value
    (tmp_path / "p.json").write_text(json.dumps(made))
    with pytest.raises(InputError) as caught:
        read_plan(tmp_path / "p.json")
    line = str(caught.value)
    assert says in line and "p.json" in line and "\n" not in line and len(line) < 500


NO_PLANS = (
    *("", "{", "[]", "null", "\0", "[" * 200_000, '{"a": 1, "a": 2}'),
    *('{"objective": NaN}', '{"peak_chunks": 1e999}', '{"peak_chunks": 99999999999999999999}'),
)


@pytest.mark.parametrize("text", NO_PLANS, ids=range(len(NO_PLANS)))
def test_what_is_no_plan_at_all(text, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(TorchedgeError, match=r"p\.json"):
        read_plan(tmp_path / "p.json")


def test_files_that_unpack_to_more_than_is_read(tmp_path):
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(b" " * (MAX_FILE_BYTES + 1)))
    with pytest.raises(ProfileError, match="unpacks to more than"):
        read_plan(tmp_path / "p.json.gz")
