"""Plans: the networks and points that a campaign measures, as a TOML document. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from torchedge.errors import InputError, ProfileError, check_path
from torchedge.graphs import Mode
from torchedge.profiling.campaigns.drawn import DRAWN, LABEL, drawn_batch, drawn_side
from torchedge.storage.codecs import OUTSIDE, Codec, OneOf
from torchedge.storage.documents import format_toml, parse_toml, read_text

PACKAGED: Mapping[str, str] = {
    "standard": """\
# The grid of the paper (sections 5.1 and 6, appendix A): 259 networks, 8,029 points.
levels = [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90]
strategies = ["random", "l1"]
train_batch_sizes = [2, 4, 8, 16, 32, 64, 70, 80, 90, 100, 110, 120, 128, 140, 150, 160, 170, 180, 190, 200,
    210, 220, 230, 240, 256]
infer_batch_sizes = [1, 2, 4, 8, 16, 32]
networks = ["resnet18", "resnet50", "alexnet", {name = "mobilenet_v2", label = "mobilenetv2"},
    {name = "squeezenet1_0", label = "squeezenet"}, {name = "mnasnet1_0", label = "mnasnet"},
    {name = "googlenet", kwargs = {aux_logits = false, transform_input = true, init_weights = false}}]
""",
    "small": """\
# A fit to work with: 35 networks, 280 points; with a GPU some minutes.
levels = [0, 20, 50]
strategies = ["random", "l1"]
train_batch_sizes = [2, 4, 8, 16, 32]
infer_batch_sizes = [1, 4, 16]
networks = ["resnet18", "resnet50", "alexnet", {name = "mobilenet_v2", label = "mobilenetv2"},
    {name = "squeezenet1_0", label = "squeezenet"}, {name = "mnasnet1_0", label = "mnasnet"},
    {name = "googlenet", kwargs = {aux_logits = false, transform_input = true, init_weights = false}}]
""",
    "quick": """\
# A first look: 8 networks, 40 points; on a processor some minutes.
levels = [0, 50]
strategies = ["random"]
train_batch_sizes = [2, 4, 8]
infer_batch_sizes = [1, 4]
networks = ["resnet18", {name = "mobilenet_v2", label = "mobilenetv2"},
    {name = "squeezenet1_0", label = "squeezenet"}, {name = "mnasnet1_0", label = "mnasnet"}]
""",
    "minute": """\
# One minute of a processor, for `torchedge profile --quick`: 112 networks, 224 points.
drawn = 56
""",
    "processor": """\
# A processor, for `torchedge profile`, in some minutes: 340 networks, 688 points.
drawn = 168
train_batch_sizes = [1, 4]
infer_batch_sizes = [1, 4]
networks = ["resnet18", {name = "mobilenet_v2", label = "mobilenetv2"},
    {name = "squeezenet1_0", label = "squeezenet"}, {name = "mnasnet1_0", label = "mnasnet"}]
""",
}
"""The packaged plans by name; `torchedge campaign show` prints one as a start for your own."""

LARGER = ("quick", "small", "standard")
"""Packaged plans from the smallest to the largest; each has the points of the one before."""

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw", "none")
STRATEGIES, SCOPES = ("random", "l1"), ("global", "uniform")
INPUT_SIZE = (3, 224, 224)
FEWEST_ROWS = 6
"""Fewest measured points of a mode that a fit needs."""

MOST_NETWORKS, MOST_POINTS, LARGEST = 10_000, 1_000_000, 1 << 20
_GRID = ("levels", "strategies", "train_batch_sizes", "infer_batch_sizes", "input_size")

NetworkName = Annotated[
    str,
    Meta(
        pattern=r"^(timm:)?[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(?![\s\S])",
        description="a name of torchvision or timm:NAME",
    ),
]
Strategy = Annotated[str, OneOf(STRATEGIES)]
Whole = Annotated[int, Meta(ge=1, le=LARGEST)]
InputSize = Annotated[tuple[Whole, ...], Meta(min_length=1, max_length=4)]
Level = Annotated[
    Annotated[int, Meta(ge=0, le=99)] | Annotated[float, Meta(ge=0, lt=100)],
    Meta(description="% of parameters to remove, from 0 to below 100"),
]
Levels = Annotated[tuple[Level, ...], Meta(min_length=1)]
Strategies = Annotated[tuple[Strategy, ...], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Grid:
    """The keys that a plan gives for all networks and a network for itself."""

    levels: Levels = (0,)
    strategies: Strategies = ("random",)
    train_batch_sizes: tuple[Whole, ...] = ()
    infer_batch_sizes: tuple[Whole, ...] = ()
    input_size: InputSize = INPUT_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNetwork(_Grid):
    """A network of a plan with its grid; `name` is torchvision's, or timm's behind "timm:"."""

    name: NetworkName
    label: NetworkName = ""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    input_sizes: Annotated[tuple[InputSize, ...], Meta(min_length=1)] = ()

    @property
    def points(self) -> tuple[tuple[Mode, int], ...]:
        """The measured points: modes and batch sizes, each once."""
        grid: tuple[tuple[Mode, tuple[int, ...]], ...] = (
            ("infer", self.infer_batch_sizes),
            ("train", self.train_batch_sizes),
        )
        return tuple([(mode, size) for mode, sizes in grid for size in sorted(set(sizes))])

    def sorted(self) -> PlannedNetwork:
        """Return the network with each entry of its grid once, and a label."""
        return replace(
            self,
            label=self.label or self.name,
            input_sizes=tuple(dict.fromkeys(self.input_sizes or (self.input_size,))),
            levels=tuple(sorted(set(self.levels))),
            strategies=tuple(dict.fromkeys(self.strategies)),
        )


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One network at one level, strategy ("" at level 0) and input size: one job, or the reason for none.

    amp: autocast's dtype.
    """

    id: str
    network: PlannedNetwork
    level: float
    strategy: str
    input_size: tuple[int, ...]
    points: tuple[tuple[Mode, int], ...]
    amp: str | None = None

    @property
    def _means(self) -> tuple[object, ...]:
        """Everything that makes it this network, whatever its points."""
        return (self.network.name, json.dumps(dict(self.network.kwargs), sort_keys=True), self.id)

    def joined(self, other: PlanItem, plan: str) -> PlanItem:
        """Return the item with the points of another of its id; InputError where that is another network."""
        if self._means != other._means:
            raise InputError(
                f"plan {plan}: {self.id} stands for two networks, {self.network.name} and "
                f"{other.network.name}; give one of them another label = '...'"
            )
        return replace(self, points=tuple(sorted({*self.points, *other.points})))


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan(_Grid):
    """Everything a campaign measures; `text` is the document it was read from.

    drawn: how many drawn networks (`campaigns.drawn`) are measured, in float32 and under autocast.
    """

    networks: Annotated[tuple[PlannedNetwork, ...], Meta(max_length=MOST_NETWORKS)] = ()
    drawn: Annotated[int, Meta(ge=0, le=MOST_NETWORKS)] = 0
    scope: Annotated[str, OneOf(SCOPES)] = "global"
    round_to: Annotated[int, Meta(ge=1, le=1024)] | None = None
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd-momentum"
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    name: Annotated[str, OUTSIDE]
    text: Annotated[str, OUTSIDE]

    def items(self) -> list[PlanItem]:
        """Return the networks to measure in the plan's order, each once with all its points."""
        items: dict[str, PlanItem] = {}
        for item in self._listed():
            known = items.get(item.id)
            items[item.id] = item if known is None else known.joined(item, self.name)
        return list(items.values())

    def _listed(self) -> Iterator[PlanItem]:
        for network in self.networks:
            points = network.points
            for size in network.input_sizes:
                stem = network.label if size == INPUT_SIZE else f"{network.label}@{'x'.join(map(str, size))}"
                for strategy in network.strategies if any(network.levels) else ("",):
                    for level in network.levels:
                        if level:
                            name = f"{stem}-{strategy}-{level:g}"
                            yield PlanItem(name, network, level, strategy, size, points)
                        elif strategy == network.strategies[0] or not strategy:
                            yield PlanItem(f"{stem}-0", network, 0, "", size, points)
        for number in range(self.drawn):
            batch, side = (drawn_batch(number),), drawn_side(number)
            name, label = f"{DRAWN}{number}", f"{LABEL}{number}"
            network = PlannedNetwork(name=name, label=label, train_batch_sizes=batch, infer_batch_sizes=batch)
            for amp in (None, "bfloat16"):
                key = label if amp is None else f"{label}-{amp}"
                yield PlanItem(key, network, 0, "", (3, side, side), network.points, amp)

    def points(self, skipped: Container[str]) -> list[tuple[str, Mode, int]]:
        """Return the points of all items that are not skipped: id, mode, batch size."""
        items = [item for item in self.items() if item.id not in skipped]
        return [(item.id, *point) for item in items for point in item.points]

    @property
    def settings(self) -> Mapping[str, object]:
        """How networks are pruned and trained: what points of one dataset have in common."""
        return {name: getattr(self, name) for name in ("scope", "round_to", "optimizer", "seed")}

    def joined(self, other: CampaignPlan) -> CampaignPlan:
        """Return the plan with the points of another behind its own, itself where it has them all.

        Raises InputError where the settings differ, or one id stands for two networks.
        """
        for name, value in self.settings.items():
            if other.settings[name] != value:
                raise InputError(
                    f"plan {other.name}: {name} is {other.settings[name]!r}, and {self.name} has {value!r}; "
                    "use the same, or another --out"
                )
        grid = _Grid()  # every network has its own, and a plan's would stand in for those it omits
        both = replace(
            self,
            networks=(*self.networks, *other.networks),
            drawn=max(self.drawn, other.drawn),
            **{name: getattr(grid, name) for name in _GRID},
        )
        if both.points(()) == self.points(()):
            return self
        document = CAMPAIGN_PLANS.document(both)
        return replace(
            both, text=f"# Points of several plans, one behind the other.\n{format_toml(document)}"
        )

    @property
    def fittable(self) -> bool:
        """Whether one mode at least has the points that a fit needs."""
        return len(self.shortages()) < len({mode for item in self.items() for mode, _ in item.points})

    def shortages(self) -> list[str]:
        """Return a line for each mode that has too few points for a fit, or too few networks."""
        lines = []
        for mode in ("train", "infer"):
            items = [item for item in self.items() if any(m == mode for m, _ in item.points)]
            points = sum(1 for item in items for m, _ in item.points if m == mode)
            networks = len({item.network.label for item in items})
            if points and (points < FEWEST_ROWS or (networks < 2 and len({i.level for i in items}) < 3)):
                lines.append(
                    f"{points} points of {networks} networks in mode {mode}; a fit needs at least "
                    f"{FEWEST_ROWS}, of two networks or three pruning levels"
                )
        return lines


def _check_plan(plan: CampaignPlan) -> None:
    if not plan.networks and not plan.drawn:
        raise InputError("has no 'networks' and no 'drawn'; expected one of them")
    for network in plan.networks:
        if not network.points:
            raise InputError(
                f"network {network.name} has no train_batch_sizes and no infer_batch_sizes; expected one"
            )


CAMPAIGN_PLANS = Codec(
    CampaignPlan,
    "Campaign plan",
    verify=_check_plan,
    remedy="`torchedge campaign show quick` prints an example",
)


def read_plan(plan: str | Path) -> CampaignPlan:
    """Return the plan "standard" or "quick", or the one in a TOML file.

    Raises InputError that names a key that is missing, unknown or out of range.
    """
    if str(plan) in PACKAGED:
        return parse_plan(str(plan), PACKAGED[str(plan)])
    if not check_path("plan", plan).is_file():
        raise InputError(f"plan {str(plan)!r} is no file; expected {', '.join(PACKAGED)} or a TOML file")
    try:
        text = read_text(plan, "a campaign plan as TOML")
    except ProfileError as error:
        raise InputError(f"plan {error}") from error
    return parse_plan(str(plan), text)


def parse_plan(name: str, text: str) -> CampaignPlan:
    """Return the plan of a TOML text, as `read_plan`; `name` stands in errors."""
    try:
        document = parse_toml(f"plan {name}", text.encode())
    except ProfileError as error:
        raise InputError(str(error)) from error
    networks = document.get("networks")
    if isinstance(networks, list):
        document = {**document, "networks": [_with_defaults(item, document) for item in networks]}
    plan = CAMPAIGN_PLANS.parse(f"plan {name}", document, name=name, text=text)
    plan = replace(plan, networks=tuple([network.sorted() for network in plan.networks]))
    points = sum(len(item.points) for item in plan.items())
    if points > MOST_POINTS:
        raise InputError(f"plan {name}: has {points} points; expected at most {MOST_POINTS}: split it")
    return plan


def _with_defaults(item: object, document: Mapping[str, object]) -> object:
    """Return a network's table with the plan's grid where it has none of its own; a text is a name."""
    table = {"name": item} if isinstance(item, str) else item
    grid = {key: document[key] for key in _GRID if key in document}
    return {**grid, **table} if isinstance(table, Mapping) else table
