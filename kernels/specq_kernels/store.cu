// Quantize K and V of new tokens and scatter them into pages: the 8-bit formats of store.py, bit for bit.
//
// A thread holds 8 neighbouring elements of K and of V of one (token, head); D / 8 threads share a row and reduce over it by
// shuffles. Quotients take one correctly rounded reciprocal per scale and are corrected by their remainder (Markstein, IBM
// J. Res. Dev. 34, 1990), which gives the bits of a division for finite values and scales of ordinary magnitude; others are
// divided.
//
// Compiled with -DCODE -DK_KIND -DV_KIND -DD (64, 128 or 256) -DPAGE.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "formats.cuh"

constexpr int LANES = D / 8, THREADS = 256;
constexpr float MAX = CODE == E4M3 ? 448.0f : CODE == E5M2 ? 57344.0f : CODE == INT8 ? 127.0f : 255.0f;

struct Args {
  const uint16_t *k, *v;  // bf16
  int64_t k_token, k_head, v_token, v_head;
  const int64_t* slots;
  uint8_t *k_pages, *v_pages;
  float *k_scale, *v_scale, *k_low, *v_low;
  const float *k_static, *v_static;
  int32_t tokens, heads;
};

__device__ __forceinline__ void unpack(uint4 raw, float (&x)[8]) {
  const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
}
// Largest magnitude of 8 elements, as the bits of a bf16: magnitudes order as their bits do, infinity and NaN last.
__device__ __forceinline__ uint32_t magnitude(uint4 raw) {
  const uint32_t m = 0x7FFF7FFFu;
  const uint32_t two = __vmaxu2(__vmaxu2(raw.x & m, raw.y & m), __vmaxu2(raw.z & m, raw.w & m));
  return max(two & 0xFFFFu, two >> 16);
}
template <typename T, typename F>
__device__ __forceinline__ T over_row(T x, F f) {
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) x = f(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
__device__ __forceinline__ bool ordinary(float s) { return s > 1e-25f && s < 1e25f; }
__device__ __forceinline__ float quotient(float x, float s, float reciprocal) {
  const float q = x * reciprocal, r = fmaf(fmaf(-q, s, x), reciprocal, q);
  return CODE == E4M3 || CODE == E5M2 ? copysignf(r, x) : r;  // the correction loses the sign of -0
}
__device__ __noinline__ float divided(float x, float s) { return __fdiv_rn(x, s); }
// Eight quotients as codes: to nearest even, saturating. SAFE quotients are finite and in range already.
template <bool SAFE>
__device__ __forceinline__ uint2 encode(const float (&q)[8]) {
  uint32_t w[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float* x = &q[4 * h];
    if constexpr (CODE == E4M3 || CODE == E5M2) {
      uint16_t lo, hi;  // the conversion saturates
      if constexpr (CODE == E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x[3]), "f"(x[2]));
      } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x[3]), "f"(x[2]));
      }
      w[h] = lo | (uint32_t)hi << 16;
    } else {
      uint32_t i[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if constexpr (SAFE)
          i[e] = __float_as_uint(x[e] + 12582912.0f);  // 1.5 * 2^23, whose unit in the last place is 1
        else
          i[e] = (uint32_t)min(max(__float2int_rn(x[e]), CODE == INT8 ? -127 : 0), (int)MAX);  // NaN gives 0
      }
      w[h] = __byte_perm(__byte_perm(i[0], i[1], 0x0040), __byte_perm(i[2], i[3], 0x0040), 0x5410);
    }
  }
  return make_uint2(w[0], w[1]);
}
template <int KIND>
__device__ __forceinline__ void put(uint4 raw, const float* fixed, int lane, int64_t row, uint8_t* pages, float* scales,
                                    float* lows, bool live) {
  constexpr bool STATIC = KIND == TENSOR || KIND == CHANNEL, ASYM = KIND == TOKEN_HEAD_ASYM;
  constexpr int SCALES = KIND == CHANNEL ? 8 : 1;
  float x[8], q[8], s[SCALES], low = 0.0f;
  unpack(raw, x);
  uint32_t most = magnitude(raw);
  if (!STATIC) most = over_row(most, [](uint32_t a, uint32_t b) { return max(a, b); });
  bool fast = most < 0x5300u;  // below 2^39: no quotient overflows
  if constexpr (STATIC) {
#pragma unroll
    for (int i = 0; i < SCALES; i++) s[i] = fixed[8 * lane + i], fast &= ordinary(s[i]);
  } else {
    float span = __uint_as_float(most << 16);
    if constexpr (ASYM) {
      float high = x[0];
      low = x[0];
#pragma unroll
      for (int i = 1; i < 8; i++) high = fmaxf(high, x[i]), low = fminf(low, x[i]);
      high = over_row(high, fmaxf), low = over_row(low, fminf);
      if (most > 0x7F80u) high = low = NAN;
      span = high - low;
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] -= low;
    }
    s[0] = __fdiv_rn(span, MAX);
    if (s[0] == 0.0f) s[0] = 1.0f;
    fast &= ordinary(s[0]);
    if (live && lane == 0) {
      scales[row] = s[0];
      if (ASYM) lows[row] = low;
    }
  }
  uint2 codes;
  if (fast) {
    float reciprocal[SCALES];
#pragma unroll
    for (int i = 0; i < SCALES; i++) reciprocal[i] = __frcp_rn(s[i]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      q[i] = quotient(x[i], s[i % SCALES], reciprocal[i % SCALES]);
      if (STATIC && CODE == INT8) q[i] = fminf(fmaxf(q[i], -127.0f), 127.0f);
    }
    codes = encode<true>(q);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = divided(x[i], s[i % SCALES]);
    codes = encode<false>(q);
  }
  if (live) *reinterpret_cast<uint2*>(pages + row * D + 8 * lane) = codes;
}

extern "C" __global__ void __launch_bounds__(THREADS) store(const __grid_constant__ Args a) {
  const int at = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES, head = blockIdx.y;
  const int token = min(at, a.tokens - 1);
  const int64_t slot = a.slots[token];
  const uint4 k = *reinterpret_cast<const uint4*>(a.k + token * a.k_token + head * a.k_head + 8 * lane);
  const uint4 v = *reinterpret_cast<const uint4*>(a.v + token * a.v_token + head * a.v_head + 8 * lane);
  const bool live = at < a.tokens && slot >= 0;
  const int64_t row = ((uint64_t)slot / PAGE * a.heads + head) * PAGE + (uint64_t)slot % PAGE;
  put<K_KIND>(k, a.k_static + head * D, lane, row, a.k_pages, a.k_scale, a.k_low, live);
  put<V_KIND>(v, a.v_static + head * D, lane, row, a.v_pages, a.v_scale, a.v_low, live);
}

// Returns a cudaError_t.
extern "C" int launch(const Args* args, void* stream) {
  constexpr int ROWS = THREADS / LANES;
  store<<<dim3((args->tokens + ROWS - 1) / ROWS, args->heads), THREADS, 0, (cudaStream_t)stream>>>(*args);
  return cudaGetLastError();
}
