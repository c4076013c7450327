// stream_read: reads src, 16-byte words [words], once, and no more. stream_copy: dst [words] = src [words].
// src and dst start on 16 bytes; neighbouring threads take neighbouring words, a tile is THREADS * LOADS of them.
// Grid: any number of blocks, block b takes tiles b, b + gridDim.x, ...; block of READ_THREADS or COPY_THREADS, LOADS
// 16-byte loads in flight a thread.
// Shared memory: none.
// Source: our own; the two ceilings, read only and read + write, that benchmarks/ compares with.

template <int THREADS> constexpr long long TILE = THREADS * LOADS;

struct StreamArgs {
    const uint4 *src;
    void *dst; // stream_read: uint32 [gridDim.x, READ_THREADS] for the xor of what each thread has read
    long long words;
    long long keep; // whether stream_read stores; 0 where it is timed, and dst may be null
};
static_assert(sizeof(StreamArgs) == ARGS_BYTES, "StreamArgs and kernels.STREAM_ARGS must agree");

// As the linear kernels load weights: through the read-only path, past L1.
__device__ __forceinline__ uint4 load_once(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// The words of the tile at `first` that this thread takes; those past the end are zero.
template <int THREADS>
__device__ __forceinline__ void load_tile(uint4 (&v)[LOADS], const StreamArgs &a, long long first) {
    if (first + TILE<THREADS> <= a.words) { // apart, so that no load of a whole tile waits for a comparison
#pragma unroll
        for (int i = 0; i < LOADS; ++i) v[i] = load_once(a.src + first + i * THREADS + threadIdx.x);
    } else {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const long long at = first + i * THREADS + threadIdx.x;
            v[i] = make_uint4(0, 0, 0, 0);
            if (at < a.words) v[i] = load_once(a.src + at);
        }
    }
}

extern "C" __global__ void __launch_bounds__(READ_THREADS) stream_read(const __grid_constant__ StreamArgs a) {
    constexpr long long TILE = ::TILE<READ_THREADS>;
    unsigned int seen = 0;
    for (long long first = blockIdx.x * TILE; first < a.words; first += gridDim.x * TILE) {
        uint4 v[LOADS];
        load_tile<READ_THREADS>(v, a, first);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) seen ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    // The compiler cannot know that `keep` is 0 when this is timed, so the loads stay.
    if (a.keep) static_cast<unsigned int *>(a.dst)[blockIdx.x * READ_THREADS + threadIdx.x] = seen;
}

// Stores that are the first to leave L2.
extern "C" __global__ void __launch_bounds__(COPY_THREADS) stream_copy(const __grid_constant__ StreamArgs a) {
    constexpr long long TILE = ::TILE<COPY_THREADS>;
    for (long long first = blockIdx.x * TILE; first < a.words; first += gridDim.x * TILE) {
        uint4 v[LOADS];
        load_tile<COPY_THREADS>(v, a, first);
        uint4 *to = static_cast<uint4 *>(a.dst) + first + threadIdx.x;
        if (first + TILE <= a.words) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) __stcs(to + i * COPY_THREADS, v[i]);
        } else {
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * COPY_THREADS + threadIdx.x < a.words) __stcs(to + i * COPY_THREADS, v[i]);
        }
    }
}
