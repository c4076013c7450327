// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])) for few tokens, at the speed of memory.
// x bf16 or f16, k % 64 == 0, rows of x on 16 bytes; codes in the layout of linear.cuh. Both arrive in a ring of stages;
// a stage holds K_WARPS steps of 64 along k, for a panel of units of 16 channels and for all tokens of the block.
// Grid (panels * a.split, groups of TOKENS); a cluster is a.split blocks along x that share k; block: 8 warps that
// multiply, K_WARPS along k times TOKEN_WARPS along m times the rest along n, one that copies codes and 3 that copy x.
// Shared memory, dynamic: a.stages x {codes [K_WARPS][units][1 KiB], x [TOKENS][K_WARPS * 128 + 16 bytes]}, then the
// barriers; after the last step the sums of all warps, [K_WARPS][TOKENS][units * 16] float32, take the ring's place.
#include "bulk.cuh"
#include "linear.cuh"
#include "mma.cuh"

constexpr int MATH_WARPS = 8, X_WARPS = 3, X_THREADS = 32 * X_WARPS, THREADS = 32 * (MATH_WARPS + 1 + X_WARPS);
constexpr int MAX_UNITS = 8;

// A place in a ring of stages, and the parity of the phase that its barriers are in.
struct Place {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};

template <class X, int TOKEN_TILES, int TOKEN_WARPS, int K_WARPS>
__device__ __forceinline__ void bulk_mma(const LinearArgs &a) {
    constexpr int CHANNEL_WARPS = MATH_WARPS / K_WARPS / TOKEN_WARPS, MY_UNITS = MAX_UNITS / CHANNEL_WARPS;
    constexpr int MY_TOKENS = 8 * TOKEN_TILES, TOKENS = MY_TOKENS * TOKEN_WARPS;
    constexpr int X_PITCH = K_WARPS * STEP * 2 + 16; // 16 more: eight rows of a fragment lie in different banks
    extern __shared__ __align__(128) uint8_t ring[];

    let_next_start();
    // Taken from lane 0: the compiler then knows that a whole warp goes one way, and puts no barrier around each mma.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int rank = a.split > 1 ? cluster_ctarank() : 0;
    const int panel = a.split > 1 ? blockIdx.x / a.split : blockIdx.x,
              first_unit = panel * a.panel + min(panel, a.wider);
    const int units = a.panel + (panel < a.wider), channels = units * UNIT;
    const int token = first_token(a, TOKENS);
    const int first_step = a.split > 1 ? int(int64_t(a.steps) * rank / a.split) : 0;
    const int steps = a.split > 1 ? int(int64_t(a.steps) * (rank + 1) / a.split) - first_step : a.steps;
    const int codes_bytes = (a.panel + (a.wider > 0)) * K_WARPS * TILE_BYTES,
              stage_bytes = codes_bytes + TOKENS * X_PITCH;
    uint64_t *full = reinterpret_cast<uint64_t *>(ring + a.stages * stage_bytes), *empty = full + a.stages;

    if (threadIdx.x == 32 * MATH_WARPS) {
        for (int i = 0; i < a.stages; ++i) mbarrier_init(full + i, 1 + X_THREADS), mbarrier_init(empty + i, MATH_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads(); // the barriers are ready

    // In the end a thread adds the sums of one channel, of every third token of its block of the cluster.
    constexpr int CHANNELS = MAX_UNITS * UNIT;
    const int my_channel = threadIdx.x % CHANNELS;
    const Finish finish(a, my_channel < channels ? first_unit * UNIT + my_channel : a.n);

    float sum[MY_UNITS][TOKEN_TILES][4] = {};
    const int k_warp = warp % K_WARPS, token_warp = warp / K_WARPS % TOKEN_WARPS,
              channel_warp = warp / (K_WARPS * TOKEN_WARPS);

    Place at;
    if (warp == MATH_WARPS) {
        if (lane == 0) {
            // A panel's steps follow each other: one copy a stage.
            const int step_bytes = units * TILE_BYTES;
            const uint8_t *from = panel_codes(a, first_unit) + int64_t(first_step) * step_bytes;
            for (int step = 0; step < steps; step += K_WARPS) {
                if (step >= a.stages * K_WARPS)
                    mbarrier_wait(empty + at.slot, at.parity ^ 1); // all have read what it held
                const int bytes = min(K_WARPS, steps - step) * step_bytes;
                mbarrier_arrive_expect_tx(full + at.slot, bytes);
                cp_async_bulk(ring + at.slot * stage_bytes, from, bytes, full + at.slot);
                from += K_WARPS * step_bytes;
                at.advance(a.stages);
            }
        }
    } else if (warp > MATH_WARPS) {
        constexpr int PIECES = K_WARPS * STEP / 8; // of 16 bytes, of a row
        const int first = threadIdx.x - 32 * (MATH_WARPS + 1), rows = min(TOKENS, a.m - token);
        const uint16_t *from =
            static_cast<const uint16_t *>(a.x) + token * a.x_stride + first_step * STEP + first % PIECES * 8;
        const uint32_t to = smem_address(ring) + codes_bytes + first / PIECES * X_PITCH + first % PIECES * 16;
        static_assert(X_THREADS % PIECES == 0, "a thread copies the same piece of each of its rows");
        wait_for_previous(); // the first read of x
        for (int step = 0; step < steps; step += K_WARPS) {
            if (step >= a.stages * K_WARPS) mbarrier_wait(empty + at.slot, at.parity ^ 1);
            if (first % PIECES < (steps - step) * STEP / 8)
                for (int t = first / PIECES; t < rows; t += X_THREADS / PIECES)
                    cp_async_16(to + at.slot * stage_bytes + (t - first / PIECES) * X_PITCH, from + t * a.x_stride);
            cp_async_mbarrier_arrive(full + at.slot);
            from += K_WARPS * STEP;
            at.advance(a.stages);
        }
    } else {
        for (int step = k_warp; step - k_warp < steps; step += K_WARPS) {
            const uint8_t *stage = ring + at.slot * stage_bytes;
            mbarrier_wait(full + at.slot, at.parity); // codes and x of the stage have arrived
            if (step < steps) {
                const uint4 *codes =
                    reinterpret_cast<const uint4 *>(stage + (k_warp * units + channel_warp) * TILE_BYTES) + lane;
                uint4 low[MY_UNITS], high[MY_UNITS];
#pragma unroll
                for (int u = 0; u < MY_UNITS; ++u)
                    if (channel_warp + u * CHANNEL_WARPS < units) {
                        low[u] = codes[u * CHANNEL_WARPS * (TILE_BYTES / 16)];
                        high[u] = codes[u * CHANNEL_WARPS * (TILE_BYTES / 16) + 32];
                    }
                // ldmatrix: lane l gives the address of row l % 8 of matrix l / 8; k = 8 * (l / 8) .. + 7 of 32.
                const uint32_t x = smem_address(stage + codes_bytes) + (token_warp * MY_TOKENS + lane % 8) * X_PITCH +
                                   k_warp * STEP * 2 + lane / 8 * 16;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint4 b[TOKEN_TILES];
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; ++t) b[t] = ldmatrix_x4(x + t * 8 * X_PITCH + half * 64);
#pragma unroll
                    for (int j = 0; j < 2; ++j) // sums of other units and tokens stand between two of the same
#pragma unroll
                        for (int u = 0; u < MY_UNITS; ++u)
                            if (channel_warp + u * CHANNEL_WARPS < units) {
                                const uint32_t lo = word(low[u], 2 * half + j), hi = word(high[u], 2 * half + j);
                                const uint4 w =
                                    make_uint4(X::template from_codes<0>(lo), X::template from_codes<0>(hi),
                                               X::template from_codes<1>(lo), X::template from_codes<1>(hi));
#pragma unroll
                                for (int t = 0; t < TOKEN_TILES; ++t)
                                    Mma<X>::m16n8k16(sum[u][t], w, j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
                            }
                }
            }
            __syncwarp(); // every lane has read the stage
            if (lane == 0) mbarrier_arrive(empty + at.slot);
            at.advance(a.stages);
        }
    }
    wait_for_previous(); // before the first write of y
    __syncthreads();     // every stage has been read: its memory may hold sums now

    float *sums = reinterpret_cast<float *>(ring); // [K_WARPS][TOKENS][channels]
    if (warp < MATH_WARPS)
#pragma unroll
        for (int u = 0; u < MY_UNITS; ++u) {
            const int unit = channel_warp + u * CHANNEL_WARPS;
            if (unit < units)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        sums[(k_warp * TOKENS + token_warp * MY_TOKENS + 8 * t + lane % 4 * 2 + r % 2) * channels +
                             unit * UNIT + lane / 4 + r / 2 * 8] = sum[u][t][r];
        }
    __syncthreads(); // the sums of all warps are there

    // The warps along k are added in their order, then the blocks of the cluster in theirs.
    constexpr int AT_ONCE = THREADS / CHANNELS;
    const int tokens = min(TOKENS, a.m - token), channel = first_unit * UNIT + my_channel;
    const bool mine = my_channel < channels && channel < a.n;
    if (mine)
        for (int t = threadIdx.x / CHANNELS; t < tokens; t += AT_ONCE) {
            float *at = sums + t * channels + my_channel, v = 0.0f;
#pragma unroll
            for (int w = 0; w < K_WARPS; ++w) v += at[w * TOKENS * channels];
            if (a.split == 1)
                finish.store(a, token + t, channel, v);
            else
                *at = v;
        }
    if (a.split == 1) return;
    cluster_sync(); // the sums of all blocks of the cluster are there
    if (mine)
        for (int t = rank * AT_ONCE + threadIdx.x / CHANNELS; t < tokens; t += a.split * AT_ONCE) {
            float v = 0.0f;
            for (int r = 0; r < a.split; ++r) v += ld_shared_cluster(sums + t * channels + my_channel, r);
            finish.store(a, token + t, channel, v);
        }
    cluster_stay(); // no block leaves while another reads its sums
}

// The number in the name is of tokens. Up to 16 two blocks fit a multiprocessor: of one kernel, or of one and the next.
#define ENTRIES(dtype, X)                                                                                              \
    ENTRY(bulk_mma_##dtype##_8, X, 1, 1, K_WARPS_8, 2)                                                                 \
    ENTRY(bulk_mma_##dtype##_16, X, 2, 1, K_WARPS_16, 2)                                                               \
    ENTRY(bulk_mma_##dtype##_32, X, 4, 1, K_WARPS_32, 1)                                                               \
    ENTRY(bulk_mma_##dtype##_64, X, 4, 2, K_WARPS_64, 1)
#define ENTRY(name, X, TOKEN_TILES, TOKEN_WARPS, K_WARPS, BLOCKS)                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ LinearArgs a) {         \
        bulk_mma<X, TOKEN_TILES, TOKEN_WARPS, K_WARPS>(a);                                                             \
    }

ENTRIES(bfloat16, BF16)
ENTRIES(float16, F16)
