// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by wgmma, sm_90a: for few tokens,
// where the bytes of b decide. b is the left operand, and only so many tokens are multiplied. Every 128 of k is added
// in float32 (promoted), or sums stay in the tensor cores' registers (fast).
// a and b codes by tensor maps, boxes of TOKENS and of `tile` rows and 128 of k, zeros past m, n, k; see scaled.cuh.
// Grid: (tiles of `tile` channels, a multiple of 16 up to 128 * HALVES, x a cluster of blocks that share k, groups of
// TOKENS). Block: 8 warps that multiply, one that copies b, one that copies a; of 128 tokens and promoted two more, which
// give their registers away.
// Shared memory, dynamic: `stages` x {b [tile][128 bytes], a [TOKENS][128 bytes]}, the barriers; the sums, [blocks of a
// cluster][8 * HALVES / blocks units][TOKENS / 8][32 lanes] float4, after them or, from 64 tokens on, in the ring's
// place.
#include "fp8_wgmma.cuh"
#include "scaled.cuh"
#include "shared_copies.cuh"

constexpr int MATH_WARPS = 8, B_WARP = 8, A_WARP = 9, K_STEP = 128;

// Two tokens of a channel and of the one eight further, as wgmma leaves them, for 8 tokens and 16 channels of a warp.
// `channels`: channel + lane / 4 and that + 8.
__device__ __forceinline__ void store_fragment(const ScaledArgs &args, int token, int channel, const float (&sum)[4],
                                               const Channel (&channels)[2]) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    const float scale_a[2] = {token_scale(args, token + pair), token_scale(args, token + pair + 1)};
    float v[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) v[r] = channels[r / 2].finish(sum[r], scale_a[r % 2]);
    if (args.out != SCALED_F32 && channel + 16 <= args.n &&
        (reinterpret_cast<uint64_t>(args.y) | args.y_stride * 2) % 4 == 0) {
        // Two tokens of a channel in a register become two channels of a token.
        uint16_t *y = static_cast<uint16_t *>(args.y) + (token + row) * args.y_stride + channel + pair;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t two = movmatrix_trans(two_of(v[2 * half], v[2 * half + 1], args.out));
            if (token + row < args.m) *reinterpret_cast<uint32_t *>(y + 8 * half) = two;
        }
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int t = token + pair + r % 2, c = channel + row + r / 2 * 8;
            if (t < args.m && c < args.n) store_scaled(args.y, t * args.y_stride + c, v[r], args.out);
        }
    }
}

template <int TOKENS, int HALVES, bool PROMOTED> __device__ __forceinline__ void scaled_few(const ScaledArgs &args) {
    constexpr int FRAGMENTS = TOKENS / 8, UNITS = MATH_WARPS * HALVES;
    constexpr bool OWN_SUMS = TOKENS < 64, GIVES_REGISTERS = TOKENS == 128 && PROMOTED;
    extern __shared__ __align__(1024) uint8_t memory[];

    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = args.split, rank = split > 1 ? cluster_ctarank() : 0;
    const int channel = blockIdx.x / split * args.tile;
    const int token = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * TOKENS; // past m: nothing is stored
    const int all = (args.k - 1) / K_STEP + 1, first = int64_t(all) * rank / split;
    const int steps = int(int64_t(all) * (rank + 1) / split) - first;
    const int b_bytes = args.tile * 128, stage_bytes = b_bytes + TOKENS * 128;
    uint64_t *full = reinterpret_cast<uint64_t *>(memory + args.stages * stage_bytes), *empty = full + args.stages;

    if (threadIdx.x == 32 * MATH_WARPS) {
        for (int i = 0; i < args.stages; ++i) mbarrier_init(full + i, 2), mbarrier_init(empty + i, MATH_WARPS);
        fence_mbarrier_init();
        prefetch_tensormap(args.a_map), prefetch_tensormap(args.b_map);
    }
    __syncthreads(); // the barriers are ready
    // Early only where all blocks find room at once: a third kernel would else take that of some of this one's.
    if (args.early) let_next_start();
    if (OWN_SUMS && split > 1) cluster_arrive();

    Place at;
    if (warp >= MATH_WARPS) {
        if constexpr (GIVES_REGISTERS) setmaxnreg_dec<40>();
        if (warp == B_WARP && lane == 0) {
            // To bring b into L2 before was slower, us on an H200, M = 16: 14336x4096 18.5 / 18.0, 4096x14336 18.8 / 18.4.
            if (!args.weights) wait_for_previous();
            const uint64_t policy = createpolicy(args.m <= TOKENS);
            for (int step = 0; step < steps; ++step) {
                mbarrier_wait(empty + at.slot, at.parity ^ 1); // all have read what the stage held
                mbarrier_arrive_expect_tx(full + at.slot, b_bytes);
                cp_async_bulk_tensor_cached(memory + at.slot * stage_bytes, args.b_map, (first + step) * K_STEP,
                                            channel, full + at.slot, policy);
                at.advance(args.stages);
            }
        } else if (warp == A_WARP && lane == 0) {
            wait_for_previous();
            if (!args.early) let_next_start();
            for (int step = 0; step < steps; ++step) {
                mbarrier_wait(empty + at.slot, at.parity ^ 1); // all have read what the stage held
                mbarrier_arrive_expect_tx(full + at.slot, TOKENS * 128);
                cp_async_bulk_tensor(memory + at.slot * stage_bytes + b_bytes, args.a_map, (first + step) * K_STEP,
                                     token, full + at.slot);
                at.advance(args.stages);
            }
        }
        __syncwarp();
        if (split > 1) {
            if (!OWN_SUMS) cluster_arrive();
            cluster_wait();
            cluster_sync();
        }
        wait_for_previous();
        return;
    }

    if constexpr (GIVES_REGISTERS) setmaxnreg_inc<232>();
    wait_for_previous(); // before the first read of a scale and the first write of y
    float sum[HALVES][FRAGMENTS][4] = {};
    // Rows past a tile are whatever follows in shared memory: their sums go nowhere.
    const uint64_t b = wgmma_descriptor(smem_address(memory)) + (warp / 4 * 64 * HALVES * 128 >> 4);
    const uint64_t a = wgmma_descriptor(smem_address(memory)) + (b_bytes >> 4);
    if constexpr (PROMOTED) {
        float part[FRAGMENTS][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint64_t offset = __shfl_sync(0xffffffffu, at.slot * stage_bytes >> 4, 0);
            mbarrier_wait(full + at.slot, at.parity);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < K_STEP / 32; ++j)
                    Fp8Wgmma<B, A, TOKENS>::m64k32(part, b + offset + (half * 64 * 128 >> 4) + 2 * j,
                                                   a + offset + 2 * j, j);
                wgmma_commit();
                wgmma_wait();
                wgmma_written(part);
                if (half == HALVES - 1 && lane == 0) mbarrier_arrive(empty + at.slot); // this warp has read the stage
#pragma unroll
                for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[half][i][r] += part[i][r];
            }
            at.advance(args.stages);
        }
    } else { // a step's products run while those of the next are queued
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint64_t offset = __shfl_sync(0xffffffffu, at.slot * stage_bytes >> 4, 0);
            mbarrier_wait(full + at.slot, at.parity);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < K_STEP / 32; ++j)
                Fp8Wgmma<B, A, TOKENS>::m64k32(sum[0], b + offset + 2 * j, a + offset + 2 * j, step | j);
            wgmma_commit();
            wgmma_wait_for_earlier();
            if (step && lane == 0) mbarrier_arrive(empty + before); // this warp has read the stage
            before = at.slot;
            at.advance(args.stages);
        }
        wgmma_wait();
        wgmma_written(sum[0]);
    }

    if (split == 1) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int unit = (warp / 4 * HALVES + half) * 4 + warp % 4, c = channel + unit * 16;
            if (unit * 16 >= args.tile) continue;
            const Channel channels[2] = {Channel(args, c + lane / 4), Channel(args, c + lane / 4 + 8)};
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) store_fragment(args, token + 8 * i, c, sum[half][i], channels);
        }
        return;
    }

    // Each block of the cluster adds up `own` of the units of 16 channels, in the order of the parts of k.
    const int own = UNITS / split;
    float4 *sums = reinterpret_cast<float4 *>(memory + (OWN_SUMS ? args.sums : 0)) + lane;
    // The other blocks have begun or, without memory of their own for sums, read all their stages.
    if (!OWN_SUMS) cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int unit = (warp / 4 * HALVES + half) * 4 + warp % 4;
        const uint32_t there = mapa(sums + (rank * own + unit % own) * FRAGMENTS * 32, unit / own);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i) st_shared_cluster(there + i * 512, sum[half][i]);
    }
    cluster_sync(); // all parts of this block's units are here
#pragma unroll 1
    for (int piece = warp; piece < own * FRAGMENTS; piece += MATH_WARPS) {
        const int c = channel + (rank * own + piece / FRAGMENTS) * 16;
        if (c >= channel + args.tile) continue;
        float total[4] = {};
        for (int part = 0; part < split; ++part) {
            const float4 v = sums[(part * own * FRAGMENTS + piece) * 32];
            total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
        }
        const Channel channels[2] = {Channel(args, c + lane / 4), Channel(args, c + lane / 4 + 8)};
        store_fragment(args, token + piece % FRAGMENTS * 8, c, total, channels);
    }
}

// The numbers in a name: tokens, channels at most.
#define ENTRY(name, TOKENS, HALVES, PROMOTED, THREADS, BLOCKS)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ ScaledArgs args) {      \
        scaled_few<TOKENS, HALVES, PROMOTED>(args);                                                                    \
    }
ENTRY(scaled_few_32_128, 32, 1, true, 320, 2)
ENTRY(scaled_few_64_128, 64, 1, true, 320, 2)
ENTRY(scaled_few_64_256, 64, 2, true, 320, 1)
ENTRY(scaled_few_128_128, 128, 1, true, 384, 1)
ENTRY(scaled_few_128_256, 128, 2, true, 384, 1)
ENTRY(scaled_few_128_128_fast, 128, 1, false, 320, 2)
