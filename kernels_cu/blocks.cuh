// Codes of a row that share a scale by blocks, in the standard layout: two e2m1 a byte, the first in the low half, or one
// FP8 a byte, and a byte a scale. 16 values of e2m1 with e4m3fn scales (nvfp4), 32 of e2m1 (mxfp4), e4m3fn or e5m2 (mxfp8)
// with e8m0. The values of all codes, NaN too, and of all scales but the largest of e8m0 are float16 or float32 numbers.
// Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.
#pragma once
#include "memory.cuh"

enum Format { NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2 }; // in the order of kernels.BLOCK_FORMATS

constexpr int UNIT = 16; // values that a thread has together: a block, or half of one

__device__ __forceinline__ constexpr bool is_e2m1(int format) { return format <= MXFP4; }
__device__ __forceinline__ constexpr int block_of(int format) { return format == NVFP4 ? 16 : 32; }
__device__ __forceinline__ constexpr uint32_t nan_scale(int format) { return format == NVFP4 ? 0x7f : 0xff; }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

// A byte of two e2m1 codes -> two float16, 2^-14 of the values: exponent and mantissa of a code become those of a half.
constexpr float E2M1_FACTOR = 0x1p14f;
__device__ __forceinline__ uint32_t e2m1_halves(uint32_t byte) {
    const uint32_t apart = (byte | byte << 12) & 0x000f000fu;
    return (apart << 12 & 0x80008000u) | (apart << 9 & 0x0e000e00u);
}

// Codes 0 and 2 (PAIR 0) or 1 and 3 (PAIR 1) of a word -> two float16.
template <int PAIR> __device__ __forceinline__ uint32_t e4m3_halves(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
    return e4m3_to_f16x2<PAIR>(codes);
#else
    const uint32_t carry = (codes & 0x7f7f7f7fu) + 0x01010101u; // into the top bit of a byte that is a NaN
    const uint32_t nan = (PAIR ? carry : carry << 8) & 0x80008000u;
    return e4m3_to_f16x2<PAIR>(codes) | (nan - (nan >> 6)); // 0x7e00 of each
#endif
}
template <int PAIR> __device__ __forceinline__ uint32_t e5m2_halves(uint32_t codes) {
    return (PAIR ? codes : codes << 8) & 0xff00ff00u;
}

__device__ __forceinline__ float e4m3_scale(uint32_t code) {
    return code == nan_scale(NVFP4) ? not_a_number() : e4m3_to_float2<0>(code).x;
}
