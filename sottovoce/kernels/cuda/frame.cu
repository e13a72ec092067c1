// A frame of the talker and its predictor for up to 8 OCTETS rows in one launch: all layers, heads, draws and embeddings.
//
// One block an SM; phases are separated by a barrier of the grid, and the stream of weights runs ahead of them. Widths,
// numbers of layers and the shares of a block are the compiler's (cuda_frame.py), and so is the order of `Piece`s.
#include "base.cuh"
#include "linear.cuh"
#include "attention.cuh"
#include "sample.cuh"

struct Norms {  // of one layer, and scales of rows of its weights; null of bf16
  const u16 *input, *q, *k, *post;
#if QUANT
  const float *qkv, *out, *gate_up, *down;
#else
  static constexpr const float *qkv = nullptr, *out = nullptr, *gate_up = nullptr, *down = nullptr;
#endif
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
  u16 *qkv, *attended, *middle, *last, *inner, *logits, *normed;
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
template <int WIDTH, int TILES, int N, int FORMAT>
__device__ __forceinline__ void add_residual(u32 (&residual)[N], u16* out, int rows, Scales<FORMAT> scales) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int i = threadIdx.x + n * THREADS;
    const Place p = Place::of<WIDTH, TILES>(i, 0, TILES);
    if (i < TILES * OCTETS * 32 && p.row < rows) {
      const float2 v = tile_sum<TILES>(p.t, p.inside, scales);
      residual[n] = pack(rounded(v.x) + low(residual[n]), rounded(v.y) + high(residual[n]));
      publish((u32*)(out + (i64)p.row * WIDTH + p.column), residual[n]);
    }
  }
}
// Tiles `offset` to offset + T of the block's PER_BLOCK; rows of `out` are `stride` apart.
template <int WIDTH, int T, int PER_BLOCK, int FORMAT = BF16>
__device__ __forceinline__ void store(u16* out, i64 stride, int rows, int offset, const u16* bias, Scales<FORMAT> scales = {}) {
  for (int i = threadIdx.x; i < T * OCTETS * 32; i += THREADS) {
    const Place p = Place::of<WIDTH, PER_BLOCK>(i, offset, T);
    if (p.row < rows) {
      float2 v = tile_sum<T>(p.t, p.inside, scales);
      if (bias) v.x += low(bias[p.column]), v.y += low(bias[p.column + 1]);
      publish((u32*)(out + p.row * stride + p.column), pack(v.x, v.y));
    }
  }
}
template <int WIDTH, int T, int PER_BLOCK, int FORMAT>  // T tiles of gate and up in turn
__device__ __forceinline__ void store_swiglu(u16* out, int rows, int offset, Scales<FORMAT> scales) {
  for (int i = threadIdx.x; i < T / 2 * OCTETS * 32; i += THREADS) {
    const Place p = Place::of<WIDTH, PER_BLOCK>(i, offset, T / 2);
    if (p.row < rows)
      publish((u32*)(out + (i64)p.row * WIDTH + p.column), swiglu(tile_sum<T>(2 * p.t, p.inside, scales), tile_sum<T>(2 * p.t + 1, p.inside, scales)));
  }
}

// Tiles of gate and up that are summed at a time, so that their sums fit the registers.
__host__ __device__ constexpr int pairs_group_of(int tiles) { return tiles <= MAX_TILES ? tiles : tiles % 6 == 0 && tiles / 3 <= MAX_TILES ? tiles / 3 : 2; }

// norm + gate and up + SwiGLU
template <int WIDTH, int INNER, int PAIRS_A_BLOCK, int FORMAT>
__device__ __forceinline__ void gate_up(Stream& stream, Barrier& barrier, const Rows& x, const Norm& norm, u16* inner, Scales<FORMAT> scales) {
  constexpr int T = 2 * PAIRS_A_BLOCK, GROUP = pairs_group_of(T);
#pragma unroll 1
  for (int first = 0; first < T; first += GROUP) {
    project<FORMAT, WIDTH, GROUP, true, T>(stream, barrier, first == 0, x, norm);
    store_swiglu<INNER, GROUP, PAIRS_A_BLOCK>(inner, x.rows, first / 2, Scales<FORMAT>{scales.first + first});
    if (first + GROUP < T) block_sync();
  }
  barrier.arrive();
}

// A layer's scales of rows of the block's tiles. `ask` brings them into shared memory, a layer ahead; then more tiles than are
// ever on their way follow them, and nobody need wait for them.
template <int FORMAT, int WIDTH, int INNER, int WIDE, int NARROW, int PAIRS>
struct LayerScales {
  static constexpr int OUT = WIDE, GATE = OUT + NARROW, DOWN = GATE + 2 * PAIRS, TILES = DOWN + NARROW;
  static constexpr int BETWEEN = (2 * WIDE + 2 * PAIRS) * (WIDTH / 512) + NARROW * ((ATTENDED + INNER) / 512);
  static_assert(BETWEEN / Tile<FORMAT>::PARTS > DEPTH, "a layer later they are there");
  int first;
  __device__ LayerScales(int layer) : first(layer % 2 * SCALE_TILES) {}
  __device__ Scales<FORMAT> qkv() const { return {first}; }
  __device__ Scales<FORMAT> out() const { return {first + OUT}; }
  __device__ Scales<FORMAT> gate_up() const { return {first + GATE}; }
  __device__ Scales<FORMAT> down() const { return {first + DOWN}; }
  __device__ __forceinline__ void ask(const Norms& n) const {
    if (FORMAT == BF16) return;
    constexpr int GROUP = pairs_group_of(2 * PAIRS);
    const int block = blockIdx.x, narrow = min(block * NARROW, WIDTH / 8 - NARROW);
    int i;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(i));  // else what follows from it is kept in registers from layer to layer
#pragma unroll 1
    for (; i < TILES * 8; i += THREADS) {
      const int tile = i / 8, pair = (tile - GATE) % GROUP / 2, group = (tile - GATE) / GROUP * GROUP / 2;
      const float* from = tile < OUT    ? n.qkv + (min(block * WIDE, QKV / 8 - WIDE) + tile) * 8
                          : tile < GATE ? n.out + (narrow + tile - OUT) * 8
                          : tile < DOWN ? n.gate_up + (min(block * PAIRS + group, INNER / 8 - GROUP / 2) + pair) * 8 + (tile - GATE) % 2 * INNER
                                        : n.down + (narrow + tile - DOWN) * 8;
      const u32 to = (u32)__cvta_generic_to_shared(memory) + Shared::scales + (first * 8 + i) * 4;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from + i % 8) : "memory");
    }
  }
};
using TalkerScales = LayerScales<TALKER_FORMAT, D, I, QKV_TILES, OUT_TILES, GATE_TILES>;
using SmallScales = LayerScales<PREDICTOR_FORMAT, DP, IP, SMALL_QKV_TILES, SMALL_OUT_TILES, SMALL_GATE_TILES>;

struct FromShared {  // attention outputs
  const u16* x;
  int rows;
  __device__ __forceinline__ uint4 load(int row, int k) const {
    if (row >= rows) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(x + row * FUSED_STRIDE + k);
  }
};

// Asks for a layer's norms, a layer ahead: to all blocks they would be news at once, behind the weights on their way.
__device__ __forceinline__ void prefetch_norms(const Norms& n, int width) {
  if (blockIdx.x != GRID - 1) return;
  const int lines = width * 2 / 128, i = threadIdx.x;
  if (i < lines) prefetch_l2(n.input + i * 64);
  else if (i < 2 * lines) prefetch_l2(n.post + (i - lines) * 64);
  else if (i < 2 * lines + 2) prefetch_l2(n.q + (i & 1) * 64);
  else if (i < 2 * lines + 4) prefetch_l2(n.k + (i & 1) * 64);
}

__device__ __forceinline__ void compute(const Frame& f) {
  TalkerScales(0).ask(f.talker[0]);
  Stream stream;
  stream.begin(f.pieces, (int)f.num_pieces, (u32)__cvta_generic_to_shared(memory), Shared::pieces);
  Barrier barrier{f.counter, 0};
#ifdef PROFILE
  barrier.log = f.log;
#endif
  const int batch = (int)f.batch, warp = threadIdx.x >> 5, mine = blockIdx.x;  // block b draws for row b
  const bool draws = mine < batch;
  Norms* const norms = (Norms*)(memory + Shared::norms);
  Setting* const settings = (Setting*)(memory + Shared::settings);
  if (threadIdx.x < LAYERS) norms[threadIdx.x] = f.talker[threadIdx.x];
  else if (threadIdx.x < LAYERS + SMALL_LAYERS) norms[threadIdx.x] = f.predictor[threadIdx.x - LAYERS];
  else if (threadIdx.x == THREADS - 1 && draws) settings[0].load(f.first, mine);
  else if (threadIdx.x == THREADS - 2 && draws) settings[1].load(f.others, mine);
  block_sync();

  {  // the talker
    int longest = 0;
    for (int i = 0; i < batch; i++) longest = max(longest, f.positions[i]);
    const int items = batch * KV_HEADS, chunks = longest / CHUNK + 1;
    u32 residual[PAIRS];
    Rows x{f.x, D, batch};
    keep<D, OUT_TILES>(residual, x);
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
      const Norms n = norms[layer];
      const TalkerScales scales(layer);
      if (layer + 1 < LAYERS) TalkerScales(layer + 1).ask(norms[layer + 1]);
      else SmallScales(LAYERS).ask(norms[LAYERS]);
      project<TALKER_FORMAT, D, QKV_TILES, true, QKV_TILES>(stream, barrier, STAGED || layer > 0, x, Norm{n.input, nullptr, f.normed});
      store<QKV, QKV_TILES, QKV_TILES>(f.qkv, QKV, batch, 0, nullptr, scales.qkv());
      barrier.arrive();
      prefetch_norms(norms[layer + 1], layer + 1 < LAYERS ? D : DP);
      const Talker talker{n.q, n.k, f.cos, f.sin, f.keys + layer * f.layer_stride, f.values + layer * f.layer_stride, f.positions, f.pages, (int)f.max_pages};
      bool waits = true;
#pragma unroll 1
      for (int item = mine; item < items * chunks; item += GRID) {
        const int chunk = item / items, row = item % items / KV_HEADS, head = item % KV_HEADS, position = f.positions[row];
        if (chunk * CHUNK <= position) {
          attend_chunk(talker, barrier, waits, f.qkv, row, head, chunk, (int)f.max_chunks, layer + 1 < LAYERS ? f.layer_stride : 0, f.parts, f.done, f.attended);
          waits = false;
        } else if (position < 0) {
          if (threadIdx.x < 128) publish((u32*)(f.attended + (i64)row * ATTENDED + head * 2 * HEAD_DIM) + threadIdx.x, 0);
        }
      }
      if (waits) barrier.wait();
      barrier.arrive();
      project<TALKER_FORMAT, ATTENDED, OUT_TILES, false, OUT_TILES>(stream, barrier, true, Rows{f.attended, ATTENDED, batch}, Norm{});
      add_residual<D, OUT_TILES>(residual, f.middle, batch, scales.out());
      barrier.arrive();
      gate_up<D, I, GATE_TILES>(stream, barrier, Rows{f.middle, D, batch}, Norm{n.post, nullptr, f.normed}, f.inner, scales.gate_up());
      project<TALKER_FORMAT, I, OUT_TILES, false, OUT_TILES>(stream, barrier, true, Rows{f.inner, I, batch}, Norm{});
      add_residual<D, OUT_TILES>(residual, f.last, batch, scales.down());
      barrier.arrive();
      x.x = f.last;
    }
    project<BF16, D, HEAD_TILES, true, HEAD_TILES>(stream, barrier, true, x, Norm{f.talker_norm, PROJECTS ? nullptr : f.inputs, f.normed});
    store<V0, HEAD_TILES, HEAD_TILES>(f.logits, V0, batch, 0, nullptr);
    barrier.arrive();
    if (PROJECTS) {
      project<BF16, D, PROJECTION_TILES, true, PROJECTION_TILES>(stream, barrier, false, x, Norm{f.talker_norm, nullptr, f.normed});
      store<DP, PROJECTION_TILES, PROJECTION_TILES>(f.inputs, 2 * DP, batch, 0, f.bias);
    }
  }

  // Hands a drawn code on: to the predictor's next pass by `table`.
  i64* const codes = f.codes + (i64)mine * (1 + CODEBOOKS);
  const auto put = [&](u32 code, int book, const u16* table, const u16* sum_table) {
    if (table && threadIdx.x < DP / 8)
      publish((uint4*)(f.inputs + ((i64)mine * 2 + 1) * DP + threadIdx.x * 8), load_constant(table + (i64)code * DP + threadIdx.x * 8));
    if (threadIdx.x == 0) codes[book] = code;
    if (threadIdx.x < D / 64) prefetch_l2(sum_table + (i64)code * D + threadIdx.x * 64);
  };
  barrier.wait();
  if (draws) {
    const u32 code = draw<V0, true>(f.logits, mine, 0, settings[0], f.limits, f.first_table);
    if (threadIdx.x == 0) f.limits.seen[(i64)f.limits.slots[mine] * V0 + code] = 1;
    put(code, 0, f.first_table, f.first_sum_table);
  }
  barrier.arrive();

  // The predictor: both first tokens in one pass where they fit, else one after the other.
  const bool is_joint = 2 * batch <= ROWS;
  const i64 small_stride = (i64)batch * 16 * KV_HEADS * HEAD_DIM;
  int position = 0, number = LAYERS;  // of the layers' scales
#pragma unroll 1
  for (int book = is_joint ? 0 : -1; book < CODEBOOKS; book++) {
    const int tokens = is_joint && book == 0 ? 2 : 1, rows = batch * tokens;
    Rows x{f.inputs + (position ? DP : 0), tokens == 2 ? DP : 2 * DP, rows};
    u32 residual[SMALL_PAIRS];
#pragma unroll 1
    for (int layer = 0; layer < SMALL_LAYERS; layer++) {
      const Norms n = norms[LAYERS + layer];
      const SmallScales scales(number++);
      SmallScales(number).ask(norms[LAYERS + (layer + 1) % SMALL_LAYERS]);
      const Predictor small{n.q, n.k, f.predictor_cos, f.predictor_sin, f.small_keys + layer * small_stride, f.small_values + layer * small_stride};
      project<PREDICTOR_FORMAT, DP, SMALL_QKV_TILES, true, SMALL_QKV_TILES>(stream, barrier, true, x, Norm{n.input, nullptr, f.normed});
      if (layer == 0) keep<DP, SMALL_OUT_TILES>(residual, x);
      store<QKV, SMALL_QKV_TILES, SMALL_QKV_TILES>(f.qkv, QKV, rows, 0, nullptr, scales.qkv());
      barrier.arrive();
      prefetch_norms(norms[LAYERS + (layer + 1) % SMALL_LAYERS], DP);
      Short attention;
#if FUSED  // every block attends for itself, warp w for kv head w
      u16* own = (u16*)(memory + Shared::attended) + warp * 2 * HEAD_DIM;
      attention.before(small, 0, warp, position, 0);
      barrier.wait();
#pragma unroll 1
      for (int row = 0; row < rows; row++) {
        if (row) attention.before(small, row / tokens, warp, position, row % tokens);
        attention.after(small, f.qkv + (i64)row * QKV, row / tokens, warp, position, row % tokens, mine == 0, own + row * FUSED_STRIDE);
      }
      block_sync();
      project<PREDICTOR_FORMAT, ATTENDED, SMALL_OUT_TILES, false, SMALL_OUT_TILES>(stream, barrier, false, FromShared{(u16*)(memory + Shared::attended), rows}, Norm{});
#else
      const int item = warp * GRID + mine, row = item / KV_HEADS, head = item % KV_HEADS, index = row % tokens;
      if (row < rows) attention.before(small, row / tokens, head, position, index);
      barrier.wait();
      if (row < rows)
        attention.after(small, f.qkv + (i64)row * QKV, row / tokens, head, position, index, true, f.attended + (i64)row * ATTENDED + head * 2 * HEAD_DIM);
      barrier.arrive();
      project<PREDICTOR_FORMAT, ATTENDED, SMALL_OUT_TILES, false, SMALL_OUT_TILES>(stream, barrier, true, Rows{f.attended, ATTENDED, rows}, Norm{});
#endif
      add_residual<DP, SMALL_OUT_TILES>(residual, f.middle, rows, scales.out());
      barrier.arrive();
      gate_up<DP, IP, SMALL_GATE_TILES>(stream, barrier, Rows{f.middle, DP, rows}, Norm{n.post, nullptr, f.normed}, f.inner, scales.gate_up());
      project<PREDICTOR_FORMAT, IP, SMALL_OUT_TILES, false, SMALL_OUT_TILES>(stream, barrier, true, Rows{f.inner, IP, rows}, Norm{});
      add_residual<DP, SMALL_OUT_TILES>(residual, f.last, rows, scales.down());
      barrier.arrive();
      x = Rows{f.last, DP, rows};
    }
    position += tokens;
    if (book < 0) continue;
    project<BF16, DP, SMALL_HEAD_TILES, true, SMALL_HEAD_TILES>(stream, barrier, true, Rows{f.last + (tokens - 1) * DP, tokens * DP, batch}, Norm{f.predictor_norm, nullptr, f.normed});
    store<V, SMALL_HEAD_TILES, SMALL_HEAD_TILES>(f.logits, V, batch, 0, nullptr);
    barrier.arrive();
    barrier.wait();
    const bool is_last = book + 1 == CODEBOOKS;
    if (draws) {
      const u16* table = is_last ? nullptr : f.tables + (i64)book * V * DP;
      const u32 code = draw<V, false>(f.logits, mine, book + 1, settings[1], f.limits, table);
      put(code, book + 1, table, f.sum_tables + (i64)book * V * D);
    }
    if (!is_last) barrier.arrive();
  }
  barrier.finish();
  if (!draws) return;
  block_sync();  // the last code
  for (int d = threadIdx.x; d < D; d += THREADS) {
    float v[1 + CODEBOOKS], total = 0;
#pragma unroll
    for (int i = 0; i < 1 + CODEBOOKS; i++)
      v[i] = low((i ? f.sum_tables + (i64)(i - 1) * V * D : f.first_sum_table)[codes[i] * D + d]);
#pragma unroll
    for (int i = 0; i < 1 + CODEBOOKS; i++) total += v[i];
    f.next_input[(i64)mine * D + d] = (u16)pack(rounded(total) + low(f.text[(i64)mine * D + d]), 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) frame(const __grid_constant__ Frame f) { compute(f); }
