
__kernel void pointwise_57ff278fc5(__global float* t0, __global const float* t1, __global const float* restrict t2) {
  const int d1 = get_global_id(0);
  const int d0 = get_global_id(1);

  const float16 v1 = *(__global const float16*)(t1 + 32 * d0 + 16 * d1);
  const float16 v2 = *(__global const float16*)(t2 + 16 * d1);
  const float16 v3 = (v1 + v2);
  const float16 v4 = (v3 * ((float16)(2.0f)));
  *(__global float16*)(t0 + 32 * d0 + 16 * d1) = v4;
}
