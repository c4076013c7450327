// rms_norm_*: codes and scales (activations.cuh) of v[m, k] = h * rstd[m] * weight[k] in float32, from left to right; h =
// x, or x + residual rounded to x's dtype, which is written too. rstd = 1 / sqrt(fmaf(sum_k h^2, 1 / k, eps)).
// x, residual [m, k], any strides, sum [m, k] without gaps, and weight [k]: all bf16, f16 or f32. `_any`: activations.cuh.
// Grid and block: activations.cuh.
// Shared memory: two values a warp.
// Order of the sum: a thread's values in four chains of fmaf, by their index modulo 4, over its units, pieces and values;
// (s0 + s1) + (s2 + s3); lanes 16, 8, 4, 2, 1 apart; warps, as if they were lanes, with zeros for those that are not.
#include "activations.cuh"

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

__device__ __forceinline__ float block_sum(float v) {
    __shared__ float sums[32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads(); // every warp's sum is there
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

template <class X> struct RmsNorm : Computed {
    using element = typename X::element;
    static constexpr bool ROW = true;
    // Weights come before x where a kernel may start early, and there are registers for them.
    static constexpr bool EARLY = __CUDA_ARCH__ == 900;
    const ActivationArgs &a;
    Raw<X> weight[EARLY ? KEPT : 1];
    float rstd;

    __device__ __forceinline__ RmsNorm(const ActivationArgs &args, bool keep) : a(args) {
        if constexpr (EARLY) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i)
                if (keep) load_weight(weight[i], i);
        }
    }
    __device__ __forceinline__ void load_weight(Raw<X> &to, int turn) const {
        to.template load<false>(static_cast<const element *>(a.second), turn, a.k);
    }
    __device__ __forceinline__ element *sum_row() const {
        return static_cast<element *>(a.sum) + int64_t(blockIdx.x) * a.k;
    }
    __device__ __forceinline__ void finish(const float (&sums)[4]) {
        const float sum = block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        rstd = __frcp_rn(__fsqrt_rn(fmaf(sum, a.inverse_k, a.eps)));
    }

    __device__ __forceinline__ void begin(Floats (&kept)[KEPT]) {
        Raw<X> h[KEPT];
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < KEPT; ++i) h[i].load(row_of<X>(a.x, a.x_stride), i, a.k);
        if (a.residual) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                Raw<X> r;
                r.load(row_of<X>(a.residual, a.residual_stride), i, a.k);
#pragma unroll
                for (int j = 0; j < PIECES<X>; ++j) h[i].piece[j] = add(h[i].piece[j], r.piece[j]);
                h[i].store(sum_row(), i, a.k);
            }
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
#pragma unroll
            for (int j = 0; j < UNIT_VALUES / 4; ++j) {
                const float4 v = h[i].four(j);
                sums[0] = fmaf(v.x, v.x, sums[0]), sums[1] = fmaf(v.y, v.y, sums[1]);
                sums[2] = fmaf(v.z, v.z, sums[2]), sums[3] = fmaf(v.w, v.w, sums[3]);
            }
        }
        finish(sums);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            if constexpr (!EARLY) load_weight(weight[0], i);
#pragma unroll
            for (int j = 0; j < UNIT_VALUES / 4; ++j) {
                const float4 v = h[i].four(j), w = weight[EARLY ? i : 0].four(j);
                float *to = kept[i].v + 4 * j;
                to[0] = v.x * rstd * w.x, to[1] = v.y * rstd * w.y, to[2] = v.z * rstd * w.z, to[3] = v.w * rstd * w.w;
            }
        }
    }
    static __device__ __forceinline__ uint4 add(const uint4 &one, const uint4 &two) {
        float f[8], g[8];
        Piece<X>::floats(one, f), Piece<X>::floats(two, g);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = X::from_float(f[2 * i] + g[2 * i]) | X::from_float(f[2 * i + 1] + g[2 * i + 1]) << 16;
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ element hidden(int k) const {
        const element v = row_of<X>(a.x, a.x_stride)[k * a.x_step];
        if (!a.residual) return v;
        return X::from_float(X::to_float(v) +
                             X::to_float(row_of<X>(a.residual, a.residual_stride)[k * a.residual_step]));
    }
    __device__ __forceinline__ void begin() {
        float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
        const int turns = turns_of(a.k);
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn)
            for_values<X>(turn, a.k, [&](int at, int i) {
                const element h = hidden(at);
                if (a.residual) sum_row()[at] = h;
                const float f = X::to_float(h), s = fmaf(f, f,
                                                         i % 4 == 0   ? s0
                                                         : i % 4 == 1 ? s1
                                                         : i % 4 == 2 ? s2
                                                                      : s3);
                (i % 4 == 0 ? s0 : i % 4 == 1 ? s1 : i % 4 == 2 ? s2 : s3) = s;
            });
        finish({s0, s1, s2, s3});
    }
    __device__ __forceinline__ float at(int k) const {
        return X::to_float(hidden(k)) * rstd * X::to_float(static_cast<const element *>(a.second)[k * a.second_step]);
    }
};

COMPUTED_ENTRIES(rms_norm, RmsNorm)
