// Memory of RGBA texels, as an image2d or as a buffer. Defines: IMAGE (or not), WIDTH (a power of two), FLOATS,
// ACROSS (results go to the other kind of memory).
// Rows of a buffer begin WIDTH + 8 texels apart: at a power of two they would share few sets of a cache.

#ifdef IMAGE
#define MEMORY __read_only image2d_t
__constant sampler_t NEAREST = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
#define READ(memory, x, y) read_imagef(memory, NEAREST, (int2)(x, y))
#define SWEPT __read_only image2d_t
#define SWEEP(memory, place, shift) READ(memory, place & ((1 << shift) - 1), place >> shift)
#else
#define MEMORY __global const float4 *
#define READ(memory, x, y) memory[(y) * (WIDTH + 8) + (x)]
#define SWEPT __global const FLOATS *
#define SWEEP(memory, place, shift) memory[place]
#endif
#if defined(IMAGE) != defined(ACROSS)
#define TARGET __write_only image2d_t
#define WRITE(memory, x, y, value) write_imagef(memory, (int2)(x, y), value)
#else
#define TARGET __global float4 *
#define WRITE(memory, x, y, value) memory[(y) * (WIDTH + 8) + (x)] = value
#endif
