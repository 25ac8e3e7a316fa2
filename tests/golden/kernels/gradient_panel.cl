__attribute__((reqd_work_group_size(1, 1, 1))) __kernel void contraction_panel_f5ee95ecbe(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2) {
  __local float a_block[1920] __attribute__((aligned(128)));
  __local float b_block[4096] __attribute__((aligned(128)));
  __local float tile[1920] __attribute__((aligned(128)));
  const int row0 = get_group_id(1) * 30, col0 = get_group_id(0) * 64;
  const int rows = min(30, 50 - row0), cols = min(64, 128 - col0);
  const int batch = get_group_id(2) / 1, part = get_group_id(2) % 1;
  const int first = part * 1, last = min(first + 1, 1);
  for (int chunk = first; chunk < last; ++chunk) {
    const int outer = chunk * 32, outer_end = min(outer + 32, 32);
    const int inner = 0, inner_end = 2;
    const int c0 = (uint)(col0) / 64;
    const int c1 = (uint)(col0) / 32 % 2;
    const int c2 = (uint)(col0) % 32;
    int depth = 0;
    for (int k0 = 0; k0 < 16; ++k0)
    for (int k1 = 0; k1 < 2; ++k1) {
      const int v2_1 = (2 * k1 + c0 < 3);
      const int v2_2 = (v2_1 ? 1 : 0);
      if (!v2_2) continue;
      depth += inner_end - inner;
    }
    for (int r = 0; r < rows; r += 1) {
      const int r0 = (uint)(row0 + r) / 25;
      const int r1 = (uint)(row0 + r) / 5 % 5;
      const int r2 = (uint)(row0 + r) % 5;
      __local float* to = a_block + r * 64;
      for (int k0 = 0; k0 < 16; ++k0)
      for (int k1 = 0; k1 < 2; ++k1) {
        const int v2_1 = (2 * k1 + c0 < 3);
        const int v2_2 = (v2_1 ? 1 : 0);
        if (!v2_2) continue;
        for (int q = inner; q < inner_end; q += 2, to += 2) {
          const int k2 = (uint)(q) / 2;
          const int v3_1 = (-k1 + r1 >= 0);
          const float v3_2 = t1[(v3_1 ? 50 * k0 + 25 * r0 - 5 * k1 + 5 * r1 - 2 * k2 + r2 : 0)];
          const float v3_3 = (v3_1 ? v3_2 : 0.0f);
          const int v3_4 = (-k1 + r1 >= 0 && -2 * k2 + r2 - 1 >= 0);
          const float v3_5 = t1[(v3_4 ? 50 * k0 + 25 * r0 - 5 * k1 + 5 * r1 - 2 * k2 + r2 - 1 : 0)];
          const float v3_6 = (v3_4 ? v3_5 : 0.0f);
          const float2 v3_7 = (float2)(v3_3, v3_6);
          *(__local float2*)to = v3_7;
        }
      }
    }
    __local float* to = b_block;
    for (int k0 = 0; k0 < 16; ++k0)
    for (int k1 = 0; k1 < 2; ++k1) {
      const int v2_1 = (2 * k1 + c0 < 3);
      const int v2_2 = (v2_1 ? 1 : 0);
      if (!v2_2) continue;
      for (int q = inner; q < inner_end; ++q, to += 32) {
        const int k2 = (uint)(q);
        for (int c = 0; c < cols; c += 16) {
          const int c0 = (uint)(col0 + c) / 64;
          const int c1 = (uint)(col0 + c) / 32 % 2;
          const int c2 = (uint)(col0 + c) / 16 % 2;
          const int v4_1 = (2 * k1 + c0 < 3 && 2 * k2 + c1 < 3);
          const float16 v4_2 = *(__global const float16*)(t2 + (v4_1 ? 3072 * k1 + 1536 * c0 + 1024 * k2 + 512 * c1 + 32 * k0 + 16 * c2 : 0));
          const float16 v4_3 = (v4_1 ? v4_2 : ((float16)(0.0f)));
          *(__local float16*)(to + c / 32 * 2048 + c % 32) = v4_3;
        }
      }
    }
    for (int c = 0; c < cols; c += 32)
    for (int r = 0; r < rows; r += 10) {
      // loading slot
      __local const float* from_a = a_block + r * 64;
      __local const float* from_b = b_block + c * 64;
      __local float* sums = tile + r * 64 + c;
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
      *(__local float16*)(sums + 0) = s0_0; *(__local float16*)(sums + 16) = s0_1;
      *(__local float16*)(sums + 64) = s1_0; *(__local float16*)(sums + 80) = s1_1;
      *(__local float16*)(sums + 128) = s2_0; *(__local float16*)(sums + 144) = s2_1;
      *(__local float16*)(sums + 192) = s3_0; *(__local float16*)(sums + 208) = s3_1;
      *(__local float16*)(sums + 256) = s4_0; *(__local float16*)(sums + 272) = s4_1;
      *(__local float16*)(sums + 320) = s5_0; *(__local float16*)(sums + 336) = s5_1;
      *(__local float16*)(sums + 384) = s6_0; *(__local float16*)(sums + 400) = s6_1;
      *(__local float16*)(sums + 448) = s7_0; *(__local float16*)(sums + 464) = s7_1;
      *(__local float16*)(sums + 512) = s8_0; *(__local float16*)(sums + 528) = s8_1;
      *(__local float16*)(sums + 576) = s9_0; *(__local float16*)(sums + 592) = s9_1;
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int r0 = (uint)(row0 + r) / 25;
    const int r1 = (uint)(row0 + r) / 5 % 5;
    const int r2 = (uint)(row0 + r) % 5;
    for (int c = 0; c < cols; c += 16) {
      const int c0 = (uint)(col0 + c) / 64;
      const int c1 = (uint)(col0 + c) / 32 % 2;
      const int c2 = (uint)(col0 + c) / 16 % 2;
      const float16 acc = *(__local float16*)(tile + r * 64 + c);
      *(__global float16*)(t0 + 3200 * r0 + 640 * r1 + 320 * c0 + 64 * r2 + 32 * c1 + 16 * c2) = acc;
    }
  }
}


__kernel void pointwise_5099c626df(__global float* restrict t0, __global const float* restrict t1) {
  const int d0 = get_global_id(2);
  const int b1 = get_global_id(1) * 2;
  const int e1 = min(b1 + 2, 9);
  const int b0 = get_global_id(0) * 18;
  const int e0 = min(b0 + 18, 18);

  for (int i1 = b1; i1 < e1; ++i1) {
    const int d1 = i1;
    for (int i0 = b0; i0 < e0; ++i0) {
      const int d2 = i0;
      const float16 v1 = *(__global const float16*)(t1 + 3200 * d0 + 320 * d1 + 16 * d2 + 352);
      *(__global float16*)(t0 + 2592 * d0 + 288 * d1 + 16 * d2) = v1;
    }
  }
}
