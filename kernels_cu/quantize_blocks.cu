// quantize_*: x [m, k] to blocks of a row with a scale each: 16 of e2m1 with e4m3fn scales and a float32 factor g for all
// of x or for each row (nvfp4), 32 of e2m1 (mxfp4), e4m3fn or e5m2 (mxfp8) with e8m0. codes = element(x / (scale * g)).
// x bf16, f16, f32 or f64 (rounded to f32 first), any strides in elements; codes [m, k], two e2m1 a byte, the first in the
// low half; scale [m, blocks]. Entries without `_any`: rows of x and their codes are whole 16- and 8-byte pieces, blocks
// are whole. amax_*: the largest magnitude of x. dequantize_*: x = code * scale * g, rounded once, then to 16 bits.
// values_*: the same of x's codes at once, without the factor of their row: 16 bits (below sm_80 of mx formats 32).
// Grid (max(m, 1), parts of a row), or (max(m, 1), 1) where a block knows its row (`token`, values_*).
// Shared memory: a value a warp. A thread has KEPT units of 16 values, each a block, or half of one beside its neighbour.
// Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3; the rules are cufp8/block_scaled.py's.
#include "blocks.cuh"
#include "scaling.cuh"

struct BlockArgs {
    void *x;        // dequantize_* write it
    uint8_t *codes; // values_*: the values, and codes_stride counts them
    uint8_t *scale;
    float *factor;      // g: of all, or of each row; values_* the row's factor, of mx formats a power of two
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

enum Rule { RCEIL, FLOOR, EVEN };
enum Mode { NONE, TOKEN, AMAX, GIVEN };

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

__device__ __forceinline__ float element_of(uint32_t code, int format) {
    if (is_e2m1(format)) return f16x2_to_float2(e2m1_halves(code)).x * E2M1_FACTOR;
    return f16x2_to_float2(format == MXFP8_E4M3 ? e4m3_halves<0>(code) : e5m2_halves<0>(code)).x;
}

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

// Codes of a unit, and the code of its block's scale.
template <int FORMAT> struct Coded {
    static constexpr int WORDS = is_e2m1(FORMAT) ? 2 : 4;
    uint32_t word[WORDS] = {};
    uint32_t scale = 0;

    // One more in front of the others.
    __device__ __forceinline__ void push(uint32_t code) {
        constexpr int BITS = 32 / (UNIT / WORDS);
#pragma unroll
        for (int i = WORDS - 1; i; --i) word[i] = __funnelshift_l(word[i - 1], word[i], BITS);
        word[0] = word[0] << BITS | code;
    }
};

// Of the unit that begins at `first` of its row; `top`: the largest magnitude of its block.
template <class X, int FORMAT>
__device__ __forceinline__ Coded<FORMAT> encode(const BlockArgs &a, const Unit<X> &unit, uint32_t top, int first,
                                                const Factor &factor) {
    Coded<FORMAT> coded;
    const auto *row = row_of<X>(a);
    if (top >= (FORMAT == NVFP4 ? factor.limit : INFINITE)) {
        if constexpr (is_e2m1(FORMAT))
            coded.scale = nan_scale(FORMAT);
        else {
            coded.scale = e8m0_code(finite_max<X>(row + first / 32 * 32, 32), FORMAT, a.rule);
#pragma unroll 1
            for (int i = UNIT - 1; i >= 0; --i) {
                const float v = X::to_float(row[first + i]);
                coded.push(magnitude(v) < INFINITE ? fp8_code(v * power_of(coded.scale), FORMAT) : 0x7f);
            }
        }
    } else if constexpr (FORMAT == NVFP4) {
        coded.scale = factor.scale.code(top);
        const float by = e4m3_to_float2<0>(coded.scale).x * factor.g;
        if (by == 0.0f || (usual(by) && __uint_as_float(top) <= 8.0f * by)) {
            const ByScale<sizeof(typename X::element) != 2> divider(by);
            coded.word[0] = eight_e2m1(unit.half[0], divider), coded.word[1] = eight_e2m1(unit.half[1], divider);
        } else {
#pragma unroll 1
            for (int i = UNIT - 1; i >= 0; --i) coded.push(e2m1_code(X::to_float(row[first + i]) / by));
        }
    } else {
        coded.scale = e8m0_code(top, FORMAT, a.rule);
        if constexpr (FORMAT == MXFP4) {
            const ByPower divider(power_of(coded.scale));
            coded.word[0] = eight_e2m1(unit.half[0], divider), coded.word[1] = eight_e2m1(unit.half[1], divider);
        } else {
            const uint2 low = eight_fp8<FORMAT>(unit.half[0], power_of(coded.scale));
            const uint2 high = eight_fp8<FORMAT>(unit.half[1], power_of(coded.scale));
            coded.word[0] = low.x, coded.word[1] = low.y, coded.word[2] = high.x, coded.word[3] = high.y;
        }
    }
    return coded;
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

// The largest finite magnitude of the row that this block's units are.
template <class X> __device__ __forceinline__ uint32_t row_max(const BlockArgs &a, const Units<X, KEPT<X>> &units) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < KEPT<X>; ++i) top = max(top, units.top(i));
    top = block_max(top);
    if (top < INFINITE) return top;
    top = 0;
#pragma unroll 1
    for (int i = 0; i < KEPT<X>; ++i)
        if (units.first(i) < static_cast<int>(a.k)) top = max(top, finite_max<X>(row_of<X>(a) + units.first(i), UNIT));
    __syncthreads(); // every warp has read the maxima of before
    return block_max(top);
}

// Calls store(i, codes and scale, the largest magnitude of its block) for each of this thread's units.
template <int FORMAT, class X, class Store>
__device__ __forceinline__ void encode_units(const BlockArgs &a, const Units<X, KEPT<X>> &units, const Factor &factor,
                                             Store store) {
#pragma unroll
    for (int i = 0; i < KEPT<X>; ++i) {
        uint32_t top = units.top(i);
        if constexpr (FORMAT != NVFP4) top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
        if (units.first(i) < static_cast<int>(a.k))
            store(i, encode<X, FORMAT>(a, units.unit[i], top, units.first(i), factor), top);
    }
}

template <class X, int FORMAT, bool BY_ROW> __device__ __forceinline__ void quantize_units(const BlockArgs &a) {
    let_next_start();
    wait_for_previous();
    float g = FORMAT == NVFP4 && !BY_ROW ? tensor_factor(a) : 1.0f;
    if (a.m == 0) return;
    Units<X, KEPT<X>> units;
    units.load(a);
    if constexpr (BY_ROW) {
        g = factor_of(row_max(a, units));
        if (threadIdx.x == 0) a.factor[blockIdx.x] = g;
    }
    // Of the first unit; the others are as far apart as a block has threads.
    constexpr int CODE_BYTES = is_e2m1(FORMAT) ? UNIT / 2 : UNIT;
    uint8_t *codes = a.codes + blockIdx.x * a.codes_stride + units.first(0) / UNIT * CODE_BYTES;
    uint8_t *scale = a.scale + blockIdx.x * a.scale_stride + units.first(0) / block_of(FORMAT);
    const int codes_step = blockDim.x * CODE_BYTES, scale_step = blockDim.x * UNIT / block_of(FORMAT);
    encode_units<FORMAT>(a, units, Factor(g), [&](int i, const Coded<FORMAT> &coded, uint32_t top) {
        if (FORMAT != NVFP4 && top >= INFINITE && a.status) // of NVFP4 amax_* has told
            report<X>(a, row_of<X>(a), units.first(i), UNIT);
        if constexpr (is_e2m1(FORMAT))
            *reinterpret_cast<uint2 *>(codes + i * codes_step) = make_uint2(coded.word[0], coded.word[1]);
        else
            *reinterpret_cast<uint4 *>(codes + i * codes_step) =
                make_uint4(coded.word[0], coded.word[1], coded.word[2], coded.word[3]);
        if (FORMAT == NVFP4 || threadIdx.x % 2 == 0) scale[i * scale_step] = coded.scale;
    });
}

// --- the values that codes stand for ----------------------------------------------------------------------

// What values_* write. A product of e2m1 and e4m3 numbers has six bits and fits all three.
#if __CUDA_ARCH__ >= 800
template <int FORMAT> using Value = BF16;
#else // no products of bfloat16 there
template <int FORMAT> struct ValueOf {
    using type = F32;
};
template <> struct ValueOf<NVFP4> {
    using type = F16;
};
template <int FORMAT> using Value = typename ValueOf<FORMAT>::type;
#endif

// Values with e8m0 scales are divided by a power of two of their token, so that bfloat16 has them exactly: by 2^-3 while
// the largest scale is at most 2^60, whatever the others are. Else the largest becomes 2^63, so that no sum overflows
// that does not overflow itself, and blocks whose scales are less than 2^-187 of it lose bits, or all.
__device__ __forceinline__ int shift_of(uint32_t largest_scale) {
    return max(static_cast<int>(largest_scale) - (127 + 63), -3);
}

// What the element of a code is to be multiplied with; of e8m0 scales after the shift of the token.
__device__ __forceinline__ float multiplier(uint32_t scale, int format, int shift) {
    if (scale == nan_scale(format)) return not_a_number();
    if (format == NVFP4) return e4m3_to_float2<0>(scale).x;
    return __uint_as_float(max(static_cast<int>(scale) - shift, 0) << 23);
}

// Two values of V as memory has them, which they fit: of bfloat16 the upper halves of floats.
template <class V> __device__ __forceinline__ uint32_t pair_of(float2 v) {
    return V::from_float(v.x) | uint32_t(V::from_float(v.y)) << 16;
}
template <> __device__ __forceinline__ uint32_t pair_of<BF16>(float2 v) {
    return __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632);
}

template <int FORMAT>
__device__ __forceinline__ void put_values(typename Value<FORMAT>::element *to, const Coded<FORMAT> &coded, float by) {
    float2 pairs[UNIT / 2];
#pragma unroll
    for (int i = 0; i < UNIT / 2; ++i)
        if constexpr (is_e2m1(FORMAT))
            pairs[i] = f16x2_to_float2(e2m1_halves(coded.word[i / 4] >> i % 4 * 8 & 0xff));
        else if (i % 2 == 0) {
            const float2 even = f16x2_to_float2(e4m3_halves<0>(coded.word[i / 2]));
            const float2 odd = f16x2_to_float2(e4m3_halves<1>(coded.word[i / 2]));
            pairs[i] = make_float2(even.x, odd.x), pairs[i + 1] = make_float2(even.y, odd.y);
        }
    if (is_e2m1(FORMAT)) by *= E2M1_FACTOR;
#pragma unroll
    for (int i = 0; i < UNIT / 2; ++i) pairs[i].x *= by, pairs[i].y *= by;
    auto *pieces = reinterpret_cast<uint4 *>(to);
    if constexpr (sizeof(*to) == 4)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pieces[i] = make_uint4(__float_as_uint(pairs[2 * i].x), __float_as_uint(pairs[2 * i].y),
                                   __float_as_uint(pairs[2 * i + 1].x), __float_as_uint(pairs[2 * i + 1].y));
    else
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 *four = pairs + 4 * i;
            using V = Value<FORMAT>;
            pieces[i] = make_uint4(pair_of<V>(four[0]), pair_of<V>(four[1]), pair_of<V>(four[2]), pair_of<V>(four[3]));
        }
}

template <class X, int FORMAT> __device__ __forceinline__ void values_of_units(const BlockArgs &a) {
    let_next_start();
    wait_for_previous();
    Units<X, KEPT<X>> units;
    units.load(a);
    float g = a.value;
    int shift = 0;
    if (FORMAT != NVFP4 || a.mode == TOKEN) {
        const uint32_t top = row_max(a, units);
        g = factor_of(top);
        if (FORMAT != NVFP4) shift = shift_of(e8m0_code(top, FORMAT, a.rule)), g = __uint_as_float(127 + shift << 23);
    }
    if (threadIdx.x == 0) a.factor[blockIdx.x] = g;
    auto *to = reinterpret_cast<typename Value<FORMAT>::element *>(a.codes) + blockIdx.x * a.codes_stride;
    encode_units<FORMAT>(a, units, Factor(g), [&](int i, const Coded<FORMAT> &coded, uint32_t) {
        put_values<FORMAT>(to + units.first(i), coded, multiplier(coded.scale, FORMAT, shift));
    });
}

// --- any strides, any k -----------------------------------------------------------------------------------

// A value a lane: 16 or 32 lanes share a block. A whole warp comes here.
struct One {
    uint32_t code, scale;
    bool finite;
};
template <class X> __device__ __forceinline__ One encode_lane(const BlockArgs &a, int64_t at, float g) {
    const bool e2m1 = is_e2m1(a.format), in = at < a.k;
    const float v = in ? X::to_float(row_of<X>(a)[at * a.x_step]) : 0.0f;
    const bool finite = magnitude(v) < INFINITE;
    uint32_t top = finite ? magnitude(v) : 0;
#pragma unroll
    for (int d = 8; d; d /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    uint32_t bad = __ballot_sync(0xffffffffu, !finite);
    if (a.format == NVFP4)
        bad = bad >> (threadIdx.x & 16) & 0xffffu;
    else
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 16));

    if (a.format == NVFP4) {
        if (!usable(g) || bad) return {0, nan_scale(NVFP4), finite};
        const uint32_t scale = ScaleOfBlock(g).code(top);
        const float by = e4m3_to_float2<0>(scale).x * g;
        return {e2m1_code(by > 0.0f ? v / by : copysignf(0.0f, v)), scale, finite};
    }
    if (e2m1 && bad) return {0, nan_scale(MXFP4), finite};
    const uint32_t scale = e8m0_code(top, a.format, a.rule);
    const float quotient = v * power_of(scale);
    return {e2m1 ? e2m1_code(quotient) : finite ? fp8_code(quotient, a.format) : 0x7f, scale, finite};
}

template <class X> __device__ __forceinline__ uint32_t row_max(const BlockArgs &a) {
    const auto *row = row_of<X>(a);
    uint32_t top = 0;
    for (int64_t at = threadIdx.x; at < a.k; at += blockDim.x) {
        const uint32_t m = magnitude(X::to_float(row[at * a.x_step]));
        if (m < INFINITE) top = max(top, m);
    }
    return block_max(top);
}

template <class X> __device__ __forceinline__ void quantize_values(const BlockArgs &a) {
    let_next_start();
    wait_for_previous();
    float g = a.mode == AMAX || a.mode == GIVEN ? tensor_factor(a) : 1.0f;
    if (a.m == 0) return;
    if (a.mode == TOKEN) {
        g = factor_of(row_max<X>(a));
        if (threadIdx.x == 0) a.factor[blockIdx.x] = g;
    }
    uint8_t *codes = a.codes + blockIdx.x * a.codes_stride, *scale = a.scale + blockIdx.x * a.scale_stride;
    const int64_t step = int64_t(gridDim.y) * blockDim.x;
    for (int64_t first = int64_t(blockIdx.y) * blockDim.x; first < a.k; first += step) {
        const int64_t at = first + threadIdx.x;
        const One one = encode_lane<X>(a, at, g);
        if (a.status && !one.finite) report<X>(a, row_of<X>(a), at, 1);
        const uint32_t next = __shfl_down_sync(0xffffffffu, one.code, 1);
        if (at >= a.k) continue;
        if (!is_e2m1(a.format))
            codes[at] = one.code;
        else if (at % 2 == 0)
            codes[at / 2] = one.code | next << 4;
        if (at % block_of(a.format) == 0) scale[at / block_of(a.format)] = one.scale;
    }
}

// Rows of codes_stride values: zeros past k.
template <class X> __device__ __forceinline__ void values_of_values(const BlockArgs &a) {
    let_next_start();
    wait_for_previous();
    float g = a.value;
    int shift = 0;
    if (a.format != NVFP4 || a.mode == TOKEN) {
        const uint32_t top = row_max<X>(a);
        g = factor_of(top);
        if (a.format != NVFP4)
            shift = shift_of(e8m0_code(top, a.format, a.rule)), g = __uint_as_float(127 + shift << 23);
    }
    if (threadIdx.x == 0 && blockIdx.y == 0) a.factor[blockIdx.x] = g;
    const int64_t row = blockIdx.x * a.codes_stride, step = int64_t(gridDim.y) * blockDim.x;
    for (int64_t first = int64_t(blockIdx.y) * blockDim.x; first < a.codes_stride; first += step) {
        const int64_t at = first + threadIdx.x;
        const One one = encode_lane<X>(a, at, g);
        if (at >= a.codes_stride) continue;
        const float v = at < a.k ? element_of(one.code, a.format) * multiplier(one.scale, a.format, shift) : 0.0f;
        if (a.format == NVFP4)
            reinterpret_cast<Value<NVFP4>::element *>(a.codes)[row + at] = Value<NVFP4>::from_float(v);
        else
            reinterpret_cast<Value<MXFP4>::element *>(a.codes)[row + at] = Value<MXFP4>::from_float(v);
    }
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

template <class T> __device__ __forceinline__ T e8m0_to(uint32_t code);
template <> __device__ __forceinline__ float e8m0_to<float>(uint32_t code) {
    return code == nan_scale(MXFP4) ? not_a_number() : __uint_as_float(max(code << 23, 1u << 22)); // 0 is 2^-127
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
        T v = element_of(is_e2m1(a.format) ? codes[at / 2] >> at % 2 * 4 & 15 : codes[at], a.format);
        if (a.format == NVFP4)
            v = v * T(e4m3_scale(scale)) * g;
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
#define VALUES_ENTRY(dtype, X, format, FORMAT)                                                                         \
    ENTRY(values_##dtype##_##format, ROW_THREADS, 1, values_of_units<X, FORMAT>)
#define ENTRIES(dtype, X)                                                                                              \
    ENTRY(quantize_##dtype##_nvfp4, THREADS, 3, quantize_units<X, NVFP4, false>)                                       \
    ENTRY(quantize_##dtype##_nvfp4_token, ROW_THREADS, 1, quantize_units<X, NVFP4, true>)                              \
    ENTRY(quantize_##dtype##_mxfp4, THREADS, 3, quantize_units<X, MXFP4, false>)                                       \
    ENTRY(quantize_##dtype##_mxfp8_e4m3fn, THREADS, 3, quantize_units<X, MXFP8_E4M3, false>)                           \
    ENTRY(quantize_##dtype##_mxfp8_e5m2, THREADS, 3, quantize_units<X, MXFP8_E5M2, false>)                             \
    ENTRY(amax_##dtype, THREADS, 2, amax_units<X>)                                                                     \
    VALUES_ENTRY(dtype, X, nvfp4, NVFP4)                                                                               \
    VALUES_ENTRY(dtype, X, mxfp4, MXFP4)                                                                               \
    VALUES_ENTRY(dtype, X, mxfp8_e4m3fn, MXFP8_E4M3)                                                                   \
    ENTRY(values_##dtype##_any, THREADS, 4, values_of_values<X>)                                                       \
    ANY_ENTRIES(dtype, X, float)

ENTRIES(bfloat16, BF16)
ENTRIES(float16, F16)
ENTRIES(float32, F32)
ANY_ENTRIES(float64, F64, double)
