// How the codes and block scales of a weight lie, and how they become operands of products. One format a binary, named
// by WEIGHT.
// A tile is 16 channels (a unit) by 64 of k (a step): codes, then the scales of its blocks. It is what a warp needs for
// four mma: lane l has the channels l / 4 and l / 4 + 8, of product j the k = 16 * j + 8 * h + 2 * (l % 4) + e.
//   8-bit codes, 1 KiB: byte 4 * j + 2 * e + h of lane l at 16 * l, of the second channel 512 bytes on.
//   4-bit codes, 512 bytes: word j of lane l at 16 * l has the eight of product j, pairs of e = 0, 1 in the order
//   first channel, second, first with h = 1, second with h = 1, in the bits that `e2m1_pair` takes them from.
//   Scales, a word (MX) or two (NVFP4) for each r = 0 .. 7: two by k of channel r, then those of channel r + 8, and the
//   word turned to the left by SCALE_TURN, so that one mask leaves a scale of each channel where its half needs it.
// NVFP4 keeps the scale 2^E * 1.mmm as the byte (E + 9) * 8 + mmm + 1, 0 as ZERO_SCALE and -0 as one more. MX keeps e8m0
// codes. 128 x 128 blocks have their scales, float32, in an array of their own: LinearArgs::scale.
// Products are exact: a scale is folded into the values where their product is a number of x's dtype, else it multiplies
// float32 sums of the stretch that it covers (SCALES_SUMS).
// Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 5.4; PTX ISA, mma.sync.m16n8k16.
#pragma once
#include "memory.cuh"

enum Format { FP8, FP8_BLOCK, MXFP8, MXFP4, NVFP4 }; // in the order of kernels.WEIGHTS
constexpr Format FORMAT = Format(WEIGHT);
constexpr bool FP4 = FORMAT == MXFP4 || FORMAT == NVFP4, MX = IS_MX;
constexpr bool CHANNEL_SCALES = FORMAT == FP8 || FORMAT == NVFP4; // the epilogue multiplies

constexpr int UNIT = 16, STEP = 64;
constexpr int PIECES = FP4 ? 1 : 2;                           // of 16 bytes that a lane has of a tile's codes
constexpr int LANE_SCALES = FORMAT == NVFP4 ? 8 : MX ? 4 : 0; // bytes of scales that a lane needs of a tile
constexpr int CODE_BYTES = PIECES * 512;
constexpr int SCALE_TURN = MX ? 7 : 4; // bits
static_assert(TILE_BYTES == CODE_BYTES + 8 * LANE_SCALES, "weights.cuh and kernels.WEIGHTS must agree");

constexpr uint32_t ZERO_SCALE = 209; // what it means for bfloat16 and float16 times any value is 0 after rounding

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// Whether scales multiply sums in products of x on tensor cores (kernels.Weight.scales_sums).
template <class X> constexpr bool SCALES_SUMS = same<X, BF16> ? SUMS_BFLOAT16 : same<X, F16> ? SUMS_FLOAT16 : true;

// What sums are to be multiplied with: folded scales of NVFP4 are too small by as much.
template <class X> constexpr float SUM_FACTOR = FORMAT != NVFP4 ? 1.0f : same<X, F16> ? 16384.0f : 256.0f;

__device__ __forceinline__ float e8m0_to_float(uint32_t code) {
    return __uint_as_float(max(code << 23, 1u << 22)); // 0 is 2^-127
}

__device__ __forceinline__ uint32_t turn_left(uint32_t word, int bits) { return __funnelshift_l(word, word, bits); }
__device__ __forceinline__ uint32_t turn_right(uint32_t word, int bits) { return __funnelshift_r(word, word, bits); }

// Pair i of a word of e2m1 codes: the sign at bit 15 and the rest at bits 8 to 6 of each half, which is 2^-126 of the
// value in bfloat16. The bits of pair 1 lie 6 to the right, those of pair 2 12 (around the word), of pair 3 2 or, one of
// them, 6 to the left: no shift of one pattern leaves room for four.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t word, int i) {
    constexpr uint32_t BITS = 0x81c081c0u;
    if (i == 0) return word & BITS;
    if (i == 1) return word << 6 & BITS;
    if (i == 2) return turn_left(word, 12) & BITS;
    return (word << 2 & 0x80c080c0u) | (word >> 6 & 0x01000100u);
}

// The word that such pairs come from.
__device__ __forceinline__ uint32_t e2m1_word(const uint32_t (&pairs)[4]) {
    return pairs[0] | pairs[1] >> 6 | turn_right(pairs[2], 12) | (pairs[3] & 0x80c080c0u) >> 2 |
           (pairs[3] & 0x01000100u) << 6;
}

// Such a pair with the bits 8 to 6 at 11 to 9: 2^-14 of the value in float16.
__device__ __forceinline__ uint32_t e2m1_pair_f16(uint32_t pair) { return (pair & 0x01c001c0u) * 7 + pair; }

// A half of a word, in both halves: as an operand of a product of pairs it costs nothing.
template <int HALF> __device__ __forceinline__ uint32_t both_halves(uint32_t word) {
    uint32_t both;
    if (HALF)
        asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, hi}; }" : "=r"(both) : "r"(word));
    else
        asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {lo, lo}; }" : "=r"(both) : "r"(word));
    return both;
}

template <class X> __device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
    uint32_t product;
    if constexpr (same<X, F16>)
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    else // the addend is -0
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

// From a lane's first piece of a tile to its scales.
__device__ __forceinline__ int to_scales(int lane) { return CODE_BYTES - lane * 16 + lane / 4 * LANE_SCALES; }

// What a lane needs of a tile.
struct Codes {
    uint4 pieces[PIECES] = {};
    uint32_t scales[2] = {};  // NVFP4 of products 0 and 1, then of 2 and 3; MX of all
    float block_scale = 0.0f; // of 128 x 128 blocks; kernels set it

    Codes() = default;
    // From shared memory: where the lane's first piece and its scales are.
    __device__ __forceinline__ Codes(const uint8_t *codes, const uint8_t *scale_bytes) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) pieces[i] = *reinterpret_cast<const uint4 *>(codes + i * 512);
        if constexpr (LANE_SCALES == 4) scales[0] = *reinterpret_cast<const uint32_t *>(scale_bytes);
        if constexpr (LANE_SCALES == 8) {
            const uint2 both = *reinterpret_cast<const uint2 *>(scale_bytes);
            scales[0] = both.x, scales[1] = both.y;
        }
    }
    // From a tile in global memory, past L1: where the lane's first piece is.
    static __device__ __forceinline__ Codes ask(const uint8_t *from, int lane) {
        Codes codes;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) codes.pieces[i] = load_weights(from + i * 512);
#pragma unroll
        for (int i = 0; i < LANE_SCALES / 4; ++i) codes.scales[i] = load_scales(from + to_scales(lane) + 4 * i);
        return codes;
    }

    // A of product j along k; where scales multiply sums (SUMS), of the codes alone.
    template <class X, bool SUMS = SCALES_SUMS<X>> __device__ __forceinline__ uint4 operand(int j) const {
        if constexpr (FP4) {
            const uint32_t eight = word(pieces[0], j), two = multipliers<X, SUMS>(j);
            const uint32_t by[2] = {both_halves<0>(two), both_halves<1>(two)};
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t small = e2m1_pair(eight, i);
                pair[i] = multiply_pair<X>(same<X, F16> ? e2m1_pair_f16(small) : small, by[i % 2]);
            }
            return make_uint4(pair[0], pair[1], pair[2], pair[3]);
        } else {
            const uint32_t lo = word(pieces[0], j), hi = word(pieces[1], j);
            if constexpr (FORMAT == MXFP8 && !SUMS) {
                const uint32_t two = multipliers<X, SUMS>(j), first = both_halves<0>(two), second = both_halves<1>(two);
                return make_uint4(e4m3_to_bf16x2<0>(lo, first), e4m3_to_bf16x2<0>(hi, second),
                                  e4m3_to_bf16x2<1>(lo, first), e4m3_to_bf16x2<1>(hi, second));
            } else
                return make_uint4(X::template from_codes<0>(lo), X::template from_codes<0>(hi),
                                  X::template from_codes<1>(lo), X::template from_codes<1>(hi));
        }
    }

    // The same codes of one channel of the two, in float32: pairs of e = 0, 1 with h = 0, then with h = 1.
    __device__ __forceinline__ float4 values(int channel, int j) const {
        if constexpr (FP4) {
            const float2 lo = bf16x2_to_float2(e2m1_pair(word(pieces[0], j), channel));
            const float2 hi = bf16x2_to_float2(e2m1_pair(word(pieces[0], j), channel + 2));
            return make_float4(lo.x * 0x1p126f, lo.y * 0x1p126f, hi.x * 0x1p126f, hi.y * 0x1p126f);
        } else {
            const uint32_t four = word(pieces[channel], j);
            const float2 lo = e4m3_to_float2<0>(four), hi = e4m3_to_float2<1>(four);
            return make_float4(lo.x, lo.y, hi.x, hi.y);
        }
    }

    // What sums of product j of a channel are to be multiplied with.
    __device__ __forceinline__ float scale(int channel, int j) const {
        if constexpr (FORMAT == FP8_BLOCK) return block_scale;
        if constexpr (LANE_SCALES > 0) {
            const int first_bit = 16 * channel + (MX ? j / 2 : j % 2) * 8 + SCALE_TURN;
            const uint32_t byte = turn_right(scales[MX ? 0 : j / 2], first_bit) & 0xff;
            if (MX) return e8m0_to_float(byte);
            return byte >= ZERO_SCALE ? 0.0f : __uint_as_float((byte + 943) << 20);
        }
        return 1.0f;
    }

    // 4-bit codes: products 2 and 3 become 0 and 1.
    __device__ __forceinline__ void turn() {
        pieces[0].x = pieces[0].z, pieces[0].y = pieces[0].w;
        scales[0] = MX ? turn_right(scales[0], 8) : scales[1];
    }

  private:
    // What the pairs of both channels' codes are multiplied with, in the two halves: the scale, and what their bits are
    // too small by, but for SUM_FACTOR.
    template <class X, bool SUMS> __device__ __forceinline__ uint32_t multipliers(int j) const {
        if (FP4 && SUMS) return same<X, F16> ? 0x74007400u : 0x7e807e80u; // 2^14, 2^126
        const uint32_t four = scales[MX ? 0 : j / 2], turned = (MX ? j / 2 : j % 2) ? turn_right(four, 8) : four;
        if (MX) return (turned & 0x7f807f80u) + (FP4 ? 0x3f003f00u : 0x3c003c00u);
        const uint32_t bits = turned & 0x0ff00ff0u;
        return same<X, F16> ? bits * 8 + 0x17801780u : bits + 0x75f075f0u;
    }
};

// sum += scale * part of a fragment of mma.cuh, of whose channels a lane has two; then part is empty.
__device__ __forceinline__ void add_part(float (&sum)[4], float (&part)[4], float first, float second) {
#pragma unroll
    for (int r = 0; r < 4; ++r) sum[r] = fmaf(r < 2 ? first : second, part[r], sum[r]), part[r] = 0.0f;
}
