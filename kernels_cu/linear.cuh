// What all kernels of y = x @ w.T share: the argument block, the layout of the codes, the epilogue.
// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])); x [m, k] and y [m, n] with rows x_stride and
// y_stride elements apart, y of the dtype that `out` names; scale [n] and bias [n] (or null) float32. Rounding: one, to
// y's dtype, ties to even; float16 overflows to Inf. The host packs the block from kernels.LINEAR_ARGS; ARGS_BYTES ties
// the two sides.
// Source of the layout: the A fragment of mma.sync.m16n8k16, PTX ISA.
#pragma once
#include "memory.cuh"

struct LinearArgs {
    const void *x;
    const uint8_t *codes;
    const float *scale;
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
};
static_assert(sizeof(LinearArgs) == LINEAR_ARGS_BYTES, "LinearArgs and kernels.LINEAR_ARGS must agree");

// The layout of the codes (kernels.pack): tiles of 16 channels (a unit) and 64 of k (a step), 1 KiB each. The units of
// a panel stand together: their tiles of step 0, of step 1, ... A tile is what a warp needs for four mma: lane l finds
// in bytes 16 * l .. of the first half channel l / 4, of the second half channel l / 4 + 8; byte 4 * j + 2 * e + h
// there is k = 16 * j + 8 * h + 2 * (l % 4) + e. Past n and k: zeros.
constexpr int UNIT = 16, STEP = 64, TILE_BYTES = UNIT * STEP;

// What a lane needs of a tile in shared memory: codes of two channels. `lane`: the tile's first byte + 16 * lane.
struct Codes {
    uint4 low = {}, high = {};

    Codes() = default;
    __device__ __forceinline__ explicit Codes(const uint8_t *lane)
        : low(*reinterpret_cast<const uint4 *>(lane)), high(*reinterpret_cast<const uint4 *>(lane + TILE_BYTES / 2)) {}

    // A of product j along k.
    template <class X> __device__ __forceinline__ uint4 operand(int j) const {
        const uint32_t lo = word(low, j), hi = word(high, j);
        return make_uint4(X::template from_codes<0>(lo), X::template from_codes<0>(hi), X::template from_codes<1>(lo),
                          X::template from_codes<1>(hi));
    }
};

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
        : scale(channel < a.n ? a.scale[channel] : 0.0f), bias(channel < a.n && a.bias ? a.bias[channel] : 0.0f) {}

    __device__ __forceinline__ void store(const LinearArgs &a, int row, int channel, float sum) const {
        store_y(a.y, row * a.y_stride + channel, fmaf(scale, sum, bias), a.out);
    }
};
