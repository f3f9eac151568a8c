// One or two rows of an input in fixed point, and packed 4-bit codes: dot products along K whose sums of four products stay
// where they are made, so that groups cost little.
//
//     x = scale (65536 q0 + 256 q1 + q2),    scale = max |x| / (127 * 65536),    q0, q1, q2 signed bytes
//     y[m, n] = sum_g s[n, g] * (sum_{k in g} code[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// Four products of codes below 16 with all of x have less than 31 bits. What codes are shifted by, their center, is taken off
// such sums, where it is exact.
#pragma once

#include "dot.h"
#include "quantize.h"

namespace {

#if defined(HAS_VNNI)

constexpr int64_t FIXED_MAX_ROWS = 2;
constexpr int FIXED_WIDTH = 4;  // rows of the weight that are multiplied together

// Whole vectors of codes belong to one group, or to two of half a vector.
inline bool fits_fixed_dot(const Weight& w, int64_t rows) {
    bool whole = w.group % WIDTH == 0 || (2 * w.group == WIDTH && WIDTH == 64);
    return rows <= FIXED_MAX_ROWS && w.bits == 4 && w.k % (8 * WIDTH) == 0 && whole;
}

struct FixedInput {
    const int8_t* bytes;    // (M, 3, K)
    const int32_t* shifts;  // (M, K / 4): what each sum of four products has too much, codes being shifted by their center
    const float *scale, *sums;  // (M), and those of x (M, groups)
};

// Sums of four products each, less `shift`.
INLINE Ints times_fixed(Ints codes, const Bytes (&x)[3], Ints shift) {
    Ints sum = dot4(Ints{}, codes, (Ints)x[0]);
    sum = dot4(sum << 8, codes, (Ints)x[1]);
    return dot4((sum << 8) - shift, codes, (Ints)x[2]);
}

// Bytes and shifts of a row of x (K), whole vectors of it, and its scale.
inline float fix_row(const float* x, int64_t k, int32_t center, int8_t* bytes, int32_t* shifts) {
    float high = largest_magnitude(x, k), scale = high ? high / 8323072.0f : 1;
    for (int64_t i = 0; i < k; i += LANES) {
        Floats number = load<Floats>(x + i) * broadcast(1 / scale);
        Floats half = (Floats)(((Ints)number & INT32_MIN) | (Ints)broadcast(0.5f));
        Ints rest = to_ints(number + half);
        for (int64_t s = 2; s >= 0; s--) {
            Ints byte = rest << 24 >> 24;
            store_bytes(bytes + s * k + i, byte);
            rest = (rest - byte) >> 8;
        }
    }
    const Ints centers = (Ints)(Bytes{} + (uint8_t)center);
    for (int64_t i = 0; i < k; i += WIDTH) {
        Bytes three[3];
        for (int s = 0; s < 3; s++) three[s] = load<Bytes>(bytes + s * k + i);
        store(shifts + i / 4, times_fixed(centers, three, Ints{}));
    }
    return scale;
}

// The scale of each lane; with PAIRS there are two groups.
template <bool PAIRS>
INLINE Floats lane_scales(const float* scale) {
#if defined(__AVX512F__)
    if (PAIRS) return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(scale[0]), 0xff00, _mm512_set1_ps(scale[1]));
#endif
    return broadcast(*scale);
}

// One block of rows of the weight: scale[r] (groups), offset (R, groups), result (R, M).
template <int R, int M, bool PAIRS>
void fixed_block(const Weight& w, const uint8_t* const* codes, Ahead ahead, const FixedInput& in,
                 const float* const* scale, const float* offset, float* result) {
    constexpr int STEP = PAIRS ? 2 : 1;
    int64_t groups = w.groups, run = w.k / 8;
    const Bytes mask = Bytes{} + (uint8_t)15;
    Floats total[R][M] = {};
    for (int64_t start = 0; start < w.k; start += 2 * run) {
        GroupEdge first(start, STEP * w.group), second(start + run, STEP * w.group);
        for (int64_t k = 0; k < run; k += WIDTH) {
            ahead.fetch<R * WIDTH / 64, false>();
            Bytes xs[M][3], ys[M][3];
            Ints x_shift[M], y_shift[M];
            UNROLL for (int m = 0; m < M; m++) {
                x_shift[m] = load<Ints>(in.shifts + (m * w.k + start + k) / 4);
                y_shift[m] = load<Ints>(in.shifts + (m * w.k + start + run + k) / 4);
                UNROLL for (int s = 0; s < 3; s++) {
                    const int8_t* x = in.bytes + (m * 3 + s) * w.k + start + k;
                    xs[m][s] = load<Bytes>(x);
                    ys[m][s] = load<Bytes>(x + run);
                }
            }
            UNROLL for (int r = 0; r < R; r++) {
                const float* s = scale[r];
                Bytes bytes = load<Bytes>(codes[r] + start / 2 + k);
                Ints low = (Ints)(bytes & mask), high = (Ints)((Bytes)((Shorts)bytes >> 4) & mask);
                Floats low_scale = lane_scales<PAIRS>(s + STEP * first.group), high_scale = lane_scales<PAIRS>(s + STEP * second.group);
                UNROLL for (int m = 0; m < M; m++) {
                    total[r][m] = fma(to_floats(times_fixed(low, xs[m], x_shift[m])), low_scale, total[r][m]);
                    total[r][m] = fma(to_floats(times_fixed(high, ys[m], y_shift[m])), high_scale, total[r][m]);
                }
            }
            first.pass(WIDTH);
            second.pass(WIDTH);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++)
            result[r * M + m] = sum(total[r][m]) * in.scale[m];
    for (int i = 0; offset && i < R * M; i++) result[i] += inner(offset + i / M * groups, in.sums + i % M * groups, groups);
}

template <int M>
void fixed_dot(const Weight& w, const FixedInput& in, const Output& y, int64_t threads) {
    constexpr int R = FIXED_WIDTH;
    int64_t groups = w.groups;
    auto block = 2 * w.group == WIDTH ? fixed_block<R, M, true> : fixed_block<R, M, false>;
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch scale_scratch;
        float* converted = scale_scratch.get<float>(2 * R * groups);
        float* offset = w.has_offset() ? converted + R * groups : nullptr;
        for (int64_t task; (task = tasks.next()) >= 0;) {
            const uint8_t* codes[R];
            const float* scale[R];
            float result[R * M];
            for (int r = 0; r < R; r++) {
                // Rows beyond the last repeat it.
                int64_t n = task * R + r < w.n ? task * R + r : w.n - 1;
                codes[r] = w.codes + n * w.row_bytes;
                prefetch_scales(w, n + R);
                scale[r] = scales_of(w, n, converted + r * groups);
                if (offset) offsets(w, n, scale[r], offset + r * groups);
            }
            Ahead ahead{w.codes + (task + 1) * R * w.row_bytes, R * WIDTH};
            block(w, codes, ahead, in, scale, offset, result);
            int64_t count = w.n - task * R < R ? w.n - task * R : R;
            y.write_transposed(M, task * R, count, result, M);
        }
    });
}

// x (rows, ld) is not changed.
inline void multiply_fixed_dot(const Weight& w, const float* x, int64_t ld, int64_t rows, const Output& y, int64_t threads) {
    static thread_local Scratch byte_scratch, shift_scratch, sum_scratch;
    int32_t* shifts = shift_scratch.get<int32_t>(rows * w.k / 4);
    int8_t* bytes = byte_scratch.get<int8_t>(rows * 3 * w.k);
    float *scale = sum_scratch.get<float>(rows * (w.groups + 1)), *sums = scale + rows;
    for (int64_t m = 0; m < rows; m++) {
        scale[m] = fix_row(x + m * ld, w.k, w.center, bytes + m * 3 * w.k, shifts + m * w.k / 4);
        for (int64_t g = 0; w.has_offset() && g < w.groups; g++) sums[m * w.groups + g] = sum_of(x + m * ld + g * w.group, w.group);
    }
    FixedInput in{bytes, shifts, scale, sums};
    (rows == 1 ? fixed_dot<1> : fixed_dot<2>)(w, in, y, threads);
}

#else

inline bool fits_fixed_dot(const Weight&, int64_t) { return false; }
inline void multiply_fixed_dot(const Weight&, const float*, int64_t, int64_t, const Output&, int64_t) {}

#endif

}  // namespace
