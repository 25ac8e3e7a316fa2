"""Plans: what a campaign measures, as a TOML document. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchedge.errors import InputError, ProfileError
from torchedge.graphs import Mode
from torchedge.storage.documents import parse_toml, read_bytes

__all__ = ["PACKAGED", "CampaignPlan", "PlanItem", "PlannedNetwork", "read_plan"]

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
    "quick": """\
# A first look: 6 networks, 30 points.
levels = [0, 50]
strategies = ["random"]
train_batch_sizes = [1, 4, 8]
infer_batch_sizes = [1, 8]
networks = ["resnet18", "mobilenet_v2", "squeezenet1_1"]
""",
}
"""The packaged plans by name; `torchedge campaign show` prints one as a start for your own."""

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw", "none")
STRATEGIES, SCOPES = ("random", "l1"), ("global", "uniform")
INPUT_SIZE = (3, 224, 224)
MOST_NETWORKS, MOST_POINTS, LARGEST = 10_000, 1_000_000, 1 << 20
_NAME = re.compile(r"(timm:)?[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_GRID = ("levels", "strategies", "train_batch_sizes", "infer_batch_sizes")
_KEYS = (*_GRID, "networks", "scope", "round_to", "optimizer", "seed", "input_size")
_NETWORK_KEYS = (*_GRID, "name", "label", "kwargs", "input_size", "input_sizes")


@dataclass(frozen=True, slots=True)
class PlannedNetwork:
    """A network of a plan with its grid; `name` is torchvision's, or timm's behind "timm:"."""

    name: str
    label: str
    kwargs: Mapping[str, Any]
    input_sizes: tuple[tuple[int, ...], ...]
    levels: tuple[float, ...]
    strategies: tuple[str, ...]
    points: tuple[tuple[Mode, int], ...]


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One network at one level, strategy ("" at level 0) and input size: one job, or the reason for none."""

    id: str
    network: PlannedNetwork
    level: float
    strategy: str
    input_size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CampaignPlan:
    """Everything a campaign measures; `text` is the document it was read from."""

    name: str
    networks: tuple[PlannedNetwork, ...]
    scope: str
    round_to: int | None
    optimizer: str
    seed: int
    text: str

    def items(self) -> Iterator[PlanItem]:
        """Yield the networks to measure in the plan's order, each with an id of its own."""
        for network in self.networks:
            for size in network.input_sizes:
                stem = network.label if size == INPUT_SIZE else f"{network.label}@{'x'.join(map(str, size))}"
                for strategy in network.strategies if any(network.levels) else ("",):
                    for level in network.levels:
                        if level:
                            yield PlanItem(f"{stem}-{strategy}-{level:g}", network, level, strategy, size)
                        elif strategy == network.strategies[0] or not strategy:
                            yield PlanItem(f"{stem}-0", network, 0, "", size)

    @property
    def digest(self) -> str:
        """sha256 of what the plan means: comments and the order of keys do not count."""
        content: list[object] = [self.scope, self.round_to, self.optimizer, self.seed]
        for n in self.networks:
            content += [n.name, n.label, dict(n.kwargs), n.input_sizes, n.levels, n.strategies, n.points]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_plan(plan: str | Path) -> CampaignPlan:
    """Return the plan "standard" or "quick", or the one in a TOML file.

    Raises InputError, naming the key, for what is missing, unknown or out of range.
    """
    if str(plan) in PACKAGED:
        return parse_plan(str(plan), PACKAGED[str(plan)])
    if not Path(plan).is_file():
        raise InputError(f"plan {str(plan)!r} is no file; expected {', '.join(PACKAGED)} or a TOML file")
    try:
        text = read_bytes(plan).decode("utf-8")
    except (ProfileError, UnicodeDecodeError) as error:
        raise InputError(f"plan {plan}: {error}") from error
    return parse_plan(str(plan), text)


def parse_plan(name: str, text: str) -> CampaignPlan:
    """Return the plan of a TOML text, as `read_plan`; `name` stands in errors."""
    try:
        document = parse_toml(name, text.encode())
    except ProfileError as error:
        raise InputError(f"plan {error}") from error
    table = _Table(f"plan {name}", document, _KEYS)
    networks = document.get("networks")
    if not isinstance(networks, list) or not 0 < len(networks) <= MOST_NETWORKS:
        raise InputError(
            f"plan {name}: networks is {str(networks)[:40]!r}; expected a list of 1 to {MOST_NETWORKS} "
            "names or tables such as {name = 'googlenet', kwargs = {aux_logits = false}}"
        )
    plan = CampaignPlan(
        name=name,
        networks=tuple(_network(name, item, document) for item in networks),
        scope=table.word("scope", SCOPES, "global"),
        round_to=table.whole("round_to", 1, 1024, 1) if "round_to" in document else None,
        optimizer=table.word("optimizer", OPTIMIZERS, "sgd-momentum"),
        seed=table.whole("seed", 0, 2**31 - 1, 0),
        text=text,
    )
    seen: set[str] = set()
    points = 0
    for item in plan.items():
        if item.id in seen:
            raise InputError(
                f"plan {name}: {item.id} stands twice; give one of its networks another label = '...'"
            )
        seen.add(item.id)
        points += len(item.network.points)
    if points > MOST_POINTS:
        raise InputError(f"plan {name}: has {points} points; expected at most {MOST_POINTS}: split it")
    return plan


def _network(plan: str, item: object, document: Mapping[str, object]) -> PlannedNetwork:
    entry = {"name": item} if isinstance(item, str) else item
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise InputError(f"plan {plan}: a network is {str(item)[:60]!r}; expected a name or a table with one")
    name = str(entry["name"])
    where = f"plan {plan}, network {name}"
    for key in ("name", "label"):
        text = entry.get(key, name)
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            raise InputError(
                f"{where}: {key} is {str(text)[:60]!r}; expected a name of torchvision or timm:NAME"
            )
    kwargs = entry.get("kwargs", {})
    if not isinstance(kwargs, Mapping):
        raise InputError(
            f"{where}: kwargs is {str(kwargs)[:40]!r}; expected a table of the builder's arguments"
        )
    inherited = {key: document[key] for key in (*_GRID, "input_size") if key in document}
    table = _Table(where, {**inherited, **entry}, _NETWORK_KEYS)
    points = [("infer", size) for size in table.numbers("infer_batch_sizes", 1, LARGEST, ())]
    points += [("train", size) for size in table.numbers("train_batch_sizes", 1, LARGEST, ())]
    if not points:
        raise InputError(f"{where}: has no train_batch_sizes and no infer_batch_sizes; expected one of them")
    levels = table.levels()
    strategies = table.words("strategies", STRATEGIES, ("random",))
    sizes = entry.get("input_sizes", [table.document.get("input_size", list(INPUT_SIZE))])
    return PlannedNetwork(
        name,
        str(entry.get("label", name)),
        dict(kwargs),
        _sizes(where, sizes),
        levels,
        strategies,
        tuple(points),  # type: ignore[arg-type]
    )


def _sizes(where: str, sizes: object) -> tuple[tuple[int, ...], ...]:
    def fine(size: object) -> bool:
        return (
            isinstance(size, list)
            and 1 <= len(size) <= 4
            and all(type(n) is int and 1 <= n <= LARGEST for n in size)
        )

    if not isinstance(sizes, list) or not sizes or not all(map(fine, sizes)):
        raise InputError(f"{where}: input size is {str(sizes)[:60]}; expected sizes such as [3, 224, 224]")
    return tuple(dict.fromkeys(tuple(size) for size in sizes))


@dataclass(frozen=True, slots=True)
class _Table:
    """Reads values of one table; errors name it."""

    where: str
    document: Mapping[str, object]
    known: Sequence[str]

    def __post_init__(self) -> None:
        for key in self.document:
            if key not in self.known:
                raise InputError(f"{self.where}: knows no {key!r}; expected {', '.join(self.known)}")

    def _fail(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.where}: {key} is {str(self.document[key])[:60]!r}; expected {expected}")

    def whole(self, key: str, low: int, high: int, default: int) -> int:
        value = self.document.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self._fail(key, f"a whole number from {low} to {high}")
        return value

    def word(self, key: str, known: Sequence[str], default: str) -> str:
        value = self.document.get(key, default)
        if value not in known:
            raise self._fail(key, f"one of {', '.join(known)}")
        return str(value)

    def words(self, key: str, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        value = self.document.get(key, list(default))
        if not isinstance(value, list) or not value or any(v not in known for v in value):
            raise self._fail(key, f"a list of {', '.join(known)}")
        return tuple(dict.fromkeys(value))

    def numbers(self, key: str, low: int, high: int, default: Sequence[int]) -> tuple[int, ...]:
        value = self.document.get(key, list(default))
        if not isinstance(value, list) or any(type(v) is not int or not low <= v <= high for v in value):
            raise self._fail(key, f"a list of whole numbers from {low} to {high}")
        return tuple(sorted(set(value)))

    def levels(self) -> tuple[float, ...]:
        value = self.document.get("levels", [0])
        plain = isinstance(value, list) and value and all(type(v) in (int, float) for v in value)
        if not plain or any(not 0 <= v < 100 for v in value):  # type: ignore[attr-defined]
            raise self._fail("levels", "a list of % of parameters to remove, 0 to below 100")
        return tuple(sorted(set(value)))  # type: ignore[call-overload]
