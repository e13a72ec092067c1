// A frame of the talker and its predictor for up to 8 OCTETS rows in one launch: all layers, heads, draws and embeddings.
//
// One block an SM; phases are separated by a barrier of the grid, and the stream of weights runs ahead of them. Widths,
// numbers of layers and the shares of a block are the compiler's (cuda_frame.py), and so is the order of `Piece`s.
#include "base.cuh"
#include "linear.cuh"
#include "attention.cuh"
#include "sample.cuh"

struct Norms {  // of one layer
  const u16 *input, *q, *k, *post;
};

struct Frame {
  const Piece* pieces;
  const Norms *talker, *predictor;
  const u16 *talker_norm, *predictor_norm, *bias;  // bias of the projection into the predictor's width
  const u16 *cos, *sin, *predictor_cos, *predictor_sin;
  const u16 *first_table, *tables, *first_sum_table, *sum_tables;
  const u16* x;  // [B, D]
  const u16* text;  // [B, D]
  const int *positions, *pages;
  u16 *keys, *values;  // [L, pages, PAGE, KV_HEADS, HEAD_DIM]
  i64* codes;       // [B, 1 + CODEBOOKS]
  u16* next_input;  // [B, D]
  u16 *qkv, *attended, *middle, *last, *inner, *logits;
  u16* inputs;  // [B, 2, DP]
  u16 *small_keys, *small_values;  // [LP, B, 16, KV_HEADS, HEAD_DIM]
  float* parts;
  u32 *done, *counter;
  Draw first, others;
  Limits limits;
  i64 num_pieces, batch, layer_stride, max_pages, max_chunks;
  i64* log;  // with PROFILE: clock of block 0 at every arrival, and around every wait
};

extern "C" __device__ u32 shared_bytes = Shared::bytes;  // for the launcher

constexpr int PAIRS = (OUT_TILES * OCTETS * 32 + THREADS - 1) / THREADS;
constexpr int SMALL_PAIRS = (SMALL_OUT_TILES * OCTETS * 32 + THREADS - 1) / THREADS;

// x of a layer's two residual sums: the thread that adds is the same each time, so it keeps its columns.
template <int WIDTH, int TILES, int N>
__device__ __forceinline__ void keep(u32 (&residual)[N], const Rows& x) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int i = threadIdx.x + n * THREADS;
    const Place p = Place::of<WIDTH, TILES>(i, 0, TILES);
    if (i < TILES * OCTETS * 32 && p.row < x.rows)
      residual[n] = load_word_l2(x.x + (i64)p.row * x.stride + p.column);
  }
}
template <int WIDTH, int TILES, int N>
__device__ __forceinline__ void add_residual(u32 (&residual)[N], u16* out, int rows) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int i = threadIdx.x + n * THREADS;
    const Place p = Place::of<WIDTH, TILES>(i, 0, TILES);
    if (i < TILES * OCTETS * 32 && p.row < rows) {
      const float2 v = tile_sum<TILES>(p.t, p.inside);
      residual[n] = pack(rounded(v.x) + low(residual[n]), rounded(v.y) + high(residual[n]));
      *(u32*)(out + (i64)p.row * WIDTH + p.column) = residual[n];
    }
  }
}
// Tiles `offset` to offset + T of the block's PER_BLOCK; rows of `out` are `stride` apart.
template <int WIDTH, int T, int PER_BLOCK>
__device__ __forceinline__ void store(u16* out, i64 stride, int rows, int offset, const u16* bias) {
  for (int i = threadIdx.x; i < T * OCTETS * 32; i += THREADS) {
    const Place p = Place::of<WIDTH, PER_BLOCK>(i, offset, T);
    if (p.row < rows) {
      float2 v = tile_sum<T>(p.t, p.inside);
      if (bias) v.x += low(bias[p.column]), v.y += low(bias[p.column + 1]);
      *(u32*)(out + p.row * stride + p.column) = pack(v.x, v.y);
    }
  }
}
template <int WIDTH, int T, int PER_BLOCK>  // T tiles of gate and up in turn
__device__ __forceinline__ void store_swiglu(u16* out, int rows, int offset) {
  for (int i = threadIdx.x; i < T / 2 * OCTETS * 32; i += THREADS) {
    const Place p = Place::of<WIDTH, PER_BLOCK>(i, offset, T / 2);
    if (p.row < rows)
      *(u32*)(out + (i64)p.row * WIDTH + p.column) = swiglu(tile_sum<T>(2 * p.t, p.inside), tile_sum<T>(2 * p.t + 1, p.inside));
  }
}

// norm + gate and up + SwiGLU, at most GROUP tiles at a time, so that their sums fit the registers.
template <int WIDTH, int INNER, int PAIRS_A_BLOCK>
__device__ __forceinline__ void gate_up(Stream& stream, Barrier& barrier, const Rows& x, const u16* norm, u16* inner) {
  constexpr int T = 2 * PAIRS_A_BLOCK, GROUP = T <= MAX_TILES ? T : T % 3 == 0 && T / 3 <= MAX_TILES && T / 3 % 2 == 0 ? T / 3 : 2;
#pragma unroll 1
  for (int first = 0; first < T; first += GROUP) {
    project<WIDTH, GROUP, true>(stream, barrier, first == 0, x, norm, nullptr);
    store_swiglu<INNER, GROUP, PAIRS_A_BLOCK>(inner, x.rows, first / 2);
    if (first + GROUP < T) __syncthreads();
  }
  barrier.arrive();
}

struct FromShared {  // attention outputs of the warp's own kv head
  const u16* x;
  int rows;
  __device__ __forceinline__ uint4 load(int row, int k) const {
    if (row >= rows) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(x + row * FUSED_STRIDE + k);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) frame(const __grid_constant__ Frame f) {
  Stream stream;
  stream.begin(f.pieces, (int)f.num_pieces, (u32)__cvta_generic_to_shared(memory), Shared::pieces);
  Barrier barrier{f.counter, 0};
#ifdef PROFILE
  barrier.log = f.log;
#endif
  const int batch = (int)f.batch, warp = threadIdx.x >> 5;

  {  // the talker
    int longest = 0;
    for (int i = 0; i < batch; i++) longest = max(longest, f.positions[i]);
    const int items = batch * KV_HEADS, chunks = longest / CHUNK + 1;
    u32 residual[PAIRS];
    Rows x{f.x, D, batch};
    keep<D, OUT_TILES>(residual, x);
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
      const Norms& norms = f.talker[layer];
      project<D, QKV_TILES, true>(stream, barrier, layer > 0, x, norms.input, nullptr);
      store<QKV, QKV_TILES, QKV_TILES>(f.qkv, QKV, batch, 0, nullptr);
      barrier.arrive();
      const Talker talker{norms.q, norms.k, f.cos, f.sin, f.keys + layer * f.layer_stride, f.values + layer * f.layer_stride, f.positions, f.pages, (int)f.max_pages};
      barrier.wait();
#pragma unroll 1
      for (int item = blockIdx.x; item < items * chunks; item += GRID) {
        const int chunk = item / items, row = item % items / KV_HEADS, position = f.positions[row];
        if (chunk * CHUNK <= position)
          attend_chunk(talker, f.qkv, row, item % KV_HEADS, chunk, position / CHUNK + 1, (int)f.max_chunks, f.parts, f.done, f.attended);
        else if (position < 0)
          f.attended[(i64)row * ATTENDED + item % KV_HEADS * 2 * HEAD_DIM + threadIdx.x] = 0;
      }
      barrier.arrive();
      project<ATTENDED, OUT_TILES, false>(stream, barrier, true, Rows{f.attended, ATTENDED, batch}, nullptr, nullptr);
      add_residual<D, OUT_TILES>(residual, f.middle, batch);
      barrier.arrive();
      gate_up<D, I, GATE_TILES>(stream, barrier, Rows{f.middle, D, batch}, norms.post, f.inner);
      project<I, OUT_TILES, false>(stream, barrier, true, Rows{f.inner, I, batch}, nullptr, nullptr);
      add_residual<D, OUT_TILES>(residual, f.last, batch);
      barrier.arrive();
      x.x = f.last;
    }
    project<D, HEAD_TILES, true>(stream, barrier, true, x, f.talker_norm, PROJECTS ? nullptr : f.inputs);
    store<V0, HEAD_TILES, HEAD_TILES>(f.logits, V0, batch, 0, nullptr);
    barrier.arrive();
    if (PROJECTS) {
      project<D, PROJECTION_TILES, true>(stream, barrier, false, x, f.talker_norm, nullptr);
      store<DP, PROJECTION_TILES, PROJECTION_TILES>(f.inputs, 2 * DP, batch, 0, f.bias);
    }
  }

  // Codes. Block b draws for row b and sums its embeddings.
  float* totals = (float*)(memory + Shared::totals);
  auto embed = [&](int row, u32 code, const u16* table, const u16* sum_table, bool is_first, bool is_last) {
    if (table)
      for (int d = threadIdx.x; d < DP / 8; d += THREADS)
        *(uint4*)(f.inputs + ((i64)row * 2 + 1) * DP + d * 8) = load_constant(table + (i64)code * DP + d * 8);
    if (!is_last) barrier.arrive();
    for (int d = threadIdx.x; d < D; d += THREADS) {
      float total = low(sum_table[(i64)code * D + d]);
      if (!is_first) total += totals[d];
      totals[d] = total;
      if (is_last) f.next_input[(i64)row * D + d] = (u16)pack(rounded(total) + low(f.text[(i64)row * D + d]), 0);
    }
  };
  const bool draws = blockIdx.x < batch;
  const int mine = blockIdx.x;
  barrier.wait();
  if (draws) {
    const u32 code = draw<V0, true>(f.logits, mine, 0, f.first, f.limits);
    if (threadIdx.x == 0) {
      f.codes[(i64)mine * (1 + CODEBOOKS)] = code;
      f.limits.seen[(i64)f.limits.slots[mine] * V0 + code] = 1;
    }
    embed(mine, code, f.first_table, f.first_sum_table, true, false);
  } else {
    barrier.arrive();
  }

  // The predictor: both first tokens in one pass where they fit, else one after the other.
  const bool is_joint = 2 * batch <= ROWS;
  const i64 small_stride = (i64)batch * 16 * KV_HEADS * HEAD_DIM;
  int position = 0;
#pragma unroll 1
  for (int book = is_joint ? 0 : -1; book < CODEBOOKS; book++) {
    const int tokens = is_joint && book == 0 ? 2 : 1, rows = batch * tokens;
    Rows x{f.inputs + (position ? DP : 0), tokens == 2 ? DP : 2 * DP, rows};
    u32 residual[SMALL_PAIRS];
#pragma unroll 1
    for (int layer = 0; layer < SMALL_LAYERS; layer++) {
      const Norms& norms = f.predictor[layer];
      const Predictor small{norms.q, norms.k, f.predictor_cos, f.predictor_sin, f.small_keys + layer * small_stride, f.small_values + layer * small_stride};
      project<DP, SMALL_QKV_TILES, true>(stream, barrier, true, x, norms.input, nullptr);
      if (layer == 0) keep<DP, SMALL_OUT_TILES>(residual, x);
      store<QKV, SMALL_QKV_TILES, SMALL_QKV_TILES>(f.qkv, QKV, rows, 0, nullptr);
      barrier.arrive();
      const int half = (threadIdx.x & 31) >> 4, place = (threadIdx.x & 15) * 8;
      Old old;
      if (FUSED) {  // every block attends for itself: warp w is kv head w, whose outputs are its share of K
        old.load(small, 0, warp, position);
        u16* own = (u16*)(memory + Shared::attended);
        barrier.wait();
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
          if (row) old.load(small, row / tokens, warp, position);
          uint4 out = attend_short(small, old, f.qkv, row, row / tokens, warp, position, row % tokens, blockIdx.x == 0);
          *(uint4*)(own + row * FUSED_STRIDE + (2 * warp + half) * HEAD_DIM + place) = out;
        }
        __syncwarp();
        project<ATTENDED, SMALL_OUT_TILES, false>(stream, barrier, false, FromShared{own, rows}, nullptr, nullptr);
      } else {
        const int item = warp * GRID + blockIdx.x;
        if (item < rows * KV_HEADS) old.load(small, item / KV_HEADS / tokens, item % KV_HEADS, position);
        barrier.wait();
        if (item < rows * KV_HEADS) {
          const int row = item / KV_HEADS, head = item % KV_HEADS;
          uint4 out = attend_short(small, old, f.qkv, row, row / tokens, head, position, row % tokens, true);
          *(uint4*)(f.attended + (i64)row * ATTENDED + (2 * head + half) * HEAD_DIM + place) = out;
        }
        barrier.arrive();
        project<ATTENDED, SMALL_OUT_TILES, false>(stream, barrier, true, Rows{f.attended, ATTENDED, rows}, nullptr, nullptr);
      }
      add_residual<DP, SMALL_OUT_TILES>(residual, f.middle, rows);
      barrier.arrive();
      gate_up<DP, IP, SMALL_GATE_TILES>(stream, barrier, Rows{f.middle, DP, rows}, norms.post, f.inner);
      project<IP, SMALL_OUT_TILES, false>(stream, barrier, true, Rows{f.inner, IP, rows}, nullptr, nullptr);
      add_residual<DP, SMALL_OUT_TILES>(residual, f.last, rows);
      barrier.arrive();
      x = Rows{f.last, DP, rows};
    }
    position += tokens;
    if (book < 0) continue;  // the next pass may write what slower blocks still read only behind a barrier
    project<DP, SMALL_HEAD_TILES, true>(stream, barrier, true, Rows{f.last + (tokens - 1) * DP, tokens * DP, batch}, f.predictor_norm, nullptr);
    store<V, SMALL_HEAD_TILES, SMALL_HEAD_TILES>(f.logits, V, batch, 0, nullptr);
    barrier.arrive();
    if (draws || book + 1 < CODEBOOKS) barrier.wait();
    const bool is_last = book + 1 == CODEBOOKS;
    if (draws) {
      const u32 code = draw<V, false>(f.logits, mine, book + 1, f.others, f.limits);
      if (threadIdx.x == 0) f.codes[(i64)mine * (1 + CODEBOOKS) + book + 1] = code;
      embed(mine, code, is_last ? nullptr : f.tables + (i64)book * V * DP, f.sum_tables + (i64)book * V * D, false, is_last);
    } else if (!is_last) {
      barrier.arrive();
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  barrier.finish();
}
