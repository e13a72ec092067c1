// The formats of weights (`quantized.py` says what their bytes mean), what a lane holds of a tile, and how bytes become the bf16
// pairs that the products take. Knows no scales of rows: those are for sums (`tile_sum`).
//
// Given by the compiler's command line: TALKER_FORMAT, PREDICTOR_FORMAT, of the layers; everything else is bf16.

enum Format { BF16, INT8, INT4, FP8 };
#define QUANT (TALKER_FORMAT || PREDICTOR_FORMAT)
#define HAS_INT4 (TALKER_FORMAT == 2 || PREDICTOR_FORMAT == 2)

constexpr u32 SLOT_BYTES = 32 * THREADS;  // of a tile: 8 weight rows x 1024 bytes of bf16, else x 512 in the first half

// In a piece's address, what belongs to 16 bytes of a lane: 16 more bytes in the second half of the slot, 64 bytes on; the word
// with the multiplier of its group of 128 columns.
constexpr u32 HAS_SECOND = 1, HAS_MULTIPLIER = 2;

// Of 64 bytes of a row, 16 are copied by each of its four lanes, and a lane reads eight of either half. Rows 2, 3, 6 and 7 have
// their halves exchanged, so that the lanes of four rows read all banks.
__device__ __forceinline__ u32 is_exchanged() { return threadIdx.x >> 3 & 1; }
__device__ __forceinline__ u32 chunk_of_lane() { return (threadIdx.x & 3) ^ is_exchanged() * 2; }
__device__ __forceinline__ u32 multiplier_place(u32 slot) { return slot + SLOT_BYTES / 2 - (threadIdx.x & 31) * 12; }  // of a warp together

// What a lane holds of a tile: of its row, columns 8 g to 8 g + 7 of each of two blocks of 32, and of int4 also those 64 on,
// the second of two PARTS. `columns` gives four of a part's 16.
template <int FORMAT>
struct Tile {
  static constexpr int PARTS = FORMAT == INT4 ? 2 : 1;
  u32 words[4], multiplier;

  __device__ __forceinline__ void load(u32 slot) {
    const u32 at = slot - (threadIdx.x & 3) * 8, swap = is_exchanged() * 32;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(at + swap) : "memory");
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[2]), "=r"(words[3]) : "r"(at + 32 - swap) : "memory");
    if (FORMAT == INT4) {  // the word is of four warps' groups
      u32 word;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(multiplier_place(slot)) : "memory");
      multiplier = whole(__byte_perm(word, 0x43434343u, 0x4040 + (threadIdx.x >> 5 & 3) * 0x0101));
    }
  }
  __device__ __forceinline__ uint2 columns(int part, int quarter) const {
    const u32 word = FORMAT == INT4 ? (words[quarter] ^ 0x88888888u) >> part * 4 : words[quarter];
    return make_uint2(pair(word, 0x4140), pair(word, 0x4342));
  }
  // Two's complement in the lower bytes of a pair that has 0x43 above: 128 + the lower seven bits, less 128 or 256.
  __device__ __forceinline__ static u32 whole(u32 bytes) { return plus(bytes & 0xff80ff80u, bytes & 0xff7fff7fu, 0xbf80bf80u); }
  // Two bytes, which `pick` puts into the lower bytes of a pair. Exact, but for int4 times its multiplier, rounded once.
  __device__ __forceinline__ u32 pair(u32 word, u32 pick) const {
    if (FORMAT == FP8) {  // in upper bytes; moved into the places of bf16, bits are worth 2^-120 of what they are in e4m3
      const u32 bytes = __byte_perm(word, 0, pick << 4 | 4);
      return times((bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u), 0x7b807b80u);
    }
    const u32 bytes = __byte_perm(word, 0x43434343u, pick);
    if (FORMAT == INT8) return whole(bytes);
    return times(plus(bytes & 0xff0fff0fu, 0xc308c308u), multiplier);  // 128 + 8 + q, less 136
  }
};

template <>
struct Tile<BF16> {
  static constexpr int PARTS = 1;
  uint4 blocks[2];
  __device__ __forceinline__ void load(u32 slot) { blocks[0] = load_slot(slot), blocks[1] = load_slot(slot + SLOT_BYTES / 2); }
  __device__ __forceinline__ uint2 columns(int, int quarter) const {
    const uint4 b = blocks[quarter / 2];
    return quarter % 2 ? make_uint2(b.z, b.w) : make_uint2(b.x, b.y);
  }
};
