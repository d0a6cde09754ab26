// Products with weights of 8 bits: y (T, O) = (x (T, I) Qᵀ) · scale (O) + bias (O) + addend (T, O), rounded once. Q
// (O, I) holds int8, or E4m3 codes (e4m3.cuh) where CODES; an output channel has one scale. Also: a weight to such
// numbers, and back.
// specialise: SCALAR=bf16,f16,f32 CODES=0,1
// arch: sm_80 sm_90a
// (Built ahead for these alone, since it takes the compiler long; other cards build it at its first use.)
#include "e4m3.cuh"
#include "mma.cuh"

constexpr int THREADS = 256;
constexpr int CLASSES = 8;  // slices of I go to the classes in turn; y is the sum of their sums, in order
constexpr int SLICE = 64;   // of I; a thread takes 16 neighbours of it, which are 16 bytes of Q
constexpr int PIECE = 16;
constexpr float INT8_LARGEST = 127.0f;
constexpr float SMALLEST = 0x1p-100f;  // a row of nothing larger counts as zeros

// What a product adds to its sum.
struct Ending {
    SCALAR* y;
    const SCALAR *bias, *addend;  // may be null
    const float* scale;
    int outs;
    __device__ __forceinline__ void store(long long row, int out, float sum) const {
        float value = __fmul_rn(sum, scale[out]);
        if (bias != nullptr) value = __fadd_rn(value, to_float(bias[out]));
        if (addend != nullptr) value = __fadd_rn(value, to_float(addend[row * outs + out]));
        y[row * outs + out] = from_float<SCALAR>(value);
    }
};

__device__ __forceinline__ float weight_of(unsigned char byte) {
    return CODES ? to_float(E4m3{byte}) : (float)(signed char)byte;
}

// PIECE bytes of row `row` of q (rows, size) from column `start` on; zeros outside.
__device__ __forceinline__ uint4 load_bytes(const unsigned char* q, int row, int rows, int start, int size,
                                            bool vectorised) {
    unsigned words[4] = {};
    if (row < rows && start < size) {
        const unsigned char* from = q + (long long)row * size + start;
        if (vectorised) return *reinterpret_cast<const uint4*>(from);
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (start + i < size) words[i / 4] |= (unsigned)from[i] << i % 4 * 8;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ unsigned word_of(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

#if !SCALAR_F32

__device__ __forceinline__ unsigned minus_pair(unsigned a, unsigned b, __nv_bfloat16) {
    const __nv_bfloat162 y = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&y);
}

__device__ __forceinline__ unsigned minus_pair(unsigned a, unsigned b, __half) {
    const __half2 y = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<const unsigned*>(&y);
}

// Bytes 2 * HALF and 2 * HALF + 1 of four as a pair of SCALAR, exactly.
template <int HALF> __device__ __forceinline__ unsigned weight_pair(unsigned bytes) {
#if CODES
    return e4m3_pair<HALF>(bytes);
#else
    const unsigned spread = __byte_perm(bytes, 0, HALF ? 0x4342 : 0x4140);
#if SCALAR_F16  // 1024 + (number + 128) has the number's bits, the first one turned, as its last ones
    return minus_pair((spread ^ 0x00800080u) | 0x64006400u, 0x64806480u, SCALAR());
#else  // 128 + (the last 7 bits), less 128, or 256 where the first bit says -128
    return minus_pair((spread & 0x007f007fu) | 0x43004300u, (spread & 0x00800080u) | 0x43004300u, SCALAR());
#endif
#endif
}

// 16 numbers of row `row` of x (rows, size) from column `start` on, as 8 pairs; zeros outside.
__device__ __forceinline__ void load_pairs(unsigned (&pairs)[8], const SCALAR* x, int row, int rows, int start,
                                           int size, bool vectorised) {
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = 0;
    if (row >= rows || start >= size) return;
    const SCALAR* from = x + (long long)row * size + start;
    if (vectorised) {
        const uint4 low = *reinterpret_cast<const uint4*>(from), high = *reinterpret_cast<const uint4*>(from + 8);
#pragma unroll
        for (int i = 0; i < 8; i++) pairs[i] = i < 4 ? word_of(low, i) : word_of(high, i - 4);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            pairs[i] = pack_pair(start + 2 * i < size ? to_float(from[2 * i]) : 0.f,
                                 start + 2 * i + 1 < size ? to_float(from[2 * i + 1]) : 0.f, SCALAR());
    }
}

#endif

// A warp's sums of 16 * OUTS outs and up to 8 * ROWS rows of x, of one class of slices: sums[m][n] is C of
// mma.m16n8k16 with outs as its rows. A thread of four has 16 neighbours of I of its two outs and of its row of x, 4 of
// them in each mma: which k an instruction calls them does not matter, as long as both operands agree.
template <int OUTS, int ROWS> struct Sums {
    static constexpr int AHEAD = OUTS == 1 ? 4 : 2;  // slices of Q under way
    float sums[OUTS][ROWS][4];

    __device__ __forceinline__ void run(const SCALAR* x, const unsigned char* q, int first_out, int first_slice,
                                        int rows, int ins, int outs) {
        const bool vectorised = ins % PIECE == 0 && aligned16(x) && aligned16(q);
        const int slices = (ins + SLICE - 1) / SLICE, column = (lane() & 3) * PIECE;
        uint4 ahead[AHEAD][OUTS][2];
        auto load = [&](uint4(&to)[OUTS][2], int slice) {
#pragma unroll
            for (int m = 0; m < OUTS; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    to[m][half] = load_bytes(q, first_out + m * 16 + half * 8 + lane() / 4, outs,
                                             slice * SLICE + column, ins, vectorised);
        };
#pragma unroll
        for (int m = 0; m < OUTS; m++)
#pragma unroll
            for (int n = 0; n < ROWS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[m][n][e] = 0.f;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) load(ahead[i], first_slice + i * CLASSES);
        for (int start = first_slice; start < slices; start += AHEAD * CLASSES)
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int slice = start + i * CLASSES;
                if (slice >= slices) break;
                add_slice(ahead[i], x, rows, slice * SLICE, ins, vectorised);
                load(ahead[i], slice + AHEAD * CLASSES);
            }
    }

#if !SCALAR_F32
    __device__ __forceinline__ void add_slice(const uint4 (&weights)[OUTS][2], const SCALAR* x, int rows, int start,
                                              int ins, bool vectorised) {
        unsigned a[4][OUTS][4];
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int m = 0; m < OUTS; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const unsigned word = word_of(weights[m][half], step);
                    a[step][m][half] = weight_pair<0>(word);
                    a[step][m][half + 2] = weight_pair<1>(word);
                }
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            unsigned b[8];
            load_pairs(b, x, n * 8 + lane() / 4, rows, start + (lane() & 3) * PIECE, ins, vectorised);
#pragma unroll
            for (int step = 0; step < 4; step++)
#pragma unroll
                for (int m = 0; m < OUTS; m++)
                    mma_16x8x16(sums[m][n], a[step][m], b[2 * step], b[2 * step + 1], SCALAR());
        }
    }
#else
    // Without tensor cores, for any shape, not tuned: a thread asks the four that hold an out's bytes for them.
    __device__ __forceinline__ void add_slice(const uint4 (&weights)[OUTS][2], const SCALAR* x, int rows, int start,
                                              int ins, bool) {
#pragma unroll
        for (int m = 0; m < OUTS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll 1  // compiling takes a third of the time
                for (int eight = 0; eight < SLICE; eight += 8) {  // sums of 8: a single chain loses more digits
                    float part[ROWS][2] = {};
#pragma unroll 1
                    for (int i = eight; i < eight + 8; i++) {
                        const unsigned word = __shfl_sync(FULL_MASK, word_of(weights[m][half], i % PIECE / 4),
                                                          (lane() & ~3) + i / PIECE);
                        if (start + i >= ins) continue;
                        const float weight = weight_of((unsigned char)(word >> i % 4 * 8));
#pragma unroll
                        for (int n = 0; n < ROWS; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                const int row = n * 8 + (lane() & 3) * 2 + e;
                                if (row < rows)
                                    part[n][e] = fmaf(weight, x[(long long)row * ins + start + i], part[n][e]);
                            }
                    }
#pragma unroll
                    for (int n = 0; n < ROWS; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) sums[m][n][half * 2 + e] += part[n][e];
                }
    }
#endif

    // function(row, out, sum) for this thread's sums, rows and outs counted from the warp's first.
    template <class Function> __device__ __forceinline__ void for_each(Function function) const {
#pragma unroll
        for (int m = 0; m < OUTS; m++)
#pragma unroll
            for (int n = 0; n < ROWS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    function(n * 8 + (lane() & 3) * 2 + e % 2, m * 16 + lane() / 4 + e / 2 * 8, sums[m][n][e]);
    }
};

// ---- the product: a block reads its rows of Q once and has the whole of I, a warp a class ----

template <int OUTS, int ROWS>
__device__ __forceinline__ void few_rows(const Ending& ending, const SCALAR* x, const unsigned char* q, int rows,
                                         int ins) {
    __shared__ float shared[CLASSES][8 * ROWS][16 * OUTS + 1];
    const int first_out = blockIdx.x * 16 * OUTS, warp = warp_index();
    Sums<OUTS, ROWS> mine;
    mine.run(x, q, first_out, warp, rows, ins, ending.outs);
    mine.for_each([&](int row, int out, float sum) { shared[warp][row][out] = sum; });
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * ROWS * 16 * OUTS; i += CLASSES * WARP) {
        const int row = i / (16 * OUTS), out = i % (16 * OUTS);
        if (row >= rows || first_out + out >= ending.outs) continue;
        float sum = shared[0][row][out];
#pragma unroll
        for (int other = 1; other < CLASSES; other++) sum = __fadd_rn(sum, shared[other][row][out]);
        ending.store(row, first_out + out, sum);
    }
}

// Up to 8 * row_tiles rows. Grid ceil(outs / (16 * out_tiles)); out_tiles and row_tiles are 1 or 2.
extern "C" __global__ void __launch_bounds__(THREADS)
quantized_few_rows(SCALAR* y, const SCALAR* x, const void* q, const float* scale, const SCALAR* bias,
                   const SCALAR* addend, int rows, int ins, int outs, int out_tiles, int row_tiles) {
    const Ending ending{y, bias, addend, scale, outs};
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(q);
    if (out_tiles == 1 && row_tiles == 1)
        few_rows<1, 1>(ending, x, bytes, rows, ins);
    else if (out_tiles == 1)
        few_rows<1, 2>(ending, x, bytes, rows, ins);
    else if (row_tiles == 1)
        few_rows<2, 1>(ending, x, bytes, rows, ins);
    else
        few_rows<2, 2>(ending, x, bytes, rows, ins);
}

// ---- weights ----

// Row blockIdx.x of w (rows, size) as q and its scale: the largest size / LARGEST. A row that is not finite gets the
// scale NaN, so that what is computed with it is NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_weight(void* q, float* scale, const SCALAR* w, int size) {
    __shared__ float scratch[32];
    const SCALAR* row = w + (long long)blockIdx.x * size;
    unsigned char* to = reinterpret_cast<unsigned char*>(q) + (long long)blockIdx.x * size;
    float largest = 0.f;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float x = fabsf(to_float(row[i]));
        largest = x < INFINITY ? fmaxf(largest, x) : INFINITY;  // also NaN, which fmaxf would leave out
    }
    largest = block_max(largest, scratch);
    const bool finite = largest < INFINITY;
    const float one = largest >= SMALLEST ? largest / (CODES ? E4M3_LARGEST : INT8_LARGEST) : 1.0f;
    if (threadIdx.x == 0) scale[blockIdx.x] = finite ? one : NAN_FLOAT;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float x = finite ? to_float(row[i]) / one : 0.f;
        to[i] = CODES ? from_float<E4m3>(x).code : (unsigned char)(int)rintf(x);
    }
}

// w (rows, size) = q · scale, rounded once. Grid (ceil(size / (4 * THREADS)), rows).
extern "C" __global__ void __launch_bounds__(THREADS)
dequantize_weight(SCALAR* w, const void* q, const float* scale, int size) {
    const long long row = (long long)blockIdx.y * size;
    const int first = (blockIdx.x * THREADS + threadIdx.x) * 4;
    const unsigned char* from = reinterpret_cast<const unsigned char*>(q) + row;
    const bool vectorised = size % PIECE == 0 && aligned16(w) && aligned16(q);
    if (first >= size) return;
    float x[4];
    const unsigned word = vectorised ? *reinterpret_cast<const unsigned*>(from + first) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned char byte =
            vectorised ? (unsigned char)(word >> 8 * i) : first + i < size ? from[first + i] : (unsigned char)0;
        x[i] = __fmul_rn(weight_of(byte), scale[blockIdx.y]);
    }
    store_floats(w + row, x, first, size, vectorised);
}
