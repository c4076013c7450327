// quantize_*: x [m, k] to blocks of a row with a scale each: 16 of e2m1 with e4m3fn scales and a float32 factor g for all
// of x or for each row (nvfp4), 32 of e2m1 (mxfp4), e4m3fn or e5m2 (mxfp8) with e8m0. codes = element(x / (scale * g)).
// x bf16, f16, f32 or f64 (rounded to f32 first), any strides in elements; codes [m, k], two e2m1 a byte, the first in the
// low half; scale [m, blocks]. Entries without `_any`: rows of x and their codes are whole 16- and 8-byte pieces, blocks
// are whole. amax_*: the largest magnitude of x. dequantize_*: x = code * scale * g, rounded once, then to 16 bits.
// Grid (max(m, 1), parts of a row), or (max(m, 1), 1) where a block knows its row (`token`); kernels.blocks_launch.
// Shared memory: a value a warp. A thread has KEPT units of 16 values, each a block, or half of one beside its neighbour.
// Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3; the rules are cufp8/block_scaled.py's.
#include "memory.cuh"
#include "scaling.cuh"

struct BlockArgs {
    void *x; // dequantize_* write it
    uint8_t *codes;
    uint8_t *scale;
    float *factor;      // g: of all, or of each row
    const float *given; // GIVEN: g, or null; AMAX: the largest magnitude of x
    // Of weights, else null: [0] counts the values that are not finite as float32, [1] is the least index m * k + k of
    // them (2^64 - 1 before); their codes are anything. Without it, activations: they poison their value or their block.
    uint64_t *status;
    int64_t x_stride;
    int64_t x_step;
    int64_t codes_stride;
    int64_t scale_stride;
    int64_t k;
    int m;
    int format;  // of entries for any
    int rule;    // of e8m0 scales
    int mode;    // where g comes from
    float value; // GIVEN: g where none is given
};
static_assert(sizeof(BlockArgs) == ARGS_BYTES, "BlockArgs and kernels.BLOCK_ARGS must agree");

enum Format { NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2 };
enum Rule { RCEIL, FLOOR, EVEN };
enum Mode { NONE, TOKEN, AMAX, GIVEN };

constexpr int UNIT = 16;

__device__ __forceinline__ constexpr bool is_e2m1(int format) { return format <= MXFP4; }
__device__ __forceinline__ constexpr int block_of(int format) { return format == NVFP4 ? 16 : 32; }
__device__ __forceinline__ constexpr uint32_t nan_scale(int format) { return format == NVFP4 ? 0x7f : 0xff; }

// --- scales -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float factor_of(uint32_t amax) {
    return amax ? fmaxf(__uint_as_float(amax) / 2688.0f, 0x1p-126f) : 1.0f;
}

// g of all of x, which the first block also writes.
__device__ __forceinline__ float tensor_factor(const BlockArgs &a) {
    const float g = a.mode == AMAX ? factor_of(__float_as_uint(*a.given)) : a.given ? *a.given : a.value;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *a.factor = g;
    return g;
}

// A g with which nothing overflows.
__device__ __forceinline__ bool usable(float g) { return g > 0.0f && g <= 0x1p125f; }

// Codes of e4m3fn scales: 6 * g divides.
struct ScaleOfBlock {
    float most;
    Divider<true> by;
    __device__ __forceinline__ explicit ScaleOfBlock(float g)
        : most(6.0f * g * 512.0f), by(usable(g) ? 6.0f * g : 1.0f) {}
    __device__ __forceinline__ uint32_t code(uint32_t amax) const {
        return float2_to_e4m3(fminf(by.divide(fminf(__uint_as_float(amax), most)), 448.0f), 0.0f) & 0xff;
    }
};

// The code of an e8m0 scale of elements up to 6 (2^2 * 1.5), 448 (2^8 * 1.75) or 57344 (2^15 * 1.75).
__device__ __forceinline__ uint32_t e8m0_code(uint32_t amax, int format, int rule) {
    const float reciprocal = is_e2m1(format) ? 1.0f / 6.0f : format == MXFP8_E4M3 ? 1.0f / 448.0f : 1.0f / 57344.0f;
    const int emax = is_e2m1(format) ? 2 : format == MXFP8_E4M3 ? 8 : 15;
    const int mantissa_bits = is_e2m1(format) ? 1 : format == MXFP8_E4M3 ? 3 : 2;
    if (rule == RCEIL) { // up to the next power of two; of subnormals to 2^-127 or 2^-126
        const uint32_t bits = __float_as_uint(__uint_as_float(amax) * reciprocal);
        return bits + (bits < 0x800000u ? 0x3fffffu : 0x7fffffu) >> 23;
    }
    const uint32_t bits = amax + (rule == EVEN ? 1u << (22 - mantissa_bits) : 0u);
    return max(static_cast<int>(bits >> 23) - emax, 0);
}

// What divides by an e8m0 scale: 2^(127 - code), exact in float32; no finite float leads to the code 254.
__device__ __forceinline__ float power_of(uint32_t code) { return __uint_as_float(254 - code << 23); }

// --- e2m1 -------------------------------------------------------------------------------------------------

// 2^23 + the code of 2 * abs(h): to nearest, ties to even, saturated; NaN becomes 0. Steps of 1/4 up to h = 1, of 1/2 up
// to 2, and one more: what each adds is rounded to an integer by the sum, which is even where the next begins.
__device__ __forceinline__ float e2m1_sum(float h) {
    float low, middle, high;
    asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(low) : "f"(fabsf(h)), "f"(-0.0f));
    asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(middle) : "f"(fabsf(h)), "f"(-1.0f));
    asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(high) : "f"(fabsf(h)), "f"(-2.0f));
    return fmaf(middle, 2.0f, fmaf(low, 4.0f, 0x1p23f)) + high;
}
constexpr uint32_t SUM_BITS = 0x4b000000u;

__device__ __forceinline__ uint32_t e2m1_code(float quotient) {
    return (__float_as_uint(e2m1_sum(0.5f * quotient)) & 7) | __float_as_uint(quotient) >> 28 & 8;
}

// Half of v / scale: by a power of two ...
struct ByPower {
    float power;
    __device__ __forceinline__ explicit ByPower(float whole) : power(0.5f * whole) {}
    __device__ __forceinline__ float half(float v) const { return v * power; }
};

// ... or by 0, where it is 0, or by a `usual` float, where no remainder that matters is subnormal. As float32 rounds it:
// of float32 values exactly, as by a Divider; of 16-bit values wherever a code depends on it, but for a mantissa of ones:
// all were tried. There the reciprocal and what is missing from it are enough.
__device__ __forceinline__ bool usual(float by) {
    constexpr uint32_t LEAST = 127 - 100 << 23, RANGE = 200 << 23; // 2^-100 to 2^100
    return __float_as_uint(by) - LEAST < RANGE && (__float_as_uint(by) & 0x7fffffu) != 0x7fffffu;
}
template <bool EXACT> struct ByScale {
    float twice, reciprocal, near, missing;
    __device__ __forceinline__ explicit ByScale(float by) : twice(2.0f * by) {
        reciprocal = by > 0.0f ? __frcp_rn(twice) : 0.0f;
        near = EXACT && by > 0.0f ? __uint_as_float(__float_as_uint(reciprocal) - 1) : reciprocal;
        missing = fmaf(-twice, near, 1.0f) * near;
    }
    __device__ __forceinline__ float half(float v) const {
        const float h = fmaf(v, near, v * missing);
        return EXACT ? put_right(h, v, twice, reciprocal) : h;
    }
};

// --- units ------------------------------------------------------------------------------------------------

// Eight neighbours as they lie in memory.
template <class X> struct Eight {
    static constexpr int PIECES = 8 / Piece<X>::SIZE;
    uint4 piece[PIECES];

    __device__ __forceinline__ void floats(float (&f)[8]) const {
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            float some[Piece<X>::SIZE];
            Piece<X>::floats(piece[j], some);
#pragma unroll
            for (int i = 0; i < Piece<X>::SIZE; ++i) f[j * Piece<X>::SIZE + i] = some[i];
        }
    }
    // The sign of value i in bit 4 * i + 3.
    __device__ __forceinline__ uint32_t signs() const {
        if constexpr (PIECES == 1) {
            // The high bytes of values 0 2 1 3 and 4 6 5 7, then of the even and of the odd ones.
            const uint32_t first = __byte_perm(piece[0].x, piece[0].y, 0x7351);
            const uint32_t second = __byte_perm(piece[0].z, piece[0].w, 0x7351);
            const uint32_t even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
            return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
        } else {
            uint32_t found = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) found = found >> 4 | (word(piece[i / 4], i % 4) & 0x80000000u);
            return found;
        }
    }
};

template <class X> __device__ __forceinline__ const typename X::element *row_of(const BlockArgs &a) {
    return static_cast<const typename X::element *>(a.x) + blockIdx.x * a.x_stride;
}

template <class X> struct Unit {
    Eight<X> half[2];

    __device__ __forceinline__ void load(const typename X::element *from) {
#pragma unroll
        for (int j = 0; j < 2 * Eight<X>::PIECES; ++j) // through L1: the pieces of a thread are neighbours
            half[j / Eight<X>::PIECES].piece[j % Eight<X>::PIECES] = reinterpret_cast<const uint4 *>(from)[j];
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < 2 * Eight<X>::PIECES; ++j)
            half[j / Eight<X>::PIECES].piece[j % Eight<X>::PIECES] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ uint32_t larger_of(uint32_t top) const {
#pragma unroll
        for (int j = 0; j < 2 * Eight<X>::PIECES; ++j)
            top = larger<X>(top, half[j / Eight<X>::PIECES].piece[j % Eight<X>::PIECES]);
        return top;
    }
};

template <class X, class D> __device__ __forceinline__ uint32_t eight_e2m1(const Eight<X> &v, const D &by) {
    float f[8];
    v.floats(f);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) codes = codes * 16 + __float_as_uint(e2m1_sum(by.half(f[i])));
    codes -= SUM_BITS + (SUM_BITS << 4); // of eight: the others' are beyond the word
    return (codes & 0x77777777u) | v.signs();
}

template <int FORMAT, class X> __device__ __forceinline__ uint2 eight_fp8(const Eight<X> &v, float power) {
    float f[8];
    v.floats(f);
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float *p = f + 4 * i;
        if constexpr (FORMAT == MXFP8_E5M2)
            words[i] = float2_to_e5m2(p[0] * power, p[1] * power) | float2_to_e5m2(p[2] * power, p[3] * power) << 16;
        else
            words[i] = float2_to_e4m3(p[0] * power, p[1] * power) | float2_to_e4m3(p[2] * power, p[3] * power) << 16;
    }
    return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ uint32_t fp8_code(float v, int format) {
    return (format == MXFP8_E5M2 ? float2_to_e5m2(v, 0.0f) : float2_to_e4m3(v, 0.0f)) & 0xff;
}

// --- values that are not finite ---------------------------------------------------------------------------

// Tells of those among `count` values of a row.
template <class X>
__device__ __forceinline__ void report(const BlockArgs &a, const typename X::element *row, int64_t first, int count) {
    uint64_t found = 0, least = ~0ull;
#pragma unroll 1
    for (int i = 0; i < count; ++i)
        if (magnitude(X::to_float(row[(first + i) * a.x_step])) >= INFINITE)
            ++found, least = min(least, static_cast<uint64_t>(blockIdx.x * a.k + first + i));
    if (found) atomicAdd(a.status, found), atomicMin(a.status + 1, least);
}

template <class X> __device__ __forceinline__ uint32_t finite_max(const typename X::element *from, int count) {
    uint32_t top = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const uint32_t m = magnitude(X::to_float(from[i]));
        if (m < INFINITE) top = max(top, m);
    }
    return top;
}

// --- whole units ------------------------------------------------------------------------------------------

// What a row has in common for its units; of formats with e8m0 scales g is nothing.
struct Factor {
    float g;
    ScaleOfBlock scale;
    uint32_t limit; // magnitudes below it have codes
    __device__ __forceinline__ explicit Factor(float g) : g(g), scale(g), limit(usable(g) ? INFINITE : 0) {}
};

// Codes and scale of a unit, which go to these addresses; `top`: the largest magnitude of its block, `first`: where it
// begins in its row.
template <class X, int FORMAT>
__device__ __forceinline__ void encode(const BlockArgs &a, const Unit<X> &unit, uint32_t top, int first, uint8_t *codes,
                                       uint8_t *scale, const Factor &factor) {
    const auto *row = row_of<X>(a);
    const bool writes = FORMAT == NVFP4 || threadIdx.x % 2 == 0;
    if (top >= (FORMAT == NVFP4 ? factor.limit : INFINITE)) {
        if (FORMAT != NVFP4 && a.status) return report<X>(a, row, first, UNIT); // of NVFP4 amax_* has told
        if constexpr (is_e2m1(FORMAT)) {
            *reinterpret_cast<uint2 *>(codes) = make_uint2(0, 0);
            if (writes) *scale = nan_scale(FORMAT);
        } else {
            const uint32_t code = e8m0_code(finite_max<X>(row + first / 32 * 32, 32), FORMAT, a.rule);
            if (writes) *scale = code;
#pragma unroll 1
            for (int i = 0; i < UNIT; ++i) {
                const float v = X::to_float(row[first + i]);
                codes[i] = magnitude(v) < INFINITE ? fp8_code(v * power_of(code), FORMAT) : 0x7f;
            }
        }
    } else if constexpr (FORMAT == NVFP4) {
        const uint32_t code = factor.scale.code(top);
        const float by = e4m3_to_float2<0>(code).x * factor.g;
        uint2 words = make_uint2(0, 0);
        if (by == 0.0f || (usual(by) && __uint_as_float(top) <= 8.0f * by)) {
            const ByScale<sizeof(typename X::element) != 2> divider(by);
            words = make_uint2(eight_e2m1(unit.half[0], divider), eight_e2m1(unit.half[1], divider));
        } else {
#pragma unroll 1
            for (int i = UNIT - 1; i >= 0; --i) {
                words.y = words.y << 4 | words.x >> 28;
                words.x = words.x << 4 | e2m1_code(X::to_float(row[first + i]) / by);
            }
        }
        *scale = code;
        *reinterpret_cast<uint2 *>(codes) = words;
    } else {
        const uint32_t code = e8m0_code(top, FORMAT, a.rule);
        if (writes) *scale = code;
        if constexpr (FORMAT == MXFP4) {
            const ByPower divider(power_of(code));
            *reinterpret_cast<uint2 *>(codes) =
                make_uint2(eight_e2m1(unit.half[0], divider), eight_e2m1(unit.half[1], divider));
        } else {
            const uint2 low = eight_fp8<FORMAT>(unit.half[0], power_of(code));
            const uint2 high = eight_fp8<FORMAT>(unit.half[1], power_of(code));
            *reinterpret_cast<uint4 *>(codes) = make_uint4(low.x, low.y, high.x, high.y);
        }
    }
}

// The units of this thread, and the first value of each. Of rows this long an int is enough.
template <class X, int COUNT> struct Units {
    Unit<X> unit[COUNT];

    static __device__ __forceinline__ int first(int i) {
        return ((blockIdx.y * COUNT + i) * blockDim.x + threadIdx.x) * UNIT;
    }
    __device__ __forceinline__ void load(const BlockArgs &a) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (first(i) < static_cast<int>(a.k))
                unit[i].load(row_of<X>(a) + first(i));
            else
                unit[i].clear();
    }
    __device__ __forceinline__ uint32_t top(int i) const { return largest<X>(unit[i].larger_of(0)); }
};

template <class X> constexpr int KEPT = sizeof(typename X::element) == 2 ? KEPT_16 : KEPT_32;

template <class X, int FORMAT, bool BY_ROW> __device__ __forceinline__ void quantize_units(const BlockArgs &a) {
    let_next_start();
    wait_for_previous();
    float g = FORMAT == NVFP4 && !BY_ROW ? tensor_factor(a) : 1.0f;
    if (a.m == 0) return;
    const int k = static_cast<int>(a.k);
    Units<X, KEPT<X>> units;
    units.load(a);
    if constexpr (BY_ROW) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < KEPT<X>; ++i) top = max(top, units.top(i));
        top = block_max(top);
        if (top >= INFINITE) {
            top = 0;
#pragma unroll 1
            for (int i = 0; i < KEPT<X>; ++i)
                if (units.first(i) < k) top = max(top, finite_max<X>(row_of<X>(a) + units.first(i), UNIT));
            __syncthreads(); // every warp has read the maxima of before
            top = block_max(top);
        }
        g = factor_of(top);
        if (threadIdx.x == 0) a.factor[blockIdx.x] = g;
    }
    const Factor factor(g);
    // Of the first unit; the others are as far apart as a block has threads.
    uint8_t *codes = a.codes + blockIdx.x * a.codes_stride + (is_e2m1(FORMAT) ? units.first(0) / 2 : units.first(0));
    uint8_t *scale = a.scale + blockIdx.x * a.scale_stride + units.first(0) / block_of(FORMAT);
    const int codes_step = blockDim.x * (is_e2m1(FORMAT) ? UNIT / 2 : UNIT);
    const int scale_step = blockDim.x * UNIT / block_of(FORMAT);
#pragma unroll
    for (int i = 0; i < KEPT<X>; ++i) {
        uint32_t top = units.top(i);
        if constexpr (FORMAT != NVFP4) top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
        if (units.first(i) < k)
            encode<X, FORMAT>(a, units.unit[i], top, units.first(i), codes + i * codes_step, scale + i * scale_step,
                              factor);
    }
}

// --- any strides, any k -----------------------------------------------------------------------------------

// A value a lane: 16 or 32 lanes share a block. A whole warp comes here.
template <class X> __device__ __forceinline__ void encode_lanes(const BlockArgs &a, int64_t at, float g) {
    const bool e2m1 = is_e2m1(a.format), in = at < a.k;
    const auto *row = row_of<X>(a);
    const float v = in ? X::to_float(row[at * a.x_step]) : 0.0f;
    const bool finite = magnitude(v) < INFINITE;
    if (a.status && !finite) report<X>(a, row, at, 1);
    uint32_t top = finite ? magnitude(v) : 0;
#pragma unroll
    for (int d = 8; d; d /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    uint32_t bad = __ballot_sync(0xffffffffu, !finite);
    if (a.format == NVFP4)
        bad = bad >> (threadIdx.x & 16) & 0xffffu;
    else
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 16));

    uint32_t scale, code;
    if (a.format == NVFP4) {
        scale = nan_scale(NVFP4), code = 0;
        if (usable(g) && !bad) {
            scale = ScaleOfBlock(g).code(top);
            const float by = e4m3_to_float2<0>(scale).x * g;
            code = e2m1_code(by > 0.0f ? v / by : copysignf(0.0f, v));
        }
    } else {
        scale = e8m0_code(top, a.format, a.rule);
        const float quotient = v * power_of(scale);
        code = e2m1 ? e2m1_code(quotient) : finite ? fp8_code(quotient, a.format) : 0x7f;
        if (e2m1 && bad) scale = nan_scale(MXFP4), code = 0;
    }
    const uint32_t next = __shfl_down_sync(0xffffffffu, code, 1);
    uint8_t *codes = a.codes + blockIdx.x * a.codes_stride;
    if (!in) return;
    if (!e2m1)
        codes[at] = code;
    else if (at % 2 == 0)
        codes[at / 2] = code | next << 4;
    const int size = block_of(a.format);
    if (at % size == 0) a.scale[blockIdx.x * a.scale_stride + at / size] = scale;
}

template <class X> __device__ __forceinline__ void quantize_values(const BlockArgs &a) {
    let_next_start();
    wait_for_previous();
    float g = a.mode == AMAX || a.mode == GIVEN ? tensor_factor(a) : 1.0f;
    if (a.m == 0) return;
    if (a.mode == TOKEN) {
        const auto *row = row_of<X>(a);
        uint32_t top = 0;
        for (int64_t at = threadIdx.x; at < a.k; at += blockDim.x) {
            const uint32_t m = magnitude(X::to_float(row[at * a.x_step]));
            if (m < INFINITE) top = max(top, m);
        }
        g = factor_of(block_max(top));
        if (threadIdx.x == 0) a.factor[blockIdx.x] = g;
    }
    const int64_t step = int64_t(gridDim.y) * blockDim.x;
    for (int64_t first = int64_t(blockIdx.y) * blockDim.x; first < a.k; first += step)
        encode_lanes<X>(a, first + threadIdx.x, g);
}

// --- the largest magnitude --------------------------------------------------------------------------------

// Floats above 0 order as their bits do: any order of the blocks ends in the same.
__device__ __forceinline__ void raise(const BlockArgs &a, uint32_t top) {
    auto *amax = reinterpret_cast<uint32_t *>(a.factor);
    top = block_max(top);
    if (threadIdx.x == 0 && *const_cast<volatile uint32_t *>(amax) < top) atomicMax(amax, top);
}

template <class X> __device__ __forceinline__ void amax_units(const BlockArgs &a) {
    Units<X, KEPT<X>> units;
    units.load(a);
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < KEPT<X>; ++i) top = units.unit[i].larger_of(top);
    top = largest<X>(top);
    if (top >= INFINITE)
        for (int i = 0; i < KEPT<X>; ++i)
            if (units.first(i) < a.k) report<X>(a, row_of<X>(a), units.first(i), UNIT);
    raise(a, top);
}

template <class X> __device__ __forceinline__ void amax_values(const BlockArgs &a) {
    const auto *row = row_of<X>(a);
    const int64_t step = int64_t(gridDim.y) * blockDim.x;
    uint32_t top = 0;
    for (int64_t at = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; at < a.k; at += step) {
        const uint32_t m = magnitude(X::to_float(row[at * a.x_step]));
        if (m >= INFINITE) report<X>(a, row, at, 1);
        top = max(top, m);
    }
    raise(a, top);
}

// --- back -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float e2m1_to_float(uint32_t code) { // exponent and mantissa become a float16's, 2^-14 of it
    return f16x2_to_float2((code & 8) << 12 | (code & 7) << 9).x * 0x1p14f;
}

template <class T> __device__ __forceinline__ T e8m0_to(uint32_t code);
template <> __device__ __forceinline__ float e8m0_to<float>(uint32_t code) {
    return __uint_as_float(code ? code == 0xff ? 0x7fffffffu : code << 23 : 0x400000u);
}
template <> __device__ __forceinline__ double e8m0_to<double>(uint32_t code) { return e8m0_to<float>(code); }

// Products in T: of code and scale exact, or rounded once; of an e4m3fn scale and g rounded once.
template <class X, class T> __device__ __forceinline__ void dequantize(const BlockArgs &a) {
    auto *row = static_cast<typename X::element *>(a.x) + blockIdx.x * a.x_stride;
    const uint8_t *codes = a.codes + blockIdx.x * a.codes_stride, *scales = a.scale + blockIdx.x * a.scale_stride;
    const T g = a.format == NVFP4 ? a.factor[a.mode == TOKEN ? blockIdx.x : 0] : 1.0f;
    const int64_t step = int64_t(gridDim.y) * blockDim.x;
    for (int64_t at = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; at < a.k; at += step) {
        const uint32_t scale = scales[at / block_of(a.format)];
        T v;
        if (is_e2m1(a.format))
            v = e2m1_to_float(codes[at / 2] >> at % 2 * 4);
        else if (a.format == MXFP8_E4M3)
            v = (codes[at] & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : e4m3_to_float2<0>(codes[at]).x;
        else
            v = f16x2_to_float2(uint32_t(codes[at]) << 8).x;
        if (a.format == NVFP4)
            v = v * T(scale == 0x7f ? __uint_as_float(0x7fffffffu) : e4m3_to_float2<0>(scale).x) * g;
        else
            v *= e8m0_to<T>(scale);
        if constexpr (sizeof(T) == 8)
            row[at] = v;
        else
            row[at] = X::from_float(v);
    }
}

#define ENTRY(name, threads, blocks, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ BlockArgs a) {          \
        __VA_ARGS__(a);                                                                                                \
    }
#define ANY_ENTRIES(dtype, X, T)                                                                                       \
    ENTRY(quantize_##dtype##_any, THREADS, 4, quantize_values<X>)                                                      \
    ENTRY(amax_##dtype##_any, THREADS, 4, amax_values<X>)                                                              \
    ENTRY(dequantize_##dtype, THREADS, 4, dequantize<X, T>)
#define ENTRIES(dtype, X)                                                                                              \
    ENTRY(quantize_##dtype##_nvfp4, THREADS, 3, quantize_units<X, NVFP4, false>)                                       \
    ENTRY(quantize_##dtype##_nvfp4_token, ROW_THREADS, 1, quantize_units<X, NVFP4, true>)                              \
    ENTRY(quantize_##dtype##_mxfp4, THREADS, 3, quantize_units<X, MXFP4, false>)                                       \
    ENTRY(quantize_##dtype##_mxfp8_e4m3fn, THREADS, 3, quantize_units<X, MXFP8_E4M3, false>)                           \
    ENTRY(quantize_##dtype##_mxfp8_e5m2, THREADS, 3, quantize_units<X, MXFP8_E5M2, false>)                             \
    ENTRY(amax_##dtype, THREADS, 2, amax_units<X>)                                                                     \
    ANY_ENTRIES(dtype, X, float)

ENTRIES(bfloat16, BF16)
ENTRIES(float16, F16)
ENTRIES(float32, F32)
ANY_ENTRIES(float64, F64, double)
