// Runs exchange.cu on the host: every rank a stream of launches, every thread of a resident block a fiber, and one of all
// fibers runs at a time, until its next access to memory that others touch. A seed chooses which; the clock is a number
// that moves on by a little, and by much where all that run only poll. SOURCE is the kernels' file.
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "fibers.h"

#define EMULATED

struct uint4 {
  unsigned x, y, z, w;
};

constexpr int WARP = 4;
constexpr unsigned POLLS = 2;

namespace host {

struct Launch {
  int rank, kernel, blocks, threads;
  const char* arguments;
};

// Keeps a rank from going on for `ns`, or for ever where negative: before it starts its launch `at`, or, where `within`, when
// it is to run for the `at`th time.
struct Hold {
  int rank, within;
  long at, ns;
};

struct Group {
  int expected = 0, arrived = 0;
  bool any = false, result = false;
};

struct Block;

struct Thread : Fiber {
  Block* block;
  Group* waits;
  int index;
  float shuffled;
};

struct Block {
  int rank, number;
  long launch;  // of the rank's
  const Launch* what;
  Group all;
  std::vector<Group> warps;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<float> memory = std::vector<float>(4 * WARP * 64, NAN);
  bool lets_next_start = false;
  int live;
};

struct Stream {
  std::vector<const Launch*> launches;
  long ended = 0;    // launches
  long runs = 0;
  long held_until = 0;         // all of it
  long launch_held_until = 0;  // the next launch
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<int> waiting;  // blocks of launch `started - 1` that have not started
  long started = 0;         // launches that have begun
  std::map<long, long> held_launches, held_runs;  // for how long
};

static std::vector<Stream> streams;
static std::vector<std::unique_ptr<Thread>> spare;
static uint64_t drawn;
static Thread* current;
static long now, idle, progressed_at;
static int residency;
static bool early;
constexpr long NEVER = INT64_MAX;  // a time

// Splitmix64.
static uint64_t draw() {
  uint64_t value = drawn += 0x9e3779b97f4a7c15;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
  value = (value ^ value >> 27) * 0x94d049bb133111eb;
  return value ^ value >> 31;
}

static void progress() {
  idle = 0;
  progressed_at = now;
}

static bool barrier(Group& group, bool mine) {
  group.any |= mine;
  current->waits = &group;
  ++group.arrived;
  while (current->waits) yield();
  return group.result;
}

static void open_if_all(Block& block, Group& group) {
  if (!group.arrived || group.arrived < group.expected) return;
  progress();
  group.result = group.any;
  group.any = false;
  group.arrived = 0;
  for (auto& thread : block.threads)
    if (thread->waits == &group) thread->waits = nullptr;
}

static unsigned char e4m3(float value) {
  const unsigned char sign = std::signbit(value) ? 0x80 : 0;
  const float size = fminf(fabsf(value), 448.0f);
  const int exponent = size > 0x1p-6f ? ilogbf(size) : -6;
  const int units = (int)nearbyintf(ldexpf(size, 3 - exponent));
  return sign | (unsigned char)((exponent + 6) * 8 + units);
}

}  // namespace host

INDEX(int, threadIdx, host::current->index)
INDEX(unsigned, blockIdx, host::current->block->number)
INDEX(unsigned, blockDim, host::current->block->what->threads)
INDEX(unsigned, gridDim, host::current->block->what->blocks)

static bool __syncthreads_or(bool mine) { return host::barrier(host::current->block->all, mine); }
static void __syncthreads() { __syncthreads_or(false); }

static float __shfl_xor_sync(unsigned, float value, int distance) {
  host::Block& block = *host::current->block;
  host::Group& warp = block.warps[host::current->index / WARP];
  host::current->shuffled = value;
  host::barrier(warp, false);
  const float other = block.threads[host::current->index ^ distance]->shuffled;
  host::barrier(warp, false);
  return other;
}

static unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static float rsqrtf(float value) { return 1.0f / sqrtf(value); }

static unsigned long long acquire(const unsigned long long* from) {
  ++host::idle;
  host::yield();
  return *from;
}
static void release(unsigned long long* to, unsigned long long value) {
  host::progress();
  host::yield();
  *to = value;
}
static uint4 load_chunk(const uint4* from) {
  host::progress();
  host::yield();
  return *from;
}
static unsigned load_word(const unsigned* from) {
  host::progress();
  host::yield();
  return *from;
}
template <class Value>
static void store(Value* to, Value value) {
  host::progress();
  host::yield();
  *to = value;
}
static void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }
static unsigned arrive(unsigned* arrived) {
  host::yield();
  const unsigned before = *arrived;
  *arrived = before + 1 == gridDim.x ? 0 : before + 1;
  return before;
}
static unsigned long long clock_ns() { return host::now; }
static float number(unsigned short half) { return host::number(half); }
static unsigned short half_of(float value) { return host::half(value); }
static unsigned short codes_of(float low, float high) { return host::e4m3(low) | host::e4m3(high) << 8; }
static float* block_memory() { return host::current->block->memory.data(); }
static void let_next_kernel_start() { host::current->block->lets_next_start = true; }
static void wait_for_previous_kernel() {
  const host::Block& block = *host::current->block;
  while (host::streams[block.rank].ended < block.launch) {
    ++host::idle;
    host::yield();
  }
}

#include SOURCE

// What stands between the nodes of a step: whole numbers, so that a sum is right to the last bit or wrong.
struct Work {
  const unsigned* rows;  // their number, then a token each
  float* hidden;
  float* part;
  const unsigned* whole;
  float* published;
  unsigned number, rank;
};

// Rows of a step, from their tokens.
static void embed(const Work given) {
  wait_for_previous_kernel();
  for (unsigned i = threadIdx.x; i < WIDTH; i += blockDim.x)
    given.hidden[blockIdx.x * WIDTH + i] = blockIdx.x < given.rows[0] ? given.rows[1 + blockIdx.x] + i % 3 : 0;
}

// A rank's part of a product of rows.
static void multiply(const Work given) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (unsigned i = threadIdx.x; i < WIDTH; i += blockDim.x) {
    const float of_row = fmodf(given.hidden[blockIdx.x * WIDTH + i], 64);
    host::yield();
    given.part[blockIdx.x * WIDTH + i] = of_row * (given.rank + 1) + given.number;
  }
}

// What the first rank does with logits: nothing where they are not whole.
static void finish(const Work given) {
  wait_for_previous_kernel();
  if (!*given.whole) return;
  for (unsigned i = threadIdx.x; i < given.number; i += blockDim.x) given.published[i] = given.part[i];
}

namespace host {

template <class First>
static void one(void (*kernel)(First), const char* from) {
  First first;
  memcpy(&first, from, sizeof first);
  kernel(first);
}

template <class First, class Second>
static void two(void (*kernel)(First, Second), const char* from) {
  First first;
  Second second;
  memcpy(&first, from, sizeof first);
  memcpy(&second, from + sizeof first, sizeof second);
  kernel(first, second);
}

static void run_thread() {
  const Launch& what = *current->block->what;
  switch (what.kernel) {
    case 0: two(begin_step, what.arguments); break;
    case 1: two(reduce_rows, what.arguments); break;
    case 2: two(end_step, what.arguments); break;
    case 3: one(write_pattern, what.arguments); break;
    case 4: one(check_pattern, what.arguments); break;
    case 5: one(embed, what.arguments); break;
    case 6: one(multiply, what.arguments); break;
    case 7: one(finish, what.arguments); break;
  }
  progress();
  Block& block = *current->block;
  --block.live;
  --block.all.expected;
  --block.warps[current->index / WARP].expected;
}

static void start_block(Stream& stream, int rank) {
  const auto place = stream.waiting.begin() + draw() % stream.waiting.size();
  auto block = std::make_unique<Block>();
  block->number = *place;
  stream.waiting.erase(place);
  block->rank = rank;
  block->launch = stream.started - 1;
  block->what = stream.launches[block->launch];
  block->live = block->all.expected = block->what->threads;
  block->warps.resize(block->what->threads / WARP);
  for (int index = 0; index < block->what->threads; ++index) {
    if (spare.empty()) spare.push_back(std::make_unique<Thread>());
    auto thread = std::move(spare.back());
    spare.pop_back();
    thread->block = block.get();
    thread->index = index;
    thread->waits = nullptr;
    ++block->warps[index / WARP].expected;
    begin<run_thread>(*thread);
    block->threads.push_back(std::move(thread));
  }
  stream.resident.push_back(std::move(block));
}

// When what is to happen now may.
static long allowed_at(const std::map<long, long>& holds, long at) {
  const auto found = holds.find(at);
  if (found == holds.end()) return now;
  return found->second < 0 ? NEVER : now + found->second;
}

template <class Test>
static int count_of(const Stream& stream, Test test) {
  int count = 0;
  for (const auto& block : stream.resident) count += test(*block);
  return count;
}

// Begins the next launch where the ones before have ended, or let it begin.
static void begin_launch(Stream& stream) {
  if (stream.started == (long)stream.launches.size() || !stream.waiting.empty()) return;
  bool ready = stream.started == stream.ended;
  if (early && stream.started == stream.ended + 1)
    ready = !count_of(stream, [](const Block& block) { return !block.lets_next_start; });
  if (!ready) return;
  if (!stream.launch_held_until) stream.launch_held_until = allowed_at(stream.held_launches, stream.started);
  if (now < stream.launch_held_until) return;
  stream.launch_held_until = 0;
  const int blocks = stream.launches[stream.started++]->blocks;
  for (int number = 0; number < blocks; ++number) stream.waiting.push_back(number);
  progress();
}

static void end_block(Stream& stream, size_t place) {
  for (auto& thread : stream.resident[place]->threads) spare.push_back(std::move(thread));
  stream.resident.erase(stream.resident.begin() + place);
  const auto of_launch = [&](const Block& block) { return block.launch == stream.ended; };
  while (stream.ended < stream.started && !(stream.ended == stream.started - 1 && !stream.waiting.empty()) &&
         !count_of(stream, of_launch))
    ++stream.ended;
}

// Lets a rank go on by a little; false where it cannot.
static bool go_on(int rank) {
  Stream& stream = streams[rank];
  if (now < stream.held_until) return false;
  begin_launch(stream);
  const bool room = !stream.waiting.empty() && (int)stream.resident.size() < residency;
  if (room && (stream.resident.empty() || draw() % 4 == 0)) start_block(stream, rank);
  if (stream.resident.empty()) return false;
  stream.held_until = allowed_at(stream.held_runs, ++stream.runs);
  if (now < stream.held_until) return false;
  const size_t place = draw() % stream.resident.size();
  Block& block = *stream.resident[place];
  Thread* ready[64];
  int count = 0;
  for (auto& thread : block.threads)
    if (!thread->done && !thread->waits) ready[count++] = thread.get();
  if (!count) return false;
  current = ready[draw() % count];
  resume(*current);
  open_if_all(block, block.all);
  for (Group& warp : block.warps) open_if_all(block, warp);
  if (!block.live) end_block(stream, place);
  return true;
}

}  // namespace host

// Runs all launches of all ranks; returns how many launches have not ended. `most_idle`: runs of polls alone after which
// the clock jumps by `jump_ns`; where it has jumped a hundred times in a row, nothing more will happen. `clock`: when the
// first thing happens, and when the last did.
extern "C" long run(const host::Launch* launches, int count, const host::Hold* holds, int hold_count, int ranks,
                    unsigned long seed, int residency, int early, long most_idle, long jump_ns, long* clock) {
  using namespace host;
  streams = std::vector<Stream>(ranks);
  for (int i = 0; i < hold_count; ++i) {
    Stream& stream = streams[holds[i].rank];
    (holds[i].within ? stream.held_runs : stream.held_launches)[holds[i].at] = holds[i].ns;
  }
  host::residency = residency;
  host::early = early;
  drawn = seed;
  now = progressed_at = *clock;
  for (int i = 0; i < count; ++i) streams[launches[i].rank].launches.push_back(launches + i);
  const auto left = [] {
    long left = 0;
    for (const Stream& stream : streams) left += stream.launches.size() - stream.ended;
    return left;
  };
  int jumps = 0;
  for (idle = 0; left() && jumps < 100;) {
    if (!go_on(draw() % ranks)) ++idle;
    now += draw() % 50;
    if (idle == 0) jumps = 0;
    if (idle <= most_idle) continue;
    idle = 1;
    ++jumps;
    now += jump_ns;
  }
  // Fibers of a rank that never went on are given up where they are.
  *clock = progressed_at;
  const long result = left();
  streams.clear();
  return result;
}
