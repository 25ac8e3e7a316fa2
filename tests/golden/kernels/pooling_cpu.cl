
#if defined(__x86_64__) || defined(__aarch64__) || defined(__riscv)
typedef float2 te_float2 __attribute__((aligned(sizeof(float))));
#define te_load_float2(p) (*(__global const te_float2*)(p))
#define te_store_float2(v, p) (*(__global te_float2*)(p) = (v))
#else
#define te_load_float2(p) vload2(0, p)
#define te_store_float2(v, p) vstore2(v, 0, p)
#endif
__kernel void rows_22a77ac174(__global float* restrict t0, __global const float* restrict t1, const int n0, const int n1, const int n2, const int n3, const int n4, const int n5, const int n6, const int n7, const int n8, const int n9, const int n10, const int n11) {
  const int b2 = get_global_id(2) * n0;
  const int e2 = min(b2 + n0, n1);
  const int b1 = get_global_id(1) * n2;
  const int e1 = min(b1 + n2, n3);
  const int b0 = get_global_id(0) * n4;
  const int e0 = min(b0 + n4, n5);

  for (int i2 = b2; i2 < e2; ++i2) {
    const int r0 = i2;
    for (int i1 = b1; i1 < e1; ++i1) {
      const int r1 = i1;
      for (int i0 = b0; i0 < e0; ++i0) {
        const int r2 = i0;
        float2 s0_l = (float2)(0.0f);
        float s0_t = 0.0f;
        #pragma unroll
  for (int k0 = 0; k0 < 3; ++k0) {
          #pragma unroll
  for (int k1 = 0; k1 < 1; ++k1) {
            const float2 v1_1 = te_load_float2(t1 + n6 * k0 + 2 * k1 + n7 * r0 + n8 * r1 + 2 * r2);
            s0_l = s0_l + v1_1;
          }
          for (int k1 = n9; k1 < n10; ++k1) {
            const float v2_1 = t1[n6 * k0 + k1 + n7 * r0 + n8 * r1 + 2 * r2];
            s0_t = s0_t + v2_1;
          }
        }
        const float s0_a1 = s0_l.s0;
        const float s0_b1 = s0_l.s1;
        const float s0_1 = s0_a1 + s0_b1;
        float s0 = s0_1 + s0_t;
        const float v3_1 = (s0 / 9.0f);
        t0[n11 * r0 + 4 * r1 + r2] = v3_1;
      }
    }
  }
}
