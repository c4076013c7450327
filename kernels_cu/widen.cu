// Around a product by cuBLAS. widen: y[n, ld] = code[n, k] in the dtype of the entry, exact, without the scale; ld = 64
// * steps. epilogue: y[m, n] = round(fmaf(scale[n], x[m, n], bias[n])) with the float32 sums x; y of the dtype that
// a.out names. widen: the units from a.split on; grid (steps, units), block 64, a tile (linear.cuh) a block. epilogue:
// grid (m, ceil(n / 256)), block 256.
// Shared memory: none.
// Neither starts before the kernel that precedes it is done, nor lets the next one start early: the library's kernels
// know no such order.
#include "linear.cuh"

__device__ __forceinline__ void store_pair(uint16_t *to, uint32_t pair) { *reinterpret_cast<uint32_t *>(to) = pair; }
__device__ __forceinline__ void store_pair(float *to, float2 pair) { *reinterpret_cast<float2 *>(to) = pair; }

template <class X> __device__ __forceinline__ void widen(const LinearArgs &a) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32;
    const uint4 codes = load_weights(tile(a, a.split + blockIdx.y, blockIdx.x) + threadIdx.x * 16);
    const int64_t channel = blockIdx.y * UNIT + half * 8 + lane / 4;
    auto *to = static_cast<typename X::element *>(a.y) + channel * a.steps * STEP + blockIdx.x * STEP + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        store_pair(to + 16 * j, X::template from_codes<0>(word(codes, j)));
        store_pair(to + 16 * j + 8, X::template from_codes<1>(word(codes, j)));
    }
}

extern "C" __global__ void __launch_bounds__(64) widen_bfloat16(const __grid_constant__ LinearArgs a) {
    widen<BF16>(a);
}
extern "C" __global__ void __launch_bounds__(64) widen_float16(const __grid_constant__ LinearArgs a) { widen<F16>(a); }
extern "C" __global__ void __launch_bounds__(64) widen_float32(const __grid_constant__ LinearArgs a) { widen<F32>(a); }

extern "C" __global__ void __launch_bounds__(256) epilogue(const __grid_constant__ LinearArgs a) {
    const int channel = blockIdx.y * 256 + threadIdx.x;
    const Finish finish(a, channel);
    if (channel < a.n)
        finish.store(a, blockIdx.x, channel, static_cast<const float *>(a.x)[blockIdx.x * a.x_stride + channel]);
}
