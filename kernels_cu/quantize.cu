// scale[n] = max(amax_k abs(w[n, k]) / 448, 2^-126), 1 for a row of zeros; codes[n, k] = e4m3fn(clip(w / scale, -448,
// 448)). w [n, k] f16, bf16, f32 or f64 (rounded to f32 first), strides in elements; codes [n, pitch], zeros past k;
// scale [n] f32.
// Grid n, block of 256: a row a block. Entries without `_any` take rows of w whose 16-byte pieces are whole and
// aligned.
// Shared memory: one partial maximum a warp.
// status[0] counts the values that are not finite as float32, status[1] is the least index n * K + k of them (set to
// 2^64 - 1 before). A row with such values has the scale of the others, and no codes.
#include "scaling.cuh"

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
// Blocks of 16-bit entries that a multiprocessor is to hold: all that it takes, or one less; 32, 48, 64 registers.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int BLOCKS = 2048 / THREADS;
#elif __CUDA_ARCH__ >= 860
constexpr int BLOCKS = 1536 / THREADS - 1;
#else
constexpr int BLOCKS = 1024 / THREADS;
#endif
// 16-byte pieces of a row that a thread keeps in registers: rows of 16 KiB are read once. More do not fit in 32
// registers: of longer rows the rest is read again, from L2.
constexpr int KEPT = 4;

__device__ __forceinline__ float row_scale(const QuantizeArgs &a, uint32_t amax) {
    const float scale = scale_of(amax, 1.0f);
    if (threadIdx.x == 0) a.scale[blockIdx.x] = scale;
    return scale;
}

// Sixteen bits of a value and of its row's amax are few enough to have tried all pairs.
template <class X> using RowDivider = Divider<sizeof(typename X::element) != 2>;

// A row with values that are not finite: tells of them; the scale is that of the others, and no code is written.
template <class X> __device__ __forceinline__ void refuse(const QuantizeArgs &a) {
    const auto *row = static_cast<const typename X::element *>(a.w) + blockIdx.x * a.stride_n;
    uint32_t amax = 0;
    uint64_t count = 0, first = ~0ull;
    for (int64_t k = threadIdx.x; k < a.k; k += THREADS) {
        const uint32_t m = magnitude(X::to_float(row[k * a.stride_k]));
        if (m < INFINITE)
            amax = max(amax, m);
        else
            ++count, first = min(first, static_cast<uint64_t>(blockIdx.x * a.k + k));
    }
    if (count) atomicAdd(a.status, count), atomicMin(a.status + 1, first);
    __syncthreads(); // every warp has read the maxima of before
    row_scale(a, block_max(amax));
}

template <class X> __device__ __forceinline__ void quantize_pieces(const QuantizeArgs &a) {
    constexpr int SIZE = Piece<X>::SIZE;
    const auto *row = static_cast<const typename X::element *>(a.w) + blockIdx.x * a.stride_n;
    uint8_t *codes = a.codes + blockIdx.x * a.pitch;
    // This thread's pieces, how many, and where their codes go.
    const uint4 *from = reinterpret_cast<const uint4 *>(row) + threadIdx.x;
    const int pieces = static_cast<int>((static_cast<uint64_t>(a.k) / SIZE + THREADS - 1 - threadIdx.x) / THREADS);
    uint8_t *to = codes + threadIdx.x * SIZE;

    uint4 kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = i < pieces ? from[i * THREADS] : make_uint4(0, 0, 0, 0);
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) top = larger<X>(top, kept[i]);
#pragma unroll 1
    for (int i = KEPT; i < pieces; ++i) top = larger<X>(top, from[int64_t(i) * THREADS]);

    const uint32_t amax = block_max(largest<X>(top));
    if (amax >= INFINITE) return refuse<X>(a);
    const RowDivider<X> by(row_scale(a, amax));
    const auto write = [&](const uint4 &v, int i) {
        float f[SIZE];
        Piece<X>::floats(v, f);
        uint32_t words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < SIZE; j += 2)
            words[j / 4] |= float2_to_e4m3(by.divide(f[j]), by.divide(f[j + 1])) << j % 4 * 8;
        uint8_t *p = to + int64_t(i) * (THREADS * SIZE);
        if constexpr (SIZE == 8)
            *reinterpret_cast<uint2 *>(p) = make_uint2(words[0], words[1]);
        else if constexpr (SIZE == 4)
            *reinterpret_cast<uint32_t *>(p) = words[0];
        else
            *reinterpret_cast<uint16_t *>(p) = static_cast<uint16_t>(words[0]);
    };
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (i < pieces) write(kept[i], i);
#pragma unroll 1
    for (int i = KEPT; i < pieces; ++i) write(from[int64_t(i) * THREADS], i);
    for (int64_t k = a.k + threadIdx.x; k < a.pitch; k += THREADS) codes[k] = 0;
}

template <class X> __device__ __forceinline__ void quantize_elements(const QuantizeArgs &a) {
    const auto *row = static_cast<const typename X::element *>(a.w) + blockIdx.x * a.stride_n;
    uint8_t *codes = a.codes + blockIdx.x * a.pitch;
    uint32_t top = 0;
    for (int64_t k = threadIdx.x; k < a.k; k += THREADS) top = max(top, magnitude(X::to_float(row[k * a.stride_k])));

    const uint32_t amax = block_max(top);
    if (amax >= INFINITE) return refuse<X>(a);
    const RowDivider<X> by(row_scale(a, amax));
    for (int64_t k = threadIdx.x; k < a.pitch; k += THREADS) {
        const float v = k < a.k ? X::to_float(row[k * a.stride_k]) : 0.0f;
        codes[k] = static_cast<uint8_t>(float2_to_e4m3(by.divide(v), 0.0f));
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

#define ENTRIES(dtype, X, blocks)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)                                                      \
        quantize_##dtype(const __grid_constant__ QuantizeArgs a) {                                                     \
        quantize_pieces<X>(a);                                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS / 2)                                                  \
        quantize_##dtype##_any(const __grid_constant__ QuantizeArgs a) {                                               \
        quantize_elements<X>(a);                                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) dequantize_##dtype(const __grid_constant__ QuantizeArgs a) { \
        dequantize<X>(a);                                                                                              \
    }

ENTRIES(float16, F16, BLOCKS)
ENTRIES(bfloat16, BF16, BLOCKS)
ENTRIES(float32, F32, BLOCKS / 2) // with as few registers these spill
ENTRIES(float64, F64, BLOCKS / 2)

// status[0] counts NaN codes in `codes` [gridDim.x rows, pitch], the first k of each row; status[1] as above.
extern "C" __global__ void __launch_bounds__(THREADS) find_nan(const __grid_constant__ QuantizeArgs a) {
    for (int64_t k = threadIdx.x; k < a.k; k += THREADS)
        if ((a.codes[blockIdx.x * a.pitch + k] & 0x7f) == 0x7f) {
            atomicAdd(a.status, 1ull);
            atomicMin(a.status + 1, static_cast<uint64_t>(blockIdx.x * a.k + k));
        }
}
