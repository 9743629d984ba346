// Threads of a GPU as fibers of one thread of the host, their barriers, and bfloat16: the part that doubles of kernels in
// CUDA C++ have in common. One fiber runs at a time, until it yields; the double's scheduler resumes the next one.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <memory>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

// One of the built-in variables, as far as its `x`.
#define INDEX(type, name, value)              \
  static struct {                             \
    struct {                                  \
      operator type() const { return value; } \
    } x;                                      \
  } name;

namespace host {

constexpr size_t STACK_BYTES = 64 << 10;

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  bool begun = false, done = false;
};

static jmp_buf scheduler;
static Fiber* running;

// Switches by jumps: swapcontext would call the kernel twice, for the signals of each context.
static void yield() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

// Lets a fiber go on until it yields or ends.
static void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  running = &fiber;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

template <void (*RUN)()>
static void run_to_its_end() {
  RUN();
  running->done = true;
  yield();
}

// Has a fiber run RUN from its beginning, whatever it ran before.
template <void (*RUN)()>
static void begin(Fiber& fiber) {
  fiber.begun = fiber.done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_to_its_end<RUN>, 0);
}

// Waits at a barrier until each of `count` threads from `first` on has come to it as often as the running one.
template <auto TIMES, class Thread>
static void sync(Thread* first, int count) {
  const long mine = ++(static_cast<Thread*>(running)->*TIMES);
  while (std::any_of(first, first + count, [=](const Thread& t) { return t.*TIMES < mine; })) yield();
}

static float number(unsigned short half) {
  const unsigned bits = (unsigned)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static unsigned short half(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace host
