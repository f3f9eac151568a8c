// Products of queries with rows of codes, and sums of rows of codes times weights: for a block of tokens.
#pragma once

#include "cached_rows.h"

namespace {
namespace attention {

constexpr int64_t BLOCK = 64;  // tokens; a multiple of LANES

// Rows of codes in memory. While they are read, those at `next` are fetched: the hardware sees too little of each block
// to fetch ahead.
struct Rows {
    const uint8_t *rows, *next;
    int64_t stride, bytes, next_stride, next_bytes, count;

    INLINE void fetch(int64_t t) const {
        if (next) for (int64_t i = 0; i < next_bytes; i += 64) prefetch(next + t * next_stride + i);
    }
};

// Sums of products of rows of codes with R rows of q, to out + r * BLOCK; what is beyond them to a multiple of LANES is
// written.
template <int FORMAT, int R>
void dot_rows(const Rows& in, const float* q, int64_t ld, float* out) {
    constexpr int T = 4 / R;  // rows of codes at once: sums of a row wait for one another
    const uint8_t* codes = in.rows;
    const int64_t stride = in.stride, bytes = in.bytes, count = in.count;
    int64_t units = bytes / UNIT_BYTES<FORMAT>, rest = bytes % UNIT_BYTES<FORMAT>;
    for (int64_t t = 0; t < count; t += LANES) {
        Floats sums[R][LANES];
        for (int64_t i = 0; i < LANES; i += T) {
            const uint8_t* row[T];
            UNROLL for (int j = 0; j < T; j++) {
                // Behind the last row, it is read again.
                row[j] = codes + (t + i + j < count ? t + i + j : count - 1) * stride;
                if (t + i + j < count) in.fetch(t + i + j);
            }
            Floats a[T][R] = {}, b[T][R] = {};
            auto add = [&](int j, const Unit<FORMAT>& unit, int64_t u) {
                UNROLL for (int r = 0; r < R; r++) {
                    a[j][r] = fma(unit.a, load<Floats>(q + r * ld + 2 * u * LANES), a[j][r]);
                    b[j][r] = fma(unit.b, load<Floats>(q + r * ld + (2 * u + 1) * LANES), b[j][r]);
                }
            };
            for (int64_t u = 0; u < units; u++)
                UNROLL for (int j = 0; j < T; j++) add(j, Unit<FORMAT>(row[j] + u * UNIT_BYTES<FORMAT>), u);
            if (rest)
                UNROLL for (int j = 0; j < T; j++)
                    add(j, Unit<FORMAT>(Rest<FORMAT>(row[j] + units * UNIT_BYTES<FORMAT>, rest).bytes), units);
            UNROLL for (int j = 0; j < T; j++)
                UNROLL for (int r = 0; r < R; r++) sums[r][i + j] = a[j][r] + b[j][r];
        }
        UNROLL for (int r = 0; r < R; r++) store(out + r * BLOCK + t, sum_each(sums[r]));
    }
}

// Adds to R rows of y the sums of units of rows of codes times weights w + r * BLOCK.
template <int FORMAT, int R, int U>
INLINE void add_units(const Rows& in, int64_t first, int64_t rest, const float* w, float* y, int64_t ld) {
    const uint8_t* codes = in.rows + first * UNIT_BYTES<FORMAT>;
    const int64_t stride = in.stride, count = in.count;
    y += 2 * first * LANES;
    Floats sums[R][2 * U];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int u = 0; u < 2 * U; u++) sums[r][u] = load<Floats>(y + r * ld + u * LANES);
    for (int64_t t = 0; t < count; t++) {
        const uint8_t* row = codes + t * stride;
        if (!first) in.fetch(t);
        UNROLL for (int u = 0; u < U; u++) {
            auto add = [&](const Unit<FORMAT>& unit) {
                UNROLL for (int r = 0; r < R; r++) {
                    Floats weight = broadcast(w[r * BLOCK + t]);
                    sums[r][2 * u] = fma(unit.a, weight, sums[r][2 * u]);
                    sums[r][2 * u + 1] = fma(unit.b, weight, sums[r][2 * u + 1]);
                }
            };
            if (rest) add(Unit<FORMAT>(Rest<FORMAT>(row, rest).bytes));
            else add(Unit<FORMAT>(row + u * UNIT_BYTES<FORMAT>));
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int u = 0; u < 2 * U; u++) store(y + r * ld + u * LANES, sums[r][u]);
}

template <int FORMAT, int R>
void add_rows(const Rows& in, const float* w, float* y, int64_t ld) {
    constexpr int U = REGISTERS >= 32 ? 2 : 1;
    int64_t units = in.bytes / UNIT_BYTES<FORMAT>, rest = in.bytes % UNIT_BYTES<FORMAT>, u = 0;
    for (; u + U <= units; u += U) add_units<FORMAT, R, U>(in, u, 0, w, y, ld);
    for (; u < units; u++) add_units<FORMAT, R, 1>(in, u, 0, w, y, ld);
    if (rest) add_units<FORMAT, R, 1>(in, u, rest, w, y, ld);
}

using DotRows = void (*)(const Rows&, const float*, int64_t, float*);
using AddRows = void (*)(const Rows&, const float*, float*, int64_t);

// For 1, 2 and 4 rows.
struct Products {
    DotRows dot[3];
    AddRows add[3];
};

template <int FORMAT>
constexpr Products PRODUCTS = {
    {dot_rows<FORMAT, 1>, dot_rows<FORMAT, 2>, dot_rows<FORMAT, 4>},
    {add_rows<FORMAT, 1>, add_rows<FORMAT, 2>, add_rows<FORMAT, 4>},
};

inline const Products& products_of(int64_t format) {
    switch (format) {
        case UINT4: return PRODUCTS<UINT4>;
        case FLOAT8: return PRODUCTS<FLOAT8>;
        case INT8: return PRODUCTS<INT8>;
        case FLOAT32: return PRODUCTS<FLOAT32>;
        case BFLOAT16: return PRODUCTS<BFLOAT16>;
        default: return PRODUCTS<FLOAT16>;
    }
}

}  // namespace attention
}  // namespace
