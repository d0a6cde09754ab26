// What every attention kernel shares: where the rows of sequences, keys and values are, and the merge of chunks of
// keys. attention.cuh says how keys are reduced.
#pragma once

#include "common.cuh"
#include "mma.cuh"

constexpr int CHUNK_KEYS = 256;
constexpr int MAX_HEAD_DIM = 256;

static_assert(HEAD_DIM % 4 == 0 && HEAD_DIM <= MAX_HEAD_DIM, "head_dim must be a multiple of 4, at most MAX_HEAD_DIM");

// ---- where sequences, keys and values are ----

// A piece of `rows` rows of one sequence, which starts at packed row `start` and has `length` rows; `first` counts
// within the sequence.
struct Piece {
    int sequence, start, length, first;
    bool ghost;  // rows beyond the last sequence
};

// Piece number `index` of packed sequences with borders cu_seqlens (num_seqs + 1). Sequence b owns the numbers from
// cu_seqlens[b] / rows + b on, which are enough for its ceil(length / rows) pieces; a number that is too many gets
// first >= length. So total_tokens / rows + num_seqs + 1 numbers cover everything, and no length need be known on the
// host. Rows beyond the last sequence are one more sequence, a ghost.
__device__ inline Piece find_piece(const int* cu_seqlens, int num_seqs, int total_tokens, int index, int rows) {
    int low = 0, high = num_seqs + 1;
    while (high - low > 1) {  // 32 probes at once; cu_seqlens[low] / rows + low <= index holds throughout
        int step = (high - low + 31) / 32, probe = low + lane() * step;
        bool before = probe < high && cu_seqlens[probe] / rows + probe <= index;
        low += (__popc(__ballot_sync(FULL_MASK, before)) - 1) * step;
        high = min(low + step, high);
    }
    Piece piece;
    piece.sequence = low;
    piece.ghost = low == num_seqs;
    piece.start = cu_seqlens[low];
    piece.length = (piece.ghost ? total_tokens : cu_seqlens[low + 1]) - piece.start;
    piece.first = (index - piece.start / rows - low) * rows;
    return piece;
}

// Rows of one head in a packed array: row i at base + i * stride.
struct PackedRows {
    using Element = SCALAR;
    static constexpr bool PAGED = false;
    const SCALAR* base;
    int stride;
    __device__ __forceinline__ const SCALAR* row(int i) const { return base + (long long)i * stride; }
};

// Rows of one head that a sequence sees: `before` rows of its prefix, which end `gap` rows before the sequence's first,
// then the sequence's own. Row `before` at base.
struct PrefixedRows {
    using Element = SCALAR;
    static constexpr bool PAGED = false;
    const SCALAR* base;
    int stride, before, gap;
    __device__ __forceinline__ const SCALAR* row(int i) const {
        return base + (long long)(i - before - (i < before ? gap : 0)) * stride;
    }
};

// Rows of one kv head in a paged cache (num_blocks, block_size, K, D): base is cache + head * D, stride K * D. T: what
// the cache holds, SCALAR or E4m3.
template <class T> struct PagedRows {
    using Element = T;
    static constexpr bool PAGED = true;
    const T* base;
    const int* table;
    unsigned block_size;
    int stride;
    __device__ __forceinline__ int slot(int i) const {
        unsigned block = (unsigned)i / block_size;
        return table[block] * block_size + ((unsigned)i - block * block_size);
    }
    __device__ __forceinline__ const T* row(int i) const { return base + (long long)slot(i) * stride; }
};

// Rows of a paged cache after their slots have been looked up: slots[i] belongs to key first + i.
template <class T> struct SlotRows {
    using Element = T;
    const T* base;
    const int* slots;
    int first, stride;
    __device__ __forceinline__ const T* row(int i) const { return base + (long long)slots[i - first] * stride; }
};

// What a gradient kernel knows of one sequence: row t of head h of qkv lies at qkv + t * row_stride + h * HEAD_DIM, of
// o's gradient at do_ + t * num_heads * HEAD_DIM + h * HEAD_DIM, of lse and delta at t * num_heads + h.
struct Sequence {
    SCALAR* dqkv;
    const SCALAR *do_, *qkv;
    const float *lse, *delta;
    int length, num_heads, num_kv_heads;
    float scale;  // 1 / sqrt(D), without log2(e)

    __device__ __forceinline__ int row_stride() const { return (num_heads + 2 * num_kv_heads) * HEAD_DIM; }
    __device__ __forceinline__ PackedRows head(int h) const { return {qkv + h * HEAD_DIM, row_stride()}; }
    __device__ __forceinline__ PackedRows head_do(int h) const { return {do_ + h * HEAD_DIM, num_heads * HEAD_DIM}; }
    __device__ __forceinline__ SCALAR* gradient(int h, int row) const {
        return dqkv + (long long)row * row_stride() + h * HEAD_DIM;
    }

    // Rows of head h that queries see, how many come before the sequence's own, and the end of the queries that see
    // the sequence's keys.
    __device__ __forceinline__ PackedRows seen(int h) const { return head(h); }
    __device__ static __forceinline__ int before() { return 0; }
    __device__ __forceinline__ int query_end() const { return length; }
};

__device__ __forceinline__ Sequence sequence_of(const Piece& piece, SCALAR* dqkv, const SCALAR* do_, const SCALAR* qkv,
                                                const float* lse, const float* delta, int num_heads, int num_kv_heads,
                                                float scale) {
    const long long token = piece.start, row = token * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    return {dqkv + row,
            do_ + token * num_heads * HEAD_DIM,
            qkv + row,
            lse + token * num_heads,
            delta + token * num_heads,
            piece.length,
            num_heads,
            num_kv_heads,
            scale};
}

// What a sequence sees before its own rows: `rows` rows, which end `gap` rows before its first. end: one past the last
// row whose queries see the sequence's keys, counted from its first.
struct Prefix {
    int rows, gap, end;
};

// The same of a sequence that may see a prefix, or be one.
struct PrefixedSequence : Sequence {
    Prefix prefix;

    __device__ __forceinline__ PrefixedRows seen(int h) const {
        return {qkv + h * HEAD_DIM, row_stride(), prefix.rows, prefix.gap};
    }
    __device__ __forceinline__ int before() const { return prefix.rows; }
    __device__ __forceinline__ int query_end() const { return prefix.end; }
};

// Zero rows first ... first + rows - 1 (below count) of D values at base + row * stride: the result of rows that belong
// to no sequence.
__device__ inline void zero_rows(SCALAR* base, long long stride, int first, int rows, int count) {
    for (int i = threadIdx.x; i < rows * HEAD_DIM; i += blockDim.x)
        if (first + i / HEAD_DIM < count)
            base[(first + i / HEAD_DIM) * stride + i % HEAD_DIM] = from_float<SCALAR>(0.f);
}

// ---- the merge ----

// -infinity - (-infinity) must not arise: a maximum over no key counts as 0.
__device__ __forceinline__ float finite_maximum(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// The merge of a row's running result (maximum, total, out) with the next chunk's: factors for the two, then each
// element of out.
__device__ __forceinline__ void merge_totals(float& maximum, float& total, float chunk_maximum, float chunk_total,
                                             float& left, float& right) {
    float merged = fmaxf(maximum, chunk_maximum), base = finite_maximum(merged);
    left = exp2_fast(__fsub_rn(maximum, base));
    right = exp2_fast(__fsub_rn(chunk_maximum, base));
    total = __fmaf_rn(total, left, __fmul_rn(chunk_total, right));
    maximum = merged;
}

__device__ __forceinline__ float merge_value(float running, float chunk, float left, float right) {
    return __fmaf_rn(running, left, __fmul_rn(chunk, right));
}

// 1 / row sum (one Newton step; the division operator would cost a call); a row that saw no key gives 0.
__device__ __forceinline__ float reciprocal_total(float total) {
    float guess = reciprocal_fast(total);
    return total == 0.f ? 0.f : __fmaf_rn(guess, __fmaf_rn(-total, guess, 1.f), guess);
}

// What one chunk of keys gives up to 16 rows: unnormalised results and (maximum, sum) for the merge with others, or,
// where there is no other chunk, what the merge would make of it: rows of attention.
struct ChunkResult {
    float* out;     // row r at out + r * stride * HEAD_DIM
    float2* stats;  // row r at stats + r * stride
    long long stride;
    SCALAR* o;  // row r at o + r * HEAD_DIM; null: others follow
};

// A row of its only chunk: element x becomes finish(x).
struct OnlyChunk {
    float left, right, factor;

    __device__ __forceinline__ OnlyChunk(float chunk_maximum, float chunk_total) {
        float maximum = -INFINITY, total = 0.f;
        merge_totals(maximum, total, chunk_maximum, chunk_total, left, right);
        factor = reciprocal_total(total);
    }

    __device__ __forceinline__ float finish(float x) const {
        return __fmul_rn(merge_value(0.f, x, left, right), factor);
    }
};

__device__ __forceinline__ float natural_lse(float maximum, float total) {
    return __fmaf_rn(maximum, LN_2, logf(total));
}
