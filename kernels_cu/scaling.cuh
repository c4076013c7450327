// Scales and the division by them: what quantize.cu and activations.cuh make of values, the same bits as on the host.
// Values come in pieces of 16 bytes, of any kind of x in convert.cuh, and are floats from then on.
// Largest magnitudes are found as integers: bits of a magnitude order as magnitudes do, Inf and NaN above all else.
// A scale multiplies: scale = max(amax / max, 2^-126), 1 where amax is 0; max is 448 (e4m3fn) or 2^7 times that (e5m2).
// Source: P. Markstein, IA-64 and Elementary Functions, 2000, chapter 8, for quotients that are put right.
#pragma once
#include "convert.cuh"

// What a 16-byte piece of a row holds, as floats.
template <class X> struct Piece;

template <> struct Piece<F32> {
    static constexpr int SIZE = 4;
    static __device__ __forceinline__ void floats(const uint4 &v, float (&f)[SIZE]) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z),
        f[3] = __uint_as_float(v.w);
    }
};

template <> struct Piece<F64> {
    static constexpr int SIZE = 2;
    static __device__ __forceinline__ void floats(const uint4 &v, float (&f)[SIZE]) {
        f[0] = F64::to_float(__hiloint2double(v.y, v.x)), f[1] = F64::to_float(__hiloint2double(v.w, v.z));
    }
};

template <class X> struct Piece {
    static constexpr int SIZE = 8;
    static __device__ __forceinline__ void floats(const uint4 &v, float (&f)[SIZE]) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = X::widen(words[i]);
            f[2 * i] = two.x, f[2 * i + 1] = two.y;
        }
    }
};

constexpr uint32_t INFINITE = 0x7f800000u;
__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// The larger of `top` and the magnitudes in a piece. 16-bit values stay as they are, two maxima side by side ...
template <class X> __device__ __forceinline__ uint32_t larger(uint32_t top, const uint4 &v) {
    if constexpr (Piece<X>::SIZE == 8) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) top = __vmaxu2(top, words[i] & 0x7fff7fffu);
    } else {
        float f[Piece<X>::SIZE];
        Piece<X>::floats(v, f);
#pragma unroll
        for (int j = 0; j < Piece<X>::SIZE; ++j) top = max(top, magnitude(f[j]));
    }
    return top;
}

// ... until this makes a float's bits of them.
template <class X> __device__ __forceinline__ uint32_t largest(uint32_t top) {
    if constexpr (Piece<X>::SIZE == 8) top = magnitude(X::to_float(max(top & 0xffffu, top >> 16)));
    return top;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, v);
#else
#pragma unroll
    for (int d = 16; d; d /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
#endif
}

// The largest of all threads' values, for all threads of a block of whole warps.
__device__ __forceinline__ uint32_t block_max(uint32_t v) {
    __shared__ uint32_t tops[32];
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = v;
    __syncthreads(); // every warp's maximum is there
    return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? tops[threadIdx.x % 32] : 0);
}

// A quotient v / by nearer to the exact one: put right by its remainder. In these signs -0 stays -0.
__device__ __forceinline__ float put_right(float q, float v, float by, float reciprocal) {
    return fmaf(fmaf(q, by, -v), -reciprocal, q);
}

// The scale of values whose largest magnitude has these bits; `unit` is 448 / max. By 448 one step is enough for every
// float: all were tried; and by a power of two times 448, for what would be subnormal becomes 2^-126.
__device__ __forceinline__ float scale_of(uint32_t amax, float unit) {
    const float m = __uint_as_float(amax), reciprocal = 1.0f / 448.0f;
    return amax == 0 ? 1.0f : fmaxf(put_right(m * reciprocal, m, 448.0f, reciprocal) * unit, 0x1p-126f);
}

// Division by one scale, finite and above 0, many times: the reciprocal of its mantissa is found once; its power of two
// multiplies, so that no remainder that matters is subnormal. For values up to 2^20 * scale; NaN and Inf become NaN.
// EXACT: correctly rounded. A first quotient, by a reciprocal that is too small and what is missing from it, so that -0
// stays -0, is off by less than a unit in the last place, and is put right. Otherwise one operation less: such a quotient
// may be wrong where it is within 2^-46 of half-way between two floats; but of 16-bit values and scale_of their amax all
// pairs were tried, and every code is right.
template <bool EXACT> struct Divider {
    float power, mantissa, reciprocal, low, missing;

    __device__ __forceinline__ explicit Divider(float scale) {
        const uint32_t exponent = __float_as_uint(scale) & 0x7f800000u;
        power = __uint_as_float(EXACT && exponent == 254u << 23 ? 1u << 22 : (254u << 23) - exponent);
        mantissa = scale * power;
        reciprocal = __frcp_rn(mantissa);
        low = __uint_as_float(__float_as_uint(reciprocal) - 1);
        missing = fmaf(-mantissa, low, 1.0f) * low;
    }

    __device__ __forceinline__ float divide(float v) const {
        v *= power;
        const float q = EXACT ? fmaf(v, low, v * missing) : v * reciprocal;
        return put_right(q, v, mantissa, reciprocal);
    }
};
