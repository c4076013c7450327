// More of bulk.cuh, sm_90 and newer: copies into several blocks at once, and what orders them. Functions are named after
// their instructions.
// Source: PTX ISA, cp.async.bulk.tensor, fence.proxy.async, mbarrier.arrive, barrier, stmatrix.
#pragma once
#include "bulk.cuh"

// How long L2 keeps what a copy reads: for bytes that are read once, no longer than it must.
__device__ __forceinline__ uint64_t createpolicy(bool once) {
    uint64_t first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return once ? first : normal;
}

// A box of a tensor map, kept in L2 as a policy says.
__device__ __forceinline__ void cp_async_bulk_tensor_cached(void *to, const void *map, int column, int row,
                                                            uint64_t *barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(smem_address(barrier)), "l"(policy)
                 : "memory");
}

// A box into L2 alone. There all writes of the GPU meet: it may come before they do.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const void *map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}

// A box of a tensor map into the shared memory of every block of the cluster whose bit is set in `blocks`, at the same
// place there, counted by the barrier that lies at the same place there.
__device__ __forceinline__ void cp_async_bulk_tensor_multicast(void *to, const void *map, int column, int row,
                                                               uint64_t *barrier, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(smem_address(barrier)), "h"(blocks)
                 : "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// What this thread wrote to shared memory, and who waits for it, is seen by copies that are asked for after.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A box from shared memory to where a tensor map says, but for what lies outside. Those since the last commit are a
// group; the wait returns when all of this thread's groups have read shared memory.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const void *map, int column, int row, const void *from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(smem_address(from))
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void cp_async_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A barrier of so many threads of a block; number 0 is that of __syncthreads.
__device__ __forceinline__ void bar_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same without waiting.
__device__ __forceinline__ void bar_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// At the barrier that lies at the same place in a block of the cluster. Of other blocks' memory it orders nothing: it
// tells what has been read, not what was written; with release.cluster it would wait for a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t *barrier, uint32_t rank) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(smem_address(barrier)),
                 "r"(rank)
                 : "memory");
}

// Every thread of the cluster arrives and waits, without an order of memory: for blocks that only must not leave yet.
__device__ __forceinline__ void cluster_stay() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// Four 8 x 8 matrices of 16-bit values to shared memory: lane l gives the address of row l % 8 of matrix l / 8 and
// holds of each matrix row l / 4, columns 2 * (l % 4) + {0, 1}.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint4 &v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// The same of the transposed matrices: lane l holds of each matrix rows 2 * (l % 4) + {0, 1}, column l / 4.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint4 &v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
