// Codes and scales between the standard layout, row by row, and the kernels' (weights.cuh), where zeros stand past n and
// k. pack: the codes of y = packed(x), x with rows x_stride bytes apart: uint8 [n, k], or [n, ceil(k / 2)] with the first
// of two 4-bit codes in the low half. unpack: y = standard(codes), rows y_stride bytes apart. pack_scales,
// unpack_scales: the same for the scales of the tiles, uint8 [n, ceil(k / block)].
// Grid (steps, 65,535 at most of the units), block of 64: thread t has lane t % 32 of half t / 32 of a tile, 16 codes.
// Shared memory: none.
// No arithmetic: bits move.
#include "linear.cuh"

// Calls visit(unit, its tile) for every tile of a column of the grid.
template <class Visit> __device__ __forceinline__ void for_each_unit(const LinearArgs &a, Visit visit) {
    for (int unit = blockIdx.y; unit * int64_t(UNIT) < a.n; unit += gridDim.y) visit(unit, tile(a, unit, blockIdx.x));
}

// Of what stands in the layout that a.codes points to, the same place in a.y.
__device__ __forceinline__ uint8_t *in_y(const LinearArgs &a, const uint8_t *at) {
    return static_cast<uint8_t *>(a.y) + (at - a.codes);
}

#if TILE_BYTES >= 1024 // a code a byte
// Calls visit(byte in the lane's 16, channel, k) for this thread's part of a tile.
template <class Visit> __device__ __forceinline__ void for_each_code(int unit, Visit visit) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int64_t k = int64_t(blockIdx.x) * STEP + i / 4 * 16 + i % 2 * 8 + lane % 4 * 2 + i / 2 % 2;
        visit(i, unit * UNIT + half * 8 + lane / 4, k);
    }
}

extern "C" __global__ void __launch_bounds__(64) pack(const __grid_constant__ LinearArgs a) {
    for_each_unit(a, [&](int unit, const uint8_t *tile) {
        uint32_t words[4] = {};
        for_each_code(unit, [&](int i, int channel, int64_t k) {
            if (channel < a.n && k < a.k)
                words[i / 4] |= uint32_t(static_cast<const uint8_t *>(a.x)[channel * a.x_stride + k]) << i % 4 * 8;
        });
        reinterpret_cast<uint4 *>(in_y(a, tile))[threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
    });
}

extern "C" __global__ void __launch_bounds__(64) unpack(const __grid_constant__ LinearArgs a) {
    for_each_unit(a, [&](int unit, const uint8_t *tile) {
        const uint4 codes = reinterpret_cast<const uint4 *>(tile)[threadIdx.x];
        for_each_code(unit, [&](int i, int channel, int64_t k) {
            if (channel < a.n && k < a.k)
                static_cast<uint8_t *>(a.y)[channel * a.y_stride + k] =
                    static_cast<uint8_t>(word(codes, i / 4) >> i % 4 * 8);
        });
    });
}
#else
// Calls visit(word in the lane's 4, pair in it, channel, k of the first of the two) for this thread's part of a tile.
template <class Visit> __device__ __forceinline__ void for_each_pair(int unit, Visit visit) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int word = 2 * half + i / 4, pair = i % 4;
        const int64_t k = int64_t(blockIdx.x) * STEP + word * 16 + pair / 2 * 8 + lane % 4 * 2;
        visit(i / 4, pair, unit * UNIT + pair % 2 * 8 + lane / 4, k);
    }
}

extern "C" __global__ void __launch_bounds__(64) pack(const __grid_constant__ LinearArgs a) {
    for_each_unit(a, [&](int unit, const uint8_t *tile) {
        uint32_t pairs[2][4] = {};
        for_each_pair(unit, [&](int word, int pair, int channel, int64_t k) {
            if (channel < a.n && k < a.k) {
                const uint32_t two = static_cast<const uint8_t *>(a.x)[channel * a.x_stride + k / 2];
                const uint32_t second = k + 1 < a.k ? two >> 4 : 0;
                pairs[word][pair] = (two & 8) << 12 | (two & 7) << 6 | (second & 8) << 28 | (second & 7) << 22;
            }
        });
        reinterpret_cast<uint2 *>(in_y(a, tile))[threadIdx.x % 32 * 2 + threadIdx.x / 32] =
            make_uint2(e2m1_word(pairs[0]), e2m1_word(pairs[1]));
    });
}

extern "C" __global__ void __launch_bounds__(64) unpack(const __grid_constant__ LinearArgs a) {
    for_each_unit(a, [&](int unit, const uint8_t *tile) {
        const uint2 codes = reinterpret_cast<const uint2 *>(tile)[threadIdx.x % 32 * 2 + threadIdx.x / 32];
        for_each_pair(unit, [&](int word, int pair, int channel, int64_t k) {
            const uint32_t two = e2m1_pair(word ? codes.y : codes.x, pair);
            if (channel < a.n && k < a.k)
                static_cast<uint8_t *>(a.y)[channel * a.y_stride + k / 2] =
                    static_cast<uint8_t>((two >> 12 & 8) | (two >> 6 & 7) | (two >> 24 & 0x80) | (two >> 18 & 0x70));
        });
    });
}
#endif

#if TILE_BYTES != 1024 // scales in tiles
// A scale as tiles have it, and as it is.
__device__ __forceinline__ uint32_t kept_scale(uint32_t code) {
    if (MX) return code;
    if (code >= 8 && code < 0x80) return code + 17;
    if (code % 0x80 == 0) return ZERO_SCALE + code / 0x80; // 0 and -0
    const int place = 31 - __clz(code);                    // of the first bit of a subnormal
    return place * 8 + (code << (3 - place) & 7) + 1;
}

__device__ __forceinline__ uint32_t standard_scale(uint32_t kept) {
    if (MX) return kept;
    if (kept >= ZERO_SCALE) return (kept - ZERO_SCALE) * 0x80;
    return kept >= 25 ? kept - 17 : (8 + (kept - 1) % 8) >> (3 - (kept - 1) / 8);
}

constexpr int WORDS = LANE_SCALES / 4; // of scales for each r

// Calls visit(byte of this thread's word before it is turned, channel, block of k, whether there is such).
template <class Visit> __device__ __forceinline__ void for_each_scale(const LinearArgs &a, int unit, Visit visit) {
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
        const int channel = unit * UNIT + byte / 2 * 8 + threadIdx.x / WORDS;
        const int block = (blockIdx.x * WORDS + threadIdx.x % WORDS) * 2 + byte % 2;
        visit(byte, channel, block, channel < a.n && block * int64_t(STEP / 2 / WORDS) < a.k);
    }
}

extern "C" __global__ void __launch_bounds__(64) pack_scales(const __grid_constant__ LinearArgs a) {
    if (threadIdx.x < 8 * WORDS)
        for_each_unit(a, [&](int unit, const uint8_t *tile) {
            uint32_t word = 0;
            for_each_scale(a, unit, [&](int byte, int channel, int block, bool real) {
                const auto *from = static_cast<const uint8_t *>(a.x) + channel * a.x_stride + block;
                if (real) word |= kept_scale(*from) << 8 * byte;
            });
            reinterpret_cast<uint32_t *>(in_y(a, tile) + CODE_BYTES)[threadIdx.x] = turn_left(word, SCALE_TURN);
        });
}

extern "C" __global__ void __launch_bounds__(64) unpack_scales(const __grid_constant__ LinearArgs a) {
    if (threadIdx.x < 8 * WORDS)
        for_each_unit(a, [&](int unit, const uint8_t *tile) {
            const uint32_t word =
                turn_right(reinterpret_cast<const uint32_t *>(tile + CODE_BYTES)[threadIdx.x], SCALE_TURN);
            for_each_scale(a, unit, [&](int byte, int channel, int block, bool real) {
                auto *to = static_cast<uint8_t *>(a.y) + channel * a.y_stride + block;
                if (real) *to = standard_scale(word >> 8 * byte & 0xff);
            });
        });
}
#endif
