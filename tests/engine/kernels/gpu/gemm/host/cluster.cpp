// Runs wide_product.cu on the host: a fiber for each thread of a cluster, and instructions in plain C++, bfloat16 only.
// SOURCE is the kernel's file, and the kernel's own constants are defined as for a GPU. Clusters run one after the
// other, since none waits for another. Warps run in random order, one block of a cluster far slower than the others.
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fibers.h"

#define __shared__ static
#define __align__(bytes)
#define __cluster_dims__(...)
#define __expf expf
#define __fdividef(a, b) ((a) / (b))

typedef unsigned int u32;
typedef unsigned long long u64;

struct float4 {
  float x, y, z, w;
};

// As `host_map` in cluster_function.py packs it.
struct TensorMap {
  const unsigned short* data;
  int64_t columns, rows, box_rows;
  char rest[96];
};

namespace host {

constexpr int BLOCKS = X_SHARERS > 1 ? X_SHARERS : 2, THREADS = 384, TILE_DEPTH = 64;
constexpr int W_ROWS = EPILOGUE == 2 ? 2 * COLUMNS : COLUMNS;
constexpr int MEMORY = 227 << 10;
constexpr u64 HINT_OF_X = 0x14F0000000000000ull;

struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0, turns = 0;
};

struct Load {
  int rank;
  u32 to;
  const TensorMap* map;
  int k, row;
  u64* barrier;
};

struct Operation {
  float* sums;
  u64 a, b;
  bool adds;
};

struct Thread : Fiber {
  bool has_waited = false;
  long cluster_syncs = 0, block_syncs = 0, group_syncs = 0;
  std::vector<Operation> open;
  std::vector<std::vector<Operation>> products;
  std::map<u64*, std::pair<long, long>> waits;
};

static std::vector<Thread> threads;
static std::map<std::pair<u64*, int>, Barrier> barriers;
static std::vector<Load> loads;
static std::vector<std::vector<char>> memory;
static size_t multiplied[BLOCKS * 3];
static bool any_of_group[BLOCKS * 3];
static int current, cluster, clusters;
static long progress;
// Whether the units multiply as soon as all threads have asked, or as late as when that is waited for.
static bool early;
static std::string failure;

static int rank() { return current / THREADS; }
static int group() { return current / 128; }

static void fail(const char* words) {
  if (failure.empty()) failure = words;
}

static bool has_ended(int block) {
  const Thread* const first = &threads[block * THREADS];
  return std::all_of(first, first + THREADS, [](const Thread& t) { return t.done; });
}

static Barrier& barrier_of(u64* barrier, int block) {
  if (has_ended(block)) fail("a barrier of a block that has ended");
  Barrier& found = barriers[{barrier, block}];
  if (!found.count) fail("a barrier that is not prepared");
  return found;
}

static void settle(Barrier& barrier) {
  ++progress;
  if (barrier.pending < 0) fail("more arrivals than a barrier awaits");
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.count;
  ++barrier.turns;
}

static void arrive_there(u64* barrier, int block, long bytes) {
  Barrier& found = barrier_of(barrier, block);
  --found.pending;
  found.bytes += bytes;
  settle(found);
}

static void run_load(const Load& load) {
  const TensorMap& map = *load.map;
  const long nbytes = map.box_rows * TILE_DEPTH * 2;
  Barrier& barrier = barrier_of(load.barrier, load.rank);
  if (load.to + nbytes > MEMORY) return fail("a load beyond the shared memory");
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < TILE_DEPTH; ++c) {
      const int64_t row = load.row + r, column = load.k + c;
      const bool inside = row >= 0 && row < map.rows && column < map.columns;
      const unsigned short value = inside ? map.data[row * map.columns + column] : 0;
      memcpy(&memory[load.rank][load.to + (r * TILE_DEPTH + c) * 2], &value, 2);
    }
  barrier.bytes -= nbytes;
  settle(barrier);
}

static float element(int block, u64 descriptor, int row, int k) {
  unsigned short value;
  memcpy(&value, &memory[block][(descriptor << 4) + row * TILE_DEPTH * 2 + k * 2], 2);
  return number(value);
}

static void multiply_by(int fiber, const Operation& operation) {
  const int lane = fiber % 32, warp = fiber / 32 % 4, block = fiber / THREADS;
  for (int i = 0; i < 2; ++i) {
    float x[16];
    for (int k = 0; k < 16; ++k) x[k] = element(block, operation.a, warp * 16 + lane / 4 + i * 8, k);
    for (int eight = 0; eight < W_ROWS / 8; ++eight)
      for (int j = 0; j < 2; ++j) {
        float& sum = operation.sums[eight * 4 + i * 2 + j];
        if (!operation.adds) sum = 0;
        for (int k = 0; k < 16; ++k) sum += x[k] * element(block, operation.b, eight * 8 + lane % 4 * 2 + j, k);
      }
  }
}

// The products that a whole group has asked for, up to the `wanted`th.
static bool multiply_up_to(size_t wanted) {
  const int first = group() * 128;
  for (int f = first; f < first + 128; ++f)
    if (threads[f].products.size() < wanted) return false;
  for (size_t& at = multiplied[group()]; at < wanted; ++at)
    for (int f = first; f < first + 128; ++f)
      for (const Operation& operation : threads[f].products[at]) multiply_by(f, operation);
  return true;
}

template <long Thread::*SYNCS>
static void sync_from(int first, int count) {
  ++progress;
  sync<SYNCS>(&threads[first], count);
}

}  // namespace host

INDEX(int, threadIdx, host::current % host::THREADS)
INDEX(int, blockIdx, host::cluster * host::BLOCKS + host::rank())
INDEX(int, gridDim, host::clusters * host::BLOCKS)

static char raw[1];

static u32 shared_address(const void*) { return 16; }
static u32 cluster_rank() { return host::rank(); }
static u64 descriptor(u32 address) { return address >> 4; }

static void __syncthreads() {
  host::sync_from<&host::Thread::block_syncs>(host::rank() * host::THREADS, host::THREADS);
}
static void cluster_sync() { host::sync_from<&host::Thread::cluster_syncs>(0, host::BLOCKS * host::THREADS); }
static void group_sync(int) { host::sync_from<&host::Thread::group_syncs>(host::group() * 128, 128); }

static bool group_any(int group, bool mine) {
  bool& any = host::any_of_group[host::group()];
  any |= mine;
  group_sync(group);
  const bool result = any;
  group_sync(group);
  any = false;
  group_sync(group);
  return result;
}

static void publish_barriers() {}
static void let_next_begin() {}
static void give_registers() {}
static void take_registers() {}
static void begin_products() {}
static void wait_for_previous() { host::threads[host::current].has_waited = true; }

static void prepare(u64* barrier, u32 arrivals) {
  host::barriers[{barrier, host::rank()}] = {(int)arrivals, (int)arrivals};
}

static void wait_for(u64* barrier, u32 parity) {
  host::Barrier& found = host::barrier_of(barrier, host::rank());
  while (((found.turns & 1) ^ 1) != parity) host::yield();
  auto wait = host::threads[host::current].waits.try_emplace(barrier, 0, parity).first;
  // The turn that is waited for, not one two turns on.
  auto& [count, ahead] = wait->second;
  if (found.turns != ++count - ahead) host::fail("a barrier went on before all had seen it");
}

static void expect(u64* barrier, u32 bytes) { host::arrive_there(barrier, host::rank(), bytes); }
static void arrive(u64* barrier) { host::arrive_there(barrier, host::rank(), 0); }
static void arrive_at(u64* barrier, u32 rank) { host::arrive_there(barrier, rank, 0); }

static void load_to(int rank, u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 hint) {
  if (hint == host::HINT_OF_X && !host::threads[host::current].has_waited) host::fail("x before it is there");
  host::loads.push_back({rank, to, map, k, row, barrier});
}

static void load(u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 hint) {
  load_to(host::rank(), to, map, k, row, barrier, hint);
}

static void load_for_all(u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 hint, int blocks) {
  for (int rank = 0; rank < blocks; ++rank) load_to(rank, to, map, k, row, barrier, hint);
}

template <int COUNT>
static void multiply(float (&sums)[COUNT], u64 a, u64 b, int adds) {
  static_assert(COUNT == host::W_ROWS / 2);
  host::threads[host::current].open.push_back({sums, a, b, adds != 0});
}

static void commit_products() {
  host::Thread& mine = host::threads[host::current];
  mine.products.push_back(std::move(mine.open));
  mine.open.clear();
  ++host::progress;
  if (host::early) host::multiply_up_to(mine.products.size());
}

template <int LEFT>
static void wait_for_products() {
  const size_t asked = host::threads[host::current].products.size();
  while (!host::multiply_up_to(asked - std::min<size_t>(LEFT, asked))) host::yield();
}

static u32 count_up(u32* arrived, u32 last) {
  const u32 before = *arrived;
  *arrived = before >= last ? 0 : before + 1;
  return before;
}

static void discard_line(const char* line) {
  for (int i = 0; i < 32; ++i) ((float*)line)[i] = std::numeric_limits<float>::quiet_NaN();
}

static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class Value>
static Value __ldcg(const Value* from) { return *from; }
static void __stcg(float4* to, float4 value) { *to = value; }

static u32 pack(float low, float high) { return host::half(low) | (u32)host::half(high) << 16; }
static float rounded(float value) { return host::number(host::half(value)); }
static float low_of(u32 both) { return host::number(both & 0xffff); }

#include SOURCE

namespace host {

struct Arguments {
  TensorMap x, w;
  unsigned short* out;
  float4* partial;
  u32* arrived;
  int m, n, k;
};

static const Arguments* arguments;

static void run_thread() {
  const Arguments& a = *arguments;
  wide_product(a.x, a.w, a.out, a.partial, a.arrived, a.m, a.n, a.k);
  ++progress;
}

static void start_cluster() {
  threads = std::vector<Thread>(BLOCKS * THREADS);
  barriers.clear();
  memory.assign(BLOCKS, std::vector<char>(MEMORY, (char)0xff));
  std::fill_n(multiplied, BLOCKS * 3, 0);
  for (Thread& thread : threads) begin<run_thread>(thread);
}

static void run_warp(int warp) {
  for (current = warp * 32; current < warp * 32 + 32; ++current)
    if (!threads[current].done) resume(threads[current]);
}

static void run_cluster(std::mt19937& draw) {
  start_cluster();
  const int slow = draw() % BLOCKS;
  std::vector<int> warps(BLOCKS * THREADS / 32);
  for (size_t w = 0; w < warps.size(); ++w) warps[w] = w;
  long seen = -1, quiet = 0;
  while (!std::all_of(threads.begin(), threads.end(), [](auto& t) { return t.done; }) && failure.empty()) {
    std::shuffle(warps.begin(), warps.end(), draw);
    for (int warp : warps)
      if (draw() % 16 < (warp / (THREADS / 32) == slow ? 2 : 10)) run_warp(warp);
    for (int count = draw() % 6; count > 0 && !loads.empty(); --count) {
      std::swap(loads[draw() % loads.size()], loads.back());
      const Load load = loads.back();
      loads.pop_back();
      run_load(load);
    }
    quiet = progress == seen && loads.empty() ? quiet + 1 : 0;
    seen = progress;
    if (quiet > 300) fail("no thread goes on");
  }
  if (!loads.empty()) fail("loads that nobody has waited for");
}

}  // namespace host

extern "C" const char* run(const host::Arguments* arguments, int blocks, bool early, int seed) {
  std::mt19937 draw(seed);
  host::arguments = arguments;
  host::early = early;
  host::failure.clear();
  host::loads.clear();
  host::clusters = blocks / host::BLOCKS;
  std::vector<int> order(host::clusters);
  for (int c = 0; c < host::clusters; ++c) order[c] = c;
  std::shuffle(order.begin(), order.end(), draw);
  for (int c : order) {
    host::cluster = c;
    host::run_cluster(draw);
  }
  return host::failure.c_str();
}
