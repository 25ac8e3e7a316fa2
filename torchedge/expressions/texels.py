"""Tensors in RGBA images: whole texels where the lanes of a kernel fill one, else single channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Axis, Index, flatten, of
from torchedge.expressions.scalars import Scalar

if TYPE_CHECKING:
    from torchedge.expressions.dialect import Site
from torchedge.expressions.rendering import Renderer

LANES = 4
"""Channels of a texel: RGBA."""
SAMPLER = """\
__constant sampler_t te_sampler = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
"""
"""The one sampler of a kernel: whole coordinates; zero outside the image."""
PICK = """\
inline float te_lane(float4 texel, int lane) {
  return lane < 2 ? (lane == 0 ? texel.x : texel.y) : (lane == 2 ? texel.z : texel.w);
}
"""
_LANE = of(Axis("lane", LANES))


class TexelError(LoweringError):
    """A kernel cannot write an image: its lanes are not the channels of one texel."""

    def __init__(self, message: str, site: Site) -> None:
        super().__init__(message)
        self.site = site


def texel_of(site: Site, indices: Sequence[Index]) -> tuple[Index, Index, Index]:
    """Return (x, y, channel) of an element of a tensor in an image."""
    layout, order = site.layout, site.layout.order
    sizes = list(layout.sizes(site.shape))
    steps = [indices[d] for d in order]
    packed = steps[-1]
    steps[-1], sizes[-1] = packed // LANES, -(-sizes[-1] // LANES)
    line = flatten(steps[: layout.split], sizes[: layout.split])
    step = flatten(steps[layout.split :], sizes[layout.split :])
    x, y = layout.place(step, line, site.shape)
    return x, y, packed % LANES


def load_texel(renderer: Renderer, site: Site, indices: Sequence[Index], guard: str) -> tuple[str, bool]:
    """Return the text of an element, or of a texel's four, and whether it is a vector."""
    renderer.helpers[SAMPLER] = None
    x, y, channel = texel_of(site, indices)
    apart = renderer.depends(x) or renderer.depends(y)
    if renderer.width == LANES and not apart and channel == _LANE:
        return _texel(renderer, site, x, y, guard, None), True
    if renderer.width == 1 or not (apart or renderer.depends(channel)):
        return _channel(renderer, site, (x, y, channel), guard, None), False
    lanes = [
        _channel(renderer, site, tuple([renderer.at_lane(i, k) for i in (x, y, channel)]), guard, k)
        for k in range(renderer.width)
    ]
    return f"(float{renderer.width})({', '.join(lanes)})", True


def _texel(renderer: Renderer, site: Site, x: Index, y: Index, guard: str, lane: int | None) -> str:
    where = f"(int2)({renderer.integer(x, guard, lane)}, {renderer.integer(y, guard, lane)})"
    return renderer.named(f"read_imagef({site.name}, te_sampler, {where})", "float4")


def _channel(renderer: Renderer, site: Site, place: Sequence[Index], guard: str, lane: int | None) -> str:
    x, y, channel = place
    texel = _texel(renderer, site, x, y, guard, lane)
    if channel.constant is not None:
        return f"{texel}.s{channel.constant}"
    renderer.helpers[PICK] = None
    return f"te_lane({texel}, {renderer.integer(channel, guard, lane)})"


def store_texel(renderer: Renderer, site: Site, indices: Sequence[Index], scalar: Scalar) -> None:
    """Add the statements that write a texel.

    Raises:
        TexelError: the lanes are not the four channels of one texel.
    """
    x, y, channel = texel_of(site, indices)
    whole = renderer.width == LANES and channel == _LANE and not (renderer.depends(x) or renderer.depends(y))
    single = renderer.width == 1 and site.shape[site.layout.order[-1]] == 1
    if not whole and not single:
        raise TexelError(
            f"a kernel writes {site.dtype}{list(site.shape)} other than texel by texel; keep it in a buffer",
            site,
        )
    value = renderer.value(scalar, wide=True) if whole else f"(float4)({renderer.value(scalar)}, 0, 0, 0)"
    across, down = renderer.integer(x), renderer.integer(y)
    width, height = site.layout.extent(site.shape)
    renderer.check(site, across, width)  # writes outside an image are dropped without a word
    renderer.check(site, down, height)
    where = f"(int2)({across}, {down})"
    renderer.lines.append(f"write_imagef({site.name}, {where}, {value});")
