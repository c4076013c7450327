// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by wgmma, sm_90a: for many tokens.
// a and b codes by tensor maps, boxes of 128 of k, zeros past m, n, k; see scaled.cuh. A cluster of two blocks has tiles
// of 256 tokens by WIDE channels, a block 128 tokens. Sums stay in the tensor cores' registers (fast, WIDE = 256), or
// every 128 of k is added in float32 (promoted, WIDE = 128).
// Grid: as many clusters as fit, each takes tile after tile, down a band of BAND tiles of tokens, then along n; where
// the tiles do not fill them evenly they share the steps of the first ones.
// Block: two warpgroups that multiply, 64 x WIDE each, and write what is finished to shared memory; of a third one a
// thread copies a and b, a warp brings scales and bias, and two warps copy y out, each while the others go on.
// Shared memory, dynamic: `stages` x {a box of a, two of b, of which each block of a cluster copies one to both}; what
// Tail says; the barriers of the stages. Rows lie as wgmma.cuh wants.
#include "fp8_wgmma.cuh"
#include "scaled.cuh"
#include "shared_copies.cuh"

constexpr int BOX = 128, BOX_BYTES = BOX * 128, HIGH = 2 * BOX; // tokens of a block, its box of a, tokens of a tile
constexpr int GROUPS = 2, GROUP = 128, THREADS = GROUP * (GROUPS + 1);
constexpr int ROWS = BOX / GROUPS, Y_BOX_BYTES = ROWS * 128; // tokens of a warpgroup, and a box of its y
constexpr int FLAG_BYTES = WORKSPACE_FLAG_BYTES;             // of the workspace
constexpr int BOTH = 3;                                      // blocks of a cluster, as bits
constexpr int TURN = 1 + GROUPS; // the number of the first warpgroup's barrier; those before are for Parts

// The first token and the first channel of a cluster's tile.
template <int WIDE> struct Tile {
    int token, channel;

    __device__ __forceinline__ Tile(const ScaledArgs &args, int index) {
        const int high = (args.m - 1) / HIGH + 1, wide = (args.n - 1) / WIDE + 1, band = index / (BAND * wide);
        const int rows = min(BAND, high - band * BAND), within = index - band * BAND * wide;
        token = (band * BAND + within % rows) * HIGH, channel = within / rows * WIDE;
    }
    static __device__ __forceinline__ int count(const ScaledArgs &args) {
        return ((args.m - 1) / HIGH + 1) * ((args.n - 1) / WIDE + 1);
    }
};

// Scales and bias of a block's part of a tile.
template <int WIDE> struct Ends {
    float2 columns[WIDE];
    float rows[BOX];

    __device__ __forceinline__ void load(const ScaledArgs &args, int token, int channel, int lane) {
#pragma unroll 4
        for (int i = lane; i < WIDE; i += 32) {
            const Channel c(args, channel + i);
            columns[i] = make_float2(c.scale, c.bias);
        }
#pragma unroll
        for (int i = lane; i < BOX; i += 32) rows[i] = token_scale(args, token + i);
    }
};

// What lies after the ring. Of each two barriers the first says that something is there, the second that it was read.
// At those of the ends every lane arrives: racecheck sees no __syncwarp that the compiler drops.
template <int WIDE> struct Tail {
    static constexpr int ENDS = WIDE == 256 ? 2 : 1; // of this tile and, where they fit, of the next one
    static constexpr int Y_BOXES = WIDE / 64;        // as many as a 16-bit y has, of float32 half

    uint8_t y[GROUPS][Y_BOXES * Y_BOX_BYTES];
    Ends<WIDE> ends[ENDS];
    uint64_t ends_full[ENDS], ends_empty[ENDS], y_full[GROUPS], y_empty[GROUPS];
};
static_assert(sizeof(Tail<128>) == WGMMA_TAIL_128, "kernels.py has another size");
static_assert(sizeof(Tail<256>) == WGMMA_TAIL_256, "kernels.py has another size");

// Where a byte of a token lies in y of a warpgroup: boxes as the map of y wants them.
__device__ __forceinline__ uint32_t place_of(uint32_t row, uint32_t byte) {
    return byte / 128 * Y_BOX_BYTES + row * 128 + ((byte / 16 ^ row) % 8 << 4) + byte % 16;
}

// Read anew: the compiler then keeps no addresses made of it while it multiplies, when registers are few.
__device__ __forceinline__ uint32_t lane_id() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane % 32;
}

// A warp's sums, 16 tokens by WIDE channels, to y of its warpgroup.
template <int WIDE> struct Finish {
    uint8_t *y; // from the first token on
    uint64_t *full, *empty;
    int first; // token
    uint32_t parity = 0;

    // `COUNT` fragments, whose scales and biases begin at `columns`.
    template <int COUNT, int OUT>
    __device__ __forceinline__ void write(const float (*sum)[4], const float2 *columns,
                                          const float (&scale_a)[2]) const {
        const uint32_t lane = lane_id();
        constexpr int SOME = 4; // whose columns are read while those before are finished
        const float4 *of = reinterpret_cast<const float4 *>(columns) + lane % 4;
        float4 two[2][SOME];
#pragma unroll
        for (int i = 0; i < SOME; ++i) two[0][i] = of[i * 4];
#pragma unroll
        for (int j = 0; j < COUNT; j += SOME) {
            const float4(&now)[SOME] = two[j / SOME % 2];
            if (j + SOME < COUNT) {
#pragma unroll
                for (int i = 0; i < SOME; ++i) two[(j / SOME + 1) % 2][i] = of[(j + SOME + i) * 4];
            }
            float v[SOME][4];
#pragma unroll
            for (int i = 0; i < SOME; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    v[i][r] =
                        fmaf(sum[j + i][r] * scale_a[r / 2], r % 2 ? now[i].z : now[i].x, r % 2 ? now[i].w : now[i].y);
            if constexpr (OUT != SCALED_F32) {
#pragma unroll
                for (int i = 0; i < SOME; i += 2)
                    stmatrix_x4(smem_address(y) + place_of(lane % 16, (j + i + lane / 16) * 16),
                                make_uint4(two_of<OUT>(v[i][0], v[i][1]), two_of<OUT>(v[i][2], v[i][3]),
                                           two_of<OUT>(v[i + 1][0], v[i + 1][1]),
                                           two_of<OUT>(v[i + 1][2], v[i + 1][3])));
            } else {
#pragma unroll
                for (int i = 0; i < SOME; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        *reinterpret_cast<float2 *>(y + place_of(half * 8 + lane / 4, (j + i) * 32 + lane % 4 * 8)) =
                            make_float2(v[i][2 * half], v[i][2 * half + 1]);
            }
        }
    }

    template <int OUT> __device__ __forceinline__ void all(const float (&sum)[WIDE / 8][4], const Ends<WIDE> &ends) {
        constexpr int COUNT = WIDE / (OUT == SCALED_F32 ? 16 : 8); // fragments that fit y
        const uint32_t lane = lane_id();
        const float scale_a[2] = {ends.rows[first + lane / 4], ends.rows[first + lane / 4 + 8]};
#pragma unroll
        for (int j = 0; j < WIDE / 8; j += COUNT) {
            mbarrier_wait(empty, parity ^ 1); // y before has been copied
            write<COUNT, OUT>(sum + j, ends.columns + j * 8, scale_a);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(full);
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void all(const float (&sum)[WIDE / 8][4], const Ends<WIDE> &ends, int out) {
        if (out == SCALED_BF16)
            all<SCALED_BF16>(sum, ends);
        else if (out == SCALED_F16)
            all<SCALED_F16>(sum, ends);
        else
            all<SCALED_F32>(sum, ends);
    }
};

// A warp copies y of a warpgroup, 64 tokens and so many boxes of 128 bytes of each, to where it belongs.
template <int SIZE, int BOXES>
__device__ __forceinline__ void copy_out(const ScaledArgs &args, const uint8_t *y, int token, int channel, int lane) {
    constexpr int COLUMNS = 128 / SIZE; // of a box
    if (args.whole) {
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < BOXES; ++i)
                cp_async_bulk_tensor_store(args.y_map, channel + i * COLUMNS, token, y + i * Y_BOX_BYTES);
            cp_async_bulk_commit();
            cp_async_bulk_wait_read();
        }
    } else {
        const int rows = min(ROWS, args.m - token), columns = min(BOXES * COLUMNS, args.n - channel);
        uint8_t *to = static_cast<uint8_t *>(args.y) + (token * args.y_stride + channel) * SIZE;
        for (int row = 0; row < rows; ++row, to += args.y_stride * SIZE)
#pragma unroll 4
            for (int i = lane; i < columns; i += 32) {
                const uint8_t *from = y + place_of(row, i * SIZE);
                if (SIZE == 2)
                    reinterpret_cast<uint16_t *>(to)[i] = *reinterpret_cast<const uint16_t *>(from);
                else
                    reinterpret_cast<float *>(to)[i] = *reinterpret_cast<const float *>(from);
            }
    }
    __syncwarp();
}

// A descriptor whose low word is given: the others do not depend on the place.
__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return wgmma_descriptor(0) >> 32 << 32 | low; }

// The ring as a warpgroup that multiplies reads it.
template <int WIDE> struct Ring {
    static constexpr int STAGE_BYTES = BOX_BYTES + WIDE * 128;

    const uint8_t *memory;
    uint64_t *full, *empty;
    int stages;
    Place at;

    __device__ __forceinline__ void wait() const { mbarrier_wait(full + at.slot, at.parity); }
    // The low word of the first stage's descriptor, and what the present stage adds. The latter is taken from lane 0:
    // descriptors then are sums of uniform registers.
    __device__ __forceinline__ uint32_t low() const { return uint32_t(wgmma_descriptor(smem_address(memory))); }
    __device__ __forceinline__ uint32_t offset() const {
        return __shfl_sync(0xffffffffu, at.slot, 0) * (STAGE_BYTES >> 4);
    }
    // Lane i of each warp tells block i of the cluster: either copies into the stage of both.
    __device__ __forceinline__ void release(int slot) const {
        if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(empty + slot, threadIdx.x % 32);
    }
};

// 64 tokens by 256 channels of a warpgroup, sums in the tensor cores' registers. The warpgroups take turns, a step each,
// so that they stay half a step apart: one multiplies while the other one finishes a tile.
struct Fast {
    static constexpr int WIDE = 256;
    static constexpr bool IN_TURN = true;

    static __device__ __forceinline__ void multiply(float (&sum)[32][4], Ring<WIDE> &ring, int group, int steps) {
        const uint32_t a = ring.low() + (group * ROWS * 128 >> 4), b = ring.low() + (BOX_BYTES >> 4);
        uint32_t offset = ring.offset();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            ring.wait();
            bar_sync(TURN + group, GROUPS * GROUP); // the other warpgroup's step is queued
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                Fp8Wgmma<A, B, 256>::m64k32(sum, descriptor(a + offset + 2 * j), descriptor(b + offset + 2 * j),
                                            step | j);
            wgmma_commit();
            const int slot = ring.at.slot;
            ring.at.advance(ring.stages), offset = ring.offset();
            bar_arrive(TURN + 1 - group, GROUPS * GROUP);
            wgmma_wait();
            ring.release(slot);
        }
        wgmma_written(sum);
    }
};

// 64 tokens by 128 channels of a warpgroup, every step of 128 added in float32. Two steps are on their way: one is added
// while the tensor cores have the other one and those of the other warpgroup.
struct Promoted {
    static constexpr int WIDE = 128;
    static constexpr bool IN_TURN = false;

    static __device__ __forceinline__ void multiply(float (&sum)[16][4], Ring<WIDE> &ring, int group, int steps) {
        const uint32_t a = ring.low() + (group * ROWS * 128 >> 4), b = ring.low() + (BOX_BYTES >> 4);
        float parts[2][16][4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[i][r] = 0.0f;
        uint32_t offset = ring.offset();
        const auto begin = [&](float (&part)[16][4]) { // the slot of the step
            ring.wait();
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                Fp8Wgmma<A, B, WIDE>::m64k32(part, descriptor(a + offset + 2 * j), descriptor(b + offset + 2 * j), j);
            wgmma_commit();
            const int slot = ring.at.slot;
            ring.at.advance(ring.stages), offset = ring.offset();
            return slot;
        };
        const auto end = [&](float (&part)[16][4], int slot) {
            wgmma_written(part);
            ring.release(slot);
#pragma unroll
            for (int i = 0; i < 16; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[i][r] += part[i][r];
        };
#pragma unroll 1
        for (int pair = 0; pair < steps / 2; ++pair) {
            const int first = begin(parts[0]), second = begin(parts[1]);
            wgmma_wait_for_earlier();
            end(parts[0], first);
            wgmma_wait();
            end(parts[1], second);
        }
        if (steps % 2) {
            const int slot = begin(parts[0]);
            wgmma_wait();
            end(parts[0], slot);
        }
    }
};

// What a cluster multiplies, one after another. The steps along k of the first `shared` tiles are shared out evenly, a
// cluster takes its share from the end; then come whole tiles. Of a tile that several share the one with its last steps
// adds up the sums, its own first, then those of the clusters before it: each waits only for blocks that started earlier.
template <int WIDE> struct Work {
    const ScaledArgs &args;
    const int all = (args.k - 1) / 128 + 1;                                 // steps of a whole tile
    uint32_t begin = share(blockIdx.x / 2), at = share(blockIdx.x / 2 + 1); // left of the share: steps of shared tiles
    int whole = args.shared + blockIdx.x / 2;
    int tile, first, steps; // the steps of a tile

    // Fewer than 256 tiles are shared, of at most 2^24 steps each.
    __device__ __forceinline__ uint32_t share(int cluster) const {
        return int64_t(args.shared) * all * cluster / (gridDim.x / 2);
    }

    __device__ __forceinline__ bool next() {
        if (at > begin) {
            tile = (at - 1) / all;
            const uint32_t start = uint32_t(tile) * all, from = max(begin, start);
            first = from - start, steps = at - from, at = from;
            return true;
        }
        tile = whole, first = 0, steps = all, whole += gridDim.x / 2;
        return tile < Tile<WIDE>::count(args);
    }
    // With these steps the tile is done.
    __device__ __forceinline__ bool last() const { return first + steps == all; }
};

// Where the sums of a tile's earlier steps lie in the workspace, and a flag that says so: of each cluster, block, and
// warpgroup, [COUNT fragments][128 threads] float4.
template <int COUNT> struct Parts {
    uint8_t *workspace;
    int place, thread; // of this warpgroup: 2 * block + warpgroup

    __device__ __forceinline__ int at(int cluster) const { return cluster * 2 * GROUPS + place; }
    __device__ __forceinline__ uint32_t *flag(int cluster) const {
        return reinterpret_cast<uint32_t *>(workspace) + at(cluster);
    }
    __device__ __forceinline__ float4 *sums(int cluster) const {
        return reinterpret_cast<float4 *>(workspace + FLAG_BYTES) + int64_t(at(cluster)) * COUNT * GROUP + thread;
    }

    __device__ __forceinline__ void give(const float (&sum)[COUNT][4], int cluster) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            __stcg(sums(cluster) + i * GROUP, make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
        bar_sync(1 + place % GROUPS, GROUP); // all have written, which the flag tells with what it releases
        if (thread == 0)
            asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag(cluster)) : "memory");
    }
    __device__ __forceinline__ void take(float (&sum)[COUNT][4], int cluster) const {
        if (thread == 0) {
            uint32_t there;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flag(cluster)) : "memory");
            while (!there);
            *flag(cluster) = 0; // for the next launch
        }
        bar_sync(1 + place % GROUPS, GROUP); // the sums are there
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float4 v = __ldcg(sums(cluster) + i * GROUP);
            sum[i][0] += v.x, sum[i][1] += v.y, sum[i][2] += v.z, sum[i][3] += v.w;
        }
    }
};

template <class Product> __device__ __forceinline__ void scaled_wgmma(const ScaledArgs &args) {
    constexpr int WIDE = Product::WIDE, STAGE_BYTES = Ring<WIDE>::STAGE_BYTES;
    constexpr int ENDS = Tail<WIDE>::ENDS, Y_BOXES = Tail<WIDE>::Y_BOXES;
    extern __shared__ __align__(1024) uint8_t memory[];
    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int warps = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warps / 4, rank = cluster_ctarank();
    auto &tail = *reinterpret_cast<Tail<WIDE> *>(memory + args.stages * STAGE_BYTES);
    uint64_t *full = reinterpret_cast<uint64_t *>(&tail + 1), *empty = full + args.stages;

    if (threadIdx.x == GROUPS * GROUP) {
        for (int i = 0; i < args.stages; ++i) mbarrier_init(full + i, 1), mbarrier_init(empty + i, 2 * GROUPS * 4);
        for (int i = 0; i < ENDS; ++i)
            mbarrier_init(tail.ends_full + i, 32), mbarrier_init(tail.ends_empty + i, GROUPS * GROUP);
        for (int i = 0; i < GROUPS; ++i) mbarrier_init(tail.y_full + i, 4), mbarrier_init(tail.y_empty + i, 1);
        fence_mbarrier_init();
        prefetch_tensormap(args.a_map), prefetch_tensormap(args.b_map);
    }
    let_next_start();
    if (threadIdx.x == GROUPS * GROUP) {
        Work<WIDE> work{args};
        if (work.next())
            for (int step = 0; step < min(work.steps, args.stages); ++step)
                cp_async_bulk_prefetch_tensor(args.b_map, (work.first + step) * 128,
                                              Tile<WIDE>(args, work.tile).channel + rank * WIDE / 2);
    }
    __syncwarp();
    cluster_sync(); // the barriers of both blocks are ready
    wait_for_previous();

    if (group == GROUPS) {
        setmaxnreg_dec<40>();
        const int lane = threadIdx.x % 32;
        Work<WIDE> work{args};
        Place at;
        if (warps == GROUPS * 4) {
            while (lane == 0 && work.next()) {
                const Tile<WIDE> tile(args, work.tile);
                for (int step = work.first; step < work.first + work.steps; ++step) {
                    uint8_t *stage = memory + at.slot * STAGE_BYTES;
                    mbarrier_wait(empty + at.slot, at.parity ^ 1); // both blocks have read what the stage held
                    mbarrier_arrive_expect_tx(full + at.slot, STAGE_BYTES);
                    cp_async_bulk_tensor(stage, args.a_map, step * 128, tile.token + rank * BOX, full + at.slot);
                    cp_async_bulk_tensor_multicast(stage + BOX_BYTES + rank * WIDE / 2 * 128, args.b_map, step * 128,
                                                   tile.channel + rank * WIDE / 2, full + at.slot, BOTH);
                    at.advance(args.stages);
                }
            }
        } else if (warps == GROUPS * 4 + 1) {
            while (work.next()) {
                if (!work.last()) continue;
                const Tile<WIDE> tile(args, work.tile);
                mbarrier_wait(tail.ends_empty + at.slot, at.parity ^ 1);
                tail.ends[at.slot].load(args, tile.token + rank * BOX, tile.channel, lane);
                mbarrier_arrive(tail.ends_full + at.slot);
                at.advance(ENDS);
            }
        } else {
            const int of = warps - GROUPS * 4 - 2, size = args.out == SCALED_F32 ? 4 : 2; // of which warpgroup
            uint32_t parity = 0;
            while (work.next()) {
                if (!work.last()) continue;
                const Tile<WIDE> tile(args, work.tile);
                const int token = tile.token + rank * BOX + of * ROWS, end = tile.channel + WIDE;
                for (int channel = tile.channel; channel < end; channel += Y_BOXES * 128 / size) {
                    mbarrier_wait(tail.y_full + of, parity);
                    if (size == 2)
                        copy_out<2, Y_BOXES>(args, tail.y[of], token, channel, lane);
                    else
                        copy_out<4, Y_BOXES>(args, tail.y[of], token, channel, lane);
                    if (lane == 0) mbarrier_arrive(tail.y_empty + of);
                    parity ^= 1;
                }
            }
        }
    } else {
        setmaxnreg_inc<232>();
        const int thread = threadIdx.x % GROUP, first = warps * 16; // of the block's tokens
        Ring<WIDE> ring{memory, full, empty, args.stages, {}};
        Finish<WIDE> finish{tail.y[group] + first % ROWS * 128, tail.y_full + group, tail.y_empty + group, first};
        const Parts<WIDE / 8> parts{static_cast<uint8_t *>(args.workspace), rank * GROUPS + group, thread};
        const int cluster = blockIdx.x / 2;
        Place at;
        float sum[WIDE / 8][4] = {};
        if (Product::IN_TURN && group == 1) bar_arrive(TURN, GROUPS * GROUP);
        for (Work<WIDE> work{args}; work.next();) {
            Product::multiply(sum, ring, group, work.steps);
            if (!work.last()) {
                parts.give(sum, cluster);
                continue;
            }
            for (int before = cluster; work.first > 0;) {
                parts.take(sum, --before);
                work.first -= min(work.share(before + 1) - work.share(before), uint32_t(work.first));
            }
            mbarrier_wait(tail.ends_full + at.slot, at.parity);
            finish.all(sum, tail.ends[at.slot], args.out);
            mbarrier_arrive(tail.ends_empty + at.slot);
            at.advance(ENDS);
        }
        if (Product::IN_TURN && group == 0) bar_sync(TURN, GROUPS * GROUP); // so that all arrivals are met
    }
    cluster_stay(); // the other block copies into this one's memory, and arrives at its barriers
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scaled_wgmma_fast(const __grid_constant__ ScaledArgs args) {
    scaled_wgmma<Fast>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scaled_wgmma_promoted(const __grid_constant__ ScaledArgs args) {
    scaled_wgmma<Promoted>(args);
}
