// tiles.cuh with wgmma, sm_90a: for many tokens. Four warps multiply 64 channels in one instruction.
#include "tiles.cuh"
#include "wgmma.cuh"

template <class X> struct Operands {
    uint4 k16[STEP / 16];

    __device__ __forceinline__ explicit Operands(const Codes &codes) {
#pragma unroll
        for (int j = 0; j < STEP / 16; ++j) k16[j] = codes.operand<X>(j);
    }
};

template <class X_, int TOKENS_> struct WarpGroups {
    using X = X_;
    static constexpr int TOKENS = TOKENS_, UNITS = 1;

    // While the products of a step run, the codes of the next are converted and those of the one after it loaded.
    static __device__ __forceinline__ void add(float (&sums)[UNITS][TOKENS / 8][4], const Ring<TOKENS> &ring,
                                               const int (&unit)[UNITS], const BlockScales &scales, Place &at, int step,
                                               int steps, int ways) {
        constexpr bool SUMS = SCALES_SUMS<X>;
        constexpr bool TIGHT = TOKENS == 64 || SUMS; // registers: load when the operands before are free
        if (step >= steps) return;
        float (&sum)[TOKENS / 8][4] = sums[0];
        const int lane = threadIdx.x % 32;
        const uint64_t x = wgmma_descriptor(smem_address(ring.base));
        mbarrier_wait(ring.full + at.slot, at.parity);
        Operands<X> now{ring.codes(at.slot, unit[0], lane)};
        float part[TOKENS / 8][4]; // the sums of a step that have a scale of their own
        Place ahead = at;
        ahead.advance(ring.stages, ways);
        Codes loaded{};
        const auto load = [&] {
            mbarrier_wait(ring.full + ahead.slot, ahead.parity);
            loaded = ring.codes(ahead.slot, unit[0], lane);
        };
        if (step + ways < steps) load();
#pragma unroll 2
        for (; step < steps; step += ways) {
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < STEP / 16; ++j)
                if (SUMS && j == 0)
                    Wgmma<X, TOKENS>::template m64k16<false>(part, now.k16[j], x + (at.slot * ring.stage_bytes >> 4));
                else
                    Wgmma<X, TOKENS>::m64k16(SUMS ? part : sum, now.k16[j],
                                             x + (at.slot * ring.stage_bytes >> 4) + 2 * j);
            wgmma_commit();
            const Operands<X> converted{loaded};
            const float scale = SUMS ? scales.at(unit[0], step) : 1.0f;
            ahead.advance(ring.stages, ways);
            if (!TIGHT && step + 2 * ways < steps) load();
            wgmma_wait();
#pragma unroll
            for (int j = 0; j < STEP / 16; ++j) wgmma_read(now.k16[j]);
            if (lane == 0) mbarrier_arrive(ring.empty + at.slot); // this warp has read the stage
            at.advance(ring.stages, ways);
            if constexpr (SUMS)
#pragma unroll
                for (int t = 0; t < TOKENS / 8; ++t) {
                    wgmma_written(part[t]);
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[t][r] = fmaf(scale, part[t][r], sum[t][r]);
                }
            now = converted;
            if (TIGHT && step + 2 * ways < steps) load();
        }
    }
};

#if X_IS_FLOAT16
#define ENTRY(TOKENS) TILE_ENTRY(wgmma_float16_##TOKENS, WarpGroups, F16, TOKENS)
#else
#define ENTRY(TOKENS) TILE_ENTRY(wgmma_bfloat16_##TOKENS, WarpGroups, BF16, TOKENS)
#endif

// A binary of its own: the compiler takes as long for it as for the others together.
#if TOKENS_256
ENTRY(256)
#else
ENTRY(32)
ENTRY(64)
ENTRY(128)
#endif
