// Runs streamed_product.cu on the host: a fiber for each thread of a block, and instructions in plain C++. SOURCE is
// the kernel's file, and the kernel's own constants are defined as for a GPU.
#include <cmath>
#include <cstdint>
#include <vector>

#include "fibers.h"

#define EMULATED
#define __shared__
#define __expf expf
using std::min;

struct uint4 {
  unsigned x, y, z, w;
};

namespace host {

constexpr int COUNT = 32 * ROW_WARPS * DEPTH_WARPS;

struct Copy {
  uint4* to;
  const void* from;
  bool kept;

  void run() const {
    uint4 value = {};
    if (kept) memcpy(&value, from, sizeof value);
    *to = value;
  }
};

struct Operands {
  unsigned w[4], x[2];
};

struct Thread : Fiber {
  long block_barriers = 0, warp_barriers = 0, products = 0;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> stages;
  Operands operands[2];
};

static Thread* threads;
static int current, block;
// Whether copies take effect when they are asked for, or as late as when they are waited for.
static bool at_once;

static void warp_barrier() { sync<&Thread::warp_barriers>(threads + current / 32 * 32, 32); }

template <class Operation>
static unsigned by_halves(unsigned a, unsigned b, Operation operation) {
  const unsigned low = half(operation(number(a & 0xffff), number(b & 0xffff)));
  return low | (unsigned)half(operation(number(a >> 16), number(b >> 16))) << 16;
}

// Of a product of 16 columns thread `4 · row + t` of a warp has columns 2 t, 2 t + 1 and 8 more.
static float element(const unsigned* pairs, int k, int stride) {
  const unsigned pair = pairs[k / 8 * stride];
  return number(k % 2 ? pair >> 16 : pair & 0xffff);
}

}  // namespace host

INDEX(int, threadIdx, host::current)
INDEX(int, blockIdx, host::block)

uint4 shared[16 << 10];

static void __syncthreads() { host::sync<&host::Thread::block_barriers>(host::threads, host::COUNT); }

static bool __syncthreads_or(bool mine) {
  static bool any;
  any |= mine;
  __syncthreads();
  const bool result = any;
  __syncthreads();
  any = false;
  __syncthreads();
  return result;
}

static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

template <class Value>
static Value __ldg(const Value* from) { return *from; }
static float __ldcg(const float* from) { return *from; }
static void __stcg(float* to, float value) { *to = value; }

static uint4 load_bytes(const unsigned char* from) {
  uint4 value;
  memcpy(&value, from, sizeof value);
  return value;
}

static void copy_chunk(uint4* to, const void* from, bool kept) {
  const host::Copy copy = {to, from, kept};
  if (host::at_once)
    copy.run();
  else
    host::threads[host::current].open.push_back(copy);
}

static void end_stage() {
  host::Thread& thread = host::threads[host::current];
  thread.stages.push_back(std::move(thread.open));
  thread.open.clear();
}

template <int LEFT>
static void wait_for_stages() {
  auto& stages = host::threads[host::current].stages;
  for (; (int)stages.size() > LEFT; stages.erase(stages.begin()))
    for (const host::Copy& copy : stages.front()) copy.run();
}

static unsigned subtract(unsigned a, unsigned b) {
  return host::by_halves(a, b, [](float x, float y) { return x - y; });
}

static void multiply(float (&d)[4], const unsigned (&w)[4], unsigned x0, unsigned x1) {
  const int turn = host::threads[host::current].products++ % 2, lane = host::current % 32;
  host::threads[host::current].operands[turn] = {{w[0], w[1], w[2], w[3]}, {x0, x1}};
  host::warp_barrier();
  const host::Thread* const warp = host::threads + host::current / 32 * 32;
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int t = k % 8 / 2;
      const host::Operands& of_w = warp[lane / 4 * 4 + t].operands[turn];
      const host::Operands& of_x = warp[(lane % 4 * 2 + i % 2) * 4 + t].operands[turn];
      sum += (double)host::element(of_w.w + i / 2, k, 2) * host::element(of_x.x, k, 1);
    }
    d[i] += (float)sum;
  }
}

static float number(unsigned short half) { return host::number(half); }
static unsigned short half_of(float value) { return host::half(value); }
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}

static unsigned arrive(unsigned* arrived) {
  const unsigned before = *arrived;
  *arrived = before >= SPLITS - 1 ? 0 : before + 1;
  return before;
}

#include SOURCE

namespace host {

struct Arguments {
  const unsigned short* x;
  const unsigned char* bytes;
  const float* scales;
  const unsigned char* zeros;
  const unsigned short* bias;
  unsigned short* out;
  float* partial;
  unsigned* arrived;
  int M, N, K, groups;
};

static Arguments given;

static void run_thread() {
  streamed_product(given.x, given.bytes, given.scales, given.zeros, given.bias, given.out, given.partial, given.arrived,
                   given.M, given.N, given.K, given.groups);
}

}  // namespace host

// Runs so many blocks, one after the other; backwards where `turned`.
extern "C" void run(const host::Arguments* arguments, int blocks, bool at_once, bool turned) {
  host::given = *arguments;
  host::at_once = at_once;
  for (int number = 0; number < blocks; ++number) {
    host::block = turned ? blocks - 1 - number : number;
    memset(shared, 0xff, sizeof shared);  // not a number, wherever nothing is written
    std::vector<host::Thread> threads(host::COUNT);
    host::threads = threads.data();
    for (host::Thread& thread : threads) host::begin<host::run_thread>(thread);
    for (bool left = true; left;) {
      left = false;
      for (host::current = 0; host::current < host::COUNT; ++host::current) {
        if (threads[host::current].done) continue;
        left = true;
        host::resume(threads[host::current]);
      }
    }
  }
}

extern "C" unsigned long shared_bytes() { return sizeof shared; }
