// y[m, n] = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])) tile by tile, for a file that gives the products.
// x bf16 or f16, rows on 16 bytes; weights in the layout of linear.cuh. Both arrive in a ring of stages of 64 along k:
// those of a tile of at most 8 units by bulk copies, x of TOKENS tokens by a tensor map, zeros past m and k.
// Grid: clusters of a.split blocks that share k. A cluster takes tile after tile, gridDim.x / a.split apart (one, if it
// has more than one block): groups of TOKENS within a band of BAND groups first, then along n, then bands.
// Block: 8 warps that multiply, one that copies codes and one that copies x. The 8 are a.ways times as many as a tile
// needs at UNITS units a warp: the ways take the stages in turn, and add up their sums.
// Shared memory, dynamic: a.stages x {x [TOKENS][128 bytes], tiles [units]}, each stage on a multiple of 1 KiB, the
// barriers; where several blocks or ways share k their sums of this block's part of the units, [a.split * a.ways]
// [8 * UNITS / (a.split * a.ways) units][TOKENS / 8][32 lanes] float4, after them or in the ring's place.
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
    int ways;  // a divisor of the stages
    int sums;  // where in shared memory the sums of a cluster and its ways lie
    int early; // the next kernel may start with this one; else when the one before is done
    alignas(64) uint8_t x_map[128];
};
static_assert(sizeof(TileArgs) == ARGS_BYTES, "TileArgs and kernels.TILE_ARGS must agree");

constexpr int MATH_WARPS = 8, CODES_WARP = 8, X_WARP = 9, BAND = 4;

// Sums of many tokens, and as many again of a part of k that has a scale, need more registers than three warps of a
// quarter multiprocessor share evenly: there two idle warps come with those that copy, and the four give theirs away.
template <class X, int TOKENS> constexpr bool GIVES_REGISTERS = TOKENS * (SCALES_SUMS<X> ? 2 : 1) > 128;
template <class X, int TOKENS> constexpr int THREADS = 32 * MATH_WARPS + (GIVES_REGISTERS<X, TOKENS> ? 128 : 64);

template <int TOKENS> struct Ring {
    static constexpr int X_BYTES = TOKENS * STEP * 2; // of a stage

    uint8_t *base;
    int stage_bytes, stages;
    uint64_t *full, *empty;

    __device__ __forceinline__ uint8_t *x(int slot) const { return base + slot * stage_bytes; }
    __device__ __forceinline__ uint8_t *tile(int slot, int unit) const { return x(slot) + X_BYTES + unit * TILE_BYTES; }
    __device__ __forceinline__ Codes codes(int slot, int unit, int lane) const {
        const uint8_t *codes = tile(slot, unit) + lane * 16;
        return Codes(codes, codes + to_scales(lane));
    }
};

// Scales of 128 x 128 blocks, for units and steps counted from a tile's first.
struct BlockScales {
    const LinearArgs &a;
    int first_unit, first_step;

    __device__ __forceinline__ float at(int unit, int step) const {
        return block_scale(a, first_unit + unit, first_step + step);
    }
};

__device__ __forceinline__ void sync_math_warps() { asm volatile("bar.sync 1, %0;" ::"n"(32 * MATH_WARPS) : "memory"); }

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
template <class X>
__device__ __forceinline__ void store_fragment(const LinearArgs &a, int token, int channel, const float (&sum)[4],
                                               const Finish (&finish)[2]) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    float v[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) v[r] = finish[r / 2].of(a, min(token + pair + r % 2, a.m - 1), sum[r] * SUM_FACTOR<X>);
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

// Product::add(sum, ring, unit, scales, at, step, steps, ways): a warp adds up the sums of its UNITS units over every
// `ways`-th step from `step` on, whose stage is `at`. It waits for each at `full` and arrives at `empty` when it has read it.
template <class Product> __device__ __forceinline__ void tiles(const TileArgs &args) {
    using X = typename Product::X;
    constexpr int TOKENS = Product::TOKENS, UNITS = Product::UNITS, TOKEN_TILES = TOKENS / 8;
    constexpr int X_BYTES = Ring<TOKENS>::X_BYTES;
    extern __shared__ __align__(1024) uint8_t memory[];
    const LinearArgs &a = args.linear;

    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int ways = args.ways, groups = MATH_WARPS / ways;
    const bool own_sums = args.sums; // else they take the ring's place
    const int split = a.split, rank = split > 1 ? cluster_ctarank() : 0;
    const int first_tile = split > 1 ? blockIdx.x / split : blockIdx.x, tile_count = Tile<TOKENS>::count(args);
    const int first_step = split > 1 ? int(int64_t(a.steps) * rank / split) : 0;
    const int steps = split > 1 ? int(int64_t(a.steps) * (rank + 1) / split) - first_step : a.steps;
    // Stages of a tile, a multiple of the ways: a step's way does not depend on the tiles before. The last may be empty.
    const int padded = (steps + ways - 1) & -ways;
    const int tile_bytes = (args.tile + (args.wider > 0)) * TILE_BYTES;
    Ring<TOKENS> ring{memory, X_BYTES + (TILE_BYTES % 1024 ? (tile_bytes + 1023) & -1024 : tile_bytes), a.stages};
    ring.full = reinterpret_cast<uint64_t *>(memory + ring.stages * ring.stage_bytes);
    ring.empty = ring.full + ring.stages;

    if (threadIdx.x == 32 * MATH_WARPS) {
        for (int i = 0; i < ring.stages; ++i) mbarrier_init(ring.full + i, 2), mbarrier_init(ring.empty + i, groups);
        fence_mbarrier_init();
    }
    __syncthreads(); // the barriers are ready
    // Early only where all blocks find room at once: a third kernel would else take that of some of this one's.
    if (args.early) let_next_start();
    if (own_sums && split > 1) cluster_arrive();

    Place at;
    if (warp >= MATH_WARPS) {
        if constexpr (GIVES_REGISTERS<X, TOKENS>) setmaxnreg_dec<40>();
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
                for (int step = 0; step < padded; ++step) {
                    const bool real = step < steps;
                    if (FORMAT == FP8_BLOCK && step % 64 == 0 && lane < 8) // scales of 64 steps, of two rows of blocks
                        prefetch_L2(&block_scale(a, tile.unit + (lane < 4 ? 0 : tile.units - 1),
                                                 min(first_step + step + lane % 4 * 16, a.steps - 1)));
                    mbarrier_wait(ring.empty + at.slot, at.parity ^ 1); // all have read what it held
                    if (lane == 0) mbarrier_arrive_expect_tx(ring.full + at.slot, real ? tile.units * TILE_BYTES : 0);
                    __syncwarp(); // the barrier knows what it waits for
                    if (real && mine)
                        cp_async_bulk(ring.tile(at.slot, to), from, mine * TILE_BYTES, ring.full + at.slot);
                    from += width * TILE_BYTES;
                    at.advance(ring.stages);
                }
            }
        } else if (warp == X_WARP) {
            wait_for_previous(); // the first read of x
            if (!args.early) let_next_start();
            for (int index = first_tile; index < tile_count; index += gridDim.x) {
                const Tile<TOKENS> tile(args, index);
                for (int step = 0; step < padded; ++step) {
                    const bool real = step < steps;
                    mbarrier_wait(ring.empty + at.slot, at.parity ^ 1); // all have read what it held
                    if (lane == 0) {
                        mbarrier_arrive_expect_tx(ring.full + at.slot, real ? X_BYTES : 0);
                        if (real)
                            cp_async_bulk_tensor(ring.x(at.slot), args.x_map, (first_step + step) * STEP, tile.token,
                                                 ring.full + at.slot);
                    }
                    at.advance(ring.stages);
                }
            }
        }
        if (split > 1) {
            if (!own_sums) cluster_arrive();
            cluster_wait();
            cluster_sync();
        }
        wait_for_previous();
        return;
    }

    if constexpr (GIVES_REGISTERS<X, TOKENS>) setmaxnreg_inc<232>();
    const int way = warp / groups, unit = warp % groups * UNITS; // within the tile
    at.slot = way;
    // Each block of a cluster adds up `own` of the units, in the order of the parts of k; several warps share a unit's
    // tokens.
    const int parts = split * ways, own = groups * UNITS / split, pieces = own * TOKEN_TILES;
    const bool shared = UNITS > 1 || parts > 1; // UNITS > 1: kernels.tile_launch gives several ways
    float4 *sums = reinterpret_cast<float4 *>(memory + args.sums) + lane;
    for (int index = first_tile; index < tile_count; index += gridDim.x) {
        const Tile<TOKENS> tile(args, index);
        const int my_unit = shared ? rank * own + warp % own : unit, my_channel = (tile.unit + my_unit) * UNIT;
        int real[UNITS]; // past the tile any codes do: the sums go nowhere
#pragma unroll
        for (int u = 0; u < UNITS; ++u) real[u] = min(unit + u, tile.units - 1);
        float sum[UNITS][TOKEN_TILES][4] = {};
        Product::add(sum, ring, real, BlockScales{a, tile.unit, first_step}, at, way, steps, ways);
        const Finish finish[2] = {Finish(a, my_channel + lane / 4), Finish(a, my_channel + lane / 4 + 8)};
        if (padded - ways + way >= steps && index + int(gridDim.x) < tile_count) { // an empty stage, then another tile
            mbarrier_wait(ring.full + at.slot, at.parity);
            if (lane == 0) mbarrier_arrive(ring.empty + at.slot);
            at.advance(ring.stages, ways);
        }
        if (!shared) {
            wait_for_previous(); // before the first write of y
            if (my_unit < tile.units)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
                    store_fragment<X>(a, tile.token + 8 * t, my_channel, sum[0][t], finish);
            continue;
        }

        if (split > 1) {
            if (!own_sums) cluster_arrive();
            cluster_wait(); // the other blocks have begun or, without memory of their own for sums, read all their stages
        } else if (!own_sums || index != first_tile)
            sync_math_warps(); // all stages, or the sums of the tile before, have been read
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const float4 *to = sums + ((rank * ways + way) * own + (unit + u) % own) * TOKEN_TILES * 32;
            const uint32_t there = mapa(to, (unit + u) / own);
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; ++t) st_shared_cluster(there + t * 512, sum[u][t]);
        }
        if (split > 1)
            cluster_sync(); // all parts of this block's units are here
        else
            sync_math_warps();
        wait_for_previous(); // before the first write of y
        if (my_unit < tile.units)
            for (int t = warp / own; t < TOKEN_TILES; t += MATH_WARPS / own) {
                float total[4] = {};
                for (int part = 0; part < parts; ++part) {
                    const float4 v = sums[(part * pieces + warp % own * TOKEN_TILES + t) * 32];
                    total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
                }
                store_fragment<X>(a, tile.token + 8 * t, my_channel, total, finish);
            }
    }
}

// A hint for registers; from sm_120 on shared memory has room for one block.
#if __CUDA_ARCH__ >= 1200
#define FITTING(blocks) 1
#else
#define FITTING(blocks) blocks
#endif
#define TILE_ENTRY(name, Product, X, TOKENS)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS<X, TOKENS>,                                                   \
                                                 FITTING(SCALES_SUMS<X> ? SUMS_BLOCKS_##TOKENS : BLOCKS_##TOKENS))     \
        name(const __grid_constant__ TileArgs a) {                                                                     \
        tiles<Product<X, TOKENS>>(a);                                                                                  \
    }
