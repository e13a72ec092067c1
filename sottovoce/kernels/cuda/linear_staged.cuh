// Projections of more than 16 rows, whose x does not fit the registers: each warp brings its share of x through shared memory,
// 512 columns of K ahead, and rows are normalized once, by a block each, instead of by every block. Same bits as linear.cuh.

constexpr int X_PITCH = 128;                     // bytes of a warp's 64 columns; odd rows have their halves exchanged, so
constexpr int X_SLOT = ROWS * X_PITCH;           // that the lanes of two rows read all banks
__device__ __forceinline__ u32 own_slots() { return (u32)__cvta_generic_to_shared(memory) + Shared::x + (threadIdx.x >> 5) * 2 * X_SLOT; }

// Asks for the warp's columns of step k of x, in the order in which tiles of this format have them.
template <int FORMAT>
__device__ __forceinline__ void stage(const Rows& x, int k) {
  constexpr int PARTS = Tile<FORMAT>::PARTS;
  const int lane = threadIdx.x & 31, part = lane & 7, first = lane >> 3;
  const u16* from = x.x + (i64)first * x.stride + (threadIdx.x >> 5) * 64 * PARTS + k / PARTS * 512 * PARTS + k % PARTS * 64 + part * 8;
  const u32 to = own_slots() + k % 2 * X_SLOT + first * X_PITCH + (part ^ (first & 1) * 4) * 16;
  const i64 step = (i64)x.stride * 4;
#pragma unroll 1  // else the addresses of all rows stay in registers
  for (int i = 0; i < ROWS / 4; i++) {
    const int is_there = first + i * 4 < x.rows;  // else zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 4 * X_PITCH), "l"(is_there ? from : x.x), "r"(is_there * 16)
                 : "memory");
    from += step;
  }
}

// Block b normalizes row b: lane (i, g) has block i of what lane g of a row's four has in linear.cuh, so squares are added from
// lane to lane.
template <int FORMAT, int K>
__device__ __forceinline__ void normalize(const Rows& x, const Norm& norm) {
  constexpr int BLOCKS = K / 256;
  static_assert(BLOCKS <= 8, "a lane has a block");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane & 3, own = lane >> 2, row = blockIdx.x;
  float* squares = (float*)(memory + Shared::squares);
  const bool has_block = own < BLOCKS;
  const int column = column_of<FORMAT>(own);
  const uint4 weight = has_block ? load_constant(norm.weight + column) : make_uint4(0, 0, 0, 0);
  const uint4 v = has_block ? x.load(row, column) : make_uint4(0, 0, 0, 0);
  float total = 0;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    const float before = i ? __shfl_sync(~0u, total, (i - 1) * 4 + g) : 0;
    if (own == i) total = squares_of(v, before);
  }
  total = __shfl_sync(~0u, total, (BLOCKS - 1) * 4 + g);
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  if (lane == 0) squares[warp] = total;
  block_sync();
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += squares[w];
  const uint4 n = normed(v, rsqrtf(total / K + EPS), weight);
  if (has_block) {
    publish((uint4*)(norm.room + (i64)row * K + column), n);
    if (norm.out) publish((uint4*)(norm.out + (i64)row * 2 * K + column), n);
  }
}

// As in linear.cuh.
template <int FORMAT, int K, int T, bool NORM, int OF>
__device__ __forceinline__ void project(Stream& stream, Barrier& barrier, bool is_new, const Rows& x, const Norm& norm) {
  constexpr int PARTS = Tile<FORMAT>::PARTS, STEPS = K / 512, DEEP = STEPS / PARTS, CHAINS = chains_of(OF, DEEP);
  // Copies that may be on their way while a tile's first step is computed: the next step's x, and tiles of steps after this one.
  constexpr int AHEAD = (T < DEPTH - T ? T : DEPTH - T) + 1;
  static_assert(T < DEPTH && STEPS >= 2, "a step's tiles are in shared memory together");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Rows from = x;
  if constexpr (NORM) {
    if (is_new) {
      barrier.wait();
      if (blockIdx.x < x.rows) normalize<FORMAT, K>(x, norm);
      barrier.arrive();
    }
    from = Rows{norm.room, K, x.rows};
  }
  if (is_new) barrier.wait();
  stage<FORMAT>(from, 0);
  asm volatile("cp.async.commit_group;" ::: "memory");
  stage<FORMAT>(from, 1);
  asm volatile("cp.async.commit_group;" ::: "memory");

  const u32 own = own_slots() + (lane >> 2) * X_PITCH + (lane & 3) * 16, odd = (lane >> 2 & 1) * 64;
  float c[T][CHAINS][MT][4] = {};
#pragma unroll 1
  for (int first = 0; first < DEEP; first += CHAINS)
#pragma unroll
    for (int n = 0; n < CHAINS; n++)
#pragma unroll 1  // for fewer registers
      for (int part = 0; part < PARTS; part++) {
        const int k = (first + n) * PARTS + part;
        if (part || k == 0) asm volatile("cp.async.wait_group 1;" ::: "memory");
        else asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
        __syncwarp();  // the other lanes' copies
        Tile<FORMAT> w[T];
        stream.read(w);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 at = own + k % 2 * X_SLOT + (h * 64 ^ odd);
#pragma unroll
          for (int m = 0; m < MT; m++) {
            const uint4 lower = load_slot(at + 2 * m * 8 * X_PITCH), upper = load_slot(at + (2 * m + 1) * 8 * X_PITCH);
#pragma unroll
            for (int t = 0; t < T; t++) {
              const uint2 b = w[t].columns(part, 2 * h);
              mma(c[t][n][m], lower.x, upper.x, lower.y, upper.y, b.x, b.y);
            }
#pragma unroll
            for (int t = 0; t < T; t++) {
              const uint2 b = w[t].columns(part, 2 * h + 1);
              mma(c[t][n][m], lower.z, upper.z, lower.w, upper.w, b.x, b.y);
            }
          }
        }
        if (part == PARTS - 1) stream.template done<FORMAT, T>();
        __syncwarp();
        if (k + 2 < STEPS) stage<FORMAT>(from, k + 2);
        asm volatile("cp.async.commit_group;" ::: "memory");
      }

  put_sums((float2*)(memory + Shared::sums + warp * WARP_SUMS), c);  // in place of the warp's x
  block_sync();
}
