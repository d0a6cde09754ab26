// The one attention of training, prefill and decoding: any caller of these functions gets the same bits for a query
// row. The keys of a row are taken in chunks of 256 at absolute positions; in a chunk, tiles of keys go through an
// online softmax; chunks are merged from left to right. The order of every sum is fixed, a masked key adds an exact
// zero, a tile or chunk without a visible key changes nothing, and no row sees the rows beside it. Scores are in base
// 2: score = q k * scale with scale = log2(e) / sqrt(D). P is rounded to SCALAR before the product with V, its row sum
// is not.
//
// attention_rows.cuh says where rows are, and merges chunks. Two headers do the rest: attention_mma.cuh (with
// attention_mma_backward.cuh and, for decoding, attention_mma_decode.cuh) for 16-bit SCALAR on tensor cores,
// attention_ffma.cuh for float32, simple. Both give
//   attend_queries (training, prefill), attend_chunk (decoding), gradient_of_queries, gradient_of_keys;
//   rows a block: QUERY_TILE, KEY_ROWS; threads: ATTENTION_THREADS, CHUNK_THREADS;
//   blocks an SM: BLOCKS_AN_SM, KEY_BLOCKS_AN_SM; dynamic shared memory: FORWARD_, QUERY_GRADIENT_,
//   KEY_GRADIENT_SHARED.
#pragma once

#if SCALAR_F32
#include "attention_ffma.cuh"
#else
#include "attention_mma_backward.cuh"
#endif

// What a launcher must know; see attention.py.
extern "C" __constant__ int attention_geometry[5] = {QUERY_TILE, ATTENTION_THREADS, FORWARD_SHARED,
                                                     QUERY_GRADIENT_SHARED, KEY_GRADIENT_SHARED};
