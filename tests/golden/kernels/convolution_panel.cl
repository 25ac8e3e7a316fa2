
#if defined(__AVX512F__)
#define te_wide 1
#else
#define te_wide 0
#endif
__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void contraction_panel_bb94a3df4d(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2, __global const float* restrict t3, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8, const int n9, const int n10, const int n11, const int n12, const int n13, const int n14, const int n15, const int n16, const int n17, const int n18, const int n19, const int n20, const int n21, const int n22, const int n23, const int n24, const int n25, const int n26, const int n27, const int n28, const int n29, const int n30, const int n31, const int n32, const int n33, const int n34, const int n35) {
  __local float words[32768] __attribute__((aligned(128)));
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
    const int depth = (outer_end - outer) * (inner_end - inner);
    for (int r = 0; r < rows; r += 1) {
      const int r2_over = (int)(mul_hi((uint)(row0 + r), (uint)n15) >> n16);
      const int r2 = (row0 + r) - n17 * r2_over;
      const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n18) >> n19);
      const int r1 = r2_over - n20 * r1_over;
      const int r0 = r1_over;
      __local float* to = a_block + r * 256;
      for (int k0 = 0; k0 < n21; ++k0)
      for (int k1 = 0; k1 < n22; ++k1) {
        for (int q = inner; q < inner_end; q += 1, to += 1) {
          const int k2 = q;
          const int v2_1 = (k1 + 2 * r1 - 1 >= 0 && k1 + 2 * r1 - 1 < n23 && k2 + 2 * r2 - 1 >= 0 && k2 + 2 * r2 - 1 < n24);
          const float v2_2 = t1[(v2_1 ? n25 * k0 + n26 * k1 + k2 + n27 * r0 + n28 * r1 + 2 * r2 - n29 : 0)];
          const float v2_3 = (v2_1 ? v2_2 : 0.0f);
          *(__local float*)to = v2_3;
        }
      }
    }
    __local float* to = b_block;
    for (int k0 = 0; k0 < n21; ++k0)
    for (int k1 = 0; k1 < n22; ++k1) {
      for (int q = inner; q < inner_end; ++q, to += 32) {
        const int k2 = q;
        for (int c = 0; c < cols; c += 16) {
          const int c0 = (uint)(col0 + c) / 16;
          const float16 v3_1 = *(__global const float16*)(t2 + 16 * c0 + n30 * k0 + n31 * k1 + n32 * k2);
          *(__local float16*)(to + c / 32 * 8192 + c % 32) = v3_1;
        }
      }
    }
    if (te_wide) {
      for (int c = 0; c < cols; c += 32)
      for (int r = 0; r < rows; r += 10) {
        // loading slot
        __local const float* from_a = a_block + r * 256;
        __local const float* from_b = b_block + c * 256;
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
          { const float x = from_a[256]; s1_0 += x * b0; s1_1 += x * b1; }
          { const float x = from_a[512]; s2_0 += x * b0; s2_1 += x * b1; }
          { const float x = from_a[768]; s3_0 += x * b0; s3_1 += x * b1; }
          { const float x = from_a[1024]; s4_0 += x * b0; s4_1 += x * b1; }
          { const float x = from_a[1280]; s5_0 += x * b0; s5_1 += x * b1; }
          { const float x = from_a[1536]; s6_0 += x * b0; s6_1 += x * b1; }
          { const float x = from_a[1792]; s7_0 += x * b0; s7_1 += x * b1; }
          { const float x = from_a[2048]; s8_0 += x * b0; s8_1 += x * b1; }
          { const float x = from_a[2304]; s9_0 += x * b0; s9_1 += x * b1; }
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
        __local const float* from_a = a_block + r * 256;
        __local const float* from_b = b_block + c / 32 * 8192 + c % 32;
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
          { const float x = from_a[256]; s1_0 += x * b0; }
          { const float x = from_a[512]; s2_0 += x * b0; }
          { const float x = from_a[768]; s3_0 += x * b0; }
          { const float x = from_a[1024]; s4_0 += x * b0; }
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
    const int r2_over = (int)(mul_hi((uint)(row0 + r), (uint)n15) >> n16);
    const int r2 = (row0 + r) - n17 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n18) >> n19);
    const int r1 = r2_over - n20 * r1_over;
    const int r0 = r1_over;
    for (int c = 0; c < cols; c += 16) {
      const int c0 = (uint)(col0 + c) / 16;
      const float16 acc = *(__local float16*)(tile + r * block_cols + c);
      const float16 v1_1 = *(__global const float16*)(t3 + 16 * c0);
      const float16 v1_2 = (acc + v1_1);
      const float16 v1_3 = (v1_2 * ((float16)(2.0f)));
      *(__global float16*)(t0 + 16 * c0 + n33 * r0 + n34 * r1 + n35 * r2) = v1_3;
    }
  }
}
