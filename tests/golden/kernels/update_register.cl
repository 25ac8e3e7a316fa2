
__constant sampler_t te_sampler = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
__kernel void contraction_register_4500063e69(__global float* t0, __global const float* restrict t1, read_only image2d_t t2, const int n0, const int n1, const int n2, const int n3, const int n4) {
  const int col0 = get_global_id(0) * 4, row0 = get_global_id(1) * 4;
  if (col0 >= n0 || row0 >= n1) return;
  const int batch = get_global_id(2) / n2, part = get_global_id(2) % n2;
  int a0_r0;
  {
    const int x = row0 + 0;
    const int r0 = min(x, 9);
    a0_r0 = r0;
  }
  int a1_r0;
  {
    const int x = row0 + 1;
    const int r0 = min(x, 9);
    a1_r0 = r0;
  }
  int a2_r0;
  {
    const int x = row0 + 2;
    const int r0 = min(x, 9);
    a2_r0 = r0;
  }
  int a3_r0;
  {
    const int x = row0 + 3;
    const int r0 = min(x, 9);
    a3_r0 = r0;
  }
  int b0_c0;
  {
    const int x = col0 + 0;
    const int c0 = (uint)(min(x, 20)) / 4;
    b0_c0 = c0;
  }
  float4 s0_0 = 0;
  float4 s1_0 = 0;
  float4 s2_0 = 0;
  float4 s3_0 = 0;
  const int last = min((part + 1) * 1, 1);
  for (int chunk = part * 1; chunk < last; ++chunk) {
    const int outer = chunk / 1, inner = chunk % 1 * 400, end = min(inner + 400, 400);
    for (int q = inner; q < end; q += 1) {
      // loading slot
      float a0_0;
      {
        const int k0 = q + 0;
        const int r0 = a0_r0;
        const float v1_1 = t1[n3 * k0 + r0];
        a0_0 = v1_1;
      }
      float a1_0;
      {
        const int k0 = q + 0;
        const int r0 = a1_r0;
        const float v1_1 = t1[n3 * k0 + r0];
        a1_0 = v1_1;
      }
      float a2_0;
      {
        const int k0 = q + 0;
        const int r0 = a2_r0;
        const float v1_1 = t1[n3 * k0 + r0];
        a2_0 = v1_1;
      }
      float a3_0;
      {
        const int k0 = q + 0;
        const int r0 = a3_r0;
        const float v1_1 = t1[n3 * k0 + r0];
        a3_0 = v1_1;
      }
      float4 b0_0;
      {
        const int k0 = q + 0;
        const int c0 = b0_c0;
        const float4 v2_1 = read_imagef(t2, te_sampler, (int2)(c0, k0));
        const float4 v2_2 = v2_1;
        b0_0 = v2_2;
      }
      s0_0 += a0_0 * b0_0;
      s1_0 += a1_0 * b0_0;
      s2_0 += a2_0 * b0_0;
      s3_0 += a3_0 * b0_0;
    }
  }
  if (row0 + 0 < n1) {
    const int row = row0 + 0;
    const int r0 = row;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s0_0;
      const float4 v3_1 = *(__global const float4*)(t0 + 4 * c0 + n4 * r0);
      const float4 v3_2 = (acc * ((float4)(0.1f)));
      const float4 v3_3 = (v3_1 - v3_2);
      *(__global float4*)(t0 + 4 * c0 + n4 * r0) = v3_3;
    }
  }
  if (row0 + 1 < n1) {
    const int row = row0 + 1;
    const int r0 = row;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s1_0;
      const float4 v3_1 = *(__global const float4*)(t0 + 4 * c0 + n4 * r0);
      const float4 v3_2 = (acc * ((float4)(0.1f)));
      const float4 v3_3 = (v3_1 - v3_2);
      *(__global float4*)(t0 + 4 * c0 + n4 * r0) = v3_3;
    }
  }
  if (row0 + 2 < n1) {
    const int row = row0 + 2;
    const int r0 = row;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s2_0;
      const float4 v3_1 = *(__global const float4*)(t0 + 4 * c0 + n4 * r0);
      const float4 v3_2 = (acc * ((float4)(0.1f)));
      const float4 v3_3 = (v3_1 - v3_2);
      *(__global float4*)(t0 + 4 * c0 + n4 * r0) = v3_3;
    }
  }
  if (row0 + 3 < n1) {
    const int row = row0 + 3;
    const int r0 = row;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s3_0;
      const float4 v3_1 = *(__global const float4*)(t0 + 4 * c0 + n4 * r0);
      const float4 v3_2 = (acc * ((float4)(0.1f)));
      const float4 v3_3 = (v3_1 - v3_2);
      *(__global float4*)(t0 + 4 * c0 + n4 * r0) = v3_3;
    }
  }
}
