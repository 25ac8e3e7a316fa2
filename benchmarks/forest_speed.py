"""Time flat forests against scikit-learn in one run: python benchmarks/forest_speed.py [trees]."""

import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from torchedge.forests.trees import evaluate, read_forests, write_forests
from torchedge.profiling.forest_fitting import convert_model

FEATURES, ROWS = 56, 1100


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The best of some calls: the machine may be busy with other work."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def main(trees: int) -> None:
    """Grow trees of the size that perf4sight's data gives, then time both."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, 5))
    X = np.exp(hidden @ rng.normal(size=(5, FEATURES)) + 0.05 * rng.normal(size=(ROWS, FEATURES)))
    y = np.exp(hidden[:, 0]) * (1 + hidden[:, 1] ** 2)
    model = ExtraTreesRegressor(trees, random_state=0).fit(X, y)
    forest = convert_model(model, X, feature_names=[f"f{i}" for i in range(FEATURES)])
    print(forest, f"{int(forest.depths.max())} levels, {forest.nbytes / 2**20:.2f} MiB")
    with TemporaryDirectory() as folder:
        path = f"{folder}/forest.safetensors"
        write_forests(path, {"phi": forest})
        load = seconds(lambda: read_forests(path), 5)
    print(f"load and validate from disk: {load * 1e3:.1f} ms")
    print(f"{'rows':>6} {'scikit-learn ms':>16} {'torchedge ms':>13} {'ratio':>7} {'rows/s':>10}")
    for rows, repeats in ((1, 200), (25, 100), (1000, 20), (10_000, 5)):
        table = np.exp(rng.normal(0, 0.1, (rows, FEATURES))) * X[rng.integers(0, ROWS, rows)]
        np.testing.assert_allclose(evaluate(forest, table), model.predict(table), rtol=1e-5)
        theirs = seconds(lambda table=table: model.predict(table), max(3, repeats // 5))
        ours = seconds(lambda table=table: evaluate(forest, table), repeats)
        print(f"{rows:6} {theirs * 1e3:16.3f} {ours * 1e3:13.3f} {theirs / ours:7.1f} {rows / ours:10.0f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
