// What the parts of the frame kernel share: bf16 words, memory operations, the barrier of the whole grid, and the stream of
// weights. Knows no layer. Built by NVRTC without any header, so everything beyond the language is here.
//
// Given by the compiler's command line: GRID (blocks, one an SM), OCTETS (batch rows / 8), DEPTH (tiles in flight),
// STAGED (linear_staged.cuh), TALKER_FORMAT and PREDICTOR_FORMAT (widen.cuh).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int THREADS = 256, WARPS = 8;
#define INFINITE __int_as_float(0x7f800000)
extern __shared__ __align__(16) unsigned char memory[];

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float rounded(float a) { return low(pack(a, a)); }
// Product of two pairs, rounded once: adding -0 changes nothing, and needs no sm_90.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
__device__ __forceinline__ u32 plus(u32 a, u32 b, u32 one = 0x3f803f80u) {  // pairs, rounded once
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(one), "r"(b));
  return r;
}

// Activations pass between SMs, so their loads skip L1.
__device__ __forceinline__ uint4 load_shared_l2(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_word_l2(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_float_l2(const void* p) { return __uint_as_float(load_word_l2(p)); }
__device__ __forceinline__ void publish(u32* p, u32 v) { asm volatile("st.global.cg.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ void publish(uint4* p, uint4 v) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 load_constant(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ uint4 load_slot(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// C[16 rows of x, 8 weight rows] += A[16, 16] B[16, 8].
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void block_sync() { __syncthreads(); }

// All blocks run at once (a cooperative launch); `counter` is zero when the kernel starts and when it ends.
struct Barrier {
  u32* counter;
  u32 target;
#ifdef PROFILE
  i64* log;
  __device__ void note() {
    if (blockIdx.x == 0 && threadIdx.x == 0) *log++ = clock64();
  }
#else
  __device__ void note() {}
#endif
  __device__ __forceinline__ void arrive() {
    block_sync();
    note();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    target += GRID;
  }
  __device__ __forceinline__ void wait() {
    note();
    if (threadIdx.x == 0) {
      u32 count;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
      while (count < target);
    }
    note();
    block_sync();
  }
  __device__ __forceinline__ void finish() {  // the last block to leave sets both counters back
    if (threadIdx.x == 0 && atomicAdd(counter + 32, 1) == GRID - 1) {
      counter[0] = 0;
      counter[32] = 0;
    }
  }
};

#include "widen.cuh"

// One projection as the stream sees it; the host writes these (cuda_frame.py).
struct alignas(16) Piece {
  u64 weight;      // [N, K], plus HAS_SECOND of bf16 or HAS_MULTIPLIER of int4
  u32 row_bytes;   // of K columns
  u32 tiles;       // tiles of 8 rows that a block takes; of gate and up in turn where pair_bytes is not 0
  u32 per_block;   // first tile (or pair) of block b: b * per_block + offset, but at most `last`
  u32 offset;
  u32 last;
  u32 pair_bytes;  // from a gate row to its up row, or 0
#if HAS_INT4
  u64 multipliers;  // the one of 64 bytes at address a is at multipliers + a / 64
#endif
};

// The weights of the whole frame in the order of use, DEPTH tiles ahead, through private slots of shared memory: each thread
// copies what it will itself multiply (of fewer bits: its row's four lanes), so no warp waits for another, and reading goes on
// while the grid waits.
struct Stream {
  u32 piece, end;       // in shared memory
  u64 from;             // of this thread's part of the next tile
  u32 even, odd, wrap;  // from one tile to the next, to the first of the next columns
  u32 t, tiles, left;   // tiles of these columns, of this piece
  u32 slots, at;        // of this thread in shared memory; bytes into the ring of what is used and refilled next

  __device__ void begin(const Piece* pieces, int count, u32 shared, u32 table) {
    for (u32 i = threadIdx.x; i < count * sizeof(Piece) / 16; i += THREADS)
      ((uint4*)(memory + table))[i] = load_constant((const char*)pieces + i * 16);
    block_sync();
    piece = shared + table, end = piece + count * sizeof(Piece);
    slots = shared + threadIdx.x * 16;
    at = 0;
    open();
    for (int i = 0; i < DEPTH; i++) issue();
  }
  __device__ __forceinline__ void open() {
    left = 0;
    if (piece == end) return;
    const uint4 a = load_slot(piece), b = load_slot(piece + 16);
    piece += sizeof(Piece);
    const u32 lane = threadIdx.x & 31, first = min(blockIdx.x * b.x + b.y, b.z), pair_bytes = b.w, tile_bytes = a.z * 8;
    const bool has_second = !QUANT || a.x & HAS_SECOND;
    const u32 shift = has_second ? 10 : 9, chunk = has_second ? lane & 3 : chunk_of_lane();
    tiles = t = a.w;
    left = tiles * (a.z >> shift);
    from = (a.x | (u64)a.y << 32) + (u64)a.z * (first * 8 + (lane >> 2)) + ((threadIdx.x >> 5) << (shift - 3)) + chunk * 16;
    odd = pair_bytes ? pair_bytes : tile_bytes;  // `t` counts down, from an even number for pairs
    even = pair_bytes ? tile_bytes - pair_bytes : tile_bytes;
    wrap = (1 << shift) - (pair_bytes ? tiles / 2 - 1 : tiles - 1) * tile_bytes - pair_bytes;
  }
  __device__ __forceinline__ static u32 wrapped(u32 at) { return at < DEPTH * SLOT_BYTES ? at : at - DEPTH * SLOT_BYTES; }
  __device__ __forceinline__ void issue() {
    if (left) {
      const u32 to = slots + at;
      const u64 source = QUANT ? from & ~15ull : from;
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
      if (!QUANT || from & HAS_SECOND)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + SLOT_BYTES / 2), "l"(source + 64) : "memory");
#if HAS_INT4
      else if (from & HAS_MULTIPLIER) {
        u64 multipliers;  // not worth two registers: they are short
        asm volatile("ld.shared.u64 %0, [%1];" : "=l"(multipliers) : "r"(piece - (u32)sizeof(Piece) + 32));
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(multiplier_place(to)), "l"((multipliers + (from >> 6)) & ~3ull) : "memory");
      }
#endif
      t--;
      from += (i64)(int)(t == 0 ? wrap : t & 1 ? odd : even);
      if (t == 0) t = tiles;
      if (--left == 0) open();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    at = wrapped(at + SLOT_BYTES);
  }
  // The next U tiles; `done` follows once they are multiplied.
  template <int FORMAT, int U>
  __device__ __forceinline__ void take(Tile<FORMAT> (&w)[U]) {
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - U) : "memory");
    if (FORMAT != BF16) __syncwarp();
    read(w);
  }
  template <int FORMAT, int U>
  __device__ __forceinline__ void read(Tile<FORMAT> (&w)[U]) const {  // of tiles that are there
#pragma unroll
    for (int u = 0; u < U; u++) w[u].load(slots + wrapped(at + u * SLOT_BYTES));
  }
  template <int FORMAT, int U>
  __device__ __forceinline__ void done() {
    if (FORMAT != BF16 || HAS_INT4) __syncwarp();  // other lanes have read what is overwritten
#pragma unroll 1
    for (int u = 0; u < U; u++) issue();
  }
};
