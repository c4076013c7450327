// Tensor-core products of a warpgroup (sm_90a): C[64, N] += A[64, 16] * B[16, N], float32 sums, A in registers, B in
// shared memory. Functions are named after their instructions.
// Of A and C each warp of the four holds 16 rows, as in mma.cuh; c[j] is columns 8 * j .. 8 * j + 7.
// B: N rows of 64 values of k, 128 bytes each, one after another from a multiple of 1024 bytes; within a row the 16-byte
// pieces are exchanged: piece p of row r lies at p ^ (r % 8), as a tensor map with a swizzle of 128 bytes leaves them.
// Source: PTX ISA, wgmma.mma_async, matrix descriptor.
#pragma once
#include "mma.cuh"

// Steps of 16 along k add 2 to it.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62, GROUP_OF_ROWS = uint64_t(1024 >> 4) << 32, UNUSED = 1ull << 16;
    return SWIZZLE_128 | GROUP_OF_ROWS | UNUSED | (address & 0x3ffff) >> 4;
}

// Registers written before are seen by the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All products of this warp are done.
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// The products read A until they are done: said after the wait, it keeps the compiler from writing there before.
__device__ __forceinline__ void wgmma_read(uint4 &a) { asm volatile("" : "+r"(a.x), "+r"(a.y), "+r"(a.z), "+r"(a.w)); }

// The products write C until they are done: said after the wait, it keeps the compiler from reading it before.
__device__ __forceinline__ void wgmma_written(float (&c)[4]) {
    asm volatile("" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]));
}

template <class X, int N> struct Wgmma;

#define TEN(d) "%" #d "0, %" #d "1, %" #d "2, %" #d "3, %" #d "4, %" #d "5, %" #d "6, %" #d "7, %" #d "8, %" #d "9, "
#define SUMS(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SUMS_2(i) SUMS(i), SUMS(i + 1)
#define SUMS_4(i) SUMS_2(i), SUMS_2(i + 2)
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)

#define MULTIPLY(compare, type, N, registers, a, b)                                                                    \
    "{ .reg .pred add; setp." compare ".b32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type  \
    " {" registers "}, {" a "}, " b ", add, 1, 1, 0; }"

// ADD: to what c holds; else c begins anew.
#define WGMMA(X, type, N, registers, a, b, ...)                                                                        \
    template <> struct Wgmma<X, N> {                                                                                   \
        template <bool ADD = true>                                                                                     \
        static __device__ __forceinline__ void m64k16(float (&c)[N / 8][4], const uint4 &w, uint64_t x) {              \
            if constexpr (ADD)                                                                                         \
                asm volatile(MULTIPLY("eq", type, N, registers, a, b)                                                  \
                             : __VA_ARGS__                                                                             \
                             : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "l"(x));                                        \
            else                                                                                                       \
                asm volatile(MULTIPLY("ne", type, N, registers, a, b)                                                  \
                             : __VA_ARGS__                                                                             \
                             : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "l"(x));                                        \
        }                                                                                                              \
    };

#define WGMMAS(X, type)                                                                                                \
    WGMMA(X, type, 8, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", SUMS(0))                                               \
    WGMMA(X, type, 16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12", SUMS_2(0))                         \
    WGMMA(X, type, 32, TEN() "%10, %11, %12, %13, %14, %15", "%16, %17, %18, %19", "%20", SUMS_4(0))                   \
    WGMMA(X, type, 64, TEN() TEN(1) TEN(2) "%30, %31", "%32, %33, %34, %35", "%36", SUMS_8(0))                         \
    WGMMA(X, type, 128, TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63", "%64, %65, %66, %67", "%68",    \
          SUMS_16(0))                                                                                                  \
    WGMMA(X, type, 256,                                                                                                \
          TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10)                                 \
              TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127",                                                \
          "%128, %129, %130, %131", "%132", SUMS_16(0), SUMS_16(16))

WGMMAS(BF16, "bf16")
WGMMAS(F16, "f16")
