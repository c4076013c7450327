// quantize_*: codes and scales of x [m, k] as it is (activations.cuh). amax_*: scale = the largest scale_of any row, the
// first pass of a tensor's own scale; 0, which it must be before, where x has no finite value but 0.
// x bf16, f16 or f32, any strides; entries without `_any` take rows whose 16-byte pieces are whole and aligned.
// Grid and block: activations.cuh. amax_* starts after what precedes it is done: that is no kernel.
// Shared memory: a value a warp.
// Source: our own; numbers as OCP 8-bit Floating Point Specification 1.0, section 5, has them.
#include "activations.cuh"

ENTRIES(quantize_bfloat16, Plain, BF16, e4m3fn, false)
ENTRIES(quantize_float16, Plain, F16, e4m3fn, false)
ENTRIES(quantize_float32, Plain, F32, e4m3fn, false)
#if __CUDA_ARCH__ >= 890 // else, and of float32, e5m2 codes are left to `_any`
ENTRIES(quantize_bfloat16, Plain, BF16, e5m2, true)
ENTRIES(quantize_float16, Plain, F16, e5m2, true)
#endif
ANY_ENTRY(quantize_bfloat16, Plain, BF16)
ANY_ENTRY(quantize_float16, Plain, F16)
ANY_ENTRY(quantize_float32, Plain, F32)

// A scale grows with its amax, and floats above 0 order as their bits do: any order of the rows ends in the same.
__device__ __forceinline__ void raise(const ActivationArgs &a, uint32_t top) {
    auto *scale = reinterpret_cast<uint32_t *>(a.scale);
    const uint32_t mine = __float_as_uint(scale_of(top, unit_of(a.e5m2)));
    if (threadIdx.x == 0 && top && *const_cast<volatile uint32_t *>(scale) < mine) atomicMax(scale, mine);
}

template <class X> __device__ __forceinline__ void amax(const ActivationArgs &a) {
    let_next_start();
    wait_for_previous();
    if (a.m == 0) return;
    Raw<X> kept[KEPT];
    Plain<X>(a, true).begin(kept);
    raise(a, row_max<Plain<X>>(kept));
}

template <class X> __device__ __forceinline__ void amax_any(const ActivationArgs &a) {
    let_next_start();
    wait_for_previous();
    if (a.m == 0) return;
    const Plain<X> source(a, false);
    const int turns = turns_of(a.k);
    uint32_t top = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn)
        for_values<X>(turn, a.k, [&](int at, int) { top = finite_larger(top, source.at(at)); });
    raise(a, block_max(top));
}

#define AMAX(name, X)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS<Plain<X>, X, TOKEN>)                                          \
        name(const __grid_constant__ ActivationArgs a) {                                                               \
        amax<X>(a);                                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS) name##_any(const __grid_constant__ ActivationArgs a) {   \
        amax_any<X>(a);                                                                                                \
    }

AMAX(amax_bfloat16, BF16)
AMAX(amax_float16, F16)
AMAX(amax_float32, F32)
