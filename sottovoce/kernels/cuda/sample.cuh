// The sampler, one row a block: `torch_ops.sample_codes` says what it means, `random.py` what the noise is. Borders of
// top-k and top-p are thresholds built bit by bit over the scores as ordered integers.

struct Draw {  // settings of all rows
  const i64 *seed, *frame;
  const u8* do_sample;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  i64 do_sample_bytes;
};

struct Limits {  // of codebook 0
  u8* seen;
  const int* slots;
  const float* penalty;
  const u8* banned;
  const int* min_frames;
  i64 eos;
};

struct Setting {  // of one row, in shared memory
  u64 seed, frame;
  float temperature, top_p;
  u32 top_k, samples;
  __device__ void load(const Draw& d, int row) {
    seed = d.seed[row], frame = d.frame[row];
    temperature = d.temperature[row], top_p = d.top_p[row], top_k = max(d.top_k[row], 0);
    samples = d.do_sample_bytes == 1 ? d.do_sample[row] != 0 : ((const int*)d.do_sample)[row] != 0;
  }
};

struct Scratch {  // in shared memory
  u64 best[WARPS];
  uint2 counts[2][WARPS];
  float sums[2][WARPS];
  u32 num_kept;
  float scores[V0];
  u16 kept[V0];
};
static_assert(V % 512 == 0 && V0 % 512 == 0, "a thread takes pairs");
static_assert(sizeof(Scratch) <= SUM_BYTES, "the sampler works where projections add their sums");

__device__ __forceinline__ u32 ordered(float x) {
  u32 bits = __float_as_uint(x == 0 ? 0.0f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u32 warp_sum(u32 v) {
  u32 r;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}

// The lowest id of the largest score, in all threads.
__device__ __forceinline__ u32 best_of(Scratch& s, u64 best) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    u64 other = __shfl_xor_sync(~0u, best, d);
    best = other > best ? other : best;
  }
  if ((threadIdx.x & 31) == 0) s.best[threadIdx.x >> 5] = best;
  block_sync();
#pragma unroll
  for (int w = 0; w < WARPS; w++) best = s.best[w] > best ? s.best[w] : best;
  block_sync();
  return ~(u32)best;
}
__device__ __forceinline__ u64 ranked(float score, u32 token) { return (u64)ordered(score) << 32 | (u32)~token; }

__device__ __forceinline__ float block_sum(Scratch& s, float v, int parity) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  if ((threadIdx.x & 31) == 0) s.sums[parity][threadIdx.x >> 5] = v;
  block_sync();
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += s.sums[parity][w];
  return total;
}

// The largest threshold of WIDTH bits that at least k of `bits` reach; two of its bits a round.
template <int WIDTH, int N>
__device__ __forceinline__ u32 kth_largest(Scratch& s, const u32 (&bits)[N], u32 k) {
  u32 threshold = 0, count = ~0u;
#pragma unroll 1
  for (int shift = WIDTH - 2; shift >= 0 && count != k; shift -= 2) {
    const u32 a = threshold + (1u << shift), b = threshold + (2u << shift), c = threshold + (3u << shift);
    u32 ab = 0, of_c = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      ab += (bits[i] >= a) + ((u32)(bits[i] >= b) << 16);
      of_c += bits[i] >= c;
    }
    ab = warp_sum(ab);
    of_c = warp_sum(of_c);
    const int parity = (shift >> 1) & 1;
    if ((threadIdx.x & 31) == 0) s.counts[parity][threadIdx.x >> 5] = make_uint2(ab, of_c);
    block_sync();
    ab = of_c = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) ab += s.counts[parity][w].x, of_c += s.counts[parity][w].y;
    const u32 of_a = ab & 0xffff, of_b = ab >> 16;
    if (of_c >= k) threshold = c, count = of_c;
    else if (of_b >= k) threshold = b, count = of_b;
    else if (of_a >= k) threshold = a, count = of_a;
  }
  block_sync();
  return threshold;
}

__device__ __forceinline__ float gumbel(u64 seed, u64 frame, u32 codebook, u32 token) {
  u32 c0 = token, c1 = codebook, c2 = (u32)frame, c3 = (u32)(frame >> 32), k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 h0 = __umulhi(0xD2511F53u, c0), h1 = __umulhi(0xCD9E8D57u, c2), l0 = 0xD2511F53u * c0, l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const float u = (float)(c0 >> 9) * 1.1920928955078125e-07f + 5.9604644775390625e-08f;
  return -logf(-logf(u));
}

// A code for `row` from bf16 logits [N]. LIMITED: codebook 0.
template <int N, bool LIMITED>
__device__ __noinline__ u32 draw(const u16* logits, int row, u32 codebook, const Setting& d, const Limits& l, const u16* table) {
  constexpr int EACH = (N + THREADS - 1) / THREADS;
  // What orders the scores: penalized ones need all bits, plain ones are as far apart as bf16 is. 0: not a code.
  constexpr int WIDTH = LIMITED ? 32 : 16;
  Scratch& s = *(Scratch*)(memory + Shared::sums);
  float score[EACH];
  u32 bits[EACH];
  if (threadIdx.x == 0) s.num_kept = 0;
  u32 words[EACH / 2];
#pragma unroll
  for (int i = 0; i < EACH / 2; i++)  // a thread has neighbours, so pairs are one word
    words[i] = load_word_l2(logits + (i64)row * N + (i * THREADS + threadIdx.x) * 2);
  const float penalty = LIMITED ? l.penalty[row] : 1.0f;
  u64 best = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 token = (i / 2 * THREADS + threadIdx.x) * 2 + i % 2;
    score[i] = i % 2 ? high(words[i / 2]) : low(words[i / 2]);
    if (LIMITED) {
      if (l.seen[(i64)l.slots[row] * N + token]) score[i] = score[i] < 0 ? score[i] * penalty : score[i] / penalty;
      if (l.banned[token] || (token == l.eos && (i64)d.frame < l.min_frames[row])) score[i] = -INFINITE;
    }
    if (!d.samples || d.top_p < 1.0f) {
      const u64 rank = ranked(score[i], token);
      best = rank > best ? rank : best;
    }
    bits[i] = ordered(LIMITED ? score[i] / d.temperature : score[i]) >> (32 - WIDTH);
  }
  u32 least = 0;
  if (!d.samples) return best_of(s, best);
  if (d.top_k > 0 && d.top_k < N) least = kth_largest<WIDTH>(s, bits, d.top_k);
  if (d.top_p < 1.0f) {
    const u32 first = best_of(s, best);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if ((i / 2 * THREADS + threadIdx.x) * 2 + i % 2 == first) s.scores[0] = score[i], s.scores[1] = __uint_as_float(bits[i]);
    block_sync();
    const float top = s.scores[0] / d.temperature;
    const u32 most = __float_as_uint(s.scores[1]);
    float mass[EACH], all = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      mass[i] = bits[i] >= least ? expf(score[i] / d.temperature - top) : 0;
      all += mass[i];
    }
    all = block_sum(s, all, 1);
    u32 border = 0;
#pragma unroll 1
    for (int i = 0; i < WIDTH; i++) {
      const u32 candidate = border + (1u << (WIDTH - 1 - i));
      float below = 0;
#pragma unroll
      for (int j = 0; j < EACH; j++) below += bits[j] < candidate ? mass[j] / all : 0;
      if (block_sum(s, below, i & 1) <= 1.0f - d.top_p) border = candidate;
    }
    least = max(least, min(border, most));
  }
  block_sync();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 token = (i / 2 * THREADS + threadIdx.x) * 2 + i % 2;
    if (bits[i] >= least) {
      const u32 at = atomicAdd(&s.num_kept, 1);
      s.kept[at] = token, s.scores[at] = score[i] / d.temperature;
    }
  }
  block_sync();
  if (table && s.num_kept <= 256)  // one of these rows is read next
    for (u32 i = threadIdx.x; i < s.num_kept * (DP / 64); i += THREADS) prefetch_l2(table + (i64)s.kept[i / (DP / 64)] * DP + i % (DP / 64) * 64);
  best = 0;
  for (u32 i = threadIdx.x; i < s.num_kept; i += THREADS) {
    const u32 token = s.kept[i];
    const u64 rank = ranked(s.scores[i] + gumbel(d.seed, d.frame, codebook, token), token);
    best = rank > best ? rank : best;
  }
  return best_of(s, best);
}
