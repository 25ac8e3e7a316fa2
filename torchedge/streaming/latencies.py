"""How long each operation takes alone: a roofline from the figures of a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchedge.devices import Device
from torchedge.streaming.operations import Operation

__all__ = ["RATIO", "Rates", "estimate_latencies", "rates_of"]

RATIO = "inference_time_ratio"
"""The figure that says how far measured inference stays behind the roofline."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the roofline stands on: FLOP/ms, bytes/ms, launch (ms) and measured time over the roofline's.

    `notes` say which figures were missing and what stood in for them.
    """

    flops_ms: float
    bytes_ms: float
    launch_ms: float
    ratio: float
    notes: tuple[str, ...] = ()


def rates_of(device: Device, precision: str = "float16") -> Rates:
    """Return a device's rates in one precision.

    Raises:
        DeviceError: its profile gives no peak rate or no bandwidth.
    """
    notes = []
    peak = "peak_fp32_gflops"
    if precision == "float16":
        half = [name for name in ("peak_fp16_matrix_gflops", "peak_fp16_gflops") if name in device.figures]
        peak = half[0] if half else peak
        if not half:
            notes.append(f"{device.name} gives no half-precision rate; the single-precision rate stands in")
    streamed = "measured_bandwidth_gb_s" if "measured_bandwidth_gb_s" in device.figures else "bandwidth_gb_s"
    ratio = device.figures.get(RATIO)
    if ratio is None:
        notes.append(f"{device.name} gives no {RATIO}; latencies are the bare roofline")
    launch = device.figures.get("launch_overhead_us")
    if launch is None:
        notes.append(f"{device.name} gives no launch_overhead_us; launches are taken to cost nothing")
    return Rates(
        flops_ms=device.value(peak) * 1e6,
        bytes_ms=device.value(streamed) * 1e6,
        launch_ms=launch.value / 1e3 if launch else 0.0,
        ratio=ratio.value if ratio else 1.0,
        notes=tuple(notes),
    )


def estimate_latencies(operations: Iterable[Operation], rates: Rates) -> tuple[float, ...]:
    """Return each operation's latency alone, ms: ratio * (launch + max(FLOPs / rate, bytes / bandwidth))."""
    return tuple(
        rates.ratio * (rates.launch_ms + max(op.flops / rates.flops_ms, op.bytes_moved / rates.bytes_ms))
        for op in operations
    )
