"""Judge choices of kernels by one device's coefficients with those of another: docs/lowering.md.

    python benchmarks/kernel_transfer.py adreno-640 adreno-540 adreno-750 mali-g77

For each pair of devices: the regret of the schedules and layouts that the cost model chooses with the first
one's coefficients, if the second one's are the truth, beside the regret of the fixed default. Mean and median
over shapes of TMModel's nine operators, on the target of the first device named. Nothing is measured: what
is judged is how much a choice suffers where coefficients are assumed.
"""

from __future__ import annotations

import numpy as np
from harness import options_of

from torchedge.devices import find_device
from torchedge.lowering.inference import target_of_device
from torchedge.lowering.tuning import score
from torchedge.profiling.kernel_benchmark import operand_layouts
from torchedge.profiling.operator_cases import all_cases, operator_kernel
from torchedge.textures.coefficients import coefficients_of


def main() -> None:
    """Print a table of regrets: a row for each truth, a column for each chooser."""
    parser = options_of(__doc__)
    parser.add_argument("devices", nargs="+", help="devices whose coefficients choose and judge")
    parser.add_argument("--every", type=int, default=6, help="take each so many-th shape")
    given = parser.parse_args()
    known = {name: coefficients_of(find_device(name)) for name in given.devices}
    target = target_of_device(find_device(given.devices[0]), tuner="fixed")
    choosers = [*given.devices, "default"]
    regrets: dict[tuple[str, str], list[float]] = {
        (truth, chooser): [] for truth in known for chooser in choosers
    }
    cases = all_cases(most_flops=1e9)[:: given.every]
    for case in cases:
        kernel = operator_kernel(case, target)
        options = operand_layouts(kernel, target)
        scores = {
            name: score(kernel.nest, kernel.layouts, target, coefficients, options, ablations=False)
            for name, coefficients in known.items()
        }
        places = {name: own.best() for name, own in scores.items()} | {"default": 0}
        for truth, own in scores.items():
            ms = own.ms.reshape(-1)
            for chooser, place in places.items():
                regrets[truth, chooser].append(100 * (ms[place] / ms.min() - 1))
    print(f"{len(cases)} shapes; mean (median) regret, %, of choices by the coefficients of")
    print(f"{'true for':12}" + "".join(f"{chooser:>18}" for chooser in choosers))
    for truth in known:
        cells = [regrets[truth, chooser] for chooser in choosers]
        print(f"{truth:12}" + "".join(f"{np.mean(c):11.1f} ({np.median(c):.1f})".rjust(18) for c in cells))


if __name__ == "__main__":
    main()
