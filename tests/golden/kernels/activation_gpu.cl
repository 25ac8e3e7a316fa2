
__kernel void pointwise_5f7fd9debf(__global float* t0, __global const float* t1, __global const float* restrict t2, const int n0, const int n1, const int n2) {
  if (get_global_id(1) >= n0) return;
  const int d1 = get_global_id(0);
  const int d0 = get_global_id(1);

  const float4 v1 = *(__global const float4*)(t1 + n1 * d0 + 4 * d1);
  const float4 v2 = *(__global const float4*)(t2 + 4 * d1);
  const float4 v3 = (v1 + v2);
  const float4 v4 = (v3 * ((float4)(2.0f)));
  *(__global float4*)(t0 + n2 * d0 + 4 * d1) = v4;
}
