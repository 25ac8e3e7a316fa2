"""Coefficients from ArchProbe's tables: closed forms of the latencies, origins, damaged tables."""

import pytest
from archprobe import main, read_archprobe

from torchedge.devices import Provenance, find_device
from torchedge.errors import ProfileError
from torchedge.textures.coefficients import coefficients_of
from torchedge.textures.model import thread_latency
from torchedge.textures.strides import cross_block_strides
from torchedge.textures.work import STRIDE_FEATURES

CHASE = "range (byte),stride (byte),niter,t (us)\n"
BANDWIDTH = "range (byte),t (us),bandwidth (gbps)\n"


@pytest.fixture
def tables(tmp_path):
    """A device with 100 ns in the first-level cache, 120 ns in the second, 150 ns beyond, along a row."""
    folder = tmp_path / "archprobe"
    folder.mkdir()
    levels = {256: 100, 512: 100, 8192: 120, 65536: 120, 262144: 150}
    chase = CHASE + "".join(f"{size},16,1000,{ns}\n" for size, ns in levels.items())
    for kind in ("Image", "Buffer"):
        (folder / f"{kind}CacheHierarchyPChase.csv").write_text(chase)
    for kind, rates in (
        ("Image", {512: 200, 4096: 90, 1048576: 400}), ("Buffer", {4096: 80, 8388608: 30}),
        ("LocalMem", {16: 150, 64: 140}), ("ConstMem", {16: 70, 4096: 95}),
    ):  # fmt: skip
        rows = "".join(f"{size},1,{rate}\n" for size, rate in rates.items())
        (folder / f"{kind}Bandwidth.csv").write_text(BANDWIDTH + rows)
    return folder


def test_a_row_has_the_latencies_of_the_tables(tables):
    coefficients = read_archprobe(tables, find_device("adreno-640"), "a test")
    row = cross_block_strides(range(1024), [0] * 1024)
    inside = row.copy()
    inside[STRIDE_FEATURES.index("x 4x1")] = 0
    assert coefficients.image.hit_ns == 100
    assert thread_latency(inside, coefficients.image) == pytest.approx(120)
    assert thread_latency(row, coefficients.image) == pytest.approx(150)
    assert thread_latency(row, coefficients.buffer) == pytest.approx(150)
    assert coefficients.buffer.hit_ns == 120
    rates = coefficients.image
    assert (rates.cache_gb_s, rates.l2_gb_s, rates.main_gb_s) == (200, 90, 30)
    assert (coefficients.local_gb_s, coefficients.constant_gb_s) == (150, 95)
    assert coefficients.origins["local"].provenance is Provenance.PUBLIC_DATA
    assert coefficients.origins["image"].provenance is Provenance.ASSUMED


def test_the_packaged_adreno_640_reads_and_predicts():
    coefficients = coefficients_of(find_device("adreno-640"))
    assert coefficients.image.lines == 32
    assert 120 < coefficients.image.hit_ns < 140 and coefficients.image.worst_ns < 400


def test_the_command_writes_a_profile(tables, tmp_path):
    out = tmp_path / "mine"
    main([str(tables), "--device", "adreno-740", "--out", str(out)])
    assert coefficients_of(find_device(out)).image.hit_ns == 100


def test_missing_and_damaged_tables_are_named(tables):
    (tables / "LocalMemBandwidth.csv").write_text(BANDWIDTH + "16,1,fast\n")
    with pytest.raises(ProfileError, match="LocalMemBandwidth"):
        read_archprobe(tables, find_device("adreno-640"), "a test")
    (tables / "LocalMemBandwidth.csv").unlink()
    with pytest.raises(ProfileError, match="LocalMemBandwidth"):
        read_archprobe(tables, find_device("adreno-640"), "a test")
