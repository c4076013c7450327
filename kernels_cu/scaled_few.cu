// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by wgmma, sm_90a: for few tokens,
// where the bytes of b decide. b is the left operand, and only so many tokens are multiplied. Sums stay in the tensor
// cores' registers (FAST), or every 128 of k is added in float32.
// a and b codes by tensor maps, boxes of TOKENS and of `tile` rows and 128 of k, zeros past m, n, k; see scaled.cuh.
// Grid: (tiles of `tile` channels, a multiple of 16 up to CHANNELS, x a cluster of blocks that share k, groups of
// TOKENS). Block: two warpgroups that multiply, which divide 128 channels or, of 64, the tokens, a warp that copies b,
// one that copies a; where a thread has many sums two more, which give their registers away.
// Shared memory, dynamic: `stages` x {b [tile][128 bytes], a [TOKENS][128 bytes]}, in whose place come the sums of a
// cluster, [other blocks][fragments / blocks][256 threads] float4; what Tail says; the barriers.
#include "fp8_wgmma.cuh"
#include "scaled.cuh"
#include "shared_copies.cuh"

constexpr int MATH_WARPS = 8, MATH_THREADS = 32 * MATH_WARPS, B_WARP = 8, A_WARP = 9, K_STEP = 128;

// What lies after the ring. As many bytes as wgmma may read past a stage: of a tile as if it were as wide as it may be.
struct Tail {
    uint8_t pieces[MATH_WARPS][1024]; // of y: 16 tokens by 16 channels of a warp
    Channel channels[128];
    float scale_a[256];
};
static_assert(sizeof(Tail) == FEW_TAIL_BYTES, "kernels.py has another size");

template <int TOKENS, int CHANNELS> struct Shape {
    static constexpr bool DIVIDES_TOKENS = CHANNELS == 64;
    static constexpr int N = DIVIDES_TOKENS ? TOKENS / 2 : TOKENS, FRAGMENTS = N / 8; // of a warpgroup
    static constexpr bool GIVES_REGISTERS = !FAST && N == 128; // whose threads have two floats for each
    static constexpr int THREADS = GIVES_REGISTERS ? 384 : 320, BLOCKS = GIVES_REGISTERS ? 1 : 2;
};

// 16 tokens and 16 channels of a warp, from two fragments as wgmma leaves them: two tokens of a channel and of the one
// eight further.
__device__ __forceinline__ void store_piece(const ScaledArgs &args, int token, int channel, const float (*sum)[4],
                                            const float *scale_a, const Channel *channels, uint8_t *piece) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    const int size = args.out == SCALED_F32 ? 4 : 2, parts = size; // of a token's row, 16 bytes each
    // Parts are exchanged so that no two lanes meet in a bank.
    const auto place = [&](int t, int part) { return piece + (t * parts + (part ^ t * parts / 8 % parts)) * 16; };
    float v[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 scale = *reinterpret_cast<const float2 *>(scale_a + 8 * i + pair);
#pragma unroll
        for (int r = 0; r < 4; ++r) v[i][r] = channels[row + r / 2 * 8].finish(sum[i][r], r % 2 ? scale.y : scale.x);
    }
    __syncwarp(); // all have read what the piece held
    if (args.out == SCALED_F32) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                reinterpret_cast<float *>(place(8 * i + pair + r % 2, (row + r / 2 * 8) / 4))[row % 4] = v[i][r];
    } else {
        stmatrix_x4_trans(smem_address(place(lane / 16 * 8 + lane % 8, lane / 8 % 2)),
                          make_uint4(two_of(v[0][0], v[0][1], args.out), two_of(v[0][2], v[0][3], args.out),
                                     two_of(v[1][0], v[1][1], args.out), two_of(v[1][2], v[1][3], args.out)));
    }
    __syncwarp(); // the piece is whole
    uint8_t *y = static_cast<uint8_t *>(args.y) + (token * args.y_stride + channel) * size;
    const int64_t pitch = args.y_stride * size;
    const int bytes = (args.n - channel) * size; // of a row, from here to its end
    if (args.whole) {
#pragma unroll 1
        for (int i = lane; i < 16 * parts; i += 32) {
            const int t = i / parts, part = i % parts;
            if (token + t < args.m && part * 16 < bytes)
                *reinterpret_cast<uint4 *>(y + t * pitch + part * 16) =
                    *reinterpret_cast<const uint4 *>(place(t, part));
        }
    } else {
#pragma unroll 1
        for (int i = lane; i < 16 * 8 * parts; i += 32) { // by halves of a value, or values of 16 bits
            const int t = i / (8 * parts), at = i % (8 * parts) * 2;
            if (token + t < args.m && at < bytes)
                *reinterpret_cast<uint16_t *>(y + t * pitch + at) =
                    *reinterpret_cast<const uint16_t *>(place(t, at / 16) + at % 16);
        }
    }
}

template <int TOKENS, int CHANNELS> __device__ __forceinline__ void scaled_few(const ScaledArgs &args) {
    using Of = Shape<TOKENS, CHANNELS>;
    constexpr int N = Of::N, FRAGMENTS = Of::FRAGMENTS;
    extern __shared__ __align__(1024) uint8_t memory[];

    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = args.split, rank = split > 1 ? cluster_ctarank() : 0;
    const int channel = blockIdx.x / split * args.tile;
    const int token = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * TOKENS; // past m: nothing is stored
    const int all = (args.k - 1) / K_STEP + 1, first = int64_t(all) * rank / split;
    const int steps = int(int64_t(all) * (rank + 1) / split) - first;
    const int b_bytes = args.tile * 128, stage_bytes = b_bytes + TOKENS * 128;
    Tail &tail = *reinterpret_cast<Tail *>(memory + args.stages * stage_bytes);
    uint64_t *full = reinterpret_cast<uint64_t *>(&tail + 1), *empty = full + args.stages;

    if (threadIdx.x == MATH_THREADS) {
        prefetch_tensormap(args.a_map), prefetch_tensormap(args.b_map);
        for (int i = 0; i < args.stages; ++i) mbarrier_init(full + i, 2), mbarrier_init(empty + i, MATH_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads(); // the barriers are ready
    // Early only where all blocks find room at once: a third kernel would else take that of some of this one's.
    if (args.early) let_next_start();

    Place at;
    if (warp >= MATH_WARPS) {
        if constexpr (Of::GIVES_REGISTERS) setmaxnreg_dec<40>();
        if (warp == B_WARP && lane == 0) {
            // To bring b into L2 before was slower, us on an H200, M = 128: 4096x14336 19.5 / 19.0, 14336x4096 18.7 /
            // 18.3. And to copy a into two or four blocks at once, which then wait for each other: 29.5 / 19.0.
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
        if (split > 1) cluster_sync(), cluster_sync();
        wait_for_previous();
        return;
    }

    if constexpr (Of::GIVES_REGISTERS) setmaxnreg_inc<232>();
    wait_for_previous(); // before the first read of a scale and the first write of y
    for (int i = threadIdx.x; i < TOKENS; i += MATH_THREADS) tail.scale_a[i] = token_scale(args, token + i);
    for (int i = threadIdx.x; i < CHANNELS; i += MATH_THREADS) tail.channels[i] = Channel(args, channel + i);
    bar_sync(1, MATH_THREADS); // scales and bias are there
    float sum[FRAGMENTS][4] = {};
    const int group = warp / 4, of_tokens = Of::DIVIDES_TOKENS ? group * N : 0;
    // Rows past a tile are whatever follows in shared memory: their sums go nowhere.
    const uint64_t b = wgmma_descriptor(smem_address(memory)) + (Of::DIVIDES_TOKENS ? 0 : group * 64 * 128 >> 4);
    const uint64_t a = wgmma_descriptor(smem_address(memory)) + (b_bytes + of_tokens * 128 >> 4);
    if constexpr (!FAST) {
        float part[N / 8][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint64_t offset = __shfl_sync(0xffffffffu, at.slot * stage_bytes >> 4, 0);
            mbarrier_wait(full + at.slot, at.parity);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < K_STEP / 32; ++j)
                Fp8Wgmma<B, A, N>::m64k32(part, b + offset + 2 * j, a + offset + 2 * j, j);
            wgmma_commit();
            wgmma_wait();
            wgmma_written(part);
            if (lane == 0) mbarrier_arrive(empty + at.slot); // this warp has read the stage
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[i][r] += part[i][r];
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
                Fp8Wgmma<B, A, N>::m64k32(sum, b + offset + 2 * j, a + offset + 2 * j, step | j);
            wgmma_commit();
            wgmma_wait_for_earlier();
            if (step && lane == 0) mbarrier_arrive(empty + before); // this warp has read the stage
            before = at.slot;
            at.advance(args.stages);
        }
        wgmma_wait();
        wgmma_written(sum);
    }

    // Each block of a cluster has `own` of the fragments, and adds those of the others to its own, in their order.
    const int shift = __ffs(FRAGMENTS / split) - 1, own = 1 << shift;
    if (split > 1) {
        float4 *sums = reinterpret_cast<float4 *>(memory) + threadIdx.x;
        cluster_sync(); // all have read all their stages
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i) {
            const int to = i >> shift;
            if (to != rank)
                st_shared_cluster(mapa(sums + ((rank - (rank > to)) * own + (i & own - 1)) * MATH_THREADS, to), sum[i]);
        }
        cluster_sync(); // all parts are here
#pragma unroll 1
        for (int part = 0; part < split - 1; ++part)
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                if (i >> shift != rank) continue;
                const float4 v = sums[(part * own + (i & own - 1)) * MATH_THREADS];
                sum[i][0] += v.x, sum[i][1] += v.y, sum[i][2] += v.z, sum[i][3] += v.w;
            }
    }
    const int c = (Of::DIVIDES_TOKENS ? warp % 4 : warp) * 16;
    if (c >= args.tile) return;
#pragma unroll
    for (int i = 0; i < FRAGMENTS; i += 2) {
        if (i >> shift != rank) continue;
        const int t = of_tokens + 8 * i;
        store_piece(args, token + t, channel + c, sum + i, tail.scale_a + t, tail.channels + c, tail.pieces[warp]);
    }
}

// The numbers in a name: tokens, channels at most.
#define ENTRY(TOKENS, CHANNELS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(Shape<TOKENS, CHANNELS>::THREADS, Shape<TOKENS, CHANNELS>::BLOCKS)    \
        scaled_few_##TOKENS##_##CHANNELS(const __grid_constant__ ScaledArgs args) {                                    \
        scaled_few<TOKENS, CHANNELS>(args);                                                                            \
    }
ENTRY(32, 128)
ENTRY(64, 64)
ENTRY(64, 128)
ENTRY(128, 64)
ENTRY(128, 128)
ENTRY(256, 64)
