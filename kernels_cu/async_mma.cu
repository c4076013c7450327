// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])) by mma.sync, m <= TOKENS; sm_80 and newer.
// x bf16 or f16, rows on 16 bytes, k a multiple of 8; codes in the layout of linear.cuh. Codes are A, tokens B.
// Grid ceil(units / UNITS); block: up to 16 warps, which share k by groups of GROUP steps. A lane copies the codes and the
// scales that it multiplies into a ring of its own: no warp waits for another before its last step.
// Shared memory, dynamic, a warp: codes [GROUP][UNITS][PIECES][32 lanes][16 bytes], after each unit's the scales [32
// lanes][LANE_SCALES], and x of a group; in the end the warps' sums.
#include "bulk.cuh"
#include "linear.cuh"
#include "mma.cuh"

constexpr int MAX_WARPS = 16;
constexpr int SUMS_WARPS = 12;                                  // of a block of 16 tokens, where scales multiply sums
template <int TOKENS> constexpr int GROUP = TOKENS > 8 ? 2 : 4; // steps that a warp has on their way

// x of a group, as the warp that multiplies it keeps it. One token: the 32 bytes of a step that a lane needs stand
// together, for its lane % 4; two steps lie in different banks.
template <int TOKENS> struct Chunk {
    static constexpr int PITCH = GROUP<TOKENS> * 128 + 16; // 16 more: rows lie in different banks
    static constexpr int BYTES = TOKENS * PITCH;
    uint8_t *base;

    __device__ __forceinline__ void store(int token, int piece, const uint4 &v) const {
        *reinterpret_cast<uint4 *>(base + token * PITCH + piece * 16) = v;
    }
    // B of the 8 tokens from `first` on and of both halves of a step: k = 32 * half + ..
    __device__ __forceinline__ void load(uint4 (&b)[2], int first, int step) const {
        const int lane = threadIdx.x % 32;
        const uint32_t at = smem_address(base) + (first + lane % 8) * PITCH + lane / 8 * 16 + step * 128;
        b[0] = ldmatrix_x4(at), b[1] = ldmatrix_x4(at + 64);
    }
};
template <> struct Chunk<1> {
    static constexpr int PITCH = 160, BYTES = GROUP<1> * PITCH;
    uint8_t *base;

    __device__ __forceinline__ void store(int, int piece, const uint4 &v) const {
        uint32_t *to = reinterpret_cast<uint32_t *>(base + piece / 8 * PITCH) + piece % 8;
#pragma unroll
        for (int q = 0; q < 4; ++q) to[8 * q] = word(v, q);
    }
    __device__ __forceinline__ void load(uint4 (&b)[2], int, int step) const {
        const uint4 *from = reinterpret_cast<const uint4 *>(base + step * PITCH + threadIdx.x % 4 * 32);
        b[0] = from[0], b[1] = from[1];
    }
};

template <class X, int TOKENS, int UNITS> __device__ __forceinline__ void async_mma(const LinearArgs &a) {
    constexpr int GROUP = ::GROUP<TOKENS>, X_PIECES = GROUP * 8; // of 16 bytes in a group of a row of x
    constexpr int CHANNELS = UNITS * UNIT, UNIT_BYTES = CODE_BYTES + 32 * LANE_SCALES, STEP_BYTES = UNITS * UNIT_BYTES;
    constexpr int TILES = (TOKENS + 7) / 8, PER_LANE = TOKENS * X_PIECES / 32;
    constexpr bool SUMS = SCALES_SUMS<X>;
    constexpr bool MOVES = FORMAT != FP8; // `from` goes on with the steps, where operations are dear
    constexpr int CHAINS = UNITS * TILES < 4 && !SUMS ? 2 : 1; // of products that wait for one another
    extern __shared__ __align__(128) uint8_t memory[];

    let_next_start();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int first_channel = blockIdx.x * CHANNELS, groups = (a.steps + GROUP - 1) / GROUP;
    const uint8_t *from[UNITS];
    int64_t pitch[UNITS];
    float block[UNITS][GROUP / 2]; // scales of the oldest steps on their way
#pragma unroll
    for (int u = 0; u < UNITS; ++u) { // past n: any valid codes, their sums are dropped
        const int unit = min(first_channel / UNIT + u, unit_count(a) - 1);
        from[u] = tile(a, unit, 0) + lane * 16;
        pitch[u] = tile(a, unit, 1) - tile(a, unit, 0);
        if (MOVES) from[u] += warp * GROUP * pitch[u];
    }
    const int first_byte = warp * (GROUP * STEP_BYTES + Chunk<TOKENS>::BYTES);
    uint8_t *const ring = memory + hidden(first_byte + lane * 16);
    const Chunk<TOKENS> chunk{memory + first_byte + GROUP * STEP_BYTES};
    const int to_own_scales = hidden(CODE_BYTES - lane * (16 - LANE_SCALES)); // each lane has its own
    const uint8_t *const ring_scales = ring + to_own_scales;
    const int to_tile_scales = FP4 ? hidden(to_scales(lane)) : to_scales(lane); // of MXFP8 no register is left for it
    const auto load = [&](int i, int group) {
        const int step = group * GROUP + i;
        if (i < a.steps - group * GROUP)
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const uint32_t to = smem_address(ring) + i * STEP_BYTES + u * UNIT_BYTES;
                const uint8_t *tile = MOVES ? from[u] : from[u] + step * pitch[u];
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece) cp_async_16(to + piece * 512, tile + piece * 512);
                if constexpr (LANE_SCALES > 0) cp_async_few<LANE_SCALES>(to + to_own_scales, tile + to_tile_scales);
            }
        cp_async_commit();
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (MOVES) from[u] += i + 1 < GROUP ? pitch[u] : pitch[u] * (GROUP * warps - GROUP + 1);
            if (FORMAT == FP8_BLOCK && i % 2)
                block[u][i / 2] =
                    block_scale(a, min(first_channel / UNIT + u, unit_count(a) - 1), min(step, a.steps - 1));
        }
    };
#pragma unroll
    for (int i = 0; i < GROUP; ++i) load(i, warp);
    const Finish finish(a, first_channel + threadIdx.x % CHANNELS);

    wait_for_previous(); // all that stands above reads weights alone

    uint4 pieces[PER_LANE];
    const auto load_x = [&](int group) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int at = lane + 32 * i, token = at / X_PIECES, k = group * GROUP * STEP + at % X_PIECES * 8;
            pieces[i] = uint4{};
            if (token < a.m && k < a.k)
                pieces[i] =
                    *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(a.x) + token * a.x_stride + k);
        }
    };
    float sum[UNITS][TILES][CHAINS][4] = {};
    if (warp < groups) load_x(warp);
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
        __syncwarp(); // the group before has been read
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            chunk.store((lane + 32 * i) / X_PIECES, (lane + 32 * i) % X_PIECES, pieces[i]);
        if (group + warps < groups) load_x(group + warps);
        __syncwarp(); // x of the group is there
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            uint4 b[TILES][2];
            Codes codes[UNITS];
            float part[UNITS][TILES][4] = {};
#pragma unroll
            for (int t = 0; t < TILES; ++t) chunk.load(b[t], 8 * t, i);
            cp_async_wait<GROUP - 1>(); // the oldest step of this lane is there
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                codes[u] = Codes(ring + i * STEP_BYTES + u * UNIT_BYTES, ring_scales + i * STEP_BYTES + u * UNIT_BYTES);
                if (FORMAT == FP8_BLOCK) codes[u].block_scale = block[u][i / 2];
            }
            if (i < a.steps - group * GROUP)
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        const uint4 w = codes[u].template operand<X>(j);
#pragma unroll
                        for (int t = 0; t < TILES; ++t) {
                            const uint4 &x = b[t][j / 2];
                            auto &to = SUMS ? part[u][t] : sum[u][t][j % CHAINS];
                            Mma<X>::m16n8k16(to, w, j % 2 ? x.z : x.x, j % 2 ? x.w : x.y);
                            if constexpr (SUMS)
                                if (j % 2) add_part(sum[u][t][0], to, codes[u].scale(0, j), codes[u].scale(1, j));
                        }
                    }
            load(i, group + warps);
        }
    }
    if (CHAINS == 2)
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[u][t][0][r] += sum[u][t][CHAINS - 1][r];

    // Token t of 8, channel c of a unit: lane 4 * (c % 8) + t / 2, register 2 * (c / 8) + t % 2. The warps' sums are added in
    // their order.
    __syncthreads(); // every warp is done with its memory
    float *sums = reinterpret_cast<float *>(memory);
    if constexpr (TOKENS == 1) {
        if (lane % 4 == 0)
#pragma unroll
            for (int c = 0; c < 2 * UNITS; ++c) sums[warp * CHANNELS + 8 * c + lane / 4] = sum[c / 2][0][0][c % 2 * 2];
    } else
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const float (&v)[4] = sum[u][t][0];
                reinterpret_cast<float4 *>(sums)[((warp * UNITS + u) * TILES + t) * 32 + lane] =
                    make_float4(v[0], v[1], v[2], v[3]);
            }
    __syncthreads();                                                    // the sums of all warps are there
    for (int i = threadIdx.x; i < TOKENS * CHANNELS; i += blockDim.x) { // CHANNELS divides blockDim.x
        const int c = i % CHANNELS, t = i / CHANNELS;
        const int fragment = c / UNIT * TILES + t / 8, place = (4 * (c % 8) + t % 8 / 2) * 4 + c % UNIT / 8 * 2 + t % 2;
        const float *mine = sums + (TOKENS == 1 ? c : fragment * 128 + place);
        float v = 0.0f;
#pragma unroll
        for (int w = 0; w < MAX_WARPS; ++w)
            if (w < warps) v += mine[w * (TOKENS == 1 ? CHANNELS : UNITS * TILES * 128)];
        if (first_channel + c < a.n && t < a.m) finish.store(a, t, first_channel + c, v * SUM_FACTOR<X>);
    }
}

#define ENTRY(name, X, TOKENS, UNITS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * (SCALES_SUMS<X> && TOKENS > 8 ? SUMS_WARPS : MAX_WARPS),         \
                                                 TOKENS * UNITS == 1 ? 2 : 1)                                          \
        name(const __grid_constant__ LinearArgs a) {                                                                   \
        async_mma<X, TOKENS, UNITS>(a);                                                                                \
    }

// The numbers in a name: tokens, units.
ENTRY(async_mma_bfloat16_1_1, BF16, 1, 1)
ENTRY(async_mma_bfloat16_8_1, BF16, 8, 1)
ENTRY(async_mma_bfloat16_8_2, BF16, 8, 2)
ENTRY(async_mma_bfloat16_16_2, BF16, 16, 2)
ENTRY(async_mma_float16_1_1, F16, 1, 1)
ENTRY(async_mma_float16_8_1, F16, 8, 1)
ENTRY(async_mma_float16_8_2, F16, 8, 2)
ENTRY(async_mma_float16_16_2, F16, 16, 2)
#if WEIGHT >= 3 // 4-bit codes
ENTRY(async_mma_bfloat16_1_2, BF16, 1, 2)
ENTRY(async_mma_float16_1_2, F16, 1, 2)
#endif
