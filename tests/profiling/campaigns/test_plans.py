"""Plans expand the same way every time, and say which key is wrong."""

import pytest

from torchedge.errors import InputError
from torchedge.profiling.campaigns.plans import LARGER, PACKAGED, parse_plan, read_plan

SMALL = 'train_batch_sizes = [8, 2]\nnetworks = ["resnet18"]\n'


def test_standard_is_the_grid_of_the_paper():
    plan = read_plan("standard")
    items = list(plan.items())
    assert len(items) == 7 * (1 + 18 * 2)
    assert all(len([p for p in i.network.points if p[0] == "train"]) == 25 for i in items)
    assert {i.network.label for i in items} == {
        *("resnet18", "resnet50", "alexnet", "mobilenetv2", "squeezenet", "mnasnet", "googlenet")
    }
    assert len({i.id for i in items}) == len(items)
    assert plan.optimizer == "sgd-momentum" and plan.scope == "global"


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_plans_count_what_their_comments_say(name):
    plan = read_plan(name)
    networks = len(list(plan.items()))
    points = sum(len(item.network.points) for item in plan.items())
    assert f"{networks} networks, {points:,} points" in plan.text


def test_levels_strategies_and_sizes():
    plan = parse_plan(
        "p",
        'levels = [50, 0]\nstrategies = ["random", "l1"]\ninfer_batch_sizes = [1]\n'
        'networks = [{name = "resnet18", input_sizes = [[3, 224, 224], [3, 96, 96]]}, "timm:resnet26d"]',
    )
    assert [i.id for i in plan.items()] == [
        "resnet18-0", "resnet18-random-50", "resnet18-l1-50",
        "resnet18@3x96x96-0", "resnet18@3x96x96-random-50", "resnet18@3x96x96-l1-50",
        "timm:resnet26d-0", "timm:resnet26d-random-50", "timm:resnet26d-l1-50",
    ]  # fmt: skip
    assert [(i.level, i.strategy) for i in plan.items()][:3] == [(0, ""), (50, "random"), (50, "l1")]


def test_plans_with_the_same_settings_join_and_keep_each_point_once():
    plan = parse_plan("p", SMALL)
    assert plan.joined(parse_plan("q", "# a comment\n" + SMALL.replace("[8, 2]", "[2, 8, 8]"))) is plan
    other = parse_plan("q", "levels = [0, 5]\ninfer_batch_sizes = [1]\n" + SMALL.replace("[8, 2]", "[2, 4]"))
    joined = plan.joined(other)
    assert [item.id for item in joined.items()] == ["resnet18-0", "resnet18-random-5"]
    assert joined.items()[0].points == (("infer", 1), ("train", 2), ("train", 4), ("train", 8))
    assert joined.items()[1].points == other.items()[1].points
    again = parse_plan("stored", joined.text)  # as the folder keeps it
    assert again.points(()) == joined.points(()) and again.joined(other) is again
    for change in ("seed = 1\n", 'optimizer = "adam"\n', "round_to = 8\n", 'scope = "uniform"\n'):
        with pytest.raises(InputError, match=f"{change.split()[0]} is .* --out"):
            plan.joined(parse_plan("q", change + SMALL))


def test_the_larger_packaged_plans_keep_the_points_of_the_smaller():
    points = [set(read_plan(name).points(())) for name in LARGER]
    assert points[0] < points[1] < points[2]


def test_a_plan_that_cannot_be_fitted_says_which_mode_is_short():
    assert all(not read_plan(name).shortages() for name in PACKAGED)
    few = parse_plan("p", 'train_batch_sizes = [1]\nnetworks = ["a", "b"]\n')
    assert few.shortages()[0].startswith("2 points of 2 networks in mode train; a fit needs at least 6")
    alone = parse_plan("p", 'infer_batch_sizes = [1, 2, 3, 4, 5, 6]\nlevels = [0, 5]\nnetworks = ["a"]\n')
    assert "12 points of 1 networks in mode infer" in alone.shortages()[0]


def test_network_overrides_the_plan():
    plan = parse_plan(
        "p",
        SMALL.replace('"resnet18"', '{name = "resnet18", label = "r18", train_batch_sizes = [1]}, "alexnet"'),
    )
    first, second = plan.networks
    assert first.label == "r18" and first.points == (("train", 1),)
    assert second.points == (("train", 2), ("train", 8))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no 'networks'"),
        ('networks = ["resnet18"]', "no train_batch_sizes"),
        ("batch_sizes = [1]\n" + SMALL, "unknown key 'batch_sizes'"),
        (
            SMALL.replace('"resnet18"', '"resnet18", {name = "alexnet", label = "resnet18"}'),
            "resnet18-0 stands for two networks, resnet18 and alexnet; give one .* label",
        ),
        (
            SMALL.replace('"resnet18"', '{name = "resnet18", level = 3}'),
            "unknown key 'level'; expected 'levels'",
        ),
        ("networks = [", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(InputError, match=said) as caught:
        parse_plan("mine.toml", text)
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_plan_names_the_packaged_ones():
    with pytest.raises(
        InputError, match=r"expected standard, small, quick, minute, processor or a TOML file"
    ):
        read_plan("fast")


def test_too_many_points_are_refused():
    sizes = list(range(1, 2001))
    names = ", ".join(f'"n{i}"' for i in range(600))
    with pytest.raises(InputError, match="1200000 points"):
        parse_plan("p", f"train_batch_sizes = {sizes}\nnetworks = [{names}]")
