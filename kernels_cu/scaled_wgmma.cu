// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by wgmma, sm_90a: for many tokens.
// a and b codes by tensor maps, boxes of 128 rows and 128 of k, zeros past m, n, k; see scaled.cuh. A cluster of two blocks has tiles of 256 x 256, a block 128 tokens.
// Sums stay in the tensor cores' registers (fast), or every 128 of k is added in float32 (promoted).
// Grid: as many clusters as fit, each takes tile after tile, down a band of BAND tiles of tokens, then along n; where
// the tiles do not fill them evenly they share the steps of the first ones.
// Block: two warpgroups that multiply, 64 x 256 each, and one of which a thread copies.
// Shared memory, dynamic: `stages` x {a box of a, two of b, of which each block of a cluster copies one to both}; two
// pieces of y of 8 KiB, and scales and bias of their channels, a warpgroup; the barriers. Rows lie as wgmma.cuh wants.
#include "fp8_wgmma.cuh"
#include "scaled.cuh"
#include "shared_copies.cuh"

constexpr int BOX = 128, BOX_BYTES = BOX * 128, STAGE_BYTES = 3 * BOX_BYTES, TILE = 2 * BOX;
constexpr int GROUPS = 2, GROUP = 128, THREADS = GROUP * (GROUPS + 1);
constexpr int PIECE_ROWS = 16, PIECE_BYTES = PIECE_ROWS * 128, COLUMNS = BOX;
constexpr int TAIL_BYTES = GROUPS * (4 * 2 * PIECE_BYTES + COLUMNS * 8); // after the ring
constexpr int FLAG_BYTES = WORKSPACE_FLAG_BYTES;                         // of the workspace
static_assert(TAIL_BYTES == WGMMA_TAIL_BYTES, "kernels.py has another size");
constexpr int BOTH = 3; // blocks of a cluster, as bits

// The first token and the first channel of a cluster's tile.
struct Tile {
    int token, channel;

    __device__ __forceinline__ Tile(const ScaledArgs &args, int index) {
        const int high = (args.m - 1) / TILE + 1, wide = (args.n - 1) / TILE + 1, band = index / (BAND * wide);
        const int rows = min(BAND, high - band * BAND), within = index - band * BAND * wide;
        token = (band * BAND + within % rows) * TILE, channel = within / rows * TILE;
    }
    static __device__ __forceinline__ int count(const ScaledArgs &args) {
        return ((args.m - 1) / TILE + 1) * ((args.n - 1) / TILE + 1);
    }
};

// What a warp needs to store its part of y: 16 tokens by 256 channels, 128 bytes of each token at a time.
struct Pieces {
    const ScaledArgs &args;
    int group, warp, lane; // the warp within its warpgroup
    uint8_t *memory;       // two pieces
    float2 *columns;       // of the warpgroup: scale and bias of half of a tile's channels
    int count = 0;

    __device__ __forceinline__ void meet() const { bar_sync(1 + group, GROUP); }

    // Scale and bias of a channel of each half of a tile.
    __device__ __forceinline__ void load(float2 (&mine)[2], int channel) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Channel c(args, channel + half * BOX + warp * 32 + lane);
            mine[half] = make_float2(c.scale, c.bias);
        }
    }

    // The sums of `TILES` fragments, whose channels begin at `first` of the half.
    template <int TILES, int OUT>
    __device__ __forceinline__ void store(const float (*sum)[4], int token, int channel, int first,
                                          const float (&scale_a)[2]) {
        constexpr int SIZE = OUT == SCALED_F32 ? 4 : 2;
        uint8_t *piece = memory + count++ % 2 * PIECE_BYTES; // what it held was read before the other one was written
        float4 two[TILES]; // all at once, and so below: a warp waits for shared memory twice a piece
#pragma unroll
        for (int j = 0; j < TILES; ++j) two[j] = reinterpret_cast<const float4 *>(columns + first)[j * 4 + lane % 4];
        const auto finish = [&](int j, float (&v)[4]) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                v[r] = fmaf(sum[j][r] * scale_a[r / 2], r % 2 ? two[j].z : two[j].x, r % 2 ? two[j].w : two[j].y);
        };
        if constexpr (OUT != SCALED_F32) {
            const int row = lane % 16; // of the matrix that this lane gives the address of
#pragma unroll
            for (int j = 0; j < TILES; j += 2) {
                float v[2][4];
                finish(j, v[0]), finish(j + 1, v[1]);
                const uint4 matrices = make_uint4(two_of<OUT>(v[0][0], v[0][1]), two_of<OUT>(v[0][2], v[0][3]),
                                                  two_of<OUT>(v[1][0], v[1][1]), two_of<OUT>(v[1][2], v[1][3]));
                stmatrix_x4(smem_address(piece) + row * 128 + ((j + lane / 16 ^ row % 8) << 4), matrices);
            }
        } else {
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                float v[4];
                finish(j, v);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = half * 8 + lane / 4, at = 2 * j + lane % 4 / 2;
                    *reinterpret_cast<float2 *>(piece + row * 128 + ((at ^ row % 8) << 4) + lane % 2 * 8) =
                        make_float2(v[2 * half], v[2 * half + 1]);
                }
            }
        }
        __syncwarp(); // the piece is whole
        uint8_t *to = static_cast<uint8_t *>(args.y) + (int64_t(token) * args.y_stride + channel + first) * SIZE;
        const int bytes = (args.n - channel - first) * SIZE; // of a row, from here to its end
        if (args.whole) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 4 + lane / 8;
                v[i] = *reinterpret_cast<const uint4 *>(piece + row * 128 + ((lane % 8 ^ row % 8) << 4));
            }
            to += lane / 8 * args.y_stride * SIZE + lane % 8 * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (token + i * 4 + lane / 8 < args.m && lane % 8 * 16 < bytes) *reinterpret_cast<uint4 *>(to) = v[i];
                to += 4 * args.y_stride * SIZE;
            }
        } else {
#pragma unroll 1
            for (int i = lane; i < PIECE_ROWS * 8 * TILES; i += 32) {
                const int row = i / (8 * TILES), at = i % (8 * TILES) * SIZE;
                const uint8_t *from = piece + row * 128 + ((at / 16 ^ row % 8) << 4) + at % 16;
                if (token + row >= args.m || at >= bytes) continue;
                if (SIZE == 2)
                    *reinterpret_cast<uint16_t *>(to + row * args.y_stride * SIZE + at) =
                        *reinterpret_cast<const uint16_t *>(from);
                else
                    *reinterpret_cast<float *>(to + row * args.y_stride * SIZE + at) =
                        *reinterpret_cast<const float *>(from);
            }
        }
    }

    template <int OUT>
    __device__ __forceinline__ void store_half(const float (*sum)[4], int token, int channel,
                                               const float (&scale_a)[2]) {
        constexpr int TILES = OUT == SCALED_F32 ? 4 : 8; // fragments of 128 bytes
#pragma unroll
        for (int j = 0; j < 16; j += TILES) store<TILES, OUT>(sum + j, token, channel, 8 * j, scale_a);
    }

    // `mine`: what `load` said of the tile, asked for before the products.
    __device__ __forceinline__ void store_all(const float (&sum)[32][4], int token, int channel,
                                              const float (&scale_a)[2], const float2 (&mine)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            meet(); // all have read the columns before
            columns[warp * 32 + lane] = mine[half];
            meet(); // these are there
            const float (*of)[4] = sum + half * 16;
            const int first = channel + half * BOX;
            if (args.out == SCALED_BF16)
                store_half<SCALED_BF16>(of, token, first, scale_a);
            else if (args.out == SCALED_F16)
                store_half<SCALED_F16>(of, token, first, scale_a);
            else
                store_half<SCALED_F32>(of, token, first, scale_a);
        }
    }
};

// The ring as a warpgroup that multiplies reads it.
struct Ring {
    const uint8_t *memory;
    uint64_t *full, *empty;
    int stages;
    Place at;

    __device__ __forceinline__ void wait() const { mbarrier_wait(full + at.slot, at.parity); }
    __device__ __forceinline__ uint64_t descriptor() const { return wgmma_descriptor(smem_address(memory)); }
    // Lane i of each warp tells block i of the cluster: either copies into the stage of both.
    __device__ __forceinline__ void release(int slot) const {
        if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(empty + slot, threadIdx.x % 32);
    }
};

// 64 tokens by 256 channels of a warpgroup, sums in the tensor cores' registers. A step's products run while those of
// the next are queued.
struct Fast {
    static __device__ __forceinline__ void multiply(float (&sum)[32][4], Ring &ring, int group, int steps) {
        const uint64_t a = ring.descriptor() + (group * 64 * 128 >> 4), b = ring.descriptor() + (BOX_BYTES >> 4);
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            ring.wait();
            const uint64_t offset = __shfl_sync(0xffffffffu, ring.at.slot, 0) * (STAGE_BYTES >> 4);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                Fp8Wgmma<A, B, 256>::m64k32(sum, a + offset + 2 * j, b + offset + 2 * j, step | j);
            wgmma_commit();
            wgmma_wait_for_earlier();
            if (step) ring.release(before);
            before = ring.at.slot;
            ring.at.advance(ring.stages);
        }
        wgmma_wait();
        wgmma_written(sum);
        ring.release(before);
    }
};

// The same, every step of 128 added in float32, one half of the channels after the other. While one warpgroup adds, the
// other one multiplies.
struct Promoted {
    static __device__ __forceinline__ void multiply(float (&sum)[32][4], Ring &ring, int group, int steps) {
        const uint64_t a = ring.descriptor() + (group * 64 * 128 >> 4), b = ring.descriptor() + (BOX_BYTES >> 4);
        float part[16][4] = {};
#pragma unroll
        for (int i = 0; i < 32; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[i][r] = 0.0f;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            ring.wait();
            // Taken from lane 0: descriptors then are sums of uniform registers.
            const uint64_t offset = __shfl_sync(0xffffffffu, ring.at.slot, 0) * (STAGE_BYTES >> 4);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    Fp8Wgmma<A, B, 128>::m64k32(part, a + offset + 2 * j, b + offset + (half * BOX_BYTES >> 4) + 2 * j,
                                                j);
                wgmma_commit();
                wgmma_wait();
                wgmma_written(part);
                if (half) ring.release(ring.at.slot);
#pragma unroll
                for (int i = 0; i < 16; ++i)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[half * 16 + i][r] += part[i][r];
            }
            ring.at.advance(ring.stages);
        }
    }
};

// What a cluster multiplies, one after another. The steps along k of the first `shared` tiles are shared out evenly, a
// cluster takes its share from the end; then come whole tiles. Of a tile that several share the one with its last steps
// adds up the sums, its own first, then those of the clusters before it: each waits only for blocks that started earlier.
struct Work {
    int tile, first, steps; // the steps of a tile
    int begin, at;          // what is left of the share: steps of all shared tiles
    int whole;

    static __device__ __forceinline__ int share(const ScaledArgs &args, int all, int cluster) {
        return int64_t(args.shared * all) * cluster / (gridDim.x / 2);
    }
    __device__ __forceinline__ Work(const ScaledArgs &args, int all)
        : begin(share(args, all, blockIdx.x / 2)), at(share(args, all, blockIdx.x / 2 + 1)),
          whole(args.shared + blockIdx.x / 2) {}

    __device__ __forceinline__ bool next(const ScaledArgs &args, int all) {
        if (at > begin) {
            tile = (at - 1) / all;
            const int from = max(begin, tile * all);
            first = from - tile * all, steps = at - from, at = from;
            return true;
        }
        tile = whole, first = 0, steps = all, whole += gridDim.x / 2;
        return tile < Tile::count(args);
    }
};

// Where the sums of a tile's earlier steps lie in the workspace, and a flag that says so: of each cluster, block, and
// warpgroup, [32 fragments][128 threads] float4.
struct Parts {
    uint8_t *workspace;
    int place, thread; // of this warpgroup: 2 * block + warpgroup

    __device__ __forceinline__ int at(int cluster) const { return cluster * 2 * GROUPS + place; }
    __device__ __forceinline__ uint32_t *flag(int cluster) const {
        return reinterpret_cast<uint32_t *>(workspace) + at(cluster);
    }
    __device__ __forceinline__ float4 *sums(int cluster) const {
        return reinterpret_cast<float4 *>(workspace + FLAG_BYTES) + int64_t(at(cluster)) * 32 * GROUP + thread;
    }

    __device__ __forceinline__ void give(const float (&sum)[32][4], int cluster) const {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            __stcg(sums(cluster) + i * GROUP, make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
        bar_sync(1 + place % GROUPS, GROUP); // all have written, which the flag tells with what it releases
        if (thread == 0)
            asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag(cluster)) : "memory");
    }
    __device__ __forceinline__ void take(float (&sum)[32][4], int cluster) const {
        if (thread == 0) {
            uint32_t there;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flag(cluster)) : "memory");
            while (!there);
            *flag(cluster) = 0; // for the next launch
        }
        bar_sync(1 + place % GROUPS, GROUP); // the sums are there
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float4 v = __ldcg(sums(cluster) + i * GROUP);
            sum[i][0] += v.x, sum[i][1] += v.y, sum[i][2] += v.z, sum[i][3] += v.w;
        }
    }
};

template <class Product> __device__ __forceinline__ void scaled_wgmma(const ScaledArgs &args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), rank = cluster_ctarank();
    const int all = (args.k - 1) / 128 + 1; // steps of a whole tile
    uint8_t *pieces = memory + args.stages * STAGE_BYTES;
    float2 *columns = reinterpret_cast<float2 *>(pieces + GROUPS * 4 * 2 * PIECE_BYTES);
    uint64_t *full = reinterpret_cast<uint64_t *>(pieces + TAIL_BYTES), *empty = full + args.stages;

    if (threadIdx.x == GROUPS * GROUP) {
        for (int i = 0; i < args.stages; ++i) mbarrier_init(full + i, 1), mbarrier_init(empty + i, 2 * GROUPS * 4);
        fence_mbarrier_init();
        prefetch_tensormap(args.a_map), prefetch_tensormap(args.b_map);
    }
    let_next_start();
    if (threadIdx.x == GROUPS * GROUP) {
        Work work(args, all);
        if (work.next(args, all))
            for (int step = 0; step < min(work.steps, args.stages); ++step)
                cp_async_bulk_prefetch_tensor(args.b_map, (work.first + step) * 128,
                                              Tile(args, work.tile).channel + rank * BOX);
    }
    __syncwarp();
    cluster_sync(); // the barriers of both blocks are ready
    wait_for_previous();

    if (group == GROUPS) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == GROUPS * GROUP) {
            Place at;
            for (Work work(args, all); work.next(args, all);) {
                const Tile tile(args, work.tile);
                for (int step = work.first; step < work.first + work.steps; ++step) {
                    uint8_t *stage = memory + at.slot * STAGE_BYTES;
                    mbarrier_wait(empty + at.slot, at.parity ^ 1); // both blocks have read what the stage held
                    mbarrier_arrive_expect_tx(full + at.slot, STAGE_BYTES);
                    cp_async_bulk_tensor(stage, args.a_map, step * 128, tile.token + rank * BOX, full + at.slot);
                    cp_async_bulk_tensor_multicast(stage + (1 + rank) * BOX_BYTES, args.b_map, step * 128,
                                                   tile.channel + rank * BOX, full + at.slot, BOTH);
                    at.advance(args.stages);
                }
            }
        }
    } else {
        setmaxnreg_inc<232>();
        const int thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;
        Ring ring{memory, full, empty, args.stages, {}};
        Pieces y{args, group, warp, lane, pieces + (group * 4 + warp) * 2 * PIECE_BYTES, columns + group * COLUMNS};
        const Parts parts{static_cast<uint8_t *>(args.workspace), rank * GROUPS + group, thread};
        const int cluster = blockIdx.x / 2;
        float sum[32][4] = {};
        // The second warpgroup begins later, and stays behind: one multiplies while the other one stores.
        if (group == 1 && LEAD < args.stages && LEAD < all && !args.shared) mbarrier_wait(full + LEAD, 0);
        for (Work work(args, all); work.next(args, all);) {
            const Tile tile(args, work.tile);
            const int token = tile.token + rank * BOX + group * 64 + warp * 16, row = token + lane / 4;
            const float scale_a[2] = {token_scale(args, row), token_scale(args, row + 8)};
            float2 mine[2];
            y.load(mine, tile.channel);
            Product::multiply(sum, ring, group, work.steps);
            if (work.first + work.steps < all) {
                parts.give(sum, cluster);
                continue;
            }
            for (int before = cluster; work.first > 0;) {
                parts.take(sum, --before);
                work.first -= min(Work::share(args, all, before + 1) - Work::share(args, all, before), work.first);
            }
            y.store_all(sum, token, tile.channel, scale_a, mine);
        }
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
