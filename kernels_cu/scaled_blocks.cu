// y[m, n] = round(sum_k a[m, k] * b[n, k] * ga[m] * gb[n] + bias[n]) of codes times the scales of their blocks, each
// operand in a format of blocks.cuh, by mma.sync of the codes as float16, which has them exactly; scales multiply float32
// sums of 16 along k. Any m, n, k, any arch; rows of codes and scales on any byte and any pitch; ga, gb, bias float32.
// Grid (ceil(n / 64), groups of TOKENS); block of 4 warps: 2 along m by 2 along n, or of 16 tokens 4 along n.
// Shared memory: 64 along k of the rows of a, then of b, 16 bytes longer than they need: eight rows lie in different banks;
// the scales of these. All of it may be written by the kernel before this one.
#include "blocks.cuh"
#include "factors.cuh"
#include "mma.cuh"

struct Operand {
    const uint8_t *codes, *scales;
    const float *factor; // g, or null: 1
    int64_t stride, scale_stride;
    int format, factor_step; // 0: one for all rows
};

struct BlockProductArgs {
    Operand a, b;
    const float *bias; // or null
    void *y;
    int64_t y_stride;
    int m, n, k;
    int out; // dtype of y, an Out
};
static_assert(sizeof(BlockProductArgs) == ARGS_BYTES, "BlockProductArgs and kernels.BLOCK_PRODUCT_ARGS must agree");

enum Out { OUT_BF16, OUT_F16, OUT_F32 }; // in the order of formats.FLOATS

constexpr int CHANNELS = 64, STEP = 64, PITCH = STEP + 8, THREADS = 128;
constexpr int PIECES = STEP / UNIT; // of a row

// Codes of 16 neighbours, and their scale's.
struct Piece {
    uint32_t word[4] = {};
    uint32_t scale = 0;

    Piece() = default;
    // From `at` of row `row`; zeros past k.
    __device__ __forceinline__ Piece(const Operand &of, int row, int at, int k) {
        if (at >= k) return;
        const bool e2m1 = is_e2m1(of.format);
        const uint8_t *from = of.codes + row * of.stride + (e2m1 ? at / 2 : at);
        const int count = min(UNIT, k - at), bytes = e2m1 ? (count + 1) / 2 : count;
        const uint64_t address = reinterpret_cast<uint64_t>(from);
        scale = of.scales[row * of.scale_stride + at / block_of(of.format)];
        if (e2m1 && count == UNIT && address % 8 == 0) {
            const uint2 two = *reinterpret_cast<const uint2 *>(from);
            word[0] = two.x, word[1] = two.y;
        } else if (!e2m1 && count == UNIT && address % 16 == 0) {
            const uint4 four = *reinterpret_cast<const uint4 *>(from);
            word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
        } else
#pragma unroll
            for (int i = 0; i < UNIT; ++i)
                if (i < bytes) { // the last may have half a byte that is none
                    const uint32_t known = e2m1 && 2 * i + 1 == count ? 15 : 255;
                    word[i / 4] |= (from[i] & known) << i % 4 * 8;
                }
    }

    // The values of the codes as float16.
    __device__ __forceinline__ void store(uint16_t *to, int format) const {
        uint32_t pair[8];
        if (is_e2m1(format)) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                asm("mul.rn.f16x2 %0, %1, %2;"
                    : "=r"(pair[i])
                    : "r"(e2m1_halves(word[i / 4] >> i % 4 * 8 & 0xff)), "r"(0x74007400u)); // E2M1_FACTOR
        } else
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool e4m3 = format == MXFP8_E4M3;
                const uint32_t even = e4m3 ? e4m3_halves<0>(word[i]) : e5m2_halves<0>(word[i]);
                const uint32_t odd = e4m3 ? e4m3_halves<1>(word[i]) : e5m2_halves<1>(word[i]);
                pair[2 * i] = __byte_perm(even, odd, 0x5410), pair[2 * i + 1] = __byte_perm(even, odd, 0x7632);
            }
        auto *pieces = reinterpret_cast<uint4 *>(to);
        pieces[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        pieces[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
    }

    // The scale as a product of two numbers, of e8m0 powers of two of half its exponent, one of which may be larger: that
    // of a is not that of b, so that scales of a and b multiply to two numbers that are finite and not 0, whatever they are.
    __device__ __forceinline__ float2 scale_of(int format, bool of_a) const {
        if (scale == nan_scale(format)) return make_float2(not_a_number(), 1.0f);
        if (format == NVFP4) return make_float2(e4m3_to_float2<0>(scale).x, 1.0f);
        const int exponent = static_cast<int>(scale) - 127, low = exponent >> 1, high = exponent - low;
        return make_float2(__uint_as_float((of_a ? low : high) + 127 << 23),
                           __uint_as_float((of_a ? high : low) + 127 << 23));
    }
};

__device__ __forceinline__ float factor_of(const Operand &of, int row) {
    return of.factor ? of.factor[int64_t(row) * of.factor_step] : 1.0f;
}

__device__ __forceinline__ void store_y(void *y, int64_t i, float v, int out) {
    if (out == OUT_BF16)
        static_cast<uint16_t *>(y)[i] = float_to_bf16(v);
    else if (out == OUT_F16)
        static_cast<uint16_t *>(y)[i] = float_to_f16(v);
    else
        static_cast<float *>(y)[i] = v;
}

template <int TOKENS> __device__ __forceinline__ void scaled_blocks(const BlockProductArgs &args) {
    constexpr int WARPS_M = TOKENS == 16 ? 1 : 2, WARPS_N = 4 / WARPS_M, ROWS = TOKENS + CHANNELS;
    constexpr int M_TILES = TOKENS / 16 / WARPS_M, N_TILES = CHANNELS / 8 / WARPS_N;
    constexpr int MINE = (ROWS * PIECES + THREADS - 1) / THREADS; // pieces of a thread
    __shared__ __align__(16) uint16_t values[ROWS][PITCH];
    __shared__ float2 scales[ROWS][PIECES + 1];

    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t group = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
    if (group * TOKENS >= args.m) return wait_for_previous();
    const int token = group * TOKENS, channel = blockIdx.x * CHANNELS;
    const int warp_m = warp / WARPS_N * M_TILES * 16, warp_n = warp % WARPS_N * N_TILES * 8;
    Piece pieces[MINE];
    const auto load = [&](int step) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int at = threadIdx.x + i * THREADS, r = at / PIECES, k = step * STEP + at % PIECES * UNIT;
            if (r >= ROWS) continue;
            // Rows past the end: any valid ones, nothing of them is stored.
            pieces[i] = r < TOKENS ? Piece(args.a, min(token + r, args.m - 1), k, args.k)
                                   : Piece(args.b, min(channel + r - TOKENS, args.n - 1), k, args.k);
        }
    };
    wait_for_previous();

    const int steps = (args.k - 1) / STEP + 1;
    float sum[M_TILES][N_TILES][4] = {};
    load(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int at = threadIdx.x + i * THREADS, r = at / PIECES;
            if (r >= ROWS) continue;
            const int format = r < TOKENS ? args.a.format : args.b.format;
            pieces[i].store(values[r] + at % PIECES * UNIT, format);
            scales[r][at % PIECES] = pieces[i].scale_of(format, r < TOKENS);
        }
        __syncthreads(); // the step is there
        if (step + 1 < steps) load(step + 1);
#pragma unroll 1
        for (int j = 0; j < PIECES; ++j) {
            uint4 a[M_TILES], b[N_TILES / 2];
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) // matrices: rows, rows + 8, both again 8 values further
                a[i] = ldmatrix_x4(smem_address(values[warp_m + i * 16 + lane % 16] + j * UNIT + lane / 16 * 8));
#pragma unroll
            for (int i = 0; i < N_TILES / 2; ++i) // rows, 8 values further, rows + 8, 8 values further
                b[i] = ldmatrix_x4(smem_address(values[TOKENS + warp_n + i * 16 + lane / 16 * 8 + lane % 8] + j * UNIT +
                                                lane / 8 % 2 * 8));
#pragma unroll
            for (int t = 0; t < N_TILES; ++t) {
                const float2(*of_b)[PIECES + 1] = scales + TOKENS + warp_n + t * 8 + lane % 4 * 2;
                const float2 sb[2] = {of_b[0][j], of_b[1][j]};
#pragma unroll
                for (int i = 0; i < M_TILES; ++i) {
                    const float2(*of_a)[PIECES + 1] = scales + warp_m + i * 16 + lane / 4;
                    const float2 sa[2] = {of_a[0][j], of_a[8][j]};
                    float part[4] = {};
                    Mma<F16>::m16n8k16(part, a[i], t % 2 ? b[t / 2].z : b[t / 2].x, t % 2 ? b[t / 2].w : b[t / 2].y);
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        sum[i][t][r] =
                            fmaf(part[r] * (sa[r / 2].x * sb[r % 2].x), sa[r / 2].y * sb[r % 2].y, sum[i][t][r]);
                }
            }
        }
        __syncthreads(); // all have read the step: its place is free
    }

#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int t = token + warp_m + i * 16 + lane / 4 + r * 8;
            if (t >= args.m) continue;
            const float ga = factor_of(args.a, t);
#pragma unroll
            for (int j = 0; j < 2 * N_TILES; ++j) {
                const int c = channel + warp_n + j / 2 * 8 + lane % 4 * 2 + j % 2;
                if (c >= args.n) continue;
                const float bias = args.bias ? args.bias[c] : 0.0f;
                const float v = finish_sum(sum[i][j / 2][2 * r + j % 2], ga, factor_of(args.b, c), bias);
                store_y(args.y, t * args.y_stride + c, v, args.out);
            }
        }
}

#define ENTRY(TOKENS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        scaled_blocks_##TOKENS(const __grid_constant__ BlockProductArgs args) {                                        \
        scaled_blocks<TOKENS>(args);                                                                                   \
    }
ENTRY(16)
ENTRY(64)
