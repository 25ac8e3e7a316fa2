"""The figures of a report, drawn with matplotlib, which loads on first use and needs no display.

Colours are Okabe and Ito's, which colour-blind readers tell apart; pruning levels take viridis, which they
read as a scale.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from torchedge.errors import MissingExtraError
from torchedge.profiling.reports import Compared, Report, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Picture",
    "draw_batch_sizes",
    "draw_error_histogram",
    "draw_errors_by_level",
    "draw_errors_by_network",
    "draw_scatter",
    "overview",
    "pictures",
    "png_bytes",
    "require_matplotlib",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, without the yellow that white paper hides."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
OTHERS = "#9a9a9a"

_MOST_BARS = 24
_MOST_PANELS = 8
_FEWEST_LEVELS = 3
_DPI = 130
_STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#e3e3e3",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
)


@dataclass(frozen=True)
class Picture:
    """One figure: a file name without suffix, a caption, and what draws it on a new matplotlib figure."""

    name: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Figure], object]


def require_matplotlib() -> Any:  # noqa: ANN401 - a module
    """Return matplotlib with a backend that needs no display; raises MissingExtraError without it."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", extra="plots", purpose="drawing a report") from error
    matplotlib.use("Agg")
    return matplotlib


def png_bytes(picture: Picture) -> bytes:
    """Draw a picture and return it as a PNG file."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context({**_STYLE}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=picture.size, layout="constrained")
        picture.draw(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI)
    return out.getvalue()


def pictures(report: Report) -> Iterator[Picture]:
    """Yield the pictures of a report: up to five of each figure measured."""
    for compared in report.compared:
        stem = compared.name.replace(" ", "-")
        symbol = f"{compared.symbol}, {compared.name}"
        yield Picture(
            f"{stem}-predicted-measured",
            f"{symbol}: predicted against measured; on the line both are equal, "
            "the band is 10 % to either side.",
            (6.2, 5.2),
            partial(_on_axes, draw_scatter, compared),
        )
        yield Picture(
            f"{stem}-errors",
            f"{symbol}: distribution of the errors.",
            (6.2, 3.4),
            partial(_on_axes, draw_error_histogram, compared),
        )
        bars = int(sum(np.isfinite(means).sum() for means in _bars(compared)[1].values()))
        yield Picture(
            f"{stem}-by-network",
            f"{symbol}: mean error by network (as perf4sight's Fig. 3 and 4).",
            (6.2, 1.2 + 0.22 * bars),
            partial(_on_axes, draw_errors_by_network, compared),
        )
        names = _with_levels(compared)
        if not names:
            continue
        yield Picture(
            f"{stem}-by-level",
            f"{symbol}: mean error by the share of parameters that was pruned.",
            (6.2, 3.6),
            partial(_on_axes, draw_errors_by_level, compared),
        )
        yield Picture(
            f"{stem}-by-batch-size",
            f"{symbol} against batch size, one curve a pruning level (as perf4sight's Fig. 5): "
            "dots measured, lines predicted.",
            (9.6, 0.5 + 2.4 * (-(-len(names) // 3))),
            partial(draw_batch_sizes, compared=compared),
        )


def overview(report: Report) -> Picture:
    """Return one picture of everything: for each figure measured, scatter, errors and networks in a row."""
    rows = max(len(report.compared), 1)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(rows, 3, squeeze=False)
        for line, compared in zip(axes, report.compared, strict=True):
            draw_scatter(line[0], compared)
            draw_error_histogram(line[1], compared)
            draw_errors_by_network(line[2], compared, most=12)
        figure.suptitle(f"{report.device.title}: {report.dataset}", fontsize=12)

    return Picture("overview", report.method, (16.0, 4.6 * rows + 0.4), draw)


def _on_axes(draw: Callable[[Axes, Compared], object], compared: Compared, figure: Figure) -> None:
    draw(figure.subplots(), compared)


# one figure each --------------------------------------------------------------------------------------------


def draw_scatter(axes: Axes, compared: Compared) -> None:
    """Draw predicted over measured values, logarithmic, with the line where both are equal."""
    names = compared.leading(len(COLOURS))
    rest = ~np.isin(compared.network, names)
    if rest.any():
        count = len(set(compared.network[rest].tolist()))
        axes.scatter(
            compared.measured[rest],
            compared.value[rest],
            s=9,
            color=OTHERS,
            alpha=0.6,
            linewidths=0,
            label=f"{count} other{'s' if count > 1 else ''}",
        )
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        rows = compared.network == name
        axes.scatter(
            compared.measured[rows],
            compared.value[rows],
            s=14,
            color=colour,
            marker=marker,
            alpha=0.65,
            linewidths=0,
            label=name,
        )
    both = np.concatenate([compared.measured, compared.value])
    ends = np.array([both.min() / 1.15, both.max() * 1.15])
    axes.plot(ends, ends, color="#333333", linewidth=1, zorder=1)
    axes.fill_between(ends, ends / 1.1, ends * 1.1, color="#333333", alpha=0.1, linewidth=0, zorder=0)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel=f"measured {compared.symbol}, {compared.unit}",
        ylabel=f"predicted {compared.symbol}, {compared.unit}",
        title=f"{compared.symbol}: {compared.name}",
    )
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis, ends)
    axes.set_aspect("equal", adjustable="box")
    axes.legend(loc="upper left", markerscale=1.4, handletextpad=0.2)


def _plain_ticks(axis: Any, ends: Any) -> None:  # noqa: ANN401 - a matplotlib Axis, an array of two
    """Write the ticks of a logarithmic axis as plain numbers, as many as a short range needs."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = float(np.log10(ends[1] / ends[0]))
    steps = (1, 2, 3, 4, 6) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def draw_error_histogram(axes: Axes, compared: Compared) -> None:
    """Draw how many rows have which signed error, and say how many lie inside their intervals."""
    found = summarise(compared)
    reach = float(np.clip(np.quantile(np.abs(compared.error), 0.99) * 1.1, 1.0, 200.0))
    clipped = np.clip(compared.error, -reach, reach)
    axes.hist(clipped, bins=np.linspace(-reach, reach, 61).tolist(), color=COLOURS[0], alpha=0.85)
    axes.axvline(0, color="#333333", linewidth=1)
    lines = [
        f"mean over networks {found.mean:.1f} %",
        f"median {found.median:.1f} %",
        f"90 % of rows within {found.tenth:.1f} %",
        f"largest {found.largest:.0f} %",
    ]
    if compared.has_intervals:
        lines.append(f"inside 90 % intervals {found.coverage:.0f} %")
    axes.text(0.98, 0.97, "\n".join(lines), transform=axes.transAxes, ha="right", va="top", fontsize=8)
    axes.set(
        xlabel=f"error of {compared.symbol}, % (predicted above measured: positive; ends hold the rest)",
        ylabel="rows",
        title=f"{compared.symbol}: errors of {found.rows:,} rows",
        xlim=(-reach, reach),
    )


def draw_errors_by_network(axes: Axes, compared: Compared, most: int = _MOST_BARS) -> None:
    """Draw bars of the mean absolute error by network, one a way of pruning where there are several."""
    names, groups = _bars(compared, most)
    position = 0.0
    ticks = []
    colours = dict(zip(groups, COLOURS, strict=False)) | {"": COLOURS[0] if len(groups) == 1 else OTHERS}
    named: set[str] = set()
    for place, _ in enumerate(names):
        bars = [(group, means[place]) for group, means in groups.items() if np.isfinite(means[place])]
        ticks.append(position + (len(bars) - 1) / 2)
        for group, mean in bars:
            label = None if group in named else group or "not pruned"
            named.add(group)
            axes.barh(position, mean, height=0.92, color=colours[group], label=label)
            axes.text(mean, position, f" {mean:.1f}", va="center", ha="left", fontsize=7)
            position += 1
        position += 0.5
    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12, y=0.01)
    axes.set_xlim(right=max(axes.get_xlim()[1], 0.5))  # errors of rounding are no bars
    axes.set(xlabel=f"mean absolute error of {compared.symbol}, %", title=f"{compared.symbol}: by network")
    if len(groups) > 1:
        axes.legend(loc="best", title="pruning", title_fontsize=8)


def _bars(compared: Compared, most: int = _MOST_BARS) -> tuple[list[str], dict[str, list[float]]]:
    """Return names of bars (the leading networks, then all others together) and mean errors by pruning.

    Errors are NaN where there is no bar; the group "" holds networks that were never pruned, or all networks
    where they were pruned in one way.
    """
    size = np.abs(compared.error)
    leading = compared.leading(most)
    pruned = set(compared.network[compared.strategy != ""].tolist())
    leading = [n for n in leading if n in pruned] + [n for n in leading if n not in pruned]
    rest = ~np.isin(compared.network, leading)
    rows_of = {name: compared.network == name for name in leading}
    if rest.any():
        rows_of[f"{len(set(compared.network[rest].tolist()))} others, mean"] = rest
    strategies = [s for s in ("random", "l1") if (compared.strategy == s).any()]
    if len(strategies) < 2:
        return list(rows_of), {"": [float(size[rows].mean()) for rows in rows_of.values()]}
    groups: dict[str, list[float]] = {strategy: [] for strategy in (*strategies, "")}
    for name, rows in rows_of.items():
        for strategy, means in groups.items():
            chosen = rows & (compared.strategy == strategy)
            wanted = (strategy != "") == (name in pruned) and chosen.any()
            means.append(float(size[chosen].mean()) if wanted else float("nan"))
    return list(rows_of), groups


def _with_levels(compared: Compared) -> list[str]:
    """Return the networks that were measured at several pruning levels."""
    return [
        name
        for name in compared.leading(_MOST_PANELS)
        if len(set(compared.level[compared.network == name].tolist())) >= _FEWEST_LEVELS
    ]


def draw_errors_by_level(axes: Axes, compared: Compared) -> None:
    """Draw the mean absolute error over the pruning level, a line a network and one for all."""
    size = np.abs(compared.error)
    names = _with_levels(compared)
    chosen = np.isin(compared.network, names)
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        levels, means = _means(compared.level, size, compared.network == name)
        axes.plot(
            levels, means, color=colour, marker=marker, markersize=4, linewidth=1, alpha=0.8, label=name
        )
    levels, means = _means(compared.level, size, chosen)
    axes.plot(levels, means, color="#333333", linewidth=2.5, alpha=0.5, label="all of these")
    axes.set(
        xlabel="parameters pruned, %",
        ylabel=f"mean absolute error of {compared.symbol}, %",
        title=f"{compared.symbol}: by pruning level",
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _means(
    keys: Any,  # noqa: ANN401 - an array of numbers
    values: Any,  # noqa: ANN401
    rows: Any,  # noqa: ANN401
) -> tuple[list[float], list[float]]:
    levels = sorted(set(keys[rows].tolist()))
    return levels, [float(values[rows & (keys == level)].mean()) for level in levels]


def draw_batch_sizes(figure: Figure, compared: Compared) -> None:
    """Draw a panel a network: the figure over batch size, a colour a pruning level; dots are measured."""
    import matplotlib
    from matplotlib.colors import Normalize
    from matplotlib.ticker import StrMethodFormatter

    names = _with_levels(compared)
    columns = min(3, len(names))
    panels = figure.subplots(-(-len(names) // columns), columns, squeeze=False).ravel()
    colours, scale = matplotlib.colormaps["viridis_r"], Normalize(-12, 92)
    for axes, name in zip(panels, names, strict=False):
        for label, level in _curves(compared, name):
            rows = np.flatnonzero((compared.network == name) & (compared.label == label))
            rows = rows[np.argsort(compared.batch[rows], kind="stable")]
            colour = colours(scale(level))
            axes.plot(compared.batch[rows], compared.value[rows], color=colour, linewidth=1.3)
            axes.plot(
                compared.batch[rows],
                compared.measured[rows],
                "o",
                color=colour,
                markersize=3.4,
                markeredgewidth=0.3,
                markeredgecolor="#333333",
                label=f"{level} %",
            )
        axes.set_title(name)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("batch size", fontsize=9)
    figure.supylabel(f"{compared.symbol}, {compared.unit}", fontsize=9)
    handles, labels = _legend(list(panels[: len(names)]))
    figure.legend(handles, labels, loc="outside right upper", title="parameters\npruned", title_fontsize=8)


def _curves(compared: Compared, name: str, most: int = 7) -> Sequence[tuple[str, int]]:
    """Return (label, level) of a network's curves: one a level, pruned in one way, levels evenly spread."""
    rows = compared.network == name
    ways = [s for s in ("random", "l1") if (compared.strategy[rows] == s).any()] or [""]
    kept = rows & ((compared.strategy == ways[0]) | (compared.strategy == ""))
    found: dict[int, str] = {}
    for label, level in zip(compared.label[kept].tolist(), compared.level[kept].tolist(), strict=True):
        found.setdefault(level, label)
    levels = sorted(found)
    wanted = np.linspace(levels[0], levels[-1], most)
    nearest = {min(levels, key=lambda level: abs(level - goal)) for goal in wanted.tolist()}
    return [(found[level], level) for level in sorted(nearest)]


def _legend(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Return the handles of all panels, each level once, in order."""
    found: dict[int, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(int(label.split()[0]), handle)
    return [found[level] for level in sorted(found)], [f"{level} %" for level in sorted(found)]
