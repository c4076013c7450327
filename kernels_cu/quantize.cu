// scale[n] = max(amax_k abs(w[n, k]) / 448, 2^-126), 1 for a row of zeros; codes[n, k] = e4m3fn(clip(w / scale, -448,
// 448)). w [n, k] f16, bf16, f32 or f64 (rounded to f32 first), strides in elements; codes [n, pitch], zeros past k;
// scale [n] f32.
// Grid n, block of 256: a row a block. Entries without `_any` take rows of w whose 16-byte pieces are whole and
// aligned.
// Shared memory: one partial maximum and one count a warp.
// status[0] counts the values that are not finite as float32, status[1] is the least index n * K + k of them (set to
// 2^64 - 1 before).
#include "convert.cuh"

struct QuantizeArgs {
    void *w; // quantize_* read it, dequantize_* write it
    uint8_t *codes;
    float *scale;
    uint64_t *status;
    int64_t stride_n;
    int64_t stride_k;
    int64_t pitch;
    int64_t k;
};
static_assert(sizeof(QuantizeArgs) == ARGS_BYTES, "QuantizeArgs and kernels.QUANTIZE_ARGS must agree");

constexpr int THREADS = 256;

// What a 16-byte piece of a row holds, as floats.
template <class X> struct Piece;

template <> struct Piece<F32> {
    static constexpr int SIZE = 4;
    static __device__ __forceinline__ void floats(const uint4 &v, float (&f)[SIZE]) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z),
        f[3] = __uint_as_float(v.w);
    }
};

template <> struct Piece<F64> {
    static constexpr int SIZE = 2;
    static __device__ __forceinline__ void floats(const uint4 &v, float (&f)[SIZE]) {
        f[0] = F64::to_float(__hiloint2double(v.y, v.x)), f[1] = F64::to_float(__hiloint2double(v.w, v.z));
    }
};

template <class X> struct Piece {
    static constexpr int SIZE = 8;
    static __device__ __forceinline__ void floats(const uint4 &v, float (&f)[SIZE]) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = X::widen(words[i]);
            f[2 * i] = two.x, f[2 * i + 1] = two.y;
        }
    }
};

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= 3.402823466e38f; }

// Largest magnitude of the finite values, and how many are not finite, over what a thread has seen.
struct Seen {
    float amax = 0.0f;
    uint32_t bad = 0;

    __device__ __forceinline__ void add(float v) {
        if (is_finite(v))
            amax = fmaxf(amax, fabsf(v));
        else
            ++bad;
    }
};

// Division by one scale many times: the reciprocal is found once, each quotient is then put right twice by its
// remainder. Correctly rounded like `/` as long as no remainder is subnormal; for tiny scales `/` itself serves.
// Source: P. Markstein, IA-64 and Elementary Functions, 2000, chapter 8.
struct Divider {
    float scale, reciprocal;
    bool tiny;

    __device__ __forceinline__ explicit Divider(float s)
        : scale(s), reciprocal(__frcp_rn(s)), tiny(s < 0x1p-80f || s > 0x1p100f) {}

    static __device__ __noinline__ float slowly(float v, float by) { return __fdiv_rn(v, by); }

    __device__ __forceinline__ float divide(float v) const {
        if (tiny) return slowly(v, scale);
        float q = v * reciprocal;
        q = fmaf(fmaf(-q, scale, v), reciprocal, q);
        return copysignf(fmaf(fmaf(-q, scale, v), reciprocal, q), v); // the remainder of -0 is +0
    }

    __device__ __forceinline__ float clipped(float v) const { return fminf(fmaxf(divide(v), -448.0f), 448.0f); }
};

// All threads get the row's scale. Every thread passes here once, with the whole row seen by the block.
template <class X> __device__ __forceinline__ float row_scale(const QuantizeArgs &a, Seen seen) {
    __shared__ float amax[THREADS / 32];
    __shared__ uint32_t bad[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 16; d; d /= 2) {
        seen.amax = fmaxf(seen.amax, __shfl_xor_sync(0xffffffffu, seen.amax, d));
        seen.bad += __shfl_xor_sync(0xffffffffu, seen.bad, d);
    }
    if (lane == 0) amax[warp] = seen.amax, bad[warp] = seen.bad;
    __syncthreads(); // every warp's partial results are there
    float m = 0.0f;
    uint32_t count = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) m = fmaxf(m, amax[w]), count += bad[w];
    const float scale = m == 0.0f ? 1.0f : fmaxf(__fdiv_rn(m, 448.0f), 0x1p-126f);
    if (threadIdx.x == 0) a.scale[blockIdx.x] = scale;
    if (count) {
        const auto *row = static_cast<const typename X::element *>(a.w) + blockIdx.x * a.stride_n;
        if (threadIdx.x == 0) atomicAdd(a.status, static_cast<uint64_t>(count));
        for (int64_t k = threadIdx.x; k < a.k; k += THREADS)
            if (!is_finite(X::to_float(row[k * a.stride_k])))
                atomicMin(a.status + 1, static_cast<uint64_t>(blockIdx.x * a.k + k));
    }
    return scale;
}

template <class X> __device__ __forceinline__ void quantize_pieces(const QuantizeArgs &a) {
    constexpr int SIZE = Piece<X>::SIZE;
    constexpr int KEPT =
        SIZE == 8 ? 2 : 4; // pieces a thread keeps in registers; of longer rows the rest is read again, from L2
    const uint4 *row =
        reinterpret_cast<const uint4 *>(static_cast<const typename X::element *>(a.w) + blockIdx.x * a.stride_n);
    uint8_t *codes = a.codes + blockIdx.x * a.pitch;
    const int64_t pieces = a.k / SIZE;

    uint4 kept[KEPT];
    Seen seen;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int64_t p = threadIdx.x + i * THREADS;
        kept[i] = make_uint4(0, 0, 0, 0);
        if (p < pieces) kept[i] = row[p];
    }
    float f[SIZE];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        Piece<X>::floats(kept[i], f);
#pragma unroll
        for (int j = 0; j < SIZE; ++j) seen.add(f[j]);
    }
    for (int64_t p = threadIdx.x + KEPT * THREADS; p < pieces; p += THREADS) {
        Piece<X>::floats(row[p], f);
#pragma unroll
        for (int j = 0; j < SIZE; ++j) seen.add(f[j]);
    }

    const Divider by(row_scale<X>(a, seen));
    const auto write = [&](const uint4 &v, int64_t p) {
        float values[SIZE];
        Piece<X>::floats(v, values);
        uint32_t words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < SIZE; j += 2)
            words[j / 4] |= float2_to_e4m3(by.clipped(values[j]), by.clipped(values[j + 1])) << j % 4 * 8;
        if (SIZE == 8)
            *reinterpret_cast<uint2 *>(codes + p * 8) = make_uint2(words[0], words[1]);
        else if (SIZE == 4)
            *reinterpret_cast<uint32_t *>(codes + p * 4) = words[0];
        else
            *reinterpret_cast<uint16_t *>(codes + p * 2) = static_cast<uint16_t>(words[0]);
    };
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (threadIdx.x + i * THREADS < pieces) write(kept[i], threadIdx.x + i * THREADS);
    for (int64_t p = threadIdx.x + KEPT * THREADS; p < pieces; p += THREADS) write(row[p], p);
    for (int64_t k = a.k + threadIdx.x; k < a.pitch; k += THREADS) codes[k] = 0;
}

template <class X> __device__ __forceinline__ void quantize_elements(const QuantizeArgs &a) {
    const auto *row = static_cast<const typename X::element *>(a.w) + blockIdx.x * a.stride_n;
    uint8_t *codes = a.codes + blockIdx.x * a.pitch;
    Seen seen;
    for (int64_t k = threadIdx.x; k < a.k; k += THREADS) seen.add(X::to_float(row[k * a.stride_k]));
    const Divider by(row_scale<X>(a, seen));
    for (int64_t k = threadIdx.x; k < a.pitch; k += THREADS) {
        const float v = k < a.k ? X::to_float(row[k * a.stride_k]) : 0.0f;
        codes[k] = static_cast<uint8_t>(float2_to_e4m3(by.clipped(v), 0.0f));
    }
}

// w[n, k] = code * scale in float32, rounded to the entry's dtype.
template <class X> __device__ __forceinline__ void dequantize(const QuantizeArgs &a) {
    auto *row = static_cast<typename X::element *>(a.w) + blockIdx.x * a.stride_n;
    const uint8_t *codes = a.codes + blockIdx.x * a.pitch;
    const float scale = a.scale[blockIdx.x];
    for (int64_t k = threadIdx.x; k < a.k; k += THREADS)
        row[k * a.stride_k] = X::from_float(e4m3_to_float2<0>(codes[k]).x * scale);
}

#define ENTRIES(dtype, X)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)                                                           \
        quantize_##dtype(const __grid_constant__ QuantizeArgs a) {                                                     \
        quantize_pieces<X>(a);                                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)                                                           \
        quantize_##dtype##_any(const __grid_constant__ QuantizeArgs a) {                                               \
        quantize_elements<X>(a);                                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) dequantize_##dtype(const __grid_constant__ QuantizeArgs a) { \
        dequantize<X>(a);                                                                                              \
    }

ENTRIES(float16, F16)
ENTRIES(bfloat16, BF16)
ENTRIES(float32, F32)
ENTRIES(float64, F64)

// status[0] counts NaN codes in `codes` [gridDim.x rows, pitch], the first k of each row; status[1] as above.
extern "C" __global__ void __launch_bounds__(THREADS) find_nan(const __grid_constant__ QuantizeArgs a) {
    for (int64_t k = threadIdx.x; k < a.k; k += THREADS)
        if ((a.codes[blockIdx.x * a.pitch + k] & 0x7f) == 0x7f) {
            atomicAdd(a.status, 1ull);
            atomicMin(a.status + 1, static_cast<uint64_t>(blockIdx.x * a.k + k));
        }
}
