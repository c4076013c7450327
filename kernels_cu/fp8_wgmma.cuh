// Tensor-core products of a warpgroup (sm_90a) of codes: C[64, N] = A[64, 32] * B[N, 32], or += where `add` is not 0.
// Sums are float32, of which some 14 bits count (source below). A and B lie in shared memory.
// A: 64 rows, B: N rows of 128 codes along k, 128 bytes each, one after another from a multiple of 1024 bytes, 16-byte
// pieces exchanged as wgmma.cuh says, whose descriptors serve: steps of 32 along k add 2. C as in wgmma.cuh.
// Sources: PTX ISA, wgmma.mma_async; the bits: DeepSeek-V3 Technical Report, section 3.5.2.
#pragma once
#include "wgmma.cuh"

// The formats of codes.
struct E4M3;
struct E5M2;

// All products of this warp are done, but those since the commit before the last one.
__device__ __forceinline__ void wgmma_wait_for_earlier() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// The products write C until they are done: said after the wait, it keeps the compiler from reading there before.
template <int TILES> __device__ __forceinline__ void wgmma_written(float (&c)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]));
}

template <class A, class B, int N> struct Fp8Wgmma;

#define FP8_WGMMA(A, B, types, N, registers, a, b, more, ...)                                                          \
    template <> struct Fp8Wgmma<A, B, N> {                                                                             \
        static __device__ __forceinline__ void m64k32(float (&c)[N / 8][4], uint64_t x, uint64_t w, int add) {         \
            asm volatile("{ .reg .pred more; setp.ne.b32 more, " more ", 0; wgmma.mma_async.sync.aligned.m64n" #N      \
                         "k32.f32." types " {" registers "}, " a ", " b ", more, 1, 1; }"                              \
                         : __VA_ARGS__                                                                                 \
                         : "l"(x), "l"(w), "r"(add));                                                                  \
        }                                                                                                              \
    };

#define FP8_WGMMAS(A, B, types)                                                                                        \
    FP8_WGMMA(A, B, types, 8, "%0, %1, %2, %3", "%4", "%5", "%6", SUMS(0))                                             \
    FP8_WGMMA(A, B, types, 16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", SUMS_2(0))                         \
    FP8_WGMMA(A, B, types, 32, TEN() "%10, %11, %12, %13, %14, %15", "%16", "%17", "%18", SUMS_4(0))                   \
    FP8_WGMMA(A, B, types, 64, TEN() TEN(1) TEN(2) "%30, %31", "%32", "%33", "%34", SUMS_8(0))                         \
    FP8_WGMMA(A, B, types, 128, TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63", "%64", "%65", "%66",    \
              SUMS_16(0))                                                                                              \
    FP8_WGMMA(A, B, types, 256,                                                                                        \
              TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10)                             \
                  TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127",                                            \
              "%128", "%129", "%130", SUMS_16(0), SUMS_16(16))

FP8_WGMMAS(E4M3, E4M3, "e4m3.e4m3")
FP8_WGMMAS(E4M3, E5M2, "e4m3.e5m2")
FP8_WGMMAS(E5M2, E4M3, "e5m2.e4m3")
