"""Planning within a budget: the simulated peak stays within the limit, whatever it is, or one is named."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.random_instances import instances

from torchedge.devices import Figure, Provenance
from torchedge.errors import InputError, LimitError, PlanError
from torchedge.streaming.budgets import parse_bytes, plan_by_strategy, plan_within
from torchedge.streaming.instances import MEBIBYTE, Instance, Layer, Weight
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import STAGING_BYTES, Rates
from torchedge.streaming.simulation import simulate_plan
from torchedge.streaming.strategies import always_next, preload_everything
from torchedge.streaming.verification import verify_plan

pytest.importorskip("ortools")
pytest.importorskip("scipy")


def figure(value, unit="GB/s"):
    return Figure(value, unit, Provenance.MEASURED, "a test")


RATES = Rates(figure(1), figure(2), figure(0.5), figure(10, "us"))


def solve(instance):
    from torchedge.streaming import solving

    return solving.solve(instance, effort=0.1)


def narrow(capacity=2):
    """Six weights of four chunks, one a layer from the second on; a layer loads half of one, so one stays."""
    layers = tuple(Layer(f"l{n}", capacity, 1.0, "elemental") for n in range(7))
    weights = tuple(Weight(f"w{n}", 4 * MEBIBYTE, 4, n + 2, n + 2) for n in range(6))
    return Instance(MEBIBYTE, layers, weights, name="narrow")


ALIVE = [MEBIBYTE // 2] * 7


# amounts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (500 * 2**20, 500 * 2**20),
        ("500MiB", 500 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        (" 256kib ", 2**18),
        ("7", 7),
        ("7B", 7),
        ("0.5KiB", 512),
        ("1048576GiB", 2**50),
    ],
)
def test_amounts(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "amount",
    [
        *(
            "",
            "MiB",
            "-5MiB",
            "5 MB",
            "5mb",
            "1e3MiB",
            "nan",
            "inf",
            "1,5GiB",
            "5MiB5",
            "9" * 60,
            "\u0663MiB",
        ),
        *("0MiB", "0", "0.1B", "2000000GiB", 0, -1, 2**51, 10**400, 1.5, True, None, [], b"5MiB"),
    ],
)
def test_amounts_that_are_none(amount):
    with pytest.raises(InputError, match=r"^memory_limit is .*; expected") as caught:
        parse_bytes(amount, "memory_limit")
    assert len(str(caught.value)) < 200


@given(st.integers(1, 2**50))
def test_bytes_are_what_they_are(nbytes):
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes}B") == nbytes


# limits -----------------------------------------------------------------------------------------------------


def test_without_a_limit_nothing_is_given_up():
    found = plan_within(narrow(), None, RATES, ALIVE, solve)
    assert found.planned == found.instance == narrow()
    assert found.relaxation == 1 and found.rates == RATES and found.problems == ()
    assert found.plan == solve(narrow())


def test_a_wide_limit_changes_nothing():
    free = plan_within(narrow(), None, RATES, ALIVE, solve)
    found = plan_within(narrow(), free.peak_bytes, RATES, ALIVE, solve)
    assert found.plan == free.plan and found.peak_bytes == free.peak_bytes


def test_reading_ahead_is_given_up_first():
    free = plan_within(narrow(), None, RATES, ALIVE, solve)
    found = plan_within(narrow(), free.peak_bytes - 1, RATES, ALIVE, solve)
    assert found.rates.staging_bytes < RATES.staging_bytes and found.relaxation == 1
    assert found.plan == free.plan and found.peak_bytes < free.peak_bytes
    assert found.timeline.latency_ms >= free.timeline.latency_ms


def named(instance, limit=1, alive=ALIVE):
    """The limit that works, as the error tells it."""
    with pytest.raises(LimitError, match=r"whatever is streamed; a memory limit of .* works") as caught:
        plan_within(instance, limit, RATES, alive, solve)
    text = str(caught.value).split("a memory limit of ")[1].split()[0]
    assert parse_bytes(text) == caught.value.works_bytes
    return caught.value.works_bytes


def test_the_limit_that_is_named_works_and_is_tight():
    works = named(narrow())
    found = plan_within(narrow(), works, RATES, ALIVE, solve)
    assert found.peak_bytes <= works <= found.peak_bytes + MEBIBYTE / 50
    assert named(narrow(), found.peak_bytes - 1) == works
    # While a layer uses 4 MiB, those of the next move and are held twice; half a MiB of activations.
    assert works == 12.5 * MEBIBYTE


def test_the_message_says_what_takes_the_memory():
    first = replace(narrow(), weights=(Weight("first", 3 * MEBIBYTE, 3, 1, 1),))
    with pytest.raises(LimitError) as caught:
        plan_within(first, MEBIBYTE, RATES, ALIVE, solve)
    assert str(caught.value) == (
        "narrow does not run within 1.0 MiB, whatever is streamed; a memory limit of 6.00MiB works "
        "(activations take up to 0.5 MiB, and weights of 3.0 MiB have to be preloaded, each of them held "
        "twice while it is transformed)"
    )


def test_capacities_are_exceeded_only_where_the_limit_asks_for_it():
    works = named(narrow())
    free = plan_within(narrow(), None, RATES, ALIVE, solve)
    factors = []
    for limit in range(works, free.peak_bytes + MEBIBYTE, MEBIBYTE):
        found = plan_within(narrow(), limit, RATES, ALIVE, solve)
        factors.append(found.relaxation)
        assert found.peak_bytes <= limit
        own = verify_plan(replace(narrow(), memory_chunks=None), found.plan)
        assert (found.relaxation == 1) == own.ok
        assert all("(C3)" in problem for problem in own.problems if "status" not in problem)
    assert factors[0] > 1 and factors[-1] == 1
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("staging", [None, 0, MEBIBYTE, STAGING_BYTES])
def test_whatever_is_read_ahead_otherwise(staging):
    rates = replace(RATES, staging_bytes=staging)
    free = plan_within(narrow(), None, rates, ALIVE, solve)
    for share in (0.9, 0.7, 0.6):
        limit = int(share * free.peak_bytes)
        try:
            found = plan_within(narrow(), limit, rates, ALIVE, solve)
        except LimitError as error:
            assert error.works_bytes > limit
            continue
        assert found.peak_bytes <= limit
        assert staging is None or found.rates.staging_bytes <= staging


@given(instances(limits=False), st.data())
@settings(max_examples=40)
def test_any_limit_is_kept_or_another_is_named(instance, data):
    alive = data.draw(
        st.lists(st.integers(0, 5000), min_size=len(instance.layers), max_size=len(instance.layers))
    )
    whole = sum(w.nbytes for w in instance.weights)
    limit = data.draw(st.integers(1, 2 * whole + 6000))
    try:
        found = plan_within(instance, limit, RATES, alive, solve)
    except LimitError as error:
        assert error.works_bytes > limit
        limit = error.works_bytes
        found = plan_within(instance, limit, RATES, alive, solve)
    assert found.peak_bytes <= limit
    assert verify_plan(found.planned, found.plan).ok
    run = simulate_plan(instance, found.plan, found.rates, alive)
    assert run.memory.peak.total == found.peak_bytes and run.latency_ms == found.timeline.latency_ms
    for own, planned in zip(instance.layers, found.planned.layers, strict=True):
        if own.load_class == "hierarchical" or found.relaxation == 1:
            assert planned == own


def test_the_same_comes_out_again():
    limit = named(narrow()) + MEBIBYTE
    one, other = (plan_within(narrow(), limit, RATES, ALIVE, solve) for _ in range(2))
    assert (one.plan, one.planned, one.rates) == (other.plan, other.planned, other.rates)


def plenty():
    """Sixty equal weights; lambda is so low that all of them are preloaded."""
    layers = tuple(Layer(f"l{n}", 2, 1.0, "elemental") for n in range(61))
    weights = tuple(Weight(f"w{n}", MEBIBYTE, 1, n + 2, n + 2) for n in range(60))
    return Instance(MEBIBYTE, layers, weights, lam=0.3, name="plenty")


@pytest.mark.parametrize("mib", [20, 30, 40, 50, 60])
def test_the_limit_is_filled(mib):
    free = plan_within(plenty(), None, RATES, [0] * 61, solve)
    assert len(free.plan.preload) == 60 and free.plan.status == "OPTIMAL"
    found = plan_within(plenty(), mib * MEBIBYTE, RATES, [0] * 61, solve)
    assert (mib - 1) * MEBIBYTE < found.peak_bytes <= mib * MEBIBYTE
    assert found.relaxation == 1 and found.plan.solver["made_with_lambda"] > 0.3
    assert found.plan.lower_bound == free.plan.objective < found.plan.objective
    own = verify_plan(plenty(), found.plan)
    assert own.ok and float(own.objective) == pytest.approx(found.plan.objective)


def test_a_quick_solver_searches_and_the_other_has_the_last_word():
    asked = []

    def careful(instance):
        asked.append(instance.memory_chunks)
        return replace(solve(instance), solver={"strategy": "careful"})

    def hasty(instance):
        plan = solve(instance)
        return plan if plan.status == "INFEASIBLE" else replace(plan, status="FEASIBLE", lower_bound=0.0)

    limit = named(narrow()) + MEBIBYTE
    found = plan_within(narrow(), limit, RATES, ALIVE, careful, quick=hasty)
    assert found.plan.solver == {"strategy": "careful"} and found.peak_bytes <= limit
    assert asked[0] is None and len(asked) == 2


def test_a_plan_that_breaks_its_rules_is_not_taken():
    with pytest.raises(PlanError, match="breaks its rules"):
        plan_within(narrow(), None, RATES, ALIVE, always_next)


# strategies -------------------------------------------------------------------------------------------------


def test_a_strategy_may_break_rules_which_is_told():
    found = plan_by_strategy(narrow(), None, RATES, ALIVE, always_next)
    assert "(C3)" in found.problems[0] and found.relaxation == 1
    assert plan_by_strategy(narrow(4), None, RATES, ALIVE, always_next).problems == ()


def test_a_strategy_has_to_keep_the_memory_limit():
    with pytest.raises(LimitError, match=r"narrow as preload-all plans it takes .* more than 20.0 MiB"):
        plan_by_strategy(narrow(), 20 * MEBIBYTE, RATES, ALIVE, preload_everything)
    assert plan_by_strategy(narrow(), 64 * MEBIBYTE, RATES, ALIVE, preload_everything).peak_bytes < 2**26


def test_a_strategy_without_a_plan():
    def helpless(instance):
        return OverlapPlan(
            "INFEASIBLE", None, None, (), (), 0, {"strategy": "helpless", "reason": "too hard"}
        )

    with pytest.raises(LimitError, match=r"helpless finds no plan of narrow \(too hard\); raise"):
        plan_by_strategy(narrow(), 2**20, RATES, ALIVE, helpless)


def test_a_strategy_whose_plan_is_none():
    def forgetful(instance):
        return replace(preload_everything(instance), preload=())

    with pytest.raises(PlanError, match="the plan of preload-all does not load"):
        plan_by_strategy(narrow(), None, RATES, ALIVE, partial(forgetful))
