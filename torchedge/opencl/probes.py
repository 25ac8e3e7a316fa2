"""A probe of each OpenCL device: one small kernel, in a process of its own, whose result is remembered.

A driver can list a device and fail at every program: PoCL without code for the processor, a library that is
missing, a compiler that crashes or never ends. So a device is tried before it is used: a kernel with an
image, a sub-buffer, local memory, a barrier and built-in functions is built and run, and what it wrote is
compared. The functions take 512-bit vectors: PoCL 3.0 links their AVX-512 forms by the processor's features,
but compiles for the nearest processor that its LLVM knows (AMD Zen 4 becomes Zen 3, without AVX-512), and
such calls end the process there. A second kernel looks for what a driver does wrong in silence at sizes that
small kernels do not have: llvmpipe (Mesa 22.3) ends all loops of a work-item after 65,535 rounds, and its
times of commands are not times. The verdict lies in the cache folder, by driver, device, processor and the
driver's environment variables.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np

from torchedge.opencl.binary_caches import default_cache, key_of
from torchedge.opencl.platforms import ClDevice, device_at, driver_message, handles, load_pyopencl, place_of
from torchedge.storage.locks import PROCESS, warnings_ignored
from torchedge.storage.processes import child_environment

PATIENCE_S = 60
"""Seconds that a probe may take: a cold compiler on a slow disk needs some."""
MAX_FAULT = 400
"""Characters of a fault that is shown."""

DRIVER_VARIABLES = ("OCL_", "OPENCL_", "POCL_", "RUSTICL_", "CL_CONFIG_", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Beginnings of the names of environment variables on which a verdict depends."""
CACHE_VARIABLES = frozenset({"POCL_CACHE_DIR"})
"""Variables of drivers on which none depends."""

_OPTIONS = ("-cl-std=CL1.2",)
_SIDE = 8
_SOURCE = """\
#ifdef WITH_IMAGE
__constant sampler_t nearest = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
#define READ(at) read_imagef(image, nearest, at)
#else
#define READ(at) vload4((at).y * 8 + (at).x, image)
#endif
__kernel void torchedge_probe(
#ifdef WITH_IMAGE
    __read_only image2d_t image,
#else
    __global const float *image,
#endif
    __global float *to)
{
    __local float4 row[8];
    const int x = get_local_id(0), y = get_group_id(0);
    row[x] = READ((int2)(x, y));
    barrier(CLK_LOCAL_MEM_FENCE);
    float16 wide; /* a literal of four vectors ends Oclgrind 21.10 */
    wide.s0123 = row[x];
    wide.s4567 = row[7 - x];
    wide.hi = wide.lo;
    vstore4(exp(wide).s4567 + sqrt(row[x]), y * 8 + x, to);
}
__kernel void torchedge_rounds(__global float *to, const int rounds)
{
    float sum = 0;
    for (int k = 0; k < rounds; k++)
        sum += to[k & 7];
    to[8] = sum;
}
"""
_ROUNDS = 100_000
"""Rounds of a loop; the sum of so many ones is a float."""
_LEAST_NS = 1000
"""No device takes less time for them: ten rounds a nanosecond, of those that llvmpipe runs too."""
NO_TIMES = "its times of commands are wrong: nothing can be measured there"
"""What is said of a device whose driver does not measure commands."""

_verdicts: dict[str, tuple[str, str]] = {}  # fault and remark
_tried_now: set[str] = set()  # keys of devices that this process tried


def fault_of(device: ClDevice, *, again: bool = False) -> str:
    """Return why a device of this machine cannot be used, in one line; empty where its probe succeeds.

    again: try a device again whose probe failed before.
    """
    return _verdict_of(device, again=again)[0]


def remark_of(device: ClDevice) -> str:
    """Return what a device that can be used does wrong, in one line; empty where nothing was found."""
    return _verdict_of(device)[1]


def _verdict_of(device: ClDevice, *, again: bool = False) -> tuple[str, str]:
    key = _key(device)
    with PROCESS:
        verdict = _verdicts.get(key)
        if verdict is None and (entry := default_cache().read(key)) is not None:
            fault, _, remark = entry.decode("utf-8", "replace").partition("\n")
            verdict = fault[:MAX_FAULT], remark[:MAX_FAULT]
        if verdict is None or (verdict[0] and again):
            verdict = _tried(device)
            _tried_now.add(key)
            default_cache().write(key, "\n".join(verdict).encode())
        _verdicts[key] = verdict
        return verdict


def tried_now(device: ClDevice) -> bool:
    """Whether this process tried a device, not an earlier one."""
    return _key(device) in _tried_now


def _key(device: ClDevice) -> str:
    environment = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(DRIVER_VARIABLES) and name not in CACHE_VARIABLES
    ]
    return key_of(device, "probe, with times\n" + _SOURCE, [*_OPTIONS, *environment, _processor()])


def _processor() -> str:
    """Return what tells this machine's processor from others: a home folder may serve several machines."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n")[0]
        named = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
        lines = [line for line in first.splitlines() if line.startswith(named)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return ""


def _tried(device: ClDevice) -> tuple[str, str]:
    """Return the fault and the remark that a process of its own finds, or the fault that ends it."""
    if not sys.executable:
        return probe(handles()[device.index])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torchedge.opencl.probes", place_of(device)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its driver has not built and run a small kernel within {PATIENCE_S} s", ""
    except OSError:
        return probe(handles()[device.index])
    with suppress(ValueError, IndexError, KeyError, TypeError):
        said = json.loads(done.stdout.splitlines()[-1])
        fault, remark = (" ".join(str(said[name]).split())[:MAX_FAULT] for name in ("fault", "remark"))
        return fault, remark
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    how = f"exit status {done.returncode}"
    with suppress(ValueError):
        how = Signals(-done.returncode).name
    return f"its driver ends the process ({how}{': ' + lines[-1].strip() if lines else ''})"[:MAX_FAULT], ""


def probe(handle: Any) -> tuple[str, str]:
    """Build and run the probe's kernels in this process; return fault and remark, empty where none is."""
    cl = load_pyopencl()
    try:
        with warnings_ignored(cl.CompilerWarning):
            return _run(cl, handle)
    except cl.Error as error:
        return driver_message(error)[:MAX_FAULT], ""


def _run(cl: Any, handle: Any) -> tuple[str, str]:
    images = bool(handle.image_support)
    context = cl.Context([handle])
    queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
    program = cl.Program(context, _SOURCE)
    program.build([*_OPTIONS, *["-DWITH_IMAGE"] * images])
    content = (np.arange(_SIDE * _SIDE * 4, dtype=np.float32) % 37 / 37).reshape(_SIDE, _SIDE, 4)
    flags, start = cl.mem_flags, max(1, handle.mem_base_addr_align // 8)
    whole = cl.Buffer(context, flags.READ_WRITE, start + content.nbytes)
    part = whole.get_sub_region(start, content.nbytes)
    if images:
        texels = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.FLOAT)
        source = cl.create_image(context, flags.READ_WRITE, texels, shape=(_SIDE, _SIDE))
        cl.enqueue_copy(queue, source, content, origin=(0, 0), region=(_SIDE, _SIDE))
    else:
        source = cl.Buffer(context, flags.READ_WRITE, content.nbytes)
        cl.enqueue_copy(queue, source, content)
    kernel = cl.Kernel(program, "torchedge_probe")
    kernel.set_args(source, part)
    cl.enqueue_nd_range_kernel(queue, kernel, (_SIDE * _SIDE,), (_SIDE,))
    queue.finish()
    result = np.zeros_like(content)
    cl.enqueue_copy(queue, result, whole, src_offset=start)
    expected = np.exp(content[:, ::-1]) + np.sqrt(content)
    if not np.allclose(result, expected, rtol=1e-4, atol=1e-4):
        worst = float(np.nanmax(np.abs(result - expected), initial=0))
        off = f"off by {worst:.3g} of values up to {expected.max():.3g}"
        return f"a small kernel computes wrong numbers ({off})", ""
    ones = np.ones(9, np.float32)
    cl.enqueue_copy(queue, whole, ones)
    loop = cl.Kernel(program, "torchedge_rounds")
    loop.set_args(whole, np.int32(_ROUNDS))
    times = cl.enqueue_nd_range_kernel(queue, loop, (1,), None)
    cl.enqueue_copy(queue, ones, whole)
    remarks = []
    if (rounds := ones[8]) != _ROUNDS:
        remarks.append(
            f"its loops end after {rounds:.0f} rounds, without an error: results of large layers are wrong"
        )
    if times.profile.end - times.profile.start < _LEAST_NS:
        remarks.append(NO_TIMES)
    return "", "; ".join(remarks)


def main() -> None:
    """Try the device that the argument names; print the verdict and end at once, whatever the driver does."""
    fault, remark = probe(handles()[device_at(sys.argv[1])])
    print(json.dumps({"fault": fault, "remark": remark}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
