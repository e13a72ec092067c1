// Projections: rows of x are the M side of tensor-core products, 8 weight rows a tile the N side. Each of the 8 warps has
// 64 of every 512 columns (of int4, 128 of every 1024), and their sums are added in order: a row's result depends on neither
// the batch nor its place.
//
// In a block of 32 columns lane (n, g) = (lane / 4, lane % 4) holds columns 8 g to 8 g + 7 of row n, on both sides; the
// products take them as their own k order, so every load is 16 bytes.

constexpr int MT = (OCTETS + 1) / 2;  // tiles of 16 rows
constexpr int ROWS = OCTETS * 8;
constexpr int FUSED_ROWS = 2, FUSED_STRIDE = HEADS * HEAD_DIM + 8;  // 16 bytes more against bank conflicts

// Of a warp: STAGED, two steps of its share of x, of which the sums take the place; else sums of MAX_TILES.
constexpr u32 WARP_SUMS = STAGED ? 2 * ROWS * 128 : MAX_TILES * ROWS * 32, SUM_BYTES = WARPS * WARP_SUMS;

// Tiles whose scales of rows a layer has in shared memory, the next layer's beside them.
constexpr int LAYER_TILES = QKV_TILES + 2 * OUT_TILES + 2 * GATE_TILES;
constexpr int SMALL_LAYER_TILES = SMALL_QKV_TILES + 2 * SMALL_OUT_TILES + 2 * SMALL_GATE_TILES;
constexpr int SCALE_TILES = LAYER_TILES > SMALL_LAYER_TILES ? LAYER_TILES : SMALL_LAYER_TILES;

struct Shared {  // offsets in dynamic shared memory
  static constexpr u32 sums = DEPTH * SLOT_BYTES;  // float [WARPS, tiles, ROWS, 8]; also the sampler's and attention's
  static constexpr u32 x = sums;
  static constexpr u32 squares = sums + SUM_BYTES;  // float [WARPS, ROWS]
  static constexpr u32 scales = squares + WARPS * ROWS * 4;  // QUANT: float [2, SCALE_TILES, 8]
  static constexpr u32 norms = scales + (QUANT ? 2 * SCALE_TILES * 32 : 0);  // Norms [LAYERS + SMALL_LAYERS]
  static constexpr u32 settings = norms + (LAYERS + SMALL_LAYERS) * (QUANT ? 64 : 32);  // Setting [2]
  static constexpr u32 pieces = settings + 96;
  static constexpr u32 attended = pieces + MAX_PIECES * sizeof(Piece);  // FUSED: [FUSED_ROWS], FUSED_STRIDE elements apart
  static constexpr u32 bytes = attended + (FUSED ? FUSED_ROWS * FUSED_STRIDE * 2 : 0);
};

// Where rows of x are: `rows` of them, `stride` elements apart, in L2.
struct Rows {
  const u16* x;
  int stride, rows;
  __device__ __forceinline__ uint4 load(int row, int k) const {
    if (row >= rows) return make_uint4(0, 0, 0, 0);
    return load_shared_l2(x + (i64)row * stride + k);
  }
};

__device__ __forceinline__ float squares_of(uint4 v, float total) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) total = fmaf(high(w[i]), high(w[i]), fmaf(low(w[i]), low(w[i]), total));
  return total;
}
__device__ __forceinline__ u32 normed(u32 v, float scale, u32 weight) {
  return times(pack(low(v) * scale, high(v) * scale), weight);
}
__device__ __forceinline__ uint4 normed(uint4 v, float scale, uint4 w) {
  return make_uint4(normed(v.x, scale, w.x), normed(v.y, scale, w.y), normed(v.z, scale, w.z), normed(v.w, scale, w.w));
}

// Independent chains of products in a sum, by the tiles of a block, and of K.
__host__ __device__ constexpr int chains_of(int tiles, int deep) {
  return tiles == 1 && deep % 4 == 0 ? 4 : tiles == 1 && deep % 3 == 0 ? 3 : tiles <= 2 && deep % 2 == 0 ? 2 : 1;
}
// Where this lane's eight columns of block i of its warp's share of K begin.
template <int FORMAT>
__device__ __forceinline__ int column_of(int i) {
  constexpr int PARTS = Tile<FORMAT>::PARTS, BLOCKS = 2 * PARTS;
  return (threadIdx.x >> 5) * 64 * PARTS + (threadIdx.x & 3) * 8 + i / BLOCKS * 512 * PARTS + i % BLOCKS * 32;
}

// A warp's sums of T tiles, chains added up, for `tile_sum`.
template <int T, int CHAINS>
__device__ __forceinline__ void put_sums(float2* sums, const float (&c)[T][CHAINS][MT][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int t = 0; t < T; t++)
#pragma unroll
    for (int m = 0; m < MT; m++) {
      float total[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        total[i] = c[t][0][m][i];
#pragma unroll
        for (int n = 1; n < CHAINS; n++) total[i] += c[t][n][m][i];
      }
      float2* to = sums + (t * OCTETS + 2 * m) * 32 + lane;
      to[0] = make_float2(total[0], total[1]);
      if (2 * m + 1 < OCTETS) to[32] = make_float2(total[2], total[3]);
    }
}

struct Norm {
  const u16* weight;
  u16* out;   // rows of normalized x, 2 K apart; may be null
  u16* room;  // STAGED: for [ROWS, K]
};

#if STAGED
#include "linear_staged.cuh"
#else
// Code that runs once a layer comes through an instruction cache of 128 KiB, so what is unrolled has at most UNROLLED tiles x
// 512 columns: of a block's tiles some at a time, an even number of an even one, while x stays in the registers.
__host__ __device__ constexpr int group_of(int tiles, int steps) {
  for (int group = tiles; group > 2 - tiles % 2; group--)
    if (tiles % group == 0 && (tiles - group) % 2 == 0 && group * steps <= UNROLLED) return group;
  return 2 - tiles % 2;
}
// Or some of the tiles' columns, for which x is read ahead: blocks of 256 columns, of at most `most`; a turn has whole tiles of
// PARTS * 512 columns, and begins with the first of its chains.
__host__ __device__ constexpr int ahead_of(int tiles, int blocks, int most, int parts, int chains) {
  if (tiles * blocks / 2 <= UNROLLED) return most;
  for (int turn = most / (2 * parts); turn > 1; turn--)
    if (blocks / (2 * parts) % turn == 0 && turn % chains == 0) return turn * 2 * parts;
  return most;
}
__host__ __device__ constexpr int step_of(int tiles) { return tiles % 4 == 0 ? 4 : tiles % 3 == 0 ? 3 : tiles % 2 == 0 ? 2 : 1; }

// Sums of T tiles in `memory`, to be read by `tile_sum` after a barrier of the block. `X` loads (row, column) of x. How a sum
// is cut into chains depends on OF, the block's tiles of this projection, so that groups of them give the same bits.
// `is_new`: x is of the phase before; else it has been read already.
template <int FORMAT, int K, int T, bool NORM, int OF, class X>
__device__ __forceinline__ void project(Stream& stream, Barrier& barrier, bool is_new, const X& x, const Norm& norm) {
  constexpr int PARTS = Tile<FORMAT>::PARTS, QUARTERS = 4 * PARTS;
  constexpr int BLOCKS = K / 256, DEEP = BLOCKS / (2 * PARTS);
  constexpr bool RESIDENT = OCTETS * BLOCKS * 4 <= 64;
  constexpr int CHAINS = chains_of(OF, DEEP);
  constexpr int AHEAD = RESIDENT ? BLOCKS : ahead_of(T, BLOCKS, 16 / OCTETS, PARTS, CHAINS);
  constexpr int GROUP = RESIDENT ? group_of(T, BLOCKS / 2) : T;
  constexpr bool IN_TURNS = !RESIDENT && T * BLOCKS / 2 > UNROLLED && DEEP % (AHEAD / (2 * PARTS)) == 0;
  constexpr int TURN = IN_TURNS ? AHEAD / (2 * PARTS) : DEEP;
  constexpr int U = step_of(GROUP == 1 || (GROUP == 2 && TURN % 2 == 0) ? GROUP * TURN : GROUP);  // tiles taken at once
  constexpr int G = RESIDENT && CHAINS > 1 ? U : GROUP < U ? GROUP : U;  // of these, tiles multiplied in turn: of one k, or of one chain each
  static_assert(TURN % CHAINS == 0 && U % G == 0, "chains divide K");
  static_assert(!NORM || RESIDENT, "what is normalized stays in the registers");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = lane >> 2;

  uint4 weight[NORM ? BLOCKS : 1];
  if (NORM) {
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) weight[i] = load_constant(norm.weight + column_of<FORMAT>(i));
  }
  if (is_new) barrier.wait();

  uint4 a[AHEAD][OCTETS];
  float scale[OCTETS];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
#pragma unroll
    for (int o = 0; o < OCTETS; o++) a[i][o] = x.load(row + 8 * o, column_of<FORMAT>(i));
  if (NORM) {
    float* squares = (float*)(memory + Shared::squares);
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
      float total = 0;
#pragma unroll
      for (int i = 0; i < BLOCKS; i++) total = squares_of(a[i % AHEAD][o], total);
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if ((lane & 3) == 0) squares[warp * ROWS + row + 8 * o] = total;
    }
    block_sync();
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) total += squares[w * ROWS + row + 8 * o];
      scale[o] = rsqrtf(total / K + EPS);
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
#pragma unroll
      for (int o = 0; o < OCTETS; o++) {
        a[i % AHEAD][o] = normed(a[i % AHEAD][o], scale[o], weight[i]);
        if (norm.out && blockIdx.x == 0 && row + 8 * o < x.rows)
          publish((uint4*)(norm.out + (row + 8 * o) * (i64)(2 * K) + column_of<FORMAT>(i)), a[i % AHEAD][o]);
      }
  }

#pragma unroll 1
  for (int begin = 0; begin < T; begin += GROUP) {
    float c[GROUP][CHAINS][MT][4] = {};
#pragma unroll 1
    for (int turn = 0; turn < DEEP; turn += TURN)
#pragma unroll
      for (int first = 0; first < GROUP * TURN; first += U) {
        Tile<FORMAT> w[U];
        stream.take(w);
#pragma unroll
        for (int step = 0; step < U * QUARTERS; step++) {
          const int u = step / (QUARTERS * G) * G + step % G, quarter = step / G % QUARTERS;
          const int t = (first + u) % GROUP, k = (first + u) / GROUP, block = 2 * PARTS * k + quarter / 2;
          const uint2 b = w[u].columns(quarter / 4, quarter % 4);
#pragma unroll
          for (int m = 0; m < MT; m++) {
            const uint4 lower = a[block % AHEAD][2 * m];
            const uint4 upper = 2 * m + 1 < OCTETS ? a[block % AHEAD][2 * m + 1 < OCTETS ? 2 * m + 1 : 0] : make_uint4(0, 0, 0, 0);
            if (quarter % 2 == 0)
              mma(c[t][k % CHAINS][m], lower.x, upper.x, lower.y, upper.y, b.x, b.y);
            else
              mma(c[t][k % CHAINS][m], lower.z, upper.z, lower.w, upper.w, b.x, b.y);
          }
          const int next = (IN_TURNS ? turn * 2 * PARTS : 0) + block + AHEAD;
          if (!RESIDENT && t == GROUP - 1 && quarter % 2 == 1 && next < BLOCKS) {
#pragma unroll
            for (int o = 0; o < OCTETS; o++) a[block % AHEAD][o] = x.load(row + 8 * o, column_of<FORMAT>(next));
          }
        }
        stream.template done<FORMAT, U>();
      }
    put_sums((float2*)(memory + Shared::sums) + (warp * T + begin) * OCTETS * 32, c);
  }
  block_sync();
}

#endif

// Of rows of weights: those of tile `first` and on, in shared memory.
template <int FORMAT = BF16>
struct Scales {
  int first;
};

// Two columns of tile t: place i (row 8 o + lane / 4, columns 2 (lane % 4)) of OCTETS * 32, summed over the warps and scaled.
template <int T, int FORMAT>
__device__ __forceinline__ float2 tile_sum(int t, int i, Scales<FORMAT> scales) {
  constexpr int STRIDE = STAGED ? WARP_SUMS / 8 : T * OCTETS * 32;
  const float2* sums = (const float2*)(memory + Shared::sums) + t * OCTETS * 32 + i;
  float2 total = sums[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) {
    const float2 v = sums[w * STRIDE];
    total.x += v.x;
    total.y += v.y;
  }
  if (FORMAT != BF16) {
    const float2 scale = ((const float2*)(memory + Shared::scales))[(scales.first + t) * 4 + (i & 3)];
    total.x *= scale.x, total.y *= scale.y;
  }
  return total;
}

struct Place {  // of a thread's i-th pair of outputs among T tiles
  int t, inside, row, column;
  template <int WIDTH, int PER_BLOCK>
  __device__ __forceinline__ static Place of(int i, int offset, int tiles) {
    Place p;
    p.t = i / (OCTETS * 32);
    p.inside = i % (OCTETS * 32);
    p.row = p.inside >> 2;
    p.column = (min((int)blockIdx.x * PER_BLOCK + offset, WIDTH / 8 - tiles) + p.t) * 8 + (p.inside & 3) * 2;
    return p;
  }
};

__device__ __forceinline__ u32 swiglu(float2 gate, float2 up) {
  float a = rounded(gate.x), b = rounded(gate.y);
  u32 activated = pack(__fdividef(a, 1.0f + __expf(-a)), __fdividef(b, 1.0f + __expf(-b)));
  return times(activated, pack(up.x, up.y));
}
