// AdamW in place on many arrays, the rounding of weights, and sums of squares.
//   adamw_step: m, v and grad are float32. The weights are float32 (master alone), float32 with param = master rounded
//     to SCALAR, or param = bf16 with its remainder, which together are the float32 master. Four elements a thread.
//   adamw_step_bf16: m and v in bf16, rounded stochastically. Four elements a thread.
//   adamw_step_blocks: m and v as codes of 8 bits; a warp does a block of STATE_BLOCK codes that share an exponent.
//   store_weights: param = values rounded as a master is. Four elements a thread.
//   sums_of_squares: the float64 sum over each of the equal pieces of many arrays; a warp a piece.
//   add_rows: the sum of each row of a float64 matrix; one row is a total.
// The lean forms are those of cukit/backend/states.py, bit for bit.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"
#include "philox.cuh"

#define STEP_THREADS 256
#define STEP_VECTOR 4
#define SUM_THREADS 256
#define STATE_BLOCK 256

constexpr int BLOCK_VECTOR = STATE_BLOCK / WARP;  // codes of a lane

struct Settings {
    float step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale;
};

// ---- elements first … first + N - 1 of n; `whole`: all are there, and every array is aligned ----

template <int N, typename T>
__device__ __forceinline__ void load_part(float (&out)[N], const T* from, long long first, long long n, bool whole) {
    if (whole) {
        const Vec<T, N> x = load_vec<N>(from + first);
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = to_float(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = first + i < n ? to_float(from[first + i]) : 0.0f;
    }
}

template <int N, typename T>
__device__ __forceinline__ void store_part(T* to, const Vec<T, N>& x, long long first, long long n, bool whole) {
    if (whole) {
        store_vec(to + first, x);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (first + i < n) to[first + i] = x[i];
    }
}

// The bits of the nearest bfloat16, halves away from zero; a finite float never becomes infinite (see the NumPy shelf).
__device__ __forceinline__ unsigned bfloat16_bits(float x) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    unsigned high = (bits + 0x8000u) >> 16;
    if (magnitude >= 0x7f7f8000u && magnitude < 0x7f800000u) high = bits >> 16;
    if (magnitude > 0x7f800000u) high = bits >> 16 | 0x40u;
    return high;
}

// How a weight is stored. bfloat16: so that the float is exactly the weight plus a signed 16-bit remainder. The others:
// to even.
__device__ __forceinline__ SCALAR stored_weight(float x) {
#if SCALAR_BF16
    return __ushort_as_bfloat16((unsigned short)bfloat16_bits(x));
#else
    return from_float<SCALAR>(x);
#endif
}

// ---- the weights of an update ----

// master null: param and remainder are the master; remainder null: param, if there is one, is the master rounded
struct Weights {
    float* master;
    short* remainder;
    SCALAR* param;
    __device__ bool aligned() const { return aligned16(master) && aligned16(remainder) && aligned16(param); }
};

// Elements first … first + N - 1 as floats, zeros past n. `whole` as above.
template <int N>
__device__ __forceinline__ void load_masters(float (&w)[N], const Weights& from, long long first, long long n,
                                             bool whole) {
#if SCALAR_BF16
    if (from.remainder) {
        Vec<SCALAR, N> high = {};
        Vec<short, N> low = {};
        if (whole) {
            high = load_vec<N>(from.param + first), low = load_vec<N>(from.remainder + first);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
                if (first + i < n) high[i] = from.param[first + i], low[i] = from.remainder[first + i];
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            w[i] = __uint_as_float(((unsigned)__bfloat16_as_ushort(high[i]) << 16) + (unsigned)(int)low[i]);
        return;
    }
#endif
    load_part(w, from.master, first, n, whole);
}

template <int N>
__device__ __forceinline__ void store_masters(const Weights& to, const float (&w)[N], long long first, long long n,
                                              bool whole) {
    Vec<SCALAR, N> stored;
#if SCALAR_BF16
    if (to.remainder) {
        Vec<short, N> low;
#pragma unroll
        for (int i = 0; i < N; i++) {
            unsigned bits = __float_as_uint(w[i]);
            const unsigned magnitude = bits & 0x7fffffffu;
            if (magnitude > 0x7f7f7fffu && magnitude < 0x7f800000u) bits = bits & 0x80000000u | 0x7f7f7fffu;
            stored[i] = stored_weight(__uint_as_float(bits));
            low[i] = (short)bits;
        }
        store_part(to.param, stored, first, n, whole);
        store_part(to.remainder, low, first, n, whole);
        return;
    }
#endif
    Vec<float, N> master;
#pragma unroll
    for (int i = 0; i < N; i++) master[i] = w[i], stored[i] = stored_weight(w[i]);
    store_part(to.master, master, first, n, whole);
    if (to.param) store_part(to.param, stored, first, n, whole);
}

// ---- the update ----

// Arrays of n elements that lie side by side, in a table on the device. seed, offset: of the noise of their first
// element; exponents: of blocks of codes.
struct Part {
    Weights weights;
    void *m, *v;
    unsigned char *m_exponents, *v_exponents;
    const float* grad;
    long long n, offset;
    unsigned long long seed;
    float keep;  // 1 - lr * weight_decay
};

// The part whose blocks this one is among, and its number there. begins: the first block of each part.
__device__ __forceinline__ Part find_part(const Part* parts, const int* begins, int count, int& block) {
    int found = -1;
    for (int first = 0; first < count; first += WARP) {
        const int i = first + lane();
        found += __popc(__ballot_sync(FULL_MASK, i < count && begins[i] <= (int)blockIdx.x));
    }
    block = blockIdx.x - begins[found];
    return parts[found];
}

// The order of the roundings is the NumPy shelf's.
__device__ __forceinline__ void update(float& master, float& m, float& v, float grad, float keep, const Settings& s) {
    const float g = grad * s.grad_scale;
    m += (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + s.one_minus_beta2 * g * g;
    master = master * keep - s.step_size * m / (sqrtf(v) / s.root_correction + s.eps);
}

// step_size = lr / (1 - beta1^step); root_correction = sqrt(1 - beta2^step).
extern "C" __global__ void __launch_bounds__(STEP_THREADS)
adamw_step(const void* parts, const int* begins, int count, float step_size, float one_minus_beta1, float beta2,
           float one_minus_beta2, float root_correction, float eps, float grad_scale) {
    const Settings settings = {step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale};
    int block;
    const Part part = find_part((const Part*)parts, begins, count, block);
    float *const m = (float*)part.m, *const v = (float*)part.v;
    const long long n = part.n, first = (block * (long long)STEP_THREADS + threadIdx.x) * STEP_VECTOR;
    if (first >= n) return;
    const bool whole =
        first + STEP_VECTOR <= n && part.weights.aligned() && aligned16(m) && aligned16(v) && aligned16(part.grad);
    float w[STEP_VECTOR], g[STEP_VECTOR];
    Vec<float, STEP_VECTOR> mean, square;
    load_masters(w, part.weights, first, n, whole);
    load_part(mean.v, m, first, n, whole);
    load_part(square.v, v, first, n, whole);
    load_part(g, part.grad, first, n, whole);
#pragma unroll
    for (int i = 0; i < STEP_VECTOR; i++) update(w[i], mean[i], square[i], g[i], part.keep, settings);
    store_masters(part.weights, w, first, n, whole);
    store_part(m, mean, first, n, whole);
    store_part(v, square, first, n, whole);
}

// ---- lean moments ----

// The words of elements first … first + N - 1: element i's is word i % 4 of counter (step, i / 4).
template <int N>
__device__ __forceinline__ void draw(unsigned (&words)[N], u64 seed, unsigned step, long long first) {
    if (first % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 found = philox(seed, step, (unsigned)((first + i) / 4));
            words[i] = found.x, words[i + 1] = found.y, words[i + 2] = found.z, words[i + 3] = found.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint4 found = philox(seed, step, (unsigned)((first + i) / 4));
            const int place = (int)((first + i) % 4);
            words[i] = place == 0 ? found.x : place == 1 ? found.y : place == 2 ? found.z : found.w;
        }
    }
}

// Up in magnitude where 16 bits of noise and those cut off carry.
__device__ __forceinline__ __nv_bfloat16 stochastic_bfloat16(float x, unsigned noise) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    unsigned high = (bits + noise) >> 16;
    if (magnitude >= 0x7f7f0000u && magnitude < 0x7f800000u) high = bits >> 16;
    if (magnitude > 0x7f800000u) high = bits >> 16 | 0x40u;
    return __ushort_as_bfloat16((unsigned short)high);
}

extern "C" __global__ void __launch_bounds__(STEP_THREADS)
adamw_step_bf16(const void* parts, const int* begins, int count, unsigned step, float step_size, float one_minus_beta1,
                float beta2, float one_minus_beta2, float root_correction, float eps, float grad_scale) {
    const Settings settings = {step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale};
    int block;
    const Part part = find_part((const Part*)parts, begins, count, block);
    __nv_bfloat16 *const m = (__nv_bfloat16*)part.m, *const v = (__nv_bfloat16*)part.v;
    const long long n = part.n, first = (block * (long long)STEP_THREADS + threadIdx.x) * STEP_VECTOR;
    if (first >= n) return;
    const bool whole =
        first + STEP_VECTOR <= n && part.weights.aligned() && aligned16(m) && aligned16(v) && aligned16(part.grad);
    float w[STEP_VECTOR], mean[STEP_VECTOR], square[STEP_VECTOR], g[STEP_VECTOR];
    Vec<__nv_bfloat16, STEP_VECTOR> lean_mean, lean_square;
    load_masters(w, part.weights, first, n, whole);
    load_part(mean, m, first, n, whole);
    load_part(square, v, first, n, whole);
    load_part(g, part.grad, first, n, whole);
    unsigned noise[STEP_VECTOR];
    draw(noise, part.seed, step, part.offset + first);
#pragma unroll
    for (int i = 0; i < STEP_VECTOR; i++) {
        update(w[i], mean[i], square[i], g[i], part.keep, settings);
        lean_mean[i] = stochastic_bfloat16(mean[i], noise[i] & 0xffffu);
        lean_square[i] = stochastic_bfloat16(square[i], noise[i] >> 16);
    }
    store_masters(part.weights, w, first, n, whole);
    store_part(m, lean_mean, first, n, whole);
    store_part(v, lean_square, first, n, whole);
}

// Codes of 8 bits below the exponent of a block: a float with EXPONENTS bits of exponent and 3 of fraction; where it is
// 4, bit 7 is the sign.
template <int EXPONENTS> struct Codes {
    static constexpr bool SIGNED = EXPONENTS == 4;
    static constexpr int SPAN = (1 << EXPONENTS) - 2, LARGEST = (8 << EXPONENTS) - 1, LOWEST_EXPONENT = 34;

    // The exponent of the block whose largest magnitude has these bits: rounding up never leaves it.
    static __device__ __forceinline__ int exponent(unsigned largest) {
        return min(max((int)((largest + 0xfffffu) >> 23), LOWEST_EXPONENT), 254);
    }

    static __device__ __forceinline__ unsigned char encode(float x, int top, unsigned noise) {
        const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
        const int exponent = (int)(bits >> 23), lowest = top - SPAN, below = max(lowest - exponent, 0);
        const unsigned significand = exponent > 0 ? bits & 0x7fffffu | 0x800000u : 0u;
        int code = below < 12 ? (int)((significand + (noise << (4 + below))) >> (20 + below)) : 0;
        code = min(code + 8 * max(exponent - lowest, 0), LARGEST);
        if (!SIGNED) return (unsigned char)max(code, exponent > 0 ? 1 : 0);  // what is not 0 never becomes 0
        return (unsigned char)(code | (int)(__float_as_uint(x) >> 31) << 7);
    }

    static __device__ __forceinline__ float decode(unsigned char code, int top) {
        const int magnitude = code & LARGEST, field = magnitude >> 3, units = (magnitude & 7) + (field > 0 ? 8 : 0);
        // biased, of one unit; the exponents of a fresh state are 0, as are its codes
        const int power = max(field, 1) + max(top, LOWEST_EXPONENT) - SPAN - 4;
        const float value = (float)units * __uint_as_float((unsigned)power << 23);
        return SIGNED && code > 127 ? -value : value;
    }
};

template <int EXPONENTS, int N>
__device__ __forceinline__ void load_codes(float (&x)[N], const unsigned char* codes, int top, long long first,
                                           long long n, bool whole) {
    Vec<unsigned char, N> found = {};
    if (whole) {
        found = load_vec<N>(codes + first);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (first + i < n) found[i] = codes[first + i];
    }
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = Codes<EXPONENTS>::decode(found[i], top);
}

// Every lane of the warp must call it. shift: which 16 bits of the noise.
template <int EXPONENTS, int N>
__device__ __forceinline__ void store_codes(unsigned char* codes, unsigned char* exponent, const float (&x)[N],
                                            const unsigned (&noise)[N], int shift, long long first, long long n,
                                            bool whole) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < N; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    const int top = Codes<EXPONENTS>::exponent(__reduce_max_sync(FULL_MASK, largest));
    Vec<unsigned char, N> found;
#pragma unroll
    for (int i = 0; i < N; i++) found[i] = Codes<EXPONENTS>::encode(x[i], top, noise[i] >> shift & 0xffffu);
    store_part(codes, found, first, n, whole);
    if (lane() == 0) *exponent = (unsigned char)top;
}

// m, v: codes, with an exponent for each STATE_BLOCK of them. A warp a block of codes; what lies past n is 0.
extern "C" __global__ void __launch_bounds__(STEP_THREADS)
adamw_step_blocks(const void* parts, const int* begins, int count, unsigned step, float step_size,
                  float one_minus_beta1, float beta2, float one_minus_beta2, float root_correction, float eps,
                  float grad_scale) {
    const Settings settings = {step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale};
    int of_threads;
    const Part part = find_part((const Part*)parts, begins, count, of_threads);
    unsigned char *const m = (unsigned char*)part.m, *const v = (unsigned char*)part.v;
    const long long n = part.n, block = of_threads * (long long)(STEP_THREADS / WARP) + warp_index();
    if (block * STATE_BLOCK >= n) return;  // the whole warp
    const long long first = block * STATE_BLOCK + lane() * BLOCK_VECTOR;
    const bool whole =
        first + BLOCK_VECTOR <= n && part.weights.aligned() && aligned16(m) && aligned16(v) && aligned16(part.grad);
    float w[BLOCK_VECTOR], mean[BLOCK_VECTOR], square[BLOCK_VECTOR], g[BLOCK_VECTOR];
    load_masters(w, part.weights, first, n, whole);
    load_codes<4>(mean, m, part.m_exponents[block], first, n, whole);
    load_codes<5>(square, v, part.v_exponents[block], first, n, whole);
    load_part(g, part.grad, first, n, whole);
#pragma unroll
    for (int i = 0; i < BLOCK_VECTOR; i++) update(w[i], mean[i], square[i], g[i], part.keep, settings);
    store_masters(part.weights, w, first, n, whole);
    unsigned noise[BLOCK_VECTOR];
    draw(noise, part.seed, step, part.offset + first);
    __syncwarp();  // every lane has read the exponents
    store_codes<4>(m, part.m_exponents + block, mean, noise, 0, first, n, whole);
    store_codes<5>(v, part.v_exponents + block, square, noise, 16, first, n, whole);
}

// ---- rounding and sums ----

extern "C" __global__ void __launch_bounds__(STEP_THREADS)
store_weights(SCALAR* param, const float* values, long long n) {
    const long long first = (blockIdx.x * (long long)STEP_THREADS + threadIdx.x) * STEP_VECTOR;
    if (first >= n) return;
    if (aligned16(param) && aligned16(values) && first + STEP_VECTOR <= n) {
        const Vec<float, STEP_VECTOR> x = load_vec<STEP_VECTOR>(values + first);
        Vec<SCALAR, STEP_VECTOR> stored;
#pragma unroll
        for (int i = 0; i < STEP_VECTOR; i++) stored[i] = stored_weight(x[i]);
        store_vec(param + first, stored);
        return;
    }
    for (long long i = first; i < n && i < first + STEP_VECTOR; i++) param[i] = stored_weight(values[i]);
}

__device__ __forceinline__ double fma_square(SCALAR x, double sum) {
    return fma((double)to_float(x), (double)to_float(x), sum);
}

// addresses, sizes: where the arrays are and how many elements each has, a multiple of `pieces`. blockIdx.y is the
// array, the warp's number the piece. Element i of a piece belongs to the same lane whether or not the piece is
// aligned, so that a piece's bits depend on its elements alone.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
sums_of_squares(double* sums, const unsigned long long* addresses, const long long* sizes, int pieces) {
    const int piece = blockIdx.x * (SUM_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (piece >= pieces) return;
    const long long size = sizes[blockIdx.y] / pieces;
    const SCALAR* x = reinterpret_cast<const SCALAR*>(addresses[blockIdx.y]) + piece * size;
    const bool aligned = aligned16(x);
    double sum = 0.0;
#pragma unroll 4
    for (long long first = lane * VECTOR; first < size; first += WARP * VECTOR) {
        if (aligned && first + VECTOR <= size) {
            const Vec<SCALAR, VECTOR> part = load_vec<VECTOR>(x + first);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum = fma_square(part[i], sum);
        } else {
            for (long long i = first; i < size && i < first + VECTOR; i++) sum = fma_square(x[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[blockIdx.y * (long long)pieces + piece] = sum;
}

// totals[row] = the sum of row blockIdx.x of rows (gridDim.x, cols)
extern "C" __global__ void __launch_bounds__(SUM_THREADS) add_rows(double* totals, const double* rows, int cols) {
    __shared__ double scratch[WARP];
    const double* row = rows + blockIdx.x * (long long)cols;
    double sum = 0.0;
    for (int i = threadIdx.x; i < cols; i += SUM_THREADS) sum += row[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}
