// The exchange among the devices ("ranks") of a worker within a step, over plain memory that each may load and store.
//
// Constants: RANKS, WIDTH (elements of a row), FLOATS (elements are float32, not bfloat16), THREADS (of a block of
// reduce_rows; no fewer than RANKS), and of reduce_rows POST_NORM (the sum has a norm of its own), NORM (the next norm is
// computed too), CODES (and its rows become e4m3), WIDE_GAINS (gains are float32 beside bfloat16).
//
// A rank's memory, its arena, begins as follows; `exchange_layout.py` has the same numbers. A rank writes its own flag,
// the one by its number, in every other rank's arena.
//
//     0     steps, solo     the steps begun on this device; whether it runs alone
//     128   error           not zero: some wait of some rank has timed out. Never cleared.
//     256   flags           [RANKS], 128 bytes apart: the epoch that each rank has reached
//
// An epoch is `step · nodes + node`: a flag's value, which only grows. Its meaning is always that all work which precedes
// the node on the flag's device is done, never that a block has come somewhere. Therefore any block may set it, all set
// it, and no block waits for a block: a grid need not be resident as a whole.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int MOST_RANKS = 8;
constexpr int ERROR_AT = 128, FLAGS_AT = 256, LINE = 128;
constexpr int ELEMENTS = FLOATS ? 4 : 8;  // of 16 bytes, a chunk
constexpr int CHUNKS = WIDTH / ELEMENTS, HELD = (CHUNKS + THREADS - 1) / THREADS;
static_assert(WIDTH % ELEMENTS == 0 && RANKS >= 2 && RANKS <= MOST_RANKS && THREADS >= RANKS);

#ifndef EMULATED
constexpr int WARP = 32;
// Polls of a flag between two looks at the clock and at the error word.
constexpr u32 POLLS = 16;

__device__ __forceinline__ u64 acquire(const u64* from) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void release(u64* to, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Another device's memory is read past the first-level cache, which nothing keeps coherent with it.
__device__ __forceinline__ uint4 load_chunk(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_word(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

template <class Value>
__device__ __forceinline__ void store(Value* to, Value value) { *to = value; }

__device__ __forceinline__ u64 clock_ns() {
  u64 value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value)::"memory");
  return value;
}

// Which block of the grid this is to arrive, from 0; counts to gridDim.x - 1, then from zero.
__device__ __forceinline__ u32 arrive(u32* arrived) {
  u32 before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(arrived), "r"(gridDim.x - 1) : "memory");
  return before;
}

__device__ __forceinline__ float number(u16 half) { return __uint_as_float((u32)half << 16); }

__device__ __forceinline__ u16 half_of(float value) {
  u16 half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

// Two numbers as e4m3, `low` in the low byte.
__device__ __forceinline__ u16 codes_of(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

__device__ __forceinline__ float* block_memory() {
  __shared__ float memory[3 * (THREADS / WARP)];
  return memory;
}

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

constexpr int WARPS = THREADS / WARP;
static_assert(THREADS % WARP == 0);

// All ranks as one of them sees them.
struct Ranks {
  char* arenas[MOST_RANKS];
  u64* records;  // host memory: RECORD_WORDS for each rank that this one may have waited for in vain
  u64 deadline_ns;
  u32 rank;
  u32 nodes;  // of a step
};

constexpr int RECORD_WORDS = 5;  // step, node, nanoseconds waited, the epoch that the other rank has reached, 1

__device__ __forceinline__ u64* flag_at(char* arena, int rank) { return (u64*)(arena + FLAGS_AT + rank * LINE); }
__device__ __forceinline__ u64* error_at(char* arena) { return (u64*)(arena + ERROR_AT); }

// A node of the step that this device is in. `reads`: whether this thread reads which step that is: where all threads of
// many blocks do, they wait for one another, since it is one word that no first-level cache may hold.
struct Node {
  u64 step = 0, epoch;
  u32 number;
  bool solo = false;

  __device__ __forceinline__ Node(const Ranks& ranks, u32 number, u64 after = 0, bool reads = true) : number(number) {
    const volatile u64* state = (const volatile u64*)ranks.arenas[ranks.rank];
    if (reads) {
      step = state[0] + after;
      solo = state[1];
    }
    epoch = step * ranks.nodes + number;
  }
};

// Says on all devices that the exchange has failed. The host's record comes first, so that whoever sees the error finds
// it. The rank tells of nothing that it has computed before this has been said: the first rank, which waits for all at a
// step's end, knows of every wait of the step that was in vain.
__device__ __forceinline__ void fail(const Ranks& ranks, const Node& node, int peer, u64 waited_ns) {
  u64* record = ranks.records + peer * RECORD_WORDS;
  store(record, node.step);
  store(record + 1, (u64)node.number);
  store(record + 2, waited_ns);
  store(record + 3, acquire(flag_at(ranks.arenas[ranks.rank], peer)));
  release(record + 4, 1);
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) release(error_at(ranks.arenas[rank]), 1);
}

// Waits for another device, the only place where a kernel does: until rank `peer` has reached the node, the exchange has
// failed, or the deadline has passed, which makes it fail. False where it has failed.
__device__ __forceinline__ bool await(const Ranks& ranks, const Node& node, int peer, u64 deadline_ns) {
  char* mine = ranks.arenas[ranks.rank];
  u64 began = 0;
  for (u32 polls = 1; acquire(flag_at(mine, peer)) < node.epoch; ++polls) {
    if (polls % POLLS) continue;
    if (acquire(error_at(mine))) return false;
    const u64 now = clock_ns();
    if (!began) {
      began = now;
    } else if (now - began > deadline_ns) {
      fail(ranks, node, peer, now - began);
      return false;
    }
  }
  return true;
}

__device__ __forceinline__ void signal(const Ranks& ranks, const Node& node, int peer) {
  release(flag_at(ranks.arenas[peer], ranks.rank), node.epoch);
}

__device__ __forceinline__ float rounded(float value) { return FLOATS ? value : number(half_of(value)); }

using Row = float[HELD][ELEMENTS];

__device__ __forceinline__ void unpack(float (&to)[ELEMENTS], const uint4& chunk) {
  const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i)
    to[i] = FLOATS ? __uint_as_float(words[i % 4]) : number((u16)(words[i / 2 % 4] >> i % 2 * 16));
}

__device__ __forceinline__ uint4 packed(const float (&from)[ELEMENTS]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = FLOATS ? __float_as_uint(from[i])
                      : half_of(from[2 * i % ELEMENTS]) | (u32)half_of(from[(2 * i + 1) % ELEMENTS]) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// The gains of a thread's chunks, as they lie in memory: fetched before it waits for other devices, where there are
// registers for them.
constexpr int GAIN_WORDS = WIDE_GAINS ? 2 : 1;  // of 16 bytes, for a chunk
constexpr bool EARLY_GAINS = HELD * GAIN_WORDS <= 2;
using Gains = uint4[HELD][GAIN_WORDS];

__device__ __forceinline__ void load_gains(uint4 (&to)[GAIN_WORDS], const void* gains, int chunk) {
#pragma unroll
  for (int i = 0; i < GAIN_WORDS; ++i) to[i] = ((const uint4*)gains)[chunk * GAIN_WORDS + i];
}

__device__ __forceinline__ void unpack_gains(float (&to)[ELEMENTS], const uint4 (&words)[GAIN_WORDS]) {
  if constexpr (WIDE_GAINS) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const uint4& word = words[i / 4 % GAIN_WORDS];
      to[i] = __uint_as_float(i % 4 == 0 ? word.x : i % 4 == 1 ? word.y : i % 4 == 2 ? word.z : word.w);
    }
  } else {
    unpack(to, words[0]);
  }
}

// The sum, or the largest, of all threads' values, in the same order on every device; PLACE: of several in a kernel.
template <int PLACE, bool LARGEST>
__device__ __forceinline__ float of_block(float value) {
  const auto joined = [](float a, float b) { return LARGEST ? fmaxf(a, b) : a + b; };
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2)
    value = joined(value, __shfl_xor_sync(0xffffffff, value, distance));
  float* memory = block_memory() + PLACE * WARPS;
  if (threadIdx.x % WARP == 0) memory[threadIdx.x / WARP] = value;
  __syncthreads();
  value = memory[0];
  for (int warp = 1; warp < WARPS; ++warp) value = joined(value, memory[warp]);
  return value;
}

// RMSNorm of a row, rounded as `kernels/fusion.py` says.
template <int PLACE>
__device__ __forceinline__ void norm(Row& row, Gains& fetched, const void* gains, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < HELD; ++j)
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sum += row[j][i] * row[j][i];
  const float scale = rsqrtf(of_block<PLACE, false>(sum) / WIDTH + eps);
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int chunk = threadIdx.x + j * THREADS;
    if (chunk >= CHUNKS) break;
    float gain[ELEMENTS];
    if (!EARLY_GAINS) load_gains(fetched[j], gains, chunk);
    unpack_gains(gain, fetched[j]);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const float normed = row[j][i] * scale;
      row[j][i] = rounded((WIDE_GAINS ? normed : rounded(normed)) * gain[i]);
    }
  }
}

struct Reduce {
  u64 parts;  // where the ranks' parts of this node begin in their arenas: [rows, WIDTH]
  uint4* hidden;
  const void* post_gains;
  const void* gains;
  void* normed;    // [rows, WIDTH], or their codes
  float* scales;   // of codes, [rows]
  float post_eps, eps;
  u32 node;
  u32 unused;
};

// hidden [rows, WIDTH] += the sum of all ranks' parts in rank order, its norm before where it has one; normed = the next
// norm of that. A block a row. All ranks get the same bits.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_rows(const __grid_constant__ Ranks ranks, const __grid_constant__ Reduce given) {
  // The next kernel starts when all blocks have come here; whatever it fetches, it fetches while these wait.
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int peer = threadIdx.x;
  const Node node(ranks, given.node, 0, peer < RANKS);
  const bool meets = !node.solo && peer < RANKS && peer != ranks.rank;
  if (meets) signal(ranks, node, peer);

  const u64 first = (u64)blockIdx.x * CHUNKS;
  Row row, residual;
  Gains post_gains = {}, gains = {};
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int chunk = threadIdx.x + j * THREADS;
    if (chunk >= CHUNKS) break;
    unpack(residual[j], given.hidden[first + chunk]);
    if (POST_NORM && EARLY_GAINS) load_gains(post_gains[j], given.post_gains, chunk);
    if (NORM && EARLY_GAINS) load_gains(gains[j], given.gains, chunk);
  }
  if (meets) await(ranks, node, peer, ranks.deadline_ns);
  const bool solo = __syncthreads_or(node.solo);

#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int chunk = threadIdx.x + j * THREADS;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[j][i] = 0.0f;
    if (chunk >= CHUNKS) continue;
    uint4 parts[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
      const char* arena = solo ? ranks.arenas[ranks.rank] : ranks.arenas[rank];
      parts[rank] = load_chunk((const uint4*)(arena + given.parts) + first + chunk);
    }
    unpack(row[j], parts[0]);
#pragma unroll
    for (int rank = 1; rank < RANKS; ++rank) {
      float part[ELEMENTS];
      unpack(part, parts[rank]);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) row[j][i] += part[i];
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i)
      if (POST_NORM) row[j][i] = rounded(row[j][i]);
  }
  if (POST_NORM) norm<0>(row, post_gains, given.post_gains, given.post_eps);
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int chunk = threadIdx.x + j * THREADS;
    if (chunk >= CHUNKS) break;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[j][i] = rounded(row[j][i] + residual[j][i]);
    given.hidden[first + chunk] = packed(row[j]);
  }
  if (!NORM) return;
  norm<1>(row, gains, given.gains, given.eps);
  float scale = 1.0f;
  if (CODES) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; ++j)
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) largest = fmaxf(largest, fabsf(row[j][i]));
    scale = fmaxf(of_block<2, true>(largest), 1e-30f) / 448.0f;
    if (threadIdx.x == 0) given.scales[blockIdx.x] = scale;
  }
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int chunk = threadIdx.x + j * THREADS;
    if (chunk >= CHUNKS) break;
    if (CODES)
#pragma unroll
      for (int i = 0; i < ELEMENTS; i += 2)
        ((u16*)given.normed)[((first + chunk) * ELEMENTS + i) / 2] = codes_of(row[j][i] / scale, row[j][i + 1] / scale);
    else
      ((uint4*)given.normed)[first + chunk] = packed(row[j]);
  }
}

struct Begin {
  const u32* sent;  // the first rank's rows: their number, and whatever else followers need
  u32* received;    // a follower's copy of them, which no other device touches
  u64 inboxes;      // where two of `words` begin in an arena
  u32 words;
  u32 unused;
};

// The first node of a step, one block: counts it; the first rank sends its rows, the others wait for them. A follower that
// waits in vain has no rows, and keeps those of the step before, which are whole.
extern "C" __global__ void begin_step(const __grid_constant__ Ranks ranks, const __grid_constant__ Begin given) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Node node(ranks, 0, 1);
  __syncthreads();
  if (threadIdx.x == 0) store((u64*)ranks.arenas[ranks.rank], node.step);
  if (node.solo) return;
  const int peer = threadIdx.x;
  // Of two inboxes a follower may still read the one of the step before.
  const u64 inbox = given.inboxes + (node.step & 1) * given.words * sizeof(u32);
  if (ranks.rank == 0) {
    for (int rank = 1; rank < RANKS; ++rank)
      for (u32 i = threadIdx.x; i < given.words; i += blockDim.x)
        store((u32*)(ranks.arenas[rank] + inbox) + i, given.sent[i]);
    __syncthreads();
    if (peer > 0 && peer < RANKS) signal(ranks, node, peer);
    return;
  }
  // Of two ranks that wait, the one that waits for the late rank itself should say so: the first rank, which may be waiting
  // for the end of the step before, gives up before those that wait for the first.
  const bool failed = peer == 0 && !await(ranks, node, 0, ranks.deadline_ns + ranks.deadline_ns / 4);
  if (__syncthreads_or(failed)) {
    if (peer == 0 && given.words) given.received[0] = 0;
    return;
  }
  for (u32 i = threadIdx.x; i < given.words; i += blockDim.x)
    given.received[i] = load_word((const u32*)(ranks.arenas[ranks.rank] + inbox) + i);
}

struct End {
  const char* part;   // this rank's logits [rows, part_bytes]
  char* logits;       // the first rank's [rows, row_bytes], this rank's from part_at on
  u32* arrived;       // of this device, zero between two launches
  u32* whole;         // of the first rank: whether all that the step has computed is right
  u32 rows, part_bytes, row_bytes, part_at;
  u32 node;
  u32 unused;
};

template <class Unit>
__device__ __forceinline__ void copy_part(const End& given) {
  const u32 width = given.part_bytes / sizeof(Unit), count = given.rows * width;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    char* row = given.logits + (u64)(i / width) * given.row_bytes + given.part_at;
    store((Unit*)row + i % width, ((const Unit*)given.part)[i]);
  }
}

// The last node of a step: all ranks store their logits into the first rank's, which waits for them and then reads the
// error word: all errors of the step are older than the flags that it has seen.
extern "C" __global__ void end_step(const __grid_constant__ Ranks ranks, const __grid_constant__ End given) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Node node(ranks, given.node);
  if (node.solo && ranks.rank) return;
  if ((given.part_bytes | given.row_bytes | given.part_at) % sizeof(uint4))
    copy_part<u16>(given);
  else
    copy_part<uint4>(given);
  if (ranks.rank) {
    __syncthreads();
    // The last block to arrive tells; none waits for it.
    if (threadIdx.x == 0 && arrive(given.arrived) == gridDim.x - 1) signal(ranks, node, 0);
    return;
  }
  if (blockIdx.x) return;
  const int peer = threadIdx.x;
  const bool failed = !node.solo && peer > 0 && peer < RANKS && !await(ranks, node, peer, ranks.deadline_ns);
  __syncthreads_or(failed);
  if (threadIdx.x == 0) *given.whole = !acquire(error_at(ranks.arenas[0]));
}

// What `seed` says word i of a pattern is.
__device__ __forceinline__ u64 pattern(u64 seed, u32 i) {
  u64 value = (seed + i) * 0x9e3779b97f4a7c15ull;
  value ^= value >> 29;
  return value * 0xbf58476d1ce4e5b9ull;
}

struct Pattern {
  u64* words;  // of this device or another
  u64* wrong;  // of this device: words found that are others
  u64 seed;
  u32 count;
  u32 unused;
};

extern "C" __global__ void write_pattern(const __grid_constant__ Pattern given) {
  wait_for_previous_kernel();
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < given.count; i += gridDim.x * blockDim.x)
    store(given.words + i, pattern(given.seed, i));
}

extern "C" __global__ void check_pattern(const __grid_constant__ Pattern given) {
  wait_for_previous_kernel();
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < given.count; i += gridDim.x * blockDim.x)
    if (acquire(given.words + i) != pattern(given.seed, i)) atomicAdd(given.wrong, 1ull);
}
