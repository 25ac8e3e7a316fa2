"""Devices that are not here: OpenCL devices as their drivers report them, and profiles with other figures."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from torchedge.devices import Device, Figure, Provenance, find_device
from torchedge.devices.vocabulary import KNOWN_FIGURES
from torchedge.opencl import ClDevice

GPU = ClDevice(
    index=0,
    name="NVIDIA H200",
    platform="NVIDIA CUDA",
    platform_version="OpenCL 3.0 CUDA 13.0",
    vendor="NVIDIA Corporation",
    version="OpenCL 3.0 CUDA",
    driver="580.159.03",
    kind="gpu",
    compute_units=132,
    clock_mhz=1980,
    global_bytes=150_754_820_096,
    local_bytes=49_152,
    allocation_bytes=37_688_705_024,
    work_group=1024,
    work_item_sizes=(1024, 1024, 64),
    images=True,
    image_width=32_768,
    image_height=32_768,
    image_buffer_texels=268_435_456,
    image_from_buffer=False,
    pitch_alignment=0,
    address_alignment=0,
    half_arithmetic=False,
    half_images=True,
    double=True,
    base_alignment=512,
    extensions=("cl_khr_fp64", "cl_nv_device_attribute_query"),
)

PHONE = replace(
    GPU,
    index=1,
    name="QUALCOMM Adreno(TM)",
    platform="QUALCOMM Snapdragon(TM)",
    vendor="QUALCOMM",
    compute_units=3,
    global_bytes=3_800_000_000,
    allocation_bytes=950_000_000,
    local_bytes=32_768,
    image_width=16_384,
    image_height=16_384,
    image_from_buffer=True,
    pitch_alignment=64,
    address_alignment=64,
    half_arithmetic=True,
    double=False,
    base_alignment=128,
    extensions=("cl_khr_fp16", "cl_khr_image2d_from_buffer", "cl_qcom_recordable_queues"),
)


def with_figures(name: str, **figures: float) -> Device:
    """Return a device whose profile gives other figures."""
    device = find_device(name)
    changed = {
        key: Figure(value, KNOWN_FIGURES[key].unit, Provenance.ASSUMED, "made up")
        for key, value in figures.items()
    }
    return replace(device, figures=MappingProxyType({**device.figures, **changed}))
