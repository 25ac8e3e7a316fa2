
__kernel void pointwise_50f52d2473(__global float* t0, __global const float* t1, __global const float* restrict t2) {
  const int b1 = get_global_id(1) * 18;
  const int e1 = min(b1 + 18, 144);
  const int b0 = get_global_id(0) * 2;
  const int e0 = min(b0 + 2, 2);

  for (int i1 = b1; i1 < e1; ++i1) {
    const int d0 = i1;
    for (int i0 = b0; i0 < e0; ++i0) {
      const int d1 = i0;
      const float16 v1 = *(__global const float16*)(t1 + 32 * d0 + 16 * d1);
      const float16 v2 = *(__global const float16*)(t2 + 16 * d1);
      const float16 v3 = (v1 + v2);
      const float16 v4 = (v3 * ((float16)(2.0f)));
      *(__global float16*)(t0 + 32 * d0 + 16 * d1) = v4;
    }
  }
}
