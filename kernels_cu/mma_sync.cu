// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])) by mma.sync; any m, n, k, any arch.
// x bf16 or f16 on any address. Weights are A (a unit of 16 channels a tile, linear.cuh), tokens are B (8 a tile). A
// code is widened once for all tokens of a block.
// Grid (ceil(units of n / UNITS), groups of TOKENS); block of WARPS * 32; the warps share k, a step of 64 each.
// Shared memory: WARPS steps of x, [TOKENS][WARPS * 64 + 8]; after the last the warps' sums, PASS tiles at a time, take
// its place.
// Codes go from global memory to the lane that needs them; the loads of two steps are in flight.
#include "linear.cuh"
#include "mma.cuh"

// SUMS: scales multiply sums.
// Member by member: NVRTC 13.0 loses the scales of all but the first element of an array whose elements are assigned.
__device__ __forceinline__ void copy(Codes &to, const Codes &from) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) to.pieces[i] = from.pieces[i];
    to.scales[0] = from.scales[0], to.scales[1] = from.scales[1], to.block_scale = from.block_scale;
}

template <class X, int UNITS, int TOKEN_TILES, bool SUMS>
__device__ __forceinline__ void mma_sync(const LinearArgs &a) {
    constexpr int TOKENS = 8 * TOKEN_TILES, CHUNK = WARPS * STEP;
    constexpr int PITCH = CHUNK + 8; // 16 bytes more: eight rows of a fragment lie in different banks
    constexpr int TILES = UNITS * TOKEN_TILES, PASS = TILES < 4 ? TILES : 4;
    union Shared {
        uint16_t x[TOKENS][PITCH];
        float sums[WARPS][PASS][4][32];
    };
    __shared__ __align__(16) Shared shared;

    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = blockIdx.x * UNITS, last = unit_count(a) - 1;
    const int token = first_token(a, TOKENS);
    Codes now[UNITS], next[UNITS];
    const auto load = [&](Codes(&codes)[UNITS], int step) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) { // past n or k: any valid codes, their sums are dropped or meet zeros of x
            const int some_unit = min(unit + u, last), some_step = min(step, a.steps - 1);
            copy(codes[u], Codes::ask(tile(a, some_unit, some_step) + lane * 16, lane));
            if (FORMAT == FP8_BLOCK) codes[u].block_scale = block_scale(a, some_unit, some_step);
        }
    };
    load(now, warp);
    load(next, warp + WARPS);

    wait_for_previous(); // all that stands above reads weights alone

    float sum[UNITS][TOKEN_TILES][4] = {};
#pragma unroll 1
    for (int base = 0; base < a.steps; base += WARPS) {
        if (base) __syncthreads(); // all warps are done with the chunk before
        for (int i = threadIdx.x; i < TOKENS * CHUNK; i += WARPS * 32) {
            const int t = i / CHUNK;
            const int64_t k = int64_t(base) * STEP + i % CHUNK;
            const uint16_t *row = static_cast<const uint16_t *>(a.x) + int64_t(token + t) * a.x_stride;
            shared.x[t][i % CHUNK] = token + t < a.m && k < a.k ? row[k] : 0;
        }
        __syncthreads(); // the chunk of x is there, zeros past m and k
        uint4 w[UNITS][4];
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int j = 0; j < 4; ++j) w[u][j] = now[u].template operand<X, SUMS>(j);
        Codes scales[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) copy(scales[u], now[u]), copy(now[u], next[u]);
        load(next, base + warp + 2 * WARPS);
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 b =
                    ldmatrix_x4(smem_address(&shared.x[8 * t + lane % 8][warp * STEP + half * 32 + lane / 8 * 8]));
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    float part[4] = {};
                    auto &to = SUMS ? part : sum[u][t];
                    Mma<X>::m16n8k16(to, w[u][2 * half], b.x, b.y);
                    Mma<X>::m16n8k16(to, w[u][2 * half + 1], b.z, b.w);
                    if (SUMS) add_part(sum[u][t], part, scales[u].scale(0, 2 * half), scales[u].scale(1, 2 * half));
                }
            }
    }

    // 16 * 8 outputs a tile; the warps' sums are added in their order. Token t, channel c of a tile: lane 4 * (c % 8) +
    // t / 2, register 2 * (c / 8) + t % 2.
#pragma unroll
    for (int base = 0; base < TILES; base += PASS) {
        __syncthreads(); // x, or the sums of the pass before, have been read
#pragma unroll
        for (int i = 0; i < PASS; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                shared.sums[warp][i][r][lane] = sum[(base + i) / TOKEN_TILES][(base + i) % TOKEN_TILES][r];
        __syncthreads(); // every warp's sums of this pass are there
        for (int i = threadIdx.x; i < PASS * 128; i += WARPS * 32) {
            const int tile = i / 128, c = i % 16, t = i % 128 / 16;
            const int channel = (unit + (base + tile) / TOKEN_TILES) * UNIT + c;
            const int row = token + (base + tile) % TOKEN_TILES * 8 + t;
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) v += shared.sums[w][tile][2 * (c / 8) + t % 2][4 * (c % 8) + t / 2];
            if (channel < a.n && row < a.m) Finish(a, channel).store(a, row, channel, SUMS ? v : v * SUM_FACTOR<X>);
        }
    }
}

// The number in the name is of tokens.
#define ENTRIES(dtype, X, SUMS)                                                                                        \
    ENTRY(mma_sync_##dtype##_8, X, 1, 1, SUMS)                                                                         \
    ENTRY(mma_sync_##dtype##_16, X, 2, 2, SUMS)                                                                        \
    ENTRY(mma_sync_##dtype##_32, X, 2, 4, SUMS)
#define ENTRY(name, X, UNITS, TOKEN_TILES, SUMS)                                                                       \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, TOKEN_TILES == 4 || (SUMS && LANE_SCALES > 0) ? 1 : 2)    \
        name(const __grid_constant__ LinearArgs a) {                                                                   \
        mma_sync<X, UNITS, TOKEN_TILES, SUMS>(a);                                                                      \
    }

ENTRIES(float16, F16, SCALES_SUMS<F16>)
#if __CUDA_ARCH__ >= 800
ENTRIES(bfloat16, BF16, SCALES_SUMS<BF16>)
#if IS_MX // with scales that do not fold
ENTRIES(bfloat16_wide, BF16, true)
#endif
#endif
