// Global memory: loads with a purpose, and the order between a kernel and the one before it in its stream.
// load_weights: 16 bytes that are read once: past L1. Not .nc: the compiler moves such loads behind the wait.
// wait_for_previous, let_next_start: programmatic dependent launch; nothing below sm_90. What the kernel before may have
// written is read after the wait alone, and never through the read-only path.
// Sources: PTX ISA, ld and griddepcontrol; CUDA C++ Programming Guide, Programmatic Dependent Launch.
#pragma once
#include "convert.cuh"

__device__ __forceinline__ uint4 load_weights(const uint8_t *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// The same for 4 bytes.
__device__ __forceinline__ uint32_t load_scales(const uint8_t *p) {
    uint32_t v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// A later read of the address, by any block, finds L2 filled.
__device__ __forceinline__ void prefetch_L2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Returns when every kernel before this one in the stream is done and its writes can be seen.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream may become resident once every block has said so; it waits before it reads our results.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ uint32_t smem_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The same number, which the compiler then keeps instead of computing it again and again.
__device__ __forceinline__ uint32_t hidden(uint32_t v) {
    asm volatile("" : "+r"(v));
    return v;
}

__device__ __forceinline__ uint32_t word(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Sixteen neighbours of x as they lie in shared memory; `four(i)` widens 4 * i .. 4 * i + 3 when they are needed.
template <class X> struct Sixteen {
    uint4 halves[2];

    __device__ __forceinline__ void load(const uint16_t *from) {
        halves[0] = reinterpret_cast<const uint4 *>(from)[0], halves[1] = reinterpret_cast<const uint4 *>(from)[1];
    }
    __device__ __forceinline__ float4 four(int i) const {
        const float2 lo = X::widen(word(halves[i / 2], i % 2 * 2)), hi = X::widen(word(halves[i / 2], i % 2 * 2 + 1));
        return make_float4(lo.x, lo.y, hi.x, hi.y);
    }
};

template <> struct Sixteen<F32> {
    float4 v[4];

    __device__ __forceinline__ void load(const float *from) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = reinterpret_cast<const float4 *>(from)[i];
    }
    __device__ __forceinline__ float4 four(int i) const { return v[i]; }
};
