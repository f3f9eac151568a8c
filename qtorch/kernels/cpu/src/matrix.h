// The input and the result of a layer as its kernels see them.
#pragma once

#include "parallel.h"
#include "scratch.h"
#include "weight.h"

namespace {

// Rows that are converted, packed and multiplied at a time: bounds the working memory.
constexpr int64_t MAX_CHUNK = 512;

// Groups of a multiple of this size are whole vectors on every machine, and whole matrix tiles.
constexpr int64_t AMX_STEP = 32;
inline bool has_whole_groups(const Weight& w) { return w.group == w.k || w.group % AMX_STEP == 0; }

struct Input {
    const void* data;
    int64_t type, stride, rows;  // stride: elements from one row to the next

    Input part(int64_t start, int64_t count) const {
        return {(const char*)data + start * stride * size_of(type), type, stride, count};
    }

    // fp32 rows (rows, ld), zero beyond the k columns.
    void to_floats(int64_t k, float* out, int64_t ld, int64_t threads) const {
        parallel_for(rows, threads, [&](int64_t m) {
            to_float((const char*)data + m * stride * size_of(type), type, k, out + m * ld);
            memset(out + m * ld + k, 0, (ld - k) * 4);
        });
    }
};

// Results that were NaN or infinite before they were rounded, or more, of all calls of this library.
int64_t non_finite_results = 0;

inline void count_non_finite(const float* values, int64_t count) {
    int32_t lost = 0;
    int64_t i = 0;
    if (count >= LANES) {
        Ints lanes = {};
        for (; i + LANES <= count; i += LANES) lanes |= (load<Ints>(values + i) & MAGNITUDE) >= INFINITE;
        lost = sum(lanes);
    }
    for (; i < count; i++) lost |= (load<int32_t>(values + i) & MAGNITUDE) >= INFINITE;
    if (__builtin_expect(lost != 0, 0)) __atomic_fetch_add(&non_finite_results, 1, __ATOMIC_RELAXED);
}

struct Output {
    void* data;  // (rows, n), contiguous
    int64_t type, n;
    const void* bias;  // (n), of the same type, or null

    Output part(int64_t start) const { return {(char*)data + start * n * size_of(type), type, n, bias}; }

    // `count` results of row m, from column `start` on.
    void write(int64_t m, int64_t start, int64_t count, const float* values) const {
        char* to = (char*)data + (m * n + start) * size_of(type);
        from_float(values, type, count, to);
        count_non_finite(values, count);
        if (!bias) return;
        // As torch adds it: to the rounded result.
        constexpr int64_t STEP = 64;
        float result[STEP], more[STEP];
        for (int64_t i = 0; i < count; i += STEP) {
            int64_t length = count - i < STEP ? count - i : STEP;
            to_float(to + i * size_of(type), type, length, result);
            to_float((const char*)bias + (start + i) * size_of(type), type, length, more);
            for (int64_t j = 0; j < length; j++) result[j] += more[j];
            from_float(result, type, length, to + i * size_of(type));
        }
    }

    // A vector of results of each of `rows` rows from m on, from column `start` on.
    INLINE void write_vectors(int64_t m, int64_t start, int64_t rows, const Floats* values) const {
        const int64_t size = size_of(type);
        char* to = (char*)data + (m * n + start) * size;
        Floats more = {};
        if (bias) to_float((const char*)bias + start * size, type, LANES, (float*)&more);
        Ints lost = {};
        for (int64_t r = 0; r < rows; r++, to += n * size) {
            Floats value = values[r];
            lost |= ((Ints)value & MAGNITUDE) >= INFINITE;
            if (bias && type != FLOAT32) {  // torch adds it to the rounded result
                from_float((const float*)&value, type, LANES, to);
                to_float(to, type, LANES, (float*)&value);
            }
            if (bias) value += more;
            from_float((const float*)&value, type, LANES, to);
        }
        if (__builtin_expect(sum(lost) != 0, 0)) __atomic_fetch_add(&non_finite_results, 1, __ATOMIC_RELAXED);
    }

    // The same for rows 0 to `rows`, from values[column * ld + row]. Whole vectors are read where ld has room for them.
    void write_transposed(int64_t rows, int64_t start, int64_t count, const float* values, int64_t ld) const {
        if (rows == 1 && ld == 1) return write(0, start, count, values);
        if (ld < round_up(rows, LANES)) {
            for (int64_t i = 0; i < count; i++)
                for (int64_t m = 0; m < rows; m++) write(m, start + i, 1, values + i * ld + m);
            return;
        }
        // All columns of some rows before the next rows: they share lines of the cache.
        for (int64_t m = 0; m < rows; m += LANES) {
            int64_t here = rows - m < LANES ? rows - m : LANES;
            for (int64_t i = 0; i < count; i += LANES) {
                int64_t columns = count - i < LANES ? count - i : LANES;
                Floats block[LANES] = {};
                if (columns == LANES) {
                    UNROLL for (int j = 0; j < LANES; j++) block[j] = load<Floats>(values + (i + j) * ld + m);
                } else {
                    for (int64_t j = 0; j < columns; j++) block[j] = load<Floats>(values + (i + j) * ld + m);
                }
                transpose(block);
                if (columns == LANES) write_vectors(m, start + i, here, block);
                else
                    for (int64_t r = 0; r < here; r++) write(m + r, start + i, columns, (const float*)&block[r]);
            }
        }
    }
};

// The n rows of a weight as tasks: of many rows, so that each piece of x that comes into cache is used for all of them, but
// enough for all threads, and as large as each other, so that threads end together. All but the last begin and end at
// multiples of `unit`.
struct RowTasks {
    int64_t n, unit, units, count;

    RowTasks(int64_t n, int64_t unit, int64_t most, int64_t threads) : n(n), unit(unit), units((n + unit - 1) / unit) {
        int64_t fair = (n + most - 1) / most;
        count = round_up(fair > 4 * threads ? fair : 4 * threads, threads);
        if (count > units) count = units;
    }

    int64_t most() const { return count ? (units + count - 1) / count * unit : 0; }

    int64_t start(int64_t task) const {
        int64_t row = task * units / count * unit;
        return row < n ? row : n;
    }
};

// How many of the panels that are left to multiply at once: one more than `most` is better cut in halves.
inline int64_t panels_at_once(int64_t left, int64_t most) {
    return left == most + 1 ? (left + 1) / 2 : left < most ? left : most;
}

// x (rows, ld) to panels of LANES rows, [rows / LANES][columns][LANES]: what lies one below the other in x is then one
// vector. Missing rows are zero.
inline void to_panels(const int32_t* x, int64_t ld, int64_t rows, int64_t columns, int32_t* out, int64_t threads) {
    constexpr int64_t STEP = 256;
    int64_t panels = (rows + LANES - 1) / LANES, steps = (columns + STEP - 1) / STEP;
    parallel_for(panels * steps, threads, [&](int64_t task) {
        int64_t panel = task / steps, k = task % steps * STEP, stop = k + STEP < columns ? k + STEP : columns;
        int64_t first = panel * LANES, count = rows - first < LANES ? rows - first : LANES;
        int32_t* to = out + panel * columns * LANES;
        for (; k + LANES <= stop; k += LANES) {
            Ints block[LANES];
            for (int64_t i = 0; i < LANES; i++) block[i] = i < count ? load<Ints>(x + (first + i) * ld + k) : Ints{};
            transpose(block);
            for (int64_t i = 0; i < LANES; i++) store(to + (k + i) * LANES, block[i]);
        }
        for (; k < stop; k++)
            for (int64_t i = 0; i < LANES; i++) to[k * LANES + i] = i < count ? x[(first + i) * ld + k] : 0;
    });
}

}  // namespace
