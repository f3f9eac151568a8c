// Codes (rows, columns) of one byte, with a scale for each block or none, as fp32: y = q * scale.
#pragma once

#include "quantize_matrix.h"

namespace {
namespace operand {

struct DequantizeMatrix {
    const uint8_t* codes;
    int64_t row_step, rows, columns;  // columns are contiguous
    int64_t format;
    const void* scale;  // or null
    int64_t is_power, scale_row_step, scale_column_step;  // e8m0, otherwise fp32
    int64_t block_rows, block_columns;                    // whole vectors of columns, or all
    float* out;                                           // (rows, columns)
    int64_t threads;
};

INLINE Floats decoded(int64_t format, const uint8_t* p) {
    if (format == INTEGER) return to_floats(widen((const int8_t*)p));
    return from_float8(format == E4M3 ? E4M3_FORMAT : E5M2_FORMAT, p);
}

inline float scale_at(const DequantizeMatrix& q, int64_t row, int64_t group) {
    int64_t at = row / q.block_rows * q.scale_row_step + group * q.scale_column_step;
    if (!q.is_power) return ((const float*)q.scale)[at];
    uint32_t exponent = ((const uint8_t*)q.scale)[at], bits = exponent == 255 ? 0x7fc00000 : exponent ? exponent << 23 : 0x400000;
    return load<float>(&bits);
}

template <int64_t FORMAT>
void dequantize_row(const DequantizeMatrix& q, int64_t row) {
    const uint8_t* from = q.codes + row * q.row_step;
    float* to = q.out + row * q.columns;
    for (int64_t k = 0, g = 0; k < q.columns; k += q.block_columns, g++) {
        Floats scale = broadcast(q.scale ? scale_at(q, row, g) : 1);
        int64_t i = k, stop = k + q.block_columns;
        for (; i + LANES <= stop; i += LANES) store(to + i, decoded(FORMAT, from + i) * scale);
        if (i == stop) continue;
        uint8_t codes[LANES] = {};
        memcpy(codes, from + i, stop - i);
        Floats rest = decoded(FORMAT, codes) * scale;
        memcpy(to + i, &rest, (stop - i) * 4);
    }
}

inline void dequantize_matrix(const DequantizeMatrix& q) {
    int64_t most = q.rows * q.columns / (1 << 15) + 1;
    parallel_for(q.rows, q.threads < most ? q.threads : most, [&](int64_t row) {
        if (q.format == INTEGER) dequantize_row<INTEGER>(q, row);
        if (q.format == E4M3) dequantize_row<E4M3>(q, row);
        if (q.format == E5M2) dequantize_row<E5M2>(q, row);
    });
}

}  // namespace operand
}  // namespace
