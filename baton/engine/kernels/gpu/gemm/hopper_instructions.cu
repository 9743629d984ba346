// Instructions of Hopper that wide_product.cu is written in; KIND is "bf16" or "f16".
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { char bytes[128]; };

extern __shared__ char raw[];

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

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier)), "l"(hint) : "memory");
}

// To the same place of each of the cluster's blocks, 0 to `blocks` - 1, whose own barriers it tells.
__device__ __forceinline__ void load_for_all(u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 hint,
                                             int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5, %6;"
      ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier)), "h"((unsigned short)((1 << blocks) - 1)),
      "l"(hint) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }

__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory"); }

// Whether it is so for any of the group's threads.
__device__ __forceinline__ bool group_any(int group, bool mine) {
  u32 any;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, %2, 128, mine;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any) : "r"((u32)mine), "r"(group) : "memory");
  return any;
}

// Counts up to `last`, then from 0 again; the count before.
__device__ __forceinline__ u32 count_up(u32* arrived, u32 last) {
  u32 before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(arrived), "r"(last) : "memory");
  return before;
}

__device__ __forceinline__ void discard_line(const char* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

// The matrix units' descriptor of a tile in shared memory: rows of 128 bytes, swizzled, eight of them in 1,024.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}

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
