// Rows of activations to FP8: codes[m, k] = fp8(v / scale), v [m, k] in float32 from a Source; saturated, NaN and Inf as
// 0x7f. scale f32 of the tensor [1, 1], each token [m, 1], or each group of 128 in a token [m, ceil(k / 128)]: scale_of.
// x any strides in elements; codes and scale have rows without gaps. Kernels without `_any` take rows of up to 32 values a
// thread whose 16-byte pieces are whole and aligned, and codes aligned for the stores.
// Grid max(m, 1), a row a block, of the whole warps that kernels.row_threads(k) tells; where no block has to know all of
// a row, up to 256 threads and (max(m, 1), blocks that share a row).
// Shared memory: what a block's maximum and sum need, a value a warp.
// Source: our own. A row is read once, and stays in registers; by `_any` value by value, once more for each pass.
#pragma once
#include "memory.cuh"
#include "scaling.cuh"

struct ActivationArgs {
    const void *x;
    const void *second;   // rms_norm: the weight [k]; silu_mul: the half of x that multiplies
    const void *residual; // rms_norm: as x, or null
    void *sum;            // rms_norm: x + residual
    uint8_t *codes;
    float *scale;
    const float *given; // TENSOR: the scale, or null
    int64_t x_stride;
    int64_t x_step; // from one value of a row to the next
    int64_t second_step;
    int64_t residual_stride;
    int64_t residual_step;
    int64_t codes_stride;
    int64_t scale_stride;
    int m;
    int k;
    float value; // TENSOR: the scale where none is given
    float eps;
    float inverse_k; // 1 / k
    int found;       // TENSOR: the given scale is what amax_* has found
    int mode;        // of `_any`
    int e5m2;        // of `_any`: the format of the codes
};
static_assert(sizeof(ActivationArgs) == ARGS_BYTES, "ActivationArgs and kernels.ACTIVATION_ARGS must agree");

enum Mode { TENSOR, TOKEN, GROUP };

// A thread takes units of 16 values: eight neighbouring threads have a group of 128, each the pieces `lane`, `lane` + 8,
// ... of it, so that every load and store of a warp is of whole sectors.
constexpr int UNIT_VALUES = 16, LANES = 8, GROUP_VALUES = UNIT_VALUES * LANES;
constexpr int KEPT = 2; // units of a row that a thread keeps in registers

// Threads that an entry is bound to: MAX_THREADS where a block has a whole row, half as many for float32, whose values
// take twice the registers; SHARING_THREADS where several blocks share it.
template <class S, class X, int MODE>
constexpr int THREADS = !S::ROW && MODE != TOKEN           ? SHARING_THREADS
                        : sizeof(typename X::element) == 2 ? MAX_THREADS
                                                           : MAX_THREADS / 2;
// Registers that a thread may have: so few that enough rows are on their way. Where a multiprocessor has 2048 threads, all
// of them hold 16-bit x as it is, but for TENSOR, which divides in more steps.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900
constexpr int NARROW = NARROW_REGISTERS, NARROW_TENSOR = TENSOR_REGISTERS;
#else
constexpr int NARROW = 64, NARROW_TENSOR = 64;
#endif
template <class S, class X, int MODE>
constexpr int REGISTERS = sizeof(typename X::element) != 2 ? 128
                          : S::EXACT                       ? 64
                          : MODE == TENSOR                 ? NARROW_TENSOR
                                                           : NARROW;
template <class S, class X, int MODE> constexpr int BLOCKS = 65536 / (REGISTERS<S, X, MODE> * THREADS<S, X, MODE>);

template <class X> constexpr int PIECES = UNIT_VALUES / Piece<X>::SIZE;

// The first value of piece j of a thread's unit `turn` of its row.
template <class X> __device__ __forceinline__ int first_of(int turn, int j) {
    const int unit = threadIdx.x + (turn + KEPT * blockIdx.y) * blockDim.x;
    return unit / LANES * GROUP_VALUES + (unit % LANES + LANES * j) * Piece<X>::SIZE;
}

// The values of this thread one after the other, for a source that gives them one by one.
template <class X, class One> __device__ __forceinline__ void for_values(int turn, int k, const One &one) {
#pragma unroll 1
    for (int i = 0; i < UNIT_VALUES; ++i) {
        const int at = first_of<X>(turn, i / Piece<X>::SIZE) + i % Piece<X>::SIZE;
        if (at < k) one(at, i);
    }
}

__device__ __forceinline__ int turns_of(int k) {
    const int units = (k + GROUP_VALUES - 1) / GROUP_VALUES * LANES;
    return (units + blockDim.x - 1) / blockDim.x;
}

// A row of an array of any strides.
template <class X> __device__ __forceinline__ const typename X::element *row_of(const void *x, int64_t stride) {
    return static_cast<const typename X::element *>(x) + blockIdx.x * stride;
}

// A unit of values as they lie in memory.
template <class X> struct Raw {
    uint4 piece[PIECES<X>];

    // Zeros past k. `once`: past L1.
    template <bool once = true> __device__ __forceinline__ void load(const typename X::element *row, int turn, int k) {
#pragma unroll
        for (int j = 0; j < PIECES<X>; ++j) {
            const int first = first_of<X>(turn, j);
            const auto *from = reinterpret_cast<const uint4 *>(row + first);
            piece[j] = make_uint4(0, 0, 0, 0);
            if (first < k) piece[j] = once ? load_weights(reinterpret_cast<const uint8_t *>(from)) : *from;
        }
    }
    __device__ __forceinline__ void store(typename X::element *row, int turn, int k) const {
#pragma unroll
        for (int j = 0; j < PIECES<X>; ++j) {
            const int first = first_of<X>(turn, j);
            if (first < k) *reinterpret_cast<uint4 *>(row + first) = piece[j];
        }
    }
    // Values 4 * i .. 4 * i + 3, widened when they are needed.
    __device__ __forceinline__ float4 four(int i) const {
        constexpr int SIZE = Piece<X>::SIZE;
        float f[SIZE];
        Piece<X>::floats(piece[4 * i / SIZE], f);
        const int at = 4 * i % SIZE;
        return make_float4(f[at], f[at + 1], f[at + 2], f[at + 3]);
    }
};

// A Source reads rows: units to be kept in registers, or values one by one. Made before the wait for the kernel before,
// it may read weights; `begin` is the first that reads x, and every thread of the block comes to it. ROW: it takes all of
// a row to know one value. EXACT: values that a Divider knows no shorter way for. This Source is x as it is; 16-bit
// values stay packed.
template <class X> struct Plain {
    using Unit = Raw<X>;
    static constexpr bool ROW = false, EXACT = sizeof(typename X::element) != 2;
    const ActivationArgs &a;

    __device__ __forceinline__ Plain(const ActivationArgs &args, bool) : a(args) {}
    __device__ __forceinline__ void begin(Unit (&kept)[KEPT]) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) kept[i].load(row_of<X>(a.x, a.x_stride), i, a.k);
    }
    static __device__ __forceinline__ uint32_t larger_of(uint32_t top, const Unit &unit) {
#pragma unroll
        for (int j = 0; j < PIECES<X>; ++j) top = larger<X>(top, unit.piece[j]);
        return top;
    }
    static __device__ __forceinline__ uint32_t bits_of(uint32_t top) { return largest<X>(top); }
    static __device__ __forceinline__ float4 four(const Unit &unit, int i) { return unit.four(i); }

    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ float at(int k) const { return X::to_float(row_of<X>(a.x, a.x_stride)[k * a.x_step]); }
};

// What Sources of computed values have in common. A maximum that passes NaN by is enough: a NaN becomes its code
// whatever the scale.
struct Floats {
    float v[UNIT_VALUES];
};

struct Computed {
    using Unit = Floats;
    static constexpr bool ROW = false, EXACT = true;
    static __device__ __forceinline__ uint32_t larger_of(uint32_t top, const Unit &unit) {
        float f = __uint_as_float(top);
#pragma unroll
        for (int i = 0; i < UNIT_VALUES; ++i) f = fmaxf(f, fabsf(unit.v[i]));
        return __float_as_uint(f);
    }
    static __device__ __forceinline__ uint32_t bits_of(uint32_t top) { return top; }
    static __device__ __forceinline__ float4 four(const Unit &unit, int i) {
        return make_float4(unit.v[4 * i], unit.v[4 * i + 1], unit.v[4 * i + 2], unit.v[4 * i + 3]);
    }
};

__device__ __forceinline__ uint32_t finite_larger(uint32_t top, float v) {
    return magnitude(v) < INFINITE ? max(top, magnitude(v)) : top;
}

// The largest finite magnitude of a unit.
template <class S> __device__ __forceinline__ uint32_t finite_of(uint32_t top, const typename S::Unit &unit) {
#pragma unroll
    for (int i = 0; i < UNIT_VALUES / 4; ++i) {
        const float4 v = S::four(unit, i);
        top = finite_larger(finite_larger(finite_larger(finite_larger(top, v.x), v.y), v.z), v.w);
    }
    return top;
}

// The largest finite magnitude of a row, for all threads.
template <class S> __device__ __forceinline__ uint32_t row_max(const typename S::Unit (&kept)[KEPT]) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) top = S::larger_of(top, kept[i]);
    top = block_max(S::bits_of(top));
    if (top < INFINITE) return top;
    top = 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) top = finite_of<S>(top, kept[i]);
    __syncthreads(); // every warp has read the maxima of before
    return block_max(top);
}

// The largest value of the eight threads that share a group; all threads of the warp come here together.
__device__ __forceinline__ uint32_t lanes_max(uint32_t top) {
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    return top;
}

// The largest finite magnitude of a group, for its eight threads.
template <class S> __device__ __forceinline__ uint32_t group_max(const typename S::Unit &unit) {
    const uint32_t top = lanes_max(S::bits_of(S::larger_of(0, unit)));
    return __any_sync(0xffffffffu, top >= INFINITE) ? lanes_max(finite_of<S>(0, unit)) : top;
}

// The scale of TENSOR, which the first block also writes. Of an amax of 0 it is 1; one that is not finite or not above
// 0 makes every code NaN.
__device__ __forceinline__ float tensor_scale(const ActivationArgs &a) {
    float scale = a.given ? *a.given : a.value;
    if (a.found && scale == 0.0f) scale = 1.0f; // blocks that come later find the 0 or the 1, all the same
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *a.scale = scale;
    return scale > 0.0f && scale < __uint_as_float(INFINITE) ? scale : __uint_as_float(0x7fffffffu);
}

// Values of a larger magnitude have the largest code, and would not fit a Divider.
__device__ __forceinline__ float bound_of(float scale) { return fminf(scale * 0x1p20f, 0x1.fffffep127f); }
__device__ __forceinline__ float clipped(float v, float bound) {
    return magnitude(v) < INFINITE ? fmaxf(fminf(v, bound), -bound) : v;
}

template <bool E5M2> __device__ __forceinline__ uint32_t float2_to_code(float first, float second) {
    return E5M2 ? float2_to_e5m2(first, second) : float2_to_e4m3(first, second);
}
template <bool E5M2, class D> __device__ __forceinline__ uint32_t four_codes(const float4 &v, const D &by) {
    return float2_to_code<E5M2>(by.divide(v.x), by.divide(v.y)) | float2_to_code<E5M2>(by.divide(v.z), by.divide(v.w))
                                                                      << 16;
}
__device__ __forceinline__ float unit_of(bool e5m2) { return e5m2 ? 0x1p-7f : 1.0f; }

// Whether one of four codes is NaN as float2_to_code has it, in its seven low bits.
__device__ __forceinline__ bool any_nan(uint32_t codes) {
    return ((codes & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u) != 0;
}

template <class S, class X, bool E5M2, bool BOUND, class D>
__device__ __forceinline__ void encode(const typename S::Unit &unit, const D &by, uint8_t *codes, int turn, int k,
                                       float bound = 0.0f) {
    constexpr int FOURS = Piece<X>::SIZE / 4;
#pragma unroll
    for (int j = 0; j < PIECES<X>; ++j) {
        uint32_t words[FOURS];
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const float4 v = S::four(unit, j * FOURS + i);
            words[i] = four_codes<E5M2>(v, by);
            // NaN, Inf, or so large that the division overflowed: that has the largest code.
            if (BOUND && any_nan(words[i]))
                words[i] = four_codes<E5M2>(
                    make_float4(clipped(v.x, bound), clipped(v.y, bound), clipped(v.z, bound), clipped(v.w, bound)),
                    by);
        }
        const int first = first_of<X>(turn, j);
        if (first >= k) continue;
        if constexpr (FOURS == 2)
            *reinterpret_cast<uint2 *>(codes + first) = make_uint2(words[0], words[1]);
        else
            *reinterpret_cast<uint32_t *>(codes + first) = words[0];
    }
}

template <class S, class X, int MODE, bool E5M2> __device__ __forceinline__ void quantize_row(const ActivationArgs &a) {
    let_next_start();
    S source(a, true);
    wait_for_previous(); // what stands above reads weights alone
    const float scale_of_tensor = MODE == TENSOR ? tensor_scale(a) : 0.0f;
    if (a.m == 0) return;
    uint8_t *codes = a.codes + blockIdx.x * a.codes_stride;
    typename S::Unit kept[KEPT];
    source.begin(kept);
    if constexpr (MODE == TENSOR) {
        const Divider<true> by(scale_of_tensor);
        const float bound = bound_of(scale_of_tensor);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) encode<S, X, E5M2, true>(kept[i], by, codes, i, a.k, bound);
    } else if constexpr (MODE == TOKEN) {
        const float scale = scale_of(row_max<S>(kept), unit_of(E5M2));
        if (threadIdx.x == 0) a.scale[blockIdx.x * a.scale_stride] = scale;
        const Divider<S::EXACT> by(scale);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) encode<S, X, E5M2, false>(kept[i], by, codes, i, a.k);
    } else {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const float scale = scale_of(group_max<S>(kept[i]), unit_of(E5M2));
            const int first = first_of<X>(i, 0);
            if (threadIdx.x % LANES == 0 && first < a.k)
                a.scale[blockIdx.x * a.scale_stride + first / GROUP_VALUES] = scale;
            encode<S, X, E5M2, false>(kept[i], Divider<S::EXACT>(scale), codes, i, a.k);
        }
    }
}

// The same, value by value.
template <class S, class X> __device__ __forceinline__ void quantize_any(const ActivationArgs &a) {
    let_next_start();
    S source(a, false);
    wait_for_previous();
    float scale = a.mode == TENSOR ? tensor_scale(a) : 0.0f;
    if (a.m == 0) return;
    uint8_t *codes = a.codes + blockIdx.x * a.codes_stride;
    const int turns = turns_of(a.k);
    source.begin();
    uint32_t top = 0;
    const auto take = [&](int at, int) { top = finite_larger(top, source.at(at)); };
    if (a.mode == TOKEN) {
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) for_values<X>(turn, a.k, take);
        scale = scale_of(block_max(top), unit_of(a.e5m2));
        if (threadIdx.x == 0) a.scale[blockIdx.x * a.scale_stride] = scale;
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        if (a.mode == GROUP) {
            top = 0;
            for_values<X>(turn, a.k, take);
            scale = scale_of(lanes_max(top), unit_of(a.e5m2));
            const int first = first_of<X>(turn, 0) / GROUP_VALUES;
            if (threadIdx.x % LANES == 0 && first * GROUP_VALUES < a.k)
                a.scale[blockIdx.x * a.scale_stride + first] = scale;
        }
        const Divider<true> by(scale);
        const float bound = bound_of(scale);
        for_values<X>(turn, a.k, [&](int at, int) {
            const float q = by.divide(clipped(source.at(at), bound));
            codes[at] = static_cast<uint8_t>(a.e5m2 ? float2_to_e5m2(q, 0.0f) : float2_to_e4m3(q, 0.0f));
        });
    }
}

#define ENTRY(name, S, X, MODE, e5m2)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS<S<X>, X, MODE>, BLOCKS<S<X>, X, MODE>)                        \
        name(const __grid_constant__ ActivationArgs a) {                                                               \
        quantize_row<S<X>, X, MODE, e5m2>(a);                                                                          \
    }
#define ENTRIES(name, S, X, code, e5m2)                                                                                \
    ENTRY(name##_tensor_##code, S, X, TENSOR, e5m2)                                                                    \
    ENTRY(name##_token_##code, S, X, TOKEN, e5m2)                                                                      \
    ENTRY(name##_group_##code, S, X, GROUP, e5m2)
#define ANY_ENTRY(name, S, X)                                                                                          \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS) name##_any(const __grid_constant__ ActivationArgs a) {   \
        quantize_any<S<X>, X>(a);                                                                                      \
    }
// Of computed values float32 x and e5m2 codes are left to `_any`.
#define COMPUTED_ENTRIES(name, S)                                                                                      \
    ENTRIES(name##_bfloat16, S, BF16, e4m3fn, false)                                                                   \
    ENTRIES(name##_float16, S, F16, e4m3fn, false)                                                                     \
    ANY_ENTRY(name##_bfloat16, S, BF16)                                                                                \
    ANY_ENTRY(name##_float16, S, F16)                                                                                  \
    ANY_ENTRY(name##_float32, S, F32)
