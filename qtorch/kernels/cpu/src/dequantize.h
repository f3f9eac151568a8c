// A weight in floating point: the numbers of `dequantize_affine` of primitives/affine.py, bit for bit, so that rows of a
// table are the same whoever reads them.
//
//     y[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]              where a zero point is a code
//     y[n, k] = (code[n, k] - middle) * scale[n, g] + zero[n, g]     where it is a real number
//     y[n, k] = values[n, code[n, k]] * scale[n, g]                  where codes are no integers
#pragma once

#include "matrix.h"
#include "values.h"

namespace {

// `count` centered codes of a group. Adding `shift` to one is exact; see `Weight`.
INLINE void dequantize_codes(const int8_t* codes, int64_t count, float shift, float zero, bool zero_is_code,
                             float scale, float* out) {
    Floats h = broadcast(shift), z = broadcast(zero), s = broadcast(scale);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Floats code = to_floats(widen(codes + i)) + h;
        store(out + i, zero_is_code ? (code - z) * s : code * s + z);
    }
    for (; i < count; i++) {
        float code = codes[i] + shift;
        out[i] = zero_is_code ? (code - zero) * scale : code * scale + zero;
    }
}

// Row n of the weight to row m of y.
inline void dequantize_row(const Weight& w, int64_t n, const Output& y, int64_t m) {
    constexpr int64_t COLUMNS = 2048;  // at a time, to stay in cache
    static thread_local Scratch code_scratch, row_scratch, scale_scratch;
    int8_t* decoded = code_scratch.get<int8_t>(COLUMNS);
    float* row = row_scratch.get<float>(COLUMNS);
    float* scale = scale_scratch.get<float>(2 * w.groups);
    float* zero = scale + w.groups;
    bool direct = !w.bits && !w.center, zero_is_code = !w.zero || w.zero_is_code;
    scales(w, n, scale);
    zeros(w, n, zero);
    for (int64_t k = 0; k < w.k; k += COLUMNS) {
        int64_t columns = w.k - k < COLUMNS ? w.k - k : COLUMNS;
        const int8_t* codes = (const int8_t*)w.codes + n * w.row_bytes + k;
        if (!direct) {
            decode(w, n, k, columns, decoded);
            codes = decoded;
        }
        float* to = y.type == FLOAT32 ? (float*)y.data + m * y.n + k : row;
        GroupEdge at(k, w.group);
        if (w.values) scale_values(w, n, at, codes, columns, scale, to);
        else each_group(at, columns, [&](int64_t i, int64_t stop, int64_t g) {
            dequantize_codes(codes + i, stop - i, w.shift, zero[g], zero_is_code, scale[g], to + i);
        });
        if (to == row) y.write(m, k, columns, row);
    }
}

inline void dequantize(const Weight& w, const Output& y, int64_t threads) {
    parallel_for(w.n, threads, [&](int64_t n) { dequantize_row(w, n, y, n); });
}

// sums (n, 2): of the squares of each row of x (n, k), and of its differences from the weight, rounded to `type`.
inline void sum_squared_errors(const Weight& w, const Input& x, int64_t type, double* sums, int64_t threads) {
    parallel_for(w.n, threads, [&](int64_t n) {
        static thread_local Scratch row_scratch, rounded_scratch;
        int64_t ld = round_up(w.k, LANES);
        float *row = row_scratch.get<float>(2 * ld), *made = row + ld;
        x.part(n, 1).to_floats(w.k, row, ld, 1);
        dequantize_row(w, n, {made, FLOAT32, w.k, nullptr}, 0);
        if (type != FLOAT32) {
            char* rounded = rounded_scratch.get<char>(w.k * size_of(type));
            from_float(made, type, w.k, rounded);
            to_float(rounded, type, w.k, made);
        }
        memset(made + w.k, 0, (ld - w.k) * sizeof *made);
        double squares[LANES] = {}, errors[LANES] = {};
        for (int64_t k = 0; k < ld; k += LANES)
            for (int i = 0; i < LANES; i++) {
                double value = row[k + i], error = value - made[k + i];
                squares[i] += value * value;
                errors[i] += error * error;
            }
        sums[2 * n] = sums[2 * n + 1] = 0;
        for (int i = 0; i < LANES; i++) sums[2 * n] += squares[i], sums[2 * n + 1] += errors[i];
    });
}

}  // namespace
