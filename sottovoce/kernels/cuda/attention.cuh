// Attention of one new token a row: head norms, rotation, cache write and the attention itself. The long form reads the
// talker's paged cache in pieces of fixed size, added in a fixed order; the short one is the predictor's 16 positions.

constexpr int HALF_WIDTH = 16;  // lanes that hold a head: 8 elements each
constexpr int CHUNK = 256, PIECE = CHUNK / WARPS;  // positions that a block, and a warp, takes at a time
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM, ATTENDED = HEADS * HEAD_DIM;
static_assert(HEAD_DIM == 128 && HEADS == 2 * KV_HEADS && KV_HEADS == WARPS, "lanes and warps are dealt for these");

__device__ __forceinline__ float half_warp_sum(float v) {
#pragma unroll
  for (int d = 8; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
__device__ __forceinline__ void unpack(uint4 v, float (&f)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) f[2 * i] = low(w[i]), f[2 * i + 1] = high(w[i]);
}
__device__ __forceinline__ uint4 repack(const float (&f)[8]) {
  return make_uint4(pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
}

// Eight elements of a head, normalized and rotated; lane % 16 says which. Every product and the sum are rounded.
__device__ __forceinline__ uint4 norm_and_rotate(uint4 raw, uint4 weight, uint4 cosine, uint4 sine) {
  float scale = rsqrtf(half_warp_sum(squares_of(raw, 0)) / HEAD_DIM + EPS);
  uint4 v = normed(raw, scale, weight);
  float own[8], cos[8], sin[8], out[8];
  unpack(v, own);
  unpack(cosine, cos);
  unpack(sine, sin);
  const float sign = (threadIdx.x & 8) ? 1.0f : -1.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float other = __shfl_xor_sync(~0u, own[i], 8);
    out[i] = rounded(own[i] * cos[i]) + rounded(sign * other * sin[i]);
  }
  return repack(out);
}
__device__ __forceinline__ float dot(const float (&q)[8], uint4 k) {
  float f[8], total = 0;
  unpack(k, f);
#pragma unroll
  for (int i = 0; i < 8; i++) total = fmaf(q[i], f[i], total);
  return total;
}

struct Talker {
  const u16 *q_norm, *k_norm, *cos, *sin;
  u16 *keys, *values;  // [pages, PAGE, KV_HEADS, HEAD_DIM] of this layer
  const int *positions, *pages;
  int max_pages;
};

struct Softmax {  // running, over some positions
  float top, mass, sum[8];
  __device__ void clear() {
    top = -INFINITE;
    mass = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0;
  }
  __device__ __forceinline__ void add(float other_top, float other_mass, const float (&other)[8]) {
    float t = fmaxf(top, other_top);
    float a = t == -INFINITE ? 0 : expf(top - t), b = t == -INFINITE ? 0 : expf(other_top - t);
    top = t;
    mass = mass * a + other_mass * b;
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = sum[i] * a + other[i] * b;
  }
};

// A block's share of one (row, head): positions [chunk * CHUNK, + CHUNK). `parts` [.., 2, HEAD_DIM + 2] for long rows.
__device__ void attend_chunk(const Talker& a, const u16* qkv, int row, int head, int chunk, int num_chunks, int max_chunks,
                             float* parts, u32* done, u16* out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = lane >> 4, place = (lane & 15) * 8;
  const int position = a.positions[row], start = chunk * CHUNK + warp * PIECE;
  const u16* base = qkv + (i64)row * QKV;
  uint4 cosine = load_constant(a.cos + (i64)position * HEAD_DIM + place), sine = load_constant(a.sin + (i64)position * HEAD_DIM + place);
  uint4 q_weight = load_constant(a.q_norm + place), k_weight = load_constant(a.k_norm + place);
  uint4 raw = load_shared_l2(base + (2 * head + half) * HEAD_DIM + place);
  uint4 raw_key = load_shared_l2(base + (HEADS + head) * HEAD_DIM + place);
  uint4 new_value = load_shared_l2(base + (HEADS + KV_HEADS + head) * HEAD_DIM + place);
  uint4 mine = norm_and_rotate(raw, q_weight, cosine, sine);  // of query head 2 head + half
  uint4 new_key = norm_and_rotate(raw_key, k_weight, cosine, sine);
  float q[2][8];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 v = make_uint4(__shfl_sync(~0u, mine.x, i * 16 + (lane & 15)), __shfl_sync(~0u, mine.y, i * 16 + (lane & 15)),
                         __shfl_sync(~0u, mine.z, i * 16 + (lane & 15)), __shfl_sync(~0u, mine.w, i * 16 + (lane & 15)));
    unpack(v, q[i]);
  }
  Softmax s[2];
  s[0].clear();
  s[1].clear();
#pragma unroll 1
  for (int first = start; first < start + PIECE && first <= position; first += 16) {
    uint4 key[8], value[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {  // positions first + 2 i + half
      int at = first + 2 * i + half;
      key[i] = value[i] = make_uint4(0, 0, 0, 0);
      if (at <= position) {
        i64 slot = (((i64)a.pages[row * a.max_pages + at / PAGE] * PAGE + at % PAGE) * KV_HEADS + head) * HEAD_DIM + place;
        if (at < position) {
          key[i] = load_shared_l2(a.keys + slot);
          value[i] = load_shared_l2(a.values + slot);
        } else {
          key[i] = new_key;
          value[i] = new_value;
          *(uint4*)(a.keys + slot) = new_key;
          *(uint4*)(a.values + slot) = new_value;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float score[8], top = -INFINITE, mass = 0, sum[8] = {};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        score[i] = half_warp_sum(dot(q[h], key[i])) * 0.08838834764831845f;
        if (first + 2 * i + half > position) score[i] = -INFINITE;
        top = fmaxf(top, score[i]);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float p = top == -INFINITE ? 0 : expf(score[i] - top), v[8];
        mass += p;
        unpack(value[i], v);
#pragma unroll
        for (int d = 0; d < 8; d++) sum[d] = fmaf(p, v[d], sum[d]);
      }
      s[h].add(top, mass, sum);
    }
  }
  float* cells = (float*)(memory + Shared::sums);  // [WARPS, 2 halves, 2 heads, HEAD_DIM + 2]
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float* cell = cells + ((warp * 2 + half) * 2 + h) * (HEAD_DIM + 2);
#pragma unroll
    for (int d = 0; d < 8; d++) cell[place + d] = s[h].sum[d];
    if (place == 0) cell[HEAD_DIM] = s[h].top, cell[HEAD_DIM + 1] = s[h].mass;
  }
  __syncthreads();
  const int h = threadIdx.x >> 7, d = threadIdx.x & 127;
  float top = -INFINITE, mass = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < 2 * WARPS; i++) top = fmaxf(top, cells[(i * 2 + h) * (HEAD_DIM + 2) + HEAD_DIM]);
#pragma unroll
  for (int i = 0; i < 2 * WARPS; i++) {
    const float* cell = cells + (i * 2 + h) * (HEAD_DIM + 2);
    float weight = expf(cell[HEAD_DIM] - top);
    mass += cell[HEAD_DIM + 1] * weight;
    sum += cell[d] * weight;
  }
  u16* to = out + (i64)row * ATTENDED + (2 * head + h) * HEAD_DIM + d;
  if (num_chunks == 1) {
    *to = (u16)pack(sum / mass, 0);
  } else {
    float* all = parts + (((i64)row * KV_HEADS + head) * 2 + h) * max_chunks * (HEAD_DIM + 2);
    float* part = all + chunk * (HEAD_DIM + 2);
    __stcg(part + d, sum);
    if (d == 0) __stcg(part + HEAD_DIM, top), __stcg(part + HEAD_DIM + 1, mass);
    __threadfence();
    __syncthreads();
    u32* flag = (u32*)cells;
    if (threadIdx.x == 0) *flag = atomicAdd(done + row * KV_HEADS + head, 1) == num_chunks - 1;
    __syncthreads();
    if (*flag) {
      __threadfence();
      top = -INFINITE, mass = 0, sum = 0;
      for (int i = 0; i < num_chunks; i++) top = fmaxf(top, __ldcg(all + i * (HEAD_DIM + 2) + HEAD_DIM));
      for (int i = 0; i < num_chunks; i++) {
        const float* cell = all + i * (HEAD_DIM + 2);
        float weight = expf(__ldcg(cell + HEAD_DIM) - top);
        mass += __ldcg(cell + HEAD_DIM + 1) * weight;
        sum += __ldcg(cell + d) * weight;
      }
      *to = (u16)pack(sum / mass, 0);
      if (threadIdx.x == 0) done[row * KV_HEADS + head] = 0;
    }
  }
  __syncthreads();  // before `cells` is used again
}

struct Predictor {
  const u16 *q_norm, *k_norm, *cos, *sin;
  u16 *keys, *values;  // [B, 16, KV_HEADS, HEAD_DIM] of this layer
};

// Old keys and values of one (row, kv head), asked for before the new ones are known.
struct Old {
  uint4 key[15], value[15];
  __device__ __forceinline__ void load(const Predictor& a, int batch_row, int head, int position) {
    const int place = (threadIdx.x & 15) * 8;
#pragma unroll
    for (int t = 0; t < 15; t++)
      if (t < position) {
        i64 slot = (((i64)batch_row * 16 + t) * KV_HEADS + head) * HEAD_DIM + place;
        key[t] = load_shared_l2(a.keys + slot);
        value[t] = load_shared_l2(a.values + slot);
      }
  }
};

// One warp: a token's two query heads of kv head `head`, a half-warp each. Token `token` of `tokens` new ones at
// `position` + token. Returns 8 elements of this half-warp's head.
__device__ __forceinline__ uint4 attend_short(const Predictor& a, const Old& old, const u16* qkv, int row, int batch_row, int head,
                                              int position, int token, bool writes) {
  const int lane = threadIdx.x & 31, half = lane >> 4, place = (lane & 15) * 8;
  uint4 q_weight = load_constant(a.q_norm + place), k_weight = load_constant(a.k_norm + place);
  float q[8], score[16], top = -INFINITE, mass = 0;
  uint4 new_key[2], new_value[2];
  const u16* own = qkv + (i64)row * QKV;
  uint4 raw = load_shared_l2(own + (2 * head + half) * HEAD_DIM + place);
#pragma unroll
  for (int n = 0; n < 2; n++)
    if (n <= token) {
      const u16* from = qkv + (i64)(row - token + n) * QKV;
      int at = (position + n) * HEAD_DIM + place;
      new_value[n] = load_shared_l2(from + (HEADS + KV_HEADS + head) * HEAD_DIM + place);
      new_key[n] = load_shared_l2(from + (HEADS + head) * HEAD_DIM + place);
      new_key[n] = norm_and_rotate(new_key[n], k_weight, load_constant(a.cos + at), load_constant(a.sin + at));
    }
  int at = (position + token) * HEAD_DIM + place;
  unpack(norm_and_rotate(raw, q_weight, load_constant(a.cos + at), load_constant(a.sin + at)), q);
  if (writes && half == 0) {
    i64 slot = (((i64)batch_row * 16 + position + token) * KV_HEADS + head) * HEAD_DIM + place;
    *(uint4*)(a.keys + slot) = token ? new_key[1] : new_key[0];
    *(uint4*)(a.values + slot) = token ? new_value[1] : new_value[0];
  }
#pragma unroll
  for (int t = 0; t < 16; t++) {
    score[t] = -INFINITE;
    if (t <= position + token) {
      uint4 key = t == position ? new_key[0] : t == position + 1 ? new_key[1] : old.key[t < 15 ? t : 14];
      score[t] = half_warp_sum(dot(q, key)) * 0.08838834764831845f;
    }
    top = fmaxf(top, score[t]);
  }
#pragma unroll
  for (int t = 0; t < 16; t++) {
    score[t] = expf(score[t] - top);
    mass += score[t];
  }
  float sum[8] = {};
#pragma unroll
  for (int t = 0; t < 16; t++)
    if (t <= position + token) {
      uint4 value = t == position ? new_value[0] : t == position + 1 ? new_value[1] : old.value[t < 15 ? t : 14];
      float v[8], p = rounded(score[t] / mass);
      unpack(value, v);
#pragma unroll
      for (int d = 0; d < 8; d++) sum[d] = fmaf(p, v[d], sum[d]);
    }
  return repack(sum);
}
