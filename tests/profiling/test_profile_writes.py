"""A profile that is written again is the old one or the new one, whenever the power fails."""

from dataclasses import replace

import pytest
from oracles.power_loss import Disk

from torchedge.devices import find_device
from torchedge.profiling.profile_folders import PartFit, write_profile
from torchedge.textures.coefficients import coefficients_of


@pytest.fixture
def written(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    device = find_device("jetson-tx2")
    coefficients = coefficients_of(device)

    def write(launch_us):
        model = replace(coefficients, launch_us=launch_us)
        return write_profile(root / "mine", device, {}, kernels=PartFit(model, {"provenance": "assumed"}))

    return Disk(root), write


@pytest.mark.slow
def test_a_loss_of_power_leaves_the_old_or_the_new_profile(written, tmp_path):
    disk, write = written
    write(1.0)
    with disk.recording():
        write(2.0)
        disk.acknowledged = 2.0
    seen = set()
    for folder, acknowledged in disk.crashes(tmp_path / "left"):
        value = coefficients_of(find_device(folder / "mine")).launch_us
        assert value == acknowledged or acknowledged is None
        seen.add(value)
    assert seen == {1.0, 2.0}


def test_a_profile_is_written_again_after_a_fit_that_was_killed(written):
    _, write = written
    folder = write(1.0).folder
    names = {path.name for path in folder.iterdir()}
    (folder / f".kernels.toml.{'0' * 16}").write_bytes(b"left by a fit that was killed")
    assert coefficients_of(write(2.0)).launch_us == 2.0
    assert {path.name for path in folder.iterdir()} == names
