// A product for some hundreds of rows, on Hopper. wide_product.py launches it, puts hopper_instructions.cu and
// `multiply` in front of it, and defines: COLUMNS (results a tile), EPILOGUE (0 plain, 1 residual, 2 SwiGLU), SPLITS,
// X_STAGES, W_STAGES, X_SHARERS, KIND ("bf16" or "f16").
//
// The blocks of a cluster share the tiles of one operand, which so come out of the cache once: each loads a part for
// all. X_SHARERS 1, for more than 128 rows: two blocks compute the same columns of 256 rows, 128 each, and share W; a
// part is one half of the tile's rows of W (of SwiGLU: those of Gate, or those of Up). X_SHARERS 2 or 4, for up to 128
// rows: as many blocks compute the same rows of as many tiles of columns, and share x.
//
// In a block one thread asks for W, one for x, and two groups of four warps multiply 64 rows each; a sum of Gate and
// the same of Up are in one thread.
//
// A stage has a barrier `full` and a barrier `empty` in every block, and all blocks of a cluster go through the same
// steps. `full` awaits one arrival, of its own block's loader, which arms it with the bytes of the whole tile (X_BYTES,
// W_BYTES), and those bytes, whoever asked for them: parts that other blocks load may come before it is armed. `empty`
// of a tile that is shared awaits the two groups of each block, since what a block loads goes to all: a loader that has
// passed it knows the stage to be free in every block. No barrier completes a turn before all have seen the one in
// front: `full` is armed by its own block's loader after `empty`, at which its block's groups arrive after `full`; a
// group arrives at `empty` of a shared stage after it has read all blocks' parts, so after each of their loaders has
// passed the turn in front. A group frees a step's tiles when it has asked for the next step's product: two stages at
// least. host/cluster.cpp among the tests checks all of this.
constexpr int ROWS = 128, DEPTH = 64;
constexpr bool RESIDUAL = EPILOGUE == 1, SWIGLU = EPILOGUE == 2, SHARES_X = X_SHARERS > 1;
constexpr int CLUSTER = SHARES_X ? X_SHARERS : 2;
// The results that a cluster computes at a time.
constexpr int UNIT_ROWS = SHARES_X ? ROWS : CLUSTER * ROWS, UNIT_COLUMNS = SHARES_X ? CLUSTER * COLUMNS : COLUMNS;
// Rows of W in a load, which is also how many sums a thread has: 64 rows by twice as many, of 128 threads.
constexpr int HALF = SWIGLU ? COLUMNS : COLUMNS / 2, EIGHTS = COLUMNS / 8;
// Rows of x in a load.
constexpr int X_PART = SHARES_X ? ROWS / CLUSTER : ROWS;
constexpr u32 X_BYTES = ROWS * DEPTH * 2, HALF_BYTES = HALF * DEPTH * 2, W_BYTES = 2 * HALF_BYTES;
// Groups that read a tile: the two of a block, or those of all blocks that share it.
constexpr u32 X_READERS = SHARES_X ? 2 * CLUSTER : 2, W_READERS = SHARES_X ? 2 : 2 * CLUSTER;
static_assert(X_STAGES >= 2 && W_STAGES >= 2);
// L2 eviction hints of the loads: W is read once, x by every cluster.
constexpr u64 ONCE = 0x12F0000000000000ull, AGAIN = 0x14F0000000000000ull;

__device__ __forceinline__ float high_of(u32 both) { return low_of(both >> 16); }

// Each sum is rounded first, as if the product had been stored.
__device__ __forceinline__ float silu_times(float gate, float up) {
  const float g = rounded(gate);
  return rounded(__fdividef(g, 1.0f + __expf(-g))) * rounded(up);
}

// Where a thread stores its part of a product: of every eight columns of a tile it has two, in two rows eight apart;
// `row` and `column` are its first.
struct Results {
  unsigned short* out;
  int row, column, M, N;

  __device__ __forceinline__ bool holds(int eight, int i) const { return column + eight * 8 < N && row + i * 8 < M; }
  __device__ __forceinline__ u32* at(int eight, int i) const {
    return (u32*)(out + (size_t)(row + i * 8) * N + column + eight * 8);
  }
};

__device__ __forceinline__ void store_swiglu(const float (&sums)[HALF], const Results& results) {
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
    const float* gate = sums + eight * 4;
    const float* up = gate + HALF / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (results.holds(eight, i))
        *results.at(eight, i) = pack(silu_times(gate[i * 2], up[i * 2]), silu_times(gate[i * 2 + 1], up[i * 2 + 1]));
  }
}

// Where the splits' parts of a group's sums are kept, [SPLITS, EIGHTS, 128 threads].
__device__ __forceinline__ float4* part_at(float4* parts, int split, int eight) {
  return parts + (split * EIGHTS + eight) * 128 + threadIdx.x % 128;
}

// Whether the 128 threads of this group are the last of their tile's splits to come here; each has written its part
// before. No block waits for another: a split that is not the last has nothing left to do, so the product ends
// however few blocks the GPU runs at a time. The last sees all parts, and leaves the count at zero for the next launch.
__device__ __forceinline__ bool arrives_last(u32* arrived, int group) {
  group_sync(group);
  return group_any(group, threadIdx.x % 128 == 0 && count_up(arrived, SPLITS - 1) == SPLITS - 1);
}

// Columns, in eights, whose parts and earlier results are asked for together: as many as there are registers for.
constexpr int AT_ONCE = EIGHTS <= 16 && SPLITS < 4 ? EIGHTS : 8;

// The sums of all splits for AT_ONCE eights from `first` on, added in the order of the splits whichever of them does
// it: `split`, whose own are `sums`; it reads the others'.
__device__ __forceinline__ void add_up(float (&sums)[HALF], int first, int split, float4* parts) {
  float4 total[AT_ONCE];
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) {
    float4 part[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= EIGHTS) continue;
      const float* mine = sums + (first + i) * 4;
      part[i] = make_float4(mine[0], mine[1], mine[2], mine[3]);
      if (s != split) part[i] = __ldcg(part_at(parts, s, first + i));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= EIGHTS) continue;
      if (s == 0) {
        total[i] = part[i];
        continue;
      }
      total[i].x += part[i].x;
      total[i].y += part[i].y;
      total[i].z += part[i].z;
      total[i].w += part[i].w;
    }
  }
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    if (first + i >= EIGHTS) continue;
    float* mine = sums + (first + i) * 4;
    mine[0] = total[i].x;
    mine[1] = total[i].y;
    mine[2] = total[i].z;
    mine[3] = total[i].w;
  }
}

// Parts that have been read are not wanted any more: that the cache writes them to memory some time later, while
// others read there, is avoided.
__device__ __forceinline__ void forget(float4* parts, int group) {
  group_sync(group);
  for (int line = threadIdx.x % 128; line < SPLITS * EIGHTS * 16; line += 128)
    discard_line((const char*)parts + line * 128);
}

// What a group does with its sums. With splits, the last of them stores the tile's results, the others their parts.
__device__ __forceinline__ void finish(float (&sums)[HALF], int split, const Results& results, float4* parts,
                                       u32* arrived, int group) {
  if constexpr (SPLITS > 1) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
      const float* mine = sums + eight * 4;
      __stcg(part_at(parts, split, eight), make_float4(mine[0], mine[1], mine[2], mine[3]));
    }
    if (!arrives_last(arrived, group)) return;
  }
#pragma unroll
  for (int first = 0; first < EIGHTS; first += AT_ONCE) {
    u32 before[AT_ONCE][2];
#pragma unroll
    for (int n = 0; RESIDUAL && n < 2 * AT_ONCE; ++n) {
      const int eight = first + n / 2;
      before[n / 2][n % 2] = eight < EIGHTS && results.holds(eight, n % 2) ? __ldcg(results.at(eight, n % 2)) : 0;
    }
    if constexpr (SPLITS > 1) add_up(sums, first, split, parts);
#pragma unroll
    for (int n = 0; n < 2 * AT_ONCE; ++n) {
      const int eight = first + n / 2, i = n % 2;
      if (eight >= EIGHTS || !results.holds(eight, i)) continue;
      float low = sums[eight * 4 + i * 2], high = sums[eight * 4 + i * 2 + 1];
      if constexpr (RESIDUAL) {
        low += low_of(before[n / 2][i]);
        high += high_of(before[n / 2][i]);
      }
      *results.at(eight, i) = pack(low, high);
    }
  }
  if constexpr (SPLITS > 1) forget(parts, group);
}

struct Turn {
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next(u32 stages) {
    if (++stage == stages) { stage = 0; phase ^= 1; }
  }
};

// What a block does at a time: a split of its part of a unit, in steps of DEPTH columns of K. The splits of a unit are
// neighbours: they begin together.
struct Item {
  int split, begin, end, top, left, place;

  __device__ __forceinline__ Item(int item, int tiles, int steps, int rank) {
    const int unit = item / SPLITS;
    split = item % SPLITS;
    begin = steps * split / SPLITS;
    end = steps * (split + 1) / SPLITS;
    top = unit / tiles * UNIT_ROWS + (SHARES_X ? 0 : rank * ROWS);
    left = unit % tiles * UNIT_COLUMNS + (SHARES_X ? rank * COLUMNS : 0);
    place = unit * CLUSTER + rank;
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
wide_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, unsigned short* out,
             float4* partial, u32* arrived, int M, int N, int K) {
  __shared__ __align__(8) u64 x_full[X_STAGES], x_empty[X_STAGES], w_full[W_STAGES], w_empty[W_STAGES];
  const u32 x_tiles = (shared_address(raw) + 1023) & ~1023u, w_tiles = x_tiles + X_STAGES * X_BYTES;
  const int rank = cluster_rank();
  const int tiles = (N + UNIT_COLUMNS - 1) / UNIT_COLUMNS, units = tiles * ((M + UNIT_ROWS - 1) / UNIT_ROWS);
  const int steps = (K + DEPTH - 1) / DEPTH;
  const int first = blockIdx.x / CLUSTER, items = units * SPLITS, stride = gridDim.x / CLUSTER;
  const int group = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    for (int s = 0; s < X_STAGES; ++s) {
      prepare(&x_full[s], 1);
      prepare(&x_empty[s], X_READERS);
    }
    for (int s = 0; s < W_STAGES; ++s) {
      prepare(&w_full[s], 1);
      prepare(&w_empty[s], W_READERS);
    }
    publish_barriers();
  }
  __syncthreads();
  cluster_sync();
  // All blocks are on the chip, or at work on it: another wide product behind this one finds a place as they end, and
  // asks for its weights while the last of them still multiply.
  let_next_begin();

  Turn xs, ws;
  if (group == 0) {
    give_registers();
    if (threadIdx.x == 0) {
      // From a tile's first half of its rows of W to the second.
      const int second = SWIGLU ? N : HALF;
      for (int i = first; i < items; i += stride) {
        const Item item(i, tiles, steps, rank);
        for (int step = item.begin; step < item.end; ++step, ws.next(W_STAGES)) {
          u64* const full = &w_full[ws.stage];
          const u32 to = w_tiles + ws.stage * W_BYTES;
          wait_for(&w_empty[ws.stage], ws.phase ^ 1);
          expect(full, W_BYTES);
          if constexpr (SHARES_X) {
            // Rows that W has not are zeros, and count as bytes like others.
            load(to, &w_map, step * DEPTH, item.left, full, ONCE);
            load(to + HALF_BYTES, &w_map, step * DEPTH, item.left + second, full, ONCE);
          } else {
            load_for_all(to + rank * HALF_BYTES, &w_map, step * DEPTH, item.left + rank * second, full, ONCE,
                         CLUSTER);
          }
        }
      }
    } else if (threadIdx.x == 32) {
      // No kernel computes the weights; x is a result of the preceding kernel, which may still run.
      wait_for_previous();
      for (int i = first; i < items; i += stride) {
        const Item item(i, tiles, steps, rank);
        for (int step = item.begin; step < item.end; ++step, xs.next(X_STAGES)) {
          u64* const full = &x_full[xs.stage];
          const u32 to = x_tiles + xs.stage * X_BYTES;
          wait_for(&x_empty[xs.stage], xs.phase ^ 1);
          expect(full, X_BYTES);
          if constexpr (SHARES_X)
            load_for_all(to + rank * (X_BYTES / CLUSTER), &x_map, step * DEPTH, item.top + rank * X_PART, full, AGAIN,
                         CLUSTER);
          else
            load(to, &x_map, step * DEPTH, item.top, full, AGAIN);
        }
      }
    }
  } else {
    take_registers();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, mine = (group - 1) * 64;
    const int teller = threadIdx.x % 128;
    float sums[HALF];
    for (int i = first; i < items; i += stride) {
      const Item item(i, tiles, steps, rank);
      u32 x_before = 0, w_before = 0;
      // A thread of each group frees what all four warps have read: the units' work is the group's.
      const auto free_tiles = [&] {
        if (teller < CLUSTER) arrive_at(SHARES_X ? &x_empty[x_before] : &w_empty[w_before], teller);
        if (teller == CLUSTER) arrive(SHARES_X ? &w_empty[w_before] : &x_empty[x_before]);
      };
      for (int step = item.begin; step < item.end; ++step, xs.next(X_STAGES), ws.next(W_STAGES)) {
        wait_for(&x_full[xs.stage], xs.phase);
        wait_for(&w_full[ws.stage], ws.phase);
        const u64 a = descriptor(x_tiles + xs.stage * X_BYTES + mine * DEPTH * 2);
        const u64 b = descriptor(w_tiles + ws.stage * W_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply(sums, a + k * 2, b + k * 2, step > item.begin || k > 0);
        commit_products();
        if (step > item.begin) {
          wait_for_products<1>();
          free_tiles();
        }
        x_before = xs.stage;
        w_before = ws.stage;
      }
      wait_for_products<0>();
      free_tiles();

      const int top = item.top + mine;
      const Results results = {out, top + warp * 16 + lane / 4, item.left + lane % 4 * 2, M, N};
      if constexpr (SWIGLU) {
        store_swiglu(sums, results);
      } else if (top < M && item.left < N) {  // of a unit's last tiles of columns some may hold none
        // The preceding kernels' writes are complete since x arrived; these threads must wait for them, too.
        wait_for_previous();
        const int place = item.place * 2 + group - 1;
        finish(sums, item.split, results, partial + (size_t)place * SPLITS * EIGHTS * 128, arrived + place, group);
      }
    }
  }
  // No block may end while others free its tiles; all that they load into it its groups have waited for.
  cluster_sync();
}
