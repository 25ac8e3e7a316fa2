"""A comparison made by hand: two pruned networks of three levels and one that was never pruned."""

from dataclasses import replace

import numpy as np

from torchedge.profiling.accuracy import Comparison


def compared(**changes):
    """Return 27 rows whose predictions lie 10 % above the measurements."""
    rows = [
        (n, v, s) for n in ("one", "two") for v, s in ((0, ""), (30, "random"), (60, "random"), (60, "l1"))
    ]
    rows += [("plain", 0, "")]
    lines = [(*row, b) for row in rows for b in (4.0, 16.0, 64.0)]
    network, level, strategy, batch = (np.array(column) for column in zip(*lines, strict=True))
    measured = batch * np.array([2.0 if n == "one" else 3.0 for n in network]) * (1 - level / 100)
    label = np.array([f"{n}-{s}-{v}" for n, v, s in zip(network, level, strategy, strict=True)])
    table = Comparison(
        "train",
        "latency",
        network,
        level.astype(np.int64),
        strategy,
        label,
        batch,
        measured,
        1.1 * measured,
        0.95 * measured,
        1.3 * measured,
    )
    return replace(table, **changes)
