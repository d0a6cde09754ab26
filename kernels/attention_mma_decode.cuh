// Attention of a decode step on tensor cores (see attention.cuh): one query a sequence, a chunk of keys a block, by one
// warp or by several.
//
// A block is what paged.cuh makes of the kernel's arguments (DecodeBlock): heads, first, end, keys, values, where the
// keys are, and the sequence's newest token.
#pragma once

#include "attention_mma.cuh"

// ---- one warp: up to 16 query rows (the heads that share a kv head) over one chunk (decoding) ----

constexpr int CHUNK_THREADS = 32;

// Where tiles of keys or values land as a cache has them: numbers are multiplied there, codes are decoded before, in
// one of PARTS parts after the other.
template <class Element, int CODED_PARTS> struct Landing {
    static constexpr bool CODED = sizeof(Element) != sizeof(SCALAR);
    static constexpr int PARTS = CODED ? CODED_PARTS : 1, ROWS = KEY_TILE / PARTS;
    static constexpr int BYTES = KEY_TILE * (CODED ? HEAD_DIM : WarpTiles::ROW_STRIDE * (int)sizeof(SCALAR));
    static constexpr int DECODED = CODED ? WarpTiles::SIZE<ROWS> : 0;  // elements
    static constexpr int STRIDE = CODED ? HEAD_DIM : WarpTiles::ROW_STRIDE;  // elements from one row to the next

    // The row of key `key` in the landing of the tile that begins with first_key.
    __device__ static __forceinline__ Element* row(unsigned char* landing, int key, int first_key) {
        return reinterpret_cast<Element*>(landing) + (key - first_key) * STRIDE;
    }

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

// 16 rows, kept in registers, or read again at each use where WIDE. A null row is zeros.
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

    // The rows q + r * stride, r < count <= 16.
    __device__ __forceinline__ void set_rows(const SCALAR* q, int stride, int count) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane() / 4 + r * 8;
            rows[r] = row < count ? q + row * stride : nullptr;
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

// The block's queries, by way of shared memory of 16 rows `stride` apart where the block turns them. wait() waits for
// all threads; the shared memory is free after the next one.
template <class Block, class Wait>
__device__ __forceinline__ void take_queries(RowFragments& queries, Block& block, SCALAR* rows, int stride, Wait wait) {
    if constexpr (Block::TURNS) {
        block.turn(rows, stride);
        wait();
        queries.set_rows(rows, stride, block.heads);
    } else {
        queries.set_rows(block.q, HEAD_DIM, block.heads);
    }
}

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

// The block's query rows over its keys.
template <class Block>
__device__ __forceinline__ void attend_chunk(const ChunkResult& result, Block& block, float scale) {
    using Land = Landing<typename Block::Element, 2>;  // more warps find room than with whole tiles
    __shared__ __align__(16) unsigned char landings[2 * Land::BYTES + Land::DECODED * sizeof(SCALAR)];
    __shared__ int slots[CHUNK_KEYS];
    unsigned char *key_landing = landings, *value_landing = landings + Land::BYTES;
    SCALAR* decoded = reinterpret_cast<SCALAR*>(landings + 2 * Land::BYTES);
    block.note_slots(slots);
    Land::template clear_padding<CHUNK_THREADS>(landings, 2, decoded);
    __syncwarp();
    const auto keys = block.rows_at(block.keys, slots), values = block.rows_at(block.values, slots);
    const int first = block.first, end = block.end, limits[2] = {end, end};

    auto fetch = [&](unsigned char* landing, const auto& source, int first_key) {
        if (first_key < end) Land::template fetch<CHUNK_THREADS>(landing, source, first_key, block.cached_end());
        copies_commit();
    };
    // The newest key (0) or value (1), which was not fetched, into the tile that has landed.
    auto put_newest = [&](unsigned char* landing, int first_key, int which) {
        if (block.has_newest && first_key + KEY_TILE >= end) {
            block.put(Land::row(landing, end - 1, first_key), which);
            __syncwarp();
        }
    };
    auto for_each_part = [&](unsigned char* landing, auto function) {
        Land::template for_each_part<CHUNK_THREADS>(landing, decoded, [] { __syncwarp(); }, function);
    };
    using Part = float[Land::ROWS / 8][4];
    auto part_of = [](Scores& scores, int part) -> Part& {
        return reinterpret_cast<Part*>(scores)[part];
    };
    fetch(key_landing, keys, first);
    RowFragments queries;
    take_queries(queries, block, reinterpret_cast<SCALAR*>(value_landing), Land::STRIDE, [] { __syncwarp(); });
    __syncwarp();
    fetch(value_landing, values, first);
    Chunk chunk;
    chunk.clear();
    for (int first_key = first; first_key < end; first_key += KEY_TILE) {
        Scores scores;
        copies_wait<1>();  // the keys are there, the values perhaps not
        __syncwarp();
        put_newest(key_landing, first_key, 0);
        for_each_part(key_landing, [&](const SCALAR* rows, int part) {
            WarpTiles::multiply_rows(part_of(scores, part), queries, rows);
        });
        __syncwarp();
        fetch(key_landing, keys, first_key + KEY_TILE);
        weigh_tile(chunk, scores, first_key, limits, scale);
        copies_wait<1>();  // the values are there, the next keys perhaps not
        __syncwarp();
        put_newest(value_landing, first_key, 1);
        for_each_part(value_landing, [&](const SCALAR* rows, int part) {
            WarpTiles::multiply(chunk.out, part_of(scores, part), rows);
        });
        __syncwarp();
        fetch(value_landing, values, first_key + KEY_TILE);
    }
    chunk.close();
    write_chunk(result, block.heads, chunk, 0);
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
template <class Block>
__device__ __forceinline__ void attend_chunk_together(const ChunkResult& result, Block& block, float scale) {
    constexpr int KEYS = KEY_TILE / SHARING_WARPS, COLUMNS = OUT_TILES / SHARING_WARPS;  // of a warp
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    using Land = Landing<typename Block::Element, 1>;
    SCALAR* decoded = reinterpret_cast<SCALAR*>(shared_bytes + 4 * Land::BYTES);
    float4* all_scores = reinterpret_cast<float4*>(decoded + Land::DECODED);
    int* slots = reinterpret_cast<int*>(all_scores + KEY_TILE / 8 * WARP);
    block.note_slots(slots);
    Land::template clear_padding<SHARING_THREADS>(shared_bytes, 4, decoded);
    __syncthreads();
    const auto keys = block.rows_at(block.keys, slots), values = block.rows_at(block.values, slots);
    const int first = block.first, end = block.end, limits[2] = {end, end}, warp = warp_index();
    auto key_stage = [&](int tile) { return shared_bytes + tile % 2 * 2 * Land::BYTES; };
    auto value_stage = [&](int tile) { return key_stage(tile) + Land::BYTES; };
    auto fetch = [&](unsigned char* stage, const auto& source, int tile) {
        const int first_key = first + tile * KEY_TILE;
        if (first_key < end) Land::template fetch<SHARING_THREADS>(stage, source, first_key, block.cached_end());
        copies_commit();
    };
    auto put_newest = [&](unsigned char* stage, int tile, int which) {
        const int first_key = first + tile * KEY_TILE;
        if (block.has_newest && first_key + KEY_TILE >= end) {
            block.put(Land::row(stage, end - 1, first_key), which);
            __syncthreads();
        }
    };
    auto for_each_part = [&](unsigned char* stage, auto function) {
        Land::template for_each_part<SHARING_THREADS>(stage, decoded, [] { __syncthreads(); }, function);
    };
    fetch(key_stage(0), keys, 0);
    fetch(value_stage(0), values, 0);
    fetch(key_stage(1), keys, 1);

    RowFragments queries;  // by way of a stage that is fetched after the next __syncthreads()
    take_queries(queries, block, reinterpret_cast<SCALAR*>(value_stage(1)), Land::STRIDE, [] { __syncthreads(); });
    ChunkColumns<COLUMNS> chunk;
    chunk.clear();
    for (int tile = 0; first + tile * KEY_TILE < end; ++tile) {
        copies_wait<2>();  // the keys are there; their values and the next keys perhaps not
        __syncthreads();   // for all warps, which are done with the values before
        put_newest(key_stage(tile), tile, 0);
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
        put_newest(value_stage(tile), tile, 1);
        for_each_part(value_stage(tile), [&](const SCALAR* rows, int) {
            WarpTiles::multiply(chunk.out, scores, rows + warp * COLUMNS * 8);
        });
    }
    chunk.close();
    write_chunk(result, block.heads, chunk, warp * COLUMNS);
}
