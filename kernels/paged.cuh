// What the kernels over a paged KV cache share: where its rows are, and a step of decoding.
#pragma once

#include "attention.cuh"
#include "e4m3.cuh"
#include "rope.cuh"
#if !SCALAR_F32
#include "attention_mma_decode.cuh"
#endif

#ifdef CACHE_E4M3
using Cached = E4m3;
#else
using Cached = SCALAR;
#endif

using CachedRows = PagedRows<Cached>;

__device__ __forceinline__ CachedRows paged_rows(const void* cache, const int* block_tables, int sequence,
                                                 int max_blocks, int block_size, int kv_head, int num_kv_heads) {
    return {reinterpret_cast<const Cached*>(cache) + kv_head * HEAD_DIM,
            block_tables + (long long)sequence * max_blocks, (unsigned)block_size, num_kv_heads * HEAD_DIM};
}

// Element d of a row of o: its chunks merged from left to right; context 0 gives 0. row = sequence * H + head.
__device__ __forceinline__ SCALAR merged_element(const float* partial_out, const float* partial_stats, long long row,
                                                 int d, int context, int chunks) {
    const float2* stats = reinterpret_cast<const float2*>(partial_stats) + row * chunks;
    float out = 0.f, maximum = -INFINITY, total = 0.f;
    for (int chunk = 0; chunk * CHUNK_KEYS < context; ++chunk) {
        float left, right;
        merge_totals(maximum, total, stats[chunk].x, stats[chunk].y, left, right);
        out = merge_value(out, partial_out[(row * chunks + chunk) * HEAD_DIM + d], left, right);
    }
    return from_float<SCALAR>(__fmul_rn(out, reciprocal_total(total)));
}

// How a step turns its newest tokens (see rope.cu) before it stores them in `slots` (B), -1: nowhere, and attends. Null
// weights: no norm. All null: another kernel has turned the queries, and stored keys and values.
struct Turn {
    const float *q_weight, *k_weight, *cos, *sin;
    const int* positions;
    const long long* slots;
    float eps;
};

constexpr int TURNED_HEAD_DIM = 128;  // up to which, and of 16 bits, decoding turns; else it is done before

// What a block of decoding has: up to 16 query heads of one kv head, over the keys first ... end - 1 of one chunk.
// Where these have the sequence's newest key, the block makes it and its value from the projection, stores them, and
// puts them into its tiles; this step does not read them from the cache. Reads start before any is waited for.
template <int THREADS> struct DecodeBlock {
    using Element = Cached;
    static constexpr bool TURNS = sizeof(SCALAR) == 2 && HEAD_DIM <= TURNED_HEAD_DIM;
    static constexpr bool VECTORISED = HEAD_DIM / 2 % VECTOR == 0;        // the launcher sees to the addresses
    static constexpr int HALF = HEAD_DIM / 2, AT_ONCE = THREADS / LANES;  // heads
    static_assert(!TURNS || CHUNKS == 1, "a lane has one chunk of each half");

    struct Head {
        Slice x, weight;
    };
    using Words = Vec<unsigned, VECTOR * sizeof(Cached) / sizeof(unsigned)>;  // codes one by one would fill registers

    const Turn& turn_by;
    CachedRows keys, values;
    const SCALAR *q, *newest_key, *newest_value;  // in the projection, the queries of several heads
    int heads, first, end;
    bool stores, has_newest;
    long long newest_slot;
    // This thread's keys first + threadIdx.x, THREADS further, …: the cache's block of each, and the place there
    int listed[CHUNK_KEYS / THREADS], place[CHUNK_KEYS / THREADS];
    Head head;  // of the first AT_ONCE
    float cosine[VECTOR], sine[VECTOR];
    Words share[2];  // of the newest key or value, where this lane has one: halves

    __device__ __forceinline__ int column() const { return threadIdx.x % LANES * VECTOR; }

    // Beyond the value it is the value again: no branch keeps other reads waiting.
    __device__ __forceinline__ Head read_head(int index) const {
        const SCALAR* row = index < heads ? q + index * HEAD_DIM : index == heads ? newest_key : newest_value;
        const float* weight = index < heads ? turn_by.q_weight : turn_by.k_weight;
        Head found = {};
        found.x.load(row, HALF, threadIdx.x % LANES, VECTORISED);
        if (turn_by.q_weight != nullptr) found.weight.load(weight, HALF, threadIdx.x % LANES, VECTORISED);
        return found;
    }

    // Start reading what needs no context.
    __device__ __forceinline__ void read(int position, int max_blocks) {
        head = read_head(threadIdx.x / LANES);
        const unsigned size = keys.block_size, blocks_on = THREADS / size, on = THREADS % size;
        unsigned index = (first + threadIdx.x) / size, at = (first + threadIdx.x) % size;
#pragma unroll
        for (int i = 0; i < CHUNK_KEYS / THREADS; ++i) {
            listed[i] = index < max_blocks ? keys.table[index] : 0;
            place[i] = at;
            index += blocks_on + (at + on >= size);
            at += at + on >= size ? on - size : on;
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) cosine[i] = sine[i] = 0.f;
        if (turn_by.cos != nullptr && column() < HALF) {
            load_floats(cosine, turn_by.cos + (long long)position * HALF, column(), HALF, VECTORISED);
            load_floats(sine, turn_by.sin + (long long)position * HALF, column(), HALF, VECTORISED);
        }
    }

    __device__ __forceinline__ void set_context(int context) {
        end = min(context, first + CHUNK_KEYS);
        has_newest = TURNS && newest_slot >= 0 && end == context;
    }

    __device__ __forceinline__ int cached_end() const { return end - (TURNS && has_newest); }

    __device__ __forceinline__ void note_slots(int* shared) const {
#pragma unroll
        for (int i = 0; i < CHUNK_KEYS / THREADS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            shared[at] = first + at < end ? listed[i] * (int)keys.block_size + place[i] : 0;
        }
    }

    __device__ __forceinline__ SlotRows<Cached> rows_at(const CachedRows& rows, const int* shared) const {
        return {rows.base, shared, first, rows.stride};
    }

    // The queries as attention reads them, to rows `stride` apart; the newest key and value to the cache, and kept.
    // Every thread of the block must call it.
    __device__ __forceinline__ void turn(SCALAR* rows, int stride) {
        const int count = heads + (has_newest ? 2 : 0);
        for (int from = 0; from < count; from += AT_ONCE) {
            const int index = from + threadIdx.x / LANES;
            const bool turned = index <= heads;  // a query or the key
            Head next = {};
            if (from + AT_ONCE < count) next = read_head(index + AT_ONCE);
            if (turn_by.q_weight != nullptr) {
                const Wide inverse = head.x.inverse_rms(HEAD_DIM, turn_by.eps);
                if (turned) head.x.norm(inverse, head.weight);
            }
            if (turn_by.cos != nullptr && turned) head.x.rotate(0, cosine, sine, 1.f);
            if (index < heads) {
                head.x.store(rows + index * stride, HALF, threadIdx.x % LANES, VECTORISED);
            } else if (index < count) {
                share[0] = cached_words(head.x.first[0]);
                share[1] = cached_words(head.x.second[0]);
                const Cached* cache = turned ? keys.base : values.base;
                if (stores) put_share(const_cast<Cached*>(cache) + newest_slot * keys.stride);
            }
            head = next;
        }
    }

    __device__ static __forceinline__ Words cached_words(const float (&x)[VECTOR]) {
        Vec<Cached, VECTOR> numbers;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) numbers[i] = from_float<Cached>(rounded<SCALAR>(x[i]));
        return reinterpret_cast<const Words&>(numbers);
    }

    __device__ __forceinline__ void put_share(Cached* row) const {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            Cached* to = row + part * HALF + column();
            const Cached* from = reinterpret_cast<const Cached*>(&share[part]);
            if constexpr (VECTORISED) {
                if (column() < HALF) store_vec(reinterpret_cast<unsigned*>(to), share[part]);
            } else {
#pragma unroll
                for (int i = 0; i < VECTOR; ++i)
                    if (column() + i < HALF) to[i] = from[i];
            }
        }
    }

    // The newest key (0) or value (1) into a row.
    __device__ __forceinline__ void put(Cached* row, int which) const {
        if (threadIdx.x / LANES == (heads + which) % AT_ONCE) put_share(row);
    }
};

// One query a sequence over one chunk of 256 keys: partial_out (B, H, chunks, D), partial_stats (B, H, chunks, 2) =
// maximum and sum. Grid (chunks, head_tiles * K, B): a block has up to 16 query heads of one kv head, which
// attend(result, block) reduces. Chunks beyond the context are left unwritten. Where there is one chunk at the most,
// this writes o (B, H * D) instead; context 0 gives 0 there. group = H / K; divisions here would delay all reads.
template <int THREADS, class Attend>
__device__ __forceinline__ void decode_chunk(SCALAR* o, float* partial_out, float* partial_stats, const SCALAR* qkv,
                                             const void* k_cache, const void* v_cache, const int* block_tables,
                                             const int* context_lens, const Turn& turn, int group, int num_kv_heads,
                                             int block_size, int max_blocks, Attend attend) {
    const int chunk = blockIdx.x, chunks = gridDim.x, sequence = blockIdx.z, context = context_lens[sequence];
    const long long newest_slot = turn.slots != nullptr ? turn.slots[sequence] : -1;
    const int position = turn.positions != nullptr ? turn.positions[sequence] : 0;
    __syncwarp();  // left alone, the compiler begins these reads last
    int kv_head = blockIdx.y, first_head = 0;
#pragma unroll 1
    for (; kv_head >= num_kv_heads; kv_head -= num_kv_heads) first_head += 16;
    const int num_heads = group * num_kv_heads, head = kv_head * group + first_head;
    const SCALAR* token = qkv + (long long)sequence * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    const SCALAR* key = token + (num_heads + kv_head) * HEAD_DIM;
    DecodeBlock<THREADS> block{
        turn,
        paged_rows(k_cache, block_tables, sequence, max_blocks, block_size, kv_head, num_kv_heads),
        paged_rows(v_cache, block_tables, sequence, max_blocks, block_size, kv_head, num_kv_heads),
        token + head * HEAD_DIM,
        key,
        key + num_kv_heads * HEAD_DIM,
        min(16, group - first_head),
        chunk * CHUNK_KEYS,
    };
    block.stores = first_head == 0;  // of several blocks with the newest key
    block.newest_slot = newest_slot;
    block.read(position, max_blocks);
    if (chunk * CHUNK_KEYS >= context && chunks > 1) return;
    const long long row = (long long)sequence * num_heads + head, at = row * chunks + chunk;
    if (context == 0) {  // then there is one chunk
        zero_rows(o + row * HEAD_DIM, HEAD_DIM, 0, block.heads, block.heads);
        return;
    }
    block.set_context(context);
    const ChunkResult result{partial_out + at * HEAD_DIM, reinterpret_cast<float2*>(partial_stats) + at, chunks,
                             chunks > 1 ? nullptr : o + row * HEAD_DIM};
    attend(result, block);
}
