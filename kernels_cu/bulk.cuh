// Asynchronous bulk copies (sm_90 and newer) and what waits for them. Functions are named after their instructions.
// A stage of a ring has two mbarriers: `full` (the arrivals of its producers, and the bytes that one of them announced)
// and `empty` (one arrival a consumer). The n-th use of a barrier completes phase n; who waits names the parity of the
// phase.
// Cluster: blocks that run together and read each other's shared memory.
// Source: PTX ISA, mbarrier, cp.async.bulk, cp.async.bulk.tensor, barrier.cluster, mapa.
#pragma once
#include "memory.cuh"

// A place in a ring of stages, and the parity of the phase that its barriers are in.
struct Place {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int stages, int by = 1) {
        slot += by;
        if (slot >= stages) slot -= stages, parity ^= 1;
    }
};

__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(smem_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Both addresses and the size are multiples of 16 bytes.
__device__ __forceinline__ void cp_async_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(from), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

// 16 bytes.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 4 or 8 bytes, which come by way of L1.
template <int BYTES> __device__ __forceinline__ void cp_async_few(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}
// The copies since the last commit are a group; returns when all but the youngest COUNT groups of this thread have landed.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int COUNT> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// A box of a two-dimensional tensor map, its corner at `column` and `row`.
__device__ __forceinline__ void cp_async_bulk_tensor(void *to, const void *map, int column, int row,
                                                     uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(smem_address(barrier))
                 : "memory");
}

__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of the cluster arrives and waits; what was written to shared memory before is seen after.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() { cluster_arrive(), cluster_wait(); }

// Where this block's `p` lies in the block of that rank.
__device__ __forceinline__ uint32_t mapa(const void *p, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(p)), "r"(rank));
    return there;
}

__device__ __forceinline__ void st_shared_cluster(uint32_t to, const float (&v)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}

// The registers of each thread of this warpgroup from here on; a block has what it was launched with.
template <int COUNT> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
