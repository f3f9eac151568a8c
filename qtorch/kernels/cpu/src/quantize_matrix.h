// An operand of a training product, (rows, columns), to codes that are contiguous along the contracted axis, whichever
// axis of its tensor that is; bit for bit as primitives/qparams.py and primitives/affine.py compute them.
//
//     scale = max |x| / bound  of a block,    q = clamp(round(x / scale))
//
// A stripe of rows is brought into the cache in the order of the codes, and read there as often as needed.
#pragma once

#include "float8.h"
#include "parallel.h"
#include "quantize.h"

namespace {
namespace operand {

enum Format : int64_t { INTEGER, E4M3, E5M2 };

struct QuantizeMatrix {
    const void* data;
    int64_t type, row_step, column_step;  // in elements
    int64_t rows, columns;
    int64_t block_rows, block_columns;  // whole vectors of columns, or all; all rows: all columns too
    int64_t format;
    double least, most;  // code
    double bound, smallest, largest;
    double power;            // of two: that of the largest code, for scales that are powers of two; or 0
    int64_t skips_lost;      // rows with a NaN or an infinity do not change a scale
    int64_t scale_of_rows;   // a scale for each row, NaN where it is lost; otherwise, one for each block
    const float* noise;      // for stochastic rounding, or null
    int64_t noise_row_step, noise_column_step;
    int8_t* codes;  // (rows, columns)
    void* scale;    // fp32, or e8m0 with a power
    int64_t threads;
};

constexpr int64_t STRIPE = 32;  // rows

// Rows of a matrix from `first` on, zero beyond the columns. One of the steps is 1.
inline void load_stripe(const void* data, int64_t type, int64_t row_step, int64_t column_step, int64_t first, int64_t count,
                        int64_t columns, float* out, int64_t ld) {
    auto at = [&](int64_t row, int64_t k) {
        return (const char*)data + ((first + row) * row_step + k * column_step) * size_of(type);
    };
    if (column_step == 1 || columns == 1) {
        for (int64_t row = 0; row < count; row++) {
            to_float(at(row, 0), type, columns, out + row * ld);
            memset(out + row * ld + columns, 0, (ld - columns) * 4);
        }
        return;
    }
    constexpr int64_t AHEAD = 2 * LANES;  // columns; each may lie in a page of its own
    for (int64_t k = 0; k < columns; k += LANES) {
        for (int64_t i = k + AHEAD; i < k + AHEAD + LANES && i < columns; i++)
            for (int64_t row = 0; row < count; row += 64 / size_of(type)) prefetch(at(row, i));
        for (int64_t row = 0; row < count; row += LANES) {
            int64_t length = count - row < LANES ? count - row : LANES;
            float* to = out + row * ld + k;
            if (type == FLOAT32 && length == LANES && k + LANES <= columns) {
                Floats block[LANES];
                UNROLL for (int i = 0; i < LANES; i++) block[i] = load<Floats>(at(row, k + i));
                transpose(block);
                UNROLL for (int j = 0; j < LANES; j++) store(to + j * ld, block[j]);
                continue;
            }
            Floats block[LANES] = {};
            for (int64_t i = 0; i < LANES && k + i < columns; i++) to_float(at(row, k + i), type, length, (float*)&block[i]);
            transpose(block);
            for (int64_t j = 0; j < length; j++) store(to + j * ld, block[j]);
        }
    }
}

// Of `count` numbers, in the order of integers, where NaN is above infinity and infinity above all numbers.
INLINE int32_t largest_of(const float* x, int64_t count) {
    Ints highs = {};
    for (int64_t i = 0; i < count; i += LANES) highs = larger(highs, load<Ints>(x + i) & MAGNITUDE);
    return largest(highs);
}

inline float scale_of(const QuantizeMatrix& q, int32_t highest) {
    float high = load<float>(&highest);
    // Where no scale is too large, an infinity has an infinite one.
    if (highest >= INFINITE) return highest == INFINITE && __builtin_isinf(q.largest) ? high : __builtin_nanf("");
    float scale = high / (float)q.bound;
    if (q.power) {
        highest &= INFINITE;
        scale = load<float>(&highest) / (float)q.power;
    }
    if (scale < (float)q.smallest) scale = q.smallest;
    if (scale > (float)q.largest) scale = q.largest;
    return scale;
}

inline void put_scale(const QuantizeMatrix& q, int64_t at, float scale) {
    uint32_t bits = load<uint32_t>(&scale);
    if (q.power) ((uint8_t*)q.scale)[at] = scale != scale ? 0xff : bits >> 23;
    else ((float*)q.scale)[at] = scale;
}

// NaN stays NaN.
struct Clamp {
    Floats least, most;

    Floats operator()(Floats x) const { return smaller(most, larger(least, x)); }
};

INLINE void write_float8(const Float8& format, Clamp clamp, const float* x, int64_t count, float scale, int8_t* out) {
    Floats inverse = broadcast(1.0f / scale);
    Ints lost = Ints{} - (scale != scale);
    for (int64_t i = 0; i < count; i += LANES) {
        Floats v = load<Floats>(x + i);
        Ints nan = (((Ints)v & MAGNITUDE) >= INFINITE) | lost;
        store_bytes(out + i, (to_float8(format, clamp(v * inverse)) & ~nan) | (nan & 0x7f));
    }
}

// Whole vectors are written.
inline void write_codes(const QuantizeMatrix& q, const float* x, const float* noise, int64_t count, float scale, int8_t* out) {
    Clamp clamp{broadcast(q.least), broadcast(q.most)};
    if (q.format == E4M3) return write_float8(E4M3_FORMAT, clamp, x, count, scale, out);
    if (q.format == E5M2) return write_float8(E5M2_FORMAT, clamp, x, count, scale, out);
    Floats inverse = broadcast(1.0f / scale);
    for (int64_t i = 0; !noise && i < count; i += LANES)
        store_bytes(out + i, round_to_ints(clamp(load<Floats>(x + i) * inverse)));
    for (int64_t i = 0; noise && i < count; i += LANES) {
        Floats v = clamp(load<Floats>(x + i) * inverse), nearest = round_even(v);
        Floats floor = nearest - (Floats)((nearest > v) & (Ints)broadcast(1));
        store_bytes(out + i, to_ints(floor) - (load<Floats>(noise + i) < v - floor));
    }
}

// The working memory of a stripe.
struct Stripe {
    int64_t first, count, ld;
    float *copy, *noise;
    int32_t* highest;  // of each row, where rows may be lost
    int8_t* codes;
    const float* x = nullptr;  // the copy, or the matrix itself
    int64_t x_ld = 0;

    void load(const QuantizeMatrix& q) {
        bool in_place = q.type == FLOAT32 && q.column_step == 1 && q.columns % LANES == 0;
        x = in_place ? (const float*)q.data + first * q.row_step : copy;
        x_ld = in_place ? q.row_step : ld;
        if (!in_place) load_stripe(q.data, q.type, q.row_step, q.column_step, first, count, q.columns, copy, ld);
        if (noise) load_stripe(q.noise, FLOAT32, q.noise_row_step, q.noise_column_step, first, count, q.columns, noise, ld);
        for (int64_t row = 0; q.skips_lost && row < count; row++) highest[row] = largest_of(x + row * x_ld, round_up(q.columns, LANES));
    }

    bool is_lost(const QuantizeMatrix& q, int64_t row) const { return q.skips_lost && highest[row] >= INFINITE; }

    // Of a block that starts at this row of the stripe.
    int32_t block_highest(const QuantizeMatrix& q, int64_t row, int64_t stop, int64_t k, int64_t width) const {
        int32_t high = 0;
        for (; row < stop; row++) {
            int32_t of_row = is_lost(q, row) ? 0 : largest_of(x + row * x_ld + k, width);
            high = of_row > high ? of_row : high;
        }
        return high;
    }

    void write(const QuantizeMatrix& q, int64_t row, int64_t k, int64_t width, float scale) {
        int64_t length = q.columns - k < width ? q.columns - k : width;
        int8_t* to = q.codes + (first + row) * q.columns + k;
        // The vectors of the last block may end behind the row, where another thread writes.
        bool whole = length % LANES == 0;
        write_codes(q, x + row * x_ld + k, noise ? noise + row * ld + k : nullptr, length, scale, whole ? to : codes);
        if (!whole) memcpy(to, codes, length);
    }
};

template <class Body>
void each_stripe(const QuantizeMatrix& q, int64_t size, const Body& body) {
    parallel((q.rows + size - 1) / size, threads_for(q.rows * q.columns, q.threads), [&](Tasks& tasks) {
        static thread_local Scratch x_scratch, noise_scratch, row_scratch, code_scratch;
        // One vector more, so that rows of a power of two do not compete for the same lines of the cache.
        int64_t ld = round_up(q.columns, LANES) + LANES;
        Stripe stripe{0, 0, ld, x_scratch.get<float>(size * ld), nullptr, row_scratch.get<int32_t>(size), code_scratch.get<int8_t>(ld)};
        if (q.noise) stripe.noise = noise_scratch.get<float>(size * ld);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            stripe.first = task * size;
            stripe.count = q.rows - stripe.first < size ? q.rows - stripe.first : size;
            stripe.load(q);
            body(stripe);
        }
        x_scratch.trim();
        noise_scratch.trim();
    });
}

// One scale for all.
inline void quantize_whole(const QuantizeMatrix& q) {
    static thread_local Scratch scratch;
    int64_t stripes = (q.rows + STRIPE - 1) / STRIPE, width = round_up(q.columns, LANES);
    int32_t *of_stripes = scratch.get<int32_t>(stripes), high = 0;
    each_stripe(q, STRIPE, [&](Stripe& s) { of_stripes[s.first / STRIPE] = s.block_highest(q, 0, s.count, 0, width); });
    for (int64_t i = 0; i < stripes; i++) high = of_stripes[i] > high ? of_stripes[i] : high;
    float scale = scale_of(q, high);
    if (!q.scale_of_rows) put_scale(q, 0, scale);
    each_stripe(q, STRIPE, [&](Stripe& s) {
        for (int64_t row = 0; row < s.count; row++) {
            if (q.scale_of_rows) put_scale(q, s.first + row, s.is_lost(q, row) ? __builtin_nanf("") : scale);
            s.write(q, row, 0, width, scale);
        }
    });
}

inline void quantize_matrix(const QuantizeMatrix& q) {
    if (q.block_rows == q.rows && q.block_columns == q.columns && q.rows > 1) return quantize_whole(q);
    int64_t groups = q.columns / q.block_columns, width = round_up(q.block_columns, LANES);
    each_stripe(q, q.block_rows > 1 ? q.block_rows : STRIPE, [&](Stripe& s) {
        for (int64_t start = 0; start < s.count; start += q.block_rows) {
            for (int64_t g = 0; g < groups; g++) {
                int64_t stop = start + q.block_rows, k = g * q.block_columns;
                float scale = scale_of(q, s.block_highest(q, start, stop, k, width));
                if (!q.scale_of_rows) put_scale(q, (s.first + start) / q.block_rows * groups + g, scale);
                for (int64_t row = start; row < stop; row++) {
                    if (q.scale_of_rows) put_scale(q, (s.first + row) * groups + g, s.is_lost(q, row) ? __builtin_nanf("") : scale);
                    s.write(q, row, k, width, scale);
                }
            }
        }
    });
}

}  // namespace operand
}  // namespace
