// y[m, n] = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])) by wgmma, sm_90a: for many tokens.
// a and b codes by tensor maps, boxes of 128 rows and 128 of k, zeros past m, n, k; y by a map too, 64 rows and 128
// bytes a box, where it has one; see scaled.cuh. A cluster of two blocks has tiles of 256 x 256, a block 128 tokens.
// Sums stay in the tensor cores' registers (fast), or every 128 of k is added in float32 (promoted).
// Grid: as many clusters as fit, each takes tile after tile, down a band of BAND tiles of tokens, then along n.
// Block: two warpgroups that multiply, 64 x 256 each, and one of which a thread copies.
// Shared memory, dynamic: `stages` x {a box of a, two of b, of which each block of a cluster copies one to both}; two
// pieces of y of 8 KiB, and scales and bias of their channels, a warpgroup; the barriers. Rows lie as wgmma.cuh wants.
#include "fp8_wgmma.cuh"
#include "scaled.cuh"
#include "shared_copies.cuh"

constexpr int BOX = 128, BOX_BYTES = BOX * 128, STAGE_BYTES = 3 * BOX_BYTES, TILE = 2 * BOX;
constexpr int GROUPS = 2, GROUP = 128, THREADS = GROUP * (GROUPS + 1);
constexpr int PIECE_ROWS = 64, PIECE_BYTES = PIECE_ROWS * 128, COLUMNS_BYTES = 64 * 8;
constexpr int TAIL_BYTES = GROUPS * (2 * PIECE_BYTES + COLUMNS_BYTES); // after the ring
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

// What a warpgroup needs to store its part of y, a piece of 64 tokens and 128 bytes at a time.
struct Pieces {
    const ScaledArgs &args;
    int group, thread;
    uint8_t *memory; // two pieces
    float2 *columns; // scale and bias of the channels of a piece
    int count = 0;

    __device__ __forceinline__ int channels() const { return args.out == SCALED_F32 ? 32 : 64; }
    __device__ __forceinline__ void meet() const { bar_sync(1 + group, GROUP); }

    // Half the threads have the scale of a channel of the piece, half its bias.
    __device__ __forceinline__ float column(int channel) const {
        const int at = channel + thread % channels(), which = thread / channels();
        if (which > 1 || at >= args.n) return 0.0f;
        return which == 0 ? args.scale_b[int64_t(at) * args.scale_b_step] : args.bias ? args.bias[at] : 0.0f;
    }

    // The sums of `TILES` fragments of 64 tokens. `mine`: what `column` said.
    template <int TILES>
    __device__ __forceinline__ void store(const float (*sum)[4], int token, int channel, const float (&scale_a)[2],
                                          float mine) {
        const int warp = thread / 32, lane = thread % 32;
        uint8_t *piece = memory + count % 2 * PIECE_BYTES;
        if (thread / (8 * TILES) < 2)
            reinterpret_cast<float *>(columns + thread % (8 * TILES))[thread / (8 * TILES)] = mine;
        if (thread == 0) cp_async_bulk_wait_read<1>(); // the piece before the last one has been read
        meet();                                        // and all may write there; the columns are there too
        const auto finish = [&](int j, float (&v)[4]) {
            const float4 two = reinterpret_cast<const float4 *>(columns)[j * 4 + lane % 4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                v[r] = fmaf(sum[j][r] * scale_a[r / 2], r % 2 ? two.z : two.x, r % 2 ? two.w : two.y);
        };
        if constexpr (TILES == 8) {
            const int row = warp * 16 + lane % 16; // of the matrix that this lane gives the address of
#pragma unroll
            for (int j = 0; j < TILES; j += 2) {
                float v[2][4];
                finish(j, v[0]), finish(j + 1, v[1]);
                const uint4 matrices =
                    make_uint4(two_of(v[0][0], v[0][1], args.out), two_of(v[0][2], v[0][3], args.out),
                               two_of(v[1][0], v[1][1], args.out), two_of(v[1][2], v[1][3], args.out));
                stmatrix_x4(smem_address(piece) + row * 128 + ((j + lane / 16 ^ row % 8) << 4), matrices);
            }
        } else {
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                float v[4];
                finish(j, v);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = warp * 16 + half * 8 + lane / 4, at = 2 * j + lane % 4 / 2;
                    *reinterpret_cast<float2 *>(piece + row * 128 + ((at ^ row % 8) << 4) + lane % 2 * 8) =
                        make_float2(v[2 * half], v[2 * half + 1]);
                }
            }
        }
        if (args.mapped) {
            fence_proxy_async();
            meet(); // the piece is whole, and all have read the columns
            if (thread == 0) cp_async_bulk_tensor_store(args.y_map, channel, token, piece);
        } else {
            meet();
            const int size = TILES == 8 ? 2 : 4;
#pragma unroll 1
            for (int i = thread; i < PIECE_ROWS * 8 * TILES; i += GROUP) {
                const int row = i / (8 * TILES), c = i % (8 * TILES);
                const uint8_t *from = piece + row * 128 + ((c * size / 16 ^ row % 8) << 4) + c * size % 16;
                if (token + row >= args.m || channel + c >= args.n) continue;
                const int64_t to = (token + row) * args.y_stride + channel + c;
                if (TILES == 8)
                    static_cast<uint16_t *>(args.y)[to] = *reinterpret_cast<const uint16_t *>(from);
                else
                    static_cast<float *>(args.y)[to] = *reinterpret_cast<const float *>(from);
            }
        }
        ++count;
    }

    // 64 tokens of 256 channels. `first`: the `column` of the first piece, asked for before the products.
    __device__ __forceinline__ void store_all(const float (&sum)[32][4], int token, int channel,
                                              const float (&scale_a)[2], float first) {
        float mine = first;
        if (args.out == SCALED_F32) {
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                const float next = j + 4 < 32 ? column(channel + 8 * j + 32) : first;
                store<4>(sum + j, token, channel + 8 * j, scale_a, mine);
                mine = next;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 32; j += 8) {
                const float next = j + 8 < 32 ? column(channel + 8 * j + 64) : first;
                store<8>(sum + j, token, channel + 8 * j, scale_a, mine);
                mine = next;
            }
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
            const uint64_t offset = ring.at.slot * (STAGE_BYTES >> 4);
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

// The same, every step of 128 added in float32, one half of the channels after the other. a comes into registers first:
// so it is read from shared memory, whose bandwidth decides, once for both. While one warpgroup adds, the other one
// multiplies.
struct Promoted {
    static __device__ __forceinline__ void multiply(float (&sum)[32][4], Ring &ring, int group, int steps) {
        const int lane = threadIdx.x % 32;
        const uint64_t b = ring.descriptor() + (BOX_BYTES >> 4);
        const uint32_t row = smem_address(ring.memory) +
                             (group * 64 + threadIdx.x % GROUP / 32 * 16 + lane % 16) * 128 +
                             ((lane / 16 ^ lane % 8) << 4);
        uint4 a[4];
        const auto load = [&] {
            ring.wait();
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = ldmatrix_x4(row + ring.at.slot * STAGE_BYTES ^ j << 5);
        };
#pragma unroll
        for (int i = 0; i < 32; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[i][r] = 0.0f;
        float part[16][4] = {};
        load();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint64_t offset = ring.at.slot * (STAGE_BYTES >> 4);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    Fp8WgmmaOfRegisters<A, B>::m64n128k32(part, a[j], b + offset + (half * BOX_BYTES >> 4) + 2 * j, j);
                wgmma_commit();
                wgmma_wait();
                wgmma_written(part);
                if (half) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) wgmma_read(a[j]);
                    ring.release(ring.at.slot);
                    ring.at.advance(ring.stages);
                    if (step + 1 < steps) load();
                }
#pragma unroll
                for (int i = 0; i < 16; ++i)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[half * 16 + i][r] += part[i][r];
            }
        }
    }
};

template <class Product> __device__ __forceinline__ void scaled_wgmma(const ScaledArgs &args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    // Taken from lane 0: the compiler then knows that a whole warp goes one way.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), rank = cluster_ctarank();
    const int tiles = Tile::count(args), steps = (args.k - 1) / 128 + 1, clusters = gridDim.x / 2;
    uint8_t *pieces = memory + args.stages * STAGE_BYTES;
    float2 *columns = reinterpret_cast<float2 *>(pieces + GROUPS * 2 * PIECE_BYTES);
    uint64_t *full = reinterpret_cast<uint64_t *>(pieces + TAIL_BYTES), *empty = full + args.stages;

    if (threadIdx.x == GROUPS * GROUP) {
        for (int i = 0; i < args.stages; ++i) mbarrier_init(full + i, 1), mbarrier_init(empty + i, 2 * GROUPS * 4);
        fence_mbarrier_init();
        prefetch_tensormap(args.a_map), prefetch_tensormap(args.b_map);
    }
    let_next_start();
    if (threadIdx.x == GROUPS * GROUP)
        for (int step = 0; step < min(steps, args.stages); ++step)
            cp_async_bulk_prefetch_tensor(args.b_map, step * 128, Tile(args, blockIdx.x / 2).channel + rank * BOX);
    __syncwarp();
    cluster_sync(); // the barriers of both blocks are ready
    wait_for_previous();

    if (group == GROUPS) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == GROUPS * GROUP) {
            Place at;
            for (int index = blockIdx.x / 2; index < tiles; index += clusters) {
                const Tile tile(args, index);
                for (int step = 0; step < steps; ++step) {
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
        Pieces mine{args, group, thread, pieces + group * 2 * PIECE_BYTES, columns + group * 64};
        float sum[32][4] = {};
        // The second warpgroup begins later, and stays behind: one multiplies while the other one stores.
        if (group == 1 && LEAD < args.stages && LEAD < steps) mbarrier_wait(full + LEAD, 0);
        for (int index = blockIdx.x / 2; index < tiles; index += clusters) {
            const Tile tile(args, index);
            const int token = tile.token + rank * BOX + group * 64, row = token + warp * 16 + lane / 4;
            const float scale_a[2] = {token_scale(args, row), token_scale(args, row + 8)};
            const float column = mine.column(tile.channel);
            Product::multiply(sum, ring, group, steps);
            mine.store_all(sum, token, tile.channel, scale_a, column);
        }
        if (thread == 0) cp_async_bulk_wait_read<0>(); // its memory is this block's until then
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
