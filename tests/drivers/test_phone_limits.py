"""Training steps within the limits of phones, imposed on the device in use: gradients stay those of float64.

What is asked of the driver is judged here, where it is asked: not by what the lowering says of its programs.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import prod

import pytest

pytest.importorskip("pyopencl")

import pyopencl as cl
from drivers.networks import BENCHMARKS, EVERY, ON_PHONES, OTHERS, drawn
from drivers.test_training_steps import check_step

from torchedge.devices import find_device
from torchedge.lowering.limits import profile_limits
from torchedge.lowering.targets import target_for
from torchedge.opencl import choose_device, compiling

PHONES = ("adreno-540", "adreno-630", "adreno-640", "adreno-740", "adreno-750", "mali-g77", "mali-g715")
SMALL = {
    "work_group": 32,
    "work_item_sizes": (32, 16, 4),
    "local_bytes": 1 << 10,
    "image_width": 256,
    "image_height": 192,
    "allocation_bytes": 1 << 20,
    "base_alignment": 4096,
}
"""Less than any phone has: as much smaller as the networks here are than those that phones train."""


def phone(name):
    """Return the device in use with a phone's limits, where those are less; "small" has the least.

    The names by which other processes find the device stay.
    """
    here = choose_device()
    profile = find_device("mali-g77" if name == "small" else name)
    known = {**profile_limits(profile).known, **(SMALL if name == "small" else {})}
    fewer = {
        limit: min(known[limit], getattr(here, limit))
        for limit in ("work_group", "local_bytes", "image_width", "image_height", "allocation_bytes")
        if limit in known
    }
    sizes = known.get("work_item_sizes", (fewer["work_group"],) * 3)
    return replace(
        here,
        kind="gpu",
        vendor=profile.vendor,
        double=False,
        half_arithmetic=False,
        image_from_buffer=False,
        work_item_sizes=tuple(map(min, sizes, here.work_item_sizes)),
        base_alignment=known.get("base_alignment", max(128, here.base_alignment)),
        **fewer,
    )


def local_bytes_of(kernel):
    """Return the local memory that the driver gives a kernel."""
    return kernel.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, kernel.context.devices[0])


@cache
def added_local_bytes(context, nbytes):
    """Return the bytes that the driver adds to a kernel with so much local memory (NVIDIA's: 16)."""
    half = nbytes // 32
    text = f"""__kernel void two(__global float4* t) {{
      __local float4 a[{half}]; __local float4 b[{half}];
      const int k = get_local_id(0);
      a[k] = t[k]; b[k] = t[k + {half}];
      barrier(CLK_LOCAL_MEM_FENCE);
      t[k] = a[{half} - 1 - k] + b[{half} - 1 - k];
    }}"""
    return local_bytes_of(cl.Program(context, text).build().two) - nbytes


@dataclass
class Watch:
    """Counts what the driver is asked for, and collects what is beyond a device's limits."""

    device: object
    seen: Counter = field(default_factory=Counter)
    beyond: set = field(default_factory=set)

    def held(self, what, amount, most):
        self.seen[what] += 1
        if amount > most:
            self.beyond.add(f"{what}: {amount}, the device takes {most}")

    def launch(self, kernel, local):
        group = local or ()
        self.held("work-group", prod(group), self.device.work_group)
        for size, most in zip(group, self.device.work_item_sizes, strict=False):
            self.held("side of a work-group", size, most)
        own = added_local_bytes(kernel.context, self.device.local_bytes)
        self.held("local memory", local_bytes_of(kernel) - own, self.device.local_bytes)

    def text(self, source):
        self.seen["program"] += 1
        if re.search(r"\bdouble\d*\b", source):
            self.beyond.add(f"a program computes in double: {source}")

    def image(self, width, height):
        self.held("width of an image", width, self.device.image_width)
        self.held("height of an image", height, self.device.image_height)
        self.held("allocation", width * height * 16, self.device.allocation_bytes)

    def part(self, offset):
        self.held("offset of a sub-buffer", offset % self.device.base_alignment, 0)


@pytest.fixture
def watch(monkeypatch):
    """A function that watches pyopencl for a device, during the test."""

    def start(device):
        watch = Watch(device)
        enqueue, make = cl.enqueue_nd_range_kernel, cl.Buffer
        part, build = cl.Buffer.get_sub_region, compiling.build_text

        def enqueued(queue, kernel, size, local, *rest, **named):
            watch.launch(kernel, local)
            return enqueue(queue, kernel, size, local, *rest, **named)

        class Made(make):
            def __init__(self, context, flags, size):
                watch.held("allocation", size, device.allocation_bytes)
                super().__init__(context, flags, size)

        def parted(self, offset, *rest):
            watch.part(offset)
            return part(self, offset, *rest)

        def built(context, text, cache):
            watch.text(text)
            return build(context, text, cache)

        class Described(cl.ImageDescriptor):
            def __setattr__(self, name, value):
                assert name != "buffer", "an image is made from a buffer"
                if name == "shape":
                    watch.image(*value)
                super().__setattr__(name, value)

        monkeypatch.setattr(cl, "enqueue_nd_range_kernel", enqueued)
        monkeypatch.setattr(compiling, "build_text", built)
        monkeypatch.setattr(cl, "ImageDescriptor", Described)
        monkeypatch.setattr(cl.Buffer, "get_sub_region", parted)
        monkeypatch.setattr(cl, "Buffer", Made)
        return watch

    return start


QUICK = [("small", "cnn"), ("adreno-540", "cnn"), ("mali-g715", "cnn")]
NETWORKS, LIMITS = (*BENCHMARKS, *OTHERS), ("small", *PHONES)
PAIRS = product(LIMITS, NETWORKS) if EVERY else zip(LIMITS, ON_PHONES, strict=True)


@pytest.mark.parametrize(
    ("name", "network"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK)],
)
def test_a_step_within_a_phone_s_limits_is_that_of_float64(name, network, watch):
    device = phone(name)
    assert target_for(device).name == "mobile"
    watched = watch(device)
    check_step(drawn(network), device=device)
    assert not watched.beyond, watched.beyond
    # Networks without convolutions may have no images.
    for what in ("work-group", "allocation", "program", *["width of an image"] * (network == "cnn")):
        assert watched.seen[what], what
