// Attention on tensor cores (see attention.cuh): softmax, merge, and the loops over tiles. The layout of scores and
// results over threads is that of tiles_mma.cuh, whichever instructions multiply.
#pragma once

#include "attention_rows.cuh"
#include "tiles_mma.cuh"
#include "tiles_wgmma.cuh"

// The tiles of a block that owns a piece of queries or keys. Decoding uses WarpTiles always: it has few query rows.
#if __CUDA_ARCH_FEAT_SM90_ALL && (HEAD_DIM == 64 || HEAD_DIM == 128)
using BlockTiles = WarpgroupTiles;
#else
using BlockTiles = WarpTiles;
#endif

constexpr int KEY_TILE = WIDE ? 32 : 64;
constexpr int QUERY_WARPS = WIDE ? 2 : 4;
constexpr int QUERY_TILE = QUERY_WARPS * 16;
constexpr int STAGES = WIDE ? 1 : 2;
constexpr int ATTENTION_THREADS = QUERY_WARPS * WARP;
constexpr int BLOCKS_AN_SM = PADDED_DIM > 64 ? 2 : 3;  // what registers allow without a spill
constexpr int KEY_TILE_SIZE = BlockTiles::SIZE<KEY_TILE>, QUERY_TILE_SIZE = BlockTiles::SIZE<QUERY_TILE>;
constexpr int RUNNING_SIZE = WIDE ? QUERY_TILE * PADDED_DIM : 0;
constexpr int FORWARD_SHARED = (QUERY_TILE_SIZE + STAGES * 2 * KEY_TILE_SIZE) * sizeof(SCALAR) +
                               RUNNING_SIZE * sizeof(float) + 2 * KEY_TILE * sizeof(int);

template <int ROWS, class Source>
__device__ __forceinline__ void copy_block_rows(SCALAR* tile, const Source& source, int first, int end) {
    copy_rows<BlockTiles, ROWS, ATTENTION_THREADS, BlockTiles::UNROLL>(tile, source, first, end);
}

// Rows of two sources to two neighbouring tiles.
template <int ROWS, class Source>
__device__ __forceinline__ void copy_block_pair(SCALAR* tiles, const Source& first_source, const Source& second_source,
                                                int first, int end) {
    copy_block_rows<ROWS>(tiles, first_source, first, end);
    copy_block_rows<ROWS>(tiles + BlockTiles::SIZE<ROWS>, second_source, first, end);
}

// From here on tile number `tile` is there for the whole block, and every warp is done with the one before. With a
// single stage it is fetched only now.
template <class Fetch>
__device__ __forceinline__ void take_tile(Fetch& fetch, int tile) {
    if (STAGES == 1) {
        __syncthreads();
        fetch(tile);
    }
    copies_wait<0>();
    BlockTiles::share();
}

// ---- softmax over one chunk, and the merge ----

// Unnormalised attention of 16 rows over the part of a chunk seen so far, in 8 TILES columns; `total` is this thread's
// share of the row sum until close().
template <int TILES> struct ChunkColumns {
    float out[TILES][4];
    float maximum[2], total[2];

    __device__ __forceinline__ void clear() {
        ::clear(out);
        maximum[0] = maximum[1] = -INFINITY;
        total[0] = total[1] = 0.f;
    }

    __device__ __forceinline__ void close() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] = __fadd_rn(total[r], __shfl_xor_sync(FULL_MASK, total[r], 1));
            total[r] = __fadd_rn(total[r], __shfl_xor_sync(FULL_MASK, total[r], 2));
        }
    }
};

using Chunk = ChunkColumns<OUT_TILES>;
using Scores = float[KEY_TILE / 8][4];

// Turn products q k of the keys from first_key on into weights under the chunk's new maximum, nothing for those from
// limits[row] on, and rescale what the chunk holds already.
template <int TILES>
__device__ __forceinline__ void weigh_tile(ChunkColumns<TILES>& chunk, Scores& scores, int first_key,
                                           const int (&limits)[2], float scale) {
    if (first_key + KEY_TILE > min(limits[0], limits[1])) {
        for_each_value<KEY_TILE / 8>([&](int j, int e) {
            if (first_key + column_of(j, e) >= limits[e >> 1]) scores[j][e] = -INFINITY;
        });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = -INFINITY;
#pragma unroll
        for (int j = 0; j < KEY_TILE / 8; ++j)
            highest = fmaxf(highest, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
        highest = fmaxf(__fmul_rn(highest, scale), chunk.maximum[r]);
        float base = finite_maximum(highest), factor = exp2_fast(__fsub_rn(chunk.maximum[r], base)), sum = 0.f;
        chunk.maximum[r] = highest;
        for_each_value_of_half<KEY_TILE / 8>(r, [&](int j, int e) {
            scores[j][e] = exp2_fast(__fmaf_rn(scores[j][e], scale, -base));
            sum = __fadd_rn(sum, scores[j][e]);
        });
        chunk.total[r] = __fmaf_rn(chunk.total[r], factor, sum);
        for_each_value_of_half<TILES>(r,
                                      [&](int j, int e) { chunk.out[j][e] = __fmul_rn(chunk.out[j][e], factor); });
    }
}

// The running result of 16 rows; where WIDE, out lies in shared memory (16 * PADDED_DIM floats a warp).
struct Running {
    float kept[WIDE ? 1 : OUT_TILES * 4];
    float* shared;
    float maximum[2], total[2];

    __device__ __forceinline__ float& at(int i) {
        if constexpr (WIDE) return shared[i * 32 + lane()];
        return kept[WIDE ? 0 : i];
    }

    __device__ __forceinline__ void clear(float* buffer) {
        shared = buffer;
#pragma unroll
        for (int i = 0; i < OUT_TILES * 4; ++i) at(i) = 0.f;
        maximum[0] = maximum[1] = -INFINITY;
        total[0] = total[1] = 0.f;
    }

    // Take in a finished chunk and clear it.
    __device__ __forceinline__ void merge(Chunk& chunk) {
        chunk.close();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float left, right;
            merge_totals(maximum[r], total[r], chunk.maximum[r], chunk.total[r], left, right);
            for_each_value_of_half<OUT_TILES>(r, [&](int j, int e) {
                at(j * 4 + e) = merge_value(at(j * 4 + e), chunk.out[j][e], left, right);
            });
        }
        chunk.clear();
    }
};

// ---- one block: QUERY_TILE queries of one head over all keys they see (training and prefill) ----

// Dynamic shared memory: a tile of queries, STAGES x (keys, values); where WIDE, the warps' running results; the slots
// of two tiles of paged keys. Query i (first <= i < count) of the sequence stands at position offset + i and sees the
// keys up to there. q.row(i), o + i * o_stride, lse + i * lse_stride (lse may be null).
template <class Keys>
__device__ __forceinline__ void attend_queries(SCALAR* o, int o_stride, float* lse, int lse_stride, const PackedRows& q,
                                               const Keys& keys, const Keys& values, int first, int count, int offset,
                                               float scale) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SCALAR *queries = reinterpret_cast<SCALAR*>(shared_bytes), *tiles = queries + QUERY_TILE_SIZE;
    const int first_row = first + warp_index() * 16;
    const int block_end = offset + min(first + QUERY_TILE, count);  // keys that any row of the block sees
    const int warp_end = BlockTiles::TOGETHER ? block_end : first_row < count ? offset + min(first_row + 16, count) : 0;

    int rows[2], limits[2];
    for (int r = 0; r < 2; ++r) {
        rows[r] = first_row + lane() / 4 + r * 8;
        limits[r] = rows[r] < count ? offset + rows[r] + 1 : 0;
    }

    float* running_tile = reinterpret_cast<float*>(tiles + STAGES * 2 * KEY_TILE_SIZE);
    int* slots = reinterpret_cast<int*>(running_tile + RUNNING_SIZE);
    Chunk chunk;
    Running running;
    chunk.clear();
    running.clear(running_tile + warp_index() * 16 * PADDED_DIM);
    BlockTiles::clear_padding<ATTENTION_THREADS>(queries, QUERY_TILE + STAGES * 2 * KEY_TILE);
    copy_block_rows<QUERY_TILE>(queries, q, first, count);

    const bool looks_up = Keys::PAGED && threadIdx.x < KEY_TILE;
    auto look_up = [&](int tile) {
        if constexpr (Keys::PAGED) {
            const int key = tile * KEY_TILE + threadIdx.x;
            return looks_up && key < block_end ? keys.slot(key) : 0;
        }
        return 0;
    };
    auto note = [&](int tile, int slot) {
        if (looks_up) slots[tile % 2 * KEY_TILE + threadIdx.x] = slot;
    };
    auto fetch = [&](int tile) {
        SCALAR* stage = tiles + tile % STAGES * 2 * KEY_TILE_SIZE;
        const int first_key = tile * KEY_TILE;
        if constexpr (Keys::PAGED) {
            const int* known = slots + tile % 2 * KEY_TILE;
            using Slots = SlotRows<typename Keys::Element>;
            copy_block_pair<KEY_TILE>(stage, Slots{keys.base, known, first_key, keys.stride},
                                      Slots{values.base, known, first_key, values.stride}, first_key, block_end);
        } else {
            copy_block_pair<KEY_TILE>(stage, keys, values, first_key, block_end);
        }
        copies_commit();
    };
    if (Keys::PAGED) {
        note(0, look_up(0));
        note(1, look_up(1));
        __syncthreads();
    }
    const int num_tiles = (block_end + KEY_TILE - 1) / KEY_TILE;
    if (STAGES == 2) fetch(0);
    for (int tile = 0; tile < num_tiles; ++tile) {
        take_tile(fetch, tile);
        const int first_key = tile * KEY_TILE;
        const SCALAR* stage = tiles + tile % STAGES * 2 * KEY_TILE_SIZE;
        Scores scores;
        const bool seen = BlockTiles::TOGETHER || first_key < warp_end;
        if (seen) BlockTiles::multiply_transposed(scores, queries, stage);
        if (STAGES == 2 && tile + 1 < num_tiles) fetch(tile + 1);  // the other stage: every warp is done with it
        const int next_slot = look_up(tile + 2);
        if (seen) {
            BlockTiles::finish<0>(scores);
            weigh_tile(chunk, scores, first_key, limits, scale);
            BlockTiles::multiply(chunk.out, scores, stage + KEY_TILE_SIZE);
            BlockTiles::finish<0>(chunk.out);
            if ((first_key + KEY_TILE) % CHUNK_KEYS == 0 || first_key + KEY_TILE >= warp_end) running.merge(chunk);
        }
        note(tile + 2, next_slot);
    }

    float factors[2];
    for (int r = 0; r < 2; ++r) {
        factors[r] = reciprocal_total(running.total[r]);
        if (lse != nullptr && rows[r] < count && (lane() & 3) == 0)
            lse[(long long)rows[r] * lse_stride] = natural_lse(running.maximum[r], running.total[r]);
    }
    __syncthreads();  // the tiles are free
    write_rows(queries, o + (long long)first_row * o_stride, o_stride, count - first_row, factors,
               [&](int j, int e) { return running.at(j * 4 + e); });
}

// ---- one warp: up to 16 query rows (the heads that share a kv head) over one chunk (decoding) ----

constexpr int CHUNK_THREADS = 32;

// Where tiles of keys or values land as a cache has them: numbers are multiplied there, codes are decoded before, in
// one of PARTS parts after the other.
template <class Element, int CODED_PARTS> struct Landing {
    static constexpr bool CODED = sizeof(Element) != sizeof(SCALAR);
    static constexpr int PARTS = CODED ? CODED_PARTS : 1, ROWS = KEY_TILE / PARTS;
    static constexpr int BYTES = KEY_TILE * (CODED ? HEAD_DIM : WarpTiles::ROW_STRIDE * (int)sizeof(SCALAR));
    static constexpr int DECODED = CODED ? WarpTiles::SIZE<ROWS> : 0;  // elements

    template <int THREADS, class Source>
    __device__ static __forceinline__ void fetch(unsigned char* landing, const Source& source, int first, int end) {
        if constexpr (CODED)
            copy_codes<KEY_TILE, THREADS>(landing, source, first, end);
        else
            copy_rows<WarpTiles, KEY_TILE, THREADS, THREADS == WARP ? 8 : 4>(reinterpret_cast<SCALAR*>(landing), source,
                                                                             first, end);
    }

    // function(the ROWS rows of part `part` of what has landed, part) for each part. wait() waits for all threads.
    template <int THREADS, class Wait, class Function>
    __device__ static __forceinline__ void for_each_part(unsigned char* landing, SCALAR* decoded, Wait wait,
                                                         Function function) {
        if constexpr (!CODED) {
            function(reinterpret_cast<const SCALAR*>(landing), 0);
        } else {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (part > 0) wait();  // for those that multiply the part before
                decode_tile<WarpTiles, ROWS, THREADS>(decoded, landing + part * ROWS * HEAD_DIM);
                wait();
                function(const_cast<const SCALAR*>(decoded), part);
            }
        }
    }

    // Zero what no copy touches, of `count` landings side by side.
    template <int THREADS>
    __device__ static __forceinline__ void clear_padding(unsigned char* landings, int count, SCALAR* decoded) {
        SCALAR* tiles = CODED ? decoded : reinterpret_cast<SCALAR*>(landings);
        WarpTiles::clear_padding<THREADS>(tiles, CODED ? ROWS : count * KEY_TILE);
    }
};

// 16 rows in global memory, kept in registers, or read again at each use where WIDE. A null row is zeros.
struct RowFragments {
    const SCALAR* rows[2];
    unsigned kept[WIDE ? 1 : PADDED_DIM / 16][4];

    __device__ __forceinline__ void read(int step, unsigned (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = step * 16 + (lane() & 3) * 2 + (i >> 1) * 8;
            bool present = rows[i & 1] != nullptr && column < HEAD_DIM;
            a[i] = present ? *reinterpret_cast<const unsigned*>(rows[i & 1] + column) : 0u;
        }
    }

    // The rows q + r * HEAD_DIM, r < count <= 16.
    __device__ __forceinline__ void set_rows(const SCALAR* q, int count) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane() / 4 + r * 8;
            rows[r] = row < count ? q + row * HEAD_DIM : nullptr;
        }
        if constexpr (!WIDE) {
#pragma unroll
            for (int step = 0; step < PADDED_DIM / 16; ++step) read(step, kept[step]);
        }
    }

    __device__ __forceinline__ void get(int step, unsigned (&a)[4]) const {
        if constexpr (WIDE) {
            read(step, a);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = kept[step][i];
        }
    }
};

// The columns of 8 from first_tile on of `count` rows; with the first ones also maximum and sum.
template <int TILES>
__device__ __forceinline__ void write_chunk(const ChunkResult& result, int count, const ChunkColumns<TILES>& chunk,
                                            int first_tile) {
    auto for_each_pair = [&](int r, auto write) {
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const int column = column_of(first_tile + j, 0);
            if (column < HEAD_DIM) write(column, chunk.out[j][2 * r], chunk.out[j][2 * r + 1]);
        }
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane() / 4 + r * 8;
        if (row >= count) continue;
        if (result.o != nullptr) {
            const OnlyChunk only(chunk.maximum[r], chunk.total[r]);
            for_each_pair(r, [&](int column, float x, float y) {
                *reinterpret_cast<unsigned*>(result.o + row * HEAD_DIM + column) =
                    pack_pair(only.finish(x), only.finish(y), SCALAR());
            });
            continue;
        }
        for_each_pair(r, [&](int column, float x, float y) {
            *reinterpret_cast<float2*>(result.out + row * result.stride * HEAD_DIM + column) = make_float2(x, y);
        });
        if (first_tile == 0 && (lane() & 3) == 0)
            result.stats[row * result.stride] = make_float2(chunk.maximum[r], chunk.total[r]);
    }
}

// The query rows q + r * HEAD_DIM, r < count <= 16, over keys first ... end - 1 of one chunk.
template <class Rows>
__device__ __forceinline__ void attend_chunk(const ChunkResult& result, const SCALAR* q, int count,
                                             const Rows& key_rows, const Rows& value_rows, int first, int end,
                                             float scale) {
    using Land = Landing<typename Rows::Element, 2>;  // more warps find room than with whole tiles
    __shared__ __align__(16) unsigned char landings[2 * Land::BYTES + Land::DECODED * sizeof(SCALAR)];
    __shared__ int slots[CHUNK_KEYS];
    unsigned char *key_landing = landings, *value_landing = landings + Land::BYTES;
    SCALAR* decoded = reinterpret_cast<SCALAR*>(landings + 2 * Land::BYTES);
    for (int i = lane(); i < CHUNK_KEYS; i += CHUNK_THREADS) slots[i] = first + i < end ? key_rows.slot(first + i) : 0;
    Land::template clear_padding<CHUNK_THREADS>(landings, 2, decoded);
    __syncwarp();
    using Slots = SlotRows<typename Rows::Element>;
    const Slots keys{key_rows.base, slots, first, key_rows.stride};
    const Slots values{value_rows.base, slots, first, value_rows.stride};

    RowFragments queries;
    queries.set_rows(q, count);
    const int limits[2] = {end, end};
    Chunk chunk;
    chunk.clear();

    auto fetch = [&](unsigned char* landing, const Slots& source, int first_key) {
        if (first_key < end) Land::template fetch<CHUNK_THREADS>(landing, source, first_key, end);
        copies_commit();
    };
    auto for_each_part = [&](unsigned char* landing, auto function) {
        Land::template for_each_part<CHUNK_THREADS>(landing, decoded, [] { __syncwarp(); }, function);
    };
    using Part = float[Land::ROWS / 8][4];
    auto part_of = [](Scores& scores, int part) -> Part& {
        return reinterpret_cast<Part*>(scores)[part];
    };
    fetch(key_landing, keys, first);
    fetch(value_landing, values, first);
    for (int first_key = first; first_key < end; first_key += KEY_TILE) {
        Scores scores;
        copies_wait<1>();  // the keys are there, the values perhaps not
        __syncwarp();
        for_each_part(key_landing, [&](const SCALAR* rows, int part) {
            WarpTiles::multiply_rows(part_of(scores, part), queries, rows);
        });
        __syncwarp();
        fetch(key_landing, keys, first_key + KEY_TILE);
        weigh_tile(chunk, scores, first_key, limits, scale);
        copies_wait<1>();  // the values are there, the next keys perhaps not
        __syncwarp();
        for_each_part(value_landing, [&](const SCALAR* rows, int part) {
            WarpTiles::multiply(chunk.out, part_of(scores, part), rows);
        });
        __syncwarp();
        fetch(value_landing, values, first_key + KEY_TILE);
    }
    chunk.close();
    write_chunk(result, count, chunk, 0);
}

// ---- several warps: the same, sooner (decoding of few sequences) ----

// A warp multiplies its share of a tile's keys, and of the columns of the values; each weighs all scores. Every number
// is made as by one warp, so the bits are the same.
constexpr int SHARING_WARPS = KEY_TILE % 64 == 0 && OUT_TILES % 8 == 0   ? 4
                              : KEY_TILE % 32 == 0 && OUT_TILES % 4 == 0 ? 2
                                                                         : 1;
constexpr int SHARING_THREADS = SHARING_WARPS * WARP;
// Dynamic shared memory: two stages of keys and values, a decoded tile, the scores of a tile, the chunk's slots.
template <class Element>
constexpr int SHARING_SHARED = 4 * Landing<Element, 1>::BYTES + Landing<Element, 1>::DECODED * (int)sizeof(SCALAR) +
                               KEY_TILE / 8 * WARP * (int)sizeof(float4) + CHUNK_KEYS * (int)sizeof(int);

// As attend_chunk, by SHARING_THREADS threads with SHARING_SHARED bytes.
template <class Rows>
__device__ __forceinline__ void attend_chunk_together(const ChunkResult& result, const SCALAR* q, int count,
                                                      const Rows& key_rows, const Rows& value_rows, int first, int end,
                                                      float scale) {
    constexpr int KEYS = KEY_TILE / SHARING_WARPS, COLUMNS = OUT_TILES / SHARING_WARPS;  // of a warp
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    using Land = Landing<typename Rows::Element, 1>;
    SCALAR* decoded = reinterpret_cast<SCALAR*>(shared_bytes + 4 * Land::BYTES);
    float4* all_scores = reinterpret_cast<float4*>(decoded + Land::DECODED);
    int* slots = reinterpret_cast<int*>(all_scores + KEY_TILE / 8 * WARP);
    for (int i = threadIdx.x; i < CHUNK_KEYS; i += SHARING_THREADS)
        slots[i] = first + i < end ? key_rows.slot(first + i) : 0;
    Land::template clear_padding<SHARING_THREADS>(shared_bytes, 4, decoded);
    __syncthreads();
    using Slots = SlotRows<typename Rows::Element>;
    const Slots keys{key_rows.base, slots, first, key_rows.stride};
    const Slots values{value_rows.base, slots, first, value_rows.stride};
    auto key_stage = [&](int tile) { return shared_bytes + tile % 2 * 2 * Land::BYTES; };
    auto value_stage = [&](int tile) { return key_stage(tile) + Land::BYTES; };
    auto fetch = [&](unsigned char* stage, const Slots& source, int tile) {
        const int first_key = first + tile * KEY_TILE;
        if (first_key < end) Land::template fetch<SHARING_THREADS>(stage, source, first_key, end);
        copies_commit();
    };
    auto for_each_part = [&](unsigned char* stage, auto function) {
        Land::template for_each_part<SHARING_THREADS>(stage, decoded, [] { __syncthreads(); }, function);
    };
    fetch(key_stage(0), keys, 0);
    fetch(value_stage(0), values, 0);
    fetch(key_stage(1), keys, 1);

    RowFragments queries;
    queries.set_rows(q, count);
    const int limits[2] = {end, end}, warp = warp_index();
    ChunkColumns<COLUMNS> chunk;
    chunk.clear();
    for (int tile = 0; first + tile * KEY_TILE < end; ++tile) {
        copies_wait<2>();  // the keys are there; their values and the next keys perhaps not
        __syncthreads();   // for all warps, which are done with the values before
        fetch(value_stage(tile + 1), values, tile + 1);
        float part[KEYS / 8][4];
        for_each_part(key_stage(tile), [&](const SCALAR* rows, int) {
            WarpTiles::multiply_rows(part, queries, rows + warp * KEYS * WarpTiles::ROW_STRIDE);
        });
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
            all_scores[(warp * (KEYS / 8) + j) * WARP + lane()] =
                make_float4(part[j][0], part[j][1], part[j][2], part[j][3]);
        __syncthreads();  // all scores are there, and all warps are done with the keys
        fetch(key_stage(tile), keys, tile + 2);
        Scores scores;
#pragma unroll
        for (int j = 0; j < KEY_TILE / 8; ++j) {
            const float4 four = all_scores[j * WARP + lane()];
            scores[j][0] = four.x, scores[j][1] = four.y, scores[j][2] = four.z, scores[j][3] = four.w;
        }
        weigh_tile(chunk, scores, first + tile * KEY_TILE, limits, scale);
        copies_wait<3>();  // the values are there; what was begun after them perhaps not
        __syncthreads();
        for_each_part(value_stage(tile), [&](const SCALAR* rows, int) {
            WarpTiles::multiply(chunk.out, scores, rows + warp * COLUMNS * 8);
        });
    }
    chunk.close();
    write_chunk(result, count, chunk, warp * COLUMNS);
}
