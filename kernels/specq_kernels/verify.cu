// Verify attention over quantized pages, for GPUs with warpgroup matrix instructions and clusters (compute capability 9.0).
//
// Tokens and head_dim are the matrix instructions' long side, the few query rows their short one: S^T = K Q^T and
// O^T = V^T P^T, so rows need padding to 8 only. K and V are the operands in registers: codes come from shared memory and are
// converted on the way, nothing dequantized is ever written back. In S^T the order of the contraction (head_dim) is free, so
// each thread of a quad takes 16-byte runs of a token's row and the query is permuted once to match; for O^T, ldmatrix
// transposes pairs of bytes, and even and odd columns of V become the two halves of an operand tile.
//
// A block (one warpgroup) takes ROWS (query, head) rows of one KV head over one chunk of tokens, its chunks are merged within
// a cluster over distributed shared memory in a fixed order. The running maximum of a row is raised only when a tile exceeds
// it by more than 2^SLACK, which the range of P allows: most tiles then rescale nothing. Every choice depends on a row's own
// tokens alone.
//
// Compiled once per format and shape, with -DCODE -DK_KIND -DV_KIND -DD -DROWS (a multiple of 8) -DGROUP (query heads per KV
// head) -DPAGE -DCLUSTER (chunks merged at once) -DQ_TYPE (0 bf16, 1 fp16, 2 float32) -DCAPPED (soft cap). attention.py
// holds the meaning of every argument,
// layout.py the numbering of CODE and the kinds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "formats.cuh"

#ifndef RING
#define RING 3
#endif
#ifndef TILE
#define TILE (D * (CODE == BF16 ? 2 : 1) <= 128 ? 128 : 64)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (ROWS <= 40 && D <= 128 ? 3 : 2)
#endif

constexpr bool STATIC_K = K_KIND == TENSOR || K_KIND == CHANNEL, STATIC_V = V_KIND == TENSOR || V_KIND == CHANNEL;
constexpr bool ASYM = K_KIND == TOKEN_HEAD_ASYM;
constexpr bool ROW_K = K_KIND == TOKEN_HEAD || ASYM, ROW_V = V_KIND == TOKEN_HEAD || ASYM;
constexpr int THREADS = 128, BYTES = CODE == BF16 ? 2 : 1, ROW = D * BYTES, PIECES = ROW / 16;
constexpr int BUFFER = TILE * ROW, GROUPS = TILE / 64, STEPS = D / 16, HALVES = D / 64, BLOCKS = ROWS / 8;
constexpr int RUN = 16 / BYTES;    // elements of one 16-byte piece
constexpr int OUT_ROW = D + 4;     // padded float row of the merge buffer
constexpr int Q_COLUMN = ROWS * 16 + 16;  // bytes of 8 columns of the query, padded
constexpr float LOG2E = 1.4426950408889634f, SLACK = 10.0f, V_SLACK = 16.0f;
#ifndef TOGETHER
#define TOGETHER 32
#endif
constexpr bool SEQUENTIAL = ROWS > TOGETHER;  // too few registers to convert K for one product while another runs
static_assert(ROW % 128 == 0, "rows must fill whole lines of shared memory");

// INT8 codes enter q K^T as 1152 + x, asymmetric ones as 1024 + x; the accumulators start at minus that times the row's sum
constexpr float K_BIAS = CODE == INT8 ? 1152.0f : CODE == UINT8 ? 1024.0f : 0.0f;

struct Args {
  const void* q;
  int64_t q_batch, q_token, q_head;
  const uint8_t *k, *v;
  const float *k_scale, *v_scale, *k_low, *v_low, *k_static, *v_static;
  const int32_t* table;
  int64_t table_row;
  const int32_t *context_lens, *query_lens;
  void* out;
  float *part, *lse;  // null where one cluster sees all of a row: out is final then
  int32_t rows_total, max_queries, heads, kv_heads, table_columns, window, chunk, blocks, spans;
  float scale, softcap;
};

template <bool USED, int N>
using Floats = float[USED ? N : 1];

struct Shared {
  // filled 16 bytes at a time
  alignas(16) Floats<ROW_K, TILE> k_scale[ROW_K ? 3 : 1];
  alignas(16) Floats<ROW_V, TILE> v_scale[ROW_V ? 3 : 1];
  alignas(16) Floats<ASYM, TILE> k_low[ASYM ? 3 : 1];
  alignas(16) Floats<ASYM, TILE> v_low[ASYM ? 3 : 1];
  float4 row[ROWS];  // unit of the scores, reference that exponents are relative to, limit above which it is raised
  float bias[ROWS], decay[ROWS];
  union {
    float top[ROWS][4];
    float sum[4][ROWS];
  };
  float v_top[4];
  Floats<ASYM, 4 * ROWS> shift;
  Floats<ASYM, ROWS> q_low;
  float row_top[ROWS], row_sum[ROWS], row_shift[ROWS];
};

constexpr int align(int bytes) { return (bytes + 127) / 128 * 128; }
constexpr int MERGE_BYTES = ROWS * OUT_ROW * 4, RING_BYTES = RING * BUFFER > MERGE_BYTES ? RING * BUFFER : MERGE_BYTES;
constexpr int Q_AT = align(RING_BYTES), P_AT = align(Q_AT + Q_COLUMN * D / 8), SHARED_AT = align(P_AT + ROWS * TILE * 2);
constexpr int BASE_AT = align(SHARED_AT + (int)sizeof(Shared));  // then one int64 per 16 tokens of the chunk

__device__ __forceinline__ uint32_t smem(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ int swizzle(int row) { return ((row & 1) << 2) | ((row >> 1) & 3); }
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// One matrix instruction: c[64 x ROWS] += a[64 x 16] b[16 x ROWS], a in registers, b in shared memory. Operand lists by ROWS:
#define N4(a, b, c, d) "%" #a ",%" #b ",%" #c ",%" #d
#define LIST_8 N4(0, 1, 2, 3)
#define LIST_16 LIST_8 "," N4(4, 5, 6, 7)
#define LIST_24 LIST_16 "," N4(8, 9, 10, 11)
#define LIST_32 LIST_24 "," N4(12, 13, 14, 15)
#define LIST_40 LIST_32 "," N4(16, 17, 18, 19)
#define LIST_48 LIST_40 "," N4(20, 21, 22, 23)
#define LIST_56 LIST_48 "," N4(24, 25, 26, 27)
#define LIST_64 LIST_56 "," N4(28, 29, 30, 31)
#define REST_8 "{" N4(4, 5, 6, 7) "}, %8, "
#define REST_16 "{" N4(8, 9, 10, 11) "}, %12, "
#define REST_24 "{" N4(12, 13, 14, 15) "}, %16, "
#define REST_32 "{" N4(16, 17, 18, 19) "}, %20, "
#define REST_40 "{" N4(20, 21, 22, 23) "}, %24, "
#define REST_48 "{" N4(24, 25, 26, 27) "}, %28, "
#define REST_56 "{" N4(28, 29, 30, 31) "}, %32, "
#define REST_64 "{" N4(32, 33, 34, 35) "}, %36, "
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C_8 C4(0)
#define C_16 C_8, C4(4)
#define C_24 C_16, C4(8)
#define C_32 C_24, C4(12)
#define C_40 C_32, C4(16)
#define C_48 C_40, C4(20)
#define C_56 C_48, C4(24)
#define C_64 C_56, C4(28)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define WGMMA(type, add, transposed)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" TEXT(ROWS) "k16.f32." type "." type " {" JOIN(LIST_, ROWS) "}, " \
               JOIN(REST_, ROWS) add ", 1, 1, " transposed ";"                                              \
               : JOIN(C_, ROWS) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool ADD, bool TRANSPOSED>
__device__ __forceinline__ void multiply(float (&c)[ROWS / 2], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (CODE == BF16) {
    if constexpr (TRANSPOSED) WGMMA("bf16", "1", "1");
    else if constexpr (ADD) WGMMA("bf16", "1", "0");
    else WGMMA("bf16", "0", "0");
  } else {
    if constexpr (TRANSPOSED) WGMMA("f16", "1", "1");
    else if constexpr (ADD) WGMMA("f16", "1", "0");
    else WGMMA("f16", "0", "0");
  }
}
// A matrix of 8 x 16-byte blocks in shared memory; `leading` and `stride` are the distances of neighbouring blocks in bytes.
__device__ __forceinline__ uint64_t matrix(uint32_t at, int leading, int stride) {
  return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32;
}
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ uint32_t pack(float x, float y) {
  uint32_t r;
  if constexpr (CODE == BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
__device__ __forceinline__ uint32_t half_minus(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
// Four codes -> two pairs of fp16, exactly. V (STRIDED) pairs bytes (0, 2) and (1, 3); K pairs (0, 1) and (2, 3), integers
// with K_BIAS still on them.
template <bool STRIDED>
__device__ __forceinline__ void decode4(uint32_t x, uint32_t& lo, uint32_t& hi) {
  if constexpr (CODE == E4M3) {
    if constexpr (STRIDED) x = __byte_perm(x, 0, 0x3120);
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(lo), "=r"(hi) : "r"(x));
  } else if constexpr (CODE == E5M2) {
    // e5m2 is the upper byte of fp16
    lo = __byte_perm(x, 0, STRIDED ? 0x2404 : 0x1404);
    hi = __byte_perm(x, 0, STRIDED ? 0x3414 : 0x3424);
  } else {
    // 0x6400 | u is 1024 + u in fp16
    if constexpr (CODE == INT8) x ^= 0x80808080u;
    const uint32_t zero = CODE == INT8 ? 0x64806480u : 0x64006400u;
    lo = __byte_perm(x, 0x64646464u, STRIDED ? 0x4240 : 0x4140);
    hi = __byte_perm(x, 0x64646464u, STRIDED ? 0x4341 : 0x4342);
    if constexpr (STRIDED) lo = half_minus(lo, zero), hi = half_minus(hi, zero);  // K's offset is in the accumulators
  }
}
// Four query elements as float32.
__device__ __forceinline__ void four(float4 q, float* x) { x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w; }
__device__ __forceinline__ void four(uint2 q, float* x) {
  if constexpr (Q_TYPE == 1) {
    const float2 lo = __half22float2(*reinterpret_cast<const __half2*>(&q.x));
    const float2 hi = __half22float2(*reinterpret_cast<const __half2*>(&q.y));
    x[0] = lo.x, x[1] = lo.y, x[2] = hi.x, x[3] = hi.y;
  } else {
    x[0] = __uint_as_float(q.x << 16), x[1] = __uint_as_float(q.x & 0xFFFF0000u);
    x[2] = __uint_as_float(q.y << 16), x[3] = __uint_as_float(q.y & 0xFFFF0000u);
  }
}
__device__ __forceinline__ float remote(uint32_t at, int rank) {
  float x;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a];}"
               : "=f"(x) : "r"(at), "r"(rank) : "memory");
  return x;
}
__device__ __forceinline__ float4 remote4(uint32_t at, int rank) {
  float4 x;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];}"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at), "r"(rank) : "memory");
  return x;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// for blocks that may not leave before the others have read; nothing is written for them
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(THREADS, BLOCKS_PER_SM) verify(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& sh = *reinterpret_cast<Shared*>(memory + SHARED_AT);
  int64_t* base = reinterpret_cast<int64_t*>(memory + BASE_AT);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x % CLUSTER;
  const int m_tile = blockIdx.y % a.blocks, pair = blockIdx.y / a.blocks;
  const int head = pair % a.kv_heads, batch = pair / a.kv_heads;
  const int first = m_tile * ROWS, chunk_start = blockIdx.x * a.chunk;

  // the query and the page ids are loaded before the lengths are known; those beyond a row's end are never used
  // (offsets within a sequence's queries, and of a page's head, fit 32 bits; those of tokens and bytes need 64)
  using Four = std::conditional_t<Q_TYPE == 2, float4, uint2>;
  const Four* const q_from = reinterpret_cast<const Four*>(a.q) + (batch * a.q_batch + head * GROUP * a.q_head) / 4 + lane;
  const int q_token = (int)a.q_token / 4, q_head = (int)a.q_head / 4;
  Four query[ROWS / 4][D / 128];
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    const int r = min(first + i * 4 + warp, a.max_queries * GROUP - 1);
#pragma unroll
    for (int c = 0; c < D / 128; c++) query[i][c] = q_from[r / GROUP * q_token + r % GROUP * q_head + c * 32];
  }
  for (int i = tid; i < a.chunk / 16; i += THREADS) {
    const int n = chunk_start + 16 * i, column = n / PAGE;
    const int page = column < a.table_columns ? a.table[batch * a.table_row + column] : 0;
    base[i] = ((int64_t)(page * a.kv_heads + head) * PAGE + n % PAGE) * ROW;  // bytes
  }
  const int context = a.context_lens[batch], queries = a.query_lens[batch], rows = queries * GROUP;
  if (first >= rows) return;
  const int last_query = min(first + ROWS - 1, rows - 1) / GROUP, seen = context - queries;
  const int end = seen + last_query + 1;
  if (((int)blockIdx.x - rank) * a.chunk >= end) return;  // the whole cluster has nothing to see
  const int stop = min(end, chunk_start + a.chunk);
  int start = chunk_start;
  if (a.window > 0) start = max(start, max(seen + first / GROUP - a.window + 1, 0) / TILE * TILE);
  const int tiles = stop > start ? (stop - start + TILE - 1) / TILE : 0;
  __syncthreads();

  // item 2i is tile i of K with all of the tile's scales, item 2i + 1 its V; the ring holds RING of them
  constexpr int COPIES = BUFFER / 16 / THREADS, STEP = THREADS / PIECES;  // rows between a thread's copies
  static_assert(STEP <= 16 && 16 % STEP == 0);
  const int copy_row = tid / PIECES;
  const int64_t copy_from = copy_row * ROW + tid % PIECES * 16;
  const uint8_t *const k_from = a.k + copy_from, *const v_from = a.v + copy_from;
  const uint32_t copy_to = smem(memory) + copy_row * ROW + (((tid % PIECES) ^ swizzle(copy_row)) << 4);
  int next_tile = 0, next_slot = 0;
  auto load = [&](auto is_v) {
    if (next_tile < tiles) {
      const int n0 = start + next_tile * TILE, limit = stop - n0, rows_left = limit - copy_row;
      const uint8_t* from = decltype(is_v)::value ? v_from : k_from;
      const uint32_t to = copy_to + next_slot * BUFFER;
      const longlong2* b = reinterpret_cast<const longlong2*>(base + ((n0 - chunk_start) >> 4));
      int64_t offset[TILE / 16];
#pragma unroll
      for (int j = 0; j < TILE / 32; j++) {
        const longlong2 two = b[j];
        offset[2 * j] = two.x, offset[2 * j + 1] = two.y;
      }
#pragma unroll
      for (int j = 0; j < COPIES; j++) {
        const int row = j * STEP;  // beyond copy_row
        const uint32_t at = (to + row * ROW) ^ (swizzle(row & 7 & ~(STEP - 1)) << 4);
        const uint8_t* source = from + offset[row / 16] + row % 16 * ROW;
        copy16(at, source, row < rows_left ? 16 : 0);
      }
      if ((ROW_K || ROW_V) && !decltype(is_v)::value && tid < TILE / 4) {
        const int64_t slot = (int64_t)((uint64_t)base[(n0 - chunk_start + 4 * tid) >> 4] / ROW) + (4 * tid & 15);
        const int bytes = 4 * max(0, min(4, limit - 4 * tid)), i = next_tile % 3;
        if (ROW_K) copy16(smem(&sh.k_scale[i][4 * tid]), a.k_scale + slot, bytes);
        if (ROW_V) copy16(smem(&sh.v_scale[i][4 * tid]), a.v_scale + slot, bytes);
        if (ASYM) copy16(smem(&sh.k_low[i][4 * tid]), a.k_low + slot, bytes);
        if (ASYM) copy16(smem(&sh.v_low[i][4 * tid]), a.v_low + slot, bytes);
      }
    }
    commit();
    next_slot = next_slot == RING - 1 ? 0 : next_slot + 1;
    if (decltype(is_v)::value) next_tile++;
  };
  constexpr std::integral_constant<bool, false> K{};
  constexpr std::integral_constant<bool, true> V{};
#pragma unroll
  for (int item = 0; item < RING; item++)
    if (item & 1) load(V);
    else load(K);
  // item 2i + RING goes out within tile i after its scores, item 2i - 1 + RING at its beginning
  auto load_early = [&] { if constexpr (RING & 1) load(K); else load(V); };
  auto load_late = [&] { if constexpr (RING & 1) load(V); else load(K); };

  // the query: row-normalised fp16 for 8-bit codes, with K's static scale folded in, permuted as K's pieces are read
  {
    const float to_score = a.scale * (CAPPED ? 1.0f : LOG2E);
    float k_static[D / 32];
    if (STATIC_K) {
#pragma unroll
      for (int c = 0; c < D / 32; c++) k_static[c] = a.k_static[head * D + (c / 4) * 128 + lane * 4 + c % 4];
    }
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
      const int row = i * 4 + warp;
      float x[D / 32], biggest = 0.0f, sum = 0.0f;
#pragma unroll
      for (int c = 0; c < D / 128; c++) {
        four(query[i][c], &x[4 * c]);
      }
#pragma unroll
      for (int c = 0; c < D / 32; c++) {
        if (first + row >= rows) x[c] = 0.0f;
        if (ASYM) sum += x[c];
        if (STATIC_K) x[c] *= k_static[c];
        biggest = fmaxf(biggest, fabsf(x[c]));
      }
      // magnitudes order as their bits do
      biggest = CODE == BF16 ? 1.0f : __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(biggest)));
      if (biggest == 0.0f) biggest = 1.0f;
      const float inverse = CODE == BF16 ? 1.0f : __fdividef(1.0f, biggest);
#pragma unroll
      for (int c = 0; c < D / 128; c++) {
        const int d = c * 128 + lane * 4, piece = d / RUN, step = piece / 4 * (RUN / 4) + d % RUN / 4;
        const float* y = &x[4 * c];
        // elements 0 and 1 of four go to columns 2 t, 2 t + 1 of the step's first eight, 2 and 3 to those of its second
        uint8_t* to = memory + Q_AT + 2 * step * Q_COLUMN + row * 16 + piece % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = pack(y[0] * inverse, y[1] * inverse);
        *reinterpret_cast<uint32_t*>(to + Q_COLUMN) = pack(y[2] * inverse, y[3] * inverse);
      }
      if (ASYM) {
#pragma unroll
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
      }
      if (lane == 0) {
        sh.row[row] = make_float4(to_score * biggest, 0.0f, -INFINITY, 0.0f);
        if (ASYM) sh.q_low[row] = sum * inverse;
      }
    }
  }
  fence_shared();
  __syncthreads();

  float o[HALVES][ROWS / 2] = {}, total[BLOCKS][2] = {}, shift[BLOCKS][2] = {}, v_unit = 0.0f;
  const int own = warp * 16 + g;  // this thread's token of 64, and the one 8 further on
  const uint32_t q_at = smem(memory) + Q_AT, p_at = smem(memory) + P_AT;
  const uint8_t* const k_lane = memory + own * ROW;
  const uint32_t k_piece = (t ^ swizzle(g)) << 4, p_own = P_AT + own * 16 + t * 4;
  // lane addresses of V's 8 x 16-byte blocks: 8-bit ones hold 16 columns, and a load spans two halves of head_dim
  const int v_row = CODE == BF16 ? (lane & 7) + 8 * (lane >> 4) : lane & 15;
  const int v_piece = CODE == BF16 ? 2 * warp + (lane >> 3 & 1) : warp + 4 * (lane >> 4);
  const uint32_t v_lane = smem(memory) + v_row * ROW + ((v_piece ^ swizzle(lane & 7)) << 4);
  int k_slot = 0;
  if (K_BIAS != 0.0f) {
    // a constant times every column of q is that times the row's sum
    const uint32_t constant = pack(-K_BIAS, -K_BIAS), c[4] = {constant, constant, constant, constant};
    float b[ROWS / 2] = {};
    fence_registers();
#pragma unroll
    for (int step = 0; step < STEPS; step++) multiply<true, false>(b, c, matrix(q_at + 2 * step * Q_COLUMN, Q_COLUMN, 128));
    commit_products();
    wait_products<0>();
    if (warp == 0 && g == 0) {
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) sh.bias[8 * j + 2 * t] = b[4 * j], sh.bias[8 * j + 2 * t + 1] = b[4 * j + 1];
    }
  }

  for (int i = 0; i < tiles; i++) {
    const int n0 = start + i * TILE, scales = ROW_K || ROW_V ? i % 3 : 0;
    if (i == 0) wait<RING - 1>();
    else wait<RING - 2>();
    __syncthreads();
    if (i > 0) load_early();

    // scores of GROUPS x 64 tokens: element 4 j + 2 h + e of s[c] is token 64 c + own + 8 h, row 8 j + 2 t + e
    float s[GROUPS][ROWS / 2];
    uint32_t k[GROUPS][STEPS][4];
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
      if (K_BIAS != 0.0f) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          const float2 b = *reinterpret_cast<const float2*>(&sh.bias[8 * j + 2 * t]);
          s[c][4 * j] = s[c][4 * j + 2] = b.x, s[c][4 * j + 1] = s[c][4 * j + 3] = b.y;
        }
      }
#pragma unroll
      for (int piece = 0; piece < PIECES / 4; piece++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 raw = *reinterpret_cast<const uint4*>(k_lane + k_slot * BUFFER + (64 * c + 8 * h) * ROW + (k_piece ^ (piece << 6)));
          const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
          for (int step = 0; step < RUN / 4; step++) {
            uint32_t(&to)[4] = k[c][piece * (RUN / 4) + step];
            if constexpr (CODE == BF16) to[h] = w[2 * (step & 1)], to[h + 2] = w[2 * (step & 1) + 1];
            else decode4<false>(w[step], to[h], to[h + 2]);
          }
        }
      }
      fence_registers();
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const uint64_t q = matrix(q_at + 2 * step * Q_COLUMN, Q_COLUMN, 128);
        if (step == 0 && K_BIAS == 0.0f) multiply<false, false>(s[c], k[c][step], q);
        else multiply<true, false>(s[c], k[c][step], q);
      }
      commit_products();
      if (SEQUENTIAL) wait_products<0>();
    }

    float most[BLOCKS][2];
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) most[j][0] = most[j][1] = -INFINITY;
    const bool edge = n0 + TILE > seen + first / GROUP + 1 || (a.window > 0 && n0 <= seen + last_query - a.window);
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
      if (!SEQUENTIAL) c + 1 < GROUPS ? wait_products<1>() : wait_products<0>();
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = 64 * c + own + 8 * h;
        const float f = ROW_K ? sh.k_scale[scales][token] : 1.0f, low = ASYM ? sh.k_low[scales][token] : 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = s[c][4 * j + 2 * h + e];
            if (ROW_K) x *= f;
            if (ASYM) x += low * sh.q_low[8 * j + 2 * t + e];
            if (CAPPED) {
              // tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates without overflow; the unit is spent here
              const float y = exp2_(x * (sh.row[8 * j + 2 * t + e].x * (2.0f * LOG2E / a.softcap)));
              x = a.softcap * LOG2E * (1.0f - __fdividef(2.0f, y + 1.0f));
            }
            if (edge) {
              const int at = min(seen + (first + 8 * j + 2 * t + e) / GROUP, context - 1), n = n0 + token;
              if (n > at || (a.window > 0 && n <= at - a.window)) x = -INFINITY;
            }
            most[j][e] = fmaxf(most[j][e], x);
          }
      }
    }
    float v_scale[GROUPS][2], v_most = 0.0f;
    if (ROW_V) {
#pragma unroll
      for (int c = 0; c < GROUPS; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) v_most = fmaxf(v_most, v_scale[c][h] = sh.v_scale[scales][64 * c + own + 8 * h]);
    }
    float4 row[BLOCKS][2];
    bool above = v_most > V_SLACK * v_unit;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        row[j][e] = sh.row[8 * j + 2 * t + e];
        if (CAPPED) row[j][e].x = 1.0f;
        above |= most[j][e] * row[j][e].x > row[j][e].z;
      }
    above = __syncthreads_or(above);
    load_late();

    if (above) {
      // some row's reference, or V's unit, has to rise
#pragma unroll
      for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float x = most[j][e];
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
          if (g == 0) sh.top[8 * j + 2 * t + e][warp] = x * row[j][e].x;
        }
      if (ROW_V) {
        // scales are positive, so their bits order as they do
        const unsigned biggest = __reduce_max_sync(~0u, __float_as_uint(v_most));
        if (lane == 0) sh.v_top[warp] = __uint_as_float((biggest + 0x7FFFFFu) & 0x7F800000u);  // a power of two above
      }
      __syncthreads();
      if (tid < ROWS) {
        const float x = fmaxf(fmaxf(sh.top[tid][0], sh.top[tid][1]), fmaxf(sh.top[tid][2], sh.top[tid][3]));
        float4 r = sh.row[tid];
        const bool rises = x > r.z;
        sh.decay[tid] = rises ? (r.z == -INFINITY ? 0.0f : exp2_(r.y - x)) : 1.0f;
        if (rises) sh.row[tid] = make_float4(r.x, x, x + SLACK, 0.0f);
      }
      float v_factor = 1.0f;
      if (ROW_V) {
        const float larger = fmaxf(fmaxf(sh.v_top[0], sh.v_top[1]), fmaxf(sh.v_top[2], sh.v_top[3]));
        if (larger > V_SLACK * v_unit) v_factor = v_unit / larger, v_unit = larger;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float decay = sh.decay[8 * j + 2 * t + e], both = decay * v_factor;
          row[j][e].y = sh.row[8 * j + 2 * t + e].y;
          total[j][e] *= decay;
          if (ASYM) shift[j][e] *= decay;
#pragma unroll
          for (int h = 0; h < HALVES; h++) o[h][4 * j + e] *= both, o[h][4 * j + 2 + e] *= both;
        }
    }

    const float v_inverse = v_unit > 0.0f ? 1.0f / v_unit : 0.0f;
#pragma unroll
    for (int c = 0; c < GROUPS; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = 64 * c + 8 * h;
        const float f = ROW_V ? v_scale[c][h] * v_inverse : 1.0f, low = ASYM ? sh.v_low[scales][token + own] : 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          float p[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            p[e] = exp2_(fmaf(s[c][4 * j + 2 * h + e], row[j][e].x, -row[j][e].y));
            total[j][e] += p[e];
            if (ASYM) shift[j][e] += p[e] * low;
            if (ROW_V) p[e] *= f;
          }
          *reinterpret_cast<uint32_t*>(memory + p_own + (j * TILE + token) * 16) = pack(p[0], p[1]);
        }
      }
    fence_shared();
    wait<RING - 1>();
    __syncthreads();
    const int v_slot = k_slot == RING - 1 ? 0 : k_slot + 1;
    const uint32_t v = v_lane + v_slot * BUFFER;
    k_slot = v_slot == RING - 1 ? 0 : v_slot + 1;
    uint32_t w[TILE / 16][HALVES][4];
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
#pragma unroll
      for (int c = 0; c < HALVES * BYTES / 2; c++) {
        uint32_t raw[4];
        ldmatrix_trans(raw, (v ^ (c << 7)) + step * 16 * ROW);
        if constexpr (CODE == BF16) {
#pragma unroll
          for (int e = 0; e < 4; e++) w[step][c][e] = raw[e];
        } else {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            decode4<true>(raw[2 * h], w[step][2 * c + h][0], w[step][2 * c + h][1]);
            decode4<true>(raw[2 * h + 1], w[step][2 * c + h][2], w[step][2 * c + h][3]);
          }
        }
      }
      fence_registers();
#pragma unroll
      for (int h = 0; h < HALVES; h++) multiply<true, true>(o[h], w[step][h], matrix(p_at + step * 256, 128, TILE * 16));
      commit_products();
    }
    wait_products<0>();
  }

  // this chunk's unnormalised output, maxima and sums, for the cluster to read
  wait<0>();
  __syncthreads();
  float* merge = reinterpret_cast<float*>(memory);
  const float u = ROW_V ? v_unit : 1.0f;
#pragma unroll
  for (int j = 0; j < BLOCKS; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = 8 * j + 2 * t + e;
      float* line = merge + r * OUT_ROW + warp * 16;
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        const float x = o[h][4 * j + e] * u, y = o[h][4 * j + 2 + e] * u;
        if constexpr (CODE == BF16) line[64 * h + g] = x, line[64 * h + g + 8] = y;
        else *reinterpret_cast<float2*>(line + 64 * h + 2 * g) = make_float2(x, y);
      }
      float x = total[j][e], y = shift[j][e];
#pragma unroll
      for (int n = 4; n < 32; n *= 2) {
        x += __shfl_xor_sync(~0u, x, n);
        if (ASYM) y += __shfl_xor_sync(~0u, y, n);
      }
      if (g == 0) sh.sum[warp][r] = x;
      if (ASYM && g == 0) sh.shift[warp * ROWS + r] = y;
    }
  __syncthreads();
  if (tid < ROWS) {
    sh.row_top[tid] = sh.row[tid].z == -INFINITY ? -INFINITY : sh.row[tid].y;
    sh.row_sum[tid] = sh.sum[0][tid] + sh.sum[1][tid] + sh.sum[2][tid] + sh.sum[3][tid];
    if (ASYM) sh.row_shift[tid] = sh.shift[tid] + sh.shift[ROWS + tid] + sh.shift[2 * ROWS + tid] + sh.shift[3 * ROWS + tid];
  }
  cluster_arrive();

  // each block of the cluster merges its share of the output, chunks in order
  constexpr int share = ROWS * D / 4 / CLUSTER;
  for (int at = rank * share + tid; at < (rank + 1) * share; at += THREADS) {
    const int row = at / (D / 4), d = at % (D / 4) * 4, r = first + row;
    if (r >= rows) continue;
    float best = -INFINITY, sum = 0.0f, low = 0.0f, tops[CLUSTER], sums[CLUSTER];
    float4 parts[CLUSTER], x = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      tops[c] = remote(smem(&sh.row_top[row]), c);
      sums[c] = remote(smem(&sh.row_sum[row]), c);
      parts[c] = remote4(smem(merge + row * OUT_ROW + d), c);
      best = fmaxf(best, tops[c]);
    }
    const float safe = best == -INFINITY ? 0.0f : best;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const float w = exp2_(tops[c] - safe);
      sum += w * sums[c];
      if (ASYM) low += w * remote(smem(&sh.row_shift[row]), c);
      x.x += w * parts[c].x, x.y += w * parts[c].y, x.z += w * parts[c].z, x.w += w * parts[c].w;
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
    x.x = (x.x + low) * inverse, x.y = (x.y + low) * inverse, x.z = (x.z + low) * inverse, x.w = (x.w + low) * inverse;
    if (STATIC_V) {
      const float4 f = *reinterpret_cast<const float4*>(a.v_static + head * D + d);
      x.x *= f.x, x.y *= f.y, x.z *= f.z, x.w *= f.w;
    }
    const int query = r / GROUP, q_head = head * GROUP + r % GROUP;
    const int64_t out_row = ((int64_t)batch * a.max_queries + query) * a.heads + q_head;
    if (a.part) {
      const int64_t place = (int64_t)(blockIdx.x / CLUSTER) * a.rows_total + out_row;
      *reinterpret_cast<float4*>(a.part + place * D + d) = x;
      if (d == 0) a.lse[place] = sum == 0.0f ? -INFINITY : best + log2f(sum);
    } else {
      const int64_t place = out_row * D + d;
      if constexpr (Q_TYPE == 2) {
        *reinterpret_cast<float4*>(reinterpret_cast<float*>(a.out) + place) = x;
      } else {
        uint32_t lo, hi;
        if constexpr (Q_TYPE == 0) {
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(lo) : "f"(x.y), "f"(x.x));
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(hi) : "f"(x.w), "f"(x.z));
        } else {
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(lo) : "f"(x.y), "f"(x.x));
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(hi) : "f"(x.w), "f"(x.z));
        }
        *reinterpret_cast<uint2*>(reinterpret_cast<uint16_t*>(a.out) + place) = make_uint2(lo, hi);
      }
    }
  }
  cluster_leave();
}

// Returns a cudaError_t.
extern "C" int launch(const Args* args, int batch, void* stream) {
  const int bytes = BASE_AT + args->chunk / 16 * 8;
  const cudaError_t error = cudaFuncSetAttribute(verify, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(CLUSTER * args->spans, batch * args->kv_heads * args->blocks);
  verify<<<grid, THREADS, bytes, (cudaStream_t)stream>>>(*args);
  return cudaGetLastError();
}
