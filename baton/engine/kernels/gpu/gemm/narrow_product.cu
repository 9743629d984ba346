// A product for few rows, on Hopper. narrow_product.py launches it and defines: ROWS (rows of x in a tile, a multiple
// of 8), GROUPS (of four warps, each with its own rows of W), HALVES (tiles of 64 rows of W that a group has: 1 or 2),
// SPLITS (of K, one for each block of a cluster), STAGES, EPILOGUE (0 plain, 1 residual, 2 SwiGLU), KIND ("bf16" or
// "f16"), and puts `multiply` in place.
//
// W is the matrix units' left operand, so a tile is as many rows of x as there are, not a power of two of them, and
// neither operand passes the registers. One thread of a block asks for tiles of W and x. With SwiGLU the first half of a
// group's rows of W is of Gate, the second of Up: sums of both for one result are in one thread. Blocks of a cluster
// multiply parts of K, and each adds up some rows of all their sums, which it reads in their shared memory.
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { char bytes[128]; };

constexpr int DEPTH = 64, EIGHTS = ROWS / 8, SIDE = 64 * GROUPS, CONSUMERS = 128 * GROUPS;
constexpr bool RESIDUAL = EPILOGUE == 1, SWIGLU = EPILOGUE == 2;
// Results of a tile, and rows of W, of each of which there are `DEPTH` at a time.
constexpr int COLUMNS = SWIGLU ? SIDE : SIDE * HALVES;
constexpr u32 SIDE_BYTES = SIDE * DEPTH * 2, W_BYTES = HALVES * SIDE_BYTES, X_BYTES = ROWS * DEPTH * 2;
constexpr u32 STAGE_BYTES = W_BYTES + X_BYTES;
static_assert(!SWIGLU || HALVES == 2, "Gate and Up");
static_assert(ROWS % 8 == 0 && (size_t)HALVES * SIDE * ROWS * 4 <= (size_t)STAGES * STAGE_BYTES, "sums in the stages");
// L2 eviction hints of the loads: W is read once, x by every block.
constexpr u64 ONCE = 0x12F0000000000000ull, AGAIN = 0x14F0000000000000ull;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void prepare(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait_for(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier)), "l"(hint) : "memory");
}

// The matrix units' descriptor of a tile in shared memory: rows of 128 bytes, swizzled, eight of them in 1,024.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}

// MULTIPLY

__device__ __forceinline__ unsigned short packed(float value) {
  unsigned short half;
  asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

__device__ __forceinline__ float wide(unsigned short half) {
  float value;
  asm("cvt.f32." KIND " %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

// Each sum is rounded first, as if the product had been stored.
__device__ __forceinline__ float silu_times(float gate, float up) {
  const float g = wide(packed(gate));
  return wide(packed(__fdividef(g, 1.0f + __expf(-g)))) * wide(packed(up));
}

// Of every eight rows of a tile a thread has two neighbours, `row` first, and of each half two columns, eight apart.
struct Results {
  unsigned short* out;
  int row, column, M, N;

  // The four sums of an eight of rows: two columns for the rows row, row + 1 each: (r, c), (r + 1, c), (r, c + 8), ….
  __device__ __forceinline__ void store(int eight, int half, const float* first, const float* second) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + eight * 8 + i % 2, c = column + half * SIDE + i / 2 * 8;
      if (r >= M || c >= N) continue;
      unsigned short* place = out + (size_t)r * N + c;
      float value = SWIGLU ? silu_times(first[i], second[i]) : first[i];
      if constexpr (RESIDUAL) value += wide(__ldcg(place));
      *place = packed(value);
    }
  }
};

// Four floats of another block of the cluster, at the place of `address` in this one.
__device__ __forceinline__ float4 there(u32 address, u32 rank) {
  float4 found;
  asm volatile(
      "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at];\n}"
      : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(address), "r"(rank) : "memory");
  return found;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

struct Turn {
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(CONSUMERS + 32)
narrow_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, unsigned short* out,
               int M, int N, int K) {
  extern __shared__ char raw[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const u32 tiles = (shared_address(raw) + 1023) & ~1023u;
  const int split = blockIdx.x % SPLITS, unit = blockIdx.x / SPLITS, wide_tiles = (N + COLUMNS - 1) / COLUMNS;
  const int column = unit % wide_tiles * COLUMNS, row = unit / wide_tiles * ROWS;
  const int steps = (K + DEPTH - 1) / DEPTH, begin = steps * split / SPLITS, end = steps * (split + 1) / SPLITS;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      prepare(&full[s], 1);
      prepare(&empty[s], GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // A kernel behind this one that is launched early finds a place as these blocks end.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS) {
      const auto load_w = [&](int step, u32 stage) {
        expect(&full[stage], STAGE_BYTES);
        for (int half = 0; half < HALVES; ++half)
          load(tiles + stage * STAGE_BYTES + half * SIDE_BYTES, &w_map, step * DEPTH,
               column + half * (SWIGLU ? N : SIDE), &full[stage], ONCE);
      };
      const auto load_x = [&](int step, u32 stage) {
        load(tiles + stage * STAGE_BYTES + W_BYTES, &x_map, step * DEPTH, row, &full[stage], AGAIN);
      };
      // No kernel computes the weights; x is a result of the preceding kernel, which may still run.
      const int early = min(end - begin, STAGES);
      for (int s = 0; s < early; ++s) load_w(begin + s, s);
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int s = 0; s < early; ++s) load_x(begin + s, s);
      Turn turn;
      for (int step = begin + early; step < end; ++step, turn.next()) {
        wait_for(&empty[turn.stage], turn.phase);
        load_w(step, turn.stage);
        load_x(step, turn.stage);
      }
    }
    if constexpr (SPLITS > 1) {
      __syncwarp();
      cluster_barrier();
      cluster_barrier();
    }
    return;
  }

  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  float sums[HALVES][ROWS / 2];
  Turn turn;
  u32 before = 0;
  for (int step = begin; step < end; ++step, turn.next()) {
    wait_for(&full[turn.stage], turn.phase);
    const u32 stage = tiles + turn.stage * STAGE_BYTES;
    const u64 x = descriptor(stage + W_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        multiply(sums[half], descriptor(stage + half * SIDE_BYTES + group * 64 * DEPTH * 2) + k * 2, x + k * 2,
                 step > begin || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (step > begin) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      // One thread frees what all four warps have read: the units' work is the group's.
      if (thread == 0) arrive(&empty[before]);
    }
    before = turn.stage;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  // The preceding kernels' writes are complete since x arrived; these threads must wait for them, too.
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const Results results = {out, row + lane % 4 * 2, column + group * 64 + warp * 16 + lane / 4, M, N};
  if constexpr (SPLITS == 1) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight)
#pragma unroll
      for (int half = 0; half < (SWIGLU ? 1 : HALVES); ++half)
        results.store(eight, half, sums[half] + eight * 4, sums[HALVES - 1] + eight * 4);
  } else {
    // All tiles here have been read once all groups are here: their place is for sums now.
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    const auto place = [&](int half, int eight) {
      return tiles + (((half * GROUPS + group) * EIGHTS + eight) * 128 + thread) * 16;
    };
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int eight = 0; eight < EIGHTS; ++eight) {
        const float* mine = sums[half] + eight * 4;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place(half, eight)), "f"(mine[0]), "f"(mine[1]),
                     "f"(mine[2]), "f"(mine[3]) : "memory");
      }
    cluster_barrier();
    for (int eight = split; eight < EIGHTS; eight += SPLITS) {
      float total[HALVES][4];
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          const float4 part = there(place(half, eight), s);
          total[half][0] = s ? total[half][0] + part.x : part.x;
          total[half][1] = s ? total[half][1] + part.y : part.y;
          total[half][2] = s ? total[half][2] + part.z : part.z;
          total[half][3] = s ? total[half][3] + part.w : part.w;
        }
      }
#pragma unroll
      for (int half = 0; half < (SWIGLU ? 1 : HALVES); ++half) results.store(eight, half, total[half], total[HALVES - 1]);
    }
    // No block ends while another reads its sums.
    cluster_barrier();
  }
}
