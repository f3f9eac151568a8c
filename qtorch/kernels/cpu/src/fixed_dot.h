// One or two rows of an input in fixed point, and packed 4-bit codes: dot products along K. Sums of a few products stay in the
// lanes in which they are computed, so that groups cost little.
//
//     x = scale (65536 q0 + 256 q1 + q2),    scale = max |x| / (127 * 65536),    q0, q1, q2 signed bytes
//     x = scale (256 q0 + q1),               scale = max |x| / (127 * 256)       for 16-bit inputs with even rows
//     y[m, n] = sum_g s[n, g] * (sum_{k in g} code[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// Eight products of codes of magnitude 31 with all of x fit into 32 bits, and sixteen of magnitude 15; on the way there sums may
// wrap. Codes of floats of 4 bits stand for such integers, times a unit. What codes are shifted by, their center, is taken off
// such sums, where it is exact; as a part of the offsets it would cost nothing, and ten times the error for inputs of one sign.
#pragma once

#include "float_dot.h"
#include "quantize.h"

namespace {

#if defined(HAS_VNNI) || defined(__AVX2__)

constexpr int64_t FIXED_MAX_ROWS = 2;

// Rows of the weight that are multiplied together.
constexpr int fixed_width(int64_t rows) { return rows == 1 && REGISTERS == 32 ? 8 : 4; }

// Bytes have one code of each of two runs, K / 8 columns apart. Whether so many whole vectors of each run belong to one group;
// else each lane does, which is four columns.
inline bool has_whole_vectors(const Weight& w, int64_t count = 1) {
    return w.group % (count * WIDTH) == 0 && w.k % (8 * count * WIDTH) == 0;
}

inline bool fits_fixed_dot(const Weight& w, int64_t rows) {
    // Integers in longer groups are as fast in slices.
    bool fits = has_whole_vectors(w) || (w.group % 4 == 0 && w.k % 32 == 0 && (w.values || w.group <= WIDTH));
    return rows <= FIXED_MAX_ROWS && w.n >= fixed_width(rows) && w.bits == 4 && fits && (!w.values || w.unit);
}

struct FixedInput {
    int64_t run;            // columns of each of the eight runs of a row: whole vectors, zeros at the end
    // (M, 8 run / WIDTH, digits + 1, WIDTH) bytes: the digits of a vector of columns, and in int32 what each sum of four products
    // has too much, codes being shifted by their center.
    const int8_t* bytes;
    const float *scale, *sums;  // (M), and those of x (M, groups)
    const int32_t* group;       // (8 run / WIDTH), where vectors are not whole: of the first lane of each
    const int32_t* lanes;       // (2 run): of each lane, from that one on
    uint8_t integers[16];       // of codes, plus their center
    bool is_small;              // whether none without it is beyond 15
};

// Sums of four products each, of PER vectors, less `shift`.
template <int PER, int DIGITS>
INLINE Ints times_fixed(const Ints (&codes)[PER], const Bytes (&x)[DIGITS][PER], Ints shift) {
#if defined(HAS_VNNI)
    // The last digit has a sum of its own: one for all would wait for itself.
    Ints high = {}, low = Ints{} - shift;
    UNROLL for (int i = 0; i < PER; i++) low = dot4(low, codes[i], (Ints)x[DIGITS - 1][i]);
    UNROLL for (int digit = 0; digit < DIGITS - 1; digit++) {
        UNROLL for (int i = 0; i < PER; i++) high = dot4(high, codes[i], (Ints)x[digit][i]);
        high <<= 8;
    }
    return high + low;
#else
    // Eight products of a code below 32 and a byte fit into 16 bits.
    Ints pairs[DIGITS];
    UNROLL for (int digit = 0; digit < DIGITS; digit++) {
        pairs[digit] = multiply_bytes(codes[0], (Ints)x[digit][0]);
        UNROLL for (int i = 1; i < PER; i++) pairs[digit] = (Ints)((Shorts)pairs[digit] + (Shorts)multiply_bytes(codes[i], (Ints)x[digit][i]));
    }
    const Ints one = (Ints)(Shorts{} + (uint16_t)1), digit = one << 8;
    if (DIGITS == 2) return multiply_pairs(pairs[0], digit) - shift + multiply_pairs(pairs[1], one);
    Ints high = (multiply_pairs(pairs[0], digit) + multiply_pairs(pairs[1], one)) << 8;
    return high - shift + multiply_pairs(pairs[DIGITS - 1], one);
#endif
}

// The vectors of a row of x (K), whole ones of it, and its scale.
template <int DIGITS>
float fix_row(const float* x, int64_t k, int32_t center, int8_t* bytes) {
    constexpr int64_t STEP = (DIGITS + 1) * WIDTH;
    float high = largest_magnitude(x, k), scale = high ? high / (127 << 8 * (DIGITS - 1)) : 1;
    const Ints centers[1] = {(Ints)(Bytes{} + (uint8_t)center)};
    for (int64_t i = 0; i < k; i += WIDTH, bytes += STEP) {
        for (int64_t j = 0; j < WIDTH; j += LANES) {
            Floats number = load<Floats>(x + i + j) * broadcast(1 / scale);
            Floats half = (Floats)(((Ints)number & INT32_MIN) | (Ints)broadcast(0.5f));
            Ints rest = to_ints(number + half);
            for (int64_t s = DIGITS - 1; s >= 0; s--) {
                Ints byte = rest << 24 >> 24;
                store_bytes(bytes + s * WIDTH + j, byte);
                rest = (rest - byte) >> 8;
            }
        }
        Bytes digits[DIGITS][1];
        for (int s = 0; s < DIGITS; s++) digits[s][0] = load<Bytes>(bytes + s * WIDTH);
        store(bytes + DIGITS * WIDTH, times_fixed(centers, digits, Ints{}));
    }
    return scale;
}

// Scales and offsets of some rows of the weight, by group, and what the rows are multiplied with.
struct FixedRows {
    const uint8_t* codes;
    const float *scale, *offset;  // (R, groups), or null
};

// R rows of the weight, PER vectors of a group at a time, or with LANE_GROUPS one of any groups; result (R, M).
template <int R, int M, int DIGITS, bool TABLE, bool LANE_GROUPS, int PER>
void fixed_block(const Weight& w, const FixedRows& rows, Ahead codes_ahead, Ahead scales_ahead, const FixedInput& in,
                 float* result) {
    constexpr int COLUMNS = PER * WIDTH, LINES = R * COLUMNS / 64, STEP = DIGITS + 1;
    // Both are the same for whole vectors, but GCC then keeps half as many numbers on the stack.
    int64_t groups = w.groups, run = LANE_GROUPS ? in.run : w.k / 8, columns = LANE_GROUPS ? 8 * run : w.k;
    const Bytes mask = Bytes{} + (uint8_t)15;
    Floats total[R][M] = {};
    for (int64_t start = 0; start < columns; start += 2 * run) {
        GroupEdge first(start, w.group), second(start + run, w.group);
        for (int64_t k = 0; k < run; k += COLUMNS) {
            const uint8_t* codes = rows.codes + (LANE_GROUPS ? start / (2 * run) * (w.k / 8) : start / 2) + k;
            // The low halves of bytes, then the high ones.
            UNROLL for (int half = 0; half < 2; half++) {
                asm("" : "+r"(codes));  // they are read again: keeping them would take registers
                const float* scale = rows.scale + (half ? second : first).group;
                int64_t column = start + half * run + k;
                if (LANE_GROUPS) scale = rows.scale + in.group[(uint64_t)column / WIDTH];
                UNROLL for (int m = 0; m < M; m++) {
                    const int8_t* vectors = in.bytes + STEP * (m * columns + column);
                    Bytes x[DIGITS][PER];
                    Ints shift = {};
                    UNROLL for (int i = 0; i < PER; i++, vectors += STEP * WIDTH) {
                        UNROLL for (int s = 0; s < DIGITS; s++) x[s][i] = load<Bytes>(vectors + s * WIDTH);
                        shift += load<Ints>(vectors + DIGITS * WIDTH);
                    }
                    UNROLL for (int r = 0; r < R; r++) {
                        Ints c[PER];
                        UNROLL for (int i = 0; i < PER; i++) {
                            Bytes bytes = load<Bytes>(codes + r * w.row_bytes + i * WIDTH);
                            bytes = (half ? (Bytes)((Shorts)bytes >> 4) : bytes) & mask;
                            c[i] = (Ints)(TABLE ? look_up(in.integers, bytes) : bytes);
                        }
                        const int share = half * R + r;  // of the lines, by rows
                        UNROLL for (int i = share * LINES / (2 * R); !m && i < (share + 1) * LINES / (2 * R); i++)
                            codes_ahead.fetch_after<false>(c[0]);
                        if (!m && !half && r == R / 2) scales_ahead.fetch_after(c[0]);
                        Floats sum = to_floats(times_fixed(c, x, shift));
                        const float* own = scale + r * groups;
                        if constexpr (LANE_GROUPS)
                            total[r][m] = fma(sum, permute(load<Floats>(own), load<Ints>(in.lanes + (uint64_t)column / 4)), total[r][m]);
                        else total[r][m] = fma(sum, broadcast(*own), total[r][m]);
                    }
                }
            }
            first.pass(COLUMNS);
            second.pass(COLUMNS);
        }
    }
    finish_block(total, in.scale, rows.offset, in.sums, groups, result);
}

template <int M, int DIGITS, bool TABLE>
void fixed_dot(const Weight& w, const FixedInput& in, const Output& y, int64_t threads) {
    constexpr int R = fixed_width(M);
    int64_t per = in.is_small && has_whole_vectors(w, 4) ? 4 : has_whole_vectors(w, 2) ? 2 : 1;  // vectors at a time
    auto block = in.group   ? fixed_block<R, M, DIGITS, TABLE, true, 1>
                 : per == 4 ? fixed_block<R, M, DIGITS, TABLE, false, 4>
                 : per == 2 ? fixed_block<R, M, DIGITS, TABLE, false, 2>
                            : fixed_block<R, M, DIGITS, TABLE, false, 1>;
    bool converts = w.scale_type != FLOAT32 || w.scale_stride != w.groups;
    int64_t groups = w.groups, scale_bytes = w.scale_stride * size_of(w.scale_type), steps = 4 * in.run / (per * WIDTH);
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch scale_scratch, code_scratch;
        float* converted = scale_scratch.get<float>(2 * R * groups);
        float* offset = w.has_offset() ? converted + R * groups : nullptr;
        for (int64_t task; (task = tasks.next()) >= 0;) {
            // The last block begins earlier, so that it is whole.
            int64_t start = task * R + R <= w.n ? task * R : w.n - R, skip = task * R - start;
            // Whole vectors of scales and of codes are read; behind the last row there may be none.
            bool copies = converts || (in.group && (w.n - start - R) * groups < LANES);
            const float* scale = copies ? converted : (const float*)w.scale + w.scale_stride * start;
            if (copies) scales(w, start, converted, R);
            if (offset) offsets(w, start, scale, offset, R);
            float result[R * M];
            Ahead codes_ahead{w.codes + (task + 1) * R * w.row_bytes, 64};
            Ahead scales_ahead{(const uint8_t*)w.scale + (task + 1) * R * scale_bytes, R * scale_bytes / steps};
            const uint8_t* codes = w.codes + start * w.row_bytes;
            if (8 * in.run > w.k && w.ends_within(start + R - 1, WIDTH)) {
                codes = code_scratch.get<uint8_t>(R * w.row_bytes);
                memcpy((void*)codes, w.codes + start * w.row_bytes, R * w.row_bytes);
            }
            block(w, {codes, scale, offset}, codes_ahead, scales_ahead, in, result);
            y.write_transposed(M, task * R, R - skip, result + skip * M, M);
        }
    });
}

// x (rows, ld) is not changed; sums (rows, groups), or null.
template <int DIGITS>
void multiply_fixed_dot(const Weight& w, const float* x, int64_t ld, int64_t rows, const float* sums, const Output& y, int64_t threads) {
    static thread_local Scratch byte_scratch, scale_scratch, run_scratch, group_scratch, lane_scratch;
    int64_t packed = w.k / 8, run = round_up(packed, WIDTH), columns = 8 * run;
    int8_t* bytes = byte_scratch.get<int8_t>(rows * (DIGITS + 1) * columns);
    float* scale = scale_scratch.get<float>(rows);
    FixedInput in{run, bytes, scale, sums, nullptr, nullptr, {}, true};
    int32_t center = w.values ? w.unit_center : w.center;
    for (int i = 0; w.values && i < 16; i++) {
        int32_t integer = ((const float*)w.values)[i] / w.unit;
        in.integers[i] = integer + center;
        in.is_small &= integer >= -15 && integer <= 15;
    }
    if (!has_whole_vectors(w)) {
        int32_t* group = group_scratch.get<int32_t>(columns / WIDTH);
        int32_t* lanes = lane_scratch.get<int32_t>(columns / 4);
        for (int64_t start = 0; start < columns; start += run) {
            GroupEdge at(start / run * packed, w.group);
            for (int64_t i = 0; i < run; i += 4) {
                int64_t column = start + i;
                if (i % WIDTH == 0) group[column / WIDTH] = at.group;
                lanes[column / 4] = at.group - group[column / WIDTH];
                if (i + 4 < packed) at.pass(4);  // those behind the end of a run count as its last
            }
        }
        in.group = group, in.lanes = lanes;
    }
    float* runs = columns > w.k ? run_scratch.get<float>(columns) : nullptr;
    if (runs) memset(runs, 0, columns * sizeof *runs);
    for (int64_t m = 0; m < rows; m++) {
        const float* row = x + m * ld;
        for (int64_t i = 0; runs && i < 8; i++) memcpy(runs + i * run, row + i * packed, packed * sizeof *runs);
        float unit = fix_row<DIGITS>(runs ? runs : row, columns, center, bytes + m * (DIGITS + 1) * columns);
        scale[m] = unit * (w.values ? w.unit : 1);
    }
    if (w.values) (rows == 1 ? fixed_dot<1, DIGITS, true> : fixed_dot<2, DIGITS, true>)(w, in, y, threads);
    else (rows == 1 ? fixed_dot<1, DIGITS, false> : fixed_dot<2, DIGITS, false>)(w, in, y, threads);
}

#else

inline bool fits_fixed_dot(const Weight&, int64_t) { return false; }
template <int>
void multiply_fixed_dot(const Weight&, const float*, int64_t, int64_t, const float*, const Output&, int64_t) {}

#endif

}  // namespace
