// Few rows of codes, exactly: dot products along K in integers.
//
//     y[m, n] = (sum_g float(sum_{k in g} (xq[m, k] - xz[m]) (c[n, k] - z[n, g])) * scale[n, g]) * xs[m]
//
// The inner sum comes from that of the plain products, and from the sums of either operand.
#pragma once

#include "dot.h"
#include "quantize.h"

namespace {

// Zero points of row n in centered codes.
inline void zeros(const Weight& w, int64_t n, int32_t* zero) {
    int32_t shift = w.shift;
    int64_t at = w.scale_stride * n;
    for (int64_t g = 0; g < w.groups; g++) {
        if (!w.zero) zero[g] = -shift;
        else if (w.zero_type == UINT8) zero[g] = ((const uint8_t*)w.zero)[at + g] - shift;
        else if (w.zero_type == INT8) zero[g] = ((const int8_t*)w.zero)[at + g] - shift;
        else zero[g] = ((const int32_t*)w.zero)[at + g] - shift;
    }
}

inline int32_t sum_codes(const int8_t* codes, int64_t count) {
    int32_t total = 0;
    for (int64_t i = 0; i < count; i++) total += codes[i];
    return total;
}

// What meets the codes of the weight: bytes where the machine multiplies those, else the same in fp32, whose sums of up
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

// total[r][m] += sum over `columns` (1 to EXACT_COLUMNS) of codes[r] and x[m].
template <int R, int M>
INLINE void add_products(const int8_t* const* codes, int64_t k, int64_t columns, const Factor* x, int64_t ld, Ahead& ahead,
                         Ints (&total)[R][M]) {
#if defined(HAS_VNNI)
    // Half a vector is left of groups of 32.
    Bytes shift = Bytes{} + (uint8_t)128, tail = {};
    int64_t stop = k + columns;
    if (columns % WIDTH)
        for (int i = 0; i < columns % WIDTH; i++) tail[i] = 255;
    for (; k < stop; k += WIDTH) {
        ahead.fetch<R>();
        Bytes xs[M];
        UNROLL for (int m = 0; m < M; m++) {
            xs[m] = load<Bytes>(x + m * ld + k);
            if (k + WIDTH > stop) xs[m] &= tail;
        }
        UNROLL for (int r = 0; r < R; r++) {
            Ints c = (Ints)(load<Bytes>(codes[r] + k) ^ shift);
            UNROLL for (int m = 0; m < M; m++) total[r][m] = dot4(total[r][m], c, (Ints)xs[m]);
        }
    }
#else
    Floats part[R][M] = {};
    for (int64_t i = k; i < k + columns; i += LANES) {
        ahead.fetch<(R * LANES + 63) / 64>();
        UNROLL for (int r = 0; r < R; r++) {
            Floats c = to_floats(widen(codes[r] + i));
            UNROLL for (int m = 0; m < M; m++) part[r][m] = fma(c, load<Floats>(x + m * ld + i), part[r][m]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) total[r][m] += to_ints(part[r][m]);
#endif
}

struct IntDotInput {
    const Factor* x;  // (M + 1, ld), zero beyond K; the last row, all ones, gives the sums of the weight's codes
    int64_t ld;
    const int32_t* sums;  // (M, groups) of x
    const Codes& codes;
};

// Plain sums of products of each group: (R, COLUMNS, groups).
template <int R, int COLUMNS>
void int_dot_block(const Weight& w, const int8_t* const* codes, Ahead ahead, const IntDotInput& in, int32_t* sums) {
    for (int64_t g = 0; g < w.groups; g++) {
        Ints total[R][COLUMNS] = {};
        for (int64_t i = 0; i < w.group; i += EXACT_COLUMNS) {
            int64_t columns = w.group - i < EXACT_COLUMNS ? w.group - i : EXACT_COLUMNS;
            add_products<R, COLUMNS>(codes, g * w.group + i, columns, in.x, in.ld, ahead, total);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < COLUMNS; m++) sums[(r * COLUMNS + m) * w.groups + g] = sum(total[r][m]);
    }
}

// Plain sums of products p (groups) of one result, and `ones` of its codes, to float(exact sums) * scale, in place.
inline void scale_sums(int32_t* p, const int32_t* ones, const int32_t* sums, const int32_t* zero, int32_t xz,
                       const float* scale, int64_t group, int64_t groups) {
    int64_t g = 0;
    for (; g + LANES <= groups; g += LANES) {
        Ints exact = load<Ints>(p + g) - (load<Ints>(zero + g) + CODE_SHIFT) * (load<Ints>(sums + g) - (int32_t)group * xz);
        if (ones) exact -= xz * load<Ints>(ones + g);
        store(p + g, to_floats(exact) * load<Floats>(scale + g));
    }
    for (; g < groups; g++) {
        int32_t exact = p[g] - (zero[g] + CODE_SHIFT) * (sums[g] - (int32_t)group * xz);
        if (ones) exact -= xz * ones[g];
        store(p + g, (float)exact * scale[g]);
    }
}

template <int M, bool ONES>
void int_dot(const Weight& w, const IntDotInput& in, const Output& y, int64_t threads) {
    constexpr int COLUMNS = M + ONES, WANTED = (REGISTERS - 6) / COLUMNS;
    constexpr int R = WANTED > 8 ? 8 : WANTED < 1 ? 1 : WANTED;
    int64_t ld = round_up(w.k, 64) + 64;
    bool direct = !w.bits && !w.center;
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, scale_scratch, zero_scratch, sum_scratch;
        int8_t* decoded = code_scratch.get<int8_t>(R * ld);
        float* scale = scale_scratch.get<float>(w.groups);
        int32_t* zero = zero_scratch.get<int32_t>(w.groups);
        int32_t* sums = sum_scratch.get<int32_t>(R * COLUMNS * w.groups);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            const int8_t* codes[R];
            for (int r = 0; r < R; r++) {
                int64_t n = task * R + r < w.n ? task * R + r : w.n - 1;
                codes[r] = (const int8_t*)w.codes + n * w.row_bytes;
                if (direct && (n < w.n - 1 || w.group % FACTORS == 0)) continue;
                codes[r] = decoded + r * ld;
                decode(w, n, 0, w.k, decoded + r * ld);
            }
            Ahead ahead{w.codes + (task + 1) * R * w.row_bytes, R * w.row_bytes * FACTORS / w.k};
            int_dot_block<R, COLUMNS>(w, codes, ahead, in, sums);
            int64_t count = w.n - task * R < R ? w.n - task * R : R;
            float result[R * M] = {};
            for (int r = 0; r < count; r++) {
                scales(w, task * R + r, scale);
                zeros(w, task * R + r, zero);
                for (int m = 0; m < M; m++) {
                    int32_t* p = sums + (r * COLUMNS + m) * w.groups;
                    scale_sums(p, ONES ? sums + (r * COLUMNS + M) * w.groups : nullptr, in.sums + m * w.groups, zero,
                               ONES ? in.codes.zero[m] : 0, scale, w.group, w.groups);
                }
            }
            // In the order of the groups, all results side by side: each addition waits for the one before.
            for (int64_t g = 0; g < w.groups; g++)
                UNROLL for (int i = 0; i < R * M; i++)
                    result[i] += ((const float*)sums)[(i / M * COLUMNS + i % M) * w.groups + g];
            for (int i = 0; i < R * M; i++) result[i] *= in.codes.scale[i % M];
            y.write_transposed(M, task * R, count, result, M);
        }
    });
}

inline void multiply_int_dot(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    static thread_local Scratch factor_scratch, group_scratch;
    int64_t ld = round_up(w.k, 64), rows = x.rows;
    Factor* factors = factor_scratch.get<Factor>((rows + 1) * ld);
    int32_t* sums = group_scratch.get<int32_t>(rows * w.groups);
    for (int64_t i = 0; i < rows * w.groups; i++)
        sums[i] = sum_codes(x.codes + i / w.groups * x.ld + i % w.groups * w.group, w.group);
    memset(factors, 0, (rows + 1) * ld * sizeof(Factor));
    for (int64_t m = 0; m < rows; m++)
        for (int64_t k = 0; k < w.k; k++) factors[m * ld + k] = x.codes[m * x.ld + k];
    for (int64_t k = 0; k < w.k; k++) factors[rows * ld + k] = 1;
    IntDotInput in{factors, ld, sums, x};
    using Multiply = void (*)(const Weight&, const IntDotInput&, const Output&, int64_t);
    static constexpr Multiply PLAIN[] = {int_dot<1, false>, int_dot<2, false>, int_dot<3, false>, int_dot<4, false>,
                                         int_dot<5, false>, int_dot<6, false>, int_dot<7, false>, int_dot<8, false>};
    static constexpr Multiply WITH_ONES[] = {int_dot<1, true>, int_dot<2, true>, int_dot<3, true>, int_dot<4, true>,
                                             int_dot<5, true>, int_dot<6, true>, int_dot<7, true>, int_dot<8, true>};
    (x.zero ? WITH_ONES : PLAIN)[rows - 1](w, in, y, threads);
}

}  // namespace
