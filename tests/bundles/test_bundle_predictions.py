"""A bundle's own prediction: by the roofline where no programs were measured, marked as assumed."""

import json

import pytest

import torchedge
from torchedge.cli import main
from torchedge.devices import Provenance
from torchedge.errors import DeviceError


@pytest.mark.slow
def test_a_bundle_is_predicted_on_its_device_or_another(training):
    bundle = torchedge.load_bundle(training)
    p = bundle.predict("adreno-740")
    assert p.device_bytes == bundle.manifest.memory.total_bytes
    assert len(p.launches_ms) == len(bundle.program.launches) and min(p.launches_ms) > 0
    assert p.provenance is Provenance.ASSUMED and "no programs were measured on adreno-740" in p.notes[-1]
    assert p.memory.low < p.memory.value < p.memory.high
    with pytest.raises(DeviceError):
        bundle.predict("no-such-device")


def test_the_command_predicts_a_bundle(training, capsys):
    words = ["predict", str(training), "--device", "adreno-740"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mode"] == document["method"] == "train"
    assert document["provenance"] == "assumed" and document["fits"]
    assert main([*words, "--memory-limit", "1KiB"]) == 3
    assert "Γ" in capsys.readouterr().out
