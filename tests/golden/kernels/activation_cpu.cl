
__kernel void pointwise_c492e13e03(__global float* t0, __global const float* t1, __global const float* restrict t2, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5) {
  const int b1 = get_global_id(1) * n0;
  const int e1 = min(b1 + n0, n1);
  const int b0 = get_global_id(0) * n2;
  const int e0 = min(b0 + n2, n3);

  for (int i1 = b1; i1 < e1; ++i1) {
    const int d0 = i1;
    for (int i0 = b0; i0 < e0; ++i0) {
      const int d1 = i0;
      const float16 v1 = *(__global const float16*)(t1 + n4 * d0 + 16 * d1);
      const float16 v2 = *(__global const float16*)(t2 + 16 * d1);
      const float16 v3 = (v1 + v2);
      const float16 v4 = (v3 * ((float16)(2.0f)));
      *(__global float16*)(t0 + n5 * d0 + 16 * d1) = v4;
    }
  }
}
