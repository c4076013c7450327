// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by mma.sync; any m, n, k, any arch.
// a [m, k] and b [n, k] codes, rows on any byte and any pitch; see scaled.cuh.
// Grid (ceil(n / 128), groups of TOKENS); block of 8 warps: 2 along m by 4 along n, or of 16 tokens 8 along n.
// Shared memory: two stages of 64 along k, rows of a, then of b, 16 bytes longer than they need: eight rows lie in
// different banks. From sm_89 the codes are multiplied as they are, below it as float16, which holds each exactly.
#include "fp8_mma.cuh"

constexpr int CHANNELS = 128, K_STEP = 64, PITCH = K_STEP + 16, THREADS = 256;
constexpr int PROMOTED = 128; // of k: the tensor cores' own sums, of fewer bits than float32, go no further

__device__ __forceinline__ uint32_t load_word(const uint8_t *p) {
    uint32_t v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// 16 codes of a row, from `at` of `k`, into shared memory; zeros past k. With cp.async they arrive later.
__device__ __forceinline__ void bring(uint8_t *to, const uint8_t *row, int at, int k, bool aligned) {
    const int left = max(0, min(16, k - at));
    const uint8_t *from = left ? row + at : row;
#if __CUDA_ARCH__ >= 800
    if (aligned) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(to)), "l"(from), "r"(left)
                     : "memory");
        return;
    }
#endif
    uint32_t words[4] = {};
    if (at + 20 <= k) { // five words hold the sixteen bytes, and none lies past the row's last
        const uint32_t shift = reinterpret_cast<uint64_t>(from) % 4 * 8;
        const uint8_t *base = from - shift / 8;
        uint32_t low = load_word(base);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t high = load_word(base + 4 * i + 4);
            words[i] = __funnelshift_r(low, high, shift);
            low = high;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < left) words[i / 4] |= uint32_t(from[i]) << i % 4 * 8;
    }
    *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All copies are there but those after the last `copies_end`.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

template <int TOKENS> __device__ __forceinline__ void scaled_mma_sync(const ScaledArgs &args) {
    constexpr int WARPS_M = TOKENS == 16 ? 1 : 2, WARPS_N = 8 / WARPS_M, ROWS = TOKENS + CHANNELS;
    constexpr int M_TILES = TOKENS / 16 / WARPS_M, N_TILES = CHANNELS / 8 / WARPS_N;
    __shared__ __align__(16) uint8_t memory[2][ROWS][PITCH];

    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t group = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
    if (group * TOKENS >= args.m) return wait_for_previous();
    const int token = group * TOKENS, channel = blockIdx.x * CHANNELS;
    const int warp_m = warp / WARPS_N * M_TILES * 16, warp_n = warp % WARPS_N * N_TILES * 8;
    const auto load = [&](int step) {
        for (int i = threadIdx.x; i < ROWS * (K_STEP / 16); i += THREADS) {
            const int r = i / (K_STEP / 16), at = step * K_STEP + i % (K_STEP / 16) * 16;
            // Rows past the end: any valid ones, nothing of them is stored.
            const uint8_t *row = r < TOKENS ? args.a + min(token + r, args.m - 1) * args.a_stride
                                            : args.b + min(channel + r - TOKENS, args.n - 1) * args.b_stride;
            bring(memory[step % 2][r] + i % (K_STEP / 16) * 16, row, at, args.k, args.aligned);
        }
    };
    wait_for_previous();

    const int steps = (args.k - 1) / K_STEP + 1;
    float sum[M_TILES][N_TILES][4] = {}, part[M_TILES][N_TILES][4] = {};
    load(0);
    copies_end();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        if (step + 1 < steps) load(step + 1);
        copies_end();
        wait_for_copies();
        __syncthreads(); // the step is there
        const uint32_t base = smem_address(memory[step % 2]);
#pragma unroll
        for (int k = 0; k < K_STEP; k += 32) {
            uint4 a[M_TILES], b[N_TILES / 2];
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) // matrices: rows, rows + 8, both again 16 codes further
                a[i] = ldmatrix_x4(base + (warp_m + i * 16 + lane % 16) * PITCH + k + lane / 16 * 16);
#pragma unroll
            for (int j = 0; j < N_TILES / 2; ++j) // rows, 16 codes further, rows + 8, 16 codes further
                b[j] = ldmatrix_x4(base + (TOKENS + warp_n + j * 16 + lane / 16 * 8 + lane % 8) * PITCH + k +
                                   lane / 8 % 2 * 16);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                for (int j = 0; j < N_TILES; ++j)
                    Fp8Mma<A, B>::m16n8k32(part[i][j], a[i], j % 2 ? b[j / 2].z : b[j / 2].x,
                                           j % 2 ? b[j / 2].w : b[j / 2].y);
        }
        if ((step + 1) * K_STEP % PROMOTED == 0 || step + 1 == steps)
#pragma unroll
            for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                for (int j = 0; j < N_TILES; ++j)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[i][j][r] += part[i][j][r], part[i][j][r] = 0.0f;
        __syncthreads(); // all have read the step: its place is free
    }

    float scale_a[M_TILES][2];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) scale_a[i][r] = token_scale(args, token + warp_m + i * 16 + lane / 4 + r * 8);
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        const int c = channel + warp_n + j * 8 + lane % 4 * 2;
        const Channel channels[2] = {Channel(args, c), Channel(args, c + 1)};
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int t = token + warp_m + i * 16 + lane / 4 + r / 2 * 8;
                if (t < args.m && c + r % 2 < args.n)
                    store_scaled(args.y, t * args.y_stride + c + r % 2,
                                 channels[r % 2].finish(sum[i][j][r], scale_a[i][r / 2]), args.out);
            }
    }
}

#define ENTRY(TOKENS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        scaled_mma_sync_##TOKENS(const __grid_constant__ ScaledArgs args) {                                            \
        scaled_mma_sync<TOKENS>(args);                                                                                 \
    }
ENTRY(16)
ENTRY(128)
