// silu_mul_*: codes and scales (activations.cuh) of v[m, k] = g * sigmoid(g) * u in float32, from left to right; x [m, 2k]
// is gate beside up, g = x[m, k], u = x[m, k + K]; `second` is where u begins.
// x bf16, f16 or f32, any strides; entries without `_any` take halves of rows whose 16-byte pieces are whole and aligned.
// Grid and block: activations.cuh.
// Shared memory: a value a warp.
// sigmoid is a sequence of float32 operations that any machine repeats: within 2^-20 of 1 / (1 + exp(-clip(g, -87, 87))).
// Source: our own; the polynomial is the minimax one of 2^f on [-0.5, 0.5] with p(0) = 1.
#include "activations.cuh"

__device__ __forceinline__ float sigmoid(float v) {
    // exp(-v) = 2^n * p(f): n is rounded by a sum that has no room for less, and stays in its low bits, with the bias.
    constexpr float ROUND = 0x1.8p23f + 127.0f, LOG2E = 0x1.715476p0f;
    const float x = fmaxf(fminf(v, 87.0f), -87.0f), sum = fmaf(x, -LOG2E, ROUND), n = sum - ROUND;
    const float f = fmaf(x, -LOG2E, -n);
    float p = 0x1.5bb994p-10f;
    p = fmaf(p, f, 0x1.3cea84p-7f);
    p = fmaf(p, f, 0x1.c6b754p-5f);
    p = fmaf(p, f, 0x1.ebf9bcp-3f);
    p = fmaf(p, f, 0x1.62e42ap-1f);
    p = fmaf(p, f, 1.0f);
    const float d = fmaf(p, __uint_as_float(__float_as_uint(sum) << 23), 1.0f);
    // 1 / d, from 1 to 2^126: a first guess from the bits is off by a twentieth; two steps, of third and second order.
    float r = __uint_as_float(0x7ef311c7u - __float_as_uint(d));
    float e = fmaf(-d, r, 1.0f);
    r = fmaf(r, fmaf(e, e, e), r);
    e = fmaf(-d, r, 1.0f);
    return fmaf(r, e, r);
}

template <class X> struct SiluMul : Computed {
    const ActivationArgs &a;

    __device__ __forceinline__ SiluMul(const ActivationArgs &args, bool) : a(args) {}
    __device__ __forceinline__ void begin(Floats (&kept)[KEPT]) {
        Raw<X> gate[KEPT], up[KEPT];
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            gate[i].load(row_of<X>(a.x, a.x_stride), i, a.k);
            up[i].load(row_of<X>(a.second, a.x_stride), i, a.k);
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
#pragma unroll
            for (int j = 0; j < UNIT_VALUES / 4; ++j) {
                const float4 g = gate[i].four(j), u = up[i].four(j);
                float *to = kept[i].v + 4 * j;
                to[0] = g.x * sigmoid(g.x) * u.x, to[1] = g.y * sigmoid(g.y) * u.y;
                to[2] = g.z * sigmoid(g.z) * u.z, to[3] = g.w * sigmoid(g.w) * u.w;
            }
        }
    }

    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ float at(int k) const {
        const float g = X::to_float(row_of<X>(a.x, a.x_stride)[k * a.x_step]);
        return g * sigmoid(g) * X::to_float(row_of<X>(a.second, a.x_stride)[k * a.x_step]);
    }
};

COMPUTED_ENTRIES(silu_mul, SiluMul)
