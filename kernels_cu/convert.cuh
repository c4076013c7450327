// Number conversion: e4m3fn codes and 16-bit floats to and from float, in registers, without CUDA's own headers.
// Two values share a 32-bit word, the first in the low half; four codes share a word.
// Every conversion of a code is exact: e4m3fn is a subset of float16 and of bfloat16.
// From sm_89 the hardware converts; below it integer code does. NaN codes never come in; NaN goes out as 0x7f.
// Sources: OCP 8-bit Floating Point Specification 1.0, section 5; PTX ISA, cvt.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

// Two codes of a word, bytes 0 and 2 (PAIR 0) or 1 and 3 (PAIR 1): each in the high byte of a half, where no byte has
// to move for the integer conversions.
template <int PAIR> __device__ __forceinline__ uint32_t e4m3_high(uint32_t codes) { return PAIR ? codes : codes << 8; }

// Such a pair -> two float16.
template <int PAIR> __device__ __forceinline__ uint32_t e4m3_to_f16x2(uint32_t codes) {
    uint32_t halves;
#if __CUDA_ARCH__ >= 890
    const uint16_t two = static_cast<uint16_t>(__byte_perm(codes, 0, PAIR ? 0x4431 : 0x4420));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
#else
    // Exponent and mantissa of a code, seven bits, become the top of a float16's fifteen: 2^-8 of the value.
    const uint32_t high = e4m3_high<PAIR>(codes);
    const uint32_t small = (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(0x5c005c00u));
#endif
    return halves;
}

__device__ __forceinline__ float2 f16x2_to_float2(uint32_t pair) {
    float2 v;
    asm("{ .reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(v.x), "=f"(v.y)
        : "r"(pair));
    return v;
}

__device__ __forceinline__ float2 bf16x2_to_float2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ uint16_t float_to_f16(float v) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

__device__ __forceinline__ uint16_t float_to_bf16(float v) {
#if __CUDA_ARCH__ >= 800
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
#else
    const uint32_t u = __float_as_uint(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1)) >> 16); // round to nearest, ties to even
#endif
}

// Such a pair -> two bfloat16; below sm_80 `by` is not looked at.
template <int PAIR> __device__ __forceinline__ uint32_t e4m3_to_bf16x2(uint32_t codes, uint32_t by = 0x7b807b80u) {
    uint32_t pair;
#if __CUDA_ARCH__ >= 800
    // As for float16 with eight exponent bits: 2^-120 of the value, put right by an exact product with `by`, which may
    // have a power of two more; the addend is -0.
    // Also where the hardware converts to float16: from there to bfloat16 takes more operations, some at half rate.
    const uint32_t high = e4m3_high<PAIR>(codes);
    const uint32_t small = (high & 0x80008000u) | (high >> 4 & 0x07f007f0u);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(small), "r"(by), "r"(0x80008000u));
#else
    const float2 v = f16x2_to_float2(e4m3_to_f16x2<PAIR>(codes));
    pair = __float_as_uint(v.x) >> 16 | (__float_as_uint(v.y) & 0xffff0000u);
#endif
    return pair;
}

template <int PAIR> __device__ __forceinline__ float2 e4m3_to_float2(uint32_t codes) {
    return f16x2_to_float2(e4m3_to_f16x2<PAIR>(codes));
}

// A float to a code below sm_89: SMALLEST is the power of two that the least normal code has, TOP the largest value.
template <int MANTISSA_BITS, int SMALLEST, int TOP> __device__ __forceinline__ uint32_t float_to_code(float v) {
    constexpr int GONE = 23 - MANTISSA_BITS; // bits of the mantissa
    const uint32_t sign = __float_as_uint(v) >> 24 & 0x80;
    const float a = fminf(fabsf(v), float(TOP));
    if (v != v) return 0x7f;
    if (a < __uint_as_float(SMALLEST + 127 << 23)) // there a code counts steps
        return sign | static_cast<uint32_t>(__float2int_rn(a * __uint_as_float(MANTISSA_BITS - SMALLEST + 127 << 23)));
    const uint32_t u = __float_as_uint(a);
    const uint32_t rounded = (u + (1u << GONE - 1) - 1 + (u >> GONE & 1)) >> GONE;
    return sign | (rounded - (SMALLEST + 126 << MANTISSA_BITS)); // the exponent's bias
}

// Two floats (what is beyond the largest value becomes it) -> two codes in 16 bits, ties to even, the first in the low
// byte.
__device__ __forceinline__ uint32_t float2_to_e4m3(float first, float second) {
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return float_to_code<3, -6, 448>(first) | float_to_code<3, -6, 448>(second) << 8;
#endif
}

__device__ __forceinline__ uint32_t float2_to_e5m2(float first, float second) {
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return float_to_code<2, -14, 57344>(first) | float_to_code<2, -14, 57344>(second) << 8;
#endif
}

// The kinds of x. A `pair` is two neighbouring values in a register; `widen` makes floats of it.
struct F16 {
    using element = uint16_t;
    static __device__ __forceinline__ float2 widen(uint32_t pair) { return f16x2_to_float2(pair); }
    static __device__ __forceinline__ float to_float(uint16_t v) { return f16x2_to_float2(v).x; }
    static __device__ __forceinline__ uint16_t from_float(float v) { return float_to_f16(v); }
    template <int PAIR> static __device__ __forceinline__ uint32_t from_codes(uint32_t codes) {
        return e4m3_to_f16x2<PAIR>(codes);
    }
};

struct BF16 {
    using element = uint16_t;
    static __device__ __forceinline__ float2 widen(uint32_t pair) { return bf16x2_to_float2(pair); }
    static __device__ __forceinline__ float to_float(uint16_t v) { return __uint_as_float(uint32_t(v) << 16); }
    static __device__ __forceinline__ uint16_t from_float(float v) { return float_to_bf16(v); }
    template <int PAIR> static __device__ __forceinline__ uint32_t from_codes(uint32_t codes) {
        return e4m3_to_bf16x2<PAIR>(codes);
    }
};

struct F32 {
    using element = float;
    static __device__ __forceinline__ float to_float(float v) { return v; }
    static __device__ __forceinline__ float from_float(float v) { return v; }
    template <int PAIR> static __device__ __forceinline__ float2 from_codes(uint32_t codes) {
        return e4m3_to_float2<PAIR>(codes);
    }
};

struct F64 {
    using element = double;
    static __device__ __forceinline__ float to_float(double v) { return __double2float_rn(v); }
    static __device__ __forceinline__ double from_float(float v) { return v; }
};
