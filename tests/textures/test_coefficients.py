"""Coefficients: files, class defaults, figures in their place, and work that makes no sense."""

from dataclasses import replace

import numpy as np
import pytest

from torchedge.devices import Provenance, find_device, list_devices
from torchedge.errors import InputError, ProfileError
from torchedge.storage import read_toml
from torchedge.textures.coefficients import (
    CODEC,
    COEFFICIENTS_FILE,
    DEFAULTS,
    ERRORS,
    PARTS,
    KernelErrors,
    coefficients_of,
    default_coefficients,
    errors_of,
    write_coefficients,
)
from torchedge.textures.work import STRIDE_FEATURES, KernelWork, ReadWork


def read_coefficients(folder):
    return CODEC.parse(folder / COEFFICIENTS_FILE, read_toml(folder / COEFFICIENTS_FILE))


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_coefficients_come_back_from_a_file(name, tmp_path):
    coefficients = default_coefficients(name)
    write_coefficients(tmp_path, coefficients)
    assert read_coefficients(tmp_path) == coefficients
    assert coefficients.provenance is Provenance.ASSUMED
    assert set(coefficients.origins) == set(PARTS)


def test_errors_of_a_profile_are_checked(tmp_path):
    device = find_device("nvidia-h200")
    errors = errors_of(device)
    assert errors.kernels and not errors_of(find_device("adreno-640")).kernels
    kernel = errors.kernels[0]
    assert errors.without([kernel.name]).kernels == errors.kernels[1:]
    for wrong in ({"errors": kernel.errors[1:]}, {"errors": (99.0, *kernel.errors[1:])}, {"shares": ((1,),)}):
        ERRORS.write(tmp_path / "errors.json.gz", KernelErrors((replace(kernel, **wrong),)))
        with pytest.raises(ProfileError):
            ERRORS.read(tmp_path / "errors.json.gz")


def test_every_device_has_coefficients():
    for device in list_devices():
        coefficients = coefficients_of(device)
        if "compute_units" in device.figures:
            assert coefficients.compute_units == device.value("compute_units")


def test_figures_of_a_device_replace_the_class_default():
    coefficients = coefficients_of(find_device("mali-g77"))
    assert (coefficients.warp, coefficients.compute_units) == (16, 9)
    assert coefficients.gflops[-1] == pytest.approx(481.5)


def test_an_unknown_class_names_the_known_ones():
    with pytest.raises(InputError, match="cpu, gpu, mobile"):
        default_coefficients("npu")


def test_coefficients_out_of_range_are_neither_written_nor_read(tmp_path):
    good = default_coefficients("mobile")
    with pytest.raises(ProfileError, match="decay"):
        write_coefficients(tmp_path, replace(good, image=replace(good.image, decay=0.5)))
    write_coefficients(tmp_path, good)
    file = tmp_path / COEFFICIENTS_FILE
    file.write_text(file.read_text().replace("warp = 64", 'warp = "many"'))
    with pytest.raises(ProfileError, match=rf"{COEFFICIENTS_FILE}.*warp"):
        read_coefficients(tmp_path)


def read(**changes):
    columns = dict(
        image=True, count=4, nbytes=16, distinct_bytes=1024, strides=np.zeros(len(STRIDE_FEATURES)),
        reuse=1, warp_lines=4, warp_share=8,
    )  # fmt: skip
    return ReadWork(**{**columns, **changes})


def test_one_number_stands_for_all_candidates():
    work = KernelWork(np.array([64, 128]), (8, 8, 1), 2, 64, (read(count=np.array([3, 5])),))
    assert len(work) == 2
    assert work.flops.tolist() == [2, 2]
    assert work.group.shape == (2, 3)
    assert work.reads[0].count.tolist() == [3, 5]
    assert work.reads[0].strides.shape == (2, len(STRIDE_FEATURES))
    assert work.reads[0].image.tolist() == [True, True]
