"""The rates of a device's products, from its published figures alone.

Three laws, fitted to single kernels of five GPUs in float32, each GPU left out in turn
(`benchmarks/accuracy/unseen_gpus.py share` and `products`):

- A convolution on matrix units has a part that stays on vector units (Amdahl's law, `VECTOR_SHARE`).
- A product on vector units reaches more of their peak where a warp scheduler feeds 16 lanes (`NARROW_GAIN`).
- A product on vector units takes power, which the board limits (`WATT_GFLOPS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torchedge.devices import Device
from torchedge.graphs import Mode

REFERENCE_GFLOPS = 665.6
"""The Jetson TX2's peak in float32, for devices that state none."""

VECTOR_SHARE = 0.4
"""The part of a convolution's time on vector units that remains on matrix units (Amdahl's law): they move and
transform tensors, in half precision half as many bytes."""

NARROW_GAIN = 1.12
"""How much more of the peak a float32 product reaches with 16 lanes a scheduler than with 32: there other
instructions issue between two multiply-adds, here they take the place of one."""

WATT_GFLOPS = 750.0
"""Peak GFLOP/s that one watt sustains, times the nanometres of the process: the clock falls under the load of
products where the board's power does not suffice for its peak."""

SWEPT: Mapping[Mode, Mapping[str, float]] = MappingProxyType(
    {
        "train": {"norm": 8.5, "activation": 6.7, "binary": 5.0, "copy": 5.5, "fan": 3.9},
        "infer": {"norm": 3.5, "activation": 2.8, "binary": 3.0, "copy": 2.8},
    }
)
"""Accesses of four bytes, at the peak of the bandwidth, that sweeps of transformers over an element take."""

MATRIX_OVERLAP = 1.0
"""The coefficient `overlap` of transformers on a GPU: by 19 steps of ten families with eager attention in
float32 on an H200, before these were fitted."""

NORM_LANES = 2.0
"""Channels that a multiprocessor of NVIDIA's GPUs normalises at once: libraries give each a block, so that
batch norms of few channels take hardly less time. By families of the H200's campaign, left out."""

REFERENCE_GB_S, REFERENCE_LAUNCH_US = 59.7, 10.0
"""The Jetson TX2's figures, for which the prior means of coefficients were chosen; others scale them."""

FUSED_BANDWIDTH, FUSED_KERNEL_US = 0.85, 2.0
"""The part of the bandwidth that kernels of Inductor and optimizers on lists reach, and the µs of a kernel
beside: 0.8 on an NVIDIA H200 by a profile of 14 steps, 0.9 on an H100 by the times of whole steps."""

COMPILED_LAUNCH, COMPILED_ARGUMENT, REPLAYED_ARGUMENT = 2.5, 2.2, 0.84
"""The host's time for a kernel that a compiled graph launches, and for an argument of the model's graph
(guards, AOTAutograd's prologue), launched and replayed by CUDA, in launches of a tiny kernel. By the host's
time of 28 steps on an H200, divided by that of tiny steps (`step_us`) just before."""

COMPILED_OVERLAP = 2.0
"""The coefficient `overlap` of compiled steps: the longer of host and device decides sharply."""

_GENERATIONS: Mapping[float, tuple[float, int]] = MappingProxyType(
    {6.0: (16, 32), 6.1: (16, 32), 7.0: (12, 16), 7.5: (12, 16), 8.0: (7, 16), 8.6: (8, 32), 8.9: (4, 32),
     9.0: (4, 32)}
)  # fmt: skip
"""By compute capability: nanometres in the name of the process (TSMC's 16, 12, 7 and 4N, Samsung's 8), and
float32 lanes a warp scheduler feeds. NVIDIA's architecture white papers, Pascal to Hopper."""


def product_rates(device: Device, precision: str | None = None) -> tuple[float, float]:
    """Return the GFLOP/s of convolutions and of matrix products: PyTorch's defaults on the device.

    precision: None for float32, where cuDNN takes TF32 for convolutions and cuBLAS does not for matrix
    products. A device whose figures give no rate for a precision has the next slower one. Products on matrix
    units have their peak, convolutions the part of it that they attain, float32 products that of an H200's.
    """
    full = figure_of(device, "peak_fp32_gflops", REFERENCE_GFLOPS)
    half = figure_of(device, "peak_fp16_gflops", full) if precision == "float16" else full
    name = {None: "peak_tf32_gflops", "float16": "peak_fp16_matrix_gflops"}.get(
        precision, "peak_bf16_matrix_gflops"
    )
    peak = max(half, figure_of(device, name, half))
    moving = min(full if precision is None else 2 * full, peak)
    attained = 1 / ((1 - VECTOR_SHARE) / peak + VECTOR_SHARE / moving)
    return max(half, attained), _sustained(device, full) if precision is None else peak


def _sustained(device: Device, peak: float) -> float:
    """Return the GFLOP/s of float32 products, in units of the part of its peak that an H200 reaches."""
    generation = _GENERATIONS.get(figure_of(device, "compute_capability", 0.0))
    if generation is None:
        return peak
    process, lanes = generation
    powered = WATT_GFLOPS / process * figure_of(device, "power_w", float("inf"))
    return min(peak * (NARROW_GAIN if lanes == 16 else 1.0), powered)


def figure_of(device: Device, name: str, default: float) -> float:
    """Return a figure of a device, or the default where its profile has none."""
    figure = device.figures.get(name)
    return figure.value if figure is not None else default


def norm_lanes(device: Device) -> float:
    """Return how many channels of batch norms a device reads side by side; 0 where nothing is known of it."""
    nvidia = device.kind == "gpu" and device.vendor == "NVIDIA"
    return NORM_LANES * figure_of(device, "compute_units", 0.0) if nvidia else 0.0


@dataclass(frozen=True, slots=True)
class CompiledRates:
    """What the graphs of a compiled step cost, in ms.

    byte, kernel: of generated kernels, on the device. launch, argument, replayed: of the host, for a kernel,
    and for an argument of a graph, launched or replayed. overlap: as the coefficient of that name.
    """

    byte: float
    kernel: float
    launch: float
    argument: float
    replayed: float
    overlap: float = COMPILED_OVERLAP


def compiled_rates(device: Device) -> CompiledRates:
    """Return the rates of compiled steps on a device, by its bandwidth and the time of a launch."""
    unit = 1e-3 * figure_of(device, "launch_overhead_us", REFERENCE_LAUNCH_US)
    return CompiledRates(
        1e-6 / (FUSED_BANDWIDTH * figure_of(device, "bandwidth_gb_s", REFERENCE_GB_S)),
        1e-3 * FUSED_KERNEL_US,
        COMPILED_LAUNCH * unit,
        COMPILED_ARGUMENT * unit,
        REPLAYED_ARGUMENT * unit,
    )
