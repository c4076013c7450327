// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])) by mma.sync; any m, n, k, any arch.
// x bf16 or f16 on any address. Weights are A (a unit of 16 channels a tile, linear.cuh), tokens are B (8 a tile). A
// code is widened once for all tokens of a block.
// Grid (ceil(units of n / UNITS), groups of TOKENS); block of WARPS * 32; the warps share k, a step of 64 each.
// Shared memory: WARPS steps of x, [TOKENS][WARPS * 64 + 8]; after the last the warps' sums, PASS tiles at a time, take
// its place.
// Codes go from global memory to the lane that needs them; the loads of two steps are in flight.
#include "linear.cuh"
#include "mma.cuh"

template <class X, int UNITS, int TOKEN_TILES> __device__ __forceinline__ void mma_sync(const LinearArgs &a) {
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
    uint4 now[UNITS][2], next[UNITS][2];
    const auto load = [&](uint4(&codes)[UNITS][2], int step) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) { // past n or k: any valid codes, their sums are dropped or meet zeros of x
            const uint8_t *from = tile(a, min(unit + u, last), min(step, a.steps - 1)) + lane * 16;
            codes[u][0] = load_weights(from), codes[u][1] = load_weights(from + TILE_BYTES / 2);
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
            for (int j = 0; j < 4; ++j) {
                const uint32_t lo = word(now[u][0], j), hi = word(now[u][1], j);
                w[u][j] = make_uint4(X::template from_codes<0>(lo), X::template from_codes<0>(hi),
                                     X::template from_codes<1>(lo), X::template from_codes<1>(hi));
            }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) now[u][0] = next[u][0], now[u][1] = next[u][1];
        load(next, base + warp + 2 * WARPS);
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 b =
                    ldmatrix_x4(smem_address(&shared.x[8 * t + lane % 8][warp * STEP + half * 32 + lane / 8 * 8]));
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    Mma<X>::m16n8k16(sum[u][t], w[u][2 * half], b.x, b.y);
                    Mma<X>::m16n8k16(sum[u][t], w[u][2 * half + 1], b.z, b.w);
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
            if (channel < a.n && row < a.m) Finish(a, channel).store(a, row, channel, v);
        }
    }
}

// The number in the name is of tokens.
#define ENTRIES(dtype, X)                                                                                              \
    ENTRY(mma_sync_##dtype##_8, X, 1, 1)                                                                               \
    ENTRY(mma_sync_##dtype##_16, X, 2, 2)                                                                              \
    ENTRY(mma_sync_##dtype##_32, X, 2, 4)
#define ENTRY(name, X, UNITS, TOKEN_TILES)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, TOKEN_TILES == 4 ? 1 : 2)                                 \
        name(const __grid_constant__ LinearArgs a) {                                                                   \
        mma_sync<X, UNITS, TOKEN_TILES>(a);                                                                            \
    }

ENTRIES(float16, F16)
#if __CUDA_ARCH__ >= 800
ENTRIES(bfloat16, BF16)
#endif
