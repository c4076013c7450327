// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by mma.sync, m <= 16; from sm_80.
// a [m, k] and b [n, k] codes, rows on 16 bytes at any pitch, k of any length; see scaled.cuh. b is the left operand of
// products. A step is 128 of k; every step is added in float32.
// Grid ceil(n / CHANNELS); block: up to 16 warps, which take turns at the steps. A lane copies the codes that it
// multiplies into a ring of its own, RING steps long: no warp waits for another before its last step.
// Shared memory, dynamic, a warp: RING x {b [UNITS][2][2][32 lanes][16 bytes], a [TOKENS / 8][2][32 lanes][16 bytes]};
// in the end the warps' sums, [warps][UNITS][TOKENS / 8][32 lanes] float4.
#include "bulk.cuh"
#include "fp8_mma.cuh"

constexpr int MAX_WARPS = 16, UNIT = 16, K_STEP = 128, PIECE = 32 * 16; // of a warp: 16 bytes of each lane

// The first `bytes` of 16, zeros behind them.
__device__ __forceinline__ void cp_async_some(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// 16 bytes that stay in L1: the blocks of a multiprocessor read the same tokens.
__device__ __forceinline__ void cp_async_16_kept(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Not moved across a copy into the same place.
__device__ __forceinline__ uint4 ld_shared(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
// A sum does not see the order of k. Lane l multiplies of its rows, l / 4 of eight, the 16 codes from 16 * (l % 4) on
// of each half of a step. Words 2 * j and 2 * j + 1 of them are its part of product j of a half.
// Memory decides: 4.5 TB/s give a multiprocessor of an H200 a KiB of b in 52 clocks. For it a warp has, as compiled
// for sm_90a, 49 instructions, 24 of them conversions (8 tokens, one unit), 41 and 20 (two units) or 51 and 24 (16
// tokens): four schedulers issue them in 13 clocks, and conversions at 32 lanes a clock take 24.
template <int TOKENS, int UNITS, int RING> __device__ __forceinline__ void scaled_async(const ScaledArgs &args) {
    constexpr int TILES = TOKENS / 8, CHANNELS = UNITS * UNIT, STEP_BYTES = (4 * UNITS + 2 * TILES) * PIECE;
    constexpr int CHAINS = UNITS * TILES < 4 ? 2 : 1; // of products that wait for one another
    extern __shared__ __align__(128) uint8_t memory[];

    if (args.early) let_next_start();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int first_channel = blockIdx.x * CHANNELS;
    // The order of steps: the one that goes beyond k, if there is one, then all others. Warps take turns at that order.
    const int ragged = args.k % K_STEP != 0, steps = args.k / K_STEP + ragged;
    const uint32_t ring = hidden(smem_address(memory) + warp * (RING * STEP_BYTES) + lane * 16);
    // Of the step that is copied next. Past m and n: any valid codes, their sums are dropped.
    const int64_t at = int64_t(warp - ragged) * K_STEP + lane % 4 * 16;
    const uint8_t *b[2 * UNITS], *a[TILES];
#pragma unroll
    for (int c = 0; c < 2 * UNITS; ++c)
        b[c] = args.b + min(first_channel + 8 * c + lane / 4, args.n - 1) * args.b_stride + at;
#pragma unroll
    for (int t = 0; t < TILES; ++t) a[t] = args.a + min(8 * t + lane / 4, args.m - 1) * args.a_stride + at;

    const auto load_b = [&](uint32_t to, int step) { // `to`: this lane's place of a step
#pragma unroll
        for (int c = 0; c < 2 * UNITS; ++c) {
            if (step < steps)
#pragma unroll
                for (int half = 0; half < 2; ++half) cp_async_16(to + (2 * c + half) * PIECE, b[c] + half * 64);
            b[c] += warps * K_STEP;
        }
    };
    const auto load_a = [&](uint32_t to, int step) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            if (step < steps)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    cp_async_16_kept(to + (4 * UNITS + 2 * t + half) * PIECE, a[t] + half * 64);
            a[t] += warps * K_STEP;
        }
    };
    const bool cut = ragged && warp == 0; // the first step of this warp goes beyond k: there zeros, of a and of b
    const auto load_cut = [&](int piece, const uint8_t *&row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int left = args.k % K_STEP - half * 64 - lane % 4 * 16, bytes = max(0, min(16, left));
            const int64_t to = int64_t(args.k / K_STEP + 1) * K_STEP + half * 64; // row is a step before its first code
            cp_async_some(ring + (piece + half) * PIECE, row + (bytes ? to : K_STEP - lane % 4 * 16), bytes);
        }
        row += warps * K_STEP;
    };

    if (!args.weights) {
        if (lane % 4 == 0) // into L2, where all writes meet: 5.8 / 5.5 us at 4096x4096, M = 1, on an H200
#pragma unroll
            for (int i = 0; i < RING; ++i)
#pragma unroll
                for (int c = 0; c < 2 * UNITS; ++c)
                    if (warp + i * warps < steps && !(cut && i == 0))
                        asm volatile("prefetch.global.L2 [%0];" ::"l"(b[c] + i * warps * K_STEP));
        wait_for_previous();
    }
    if (cut)
#pragma unroll
        for (int c = 0; c < 2 * UNITS; ++c) load_cut(2 * c, b[c]);
    else
        load_b(ring, warp);
#pragma unroll
    for (int i = 1; i < RING; ++i) load_b(ring + i * STEP_BYTES, warp + i * warps);

    wait_for_previous(); // all that stands above reads weights alone
    if (!args.early) let_next_start();

    if (cut)
#pragma unroll
        for (int t = 0; t < TILES; ++t) load_cut(4 * UNITS + 2 * t, a[t]);
    else
        load_a(ring, warp);
    cp_async_commit(); // with the first step of a the first RING of b
#pragma unroll
    for (int i = 1; i < RING; ++i) {
        load_a(ring + i * STEP_BYTES, warp + i * warps);
        cp_async_commit();
    }
    const Channel channel(args, first_channel + threadIdx.x % CHANNELS); // CHANNELS divides blockDim.x
    const float scale_a = token_scale(args, lane % TOKENS);

    float sum[UNITS][TILES][4] = {};
    uint32_t pieces = ring; // of the oldest step
#pragma unroll 1
    for (int step = warp; step < steps; step += warps) {
        cp_async_wait<RING - 1>(); // the oldest step of this lane is there
        float part[CHAINS][UNITS][TILES][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 w[2 * UNITS], x[TILES];
#pragma unroll
            for (int c = 0; c < 2 * UNITS; ++c) w[c] = ld_shared(pieces + (2 * c + half) * PIECE);
#pragma unroll
            for (int t = 0; t < TILES; ++t) x[t] = ld_shared(pieces + (4 * UNITS + 2 * t + half) * PIECE);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    const uint4 &low = w[2 * u], &high = w[2 * u + 1];
                    const uint4 left =
                        make_uint4(word(low, 2 * j), word(high, 2 * j), word(low, 2 * j + 1), word(high, 2 * j + 1));
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        Fp8Mma<B, A>::m16n8k32(part[j % CHAINS][u][t], left, word(x[t], 2 * j), word(x[t], 2 * j + 1));
                }
        }
        load_b(pieces, step + RING * warps);
        load_a(pieces, step + RING * warps);
        cp_async_commit();
        pieces = pieces == ring + (RING - 1) * STEP_BYTES ? ring : pieces + STEP_BYTES;
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int r = 0; r < 4; ++r)
#pragma unroll
                    for (int c = 0; c < CHAINS; ++c) sum[u][t][r] += part[c][u][t][r];
    }

    // Token t of 8, channel c of a unit: lane 4 * (c % 8) + t / 2, register 2 * (c / 8) + t % 2. The warps' sums are
    // added in their order.
    __syncthreads(); // every warp is done with its memory
    float *sums = reinterpret_cast<float *>(memory);
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const float (&v)[4] = sum[u][t];
            reinterpret_cast<float4 *>(sums)[((warp * UNITS + u) * TILES + t) * 32 + lane] =
                make_float4(v[0], v[1], v[2], v[3]);
        }
    __syncthreads();                                                    // the sums of all warps are there
    for (int i = threadIdx.x; i < TOKENS * CHANNELS; i += blockDim.x) { // whole warps
        const int c = i % CHANNELS, t = i / CHANNELS;
        const int fragment = c / UNIT * TILES + t / 8, place = (4 * (c % 8) + t % 8 / 2) * 4 + c % UNIT / 8 * 2 + t % 2;
        float v = 0.0f;
#pragma unroll
        for (int w = 0; w < MAX_WARPS; ++w)
            if (w < warps) v += sums[w * (UNITS * TILES * 128) + fragment * 128 + place];
        const float scale = __shfl_sync(0xffffffffu, scale_a, t);
        if (first_channel + c < args.n && t < args.m)
            store_scaled(args.y, t * args.y_stride + first_channel + c, channel.finish(v, scale), args.out);
    }
}

// The numbers: tokens, units, steps of a warp on their way, blocks of MAX_WARPS whose registers fit a multiprocessor.
#define ENTRY(TOKENS, UNITS, RING, BLOCKS)                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, BLOCKS)                                               \
        scaled_async_##TOKENS##_##UNITS(const __grid_constant__ ScaledArgs args) {                                     \
        scaled_async<TOKENS, UNITS, RING>(args);                                                                       \
    }
ENTRY(8, 1, RING_8_1, 2)
#if __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000 // on Hopper scaled_few.cu serves where two units would pay
ENTRY(8, 2, RING_8_2, 1)
ENTRY(16, 2, RING_16_2, 1)
#endif
