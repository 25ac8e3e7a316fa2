
__attribute__((reqd_work_group_size(64, 1, 1))) __kernel void rows_7592112fc0(__global float* t0, __global const float* t1, const int n0, const int n1, const int n2) {
  __local float s0_s[64];
  __local float s1_s[64];
  const int m_k0 = get_local_id(0);
  const int member = m_k0;
  const int slot = member;
  const int g_r0 = get_group_id(0);
  const int r0 = g_r0;

  float4 s0_l = (float4)((-INFINITY));
  float s0_t = (-INFINITY);
  for (int k0 = m_k0; k0 < n0; k0 += 64) {
    // loading slot
    const float4 v1_1 = *(__global const float4*)(t1 + 4 * k0 + n1 * r0);
    s0_l = ((v1_1 > s0_l) | (v1_1 != v1_1)) ? v1_1 : s0_l;
  }
  const float2 s0_a2 = (float2)(s0_l.s0, s0_l.s1);
  const float2 s0_b2 = (float2)(s0_l.s2, s0_l.s3);
  const float2 s0_2 = ((s0_b2 > s0_a2) | (s0_b2 != s0_b2)) ? s0_b2 : s0_a2;
  const float s0_a1 = s0_2.s0;
  const float s0_b1 = s0_2.s1;
  const float s0_1 = ((s0_b1 > s0_a1) | (s0_b1 != s0_b1)) ? s0_b1 : s0_a1;
  float s0 = ((s0_t > s0_1) | (s0_t != s0_t)) ? s0_t : s0_1;
  s0_s[slot] = s0;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int span = 32; span > 0; span >>= 1) {
    if (member < span) {
      s0_s[slot] = ((s0_s[slot + span] > s0_s[slot]) | (s0_s[slot + span] != s0_s[slot + span])) ? s0_s[slot + span] : s0_s[slot];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  s0 = s0_s[slot - member];
  float4 s1_l = (float4)(0.0f);
  float s1_t = 0.0f;
  for (int k0 = m_k0; k0 < n0; k0 += 64) {
    // loading slot
    const float4 v2_1 = *(__global const float4*)(t1 + 4 * k0 + n1 * r0);
    const float4 v2_2 = (v2_1 - ((float4)(s0)));
    const float4 v2_3 = exp(v2_2);
    s1_l = s1_l + v2_3;
  }
  const float2 s1_a2 = (float2)(s1_l.s0, s1_l.s1);
  const float2 s1_b2 = (float2)(s1_l.s2, s1_l.s3);
  const float2 s1_2 = s1_a2 + s1_b2;
  const float s1_a1 = s1_2.s0;
  const float s1_b1 = s1_2.s1;
  const float s1_1 = s1_a1 + s1_b1;
  float s1 = s1_1 + s1_t;
  s1_s[slot] = s1;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int span = 32; span > 0; span >>= 1) {
    if (member < span) {
      s1_s[slot] = s1_s[slot] + s1_s[slot + span];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  s1 = s1_s[slot - member];
  for (int k0 = m_k0; k0 < n0; k0 += 64) {
    // loading slot
    const float4 v3_1 = *(__global const float4*)(t1 + 4 * k0 + n1 * r0);
    const float4 v3_2 = (v3_1 - ((float4)(s0)));
    const float4 v3_3 = exp(v3_2);
    const float4 v3_4 = (v3_3 / ((float4)(s1)));
    *(__global float4*)(t0 + 4 * k0 + n2 * r0) = v3_4;
  }
}
