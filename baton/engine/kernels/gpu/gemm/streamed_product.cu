// A few rows of x, bfloat16, times W in int4, on Hopper. streamed_product.py launches it and defines: X_EIGHTS (rows of
// x a block, in eights), ROW_TILES (tiles of 16 columns of results a warp), ROW_WARPS and DEPTH_WARPS (warps of a block
// by rows of W and by columns of K), PIECES (64 bytes of a row each that a warp takes in a step), SPLITS, W_STEPS and
// X_STAGES (steps of W and of x in flight), EPILOGUE (0 plain, 1 residual, 2 SwiGLU, 3 GEGLU), GROUP_PIECES (pieces that
// share a scale; 0: all of a row), SCALE_ROWS (rows that do), HAS_ZEROS, HAS_BIAS.
//
// The matrix units sum over K in whatever order, as long as it is the same for W and x. So a thread takes 16 bytes of a
// row of W as they lie in memory, and of x the columns that those are: W goes to registers, becomes bfloat16 there, and
// is multiplied from there. x goes through shared memory, since all warps need it.
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr bool GROUPED = GROUP_PIECES > 0, RESIDUAL = EPILOGUE == 1, GATED = EPILOGUE >= 2;
constexpr int HALVES = GATED ? 2 : 1, TILES = ROW_TILES * HALVES;
constexpr int X_ROWS = 8 * X_EIGHTS, COLUMNS = 16 * ROW_TILES * ROW_WARPS;
constexpr int THREADS = 32 * ROW_WARPS * DEPTH_WARPS;
constexpr int PIECE_BYTES = 64, PIECE = 128, WIDTH = PIECES * PIECE;
// A chunk is 8 columns of x, 16 bytes: those of two products of 16 columns for a group of four threads.
constexpr int CHUNKS = WIDTH / 8, PIECE_CHUNKS = PIECE / 8, THREAD_CHUNKS = PIECE_CHUNKS / 4;
constexpr int STAGE_CHUNKS = DEPTH_WARPS * X_ROWS * CHUNKS, ROW_CHUNKS = DEPTH_WARPS * CHUNKS;
// Rows of x that a block's threads copy at a time; an even number, so that a thread's are all even or all odd.
constexpr int COPIED_ROWS = THREADS / ROW_CHUNKS;
static_assert(THREADS % ROW_CHUNKS == 0 && (COPIED_ROWS % 2 == 0 || COPIED_ROWS >= X_ROWS));
// A row of sums in shared memory: rows of x that two threads store at a time are not in the same banks.
constexpr int PITCH = COLUMNS * HALVES + 4;

#ifndef EMULATED
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// W is read once, and not kept near.
__device__ __forceinline__ uint4 load_bytes(const unsigned char* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// 16 bytes from global to shared memory; zeros where not `kept`.
__device__ __forceinline__ void copy_chunk(uint4* to, const void* from, bool kept) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(kept ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_stages() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// sums [16, 8] += W [16, 16] · x [16, 8]
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&w)[4], u32 x0, u32 x1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1));
}

__device__ __forceinline__ float number(unsigned short half) { return __uint_as_float((u32)half << 16); }

__device__ __forceinline__ unsigned short half_of(float value) {
  unsigned short half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// How many splits of this tile came before; counts to SPLITS - 1, then from zero.
__device__ __forceinline__ u32 arrive(u32* arrived) {
  u32 before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(arrived), "r"(SPLITS - 1) : "memory");
  return before;
}
#endif

__device__ __forceinline__ float rounded(float value) { return number(half_of(value)); }

// Each sum is rounded first, as if the product had been stored.
__device__ __forceinline__ float gated(float gate, float up) {
  const float g = rounded(gate);
  // (1 + tanh(z / 2)) / 2 is the logistic function of z.
  const float z = EPILOGUE == 3 ? fmaxf(1.5957691216057308f * (g + 0.044715f * g * g * g), -80.0f) : g;
  return rounded(g / (1.0f + __expf(-z))) * rounded(up);
}

// A thread's part of W in a step: of every tile two rows, eight apart.
struct Held {
  uint4 of[TILES][2][PIECES];
};

// A thread's view of W, whose rows are a multiple of 16: where its rows begin. Tiles past the end are read from the last,
// and never stored; pieces past the end meet zeros of x.
struct Weight {
  const unsigned char* bytes;
  const float* scales;
  const unsigned char* zeros;
  u32 row_at[TILES][2], scale_at[TILES][2];
  int pieces, depth;

  __device__ __forceinline__ Weight(const unsigned char* bytes, const float* scales, const unsigned char* zeros,
                                    int first, int depth, int N, int K, int groups)
      : bytes(bytes), scales(scales), zeros(zeros), pieces((K + PIECE - 1) / PIECE), depth(depth) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 row = tile / ROW_TILES * N + min(first + tile % ROW_TILES * 16, N - 16) + i * 8 + lane / 4;
        row_at[tile][i] = row * pieces * PIECE_BYTES + lane % 4 * 16;
        scale_at[tile][i] = row / SCALE_ROWS * groups;
      }
  }

  __device__ __forceinline__ u32 piece(int step, int i) const {
    return min((step * DEPTH_WARPS + depth) * PIECES + i, pieces - 1);
  }

  __device__ __forceinline__ void load(Held& held, int step) const {
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
      const unsigned char* from = bytes + piece(step, n) * PIECE_BYTES;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) held.of[tile][i][n] = load_bytes(from + row_at[tile][i]);
    }
  }
};

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four codes in the low halves of a word's bytes, as two pairs of numbers in their order: the bits of 128 + code are
// those of the code beside 0x43; `zero`: 128 + the code of zero, twice.
__device__ __forceinline__ void numbers(u32 codes, u32 zero, u32& first, u32& second) {
  first = subtract(__byte_perm(codes, 0x43434343, 0x4140), zero);
  second = subtract(__byte_perm(codes, 0x43434343, 0x4342), zero);
}

// The columns of W that belong to a thread's chunk `c` of a piece: operands of two products, `w[n][i]` and `w[n][2 + i]`
// of row i.
__device__ __forceinline__ void operands(const uint4& bytes, u32 zero, int c, int i, u32 (&w)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
    numbers(word(bytes, c % 2 * 2 + n) >> (c / 2 * 4) & 0x0f0f0f0f, zero, w[n][i], w[n][2 + i]);
}

// The place of a thread's chunk `c` in a row of a piece of x.
__device__ __forceinline__ int chunk_of(int c) {
  return 8 * (c / 2) + 2 * (threadIdx.x % 4) + c % 2;
}

using Sums = float[TILES][X_EIGHTS][4];

// Adds the products of a piece with x, but for the scales; `x`: rows of x in shared memory, of which this piece begins
// at chunk `first`.
__device__ __forceinline__ void add_piece(Sums& sums, const Held& held, int piece, const u32 (&zeros)[TILES][2],
                                          const uint4* x, int first) {
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int c = 0; c < THREAD_CHUNKS; ++c) {
    u32 w[TILES][2][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) operands(held.of[tile][i][piece], zeros[tile][i], c, i, w[tile]);
    const int chunk = (first + chunk_of(c)) ^ (row & 1);
#pragma unroll
    for (int eight = 0; eight < X_EIGHTS; ++eight) {
      const uint4 v = x[(eight * 8 + row) * CHUNKS + chunk];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        multiply(sums[tile][eight], w[tile][0], v.x, v.y);
        multiply(sums[tile][eight], w[tile][1], v.z, v.w);
      }
    }
  }
}

__device__ __forceinline__ void add_scaled(Sums& sums, const Sums& parts, const float (&scales)[TILES][2]) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int eight = 0; eight < X_EIGHTS; ++eight)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[tile][eight][i] = fmaf(parts[tile][eight][i], scales[tile][i / 2], sums[tile][eight][i]);
}

__device__ __forceinline__ void add_step(Sums& sums, const Weight& weight, const Held& held, int step, const uint4* x) {
#pragma unroll
  for (int n = 0; n < PIECES; ++n) {
    u32 zeros[TILES][2];
    float scales[TILES][2];
    const u32 group = GROUPED ? weight.piece(step, n) / (GROUPED ? GROUP_PIECES : 1) : 0;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Those of neighbouring groups come with one line of the first-level cache.
        const u32 at = weight.scale_at[tile][i] + group;
        if (GROUPED) scales[tile][i] = __ldg(weight.scales + at);
        // 128 + zero, twice.
        const u32 zero = HAS_ZEROS ? __ldg(weight.zeros + at) : 8;
        zeros[tile][i] = (zero << 16 | zero) + 0x43004300;
      }
    if (GROUPED) {
      Sums parts = {};
      add_piece(parts, held, n, zeros, x, n * PIECE_CHUNKS);
      add_scaled(sums, parts, scales);
    } else {
      add_piece(sums, held, n, zeros, x, n * PIECE_CHUNKS);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
streamed_product(const unsigned short* x, const unsigned char* bytes, const float* scales,
                 const unsigned char* zeros, const unsigned short* bias, unsigned short* out, float* partial,
                 u32* arrived, int M, int N, int K, int groups) {
  extern __shared__ uint4 shared[];
  const int tiles = (N + COLUMNS - 1) / COLUMNS, unit = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
  const int first_column = unit % tiles * COLUMNS, first_row = unit / tiles * X_ROWS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, depth = warp / ROW_WARPS, row_warp = warp % ROW_WARPS;
  const int steps = (K + WIDTH * DEPTH_WARPS - 1) / (WIDTH * DEPTH_WARPS);
  const int begin = steps * split / SPLITS, end = steps * (split + 1) / SPLITS;
  const Weight weight(bytes, scales, zeros, first_column + row_warp * ROW_TILES * 16, depth, N, K, groups);

  // Of a step's columns of x a thread copies the same chunk of several rows.
  const int chunk = threadIdx.x % ROW_CHUNKS, copied_row = threadIdx.x / ROW_CHUNKS;
  const unsigned short* from = x + (u64)(first_row + copied_row) * K + chunk * 8;
  const u32 to = (chunk / CHUNKS * X_ROWS + copied_row) * CHUNKS + (chunk % CHUNKS ^ (copied_row & 1));
  const auto load_x = [&](int step, int stage) {
    const int k = step * DEPTH_WARPS * WIDTH;
    const bool inside = step < end && k + chunk * 8 < K;
#pragma unroll
    for (int m = 0; m < X_ROWS; m += COPIED_ROWS) {
      if (copied_row + m >= X_ROWS) break;
      const bool kept = inside && first_row + copied_row + m < M;
      copy_chunk(shared + stage * STAGE_CHUNKS + to + m * CHUNKS, kept ? from + (u64)m * K + k : x, kept);
    }
    end_stage();
  };

  // No kernel computes the weights; x is a result of the preceding kernel, which may still run.
  Held held[W_STEPS];
#pragma unroll
  for (int i = 0; i < W_STEPS; ++i)
    if (begin + i < end) weight.load(held[i], begin + i);
  let_next_kernel_start();
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < X_STAGES - 1; ++i) load_x(begin + i, i);

  Sums sums = {};
  int stage = 0, next_stage = X_STAGES - 1;
  for (int first = begin; first < end; first += W_STEPS)
#pragma unroll
    for (int i = 0; i < W_STEPS; ++i) {
      const int step = first + i;
      if (step >= end) break;
      wait_for_stages<X_STAGES - 2>();
      // All have this step of x, and none reads the one before any more, whose place the next takes.
      __syncthreads();
      load_x(step + X_STAGES - 1, next_stage);
      add_step(sums, weight, held[i], step, shared + stage * STAGE_CHUNKS + depth * X_ROWS * CHUNKS);
      if (step + W_STEPS < end) weight.load(held[i], step + W_STEPS);
      next_stage = stage;
      stage = stage == X_STAGES - 1 ? 0 : stage + 1;
    }

  // Sums meet in shared memory: those of the warps that share rows of W, and neighbouring columns in one place.
  wait_for_stages<0>();
  __syncthreads();
  float* exchanged = (float*)shared;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int eight = 0; eight < X_EIGHTS; ++eight)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = GROUPED ? 1.0f : __ldg(scales + weight.scale_at[tile][i / 2]);
        const int column = tile / ROW_TILES * COLUMNS + (row_warp * ROW_TILES + tile % ROW_TILES) * 16 + lane / 4;
        const int m = depth * X_ROWS + eight * 8 + lane % 4 * 2 + i % 2;
        exchanged[m * PITCH + column + i / 2 * 8] = scale * sums[tile][eight][i];
      }
  __syncthreads();

  constexpr int RESULTS = X_ROWS * COLUMNS;
  const auto sum_of = [&](int result, int half) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < DEPTH_WARPS; ++part)
      sum += exchanged[(part * X_ROWS + result / COLUMNS) * PITCH + half * COLUMNS + result % COLUMNS];
    return sum;
  };
  float* parts = partial + (u64)unit * SPLITS * HALVES * RESULTS;
  if (SPLITS > 1) {
    for (int result = threadIdx.x; result < RESULTS; result += THREADS)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        __stcg(parts + (split * HALVES + half) * RESULTS + result, sum_of(result, half));
    __syncthreads();
    // No block waits for another: the last to arrive adds the parts up, in their order whichever it is.
    const bool last = threadIdx.x == 0 && arrive(arrived + unit) == SPLITS - 1;
    if (!__syncthreads_or(last)) return;
  }
  for (int result = threadIdx.x; result < RESULTS; result += THREADS) {
    const int m = first_row + result / COLUMNS, n = first_column + result % COLUMNS;
    if (m >= M || n >= N) continue;
    float total[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float sum = SPLITS == 1 ? sum_of(result, half) : 0.0f;
      if (SPLITS > 1)
#pragma unroll
        for (int part = 0; part < SPLITS; ++part) sum += __ldcg(parts + (part * HALVES + half) * RESULTS + result);
      if (HAS_BIAS) sum += number(bias[half * N + n]);
      total[half] = sum;
    }
    unsigned short* place = out + (u64)m * N + n;
    if (RESIDUAL) total[0] += number(*place);
    *place = half_of(GATED ? gated(total[0], total[HALVES - 1]) : total[0]);
  }
}
