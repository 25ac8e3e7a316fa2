
__attribute__((reqd_work_group_size(64, 1, 1))) __kernel void contraction_local_4ba1686ed6(__global float* restrict t0, __global const float* restrict t1, __global const float* restrict t2, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8, const int n9, const int n10, const int n11, const int n12, const int n13, const int n14, const int n15, const int n16, const int n17, const int n18, const int n19, const int n20, const int n21, const int n22, const int n23, const int n24, const int n25, const int n26, const int n27, const int n28) {
  __local float a_block[2048] __attribute__((aligned(32)));
  __local float b_block[2048] __attribute__((aligned(32)));
  __local int points[2][3][16];
  const int lid = get_local_id(0), part = get_group_id(1);
  const int number_over = (uint)((int)get_group_id(0)) / 2;
  const int number = (int)get_group_id(0) - 2 * number_over;
  const int batch = number_over;
  const int within_over = (uint)(number) / 2;
  const int within = number - 2 * within_over;
  const int band = within_over;
  const int height = min(1, n0 - band * 1);
  const int row0 = (band * 1 + within % height) * 64, col0 = within / height * 64;
  const int first = part * n1, last = min(first + n1, n2);
  const int warp = lid / 32, lane = lid % 32;
  const int tx = (warp % 1 * 8 + lane % 8) * 4;
  const int ty = (warp / 1 * 4 + lane / 8) * 4;
  float a_next[16];
  int a_r0[16], a_r1[16], a_r2[16];
  #pragma unroll
  for (int s = 0; s < 16; ++s) {
    const int item = lid + s * 64, x = item % 64 * 1;
    const int r2_over = (int)(mul_hi((uint)(min(row0 + x, 49)), (uint)n3) >> n4);
    const int r2 = (min(row0 + x, 49)) - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    a_r0[s] = r0;
    a_r1[s] = r1;
    a_r2[s] = r2;
  }
  float4 b_next[4];
  int b_c0[4], b_c1[4], b_c2[4];
  #pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int item = lid + s * 64, x = item % 16 * 4;
    const int c2_over = (int)(mul_hi((uint)((uint)(min(col0 + x, 124)) / 4), (uint)n9) >> n10);
    const int c2 = ((uint)(min(col0 + x, 124)) / 4) - n11 * c2_over;
    const int c1_over = (uint)(c2_over) / 2;
    const int c1 = c2_over - 2 * c1_over;
    const int c0 = c1_over;
    b_c0[s] = c0;
    b_c1[s] = c1;
    b_c2[s] = c2;
  }
  float4 sums[8][2];
  #pragma unroll
  for (int i = 0; i < 8; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) sums[i][j] = 0;
  int chunk = first;
  if (lid < 16) {
    const int within = min((chunk) * 16 + lid, n12);
    const int k2_over = (uint)(within) / 2;
    const int k2 = within - 2 * k2_over;
    const int k1_over = (uint)(k2_over) / 2;
    const int k1 = k2_over - 2 * k1_over;
    const int k0 = k1_over;
    points[(chunk) & 1][0][lid] = k0;
    points[(chunk) & 1][1][lid] = k1;
    points[(chunk) & 1][2][lid] = k2;
  }
  if (lid < 16) {
    const int within = min((chunk + 1) * 16 + lid, n12);
    const int k2_over = (uint)(within) / 2;
    const int k2 = within - 2 * k2_over;
    const int k1_over = (uint)(k2_over) / 2;
    const int k1 = k2_over - 2 * k1_over;
    const int k0 = k1_over;
    points[(chunk + 1) & 1][0][lid] = k0;
    points[(chunk + 1) & 1][1][lid] = k1;
    points[(chunk + 1) & 1][2][lid] = k2;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if (chunk < last) {
    #pragma unroll
    for (int s = 0; s < 16; ++s) {
      const int item = lid + s * 64, k = item / 64;
      const int r0 = a_r0[s];
      const int r1 = a_r1[s];
      const int r2 = a_r2[s];
      {
        const int k0 = points[chunk & 1][0][k];
        const int k1 = points[chunk & 1][1][k];
        const int k2 = points[chunk & 1][2][k];
        const int v1_1 = (-k1 + r1 >= 0 && -k2 + r2 >= 0);
        const float v1_2 = t1[(v1_1 ? n13 * k0 - n14 * k1 - k2 + n15 * r0 + n16 * r1 + r2 : 0)];
        const float v1_3 = (v1_1 ? v1_2 : 0.0f);
        a_next[s] = v1_3;
      }
    }
    #pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int item = lid + s * 64, k = item / 16;
      const int c0 = b_c0[s];
      const int c1 = b_c1[s];
      const int c2 = b_c2[s];
      {
        const int k0 = points[chunk & 1][0][k];
        const int k1 = points[chunk & 1][1][k];
        const int k2 = points[chunk & 1][2][k];
        const int v2_1 = (c0 + 2 * k1 < 3 && c1 + 2 * k2 < 3);
        const float4 v2_2 = *(__global const float4*)(t2 + (v2_1 ? n17 * c0 + n18 * c1 + 4 * c2 + n19 * k0 + n20 * k1 + n21 * k2 : 0));
        const float4 v2_3 = (v2_1 ? v2_2 : ((float4)(0.0f)));
        b_next[s] = v2_3;
      }
    }
    #pragma unroll
    for (int s = 0; s < 16; ++s) {
      const int item = lid + s * 64;
      __local float* to = a_block + 0 * 1024 + item / 64 * 64 + item % 64 * 1;
      *(__local float*)to = a_next[s];
    }
    #pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int item = lid + s * 64;
      __local float* to = b_block + 0 * 1024 + item / 16 * 64 + item % 16 * 4;
      *(__local float4*)to = b_next[s];
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  int now = 0;
  for (int next; chunk < last; chunk = next) {
    next = chunk + 1;
    if (next < last) {
      #pragma unroll
      for (int s = 0; s < 16; ++s) {
        const int item = lid + s * 64, k = item / 64;
        const int r0 = a_r0[s];
        const int r1 = a_r1[s];
        const int r2 = a_r2[s];
        {
          const int k0 = points[next & 1][0][k];
          const int k1 = points[next & 1][1][k];
          const int k2 = points[next & 1][2][k];
          const int v1_1 = (-k1 + r1 >= 0 && -k2 + r2 >= 0);
          const float v1_2 = t1[(v1_1 ? n13 * k0 - n14 * k1 - k2 + n15 * r0 + n16 * r1 + r2 : 0)];
          const float v1_3 = (v1_1 ? v1_2 : 0.0f);
          a_next[s] = v1_3;
        }
      }
      #pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int item = lid + s * 64, k = item / 16;
        const int c0 = b_c0[s];
        const int c1 = b_c1[s];
        const int c2 = b_c2[s];
        {
          const int k0 = points[next & 1][0][k];
          const int k1 = points[next & 1][1][k];
          const int k2 = points[next & 1][2][k];
          const int v2_1 = (c0 + 2 * k1 < 3 && c1 + 2 * k2 < 3);
          const float4 v2_2 = *(__global const float4*)(t2 + (v2_1 ? n17 * c0 + n18 * c1 + 4 * c2 + n19 * k0 + n20 * k1 + n21 * k2 : 0));
          const float4 v2_3 = (v2_1 ? v2_2 : ((float4)(0.0f)));
          b_next[s] = v2_3;
        }
      }
    }
    if (lid < 16) {
      const int within = min((next + 1) * 16 + lid, n12);
      const int k2_over = (uint)(within) / 2;
      const int k2 = within - 2 * k2_over;
      const int k1_over = (uint)(k2_over) / 2;
      const int k1 = k2_over - 2 * k1_over;
      const int k0 = k1_over;
      points[(next + 1) & 1][0][lid] = k0;
      points[(next + 1) & 1][1][lid] = k1;
      points[(next + 1) & 1][2][lid] = k2;
    }
    // loading slot
    __local const float* from_a = a_block + now * 1024 + ty;
    __local const float* from_b = b_block + now * 1024 + tx;
    #pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float4 x0 = *(__local const float4*)(from_a + k * 64 + 0);
      const float4 x1 = *(__local const float4*)(from_a + k * 64 + 32);
      const float4 y0 = *(__local const float4*)(from_b + k * 64 + 0);
      const float4 y1 = *(__local const float4*)(from_b + k * 64 + 32);
      sums[0][0] += x0.s0 * y0; sums[0][1] += x0.s0 * y1;
      sums[1][0] += x0.s1 * y0; sums[1][1] += x0.s1 * y1;
      sums[2][0] += x0.s2 * y0; sums[2][1] += x0.s2 * y1;
      sums[3][0] += x0.s3 * y0; sums[3][1] += x0.s3 * y1;
      sums[4][0] += x1.s0 * y0; sums[4][1] += x1.s0 * y1;
      sums[5][0] += x1.s1 * y0; sums[5][1] += x1.s1 * y1;
      sums[6][0] += x1.s2 * y0; sums[6][1] += x1.s2 * y1;
      sums[7][0] += x1.s3 * y0; sums[7][1] += x1.s3 * y1;
    }
    now ^= 1;
    if (next < last) {
      #pragma unroll
      for (int s = 0; s < 16; ++s) {
        const int item = lid + s * 64;
        __local float* to = a_block + now * 1024 + item / 64 * 64 + item % 64 * 1;
        *(__local float*)to = a_next[s];
      }
      #pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int item = lid + s * 64;
        __local float* to = b_block + now * 1024 + item / 16 * 64 + item % 16 * 4;
        *(__local float4*)to = b_next[s];
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = row0 + i / 4 * 32 + ty + i % 4;
    if (row >= n22) continue;
    const int r2_over = (int)(mul_hi((uint)(row), (uint)n3) >> n4);
    const int r2 = row - n5 * r2_over;
    const int r1_over = (int)(mul_hi((uint)(r2_over), (uint)n6) >> n7);
    const int r1 = r2_over - n8 * r1_over;
    const int r0 = r1_over;
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 four = sums[i][j];
      {
        const int col = col0 + j * 32 + tx;
        const float4 acc = four;
        if (col < n23) {
          const int c2_over = (int)(mul_hi((uint)((uint)(col) / 4), (uint)n9) >> n10);
          const int c2 = ((uint)(col) / 4) - n11 * c2_over;
          const int c1_over = (uint)(c2_over) / 2;
          const int c1 = c2_over - 2 * c1_over;
          const int c0 = c1_over;
          *(__global float4*)(t0 + n24 * c0 + n25 * c1 + 4 * c2 + n26 * r0 + n27 * r1 + n28 * r2) = acc;
        }
      }
    }
  }
}


__kernel void pointwise_fd460a6656(__global float* restrict t0, __global const float* restrict t1, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5) {
  if (get_global_id(0) >= n0) return;
  const int d2 = get_global_id(0);
  const int d1 = get_global_id(1);
  const int d0 = get_global_id(2);

  const float4 v1 = *(__global const float4*)(t1 + n1 * d0 + n2 * d1 + 4 * d2 + n3);
  *(__global float4*)(t0 + n4 * d0 + n5 * d1 + 4 * d2) = v1;
}
