// Tensor-core products of a warp: C[16, 8] += A[16, 16] * B[16, 8], float32 sums. Named after the instruction.
// Lane l holds of A the rows l / 4 (a.x, a.z) and l / 4 + 8 (a.y, a.w), columns 2 * (l % 4) + {0, 1} (a.x, a.y) and
// those + 8 (a.z, a.w); of B column l / 4, rows 2 * (l % 4) + {0, 1} (b0) and those + 8 (b1); of C the rows l / 4
// (c[0], c[1]) and l / 4 + 8 (c[2], c[3]), columns 2 * (l % 4) + {0, 1}.
// Source: PTX ISA, mma.sync.m16n8k16 and m16n8k8, ldmatrix, movmatrix.
#pragma once
#include "convert.cuh"

template <class X> struct Mma;

template <> struct Mma<F16> {
    static __device__ __forceinline__ void m16n8k16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else // Turing multiplies eight of k at once
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.x), "r"(a.y), "r"(b0));
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.z), "r"(a.w), "r"(b1));
#endif
    }
};

#if __CUDA_ARCH__ >= 800
template <> struct Mma<BF16> {
    static __device__ __forceinline__ void m16n8k16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    }
};
#endif

// Four 8 x 8 matrices of 16-bit values from shared memory: lane l gives the address of row l % 8 of matrix l / 8 and
// gets of each matrix row l / 4, columns 2 * (l % 4) + {0, 1}.
__device__ __forceinline__ uint4 ldmatrix_x4(uint32_t address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

// An 8 x 8 matrix of 16-bit values, lane l holding of row l / 4 the columns 2 * (l % 4) + {0, 1}, transposed.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t v) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(v));
    return v;
}
