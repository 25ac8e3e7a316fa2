"""Compiled programs on disk: used if they are there, built again if damaged or not this user's own."""

import json
from dataclasses import replace

import pytest

import torchedge
from torchedge.opencl import choose_device
from torchedge.opencl.compiling import SELF_CACHING

pytest.importorskip("pyopencl")


@pytest.fixture
def cache(tmp_path):
    """An empty cache."""
    if choose_device().platform in SELF_CACHING:
        pytest.skip("this driver has a cache of its own")
    return tmp_path / "cache" / "opencl"


@pytest.fixture
def figures(native, inference, batch, cache, tmp_path):
    """Run the bundle with the cache; return how many programs were built and how many of them it held."""
    own, port = replace(native, cache=cache), torchedge.load_bundle(inference).inputs[0].name
    native.run(inference, tmp_path, [{port: batch[0].numpy()}])  # writes the inputs

    def call():
        inputs = tmp_path / "inputs.safetensors"
        done = own.start(inference, "--device", own.device, "--inputs", inputs, "--figures")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        return document["programs"], document["programs_from_cache"]

    return call


def damage(path, how):
    data = path.read_bytes()
    if how == "link":
        path.rename(path.with_suffix(".elsewhere"))
        path.symlink_to(path.with_suffix(".elsewhere"))
    elif how == "writable":
        path.chmod(0o666)
    elif how == "folder":
        path.parent.chmod(0o777)
    else:
        path.write_bytes({"cut": data[:-9], "bit": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[how])


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_no_damaged_entry_is_used(figures, cache):
    count, held = figures()
    assert count > 0 and held == 0
    assert figures() == (count, count)
    entries = sorted(cache.glob("*.clbin"))
    assert len(entries) == count and all(path.stat().st_mode & 0o777 == 0o600 for path in entries)
    for how in ("cut", "bit", "empty", "link", "writable", "folder"):
        damage(entries[0], how)
        assert figures() == (count, 0 if how == "folder" else count - 1), how
    cache.chmod(0o700)
    assert figures() == (count, count)


def test_another_key_s_entry_is_not_used(figures, cache):
    count, _ = figures()
    entries = sorted(cache.glob("*.clbin"))
    data = [path.read_bytes() for path in entries]
    for path, other in zip(entries, [*data[1:], data[0]], strict=True):
        path.write_bytes(other)
    assert figures() == (count, 0 if count > 1 else 1)
