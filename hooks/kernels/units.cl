// Arithmetic, barriers, launches, registers. Defines: FLOATS (a vector type), CHAINS, REGISTERS, PLACES of
// local memory.

__kernel void multiply_add(__global float *out, int halves, int rounds)
{
    FLOATS sums[CHAINS];
    const FLOATS by = (FLOATS)(0.5f * halves);
#pragma unroll
    for (int chain = 0; chain < CHAINS; chain++)
        sums[chain] = (FLOATS)(chain + (int)get_global_id(0));
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int repeat = 0; repeat < 8; repeat++) {
#pragma unroll
            for (int chain = 0; chain < CHAINS; chain++)
                sums[chain] = sums[chain] * by + by;
        }
    }
    FLOATS sum = 0;
#pragma unroll
    for (int chain = 0; chain < CHAINS; chain++)
        sum += sums[chain];
    ((__global FLOATS *)out)[get_local_id(0)] = sum;
}

__kernel void barriers(__global float *out, int rounds)
{
    __local float shared[PLACES];
    const int id = get_local_id(0), size = get_local_size(0);
    shared[id] = 0;
    float sum = 0;
    for (int round = 0; round < rounds; round++) {
        barrier(CLK_LOCAL_MEM_FENCE);
        sum += shared[id + 1 < size ? id + 1 : 0];
    }
    out[id] = sum;
}

__kernel void nothing(__global float *out)
{
    if (out == 0)
        out[0] = 1;
}

// Waits for memory while 4 * REGISTERS floats are live: rounds x REGISTERS accesses (TMModel, 3.2.2).
__kernel void hold(__global const int *ring, __global float *out, int rounds)
{
    float4 live[REGISTERS];
    const int id = get_global_id(0);
#pragma unroll
    for (int k = 0; k < REGISTERS; k++)
        live[k] = (float4)(ring[id + 4 * k], ring[id + 4 * k + 1], ring[id + 4 * k + 2], ring[id + 4 * k + 3]);
    int at = 0;
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int k = 0; k < REGISTERS; k++) {
            at = ring[at];
            live[k].x += at;
            live[(k + REGISTERS / 2) % REGISTERS].w = live[k].x + live[k].z;
        }
    }
    float4 sum = 0;
#pragma unroll
    for (int k = 0; k < REGISTERS; k++)
        sum += live[k] * (float)(k + 1);
    ((__global float4 *)out)[get_local_id(0)] = sum;
}

// Waits for memory while a work-group has local memory of its own: one access a round.
__kernel void hold_local(__global const int *ring, __global float *out, int rounds)
{
    __local int own[PLACES];
    const int id = get_local_id(0);
    own[id] = id;
    int at = 0;
    for (int round = 0; round < rounds; round++) {
        at = ring[at];
        own[id] += at;
    }
    out[id] = own[id];
}
