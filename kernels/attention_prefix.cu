// Causal attention of packed sequences as in attention.cu, where sequences may share the rows of a prefix. A query at
// place i of a sequence sees the rows of its prefix, then the sequence's own rows 0 ... i. o and lse have the bits of
// the sequence with the prefix before it in one piece: keys are counted from the prefix's first.
//   prefixes (B, 3) int32, a row a sequence: its prefix's first row, the prefix's number of rows (0: none), the end of
//   the rows whose queries see the sequence's keys
// A prefix is a sequence too. Those that see it follow it at once, so its third number is the end of the last of them;
// a sequence that is no prefix has its own end there.
// specialise: SCALAR=bf16,f16,f32 HEAD_DIM=64,128,…
// arch: sm_80 sm_89 sm_90a sm_100 sm_120

#include "attention.cuh"

__device__ __forceinline__ Prefix prefix_of(const Piece& piece, const int* prefixes) {
    prefixes += 3ll * piece.sequence;
    const int first = prefixes[0], rows = prefixes[1], end = prefixes[2];
    return {rows, rows > 0 ? piece.start - (first + rows) : 0, end - piece.start};
}

// As attention_forward.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, BLOCKS_AN_SM)
attention_prefix_forward(SCALAR* o, float* lse, const SCALAR* qkv, const int* cu_seqlens, const int* prefixes,
                         int total_tokens, int num_seqs, int num_heads, int num_kv_heads, float scale) {
    const int head = blockIdx.x % num_heads, kv_head = head / (num_heads / num_kv_heads);
    const int index = (gridDim.x - 1 - blockIdx.x) / num_heads;
    const Piece piece = find_piece(cu_seqlens, num_seqs, total_tokens, index, QUERY_TILE);
    if (piece.first >= piece.length) return;
    const int o_stride = num_heads * HEAD_DIM, qkv_stride = (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    o += (long long)piece.start * o_stride + head * HEAD_DIM;
    lse += (long long)piece.start * num_heads + head;
    if (piece.ghost) {
        zero_rows(o, o_stride, piece.first, QUERY_TILE, piece.length);
        if (threadIdx.x < QUERY_TILE && piece.first + threadIdx.x < piece.length)
            lse[(piece.first + (long long)threadIdx.x) * num_heads] = 0.f;
        return;
    }
    const Prefix prefix = prefix_of(piece, prefixes);
    const SCALAR* rows = qkv + (long long)piece.start * qkv_stride;
    const PackedRows q{rows + head * HEAD_DIM, qkv_stride};
    const PrefixedRows k{rows + (num_heads + kv_head) * HEAD_DIM, qkv_stride, prefix.rows, prefix.gap};
    const PrefixedRows v{k.base + num_kv_heads * HEAD_DIM, qkv_stride, prefix.rows, prefix.gap};
    attend_queries(o, o_stride, lse, num_heads, q, k, v, piece.first, piece.length, prefix.rows, scale);
}

// As attention_backward_q.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, BLOCKS_AN_SM)
attention_prefix_backward_q(SCALAR* dqkv, const SCALAR* do_, const SCALAR* qkv, const float* lse, const float* delta,
                            const int* cu_seqlens, const int* prefixes, int total_tokens, int num_seqs, int num_heads,
                            int num_kv_heads, float scale) {
    const int head = blockIdx.x % num_heads, index = (gridDim.x - 1 - blockIdx.x) / num_heads;
    const Piece piece = find_piece(cu_seqlens, num_seqs, total_tokens, index, QUERY_TILE);
    if (piece.first >= piece.length) return;
    const Sequence sequence = sequence_of(piece, dqkv, do_, qkv, lse, delta, num_heads, num_kv_heads, scale);
    if (piece.ghost)
        zero_rows(sequence.gradient(head, 0), sequence.row_stride(), piece.first, QUERY_TILE, piece.length);
    else
        gradient_of_queries(PrefixedSequence{sequence, prefix_of(piece, prefixes)}, head, piece.first);
}

// As attention_backward_kv. The keys of a prefix meet the queries of all sequences that see it, in the order of rows,
// the longest work by far. So the grid has every piece twice: its first half does those of prefixes, its second the
// others.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, KEY_BLOCKS_AN_SM)
attention_prefix_backward_kv(SCALAR* dqkv, const SCALAR* do_, const SCALAR* qkv, const float* lse, const float* delta,
                             const int* cu_seqlens, const int* prefixes, int total_tokens, int num_seqs, int num_heads,
                             int num_kv_heads, float scale) {
    const int half = gridDim.x / 2, block = blockIdx.x % half, kv_head = block % num_kv_heads;
    const Piece piece = find_piece(cu_seqlens, num_seqs, total_tokens, block / num_kv_heads, KEY_ROWS);
    if (piece.first >= piece.length) return;
    const Prefix prefix = piece.ghost ? Prefix{0, 0, 0} : prefix_of(piece, prefixes);
    if ((prefix.end > piece.length) != (blockIdx.x < half)) return;
    const Sequence sequence = sequence_of(piece, dqkv, do_, qkv, lse, delta, num_heads, num_kv_heads, scale);
    if (piece.ghost) {
        zero_rows(sequence.gradient(num_heads + kv_head, 0), sequence.row_stride(), piece.first, KEY_ROWS,
                  piece.length);
        zero_rows(sequence.gradient(num_heads + num_kv_heads + kv_head, 0), sequence.row_stride(), piece.first,
                  KEY_ROWS, piece.length);
    } else {
        gradient_of_keys(PrefixedSequence{sequence, prefix}, kv_head, piece.first);
    }
}
