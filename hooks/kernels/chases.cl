// Latencies: accesses that wait for the one before. The memory holds zeros, which the next place depends on.

// Follows strides in x and y (TMModel, 3.1, step II). The paper keeps a stride in the pixel itself; a walk
// that meets a pixel twice could then not take another stride, so that strides lie in a list of their own,
// read one step ahead.
__kernel void walk(MEMORY from, __global const char2 *strides, __global float *out, int steps)
{
    int x = 0, y = 0;
    char2 stride = strides[0];
    for (int step = 0; step < steps; step++) {
        const char2 next = strides[step + 1];
        x = (x + stride.x) & (SIDE - 1);
        y = (y + stride.y) & (SIDE - 1);
        const int zero = (int)READ(from, x, y).x;
        x += zero;
        y += zero;
        stride = next;
    }
    out[0] = x + y;
}

// Goes round `texels` texels in jumps, on rows of 1 << shift.
__kernel void loop(MEMORY from, __global float *out, int texels, int jump, int shift, int steps)
{
    int at = 0;
    for (int step = 0; step < steps; step++) {
        at += jump + (int)READ(from, at & ((1 << shift) - 1), at >> shift).x;
        at = at >= texels ? at - texels : at;
    }
    out[0] = at;
}

// The same places, by accesses that do not wait.
__kernel void flight(MEMORY from, __global float *out, int texels, int jump, int shift, int steps)
{
    int at = 0;
    float4 sum = 0;
    for (int step = 0; step < steps; step++) {
        sum += READ(from, at & ((1 << shift) - 1), at >> shift);
        at += jump;
        at = at >= texels ? at - texels : at;
    }
    out[0] = sum.x + sum.y + sum.z + sum.w;
}

// Each work-item streams a line of its own: column, or bands of 1 << shift rows (TMModel, Fig. 3).
__kernel void scan(MEMORY from, __global float *out, int column, int shift, int steps)
{
    const int line = get_local_id(0);
    int zero = 0;
    for (int step = 0; step < steps; step++) {
        const int along = step >> shift, row = (line << shift) + (step & ((1 << shift) - 1));
        const int x = column ? line : along + (row / SIDE) * (steps >> shift);
        const int y = column ? step : row & (SIDE - 1);
        zero += (int)READ(from, x + zero, y).x;
    }
    out[line] = zero;
}
