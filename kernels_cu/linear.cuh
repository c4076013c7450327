// What all kernels of y = x @ w.T share: the argument block, the order of tiles, the epilogue.
// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])); x [m, k] and y [m, n] with rows x_stride and
// y_stride elements apart, y of the dtype that `out` names; scale [n] and bias [n] (or null) float32. With scales for
// blocks along k each code is multiplied with its own, and scale[n] is the global scale (NVFP4) or 1; where x was quantised
// too, its token has a factor, as factors.cuh says. Rounding: one, to y's dtype, ties to even; float16 overflows to Inf.
// The host packs the block from kernels.LINEAR_ARGS; ARGS_BYTES ties the two sides.
#pragma once
#include "factors.cuh"
#include "weights.cuh"

struct LinearArgs {
    const void *x;
    const uint8_t *codes;
    const float *scale; // [n]; of 128 x 128 blocks [ceil(n / 128)][ceil(k / 128)]; of MX none
    const float *bias;
    void *y;
    int64_t x_stride;
    int64_t y_stride;
    int m, n, k;
    int steps;  // of 64 along k: ceil(k / 64)
    int out;    // dtype of y, an Out
    int panel;  // units of 16 channels in a panel of the layout
    int wider;  // the first so many panels have one more
    int split;  // blocks of a cluster that share a panel's k
    int stages; // of the shared-memory ring
    // Bytes from x to the factors of its tokens, float32 [m] behind its rows; 0: there are none.
    int64_t factors;
};
static_assert(sizeof(LinearArgs) == LINEAR_ARGS_BYTES, "LinearArgs and kernels.LINEAR_ARGS must agree");

// The layout of the codes (kernels.pack): tiles of weights.cuh. The units of a panel stand together: their tiles of step
// 0, of step 1, ... Past n and k: zeros.
__device__ __forceinline__ int unit_count(const LinearArgs &a) { return (a.n + UNIT - 1) / UNIT; }

// Where a panel's codes begin.
__device__ __forceinline__ const uint8_t *panel_codes(const LinearArgs &a, int first_unit) {
    return a.codes + int64_t(first_unit) * a.steps * TILE_BYTES;
}

__device__ __forceinline__ const uint8_t *tile(const LinearArgs &a, int unit, int step) {
    const int narrow = a.wider * (a.panel + 1); // the first unit of the narrower panels
    const int width = a.panel + (unit < narrow), within = (unit < narrow ? unit : unit - narrow) % width;
    return panel_codes(a, unit - within) + (int64_t(step) * width + within) * TILE_BYTES;
}

// The scale of a unit's block of 128 x 128 at a step.
__device__ __forceinline__ const float &block_scale(const LinearArgs &a, int unit, int step) {
    return a.scale[unit / (128 / UNIT) * ((a.steps + 1) / 2) + step / 2];
}

// The first token of a block. Groups of tokens are counted along y, then z, for a grid's y ends at 65,535; a group past
// m reads valid rows and stores nothing.
__device__ __forceinline__ int first_token(const LinearArgs &a, int tokens) {
    return static_cast<int>(min((int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * tokens, int64_t(a.m)));
}

enum Out { OUT_BF16, OUT_F16, OUT_F32 }; // in the order of formats.FLOATS

__device__ __forceinline__ void store_y(void *y, int64_t i, float v, int out) {
    if (out == OUT_BF16)
        static_cast<uint16_t *>(y)[i] = float_to_bf16(v);
    else if (out == OUT_F16)
        static_cast<uint16_t *>(y)[i] = float_to_f16(v);
    else
        static_cast<float *>(y)[i] = v;
}

// What a channel's sums need: two reads of weights, so they may come before wait_for_previous().
struct Finish {
    float scale = 0.0f, bias = 0.0f;

    Finish() = default;
    __device__ __forceinline__ Finish(const LinearArgs &a, int channel)
        : scale(channel < a.n ? (CHANNEL_SCALES ? a.scale[channel] : 1.0f) : 0.0f),
          bias(channel < a.n && a.bias ? a.bias[channel] : 0.0f) {}

    // Where weights have scales of blocks x may have been quantised as they are (quantize_blocks.cu): its values lack a
    // factor.
    __device__ __forceinline__ float of(const LinearArgs &a, int token, float sum) const {
        if (LANE_SCALES > 0 && a.factors) {
            const auto *factors = reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.x) + a.factors);
            return finish_sum(sum, factors[token], scale, bias);
        }
        return fmaf(scale, sum, bias);
    }
    __device__ __forceinline__ void store(const LinearArgs &a, int row, int channel, float sum) const {
        store_y(a.y, row * a.y_stride + channel, of(a, row, sum), a.out);
    }
};
