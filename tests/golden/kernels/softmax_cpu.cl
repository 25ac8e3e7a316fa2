
#if defined(__x86_64__) || defined(__aarch64__) || defined(__riscv)
typedef float16 te_float16 __attribute__((aligned(sizeof(float))));
#define te_load_float16(p) (*(__global const te_float16*)(p))
#define te_store_float16(v, p) (*(__global te_float16*)(p) = (v))
#else
#define te_load_float16(p) vload16(0, p)
#define te_store_float16(v, p) vstore16(v, 0, p)
#endif
__kernel void rows_84d272413f(__global float* t0, __global const float* t1, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6) {
  const int b0 = get_global_id(0) * n0;
  const int e0 = min(b0 + n0, n1);

  for (int i0 = b0; i0 < e0; ++i0) {
    const int r0 = i0;
    float16 s0_l = (float16)((-INFINITY));
    float s0_t = (-INFINITY);
    for (int k0 = 0; k0 < n2; ++k0) {
      // loading slot
      const float16 v1_1 = te_load_float16(t1 + 16 * k0 + n3 * r0);
      s0_l = ((v1_1 > s0_l) | (v1_1 != v1_1)) ? v1_1 : s0_l;
    }
    for (int k0 = n4; k0 < n5; ++k0) {
      const float v2_1 = t1[k0 + n3 * r0];
      s0_t = ((v2_1 > s0_t) | (v2_1 != v2_1)) ? v2_1 : s0_t;
    }
    const float8 s0_a8 = (float8)(s0_l.s0, s0_l.s1, s0_l.s2, s0_l.s3, s0_l.s4, s0_l.s5, s0_l.s6, s0_l.s7);
    const float8 s0_b8 = (float8)(s0_l.s8, s0_l.s9, s0_l.sa, s0_l.sb, s0_l.sc, s0_l.sd, s0_l.se, s0_l.sf);
    const float8 s0_8 = ((s0_b8 > s0_a8) | (s0_b8 != s0_b8)) ? s0_b8 : s0_a8;
    const float4 s0_a4 = (float4)(s0_8.s0, s0_8.s1, s0_8.s2, s0_8.s3);
    const float4 s0_b4 = (float4)(s0_8.s4, s0_8.s5, s0_8.s6, s0_8.s7);
    const float4 s0_4 = ((s0_b4 > s0_a4) | (s0_b4 != s0_b4)) ? s0_b4 : s0_a4;
    const float2 s0_a2 = (float2)(s0_4.s0, s0_4.s1);
    const float2 s0_b2 = (float2)(s0_4.s2, s0_4.s3);
    const float2 s0_2 = ((s0_b2 > s0_a2) | (s0_b2 != s0_b2)) ? s0_b2 : s0_a2;
    const float s0_a1 = s0_2.s0;
    const float s0_b1 = s0_2.s1;
    const float s0_1 = ((s0_b1 > s0_a1) | (s0_b1 != s0_b1)) ? s0_b1 : s0_a1;
    float s0 = ((s0_t > s0_1) | (s0_t != s0_t)) ? s0_t : s0_1;
    float16 s1_l = (float16)(0.0f);
    float s1_t = 0.0f;
    for (int k0 = 0; k0 < n2; ++k0) {
      // loading slot
      const float16 v3_1 = te_load_float16(t1 + 16 * k0 + n3 * r0);
      const float16 v3_2 = (v3_1 - ((float16)(s0)));
      const float16 v3_3 = exp(v3_2);
      s1_l = s1_l + v3_3;
    }
    for (int k0 = n4; k0 < n5; ++k0) {
      const float v4_1 = t1[k0 + n3 * r0];
      const float v4_2 = (v4_1 - s0);
      const float v4_3 = exp(v4_2);
      s1_t = s1_t + v4_3;
    }
    const float8 s1_a8 = (float8)(s1_l.s0, s1_l.s1, s1_l.s2, s1_l.s3, s1_l.s4, s1_l.s5, s1_l.s6, s1_l.s7);
    const float8 s1_b8 = (float8)(s1_l.s8, s1_l.s9, s1_l.sa, s1_l.sb, s1_l.sc, s1_l.sd, s1_l.se, s1_l.sf);
    const float8 s1_8 = s1_a8 + s1_b8;
    const float4 s1_a4 = (float4)(s1_8.s0, s1_8.s1, s1_8.s2, s1_8.s3);
    const float4 s1_b4 = (float4)(s1_8.s4, s1_8.s5, s1_8.s6, s1_8.s7);
    const float4 s1_4 = s1_a4 + s1_b4;
    const float2 s1_a2 = (float2)(s1_4.s0, s1_4.s1);
    const float2 s1_b2 = (float2)(s1_4.s2, s1_4.s3);
    const float2 s1_2 = s1_a2 + s1_b2;
    const float s1_a1 = s1_2.s0;
    const float s1_b1 = s1_2.s1;
    const float s1_1 = s1_a1 + s1_b1;
    float s1 = s1_1 + s1_t;
    for (int k0 = 0; k0 < n2; ++k0) {
      // loading slot
      const float16 v5_1 = te_load_float16(t1 + 16 * k0 + n3 * r0);
      const float16 v5_2 = (v5_1 - ((float16)(s0)));
      const float16 v5_3 = exp(v5_2);
      const float16 v5_4 = (v5_3 / ((float16)(s1)));
      te_store_float16(v5_4, t0 + 16 * k0 + n6 * r0);
    }
    for (int k0 = n4; k0 < n5; ++k0) {
      const float v6_1 = t1[k0 + n3 * r0];
      const float v6_2 = (v6_1 - s0);
      const float v6_3 = exp(v6_2);
      const float v6_4 = (v6_3 / s1);
      t0[k0 + n6 * r0] = v6_4;
    }
  }
}
