// tiles.cuh with mma.sync, sm_90 and newer: for few tokens, where each warp goes its own way.
#include "tiles.cuh"

template <class X_, int TOKENS_> struct MmaSync {
    using X = X_;
    static constexpr int TOKENS = TOKENS_, UNITS = 2, TOKEN_TILES = TOKENS / 8;
    static constexpr bool SUMS = SCALES_SUMS<X>;
    // Scales multiply the sums of a whole step, else of each half; of blocks' float16 has registers for halves alone.
    static constexpr bool WHOLE = FORMAT == FP8_BLOCK && same<X, BF16>;
    static constexpr int HALVES = TOKENS > (SUMS && !WHOLE ? 8 : 16) ? 1 : 2; // of a step, side by side: registers
    static constexpr bool TURNS = FP4 && HALVES == 1;         // the second half's codes take the place of the first's
    static constexpr int CHAINS = TOKENS > 8 || SUMS ? 1 : 2; // of products, each of which waits for the one before

    static __device__ __forceinline__ void add(float (&sum)[UNITS][TOKEN_TILES][4], const Ring<TOKENS> &ring,
                                               const int (&unit)[UNITS], const BlockScales &scales, Place &at, int step,
                                               int steps, int ways) {
        const int lane = threadIdx.x % 32;
        // ldmatrix: lane l gives the address of row l % 8 of matrix l / 8; k = 8 * (l / 8) .. + 7 of 32.
        const uint32_t row = lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
        float more[UNITS][TOKEN_TILES][4] = {};
#pragma unroll 1
        for (; step < steps; step += ways) {
            float block_scale[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (FORMAT == FP8_BLOCK) block_scale[u] = scales.at(unit[u], step);
            float part[UNITS][TOKEN_TILES][4] = {};
            mbarrier_wait(ring.full + at.slot, at.parity);
            Codes codes[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                codes[u] = ring.codes(at.slot, unit[u], lane);
                if (FORMAT == FP8_BLOCK) codes[u].block_scale = block_scale[u];
            }
            const uint32_t x = smem_address(ring.x(at.slot)) + row;
#pragma unroll HALVES
            for (int half = 0; half < 2; ++half) {
                if (WHOLE && half == 1) __syncwarp(); // its codes are converted no sooner: registers
                uint4 w[UNITS][2];
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
#pragma unroll
                    for (int j = 0; j < 2; ++j) w[u][j] = codes[u].template operand<X>(TURNS ? j : 2 * half + j);
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) {
                    const uint4 b = ldmatrix_x4((x + t * 1024) ^ half * 64);
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) Mma<X>::m16n8k16(SUMS ? part[u][t] : sum[u][t], w[u][0], b.x, b.y);
#pragma unroll
                    for (int u = 0; u < UNITS; ++u)
                        Mma<X>::m16n8k16(SUMS ? part[u][t] : CHAINS == 2 ? more[u][t] : sum[u][t], w[u][1], b.z, b.w);
#pragma unroll
                    for (int u = 0; u < UNITS; ++u)
                        if (SUMS && (!WHOLE || half == 1)) {
                            const int j = TURNS ? 0 : 2 * half;
                            add_part(sum[u][t], part[u][t], codes[u].scale(0, j), codes[u].scale(1, j));
                        }
                }
                if constexpr (TURNS)
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) codes[u].turn();
            }
            __syncwarp(); // every lane has read the stage
            if (lane == 0) mbarrier_arrive(ring.empty + at.slot);
            at.advance(ring.stages, ways);
        }
        if (CHAINS == 2)
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[u][t][r] += more[u][t][r];
    }
};

#if WEIGHT >= 3 // 4-bit codes: a warp multiplies all units of a tile, for which it reads x once
template <class X_> struct MmaSync<X_, 8> {
    using X = X_;
    static constexpr int TOKENS = 8, UNITS = 8;

    static __device__ __forceinline__ void add(float (&sum)[UNITS][1][4], const Ring<TOKENS> &ring,
                                               const int (&unit)[UNITS], const BlockScales &, Place &at, int step,
                                               int steps, int ways) {
        const int lane = threadIdx.x % 32, units = unit[UNITS - 1] + 1;
        const uint32_t row = lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
#pragma unroll 1
        for (; step < steps; step += ways) {
            mbarrier_wait(ring.full + at.slot, at.parity);
            const uint32_t x = smem_address(ring.x(at.slot)) + row;
            const uint4 b[2] = {ldmatrix_x4(x), ldmatrix_x4(x ^ 64)};
            const uint8_t *from = ring.tile(at.slot, 0) + lane * 16, *from_scales = from + to_scales(lane);
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (u < units) {
                    const Codes codes(from + u * TILE_BYTES, from_scales + u * TILE_BYTES);
                    float part[4] = {};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        auto &to = SCALES_SUMS<X> ? part : sum[u][0];
                        const uint4 &k = b[j / 2];
                        Mma<X>::m16n8k16(to, codes.template operand<X>(j), j % 2 ? k.z : k.x, j % 2 ? k.w : k.y);
                        if constexpr (SCALES_SUMS<X>)
                            if (j % 2) add_part(sum[u][0], part, codes.scale(0, j), codes.scale(1, j));
                    }
                }
            __syncwarp(); // every lane has read the stage
            if (lane == 0) mbarrier_arrive(ring.empty + at.slot);
            at.advance(ring.stages, ways);
        }
    }
};
#endif

TILE_ENTRY(bulk_mma_bfloat16_8, MmaSync, BF16, 8)
TILE_ENTRY(bulk_mma_bfloat16_16, MmaSync, BF16, 16)
TILE_ENTRY(bulk_mma_bfloat16_32, MmaSync, BF16, 32)
TILE_ENTRY(bulk_mma_float16_8, MmaSync, F16, 8)
TILE_ENTRY(bulk_mma_float16_16, MmaSync, F16, 16)
TILE_ENTRY(bulk_mma_float16_32, MmaSync, F16, 32)
// From sm_120 on shared memory has no room for the sums of 64 tokens; scales of blocks take the registers that they need.
#if __CUDA_ARCH__ < 1200 && !WEIGHT
TILE_ENTRY(bulk_mma_bfloat16_64, MmaSync, BF16, 64)
TILE_ENTRY(bulk_mma_float16_64, MmaSync, F16, 64)
#endif
