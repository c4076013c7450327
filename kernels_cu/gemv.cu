// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])), sums in float32 on the CUDA cores; any m, n, k,
// any arch. x bf16, f16 or f32 on any address; codes in the layout of linear.cuh.
// Grid (units of n, groups of TOKENS); block of WARPS * 32: a unit of 16 channels a block, whose warps share k by steps.
// Shared memory: a chunk of x, 32 KiB, each 64 of k in the order in which the lanes want them; the warps' sums.
// The sums' order is fixed: within a lane by k, then over the four lanes of a channel, then over the warps.
#include "linear.cuh"

// Two neighbours of x from any address that an element may have; zeros from k_end on.
template <class X>
__device__ __forceinline__ void load_pair(typename X::element (&v)[2], const typename X::element *row, int64_t k,
                                          int k_end) {
    v[0] = k < k_end ? row[k] : typename X::element(0);
    v[1] = k + 1 < k_end ? row[k + 1] : typename X::element(0);
}

template <class X, int TOKENS> __device__ __forceinline__ void gemv(const LinearArgs &a) {
    using element = typename X::element;
    constexpr int CHUNK = 32768 / (TOKENS * sizeof(element)); // of k
    constexpr int CHUNK_STEPS = CHUNK / STEP, THREADS = WARPS * 32;
    __shared__ __align__(16) element chunk[TOKENS][CHUNK];
    __shared__ float partial[WARPS][TOKENS][UNIT];

    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token = first_token(a, TOKENS);
    const uint8_t *tiles = tile(a, blockIdx.x, 0) + lane * 16;
    const int64_t step_bytes = tile(a, blockIdx.x, 1) - tile(a, blockIdx.x, 0);
    Codes codes[AHEAD]; // of this warp's next steps, on their way
    const auto load = [&](Codes &to, int step) {
        const int some = min(step, a.steps - 1);
        to = Codes::ask(tiles + some * step_bytes, lane);
        if (FORMAT == FP8_BLOCK) to.block_scale = block_scale(a, blockIdx.x, some);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(codes[i], warp + i * WARPS);
    const Finish finish(a, blockIdx.x * UNIT + threadIdx.x % UNIT);

    wait_for_previous(); // all that stands above reads weights alone

    float sum[TOKENS][2] = {};
    for (int base = 0; base < a.steps; base += CHUNK_STEPS) {
        if (base) __syncthreads(); // all warps are done with the chunk before
        const int steps = min(CHUNK_STEPS, a.steps - base);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const element *row = static_cast<const element *>(a.x) + min(token + t, a.m - 1) * a.x_stride;
#pragma unroll 4
            for (int pair = threadIdx.x; pair < steps * STEP / 2; pair += THREADS) {
                // Lane l finds its sixteen of a step at 16 * (l % 4), in the order of `four` and of its codes
                // (linear.cuh).
                element *to = chunk[t] + pair / 32 * STEP + pair % 4 * 16 + pair / 8 % 4 * 4 + pair / 4 % 2 * 2;
                element v[2];
                load_pair<X>(v, row, int64_t(base) * STEP + 2 * pair, a.k);
                to[0] = v[0], to[1] = v[1];
            }
        }
        __syncthreads(); // the chunk of x is there
#pragma unroll 1
        for (int first = warp; first < steps; first += AHEAD * WARPS) {
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                const int step = first + ahead * WARPS;
                if (step < steps) {
                    Sixteen<X> x[TOKENS];
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) x[t].load(chunk[t] + step * STEP + lane % 4 * 16);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float4 w = codes[ahead].values(r, i);
#pragma unroll
                            for (int t = 0; t < TOKENS; ++t) {
                                const float4 v = x[t].four(i);
                                float part = 0.0f;
                                float &to = FORMAT == FP8 ? sum[t][r] : part;
                                to = fmaf(w.x, v.x, to);
                                to = fmaf(w.y, v.y, to);
                                to = fmaf(w.z, v.z, to);
                                to = fmaf(w.w, v.w, to);
                                if (FORMAT != FP8) sum[t][r] = fmaf(codes[ahead].scale(r, i), part, sum[t][r]);
                            }
                        }
                    load(codes[ahead], base + step + AHEAD * WARPS);
                }
            }
        }
    }

#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float v = sum[t][r];
            v += __shfl_xor_sync(0xffffffffu, v, 1);
            v += __shfl_xor_sync(0xffffffffu, v, 2);
            if (lane % 4 == 0) partial[warp][t][8 * r + lane / 4] = v;
        }
    __syncthreads(); // the sums of all warps are there
    const int t = threadIdx.x / UNIT, channel = blockIdx.x * UNIT + threadIdx.x % UNIT;
    if (t < TOKENS && channel < a.n && token + t < a.m) {
        float v = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) v += partial[w][t][threadIdx.x % UNIT];
        finish.store(a, token + t, channel, v);
    }
}

#define ENTRY(name, X, TOKENS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, TOKENS == 1 && LANE_SCALES == 0 ? 2 : 1)                  \
        name(const __grid_constant__ LinearArgs a) {                                                                   \
        gemv<X, TOKENS>(a);                                                                                            \
    }

ENTRY(gemv_bfloat16_1, BF16, 1)
ENTRY(gemv_float16_1, F16, 1)
ENTRY(gemv_float32_1, F32, 1)
ENTRY(gemv_float32_4, F32, 4)
#if __CUDA_ARCH__ < 800 // from Ampere on tensor cores serve more than one token in bf16
ENTRY(gemv_bfloat16_4, BF16, 4)
#endif
