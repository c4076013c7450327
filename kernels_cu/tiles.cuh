// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])) tile by tile, for a file that gives the products.
// x bf16 or f16, rows on 16 bytes; codes in the layout of linear.cuh. Both arrive in a ring of stages of 64 along k:
// codes of a tile of at most 8 units by bulk copies, x of TOKENS tokens by a tensor map, zeros past m and k.
// Grid: clusters of a.split blocks that share k. A cluster takes tile after tile, gridDim.x / a.split apart (one, if it
// has more than one block): groups of TOKENS within a band of BAND groups first, then along n, then bands.
// Block: 8 warps that multiply, a unit each, one that copies codes and one that copies x.
// Shared memory, dynamic: a.stages x {x [TOKENS][128 bytes], codes [units][1 KiB]}, the barriers; with a.split > 1 the
// sums of a cluster, [a.split][8 / a.split units][TOKENS / 8][32 lanes] float4, after them or in the ring's place.
// In x the 16-byte pieces of a row are exchanged: piece p of row r lies at p ^ (r % 8), as a tensor map with a swizzle of
// 128 bytes leaves them. Sums are fragments of mma.cuh, 16 channels by 8 tokens.
#pragma once
#include "bulk.cuh"
#include "linear.cuh"
#include "mma.cuh"

struct TileArgs {
    LinearArgs linear;
    int tile;  // units of a tile
    int wider; // the first so many tiles have one more
    int sums;  // where in shared memory the sums of a cluster lie
    int early; // the next kernel may start with this one; else when the one before is done
    alignas(64) uint8_t x_map[128];
};
static_assert(sizeof(TileArgs) == ARGS_BYTES, "TileArgs and kernels.TILE_ARGS must agree");

constexpr int MATH_WARPS = 8, CODES_WARP = 8, X_WARP = 9, BAND = 4;

// Sums of many tokens need more registers than three warps of a quarter multiprocessor share evenly: there two idle warps
// come with those that copy, and the four give theirs away.
template <int TOKENS> constexpr bool GIVES_REGISTERS = TOKENS > 128;
template <int TOKENS> constexpr int THREADS = 32 * MATH_WARPS + (GIVES_REGISTERS<TOKENS> ? 128 : 64);

// What a lane needs of a unit and a step: codes of two channels.
struct Codes {
    uint4 low = {}, high = {};

    // A of product j along k.
    template <class X> __device__ __forceinline__ uint4 operand(int j) const {
        const uint32_t lo = word(low, j), hi = word(high, j);
        return make_uint4(X::template from_codes<0>(lo), X::template from_codes<0>(hi), X::template from_codes<1>(lo),
                          X::template from_codes<1>(hi));
    }
};

template <int TOKENS> struct Ring {
    static constexpr int X_BYTES = TOKENS * STEP * 2; // of a stage

    uint8_t *base;
    int stage_bytes, stages;
    uint64_t *full, *empty;

    __device__ __forceinline__ uint8_t *x(int slot) const { return base + slot * stage_bytes; }
    __device__ __forceinline__ uint8_t *tile(int slot, int unit) const { return x(slot) + X_BYTES + unit * TILE_BYTES; }
    __device__ __forceinline__ Codes codes(int slot, int unit, int lane) const {
        const uint4 *from = reinterpret_cast<const uint4 *>(tile(slot, unit)) + lane;
        return {from[0], from[32]};
    }
};

// Where a tile lies.
template <int TOKENS> struct Tile {
    int token, unit, units;

    __device__ __forceinline__ Tile(const TileArgs &args, int index) {
        const int tiles = (unit_count(args.linear) - args.wider) / args.tile; // each has at least args.tile units
        const int groups = (args.linear.m + TOKENS - 1) / TOKENS, band = index / (tiles * BAND);
        const int wide = min(BAND, groups - band * BAND), within = index - band * tiles * BAND, tile = within / wide;
        token = (band * BAND + within % wide) * TOKENS;
        unit = tile * args.tile + min(tile, args.wider);
        units = args.tile + (tile < args.wider);
    }

    static __device__ __forceinline__ int count(const TileArgs &args) {
        return (unit_count(args.linear) - args.wider) / args.tile * ((args.linear.m + TOKENS - 1) / TOKENS);
    }
};

// A warp stores a fragment of C: channels `channel` .. + 15 of the tokens `token` .. + 7. `finish`: of the lane's
// channels, channel + lane / 4 and that + 8.
__device__ __forceinline__ void store_fragment(const LinearArgs &a, int token, int channel, const float (&sum)[4],
                                               const Finish (&finish)[2]) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    float v[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) v[r] = fmaf(finish[r / 2].scale, sum[r], finish[r / 2].bias);
    if (a.out != OUT_F32 && channel + 16 <= a.n && (reinterpret_cast<uint64_t>(a.y) | a.y_stride * 2) % 4 == 0) {
        // Two tokens of a channel in a register become two channels of a token.
        uint16_t *y = static_cast<uint16_t *>(a.y) + (token + row) * a.y_stride + channel + pair;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float first = v[2 * half], second = v[2 * half + 1];
            const uint32_t two = a.out == OUT_BF16 ? float_to_bf16(first) | uint32_t(float_to_bf16(second)) << 16
                                                   : float_to_f16(first) | uint32_t(float_to_f16(second)) << 16;
            const uint32_t channels = movmatrix_trans(two);
            if (token + row < a.m) *reinterpret_cast<uint32_t *>(y + 8 * half) = channels;
        }
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int t = token + pair + r % 2, c = channel + row + r / 2 * 8;
            if (t < a.m && c < a.n) store_y(a.y, t * a.y_stride + c, v[r], a.out);
        }
    }
}

// Product::add(sum, ring, unit, at, steps): a warp adds up the sums of its unit over `steps` stages, from `at` on; it
// waits for each at `full` and arrives at `empty` when it has read it.
template <class Product> __device__ __forceinline__ void tiles(const TileArgs &args) {
    constexpr int TOKENS = Product::TOKENS, TOKEN_TILES = TOKENS / 8, X_BYTES = Ring<TOKENS>::X_BYTES;
    constexpr bool OWN_SUMS = TOKENS <= 64; // kernels.tile_launch: the sums of a cluster have memory of their own
    extern __shared__ __align__(1024) uint8_t memory[];
    const LinearArgs &a = args.linear;

    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = a.split, rank = split > 1 ? cluster_ctarank() : 0;
    const int first_tile = split > 1 ? blockIdx.x / split : blockIdx.x, tile_count = Tile<TOKENS>::count(args);
    const int first_step = split > 1 ? int(int64_t(a.steps) * rank / split) : 0;
    const int steps = split > 1 ? int(int64_t(a.steps) * (rank + 1) / split) - first_step : a.steps;
    Ring<TOKENS> ring{memory, X_BYTES + (args.tile + (args.wider > 0)) * TILE_BYTES, a.stages};
    ring.full = reinterpret_cast<uint64_t *>(memory + ring.stages * ring.stage_bytes);
    ring.empty = ring.full + ring.stages;

    if (threadIdx.x == 32 * MATH_WARPS) {
        for (int i = 0; i < ring.stages; ++i)
            mbarrier_init(ring.full + i, 2), mbarrier_init(ring.empty + i, MATH_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads(); // the barriers are ready
    // Early only where all blocks find room at once: a third kernel would else take that of some of this one's.
    if (args.early) let_next_start();
    if (OWN_SUMS && split > 1) cluster_arrive();

    Place at;
    if (warp >= MATH_WARPS) {
        if constexpr (GIVES_REGISTERS<TOKENS>) setmaxnreg_dec<40>();
        if (warp == CODES_WARP) {
            for (int index = first_tile; index < tile_count; index += gridDim.x) {
                const Tile<TOKENS> tile(args, index);
                // A lane copies the tile's part of one panel.
                int mine = 0, panel_unit = 0, within = 0, width = 1;
                for (int i = 0, unit = tile.unit, left = tile.units; left > 0; ++i) {
                    const int narrow = a.wider * (a.panel + 1), wide = a.panel + (unit < narrow);
                    const int passed = (unit < narrow ? unit : unit - narrow) % wide, some = min(left, wide - passed);
                    if (i == lane) mine = some, panel_unit = unit - passed, within = passed, width = wide;
                    unit += some, left -= some;
                }
                const uint8_t *from = panel_codes(a, panel_unit) + (int64_t(first_step) * width + within) * TILE_BYTES;
                const int to = panel_unit + within - tile.unit;
                for (int step = 0; step < steps; ++step) {
                    mbarrier_wait(ring.empty + at.slot, at.parity ^ 1); // all have read what it held
                    if (lane == 0) mbarrier_arrive_expect_tx(ring.full + at.slot, tile.units * TILE_BYTES);
                    __syncwarp(); // the barrier knows what it waits for
                    if (mine) cp_async_bulk(ring.tile(at.slot, to), from, mine * TILE_BYTES, ring.full + at.slot);
                    from += width * TILE_BYTES;
                    at.advance(ring.stages);
                }
            }
        } else if (warp == X_WARP) {
            wait_for_previous(); // the first read of x
            if (!args.early) let_next_start();
            for (int index = first_tile; index < tile_count; index += gridDim.x) {
                const Tile<TOKENS> tile(args, index);
                for (int step = 0; step < steps; ++step) {
                    mbarrier_wait(ring.empty + at.slot, at.parity ^ 1); // all have read what it held
                    if (lane == 0) {
                        mbarrier_arrive_expect_tx(ring.full + at.slot, X_BYTES);
                        cp_async_bulk_tensor(ring.x(at.slot), args.x_map, (first_step + step) * STEP, tile.token,
                                             ring.full + at.slot);
                    }
                    at.advance(ring.stages);
                }
            }
        }
        if (split > 1) {
            if (!OWN_SUMS) cluster_arrive();
            cluster_wait();
            cluster_sync();
        }
        wait_for_previous();
        return;
    }

    if constexpr (GIVES_REGISTERS<TOKENS>) setmaxnreg_inc<232>();
    for (int index = first_tile; index < tile_count; index += gridDim.x) {
        const Tile<TOKENS> tile(args, index);
        const int channel = (tile.unit + warp) * UNIT;
        const bool real = warp < tile.units; // else any codes do: the sums go nowhere
        const Finish finish[2] = {Finish(a, channel + lane / 4), Finish(a, channel + lane / 4 + 8)};
        float sum[TOKEN_TILES][4] = {};
        Product::add(sum, ring, real ? warp : 0, at, steps);
        if (split == 1) {
            wait_for_previous(); // before the first write of y
            if (real)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) store_fragment(a, tile.token + 8 * t, channel, sum[t], finish);
            continue;
        }

        // Each block of the cluster adds up `own` of the units, in the order of the parts of k; `split` warps share a
        // unit's tokens.
        const int own = MATH_WARPS / split, pieces = own * TOKEN_TILES, my_unit = rank * own + warp % own;
        const int my_channel = (tile.unit + my_unit) * UNIT;
        const Finish my_finish[2] = {Finish(a, my_channel + lane / 4), Finish(a, my_channel + lane / 4 + 8)};
        float4 *sums = reinterpret_cast<float4 *>(memory + args.sums) + lane;
        if (!OWN_SUMS) cluster_arrive();
        cluster_wait(); // the other blocks have begun or, without memory of their own for sums, read all their stages
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t)
            st_shared_cluster(sums + (rank * pieces + warp % own * TOKEN_TILES + t) * 32, warp / own,
                              make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]));
        cluster_sync(); // all parts of this block's units are here
        wait_for_previous();
        if (my_unit < tile.units)
            for (int t = warp / own; t < TOKEN_TILES; t += split) {
                float total[4] = {};
                for (int part = 0; part < split; ++part) {
                    const float4 v = sums[(part * pieces + warp % own * TOKEN_TILES + t) * 32];
                    total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
                }
                store_fragment(a, tile.token + 8 * t, my_channel, total, my_finish);
            }
    }
}

// A hint for registers; from sm_120 on shared memory has room for one block.
#if __CUDA_ARCH__ >= 1200
#define FITTING(blocks) 1
#else
#define FITTING(blocks) blocks
#endif
#define TILE_ENTRY(name, Product, X, TOKENS, BLOCKS)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS<TOKENS>, FITTING(BLOCKS))                                     \
        name(const __grid_constant__ TileArgs a) {                                                                     \
        tiles<Product<X, TOKENS>>(a);                                                                                  \
    }
