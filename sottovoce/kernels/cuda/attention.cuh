// Attention of one new token a row: head norms, rotation, cache write and the attention itself, a warp for a kv head and 16
// positions at a time. Pieces have fixed sizes and are added in a fixed order. The talker's cache is paged and long, the
// predictor's is 16 positions.
//
// Scores are products of keys (M: 16 positions) and the two query heads (N), in the k order of linear.cuh: lane (r, g) =
// (lane / 4, lane % 4) holds columns 32 b + 8 g to + 7, b < 4, of row r. For the sums over values, lane (n, g) holds columns
// 8 n to 8 n + 7 of each half of positions 2 g, 2 g + 1, 2 g + 8 and 2 g + 9; product j takes column j of each lane's eight.

constexpr int CHUNK = 512;  // positions of a long row that a block takes, 16 a warp in turn
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM, ATTENDED = HEADS * HEAD_DIM;
constexpr int CELL = HEAD_DIM + 2;  // floats of a head's partial result: sums, largest score, mass
static_assert(HEAD_DIM == 128 && HEADS == 2 * KV_HEADS && KV_HEADS == WARPS, "lanes and warps are dealt for these");

__device__ __forceinline__ u32 from_lane(u32 v, int lane) { return __shfl_sync(~0u, v, lane); }
__device__ __forceinline__ uint4 from_lane(uint4 v, int lane) {
  return make_uint4(from_lane(v.x, lane), from_lane(v.y, lane), from_lane(v.z, lane), from_lane(v.w, lane));
}
__device__ __forceinline__ float over_rows_max(float v) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return __shfl_sync(~0u, v, 0);
}
__device__ __forceinline__ float over_rows_sum(float v) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) v += __shfl_xor_sync(~0u, v, d);
  return __shfl_sync(~0u, v, 0);
}

// What a token brings, by lane row: 0 and 1 its two queries, 2 its key, 3 the key of the token before it in the launch, 4
// its value. What needs no barrier is loaded first.
struct Token {
  uint4 v[4], weight[4], cos[2], sin[2];

  __device__ __forceinline__ void load_constants(const u16* q_norm, const u16* k_norm, const u16* cosines, const u16* sines, int position) {
    const int row = (threadIdx.x & 31) >> 2, column = (threadIdx.x & 3) * 8;
    const u16* norm = row < 2 ? q_norm : k_norm;
    const i64 turn = (i64)max(position - (row == 3), 0) * HEAD_DIM + column;
#pragma unroll
    for (int b = 0; b < 4; b++) weight[b] = load_constant(norm + 32 * b + column);
#pragma unroll
    for (int b = 0; b < 2; b++) cos[b] = load_constant(cosines + turn + 32 * b), sin[b] = load_constant(sines + turn + 32 * b);
  }
  __device__ __forceinline__ void load(const u16* qkv, int head, bool has_previous) {
    const int row = (threadIdx.x & 31) >> 2, column = (threadIdx.x & 3) * 8;
    const int source = row < 2 ? 2 * head + row : row < 4 ? HEADS + head : HEADS + KV_HEADS + head;
    const u16* from = qkv + source * HEAD_DIM + column - (row == 3 && has_previous ? QKV : 0);
#pragma unroll
    for (int b = 0; b < 4; b++) v[b] = load_shared_l2(from + 32 * b);
    float total = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) total = squares_of(v[b], total);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float scale = rsqrtf(total / HEAD_DIM + EPS);
    if (row < 4) {
#pragma unroll
      for (int b = 0; b < 4; b++) v[b] = normed(v[b], scale, weight[b]);
#pragma unroll
      for (int b = 0; b < 2; b++) rotate(v[b], v[b + 2], cos[b], sin[b]);
    }
  }
  // Every product is rounded before the sum, as in the published model.
  __device__ __forceinline__ static void rotate(uint4& a, uint4& b, uint4 c, uint4 s) {
    rotate(a.x, b.x, c.x, s.x), rotate(a.y, b.y, c.y, s.y), rotate(a.z, b.z, c.z, s.z), rotate(a.w, b.w, c.w, s.w);
  }
  __device__ __forceinline__ static void rotate(u32& a, u32& b, u32 c, u32 s) {
    const u32 first = plus(times(b, s), times(a, c), 0xbf80bf80u);
    b = plus(times(b, c), times(a, s));
    a = first;
  }
  __device__ __forceinline__ void write(u16* key, u16* value) const {  // of the token's place in the cache, this head
    const int row = (threadIdx.x & 31) >> 2, column = (threadIdx.x & 3) * 8;
    if (row == 2 || row == 4) {
      u16* to = (row == 2 ? key : value) + column;
#pragma unroll
      for (int b = 0; b < 4; b++) *(uint4*)(to + 32 * b) = v[b];
    }
  }
};

// Keys and values of 16 positions of one kv head. `Place` gives where a position's are, or null.
struct Sixteen {
  uint4 key[2][4], value[4][2];

  __device__ __forceinline__ static int value_position(int i) { return 2 * (threadIdx.x & 3) + (i & 1) + (i >> 1) * 8; }

  template <class Place>
  __device__ __forceinline__ void load_keys(const u16* keys, const Place& place) {
    const int row = (threadIdx.x & 31) >> 2, column = (threadIdx.x & 3) * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const i64 at = place(row + 8 * i);
#pragma unroll
      for (int b = 0; b < 4; b++) key[i][b] = at < 0 ? make_uint4(0, 0, 0, 0) : load_shared_l2(keys + at + 32 * b + column);
    }
  }
  template <class Place>
  __device__ __forceinline__ void load_values(const u16* values, const Place& place) {
    const int row = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const i64 at = place(value_position(i));
#pragma unroll
      for (int h = 0; h < 2; h++) value[i][h] = at < 0 ? make_uint4(0, 0, 0, 0) : load_shared_l2(values + at + 64 * h + row * 8);
    }
  }
  // Puts a new token at `position` of the 16: its value, from its row of `qkv`, and its key, from lane row `source`.
  __device__ __forceinline__ void insert_value(const u16* qkv, int head, int position) {
    const int row = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (value_position(i) == position) {
#pragma unroll
        for (int h = 0; h < 2; h++) value[i][h] = load_shared_l2(qkv + (HEADS + KV_HEADS + head) * HEAD_DIM + 64 * h + row * 8);
      }
  }
  __device__ __forceinline__ void insert_key(const Token& token, int source, int position) {
    const int lane = threadIdx.x & 31, row = lane >> 2;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint4 v = from_lane(token.v[b], source * 4 + (lane & 3));
      if (row == position) key[0][b] = v;
      if (row + 8 == position) key[1][b] = v;
    }
  }
  // Scores of positions row and row + 8 with both heads, valid in lanes with g = 0: [2 rows][2 heads].
  __device__ __forceinline__ void score(const Token& token, float (&s)[4]) const {
    float c[2][4] = {};
#pragma unroll
    for (int b = 0; b < 4; b++) {
      mma(c[0], key[0][b].x, key[1][b].x, key[0][b].y, key[1][b].y, token.v[b].x, token.v[b].y);
      mma(c[1], key[0][b].z, key[1][b].z, key[0][b].w, key[1][b].w, token.v[b].z, token.v[b].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = (c[0][i] + c[1][i]) * 0.08838834764831845f;
  }
  // sums[j] += weights p (as `score` gives scores) times values of half h; rows 0 and 1 of lanes are the heads.
  __device__ __forceinline__ void weigh(const float (&p)[4], int h, float (&sums)[8][4]) const {
    const int lane = threadIdx.x & 31, g = lane & 3;
    const u32 near = pack(p[0], p[1]), far = pack(p[2], p[3]), pick = lane < 4 ? 0x5410u : 0x7632u;
    const u32 a0 = __byte_perm(from_lane(near, 8 * g), from_lane(near, 8 * g + 4), pick);
    const u32 a2 = __byte_perm(from_lane(far, 8 * g), from_lane(far, 8 * g + 4), pick);
    const u32* v0 = (const u32*)&value[0][h];
    const u32* v1 = (const u32*)&value[1][h];
    const u32* v2 = (const u32*)&value[2][h];
    const u32* v3 = (const u32*)&value[3][h];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 half = j & 1 ? 0x7632u : 0x5410u;
      mma(sums[j], a0, 0, a2, 0, __byte_perm(v0[j / 2], v1[j / 2], half), __byte_perm(v2[j / 2], v3[j / 2], half));
    }
  }
};

struct Talker {
  const u16 *q_norm, *k_norm, *cos, *sin;
  u16 *keys, *values;  // [pages, PAGE, KV_HEADS, HEAD_DIM] of this layer
  const int *positions, *pages;
  int max_pages;
  __device__ __forceinline__ i64 place(int page, int position, int head) const {
    return (((i64)page * PAGE + position % PAGE) * KV_HEADS + head) * HEAD_DIM;
  }
};
static_assert(PAGE % 16 == 0, "16 positions lie in one page");

// A block's share of one (row, kv head): positions [chunk * CHUNK, + CHUNK). `parts` [row, head, 2, chunks, CELL]: long rows.
__device__ __forceinline__ void attend_chunk(const Talker& a, Barrier& barrier, bool wait, const u16* qkv, int row, int head, int chunk,
                                             int max_chunks, i64 next_layer, float* parts, u32* done, u16* out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane & 3;
  const int position = a.positions[row], num_chunks = position / CHUNK + 1;
  const int end = min(position + 1, (chunk + 1) * CHUNK);
  const int begin = chunk * CHUNK + warp * 16;
  int first = begin, pages = 0;  // lane i: page of this warp's i-th 16 positions
  if (lane < CHUNK / (16 * WARPS) && begin + lane * 16 * WARPS < end) pages = a.pages[row * a.max_pages + (begin + lane * 16 * WARPS) / PAGE];
  i64 at = a.place(__shfl_sync(~0u, pages, 0), first, head);
  const auto old = [&](int i) { return first + i < position ? at + i * KV_HEADS * HEAD_DIM : (i64)-1; };
  Token token;
  token.load_constants(a.q_norm, a.k_norm, a.cos, a.sin, position);
  Sixteen cache;
  if (first < end) cache.load_keys(a.keys, old), cache.load_values(a.values, old);
  if (wait) barrier.wait();
  const u16* own = qkv + (i64)row * QKV;
  if (first <= position && position < first + 16) cache.insert_value(own, head, position - first);
  token.load(own, head, false);
  float top[2] = {-INFINITE, -INFINITE}, mass[2] = {0, 0}, sums[2][8][4] = {};
#pragma unroll 1
  while (first < end) {
    if (first <= position && position < first + 16) {
      cache.insert_key(token, 2, position - first);
      const i64 to = at + (position - first) * KV_HEADS * HEAD_DIM;
      token.write(a.keys + to, a.values + to);
    }
    float p[4], factor[2];
    cache.score(token, p);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + (lane >> 2) + (i >> 1) * 8 > position) p[i] = -INFINITE;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float larger = fmaxf(top[h], over_rows_max(fmaxf(p[h], p[h + 2])));
      factor[h] = expf(top[h] - larger);
      top[h] = larger;
      p[h] = expf(p[h] - larger), p[h + 2] = expf(p[h + 2] - larger);
      mass[h] = mass[h] * factor[h] + over_rows_sum(p[h] + p[h + 2]);
    }
    const float mine = lane < 4 ? factor[0] : factor[1];
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i / 8][i % 8][0] *= mine, sums[i / 8][i % 8][1] *= mine;
    cache.weigh(p, 0, sums[0]);
    cache.weigh(p, 1, sums[1]);
    first += 16 * WARPS;
    if (first < end) {
      at = a.place(__shfl_sync(~0u, pages, (first - begin) / (16 * WARPS)), first, head);
      cache.load_keys(a.keys, old), cache.load_values(a.values, old);
      if (position < first + 16) cache.insert_value(own, head, position - first);
    }
  }
  float* cells = (float*)(memory + Shared::sums);  // [WARPS, 2 heads, CELL]
  if (lane < 8) {
    float* cell = cells + (warp * 2 + (lane >> 2)) * CELL;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      cell[i / 8 * 64 + 16 * g + i % 8] = sums[i / 8][i % 8][0];
      cell[i / 8 * 64 + 16 * g + 8 + i % 8] = sums[i / 8][i % 8][1];
    }
    if (g == 0) cell[HEAD_DIM] = lane ? top[1] : top[0], cell[HEAD_DIM + 1] = lane ? mass[1] : mass[0];
  }
  block_sync();
  const int h = threadIdx.x >> 7, d = threadIdx.x & 127;
  float best = -INFINITE, whole = 0, sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) best = fmaxf(best, cells[(w * 2 + h) * CELL + HEAD_DIM]);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float* cell = cells + (w * 2 + h) * CELL;
    const float weight = expf(cell[HEAD_DIM] - best);
    whole += cell[HEAD_DIM + 1] * weight;
    sum += cell[d] * weight;
  }
  u32* to = (u32*)(out + (i64)row * ATTENDED + (2 * head + h) * HEAD_DIM + (d & ~1));
  const auto put = [&](float v) {
    const u32 pair = pack(v, __shfl_down_sync(~0u, v, 1));
    if (d % 2 == 0) publish(to, pair);
  };
  if (num_chunks == 1) {
    put(sum / whole);
  } else {
    float* all = parts + (((i64)row * KV_HEADS + head) * 2 + h) * max_chunks * CELL;
    float* part = all + chunk * CELL;
    publish((u32*)part + d, __float_as_uint(sum));
    if (d < 2) publish((u32*)part + HEAD_DIM + d, __float_as_uint(d ? whole : best));
    __threadfence();
    block_sync();
    u32* is_last = (u32*)cells;
    if (threadIdx.x == 0) *is_last = atomicAdd(done + row * KV_HEADS + head, 1) == num_chunks - 1;
    block_sync();
    if (*is_last) {
      __threadfence();
      best = -INFINITE, whole = 0, sum = 0;
      for (int i = 0; i < num_chunks; i++) best = fmaxf(best, load_float_l2(all + i * CELL + HEAD_DIM));
      for (int i = 0; i < num_chunks; i++) {
        const float* cell = all + i * CELL;
        const float weight = expf(load_float_l2(cell + HEAD_DIM) - best);
        whole += load_float_l2(cell + HEAD_DIM + 1) * weight;
        sum += load_float_l2(cell + d) * weight;
      }
      put(sum / whole);
      if (threadIdx.x == 0) done[row * KV_HEADS + head] = 0;
    }
  }
  // What this warp will read of the next layer. Of many rows it would not stay in L2.
  for (first = begin; !STAGED && first < end; first += 16 * WARPS) {
    at = next_layer + a.place(__shfl_sync(~0u, pages, (first - begin) / (16 * WARPS)), first + (lane >> 1), head) + (lane & 1) * 64;
    prefetch_l2(a.keys + at);
    prefetch_l2(a.values + at);
  }
  block_sync();  // before `cells` is used again
}

struct Predictor {
  const u16 *q_norm, *k_norm, *cos, *sin;
  u16 *keys, *values;  // [B, 16, KV_HEADS, HEAD_DIM] of this layer
};

// One warp: both query heads of kv head `head` for one token of the predictor, token `index` of the new ones at `position`.
struct Short {
  Token token;
  Sixteen cache;

  __device__ __forceinline__ static i64 place(int batch_row, int position, int head) {
    return (((i64)batch_row * 16 + position) * KV_HEADS + head) * HEAD_DIM;
  }
  __device__ __forceinline__ void before(const Predictor& a, int batch_row, int head, int position, int index) {
    token.load_constants(a.q_norm, a.k_norm, a.cos, a.sin, position + index);
    const auto old = [&](int t) { return t < position ? place(batch_row, t, head) : (i64)-1; };
    cache.load_keys(a.keys, old), cache.load_values(a.values, old);
  }
  // `to`: where the two heads' outputs go, [2 HEAD_DIM].
  __device__ __forceinline__ void after(const Predictor& a, const u16* own, int batch_row, int head, int position, int index, bool writes, u16* to) {
    const int lane = threadIdx.x & 31, g = lane & 3, at = position + index;
    cache.insert_value(own, head, at);
    if (index > 0) cache.insert_value(own - QKV, head, at - 1);
    token.load(own, head, index > 0);
    cache.insert_key(token, 2, at);
    if (index > 0) cache.insert_key(token, 3, at - 1);
    if (writes) token.write(a.keys + place(batch_row, at, head), a.values + place(batch_row, at, head));
    float p[4];
    cache.score(token, p);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if ((lane >> 2) + (i >> 1) * 8 > at) p[i] = -INFINITE;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float top = over_rows_max(fmaxf(p[h], p[h + 2]));
      p[h] = expf(p[h] - top), p[h + 2] = expf(p[h + 2] - top);
      const float mass = over_rows_sum(p[h] + p[h + 2]);
      p[h] /= mass, p[h + 2] /= mass;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {  // one after the other, for fewer registers
      float s[8][4] = {};
      cache.weigh(p, h, s);
      if (lane < 8) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const uint4 v = make_uint4(pack(s[0][c], s[1][c]), pack(s[2][c], s[3][c]), pack(s[4][c], s[5][c]), pack(s[6][c], s[7][c]));
          *(uint4*)(to + (lane >> 2) * HEAD_DIM + h * 64 + 16 * g + 8 * c) = v;
        }
      }
    }
  }
};
