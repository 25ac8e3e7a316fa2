"""Kernels from source, and the binaries kept on disk."""

import os
from dataclasses import replace

import numpy as np
import pytest

from torchedge.errors import KernelBuildError
from torchedge.opencl import build_processes, compile_kernels, compiling, open_context
from torchedge.opencl.binary_caches import MAGIC, BinaryCache, default_cache, key_of
from torchedge.opencl.build_processes import TrialRun, process_count
from torchedge.opencl.memory import allocate_buffer, download, upload

cl = pytest.importorskip("pyopencl")


def put(name, number, before=""):
    return f"{before}__kernel void {name}(__global int *a) {{ a[get_global_id(0)] = {number}; }}\n"


def result(compiled, name):
    context = open_context()
    kernel = compiled.kernel(name)
    buffer = allocate_buffer(context, 16, "test")
    kernel.set_args(buffer)
    cl.enqueue_nd_range_kernel(context.queue, kernel, (4,), None)
    found = np.zeros(4, np.int32)
    download(context, context.queue, buffer, found)
    return int(found[0])


@pytest.fixture
def cache(tmp_path):
    return BinaryCache(tmp_path / "cache")


@pytest.fixture
def builds(monkeypatch):
    """The sources built from text, not from a binary."""
    seen = []
    original = cl._cl._Program

    def watched(context, *given):
        if len(given) == 1:
            seen.append(given[0])
        return original(context, *given)

    monkeypatch.setattr(cl._cl, "_Program", watched)
    return seen


def entries(cache):
    return sorted(cache.folder.glob("*.clbin"))


def test_kernels_that_begin_alike_share_a_program(builds):
    sources = {
        "a": put("a", "K", "#define K 1\n"),
        "b": put("b", "K", "#define K 2\n"),
        "c": put("c", "K + 2", "#define K 1\n"),
        "d": put("d", 4),
    }
    compiled = compile_kernels(open_context(), sources)
    assert [result(compiled, name) for name in "abcd"] == [1, 2, 3, 4]
    assert compiled.programs["a"] is compiled.programs["c"]
    assert len({id(p) for p in compiled.programs.values()}) == 3


def test_a_second_build_takes_the_binary(cache, builds):
    context, sources = open_context(), {"a": put("a", 5), "b": put("b", 6)}
    assert result(compile_kernels(context, sources, cache=cache), "b") == 6
    assert len(builds) == 1 and len(entries(cache)) == 1
    again = compile_kernels(context, sources, cache=cache)
    assert (result(again, "a"), result(again, "b")) == (5, 6)
    assert len(builds) == 1


@pytest.fixture
def eager(monkeypatch):
    """Two processes for any text."""
    monkeypatch.setattr(build_processes, "LEAST_CHARACTERS", 1)
    monkeypatch.setattr(build_processes, "SHARE_CHARACTERS", 1)
    monkeypatch.setenv("TORCHEDGE_BUILD_PROCESSES", "2")


def test_processes_build_into_the_cache(cache, builds, eager):
    sources = {name: put(name, place) for place, name in enumerate("abcdefghi")}
    compiled = compile_kernels(open_context(), sources, cache=cache)
    assert [result(compiled, name) for name in "ai"] == [0, 8]
    assert not builds and len(entries(cache)) == 3


def test_processes_that_were_started_ahead_get_the_shares_or_end(cache, builds, eager, monkeypatch):
    device, waiting = open_context().device, build_processes._waiting
    build_processes.start_ahead(device, 1000)
    ahead = [process for _, process in waiting]
    assert len(ahead) == 2 and None in [process.poll() for process in ahead]
    monkeypatch.setattr(build_processes, "_start", None)  # no others are needed
    sources = {name: put(name, place) for place, name in enumerate("abcdefghi")}
    assert result(compile_kernels(open_context(), sources, cache=cache), "i") == 8
    assert not builds and not waiting and len(entries(cache)) == 3
    monkeypatch.undo()
    monkeypatch.setattr(build_processes, "process_count", lambda characters: 1)
    build_processes.start_ahead(device, 1000)
    ((_, unused),) = waiting
    compile_kernels(open_context(), sources, cache=cache)
    assert not waiting and unused.returncode is not None


def test_kernels_are_built_here_where_no_process_starts(cache, builds, eager, monkeypatch):
    monkeypatch.setattr(build_processes.sys, "executable", "/nowhere/python")
    sources = {name: put(name, place) for place, name in enumerate("abcdefghi")}
    assert result(compile_kernels(open_context(), sources, cache=cache), "i") == 8
    assert len(builds) == len(entries(cache)) == 3


@pytest.fixture
def driver_cache(tmp_path, monkeypatch):
    """An empty cache of the driver in the processes that are started."""
    if open_context().device.platform not in compiling.SELF_CACHING:
        pytest.skip("this driver has no cache of its own")
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "driver"))
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path / "own"))
    (tmp_path / "driver").mkdir()
    return tmp_path / "driver"


def test_processes_run_kernels_so_that_the_driver_compiles_them(eager, driver_cache, monkeypatch):
    sources = {name: put(name, place) for place, name in enumerate("abcdefghi")}
    trials = [TrialRun(name, (1,), (64,), ()) for name in sources]
    compiled = compile_kernels(open_context(), sources, trials=trials)
    assert [result(compiled, name) for name in "ai"] == [0, 8]
    assert {path.stem for path in driver_cache.rglob("*.so")} == set(sources)
    monkeypatch.setattr(compiling, "build_in_processes", None)  # nothing is left to do
    compile_kernels(open_context(), sources, trials=trials)


def test_a_process_that_a_kernel_ends_leaves_it_to_the_caller(eager, driver_cache):
    sources = {name: put(name, place) for place, name in enumerate("ab")}
    numbers = (1 << 30,)  # far outside
    sources["wild"] = "__kernel void wild(__global int* to, int far) { to[far] = to[-far] = 3; }"
    trials = [TrialRun("wild", (1,), (64,), numbers), *[TrialRun(name, (1,), (64,), ()) for name in "ab"]]
    assert result(compile_kernels(open_context(), sources, trials=trials), "b") == 1


def test_processes_are_for_much_text(monkeypatch):
    monkeypatch.setenv("TORCHEDGE_BUILD_PROCESSES", "3")
    assert [process_count(n) for n in (1 << 16, 1 << 17, 1 << 30)] == [0, 3, 3]
    monkeypatch.setenv("TORCHEDGE_BUILD_PROCESSES", "0")
    assert process_count(1 << 30) == 0


def test_another_source_option_driver_or_device_has_another_key():
    device = open_context().device
    base = key_of(device, "x", ["-a"])
    assert key_of(device, "x", ["-a"]) == base and len(base) == 64
    others = [
        key_of(device, "y", ["-a"]),
        key_of(device, "x", ["-a", "-b"]),
        key_of(device, "x", ["-b"]),
        *[
            key_of(replace(device, **{name: "other"}), "x", ["-a"])
            for name in ("name", "driver", "vendor", "version", "platform", "platform_version")
        ],
    ]
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "not a binary"])
def test_a_damaged_entry_is_built_again(cache, builds, damage):
    import hashlib

    context, sources = open_context(), {"a": put("a", 7)}
    if damage == "not a binary" and context.device.platform == "rusticl":
        pytest.skip("Mesa's rusticl 22.3 ends the process; the digest keeps such an entry from it")
    compile_kernels(context, sources, cache=cache)
    (path,) = entries(cache)
    whole = path.read_bytes()
    key, wrong = path.stem.encode(), b"\x7fELF nothing that a driver takes"
    path.write_bytes(
        {
            "cut": whole[:-5],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "empty": b"",
            "foreign": whole[len(MAGIC) + 32 :],
            "not a binary": MAGIC + hashlib.sha256(key + b"\n" + wrong).digest() + wrong,
        }[damage]
    )
    assert result(compile_kernels(context, sources, cache=cache), "a") == 7
    assert len(builds) == 2
    assert path.read_bytes()[: len(MAGIC)] == MAGIC and len(path.read_bytes()) > 100
    compile_kernels(context, sources, cache=cache)
    assert len(builds) == 2


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users here")
def test_what_others_may_write_or_link_is_not_trusted(cache, tmp_path):
    cache.write("k" * 64, b"binary")
    (path,) = entries(cache)
    assert cache.read("k" * 64) == b"binary"
    assert path.stat().st_mode & 0o777 == 0o600 and cache.folder.stat().st_mode & 0o777 == 0o700
    path.chmod(0o666)
    assert cache.read("k" * 64) is None
    path.chmod(0o600)
    cache.folder.chmod(0o777)
    assert cache.read("k" * 64) is None
    cache.folder.chmod(0o700)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.read("k" * 64) is None


def test_the_least_recently_used_entries_go_first(tmp_path):
    cache = BinaryCache(tmp_path / "cache", max_bytes=3 * 100)
    for number in range(2):
        cache.write(str(number), bytes(40))
        os.utime(cache.folder / f"{number}.clbin", (number, number))
    assert cache.read("0") == bytes(40)  # used now
    cache.write("2", bytes(100))
    assert [path.stem for path in entries(cache)] == ["0", "2"]
    cache.write("3", bytes(400))  # larger than the whole cache
    assert [path.stem for path in entries(cache)] == ["0", "2"]
    cache.write("4", bytes(200))
    assert [path.stem for path in entries(cache)] == ["4"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = BinaryCache(tmp_path / "file" / "cache")
    cache.write("k", b"binary")
    assert cache.read("k") is None
    compile_kernels(open_context(), {"a": put("a", 8)}, cache=cache)


def test_drivers_that_keep_binaries_themselves_get_no_cache(tmp_path, monkeypatch, builds):
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "SELF_CACHING", frozenset({open_context().device.platform}))
    compile_kernels(open_context(), {"a": put("a", 9)})
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(compiling, "SELF_CACHING", frozenset())
    compile_kernels(open_context(), {"a": put("a", 9)})
    assert len(entries(default_cache())) == 1 and default_cache().folder == tmp_path / "opencl"


def test_the_kernel_and_the_line_that_fail_are_shown():
    sources = {"good": put("good", 1), "bad": put("bad", "unknown", "\n\n")}
    with pytest.raises(
        KernelBuildError, match=r"line 3, `__kernel void bad.*'unknown'; correct its"
    ) as caught:
        compile_kernels(open_context(), sources)
    assert caught.value.kernel == "bad" and "unknown" in caught.value.log
    with pytest.raises(KernelBuildError, match=r"kernel worse does not build, line 1.*\(driver "):
        compile_kernels(open_context(), {"fine": put("fine", 2), "worse": put("worse", ")")})


def test_kernels_that_clash_are_told_apart():
    helper = "int help(void) { return 1; }\n"
    sources = {name: put(name, "help()", "int help(void);\n") + helper for name in ("a", "b")}
    with pytest.raises(KernelBuildError, match="a, b build one by one but not together"):
        compile_kernels(open_context(), sources)


@pytest.mark.parametrize(
    "call", ["exp(v)", "fmod(v, v + 1)", "convert_float16(abs(convert_int16(v)))", "fabs(v)"]
)
def test_512_bit_vectors_are_computed_on_every_processor(call):
    text = (
        "__kernel void wide(__global float16* to, __global const float16* from) "
        f"{{ const float16 v = from[0]; to[0] = {call}; }}"
    )
    context = open_context()
    values = np.linspace(-2, 2, 16, dtype=np.float32)
    source, target = (allocate_buffer(context, 64, "test") for _ in range(2))
    upload(context, context.queue, source, values)
    kernel = compile_kernels(context, {"wide": text}).kernel("wide")
    kernel(context.queue, (1,), (1,), target, source)
    out = np.empty(16, np.float32)
    download(context, context.queue, target, out)
    wanted = {"exp": np.exp(values), "fmo": np.fmod(values, values + 1), "fab": np.abs(values)}
    np.testing.assert_allclose(out, wanted.get(call[:3], np.abs(values.astype(np.int32))), rtol=1e-5)
