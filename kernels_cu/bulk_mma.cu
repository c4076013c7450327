// tiles.cuh with mma.sync, sm_90 and newer: for few tokens, where each warp goes its own way.
#include "tiles.cuh"

template <class X_, int TOKENS_> struct MmaSync {
    using X = X_;
    static constexpr int TOKENS = TOKENS_, TOKEN_TILES = TOKENS / 8;
    static constexpr int CHAINS = TOKENS > 16 ? 1 : 2; // of products, each of which waits for the one before

    // While a step is multiplied, the codes of the next are loaded.
    static __device__ __forceinline__ void add(float (&sum)[TOKEN_TILES][4], const Ring<TOKENS> &ring, int unit,
                                               Place &at, int steps) {
        const int lane = threadIdx.x % 32;
        // ldmatrix: lane l gives the address of row l % 8 of matrix l / 8; k = 8 * (l / 8) .. + 7 of 32.
        const uint32_t row = lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
        float more[TOKEN_TILES][4] = {};
        mbarrier_wait(ring.full + at.slot, at.parity);
        Codes loaded = ring.codes(at.slot, unit, lane);
        for (int step = 0; step < steps; ++step) {
            const Codes codes = loaded;
            const int slot = at.slot;
            at.advance(ring.stages);
            if (step + 1 < steps) {
                mbarrier_wait(ring.full + at.slot, at.parity);
                loaded = ring.codes(at.slot, unit, lane);
            }
            const uint32_t x = smem_address(ring.x(slot)) + row;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 b[TOKEN_TILES];
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) b[t] = ldmatrix_x4((x + t * 1024) ^ half * 64);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint4 w = codes.operand<X>(2 * half + j);
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; ++t)
                        Mma<X>::m16n8k16(CHAINS == 2 && j ? more[t] : sum[t], w, j ? b[t].z : b[t].x,
                                         j ? b[t].w : b[t].y);
                }
            }
            __syncwarp(); // every lane has read the stage
            if (lane == 0) mbarrier_arrive(ring.empty + slot);
        }
        if (CHAINS == 2)
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[t][r] += more[t][r];
    }
};

TILE_ENTRY(bulk_mma_bfloat16_8, MmaSync, BF16, 8, BLOCKS_8)
TILE_ENTRY(bulk_mma_bfloat16_16, MmaSync, BF16, 16, BLOCKS_16)
TILE_ENTRY(bulk_mma_bfloat16_32, MmaSync, BF16, 32, BLOCKS_32)
TILE_ENTRY(bulk_mma_bfloat16_64, MmaSync, BF16, 64, BLOCKS_64)
TILE_ENTRY(bulk_mma_float16_8, MmaSync, F16, 8, BLOCKS_8)
TILE_ENTRY(bulk_mma_float16_16, MmaSync, F16, 16, BLOCKS_16)
TILE_ENTRY(bulk_mma_float16_32, MmaSync, F16, 32, BLOCKS_32)
TILE_ENTRY(bulk_mma_float16_64, MmaSync, F16, 64, BLOCKS_64)
