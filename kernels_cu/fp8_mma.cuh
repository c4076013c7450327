// Tensor-core products of a warp, of FP8 codes. sm_89 and sm_120 multiply codes, and keep fewer bits of sums than
// float32 has. From sm_90 to sm_110 mma.sync of codes is compiled to conversions to float16, which holds each exactly,
// products with sums in float32, and additions of these: converted here, the products add. Below sm_89 integer code
// converts.
// Source: PTX ISA, mma.sync.m16n8k32, cvt.
#pragma once
#include "mma.cuh"
#include "scaled.cuh"

#define WIDENED (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)

// C[16, 8] += A[16, 32] * B[8, 32]. Lane l holds of A the rows l / 4 (a.x, a.z) and l / 4 + 8 (a.y, a.w), codes
// 4 * (l % 4) .. + 3 (a.x, a.y) and those + 16; of B row l / 4, the same codes (b0, b1); of C what mma.cuh says.
template <class X, class W> struct Fp8Mma;

#if __CUDA_ARCH__ >= 890 && !WIDENED
#define FP8_MMA(X, W, types)                                                                                           \
    template <> struct Fp8Mma<X, W> {                                                                                  \
        static __device__ __forceinline__ void m16n8k32(float (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {     \
            asm("mma.sync.aligned.m16n8k32.row.col.f32." types                                                         \
                ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
                : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));                                           \
        }                                                                                                              \
    };
FP8_MMA(E4M3, E4M3, "e4m3.e4m3")
FP8_MMA(E4M3, E5M2, "e4m3.e5m2")
FP8_MMA(E5M2, E4M3, "e5m2.e4m3")
#else
#if WIDENED
// Codes 0 and 1 (PAIR 0) or 2 and 3 (PAIR 1) of a word as float16.
template <class C, int PAIR> struct Halves;
#define HALVES(C, type)                                                                                                \
    template <int PAIR> struct Halves<C, PAIR> {                                                                       \
        static __device__ __forceinline__ uint32_t of(uint32_t codes) {                                                \
            uint32_t two;                                                                                              \
            asm("{ .reg .b16 part<2>; mov.b32 {part0, part1}, %1; cvt.rn.f16x2." type "x2 %0, part%2; }"               \
                : "=r"(two)                                                                                            \
                : "r"(codes), "n"(PAIR));                                                                              \
            return two;                                                                                                \
        }                                                                                                              \
    };
HALVES(E4M3, "e4m3")
HALVES(E5M2, "e5m2")
template <class C, int PAIR> __device__ __forceinline__ uint32_t halves(uint32_t codes) {
    return Halves<C, PAIR>::of(codes);
}
#else
// Codes 0 and 2 (PAIR 0) or 1 and 3 (PAIR 1) of a word as float16.
template <class C, int PAIR> __device__ __forceinline__ uint32_t halves(uint32_t codes);
template <> __device__ __forceinline__ uint32_t halves<E5M2, 0>(uint32_t codes) { return codes << 8 & 0xff00ff00u; }
template <> __device__ __forceinline__ uint32_t halves<E5M2, 1>(uint32_t codes) { return codes & 0xff00ff00u; }
template <int PAIR> __device__ __forceinline__ uint32_t e4m3_halves(uint32_t codes) {
    const uint32_t carry = (codes & 0x7f7f7f7fu) + 0x01010101u; // into the top bit of a byte that is a NaN
    const uint32_t nan = (PAIR ? carry : carry << 8) & 0x80008000u;
    return e4m3_to_f16x2<PAIR>(codes) | (nan - (nan >> 6)); // 0x7e00 of each
}
template <> __device__ __forceinline__ uint32_t halves<E4M3, 0>(uint32_t codes) { return e4m3_halves<0>(codes); }
template <> __device__ __forceinline__ uint32_t halves<E4M3, 1>(uint32_t codes) { return e4m3_halves<1>(codes); }
#endif

template <class X, class W> struct Fp8Mma {
    static __device__ __forceinline__ void m16n8k32(float (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
        // Of A and of B the codes of k come in the same other order, which a sum does not see.
        Mma<F16>::m16n8k16(c, make_uint4(halves<X, 0>(a.x), halves<X, 0>(a.y), halves<X, 1>(a.x), halves<X, 1>(a.y)),
                           halves<W, 0>(b0), halves<W, 1>(b0));
        Mma<F16>::m16n8k16(c, make_uint4(halves<X, 0>(a.z), halves<X, 0>(a.w), halves<X, 1>(a.z), halves<X, 1>(a.w)),
                           halves<W, 0>(b1), halves<W, 1>(b1));
    }
};
#endif
