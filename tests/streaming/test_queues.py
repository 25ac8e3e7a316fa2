"""Queues: models one after the other as one program, planned within one limit."""

import pytest
from oracles.streaming_programs import streamed_chain

from torchedge.devices import find_device
from torchedge.errors import InputError, LimitError
from torchedge.streaming.planning import plan_queue
from torchedge.streaming.verification import verify_plan

pytest.importorskip("scipy")

KIB = 1024
PHONE = find_device("adreno-750")
OPTIONS = {"chunk": "16KiB", "effort": 0.1}


def queue(limit, *programs, **options):
    return plan_queue(programs, PHONE, memory_limit=limit, **{**OPTIONS, **options})


LONG, SHORT = streamed_chain(6, 256, flops=10**7), streamed_chain(3, 128, flops=10**7)


@pytest.mark.parametrize("limit", ["950KiB", "1200KiB", "4MiB", None])
def test_the_limit_holds_for_all_together_and_for_each_alone(limit):
    steps = []
    plan = queue(limit, LONG, SHORT, progress=lambda: steps.append(1))
    assert len(steps) == 3
    for part in (plan.together, *plan.alone):
        assert limit is None or part.timeline.allocated_bytes <= part.memory_limit
        assert verify_plan(part.instance, part.plan).ok


def test_the_first_weights_of_a_model_are_loaded_by_the_one_before():
    plan = queue("4MiB", LONG, SHORT)
    assert plan.together.plan.preload == ("1/w0",)
    first, second = plan.shares
    assert (first.preloaded, first.carried, first.own) == (256 * KIB, 0, 5 * 256 * KIB)
    assert second.preloaded == 0 and second.carried >= 128 * KIB
    assert second.carried + second.own == 3 * 128 * KIB
    assert plan.latency_ms < plan.alone_ms


def test_lanes_show_the_models_in_turn():
    plan = queue("4MiB", LONG, SHORT, LONG)
    together, alone = plan.lanes
    assert [name for name, _, _ in together.spans] == ["small"] * 3
    for lane, total in ((together, plan.latency_ms), (alone, plan.alone_ms)):
        assert lane.spans[0][1] == 0 and lane.spans[-1][2] == pytest.approx(total)
        assert all(before[2] == after[1] for before, after in zip(lane.spans, lane.spans[1:], strict=False))
    assert together.allocated_bytes == plan.together.schedule.memory.total_bytes


def test_a_queue_that_cannot_be_planned():
    with pytest.raises(InputError, match="no models were given"):
        queue(None)
    with pytest.raises(LimitError, match="smallest memory limit that works"):
        queue("100KiB", SHORT, LONG)
