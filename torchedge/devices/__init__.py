"""Devices: what is known of each, where every figure comes from, and how one is found. Imports no torch."""

from torchedge.devices.catalog import (
    LOCAL_DEVICE,
    Profiles,
    board_name,
    default_device_name,
    find_device,
    is_phone_gpu,
    list_devices,
    match_device,
    prediction_provenance,
    profile_roots,
    scan_profiles,
)
from torchedge.devices.device import (
    Device,
    DeviceKind,
    Fact,
    Figure,
    Provenance,
    parse_device,
    read_device,
    weakest,
    write_device,
)
from torchedge.devices.stand_ins import STAND_IN, is_jetson, stand_in
from torchedge.devices.vocabulary import KNOWN_FACTS, KNOWN_FIGURES, RUNTIME_KEYS

__all__ = [
    "KNOWN_FACTS",
    "KNOWN_FIGURES",
    "LOCAL_DEVICE",
    "RUNTIME_KEYS",
    "STAND_IN",
    "Device",
    "DeviceKind",
    "Fact",
    "Figure",
    "Profiles",
    "Provenance",
    "board_name",
    "default_device_name",
    "find_device",
    "is_jetson",
    "is_phone_gpu",
    "list_devices",
    "match_device",
    "parse_device",
    "prediction_provenance",
    "profile_roots",
    "read_device",
    "scan_profiles",
    "stand_in",
    "weakest",
    "write_device",
]
