
__constant sampler_t te_sampler = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
__kernel void contraction_register_514746e928(__global float* restrict t0, __global const float* restrict t1, read_only image2d_t t2, __global const float* restrict t3, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8, const int n9, const int n10, const int n11, const int n12, const int n13, const int n14, const int n15, const int n16, const int n17, const int n18, const int n19) {
  const int col0 = get_global_id(0) * 8, row0 = get_global_id(1) * 4;
  if (col0 >= n0 || row0 >= n1) return;
  const int batch = get_global_id(2) / n2, part = get_global_id(2) % n2;
  int a0_r0, a0_r1, a0_r2;
  {
    const int x = row0 + 0;
    const int r2_over = (int)(mul_hi((uint)(min(x, 49)), (uint)n3) >> n4);
    const int r2 = (min(x, 49)) - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    a0_r0 = r0;
    a0_r1 = r1;
    a0_r2 = r2;
  }
  int a1_r0, a1_r1, a1_r2;
  {
    const int x = row0 + 1;
    const int r2_over = (int)(mul_hi((uint)(min(x, 49)), (uint)n3) >> n4);
    const int r2 = (min(x, 49)) - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    a1_r0 = r0;
    a1_r1 = r1;
    a1_r2 = r2;
  }
  int a2_r0, a2_r1, a2_r2;
  {
    const int x = row0 + 2;
    const int r2_over = (int)(mul_hi((uint)(min(x, 49)), (uint)n3) >> n4);
    const int r2 = (min(x, 49)) - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    a2_r0 = r0;
    a2_r1 = r1;
    a2_r2 = r2;
  }
  int a3_r0, a3_r1, a3_r2;
  {
    const int x = row0 + 3;
    const int r2_over = (int)(mul_hi((uint)(min(x, 49)), (uint)n3) >> n4);
    const int r2 = (min(x, 49)) - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    a3_r0 = r0;
    a3_r1 = r1;
    a3_r2 = r2;
  }
  int b0_c0;
  {
    const int x = col0 + 0;
    const int c0 = (uint)(min(x, 28)) / 4;
    b0_c0 = c0;
  }
  int b4_c0;
  {
    const int x = col0 + 4;
    const int c0 = (uint)(min(x, 28)) / 4;
    b4_c0 = c0;
  }
  float4 s0_0 = 0, s0_1 = 0;
  float4 s1_0 = 0, s1_1 = 0;
  float4 s2_0 = 0, s2_1 = 0;
  float4 s3_0 = 0, s3_1 = 0;
  const int last = min((part + 1) * 48, 48);
  for (int chunk = part * 48; chunk < last; ++chunk) {
    const int outer = chunk / 1, inner = chunk % 1 * 4, end = min(inner + 4, 3);
    const int k1_over = (uint)(outer) / 3;
    const int k1 = outer - 3 * k1_over;
    const int k0 = k1_over;
    for (int q = inner; q < end; q += 1) {
      // loading slot
      float a0_0;
      {
        const int k2 = q + 0;
        const int r0 = a0_r0;
        const int r1 = a0_r1;
        const int r2 = a0_r2;
        const int v1_1 = (k1 + 2 * r1 - 1 >= 0 && k1 + 2 * r1 - 1 < n9 && k2 + 2 * r2 - 1 >= 0 && k2 + 2 * r2 - 1 < n10);
        const float v1_2 = t1[(v1_1 ? n11 * k0 + n12 * k1 + k2 + n13 * r0 + n14 * r1 + 2 * r2 - n15 : 0)];
        const float v1_3 = (v1_1 ? v1_2 : 0.0f);
        a0_0 = v1_3;
      }
      float a1_0;
      {
        const int k2 = q + 0;
        const int r0 = a1_r0;
        const int r1 = a1_r1;
        const int r2 = a1_r2;
        const int v1_1 = (k1 + 2 * r1 - 1 >= 0 && k1 + 2 * r1 - 1 < n9 && k2 + 2 * r2 - 1 >= 0 && k2 + 2 * r2 - 1 < n10);
        const float v1_2 = t1[(v1_1 ? n11 * k0 + n12 * k1 + k2 + n13 * r0 + n14 * r1 + 2 * r2 - n15 : 0)];
        const float v1_3 = (v1_1 ? v1_2 : 0.0f);
        a1_0 = v1_3;
      }
      float a2_0;
      {
        const int k2 = q + 0;
        const int r0 = a2_r0;
        const int r1 = a2_r1;
        const int r2 = a2_r2;
        const int v1_1 = (k1 + 2 * r1 - 1 >= 0 && k1 + 2 * r1 - 1 < n9 && k2 + 2 * r2 - 1 >= 0 && k2 + 2 * r2 - 1 < n10);
        const float v1_2 = t1[(v1_1 ? n11 * k0 + n12 * k1 + k2 + n13 * r0 + n14 * r1 + 2 * r2 - n15 : 0)];
        const float v1_3 = (v1_1 ? v1_2 : 0.0f);
        a2_0 = v1_3;
      }
      float a3_0;
      {
        const int k2 = q + 0;
        const int r0 = a3_r0;
        const int r1 = a3_r1;
        const int r2 = a3_r2;
        const int v1_1 = (k1 + 2 * r1 - 1 >= 0 && k1 + 2 * r1 - 1 < n9 && k2 + 2 * r2 - 1 >= 0 && k2 + 2 * r2 - 1 < n10);
        const float v1_2 = t1[(v1_1 ? n11 * k0 + n12 * k1 + k2 + n13 * r0 + n14 * r1 + 2 * r2 - n15 : 0)];
        const float v1_3 = (v1_1 ? v1_2 : 0.0f);
        a3_0 = v1_3;
      }
      float4 b0_0;
      {
        const int k2 = q + 0;
        const int c0 = b0_c0;
        const float4 v2_1 = read_imagef(t2, te_sampler, (int2)(c0 + n16 * k0, 3 * k1 + k2));
        const float4 v2_2 = v2_1;
        b0_0 = v2_2;
      }
      float4 b4_0;
      {
        const int k2 = q + 0;
        const int c0 = b4_c0;
        const float4 v2_1 = read_imagef(t2, te_sampler, (int2)(c0 + n16 * k0, 3 * k1 + k2));
        const float4 v2_2 = v2_1;
        b4_0 = v2_2;
      }
      s0_0 += a0_0 * b0_0; s0_1 += a0_0 * b4_0;
      s1_0 += a1_0 * b0_0; s1_1 += a1_0 * b4_0;
      s2_0 += a2_0 * b0_0; s2_1 += a2_0 * b4_0;
      s3_0 += a3_0 * b0_0; s3_1 += a3_0 * b4_0;
    }
  }
  if (row0 + 0 < n1) {
    const int row = row0 + 0;
    const int r2_over = (int)(mul_hi((uint)(row), (uint)n3) >> n4);
    const int r2 = row - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s0_0;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
    if (col0 + 4 < n0) {
      const int col = col0 + 4;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s0_1;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
  }
  if (row0 + 1 < n1) {
    const int row = row0 + 1;
    const int r2_over = (int)(mul_hi((uint)(row), (uint)n3) >> n4);
    const int r2 = row - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s1_0;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
    if (col0 + 4 < n0) {
      const int col = col0 + 4;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s1_1;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
  }
  if (row0 + 2 < n1) {
    const int row = row0 + 2;
    const int r2_over = (int)(mul_hi((uint)(row), (uint)n3) >> n4);
    const int r2 = row - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s2_0;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
    if (col0 + 4 < n0) {
      const int col = col0 + 4;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s2_1;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
  }
  if (row0 + 3 < n1) {
    const int row = row0 + 3;
    const int r2_over = (int)(mul_hi((uint)(row), (uint)n3) >> n4);
    const int r2 = row - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    if (col0 + 0 < n0) {
      const int col = col0 + 0;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s3_0;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
    if (col0 + 4 < n0) {
      const int col = col0 + 4;
      const int c0 = (uint)(col) / 4;
      const float4 acc = s3_1;
      const float4 v3_1 = *(__global const float4*)(t3 + 4 * c0);
      const float4 v3_2 = (acc + v3_1);
      const float4 v3_3 = (v3_2 * ((float4)(2.0f)));
      *(__global float4*)(t0 + 4 * c0 + n17 * r0 + n18 * r1 + n19 * r2) = v3_3;
    }
  }
}
