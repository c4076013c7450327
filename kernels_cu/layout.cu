// Codes between the standard layout, [n, k] row by row, and the kernels' (linear.cuh), where zeros stand past n and k.
// pack: y = packed(x), x uint8 [n, k] with rows x_stride bytes apart. unpack: y = standard(codes), rows y_stride bytes
// apart.
// Grid (steps, 65,535 at most of the units), block of 64: thread t has lane t % 32 of half t / 32 of a tile, 16 codes.
// Shared memory: none.
// No arithmetic: bytes move.
#include "linear.cuh"

// Calls visit(byte in the lane's 16, channel, k) for this thread's part of every tile of its column of the grid.
template <class Visit> __device__ __forceinline__ void for_each_code(const LinearArgs &a, int unit, Visit visit) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int64_t k = int64_t(blockIdx.x) * STEP + i / 4 * 16 + i % 2 * 8 + lane % 4 * 2 + i / 2 % 2;
        visit(i, unit * UNIT + half * 8 + lane / 4, k);
    }
}

extern "C" __global__ void __launch_bounds__(64) pack(const __grid_constant__ LinearArgs a) {
    for (int unit = blockIdx.y; unit * int64_t(UNIT) < a.n; unit += gridDim.y) {
        uint32_t words[4] = {};
        for_each_code(a, unit, [&](int i, int channel, int64_t k) {
            if (channel < a.n && k < a.k)
                words[i / 4] |= uint32_t(static_cast<const uint8_t *>(a.x)[channel * a.x_stride + k]) << i % 4 * 8;
        });
        uint8_t *to = static_cast<uint8_t *>(a.y) + (tile(a, unit, blockIdx.x) - a.codes);
        reinterpret_cast<uint4 *>(to)[threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void __launch_bounds__(64) unpack(const __grid_constant__ LinearArgs a) {
    for (int unit = blockIdx.y; unit * int64_t(UNIT) < a.n; unit += gridDim.y) {
        const uint4 codes = reinterpret_cast<const uint4 *>(tile(a, unit, blockIdx.x))[threadIdx.x];
        for_each_code(a, unit, [&](int i, int channel, int64_t k) {
            if (channel < a.n && k < a.k)
                static_cast<uint8_t *>(a.y)[channel * a.y_stride + k] =
                    static_cast<uint8_t>(word(codes, i / 4) >> i % 4 * 8);
        });
    }
}
