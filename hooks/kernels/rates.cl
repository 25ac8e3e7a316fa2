// Bandwidths: all work-items read or write, neighbours neighbouring places. Defines: FLOATS (a vector type),
// PLACES of local memory.

// Reads `mask` + 1 texels of an image, on rows of 1 << shift, or places of a buffer, again and again.
__kernel void sweep(SWEPT from, __global float *out, int mask, int shift, int rounds)
{
    const int pace = get_global_size(0) + 64;
    int at = get_global_id(0);
    FLOATS sum = 0;
#pragma unroll 4
    for (int round = 0; round < rounds; round++) {
        const int place = at & mask;
        sum += SWEEP(from, place, shift);
        at += pace;
    }
    ((__global FLOATS *)out)[get_local_id(0)] = sum;
}

// Writes WIDTH x HEIGHT texels, once in all.
__kernel void fill(TARGET to, int rounds)
{
    int at = get_global_id(0);
    for (int round = 0; round < rounds; round++) {
        WRITE(to, at & (WIDTH - 1), at / WIDTH, (float4)(at));
        at += get_global_size(0);
    }
}

// Copies WIDTH x WIDTH texels, once in all.
__kernel void copy(MEMORY from, TARGET to, int rounds)
{
    int at = get_global_id(0);
    for (int round = 0; round < rounds; round++) {
        WRITE(to, at & (WIDTH - 1), at / WIDTH, READ(from, at & (WIDTH - 1), at / WIDTH));
        at += get_global_size(0);
    }
}

__kernel void sweep_constant(__constant FLOATS *from, __global float *out, int mask, int rounds)
{
    int at = 0; // all work-items read the same place: constant memory is made for that
    FLOATS sum = 0;
    for (int round = 0; round < rounds; round++) {
        sum += from[at & mask];
        at++;
    }
    ((__global FLOATS *)out)[get_local_id(0)] = sum;
}

__kernel void sweep_local(__global const FLOATS *from, __global float *out, int mask, int rounds)
{
    __local FLOATS copy[PLACES];
    for (int at = get_local_id(0); at <= mask; at += get_local_size(0))
        copy[at] = from[at];
    barrier(CLK_LOCAL_MEM_FENCE);
    int at = get_local_id(0);
    FLOATS sum = 0;
    for (int round = 0; round < rounds; round++) {
        sum += copy[at & mask];
        at += get_local_size(0) + 4;
    }
    ((__global FLOATS *)out)[get_local_id(0)] = sum;
}

// Reads operands of a product's tiles: eight neighbouring work-items have a row in common, every eighth a column.
__kernel void tile_local(__global const FLOATS *from, __global float *out, int mask, int rounds)
{
    __local FLOATS copy[PLACES];
    for (int at = get_local_id(0); at <= mask; at += get_local_size(0))
        copy[at] = from[at];
    barrier(CLK_LOCAL_MEM_FENCE);
    const int across = get_local_id(0) % 8, down = get_local_id(0) / 8 % 8;
    int at = 0;
    FLOATS sum = 0;
    for (int round = 0; round < rounds; round += 8) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            sum += copy[at + 16 * k + across] * copy[at + 16 * k + 8 + down];
        at = (at + 128) & mask;
    }
    ((__global FLOATS *)out)[get_local_id(0)] = sum;
}
