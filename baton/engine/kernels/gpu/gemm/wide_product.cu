// A product for some hundreds of rows, on Hopper. wide_product.py launches it and defines: COLUMNS (results a tile),
// EPILOGUE (0 plain, 1 residual, 2 SwiGLU), SPLITS, X_STAGES, W_STAGES, KIND ("bf16" or "f16"), and puts `multiply`
// in place.
//
// Two blocks of a cluster compute the same columns of 256 rows, 128 each. One loads one half of the tile's rows of W
// (of SwiGLU: those of Gate), the other the other, each for both blocks, so W comes out of the cache once. In a block
// one thread asks for W, one for x, and two groups of four warps multiply 64 rows each; a sum of Gate and the same of
// Up are in one thread.
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { char bytes[128]; };

constexpr int ROWS = 128, DEPTH = 64;
constexpr bool RESIDUAL = EPILOGUE == 1, SWIGLU = EPILOGUE == 2;
// Rows of W that a block loads, which is also how many sums a thread has: 64 rows by twice as many, of 128 threads.
constexpr int HALF = SWIGLU ? COLUMNS : COLUMNS / 2, EIGHTS = COLUMNS / 8;
constexpr u32 X_BYTES = ROWS * DEPTH * 2, HALF_BYTES = HALF * DEPTH * 2, W_BYTES = 2 * HALF_BYTES;
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

// Relaxed: it reports only that this block has read. `.release.cluster` would add a fence of the whole GPU's memory,
// which takes twice as long as a tile's work.
__device__ __forceinline__ void arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int k, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier)), "l"(AGAIN) : "memory");
}

__device__ __forceinline__ void load_for_both(u32 to, const TensorMap* map, int k, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5, %6;"
      ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier)), "h"((unsigned short)3), "l"(ONCE)
      : "memory");
}

// The matrix units' descriptor of a tile in shared memory: rows of 128 bytes, swizzled, eight of them in 1,024.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}

// MULTIPLY

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float rounded(float value) {
  float result;
  asm("{\n.reg .b16 half;\ncvt.rn." KIND ".f32 half, %1;\ncvt.f32." KIND " %0, half;\n}" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float low_of(u32 both) {
  float result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32." KIND " %0, low;\n}" : "=f"(result) : "r"(both));
  return result;
}

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
  asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
  u32 before = 0, last;
  if (threadIdx.x % 128 == 0)
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(arrived), "r"(SPLITS - 1) : "memory");
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.eq.u32 mine, %1, %2;\n"
      "bar.red.or.pred any, %3, 128, mine;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(last) : "r"(before), "r"(SPLITS - 1), "r"(group) : "memory");
  return last;
}

// Columns, in eights, whose parts and earlier results are asked for together: as many as there are registers for.
constexpr int AT_ONCE = EIGHTS <= 16 ? EIGHTS : 8;

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
  asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
  for (int line = threadIdx.x % 128; line < SPLITS * EIGHTS * 16; line += 128)
    asm volatile("discard.global.L2 [%0], 128;" ::"l"((const char*)parts + line * 128) : "memory");
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

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
wide_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, unsigned short* out,
             float4* partial, u32* arrived, int M, int N, int K) {
  extern __shared__ char raw[];
  __shared__ __align__(8) u64 x_full[X_STAGES], x_empty[X_STAGES], w_full[W_STAGES], w_empty[W_STAGES];
  const u32 x_tiles = (shared_address(raw) + 1023) & ~1023u, w_tiles = x_tiles + X_STAGES * X_BYTES;
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int tiles = (N + COLUMNS - 1) / COLUMNS, units = tiles * ((M + 2 * ROWS - 1) / (2 * ROWS));
  const int steps = (K + DEPTH - 1) / DEPTH;
  // The splits of a tile are neighbours: they begin together.
  const int first = blockIdx.x / 2, items = units * SPLITS, stride = gridDim.x / 2;
  const int group = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    for (int s = 0; s < X_STAGES; ++s) {
      prepare(&x_full[s], 1);
      prepare(&x_empty[s], 2);
    }
    for (int s = 0; s < W_STAGES; ++s) {
      prepare(&w_full[s], 1);
      // The two groups here, and those of the other block, whose tiles this one's loads fill too.
      prepare(&w_empty[s], 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  // All blocks are on the chip, or at work on it: another wide product behind this one finds a place as they end, and
  // asks for its weights while the last of them still multiply.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  Turn xs, ws;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int item = first; item < items; item += stride) {
        const int unit = item / SPLITS, split = item % SPLITS;
        const int row = unit % tiles * COLUMNS + (rank ? SWIGLU ? N : HALF : 0);
        const int end = steps * (split + 1) / SPLITS;
        for (int step = steps * split / SPLITS; step < end; ++step, ws.next(W_STAGES)) {
          wait_for(&w_empty[ws.stage], ws.phase ^ 1);
          expect(&w_full[ws.stage], W_BYTES);
          load_for_both(w_tiles + ws.stage * W_BYTES + rank * HALF_BYTES, &w_map, step * DEPTH, row,
                        &w_full[ws.stage]);
        }
      }
    } else if (threadIdx.x == 32) {
      // No kernel computes the weights; x is a result of the preceding kernel, which may still run.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int item = first; item < items; item += stride) {
        const int unit = item / SPLITS, split = item % SPLITS;
        const int row = unit / tiles * 2 * ROWS + (int)rank * ROWS;
        const int end = steps * (split + 1) / SPLITS;
        for (int step = steps * split / SPLITS; step < end; ++step, xs.next(X_STAGES)) {
          wait_for(&x_empty[xs.stage], xs.phase ^ 1);
          expect(&x_full[xs.stage], X_BYTES);
          load(x_tiles + xs.stage * X_BYTES, &x_map, step * DEPTH, row, &x_full[xs.stage]);
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, mine = (group - 1) * 64;
    const int teller = threadIdx.x % 128;
    float sums[HALF];
    for (int item = first; item < items; item += stride) {
      const int unit = item / SPLITS, split = item % SPLITS;
      const int begin = steps * split / SPLITS, end = steps * (split + 1) / SPLITS;
      u32 x_before = 0, w_before = 0;
      // A thread of each group frees what all four warps have read: the units' work is the group's.
      const auto free_tiles = [&] {
        if (teller < 2) arrive_at(&w_empty[w_before], teller);
        if (teller == 2) arrive(&x_empty[x_before]);
      };
      for (int step = begin; step < end; ++step, xs.next(X_STAGES), ws.next(W_STAGES)) {
        wait_for(&x_full[xs.stage], xs.phase);
        wait_for(&w_full[ws.stage], ws.phase);
        const u64 a = descriptor(x_tiles + xs.stage * X_BYTES + mine * DEPTH * 2);
        const u64 b = descriptor(w_tiles + ws.stage * W_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply(sums, a + k * 2, b + k * 2, step > begin || k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (step > begin) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          free_tiles();
        }
        x_before = xs.stage;
        w_before = ws.stage;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      free_tiles();

      const int top = unit / tiles * 2 * ROWS + (int)rank * ROWS + mine;
      const Results results = {out, top + warp * 16 + lane / 4, unit % tiles * COLUMNS + lane % 4 * 2, M, N};
      if constexpr (SWIGLU) {
        store_swiglu(sums, results);
      } else if (top < M) {
        // The preceding kernels' writes are complete since x arrived; these threads must wait for them, too.
        asm volatile("griddepcontrol.wait;" ::: "memory");
        const int place = (unit * 2 + (int)rank) * 2 + group - 1;
        finish(sums, split, results, partial + (size_t)place * SPLITS * EIGHTS * 128, arrived + place, group);
      }
    }
  }
  // Neither block may end while the other fills or frees its tiles.
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
