// The end of a product whose operands were both quantised, with a float32 factor each: sum * a * b + bias.
#pragma once

// Whatever the sizes of a and b, nothing on the way overflows, or loses bits, where the result does not: factors on two
// sides of 1 meet first, others go the sum's way one after another.
__device__ __forceinline__ float finish_sum(float sum, float a, float b, float bias) {
    const bool apart = (a < 1.0f) != (b < 1.0f);
    return fmaf(sum * (apart ? a * b : a), apart ? 1.0f : b, bias);
}
