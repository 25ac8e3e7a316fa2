
#if defined(__AVX512F__)
#define te_wide 1
#else
#define te_wide 0
#endif
__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void contraction_panel_83057be602(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8, const int n9, const int n10, const int n11, const int n12, const int n13, const int n14, const int n15, const int n16, const int n17, const int n18, const int n19, const int n20, const int n21, const int n22, const int n23, const int n24, const int n25, const int n26, const int n27, const int n28, const int n29, const int n30, const int n31, const int n32, const int n33, const int n34, const int n35, const int n36, const int n37, const int n38, const int n39) {
  __local float words[8192] __attribute__((aligned(128)));
  __local float* const a_block = words;
  __local float* const b_block = a_block + n0;
  __local float* const tile = b_block + n1;
  const int block_rows = n2, block_cols = n3, slices = n4;
  const int row0 = (n5 ? get_group_id(0) : get_group_id(1)) * block_rows;
  const int col0 = (n5 ? get_group_id(1) : get_group_id(0)) * block_cols;
  const int rows = min(block_rows, n6 - row0), cols = min(block_cols, n7 - col0);
  const int batch = (int)get_group_id(2) / slices, part = get_group_id(2) - batch * slices;
  const int first = part * n8, last = min(first + n8, n9);
  for (int chunk = first; chunk < last; ++chunk) {
    const int outer = chunk / n10 * n11, outer_end = min(outer + n11, n12);
    const int inner = chunk % n10 * n13, inner_end = min(inner + n13, n14);
    const int c2_over = (int)(mul_hi((uint)(col0), (uint)n15) >> n16);
    const int c2 = col0 - n17 * c2_over;
    const int c1_over = (uint)(c2_over) / 2;
    const int c1 = c2_over - 2 * c1_over;
    const int c0 = c1_over;
    int depth = 0;
    for (int k0 = 0; k0 < n18; ++k0)
    for (int k1 = 0; k1 < n19; ++k1) {
      const int v2_1 = (c0 + 2 * k1 < 3);
      const int v2_2 = (v2_1 ? 1 : 0);
      if (!v2_2) continue;
      depth += inner_end - inner;
    }
    for (int r = 0; r < rows; r += 1) {
      const int r2_over = (int)(mul_hi((uint)(row0 + r), (uint)n20) >> n21);
      const int r2 = (row0 + r) - n22 * r2_over;
      const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n23) >> n24);
      const int r1 = r2_over - n25 * r1_over;
      const int r0 = r1_over;
      __local float* to = a_block + r * 64;
      for (int k0 = 0; k0 < n18; ++k0)
      for (int k1 = 0; k1 < n19; ++k1) {
        const int v2_1 = (c0 + 2 * k1 < 3);
        const int v2_2 = (v2_1 ? 1 : 0);
        if (!v2_2) continue;
        for (int q = inner; q < inner_end; q += 2, to += 2) {
          const int k2 = (uint)(q) / 2;
          const int v3_1 = (-k1 + r1 >= 0);
          const float v3_2 = t1[(v3_1 ? n26 * k0 - n27 * k1 - 2 * k2 + n28 * r0 + n29 * r1 + r2 : 0)];
          const float v3_3 = (v3_1 ? v3_2 : 0.0f);
          const int v3_4 = (-k1 + r1 >= 0 && -2 * k2 + r2 - 1 >= 0);
          const float v3_5 = t1[(v3_4 ? n26 * k0 - n27 * k1 - 2 * k2 + n28 * r0 + n29 * r1 + r2 - 1 : 0)];
          const float v3_6 = (v3_4 ? v3_5 : 0.0f);
          const float2 v3_7 = (float2)(v3_3, v3_6);
          *(__local float2*)to = v3_7;
        }
      }
    }
    __local float* to = b_block;
    for (int k0 = 0; k0 < n18; ++k0)
    for (int k1 = 0; k1 < n19; ++k1) {
      const int v2_1 = (c0 + 2 * k1 < 3);
      const int v2_2 = (v2_1 ? 1 : 0);
      if (!v2_2) continue;
      for (int q = inner; q < inner_end; ++q, to += 32) {
        const int k2 = q;
        for (int c = 0; c < cols; c += 16) {
          const int c2_over = (uint)((uint)(col0 + c) / 16) / 2;
          const int c2 = ((uint)(col0 + c) / 16) - 2 * c2_over;
          const int c1_over = (uint)(c2_over) / 2;
          const int c1 = c2_over - 2 * c1_over;
          const int c0 = c1_over;
          const int v4_1 = (c0 + 2 * k1 < 3 && c1 + 2 * k2 < 3);
          const float16 v4_2 = *(__global const float16*)(t2 + (v4_1 ? n30 * c0 + n31 * c1 + 16 * c2 + n32 * k0 + n33 * k1 + n34 * k2 : 0));
          const float16 v4_3 = (v4_1 ? v4_2 : ((float16)(0.0f)));
          *(__local float16*)(to + c / 32 * 2048 + c % 32) = v4_3;
        }
      }
    }
    if (te_wide) {
      for (int c = 0; c < cols; c += 32)
      for (int r = 0; r < rows; r += 10) {
        // loading slot
        __local const float* from_a = a_block + r * 64;
        __local const float* from_b = b_block + c * 64;
        __local float* sums = tile + r * block_cols + c;
        float16 s0_0 = 0, s0_1 = 0;
        float16 s1_0 = 0, s1_1 = 0;
        float16 s2_0 = 0, s2_1 = 0;
        float16 s3_0 = 0, s3_1 = 0;
        float16 s4_0 = 0, s4_1 = 0;
        float16 s5_0 = 0, s5_1 = 0;
        float16 s6_0 = 0, s6_1 = 0;
        float16 s7_0 = 0, s7_1 = 0;
        float16 s8_0 = 0, s8_1 = 0;
        float16 s9_0 = 0, s9_1 = 0;
        if (chunk > first) {
          s0_0 = *(__local float16*)(sums + 0 * block_cols + 0); s0_1 = *(__local float16*)(sums + 0 * block_cols + 16);
          s1_0 = *(__local float16*)(sums + 1 * block_cols + 0); s1_1 = *(__local float16*)(sums + 1 * block_cols + 16);
          s2_0 = *(__local float16*)(sums + 2 * block_cols + 0); s2_1 = *(__local float16*)(sums + 2 * block_cols + 16);
          s3_0 = *(__local float16*)(sums + 3 * block_cols + 0); s3_1 = *(__local float16*)(sums + 3 * block_cols + 16);
          s4_0 = *(__local float16*)(sums + 4 * block_cols + 0); s4_1 = *(__local float16*)(sums + 4 * block_cols + 16);
          s5_0 = *(__local float16*)(sums + 5 * block_cols + 0); s5_1 = *(__local float16*)(sums + 5 * block_cols + 16);
          s6_0 = *(__local float16*)(sums + 6 * block_cols + 0); s6_1 = *(__local float16*)(sums + 6 * block_cols + 16);
          s7_0 = *(__local float16*)(sums + 7 * block_cols + 0); s7_1 = *(__local float16*)(sums + 7 * block_cols + 16);
          s8_0 = *(__local float16*)(sums + 8 * block_cols + 0); s8_1 = *(__local float16*)(sums + 8 * block_cols + 16);
          s9_0 = *(__local float16*)(sums + 9 * block_cols + 0); s9_1 = *(__local float16*)(sums + 9 * block_cols + 16);
        }
        for (int k = 0; k < depth; ++k) {
          const float16 b0 = *(__local const float16*)(from_b + 0), b1 = *(__local const float16*)(from_b + 16);
          { const float x = from_a[0]; s0_0 += x * b0; s0_1 += x * b1; }
          { const float x = from_a[64]; s1_0 += x * b0; s1_1 += x * b1; }
          { const float x = from_a[128]; s2_0 += x * b0; s2_1 += x * b1; }
          { const float x = from_a[192]; s3_0 += x * b0; s3_1 += x * b1; }
          { const float x = from_a[256]; s4_0 += x * b0; s4_1 += x * b1; }
          { const float x = from_a[320]; s5_0 += x * b0; s5_1 += x * b1; }
          { const float x = from_a[384]; s6_0 += x * b0; s6_1 += x * b1; }
          { const float x = from_a[448]; s7_0 += x * b0; s7_1 += x * b1; }
          { const float x = from_a[512]; s8_0 += x * b0; s8_1 += x * b1; }
          { const float x = from_a[576]; s9_0 += x * b0; s9_1 += x * b1; }
          from_a += 1;
          from_b += 32;
        }
        *(__local float16*)(sums + 0 * block_cols + 0) = s0_0; *(__local float16*)(sums + 0 * block_cols + 16) = s0_1;
        *(__local float16*)(sums + 1 * block_cols + 0) = s1_0; *(__local float16*)(sums + 1 * block_cols + 16) = s1_1;
        *(__local float16*)(sums + 2 * block_cols + 0) = s2_0; *(__local float16*)(sums + 2 * block_cols + 16) = s2_1;
        *(__local float16*)(sums + 3 * block_cols + 0) = s3_0; *(__local float16*)(sums + 3 * block_cols + 16) = s3_1;
        *(__local float16*)(sums + 4 * block_cols + 0) = s4_0; *(__local float16*)(sums + 4 * block_cols + 16) = s4_1;
        *(__local float16*)(sums + 5 * block_cols + 0) = s5_0; *(__local float16*)(sums + 5 * block_cols + 16) = s5_1;
        *(__local float16*)(sums + 6 * block_cols + 0) = s6_0; *(__local float16*)(sums + 6 * block_cols + 16) = s6_1;
        *(__local float16*)(sums + 7 * block_cols + 0) = s7_0; *(__local float16*)(sums + 7 * block_cols + 16) = s7_1;
        *(__local float16*)(sums + 8 * block_cols + 0) = s8_0; *(__local float16*)(sums + 8 * block_cols + 16) = s8_1;
        *(__local float16*)(sums + 9 * block_cols + 0) = s9_0; *(__local float16*)(sums + 9 * block_cols + 16) = s9_1;
      }
    }
    else {
      for (int c = 0; c < cols; c += 16)
      for (int r = 0; r < rows; r += 5) {
        // loading slot
        __local const float* from_a = a_block + r * 64;
        __local const float* from_b = b_block + c / 32 * 2048 + c % 32;
        __local float* sums = tile + r * block_cols + c;
        float16 s0_0 = 0;
        float16 s1_0 = 0;
        float16 s2_0 = 0;
        float16 s3_0 = 0;
        float16 s4_0 = 0;
        if (chunk > first) {
          s0_0 = *(__local float16*)(sums + 0 * block_cols + 0);
          s1_0 = *(__local float16*)(sums + 1 * block_cols + 0);
          s2_0 = *(__local float16*)(sums + 2 * block_cols + 0);
          s3_0 = *(__local float16*)(sums + 3 * block_cols + 0);
          s4_0 = *(__local float16*)(sums + 4 * block_cols + 0);
        }
        for (int k = 0; k < depth; ++k) {
          const float16 b0 = *(__local const float16*)(from_b + 0);
          { const float x = from_a[0]; s0_0 += x * b0; }
          { const float x = from_a[64]; s1_0 += x * b0; }
          { const float x = from_a[128]; s2_0 += x * b0; }
          { const float x = from_a[192]; s3_0 += x * b0; }
          { const float x = from_a[256]; s4_0 += x * b0; }
          from_a += 1;
          from_b += 32;
        }
        *(__local float16*)(sums + 0 * block_cols + 0) = s0_0;
        *(__local float16*)(sums + 1 * block_cols + 0) = s1_0;
        *(__local float16*)(sums + 2 * block_cols + 0) = s2_0;
        *(__local float16*)(sums + 3 * block_cols + 0) = s3_0;
        *(__local float16*)(sums + 4 * block_cols + 0) = s4_0;
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int r2_over = (int)(mul_hi((uint)(row0 + r), (uint)n20) >> n21);
    const int r2 = (row0 + r) - n22 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n23) >> n24);
    const int r1 = r2_over - n25 * r1_over;
    const int r0 = r1_over;
    for (int c = 0; c < cols; c += 16) {
      const int c2_over = (uint)((uint)(col0 + c) / 16) / 2;
      const int c2 = ((uint)(col0 + c) / 16) - 2 * c2_over;
      const int c1_over = (uint)(c2_over) / 2;
      const int c1 = c2_over - 2 * c1_over;
      const int c0 = c1_over;
      const float16 acc = *(__local float16*)(tile + r * block_cols + c);
      *(__global float16*)(t0 + n35 * c0 + n36 * c1 + 16 * c2 + n37 * r0 + n38 * r1 + n39 * r2) = acc;
    }
  }
}


__kernel void pointwise_57e08aebdc(__global float* restrict t0, __global const float* restrict t1, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8) {
  const int d0 = get_global_id(2);
  const int b1 = get_global_id(1) * n0;
  const int e1 = min(b1 + n0, n1);
  const int b0 = get_global_id(0) * n2;
  const int e0 = min(b0 + n2, n3);

  for (int i1 = b1; i1 < e1; ++i1) {
    const int d1 = i1;
    for (int i0 = b0; i0 < e0; ++i0) {
      const int d2 = i0;
      const float16 v1 = *(__global const float16*)(t1 + n4 * d0 + n5 * d1 + 16 * d2 + n6);
      *(__global float16*)(t0 + n7 * d0 + n8 * d1 + 16 * d2) = v1;
    }
  }
}
