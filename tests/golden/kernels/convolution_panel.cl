__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void contraction_panel_3e72c7ced6(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2, __global const float* restrict t3) {
  __local float a_block[4320] __attribute__((aligned(128)));
  __local float b_block[4608] __attribute__((aligned(128)));
  __local float tile[960] __attribute__((aligned(128)));
  const int row0 = get_group_id(0) * 30, col0 = get_group_id(1) * 32;
  const int rows = min(30, 50 - row0), cols = min(32, 32 - col0);
  const int batch = get_group_id(2) / 1, part = get_group_id(2) % 1;
  const int first = part * 1, last = min(first + 1, 1);
  for (int chunk = first; chunk < last; ++chunk) {
    const int outer = chunk * 48, outer_end = min(outer + 48, 48);
    const int inner = 0, inner_end = 3;
    const int depth = (outer_end - outer) * (inner_end - inner);
    for (int r = 0; r < rows; r += 1) {
      const int r0 = (uint)(row0 + r) / 25;
      const int r1 = (uint)(row0 + r) / 5 % 5;
      const int r2 = (uint)(row0 + r) % 5;
      __local float* to = a_block + r * 144;
      for (int k0 = 0; k0 < 16; ++k0)
      for (int k1 = 0; k1 < 3; ++k1) {
        for (int q = inner; q < inner_end; q += 1, to += 1) {
          const int k2 = (uint)(q);
          const int v2_1 = (2 * r1 + k1 - 1 >= 0 && 2 * r1 + k1 - 1 < 9 && 2 * r2 + k2 - 1 >= 0 && 2 * r2 + k2 - 1 < 9);
          const float v2_2 = t1[(v2_1 ? 162 * k0 + 81 * r0 + 18 * r1 + 9 * k1 + 2 * r2 + k2 - 10 : 0)];
          const float v2_3 = (v2_1 ? v2_2 : 0.0f);
          *(__local float*)to = v2_3;
        }
      }
    }
    __local float* to = b_block;
    for (int k0 = 0; k0 < 16; ++k0)
    for (int k1 = 0; k1 < 3; ++k1) {
      for (int q = inner; q < inner_end; ++q, to += 32) {
        const int k2 = (uint)(q);
        for (int c = 0; c < cols; c += 16) {
          const int c0 = (uint)(col0 + c) / 16;
          const float16 v3_1 = *(__global const float16*)(t2 + 1536 * k1 + 512 * k2 + 32 * k0 + 16 * c0);
          *(__local float16*)(to + c / 32 * 4608 + c % 32) = v3_1;
        }
      }
    }
    for (int c = 0; c < cols; c += 32)
    for (int r = 0; r < rows; r += 10) {
      // loading slot
      __local const float* from_a = a_block + r * 144;
      __local const float* from_b = b_block + c * 144;
      __local float* sums = tile + r * 32 + c;
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
      for (int k = 0; k < depth; ++k) {
        const float16 b0 = *(__local const float16*)(from_b + 0), b1 = *(__local const float16*)(from_b + 16);
        { const float x = from_a[0]; s0_0 += x * b0; s0_1 += x * b1; }
        { const float x = from_a[144]; s1_0 += x * b0; s1_1 += x * b1; }
        { const float x = from_a[288]; s2_0 += x * b0; s2_1 += x * b1; }
        { const float x = from_a[432]; s3_0 += x * b0; s3_1 += x * b1; }
        { const float x = from_a[576]; s4_0 += x * b0; s4_1 += x * b1; }
        { const float x = from_a[720]; s5_0 += x * b0; s5_1 += x * b1; }
        { const float x = from_a[864]; s6_0 += x * b0; s6_1 += x * b1; }
        { const float x = from_a[1008]; s7_0 += x * b0; s7_1 += x * b1; }
        { const float x = from_a[1152]; s8_0 += x * b0; s8_1 += x * b1; }
        { const float x = from_a[1296]; s9_0 += x * b0; s9_1 += x * b1; }
        from_a += 1;
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
      *(__local float16*)(sums + 256) = s8_0; *(__local float16*)(sums + 272) = s8_1;
      *(__local float16*)(sums + 288) = s9_0; *(__local float16*)(sums + 304) = s9_1;
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int r0 = (uint)(row0 + r) / 25;
    const int r1 = (uint)(row0 + r) / 5 % 5;
    const int r2 = (uint)(row0 + r) % 5;
    for (int c = 0; c < cols; c += 16) {
      const int c0 = (uint)(col0 + c) / 16;
      const float16 acc = *(__local float16*)(tile + r * 32 + c);
      const float16 v1_1 = *(__global const float16*)(t3 + 16 * c0);
      const float16 v1_2 = (acc + v1_1);
      const float16 v1_3 = (v1_2 * ((float16)(2.0f)));
      *(__global float16*)(t0 + 800 * r0 + 160 * r1 + 32 * r2 + 16 * c0) = v1_3;
    }
  }
}
