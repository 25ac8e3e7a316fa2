"""Images made of the arena's buffer: planned closer, run the same where every image has its own memory."""

import numpy as np
import pytest
from oracles.opencl_devices import GPU
from oracles.small_programs import chain, image_copy

from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.arenas import planned, total_bytes
from torchedge.lowering.placement import placed_for, share_images
from torchedge.textures.layouts import PATTERNS, Layout

LAYOUT = Layout((0, 2, 3, 1), "image", 2)


def test_wide_intermediates_share_the_buffer():
    made = image_copy((3, 7, 5, 30), LAYOUT)  # 60 texels wide
    shared = planned(share_images(made, 64), 128)
    assert {tensor.name: tensor.layout.storage for tensor in shared.tensors} == {
        "x": "image", "z": "image", "t0": "image_buffer", "t1": "image_buffer", "t2": "image_buffer",
    }  # fmt: skip
    assert {t.layout.row_texels for t in shared.tensors if t.role == "intermediate"} == {64}
    assert not shared.arena.slots and len(shared.arena.offset) == 3
    assert total_bytes(shared.arena) == shared.arena.live_bytes == 2 * 64 * 15 * 16
    check_arena(shared, 128)
    assert shared.kernels == made.kernels and shared.launches == made.launches


def test_narrow_images_keep_their_own_memory():
    made = image_copy((3, 7, 5, 6), LAYOUT)  # 12 texels wide
    assert share_images(made, 64).tensors == made.tensors and share_images(made, 0) is made
    assert not planned(share_images(made, 4), 128).arena.slots


def test_what_has_no_images_stays():
    made = chain()
    assert share_images(made, 64).tensors == made.tensors and placed_for(made, GPU, 128) is made


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_parted_images_compute_the_same(pattern):
    pytest.importorskip("pyopencl")
    from torchedge.runtime import Executor

    made = image_copy((2, 8, 4, 32), Layout(LAYOUT.order, "image", 2, pattern))
    parted = placed_for(planned(share_images(made, 16), 128), GPU, 128)
    assert parted.tensors == made.tensors and parted.arena.slots == made.arena.slots
    x = np.arange(2 * 8 * 4 * 32, dtype=np.float32).reshape(2, 8, 4, 32)
    with Executor(parted, checks=True) as executor:
        np.testing.assert_array_equal(executor.run(x)[0], x + 4)
