"""How long each operation takes alone: a roofline from the figures of a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchedge.devices import Device, Figure, Provenance
from torchedge.streaming.operations import Operation

__all__ = ["RATIO", "Roofline", "estimate_latencies", "inline_rate", "roofline_of"]

RATIO = "inference_time_ratio"
"""The figure that says how far measured inference stays behind the roofline."""

_HALF_RATES = ("peak_fp16_matrix_gflops", "peak_fp16_gflops")
_FULL_RATE = "peak_fp32_gflops"


@dataclass(frozen=True, slots=True)
class Roofline:
    """What latencies stand on: FLOP/ms, bytes/ms, launch (ms) and measured time over the roofline's.

    `notes` say which figures were missing and what stood in for them.
    """

    flops_ms: float
    bytes_ms: float
    launch_ms: float
    ratio: float
    notes: tuple[str, ...] = ()


def roofline_of(device: Device, precision: str = "float16") -> Roofline:
    """Return what the figures of a device say about one precision.

    Raises:
        DeviceError: its profile gives no peak rate or no bandwidth.
    """
    notes = []
    peak = next((name for name in _HALF_RATES if name in device.figures), _FULL_RATE)
    if precision != "float16":
        peak = _FULL_RATE
    elif peak == _FULL_RATE:
        notes.append(f"{device.name} gives no half-precision rate; the single-precision rate stands in")
    streamed = "measured_bandwidth_gb_s" if "measured_bandwidth_gb_s" in device.figures else "bandwidth_gb_s"
    ratio = device.figures.get(RATIO)
    if ratio is None:
        notes.append(f"{device.name} gives no {RATIO}; latencies are the bare roofline")
    launch = device.figures.get("launch_overhead_us")
    if launch is None:
        notes.append(f"{device.name} gives no launch_overhead_us; launches are taken to cost nothing")
    return Roofline(
        flops_ms=device.value(peak) * 1e6,
        bytes_ms=device.value(streamed) * 1e6,
        launch_ms=launch.value / 1e3 if launch else 0.0,
        ratio=ratio.value if ratio else 1.0,
        notes=tuple(notes),
    )


def estimate_latencies(operations: Iterable[Operation], roofline: Roofline) -> tuple[float, ...]:
    """Return each operation's latency alone, ms: ratio * (launch + max(FLOPs / rate, bytes / bandwidth))."""
    work = (max(op.flops / roofline.flops_ms, op.bytes_moved / roofline.bytes_ms) for op in operations)
    return tuple(roofline.ratio * (roofline.launch_ms + ms) for ms in work)


def inline_rate(device: Device) -> Figure:
    """Return the rate (GB/s) at which a running kernel moves weights from unified into texture memory.

    Where the profile gives no `unified_to_texture_gb_s`, half of its bandwidth stands in, "assumed".

    Raises:
        DeviceError: its profile gives no bandwidth either.
    """
    given = device.figures.get("unified_to_texture_gb_s")
    if given is not None:
        return given
    name = "measured_bandwidth_gb_s" if "measured_bandwidth_gb_s" in device.figures else "bandwidth_gb_s"
    source = f"Half of {name}: a copy reads and writes main memory once"
    return Figure(device.value(name) / 2, "GB/s", Provenance.ASSUMED, source)
