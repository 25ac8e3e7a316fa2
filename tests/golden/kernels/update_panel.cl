
#if defined(__AVX512F__)
#define te_wide 1
#else
#define te_wide 0
#endif
__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void contraction_panel_8619d2486f(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8, const int n9, const int n10, const int n11, const int n12, const int n13, const int n14, const int n15, const int n16, const int n17, const int n18) {
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
    const int depth = (outer_end - outer) * (inner_end - inner);
    for (int r = 0; r < rows; r += 2) {
      const int r0 = (uint)(row0 + r) / 2;
      __local float* to = a_block + r / 8 * 512 + r % 8;
      for (int o = outer; o < outer_end; ++o) {
        for (int q = inner; q < inner_end; ++q, to += 8) {
          const int k0 = q;
          const float2 v2_1 = *(__global const float2*)(t1 + n15 * k0 + 2 * r0);
          *(__local float2*)to = v2_1;
        }
      }
    }
    __local float* to = b_block;
    for (int o = outer; o < outer_end; ++o) {
      for (int q = inner; q < inner_end; ++q, to += 32) {
        const int k0 = q;
        for (int c = 0; c < cols; c += 8) {
          const int c0 = (uint)(col0 + c) / 8;
          const float8 v3_1 = *(__global const float8*)(t2 + 8 * c0 + n16 * k0);
          *(__local float8*)(to + c / 32 * 2048 + c % 32) = v3_1;
        }
      }
    }
    if (te_wide) {
      for (int c = 0; c < cols; c += 32)
      for (int r = 0; r < rows; r += 8) {
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
        if (chunk > first) {
          s0_0 = *(__local float16*)(sums + 0 * block_cols + 0); s0_1 = *(__local float16*)(sums + 0 * block_cols + 16);
          s1_0 = *(__local float16*)(sums + 1 * block_cols + 0); s1_1 = *(__local float16*)(sums + 1 * block_cols + 16);
          s2_0 = *(__local float16*)(sums + 2 * block_cols + 0); s2_1 = *(__local float16*)(sums + 2 * block_cols + 16);
          s3_0 = *(__local float16*)(sums + 3 * block_cols + 0); s3_1 = *(__local float16*)(sums + 3 * block_cols + 16);
          s4_0 = *(__local float16*)(sums + 4 * block_cols + 0); s4_1 = *(__local float16*)(sums + 4 * block_cols + 16);
          s5_0 = *(__local float16*)(sums + 5 * block_cols + 0); s5_1 = *(__local float16*)(sums + 5 * block_cols + 16);
          s6_0 = *(__local float16*)(sums + 6 * block_cols + 0); s6_1 = *(__local float16*)(sums + 6 * block_cols + 16);
          s7_0 = *(__local float16*)(sums + 7 * block_cols + 0); s7_1 = *(__local float16*)(sums + 7 * block_cols + 16);
        }
        for (int k = 0; k < depth; ++k) {
          const float16 b0 = *(__local const float16*)(from_b + 0), b1 = *(__local const float16*)(from_b + 16);
          { const float x = from_a[0]; s0_0 += x * b0; s0_1 += x * b1; }
          { const float x = from_a[1]; s1_0 += x * b0; s1_1 += x * b1; }
          { const float x = from_a[2]; s2_0 += x * b0; s2_1 += x * b1; }
          { const float x = from_a[3]; s3_0 += x * b0; s3_1 += x * b1; }
          { const float x = from_a[4]; s4_0 += x * b0; s4_1 += x * b1; }
          { const float x = from_a[5]; s5_0 += x * b0; s5_1 += x * b1; }
          { const float x = from_a[6]; s6_0 += x * b0; s6_1 += x * b1; }
          { const float x = from_a[7]; s7_0 += x * b0; s7_1 += x * b1; }
          from_a += 8;
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
      }
    }
    else {
      for (int c = 0; c < cols; c += 32)
      for (int r = 0; r < rows; r += 2) {
        // loading slot
        __local const float* from_a = a_block + r / 8 * 512 + r % 8;
        __local const float* from_b = b_block + c * 64;
        __local float* sums = tile + r * block_cols + c;
        float16 s0_0 = 0, s0_1 = 0;
        float16 s1_0 = 0, s1_1 = 0;
        if (chunk > first) {
          s0_0 = *(__local float16*)(sums + 0 * block_cols + 0); s0_1 = *(__local float16*)(sums + 0 * block_cols + 16);
          s1_0 = *(__local float16*)(sums + 1 * block_cols + 0); s1_1 = *(__local float16*)(sums + 1 * block_cols + 16);
        }
        for (int k = 0; k < depth; ++k) {
          const float16 b0 = *(__local const float16*)(from_b + 0), b1 = *(__local const float16*)(from_b + 16);
          { const float x = from_a[0]; s0_0 += x * b0; s0_1 += x * b1; }
          { const float x = from_a[1]; s1_0 += x * b0; s1_1 += x * b1; }
          from_a += 8;
          from_b += 32;
        }
        *(__local float16*)(sums + 0 * block_cols + 0) = s0_0; *(__local float16*)(sums + 0 * block_cols + 16) = s0_1;
        *(__local float16*)(sums + 1 * block_cols + 0) = s1_0; *(__local float16*)(sums + 1 * block_cols + 16) = s1_1;
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int r0 = row0 + r;
    for (int c = 0; c < cols; c += 8) {
      const int c0 = (uint)(col0 + c) / 8;
      const float8 acc = *(__local float8*)(tile + r * block_cols + c);
      *(__global float8*)(t0 + 8 * c0 + n17 * part + n18 * r0) = acc;
    }
  }
}


__kernel void rows_6a1744477d(__global float* t0, __global const float* restrict t1, const int n0, const int n1) {
  const int r0 = get_global_id(0);

  float16 acc_l = (float16)(0.0f);
  for (int k0 = 0; k0 < n0; ++k0) {
    // loading slot
    const float16 v1_1 = *(__global const float16*)(t1 + n1 * k0 + 16 * r0);
    acc_l = acc_l + v1_1;
  }
  const float16 acc = acc_l;
  const float16 v2_1 = *(__global const float16*)(t0 + 16 * r0);
  const float16 v2_2 = (acc * ((float16)(0.1f)));
  const float16 v2_3 = (v2_1 - v2_2);
  *(__global float16*)(t0 + 16 * r0) = v2_3;
}
