// Few rows of codes, exactly: dot products along K in integers.
//
//     y[m, n] = (sum_g float(sum_{k in g} (xq[m, k] - xz[m]) (c[n, k] - z[n, g])) * scale[n, g]) * xs[m]
//
// The inner sum comes from that of the plain products, and from the sums of either operand.
#pragma once

#include "float_dot.h"
#include "quantize.h"

namespace {

template <class T>
INLINE void less(const T* codes, int64_t count, int32_t shift, int32_t* out) {
    for (int64_t i = 0; i < count; i++) out[i] = codes[i] - shift;
}

// Zero points of row n in centered codes.
inline void zeros(const Weight& w, int64_t n, int32_t* zero) {
    int32_t shift = w.shift;
    int64_t at = w.scale_stride * n;
    if (!w.zero) for (int64_t g = 0; g < w.groups; g++) zero[g] = -shift;
    else if (w.zero_type == UINT8) less((const uint8_t*)w.zero + at, w.groups, shift, zero);
    else if (w.zero_type == INT8) less((const int8_t*)w.zero + at, w.groups, shift, zero);
    else less((const int32_t*)w.zero + at, w.groups, shift, zero);
}

// Scales, and zero points in centered codes, of `count` rows with one group each.
inline void row_factors(const Weight& w, int64_t start, int64_t count, float* scale, int32_t* zero) {
    int64_t at = w.scale_stride * start, real = w.scale_stride ? count : 1;
    read_scales(w, at, real, scale);
    for (int64_t r = real; r < count; r++) scale[r] = *scale;
    for (int64_t r = 0; r < count; r++) zeros(w, start + r, zero + r);
}

inline int32_t sum_codes(const int8_t* codes, int64_t count) {
    int32_t total = 0;
    for (int64_t i = 0; i < count; i++) total += codes[i];
    return total;
}

// x as it is multiplied with the codes of the weight: bytes where the machine multiplies bytes, else fp32, whose sums of up
// to 2^24 / (128 * 128) products are exact.
#if defined(HAS_VNNI)
using Factor = int8_t;
constexpr int FACTORS = WIDTH;
constexpr int32_t CODE_SHIFT = 128;  // codes are multiplied as unsigned ones, shifted by it
constexpr int64_t EXACT_COLUMNS = INT64_MAX;
#else
using Factor = float;
constexpr int FACTORS = LANES;
constexpr int32_t CODE_SHIFT = 0;
constexpr int64_t EXACT_COLUMNS = 1024 * LANES;
#endif

struct IntDotInput {
    // (M, ld), zero beyond K; where x has zero points, a last row of ones gives the sums of the weight's codes
    const Factor* x;
    int64_t ld;
    const int32_t* sums;  // (M, groups) of x
    const Codes& codes;
    const int32_t* blocks = nullptr;  // the weight has these blocks of columns of x only
    int64_t block_size = INT64_MAX;

    // The column of x that is multiplied with column k of the weight.
    INLINE int64_t column(int64_t k) const { return blocks ? blocks[k / block_size] * block_size + k % block_size : k; }
};

// total[r][m] += sum over `columns` (1 to EXACT_COLUMNS) of codes[r], from k on, and x[m], from `column` on.
template <int R, int M>
INLINE void add_products(const int8_t* const* codes, int64_t k, int64_t column, int64_t columns, const IntDotInput& in,
                         Ahead& ahead, Ints (&total)[R][M]) {
    const Factor* x = in.x + column - k;
#if defined(HAS_VNNI)
    // Half a vector is left of groups of 32.
    Bytes shift = Bytes{} + (uint8_t)128, tail = first_bytes(columns % WIDTH);
    int64_t stop = k + columns;
    for (; k < stop; k += WIDTH) {
        Bytes xs[M];
        UNROLL for (int m = 0; m < M; m++) {
            xs[m] = load<Bytes>(x + m * in.ld + k);
            if (k + WIDTH > stop) xs[m] &= tail;
        }
        UNROLL for (int r = 0; r < R; r++) {
            Ints c = (Ints)(load<Bytes>(codes[r] + k) ^ shift);
            ahead.fetch_after<false>(c);
            UNROLL for (int m = 0; m < M; m++) total[r][m] = dot4(total[r][m], c, (Ints)xs[m]);
        }
    }
#else
    Floats part[R][M] = {};
    for (int64_t i = k; i < k + columns; i += LANES) {
        ahead.fetch<(R * LANES + 63) / 64>();
        UNROLL for (int r = 0; r < R; r++) {
            Floats c = to_floats(widen(codes[r] + i));
            UNROLL for (int m = 0; m < M; m++) part[r][m] = fma(c, load<Floats>(x + m * in.ld + i), part[r][m]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) total[r][m] += to_ints(part[r][m]);
#endif
}

// Lanes for the results of R rows of the weight and M of x, and where result (r, m) is.
template <int R, int M>
constexpr int64_t RESULTS = (R * M + LANES - 1) / LANES * LANES;

// to[r * M + m] += sum of the lanes of total[r][m].
template <int R, int M>
INLINE void add_sums(const Ints (&total)[R][M], int32_t* to) {
    UNROLL for (int first = 0; first < R * M; first += LANES) {
        Ints rows[LANES];
        UNROLL for (int i = 0; i < LANES; i++)
            rows[i] = first + i < R * M ? total[(first + i) / M][(first + i) % M] : Ints{};
        store(to + first, load<Ints>(to + first) + sum_each(rows));
    }
}

// The same for two at once, which costs as much if there is room in a vector.
template <int R, int M>
INLINE void add_sums(const Ints (&a)[R][M], int32_t* to_a, const Ints (&b)[R][M], int32_t* to_b) {
    if constexpr (2 * R * M > LANES) {
        add_sums(a, to_a);
        add_sums(b, to_b);
    } else {
        Ints rows[LANES] = {};
        UNROLL for (int i = 0; i < R * M; i++) rows[i] = a[i / M][i % M], rows[R * M + i] = b[i / M][i % M];
        int32_t both[2 * LANES] = {};
        store(both, sum_each(rows));
        store(to_a, load<Ints>(to_a) + load<Ints>(both));
        store(to_b, load<Ints>(to_b) + load<Ints>(both + R * M));
    }
}

// Sums of products of each group: (groups, RESULTS), zeros before.
template <int R, int M>
void int_dot_block(const Weight& w, const int8_t* const* codes, Ahead ahead, const IntDotInput& in, int32_t* sums) {
    for (int64_t g = 0; g < w.groups; g++) {
        Ints total[R][M] = {};
        constexpr int64_t MOST = EXACT_COLUMNS;
        int64_t most = in.block_size < MOST ? in.block_size : MOST;
        for (int64_t i = 0; i < w.group; i += most) {
            int64_t columns = w.group - i < most ? w.group - i : most, k = g * w.group + i;
            add_products<R, M>(codes, k, in.column(k), columns, in, ahead, total);
        }
        add_sums(total, sums + g * RESULTS<R, M>);
    }
}

#if defined(HAS_VNNI)
// The same for packed 4-bit codes; see nibble_block. They are multiplied as they are, without a shift but their center.
template <int R, int M>
void int_nibble_block(const Weight& w, const int8_t* const* codes, Ahead ahead, const IntDotInput& in, int32_t* sums) {
    int64_t run = w.k / 8;
    const Bytes mask = Bytes{} + (uint8_t)15;
    for (int64_t start = 0; start < w.k; start += 2 * run) {
        GroupEdge first(start, w.group), second(start + run, w.group);
        const int8_t* x = in.x + start;
        for (int64_t k = 0; k < run;) {
            int64_t columns = first.left < second.left ? first.left : second.left;
            int64_t stop = k + columns < run ? k + columns : run;
            Ints low[R][M] = {}, high[R][M] = {};
            for (; k < stop; k += WIDTH) {
                bool whole = k + WIDTH <= stop;
                Bytes tail = first_bytes(whole ? WIDTH : stop - k), xs[M], ys[M];
                UNROLL for (int m = 0; m < M; m++) {
                    xs[m] = load<Bytes>(x + m * in.ld + k) & tail;
                    ys[m] = load<Bytes>(x + m * in.ld + run + k) & tail;
                }
                UNROLL for (int r = 0; r < R; r++) {
                    Bytes bytes = load<Bytes>(codes[r] + start / 2 + k);
                    ahead.fetch_after<false>(bytes);
                    Ints a = (Ints)(bytes & mask), b = (Ints)((Bytes)((Shorts)bytes >> 4) & mask);
                    UNROLL for (int m = 0; m < M; m++) {
                        low[r][m] = dot4(low[r][m], a, (Ints)xs[m]);
                        high[r][m] = dot4(high[r][m], b, (Ints)ys[m]);
                    }
                }
            }
            k = stop;
            add_sums(low, sums + first.group * RESULTS<R, M>, high, sums + second.group * RESULTS<R, M>);
            first.pass(columns);
            second.pass(columns);
        }
    }
}
#endif

// The results of `count` rows of a weight with one group each, from their sums of products; x_sums, x_zero and x_scale (M).
template <int R, int M, bool ONES>
INLINE void write_rows(const Weight& w, const Output& y, int64_t rows, int64_t start, int64_t count, int32_t shift,
                       const int32_t* sums, const int32_t* x_sums, const int32_t* x_zero, const float* x_scale) {
    constexpr int COLUMNS = M + ONES;
    float scale[R], result[M * R];
    int32_t zero[R];
    row_factors(w, start, count, scale, zero);
    for (int64_t r = 0; r < count; r++, sums += COLUMNS) {
        float products[M];
        UNROLL for (int64_t m = 0; m < M; m++) {
            // Parts may leave int32, their sum does not.
            uint32_t exact = sums[m] - (uint32_t)(zero[r] + shift) * x_sums[m] - (ONES ? (uint32_t)x_zero[m] * sums[M] : 0);
            products[m] = (0 + (float)(int32_t)exact * scale[r]) * x_scale[m];
        }
        for (int64_t m = 0; m < rows; m++) {
            float& to = result[m * R + r] = products[m];
            for (int64_t slice = m + rows; slice < M; slice += rows) to += products[slice];
        }
    }
    for (int64_t m = 0; m < rows; m++) y.write(m, start, count, result + m * R);
}

// `block` gives the sums of products for R rows of the weight, whose codes it multiplies with `shift` added.
template <int R, int M, bool ONES>
void int_dot(const Weight& w, const IntDotInput& in, const Output& y, int64_t threads, bool direct, int32_t shift,
             void (*block)(const Weight&, const int8_t* const*, Ahead, const IntDotInput&, int32_t*)) {
    constexpr int COLUMNS = M + ONES;
    constexpr int64_t LENGTH = RESULTS<R, COLUMNS>;
    static thread_local Scratch input_scratch;
    int64_t ld = round_up(w.k, 64) + 64, groups = w.groups;
    // Of the rows of x, for each result: sums less zero points, by group; zero points and scales.
    int32_t* x_sums = input_scratch.get<int32_t>((groups + 2) * LENGTH);
    int32_t* x_zero = x_sums + groups * LENGTH;
    float* x_scale = (float*)(x_zero + LENGTH);
    for (int64_t i = 0; i < LENGTH; i++) {
        int64_t m = i % COLUMNS;
        bool real = i < R * COLUMNS && m < M;
        x_scale[i] = real ? in.codes.scale[m] : 0;
        x_zero[i] = real && ONES ? in.codes.zero[m] : 0;
        for (int64_t g = 0; g < groups; g++)
            x_sums[g * LENGTH + i] = real ? in.sums[m * groups + g] - (int32_t)w.group * x_zero[i] : 0;
    }
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, row_scratch, weight_scratch, sum_scratch;
        int8_t* decoded = code_scratch.get<int8_t>(R * ld);
        float* row_scale = row_scratch.get<float>(2 * groups);
        int32_t* row_zero = (int32_t*)row_scale + groups;
        // Of the weight, for each result, by group.
        float* scale = weight_scratch.get<float>(3 * groups * LENGTH);
        int32_t* zero = (int32_t*)scale + groups * LENGTH;
        int32_t* ones = zero + groups * LENGTH;
        int32_t* sums = sum_scratch.get<int32_t>(groups * LENGTH);
        for (int64_t i = 0; i < groups * LENGTH; i++) zero[i] = shift - (int32_t)w.shift;
        for (int64_t task; (task = tasks.next()) >= 0;) {
            const int8_t* codes[R];
            for (int r = 0; r < R; r++) {
                int64_t n = task * R + r < w.n ? task * R + r : w.n - 1;
                codes[r] = (const int8_t*)w.codes + n * w.row_bytes;
                if (!direct) {
                    codes[r] = decoded + r * ld;
                    decode(w, n, 0, w.k, decoded + r * ld);
                } else if (w.ends_within(n, WIDTH)) {  // whole vectors are read, also at the end
                    codes[r] = decoded + r * ld;
                    memcpy(decoded + r * ld, w.codes + n * w.row_bytes, w.bits ? w.k / 2 : w.k);
                }
                if (groups == 1) continue;  // see write_rows
                prefetch_scales(w, n + 2 * R, 0, groups);
                scales(w, n, row_scale);
                if (w.zero) zeros(w, n, row_zero);
                for (int i = r * COLUMNS; i < (r + 1) * COLUMNS; i++) {
                    for (int64_t g = 0; g < groups; g++) scale[g * LENGTH + i] = row_scale[g];
                    for (int64_t g = 0; w.zero && g < groups; g++) zero[g * LENGTH + i] = row_zero[g] + shift;
                }
            }
            memset(sums, 0, groups * LENGTH * 4);
            Ahead ahead{w.codes + (task + 1) * R * w.row_bytes, FACTORS == WIDTH ? WIDTH : R * FACTORS};
            block(w, codes, ahead, in, sums);
            int64_t count = w.n - task * R < R ? w.n - task * R : R, rows = M / in.codes.slices;
            if (groups == 1) {
                write_rows<R, M, ONES>(w, y, rows, task * R, count, shift, sums, x_sums, x_zero, x_scale);
                continue;
            }
            for (int64_t i = 0; ONES && i < groups * LENGTH; i++)
                if (i % LENGTH < R * COLUMNS) ones[i] = sums[i / LENGTH * LENGTH + i % LENGTH / COLUMNS * COLUMNS + M];
            alignas(64) float result[LENGTH];
            for (int64_t i = 0; i < LENGTH; i += LANES) {
                // In the order of the groups.
                Floats total = {};
                for (int64_t at = i; at < groups * LENGTH; at += LENGTH) {
                    Ints exact = load<Ints>(sums + at) - load<Ints>(zero + at) * load<Ints>(x_sums + at);
                    if (ONES) exact -= load<Ints>(x_zero + i) * load<Ints>(ones + at);
                    total += to_floats(exact) * load<Floats>(scale + at);
                }
                store(result + i, total * load<Floats>(x_scale + i));
            }
            for (int64_t r = 0; r < count; r++)
                for (int64_t m = rows; m < M; m++) result[r * COLUMNS + m % rows] += result[r * COLUMNS + m];
            y.write_transposed(rows, task * R, count, result, COLUMNS);
        }
    });
}

// Rows of the weight that are multiplied together, `sums` vectors of sums each.
constexpr int int_dot_width(int sums) {
    int wanted = (REGISTERS - 6) / sums;
    return wanted > 8 ? 8 : wanted < 1 ? 1 : wanted;
}

template <int M, bool ONES>
void int_dot(const Weight& w, const IntDotInput& in, const Output& y, int64_t threads) {
    constexpr int COLUMNS = M + ONES;
#if defined(HAS_VNNI)
    if (w.bits == 4 && w.k % 8 == 0 && !in.blocks) {
        constexpr int R = int_dot_width(2 * COLUMNS);
        return int_dot<R, M, ONES>(w, in, y, threads, true, w.center, int_nibble_block<R, COLUMNS>);
    }
#endif
    constexpr int R = int_dot_width(COLUMNS);
    int_dot<R, M, ONES>(w, in, y, threads, !w.bits && !w.center, CODE_SHIFT, int_dot_block<R, COLUMNS>);
}

// The same for in.codes.rows rows of x, at most DOT_MAX_ROWS.
inline void multiply_int_dot(const Weight& w, const IntDotInput& in, const Output& y, int64_t threads) {
    using Multiply = void (*)(const Weight&, const IntDotInput&, const Output&, int64_t);
    static constexpr Multiply PLAIN[] = {int_dot<1, false>, int_dot<2, false>, int_dot<3, false>, int_dot<4, false>,
                                         int_dot<5, false>, int_dot<6, false>, int_dot<7, false>, int_dot<8, false>};
    static constexpr Multiply WITH_ONES[] = {int_dot<1, true>, int_dot<2, true>, int_dot<3, true>, int_dot<4, true>,
                                             int_dot<5, true>, int_dot<6, true>, int_dot<7, true>, int_dot<8, true>};
    (in.codes.zero ? WITH_ONES : PLAIN)[in.codes.rows - 1](w, in, y, threads);
}

// x of k columns with the sums of its groups.
inline IntDotInput int_dot_input(const Codes& x, int64_t k, int64_t group) {
    static thread_local Scratch factor_scratch, group_scratch;
    int64_t ld = round_up(k, 64), rows = x.rows, groups = k / group;
    int32_t* sums = group_scratch.get<int32_t>(rows * groups);
    for (int64_t i = 0; i < rows * groups; i++) sums[i] = sum_codes(x.codes + i / groups * x.ld + i % groups * group, group);
    bool whole = k % (8 * WIDTH) == 0 && group % WIDTH == 0;  // else vectors are read beyond the last row
    if (std::is_same_v<Factor, int8_t> && whole && x.ld == ld && !x.zero) return {(const Factor*)x.codes, ld, sums, x};
    Factor* factors = factor_scratch.get<Factor>((rows + 1) * ld);
    memset(factors, 0, (rows + 1) * ld * sizeof(Factor));
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < k; i++) factors[m * ld + i] = x.codes[m * x.ld + i];
    for (int64_t i = 0; i < k; i++) factors[rows * ld + i] = 1;
    return {factors, ld, sums, x};
}

inline void multiply_int_dot(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    multiply_int_dot(w, int_dot_input(x, w.k, w.group), y, threads);
}

}  // namespace
