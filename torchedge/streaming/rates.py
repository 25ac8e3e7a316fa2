"""How long layers take alone, how fast weights move, and how much a layer slows while it loads some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torchedge.devices import Device, Figure, Provenance, weakest
from torchedge.errors import InputError
from torchedge.streaming.instances import MEBIBYTE, Layer, LoadClassName
from torchedge.streaming.layering import Operation

__all__ = [
    "OVERLOADS",
    "RATIO",
    "REQUEST_BYTES",
    "STAGING_BYTES",
    "THRESHOLDS",
    "Rates",
    "Roofline",
    "Slowdown",
    "derive_rates",
    "estimate_latencies",
    "framework_rates",
    "inline_rate",
    "roofline_of",
]

RATIO = "inference_time_ratio"
"""The figure for measured inference time over the roofline."""

_HALF_RATES = ("peak_fp16_matrix_gflops", "peak_fp16_gflops")
_FULL_RATE = "peak_fp32_gflops"


@dataclass(frozen=True, slots=True)
class Roofline:
    """The figures behind latencies: FLOP/ms, bytes/ms, launch (ms), and measured time over the roofline.

    `notes` say which figures were missing and what stood in for them.
    """

    flops_ms: float
    bytes_ms: float
    launch_ms: float
    ratio: float
    notes: tuple[str, ...] = ()


def roofline_of(device: Device, precision: str = "float16") -> Roofline:
    """Return a device's roofline in one precision.

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
    figure = device.figures.get("unified_to_texture_gb_s")
    if figure is not None:
        return figure
    name = "measured_bandwidth_gb_s" if "measured_bandwidth_gb_s" in device.figures else "bandwidth_gb_s"
    source = f"Half of {name}: a copy reads and writes main memory once"
    return Figure(device.value(name) / 2, "GB/s", Provenance.ASSUMED, source)


THRESHOLDS: Mapping[LoadClassName, float] = MappingProxyType(
    {"hierarchical": 0.0, "reusable": 0.2, "elemental": 3.0}
)
"""Share of its own latency that a layer may spend on loading, by operator class (FlashMem, section 4.2)."""

STAGING_BYTES = 16 * MEBIBYTE
"""Unified memory that reading ahead may take."""

REQUEST_BYTES = 4 * MEBIBYTE
"""Bytes that one read asks the disk for; storage reaches its sequential rate with such."""

OVERLOADS: Mapping[LoadClassName, float] = MappingProxyType(
    {"elemental": 2.0, "reusable": 2.0, "hierarchical": 4.0}
)
"""How many times longer a byte beyond a layer's capacity takes, by operator class (assumed)."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The cost of loading to a layer of one operator class.

    At its load capacity a layer is slower by `threshold` of its latency: that is what the capacity is
    (FlashMem, section 4.2). A byte beyond it takes `overload` times as long as at the inline rate.
    """

    threshold: float
    overload: float
    provenance: Provenance = Provenance.ASSUMED


def _default_slowdowns() -> Mapping[LoadClassName, Slowdown]:
    return MappingProxyType({name: Slowdown(THRESHOLDS[name], OVERLOADS[name]) for name in THRESHOLDS})


@dataclass(frozen=True)
class Rates:
    """How fast a device moves weights, in GB/s (10^9 bytes) and us, each figure with its provenance.

    `disk_read`: from storage to unified memory; `inline_load`: from unified to texture memory by loads inside
    of a running kernel; `weight_transform`: the same by a stand-alone transform before inference, each of
    which costs `launch_overhead` besides. `staging_bytes` is the unified memory that reading ahead may hold
    (None: any amount), `request_bytes` the most that one read of a streamed weight brings.

    Raises:
        InputError: a rate is not above 0, an overhead, a limit or a threshold below 0, an overload or a
            request below 1.
    """

    disk_read: Figure
    inline_load: Figure
    weight_transform: Figure
    launch_overhead: Figure
    staging_bytes: int | None = STAGING_BYTES
    request_bytes: int = REQUEST_BYTES
    slowdowns: Mapping[LoadClassName, Slowdown] = field(default_factory=_default_slowdowns)

    def __post_init__(self) -> None:
        for name in ("disk_read", "inline_load", "weight_transform"):
            figure: Figure = getattr(self, name)
            if not figure.value > 0:
                raise InputError(f"{name} is {figure.value} {figure.unit}; expected more than 0")
        if not self.launch_overhead.value >= 0:
            raise InputError(f"launch_overhead is {self.launch_overhead.value} us; expected at least 0")
        if self.staging_bytes is not None and self.staging_bytes < 0:
            raise InputError(
                f"staging_bytes is {self.staging_bytes}; expected at least 0, or None for no limit"
            )
        if self.request_bytes < 1:
            raise InputError(f"request_bytes is {self.request_bytes}; expected at least 1")
        missing = [name for name in THRESHOLDS if name not in self.slowdowns]
        if missing:
            raise InputError(f"slowdowns gives nothing for {missing[0]!r}; expected {', '.join(THRESHOLDS)}")
        for name, slowdown in self.slowdowns.items():
            if not (slowdown.threshold >= 0 and slowdown.overload >= 1):
                raise InputError(
                    f"slowdown of {name}: threshold {slowdown.threshold}, overload {slowdown.overload}; "
                    "expected at least 0 and at least 1"
                )

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance of all that a simulation takes from here."""
        figures = (self.disk_read, self.inline_load, self.weight_transform, self.launch_overhead)
        return weakest([f.provenance for f in figures] + [s.provenance for s in self.slowdowns.values()])

    def read_ms(self, nbytes: int) -> float:
        """Return the time to read some bytes from the disk."""
        return nbytes / (self.disk_read.value * 1e6)

    def transform_ms(self, nbytes: int) -> float:
        """Return the time of the stand-alone transform of one weight."""
        return self.launch_overhead.value / 1e3 + nbytes / (self.weight_transform.value * 1e6)

    def loaded_ms(self, layer: Layer, nbytes: int, chunk_bytes: int) -> float:
        """Return the time of a layer that loads some bytes beside its own work, t(b).

        With t the layer's latency alone, r the inline rate, and by its operator class the threshold h and the
        overload s: its capacity is B = max(capacity_chunks * chunk_bytes, h t r) bytes, and

            t(b) = max(b / r,  t + h t min(1, b / B) + s max(0, b - B) / r)

        Up to its capacity the layer slows in proportion, by the threshold at most: where the capacity follows
        from the threshold and the inline rate (B = h t r), a load costs just its copying time b / r and
        nothing hides it; a larger capacity, as a fitted model may give, hides part. Beyond it a byte costs s
        times its copying time. No layer is faster than copying alone. The form is the paper's (Fig. 2 and
        section 4.2), the overloads are assumed.
        """
        copying = nbytes / (self.inline_load.value * 1e6)
        if not nbytes:
            return layer.latency_ms
        slowdown = self.slowdowns[layer.load_class]
        most = slowdown.threshold * layer.latency_ms
        capacity = max(layer.capacity_chunks * chunk_bytes, most * self.inline_load.value * 1e6)
        if nbytes <= capacity:
            added = most * nbytes / capacity
        else:
            added = most + slowdown.overload * (nbytes - capacity) / (self.inline_load.value * 1e6)
        return max(copying, layer.latency_ms + added)


def derive_rates(
    device: Device, *, staging_bytes: int | None = STAGING_BYTES, prepared: bool = False
) -> Rates:
    """Return the rates of a device from the figures of its profile.

    Preloaded weights take the rate at which frameworks transform weights (`weight_transform_gb_s`), or, where
    `prepared` (the file holds them as kernels read them), the rate of a copy. That stands in, "assumed",
    where the profile gives no rate of frameworks.

    Raises:
        DeviceError: the profile gives no `disk_read_gb_s`, or no rate at all between memories.
        InputError: `staging_bytes` is below 0.
    """
    figures, inline = device.figures, inline_rate(device)
    transform = inline if prepared else figures.get("weight_transform_gb_s")
    if transform is None:
        source = f"{device.name} gives no weight_transform_gb_s; a plain copy stands in. {inline.source}"
        transform = Figure(inline.value, "GB/s", Provenance.ASSUMED, source)
    source = f"{device.name} gives no launch_overhead_us; launches are taken to cost nothing"
    launch = figures.get("launch_overhead_us") or Figure(0.0, "us", Provenance.ASSUMED, source)
    return Rates(device.figure("disk_read_gb_s"), inline, transform, launch, staging_bytes)


def framework_rates(device: Device) -> Rates:
    """Return the rates at which existing frameworks preload a model: the baseline.

    They read at `weight_load_gb_s`, parsing included, where the profile gives it, transform at
    `weight_transform_gb_s`, and read ahead without limit.

    Raises:
        DeviceError: as of `derive_rates`.
    """
    rates = derive_rates(device, staging_bytes=None)
    return replace(rates, disk_read=device.figures.get("weight_load_gb_s", rates.disk_read))
