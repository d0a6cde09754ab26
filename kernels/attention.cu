// Causal attention of packed sequences, o = softmax(q k^T / sqrt(D)) v within each sequence; query head h uses kv head
// h * K / H.
//   qkv (T, (H + 2K) * D) holds heads of q, k, v; o, do (T, H * D); lse, delta (T, H) float32
//   cu_seqlens (B + 1) int32, ascending from 0; rows from cu_seqlens[B] to T belong to no sequence and give zeros
// Blocks of ATTENTION_THREADS threads; grids are the launcher's upper bound, see find_piece.
// specialise: SCALAR=bf16,f16,f32 HEAD_DIM=64,128,…
// arch: sm_80 sm_89 sm_90a sm_100 sm_120

#include "attention.cuh"

// o and the natural log-sum-exp of the scaled scores. Block = QUERY_TILE queries of one head, the last pieces (with the
// most keys) first.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, BLOCKS_AN_SM)
attention_forward(SCALAR* o, float* lse, const SCALAR* qkv, const int* cu_seqlens, int total_tokens, int num_seqs,
                  int num_heads, int num_kv_heads, float scale) {
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
    const SCALAR* rows = qkv + (long long)piece.start * qkv_stride;
    const PackedRows q{rows + head * HEAD_DIM, qkv_stride}, k{rows + (num_heads + kv_head) * HEAD_DIM, qkv_stride};
    const PackedRows v{rows + (num_heads + num_kv_heads + kv_head) * HEAD_DIM, qkv_stride};
    attend_queries(o, o_stride, lse, num_heads, q, k, v, piece.first, piece.length, 0, scale);
}

constexpr int DELTA_THREADS = 256, DELTA_LANES = 8;  // of a block of attention_delta, and of one of its rows
constexpr int DELTA_ROWS = DELTA_THREADS / DELTA_LANES;
constexpr int DELTA_VECTOR = HEAD_DIM % 8 == 0 ? 8 : 4;

// delta = rowsum(do * o): the tree of a warp whose lanes do two values each, 64 on two more, … Four neighbours of that
// tree are one lane here, which reads 16 bytes at a time.
extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
attention_delta(float* delta, const SCALAR* do_, const SCALAR* o, long long rows) {
    const long long row = blockIdx.x * (long long)DELTA_ROWS + threadIdx.x / DELTA_LANES;
    float sum[4] = {};
#pragma unroll
    for (int start = 0; start < HEAD_DIM; start += 8 * DELTA_LANES)
#pragma unroll
        for (int part = 0; part < 8; part += DELTA_VECTOR) {
            const int d = start + threadIdx.x % DELTA_LANES * 8 + part;
            if (row >= rows || d >= HEAD_DIM) continue;
            const auto x = load_vec<DELTA_VECTOR>(do_ + row * HEAD_DIM + d);
            const auto y = load_vec<DELTA_VECTOR>(o + row * HEAD_DIM + d);
#pragma unroll
            for (int i = 0; i < DELTA_VECTOR; i++)
                sum[(part + i) / 2] = __fmaf_rn(to_float(x[i]), to_float(y[i]), sum[(part + i) / 2]);
        }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = warp_sum<DELTA_LANES>(sum[i]);
    if (row < rows && threadIdx.x % DELTA_LANES == 0) delta[row] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The q part of dqkv. Block = QUERY_TILE queries of one head, the last pieces first. Here and below scale is 1/sqrt(D).
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, BLOCKS_AN_SM)
attention_backward_q(SCALAR* dqkv, const SCALAR* do_, const SCALAR* qkv, const float* lse, const float* delta,
                     const int* cu_seqlens, int total_tokens, int num_seqs, int num_heads, int num_kv_heads,
                     float scale) {
    const int head = blockIdx.x % num_heads, index = (gridDim.x - 1 - blockIdx.x) / num_heads;
    const Piece piece = find_piece(cu_seqlens, num_seqs, total_tokens, index, QUERY_TILE);
    if (piece.first >= piece.length) return;
    const Sequence sequence = sequence_of(piece, dqkv, do_, qkv, lse, delta, num_heads, num_kv_heads, scale);
    if (piece.ghost)
        zero_rows(sequence.gradient(head, 0), sequence.row_stride(), piece.first, QUERY_TILE, piece.length);
    else
        gradient_of_queries(sequence, head, piece.first);
}

// The k and v parts of dqkv. Block = KEY_ROWS keys of one kv head, the first pieces (with the most queries) first
// within a sequence.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, KEY_BLOCKS_AN_SM)
attention_backward_kv(SCALAR* dqkv, const SCALAR* do_, const SCALAR* qkv, const float* lse, const float* delta,
                      const int* cu_seqlens, int total_tokens, int num_seqs, int num_heads, int num_kv_heads,
                      float scale) {
    const int kv_head = blockIdx.x % num_kv_heads;
    const Piece piece = find_piece(cu_seqlens, num_seqs, total_tokens, blockIdx.x / num_kv_heads, KEY_ROWS);
    if (piece.first >= piece.length) return;
    const Sequence sequence = sequence_of(piece, dqkv, do_, qkv, lse, delta, num_heads, num_kv_heads, scale);
    if (piece.ghost) {
        zero_rows(sequence.gradient(num_heads + kv_head, 0), sequence.row_stride(), piece.first, KEY_ROWS,
                  piece.length);
        zero_rows(sequence.gradient(num_heads + num_kv_heads + kv_head, 0), sequence.row_stride(), piece.first,
                  KEY_ROWS, piece.length);
    } else {
        gradient_of_keys(sequence, kv_head, piece.first);
    }
}
