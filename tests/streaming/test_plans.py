"""Plans as data and as files."""

import pytest
from hypothesis import given
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import instances

from torchedge.errors import ProfileError
from torchedge.streaming.plans import ChunkLoad, OverlapPlan, read_plan, write_plan

LOADS = (ChunkLoad("w0", 2, 2, 1), ChunkLoad("w0", 1, 1, 0))
PLAN = OverlapPlan("FEASIBLE", 2.1, 1.5, ("w2",), LOADS, 3, {"strategy": "mine", "n": [1]})


@pytest.mark.slow
@given(instances())
def test_what_is_written_reads_back(tmp_path, instance):
    plan = best_plan(instance)
    for name in ("p.json", "p.json.gz"):
        write_plan(tmp_path / name, plan)
        assert read_plan(tmp_path / name) == plan


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
