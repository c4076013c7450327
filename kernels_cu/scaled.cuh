// What all kernels of y = a @ b.T with both operands in FP8 share: the argument block and the epilogue.
// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])); a [m, k] and b [n, k] codes of
// e4m3fn or e5m2, rows a_stride and b_stride bytes apart; y [m, n] of the dtype that `out` names, rows y_stride apart;
// bias [n] or null; scales scale_a_step and scale_b_step apart, 0: one for all. Scales, bias and sums are float32.
// All of it may be written by the kernel before this one, and is read when that is done, but for b as `weights` says.
// The host packs the block from kernels.SCALED_ARGS; ARGS_BYTES ties the two sides.
// Sources: OCP 8-bit Floating Point Specification 1.0, section 5; PTX ISA.
#pragma once
#include "memory.cuh"

struct ScaledArgs {
    const uint8_t *a, *b;
    const float *scale_a, *scale_b, *bias;
    void *y;
    void *workspace; // of a kernel whose blocks give each other sums: flags, zeros between launches, then the sums
    int64_t a_stride, b_stride, y_stride;
    int m, n, k;
    int out; // dtype of y, a ScaledOut
    int scale_a_step, scale_b_step;
    int aligned; // every row of a and of b starts on 16 bytes
    int whole;   // every row of y starts and ends on 16 bytes
    int weights; // b was not written by the kernel before this one: it may be read before the wait
    int stages;  // of the ring in shared memory
    int split;   // blocks of a cluster
    int tile;    // rows of b of a block
    int early;   // the next kernel may start with this one; else when the one before is done
    int shared;  // the first so many tiles, whose steps along k are shared out
    alignas(64) uint8_t a_map[128], b_map[128], y_map[128]; // of y where `whole`
};
static_assert(sizeof(ScaledArgs) == ARGS_BYTES, "ScaledArgs and kernels.SCALED_ARGS must agree");

enum ScaledOut { SCALED_BF16, SCALED_F16, SCALED_F32 }; // in the order of formats.FLOATS

// The formats of codes; A and B are those of a and b, which the row of KERNELS names.
struct E4M3 {};
struct E5M2 {};
template <bool IS_E5M2> struct Format {
    using type = E4M3;
};
template <> struct Format<true> {
    using type = E5M2;
};
using A = Format<A_IS_E5M2>::type;
using B = Format<B_IS_E5M2>::type;

__device__ __forceinline__ void store_scaled(void *y, int64_t i, float v, int out) {
    if (out == SCALED_BF16)
        static_cast<uint16_t *>(y)[i] = float_to_bf16(v);
    else if (out == SCALED_F16)
        static_cast<uint16_t *>(y)[i] = float_to_f16(v);
    else
        static_cast<float *>(y)[i] = v;
}

#if __CUDA_ARCH__ >= 800
// Two values as a 16-bit y has them, the first in the low half.
template <int OUT> __device__ __forceinline__ uint32_t two_of(float first, float second) {
    uint32_t two;
    if (OUT == SCALED_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
}
__device__ __forceinline__ uint32_t two_of(float first, float second, int out) {
    return out == SCALED_BF16 ? two_of<SCALED_BF16>(first, second) : two_of<SCALED_F16>(first, second);
}
#endif

// Of a token or a channel past the end: anything, for nothing of it is stored.
__device__ __forceinline__ float token_scale(const ScaledArgs &args, int token) {
    return token < args.m ? args.scale_a[int64_t(token) * args.scale_a_step] : 0.0f;
}

struct Channel {
    float scale, bias;

    __device__ __forceinline__ Channel(const ScaledArgs &args, int channel)
        : scale(channel < args.n ? args.scale_b[int64_t(channel) * args.scale_b_step] : 0.0f),
          bias(channel < args.n && args.bias ? args.bias[channel] : 0.0f) {}

    __device__ __forceinline__ float finish(float sum, float scale_a) const { return fmaf(sum * scale_a, scale, bias); }
};
