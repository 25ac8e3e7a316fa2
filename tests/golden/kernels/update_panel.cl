__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void contraction_panel_0b609280ef(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2) {
  __local float a_block[1024] __attribute__((aligned(128)));
  __local float b_block[2048] __attribute__((aligned(128)));
  __local float tile[512] __attribute__((aligned(128)));
  const int row0 = get_group_id(0) * 16, col0 = get_group_id(1) * 32;
  const int rows = min(16, 10 - row0), cols = min(32, 24 - col0);
  const int batch = get_group_id(2) / 2, part = get_group_id(2) % 2;
  const int first = part * 4, last = min(first + 4, 7);
  for (int chunk = first; chunk < last; ++chunk) {
    const int outer = chunk / 7, outer_end = outer + 1, inner = chunk % 7 * 64;
    const int inner_end = min(inner + 64, 400);
    const int depth = (outer_end - outer) * (inner_end - inner);
    for (int r = 0; r < rows; r += 2) {
      const int r0 = (uint)(row0 + r) / 2;
      __local float* to = a_block + r / 8 * 512 + r % 8;
      for (int o = outer; o < outer_end; ++o) {
        for (int q = inner; q < inner_end; ++q, to += 8) {
          const int k0 = (uint)(q);
          const float2 v2_1 = *(__global const float2*)(t1 + 10 * k0 + 2 * r0);
          *(__local float2*)to = v2_1;
        }
      }
    }
    __local float* to = b_block;
    for (int o = outer; o < outer_end; ++o) {
      for (int q = inner; q < inner_end; ++q, to += 32) {
        const int k0 = (uint)(q);
        for (int c = 0; c < cols; c += 8) {
          const int c0 = (uint)(col0 + c) / 8;
          const float8 v3_1 = *(__global const float8*)(t2 + 24 * k0 + 8 * c0);
          *(__local float8*)(to + c / 32 * 2048 + c % 32) = v3_1;
        }
      }
    }
    for (int c = 0; c < cols; c += 32)
    for (int r = 0; r < rows; r += 8) {
      // loading slot
      __local const float* from_a = a_block + r * 64;
      __local const float* from_b = b_block + c * 64;
      __local float* sums = tile + r * 32 + c;
      float16 s0_0 = 0, s0_1 = 0;
      float16 s1_0 = 0, s1_1 = 0;
      float16 s2_0 = 0, s2_1 = 0;
      float16 s3_0 = 0, s3_1 = 0;
      float16 s4_0 = 0, s4_1 = 0;
      float16 s5_0 = 0, s5_1 = 0;
      float16 s6_0 = 0, s6_1 = 0;
      float16 s7_0 = 0, s7_1 = 0;
      if (chunk > first) {
        s0_0 = *(__local float16*)(sums + 0); s0_1 = *(__local float16*)(sums + 16);
        s1_0 = *(__local float16*)(sums + 32); s1_1 = *(__local float16*)(sums + 48);
        s2_0 = *(__local float16*)(sums + 64); s2_1 = *(__local float16*)(sums + 80);
        s3_0 = *(__local float16*)(sums + 96); s3_1 = *(__local float16*)(sums + 112);
        s4_0 = *(__local float16*)(sums + 128); s4_1 = *(__local float16*)(sums + 144);
        s5_0 = *(__local float16*)(sums + 160); s5_1 = *(__local float16*)(sums + 176);
        s6_0 = *(__local float16*)(sums + 192); s6_1 = *(__local float16*)(sums + 208);
        s7_0 = *(__local float16*)(sums + 224); s7_1 = *(__local float16*)(sums + 240);
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
      *(__local float16*)(sums + 0) = s0_0; *(__local float16*)(sums + 16) = s0_1;
      *(__local float16*)(sums + 32) = s1_0; *(__local float16*)(sums + 48) = s1_1;
      *(__local float16*)(sums + 64) = s2_0; *(__local float16*)(sums + 80) = s2_1;
      *(__local float16*)(sums + 96) = s3_0; *(__local float16*)(sums + 112) = s3_1;
      *(__local float16*)(sums + 128) = s4_0; *(__local float16*)(sums + 144) = s4_1;
      *(__local float16*)(sums + 160) = s5_0; *(__local float16*)(sums + 176) = s5_1;
      *(__local float16*)(sums + 192) = s6_0; *(__local float16*)(sums + 208) = s6_1;
      *(__local float16*)(sums + 224) = s7_0; *(__local float16*)(sums + 240) = s7_1;
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int r0 = (uint)(row0 + r);
    for (int c = 0; c < cols; c += 8) {
      const int c0 = (uint)(col0 + c) / 8;
      const float8 acc = *(__local float8*)(tile + r * 32 + c);
      *(__global float8*)(t0 + 240 * part + 24 * r0 + 8 * c0) = acc;
    }
  }
}


__kernel void rows_036603f8d3(__global float* t0, __global const float* restrict t1) {
  const int r0 = get_global_id(0);

  float16 acc_l = (float16)(0.0f);
  #pragma unroll
  for (int k0 = 0; k0 < 2; ++k0) {
    const float16 v1_1 = *(__global const float16*)(t1 + 240 * k0 + 16 * r0);
    acc_l = acc_l + v1_1;
  }
  const float16 acc = acc_l;
  const float16 v2_1 = *(__global const float16*)(t0 + 16 * r0);
  const float16 v2_2 = (acc * ((float16)(0.1f)));
  const float16 v2_3 = (v2_1 - v2_2);
  *(__global float16*)(t0 + 16 * r0) = v2_3;
}
