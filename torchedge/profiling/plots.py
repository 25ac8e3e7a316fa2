"""Pictures of predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchedge.profiling.accuracy import Comparison, Report
from torchedge.storage.pictures import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, canvas, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY, "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_MOST_BARS = 24


def draw_overview(report: Report, out: Path) -> None:
    """Draw a row of scatter, errors and networks for each figure measured; the suffix chooses the format."""
    rows = max(len(report.comparisons), 1)
    with canvas(16.0, 4.6 * rows + 0.4) as figure:
        axes = figure.subplots(rows, 3, squeeze=False)
        for line, compared in zip(axes, report.comparisons, strict=True):
            draw_scatter(line[0], compared)
            draw_error_histogram(line[1], compared)
            draw_errors_by_network(line[2], compared, most=12)
        figure.suptitle(f"{report.device.title}: {report.dataset}", fontsize=12)
    save_picture(figure, out)


def leading_networks(compared: Comparison, most: int) -> list[str]:
    """Return at most `most` networks: those with most pruning levels, then with most rows."""
    names, counts = np.unique(compared.network, return_counts=True)
    levels = [len(set(compared.level[compared.network == name].tolist())) for name in names]
    order = sorted(range(len(names)), key=lambda i: (-levels[i], -counts[i], names[i]))
    return sorted(str(names[i]) for i in order[:most])


def draw_scatter(axes: Axes, compared: Comparison) -> None:
    """Draw predicted over measured values, logarithmic, with the line where both are equal."""
    names = leading_networks(compared, len(COLOURS))
    others = ~np.isin(compared.network, names)
    count = len(set(compared.network[others].tolist()))
    groups = [(f"{count} other{'s' if count > 1 else ''}", others, GREY, "o", 9)] if count else []
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        groups.append((name, compared.network == name, colour, marker, 14))
    for label, rows, colour, marker, size in groups:
        axes.scatter(
            compared.measured[rows], compared.value[rows], s=size, color=colour, marker=marker, alpha=0.65,
            linewidths=0, label=label,
        )  # fmt: skip
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


def draw_error_histogram(axes: Axes, compared: Comparison) -> None:
    """Draw a histogram of signed errors, and the share of rows inside their intervals."""
    size = compared.size
    reach = float(np.clip(np.quantile(size, 0.99) * 1.1, 1.0, 200.0))
    clipped = np.clip(compared.error, -reach, reach)
    axes.hist(clipped, bins=np.linspace(-reach, reach, 61).tolist(), color=COLOURS[0], alpha=0.85)
    axes.axvline(0, color="#333333", linewidth=1)
    lines = [
        f"mean over networks {compared.score.mean:.1f} %",
        f"median {np.median(size):.1f} %",
        f"90 % of rows within {np.quantile(size, 0.9):.1f} %",
        f"largest {size.max():.0f} %",
    ]
    if compared.has_intervals:
        lines.append(f"inside 90 % intervals {compared.coverage:.0f} %")
    axes.text(0.98, 0.97, "\n".join(lines), transform=axes.transAxes, ha="right", va="top", fontsize=8)
    axes.set(
        xlabel=f"error of {compared.symbol}, % (positive: predicted above measured; ends hold the remainder)",
        ylabel="rows",
        title=f"{compared.symbol}: errors of {len(size):,} rows",
        xlim=(-reach, reach),
    )


def draw_errors_by_network(axes: Axes, compared: Comparison, most: int = _MOST_BARS) -> None:
    """Draw bars of the mean absolute error by network, one for each way of pruning if there are several."""
    names, groups = bars(compared, most)
    position = 0.0
    ticks = []
    colours = dict(zip(groups, COLOURS, strict=False)) | {"": COLOURS[0] if len(groups) == 1 else GREY}
    labelled: set[str] = set()
    for place, _ in enumerate(names):
        drawn = [(group, means[place]) for group, means in groups.items() if np.isfinite(means[place])]
        ticks.append(position + (len(drawn) - 1) / 2)
        for group, mean in drawn:
            label = None if group in labelled else group or "not pruned"
            labelled.add(group)
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


def bars(compared: Comparison, most: int = _MOST_BARS) -> tuple[list[str], dict[str, list[float]]]:
    """Return names of bars (the leading networks, then all others together) and mean errors by pruning.

    Errors are NaN where there is no bar; the group "" holds networks that were never pruned, or all networks
    if they were pruned in one way.
    """
    size = compared.size
    leading = leading_networks(compared, most)
    pruned = set(compared.network[compared.strategy != ""].tolist())
    leading = [n for n in leading if n in pruned] + [n for n in leading if n not in pruned]
    others = ~np.isin(compared.network, leading)
    rows_of = {name: compared.network == name for name in leading}
    if others.any():
        rows_of[f"{len(set(compared.network[others].tolist()))} others, mean"] = others
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
