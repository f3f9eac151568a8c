// Many rows of codes, exactly: tiles of the weight times panels of x, whose vectors run over the rows of x.
//
// The equation is that of int_dot.h; the sums of the products of a group are made by int_columns.h.
#pragma once

#include "int_columns.h"

namespace {

constexpr int64_t FLOAT_GROUP = 128;  // no sum over so few columns, or part of it, has more than 24 bits

// Whether zero points are subtracted from the sums of products.
inline bool has_zeros(const Weight& w, const Codes& x) { return w.has_offset() || x.zero || TILE_SHIFT; }

// Panels of x (rows, ld), and their sums if they are wanted.
inline IntPanels int_panels(const Weight& w, const Codes& x, int64_t threads) {
    static thread_local Scratch row_scratch, panel_scratch, group_scratch;
    int64_t rows = x.rows + (x.zero ? 1 : 0), count = (rows + LANES - 1) / LANES, lanes = count * LANES;
    int32_t* sums = group_scratch.get<int32_t>(w.groups * lanes);
    bool sums_wanted = has_zeros(w, x);
    // Rows, and one of ones, are padded to whole units.
    using Part = std::conditional_t<UNIT_CODES == 4, int8_t, std::conditional_t<UNIT_CODES == 2, int16_t, float>>;
    int64_t ld = round_up(w.k, 64), units = ld / UNIT_CODES;
    Part* codes = row_scratch.get<Part>(rows * ld);
    parallel_for(lanes, threads, [&](int64_t m) {
        for (int64_t g = 0; sums_wanted && g < w.groups; g++) {
            int32_t total = m < x.rows ? sum_codes(x.codes + m * x.ld + g * w.group, w.group) : 0;
            sums[g * lanes + m] = total - (m < x.rows && x.zero ? (int32_t)w.group * x.zero[m] : 0);
        }
        if (m >= rows) return;
        Part* row = codes + m * ld;
        const int8_t* from = x.codes + m * x.ld;
        const int64_t columns = w.k;  // of its own, or each byte that is written might change it
        if (m < x.rows) for (int64_t k = 0; k < columns; k++) row[k] = from[k];
        else for (int64_t k = 0; k < columns; k++) row[k] = 1;
        memset(row + columns, 0, (ld - columns) * sizeof *row);
    });
    Unit* out = panel_scratch.get<Unit>(lanes * units);
    to_panels((const int32_t*)codes, units, rows, units, (int32_t*)out, threads);
    return {count, units * LANES, out, sums};
}

// Scale and zero point of each row of x, in vectors.
struct RowFactors {
    int64_t lanes, slices, count;  // count: of rows of the result
    float *scale, *zero;

    RowFactors(const Codes& x, int64_t panels) : lanes(panels * LANES), slices(x.slices), count(x.rows / x.slices) {
        static thread_local Scratch scratch;
        scale = scratch.get<float>(2 * lanes);
        zero = scale + lanes;
        for (int64_t m = 0; m < lanes; m++) {
            scale[m] = m < x.rows ? x.scale[m] : 0;
            zero[m] = m < x.rows && x.zero ? x.zero[m] : 0;
        }
    }

    // Scales the sums c (rows, ld), and adds up slices.
    void finish(float* c, int64_t ld, int64_t rows) const {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t m = 0; m < lanes; m += LANES) store(c + r * ld + m, load<Floats>(c + r * ld + m) * load<Floats>(scale + m));
        // Not row by row: what was just written cannot be read from another start.
        for (int64_t r = 0; slices > 1 && r < rows; r++) {
            for (int64_t m = 0; m < count; m += LANES) {
                Floats sum = load<Floats>(c + r * ld + m);
                for (int64_t s = 1; s < slices; s++) sum += load<Floats>(c + r * ld + s * count + m);
                store(c + r * ld + m, sum);
            }
        }
    }
};

// What is done with the integer sums of a group.
struct GroupSums {
    const int32_t* total;  // (rows, ld)
    float* c;              // (rows, ld)
    int64_t ld, rows;
    const float* scale;  // (rows, groups)
    const int32_t* zero;
    int64_t groups;
    const int32_t* x_sums;  // (groups, lanes)
    int64_t lanes;
    const float* x_zero;  // (lanes)
    int64_t ones;         // lane of the sums of codes, or -1
};

// What zero points there are: none; or such that all is exact in fp32, which multiplies faster than integers; or others.
enum Zeros { SYMMETRIC, SMALL, LARGE };

template <Zeros ZEROS, int V>
void add_group(const GroupSums& in, int64_t g, int64_t p) {
    const int32_t *total = in.total + p * LANES, *x_sums = in.x_sums + g * in.lanes + p * LANES;
    const float *scale = in.scale + g, *x_zero = in.x_zero + p * LANES;
    float* c = in.c + p * LANES;
    int64_t rows = in.rows, ld = in.ld, groups = in.groups;
    for (int64_t r = 0; r < rows; r++, total += ld, c += ld, scale += groups) {
        int32_t z = ZEROS == SYMMETRIC ? 0 : in.zero[r * groups + g] + TILE_SHIFT;
        int32_t ones = ZEROS == SYMMETRIC || in.ones < 0 ? 0 : in.total[r * ld + in.ones];
        UNROLL for (int v = 0; v < V; v++) {
            Ints sum = load<Ints>(total + v * LANES);
            Floats exact = to_floats(sum), zeros = load<Floats>(x_zero + v * LANES);
            if (ZEROS == SMALL) {
                exact = fma(broadcast(-z), to_floats(load<Ints>(x_sums + v * LANES)), exact);
                exact = fma(broadcast(-ones), zeros, exact);
            }
            if (ZEROS == LARGE) exact = to_floats(sum - z * load<Ints>(x_sums + v * LANES) - ones * to_ints(zeros));
            store(c + v * LANES, load<Floats>(c + v * LANES) + exact * broadcast(*scale));
        }
    }
}

template <Zeros ZEROS>
void add_group(const GroupSums& in, int64_t g, int64_t p, int64_t panels) {
    if (panels == 1) add_group<ZEROS, 1>(in, g, p);
    if (panels == 2) add_group<ZEROS, 2>(in, g, p);
    if constexpr (INT_PANELS >= 3)
        if (panels == 3) add_group<ZEROS, 3>(in, g, p);
    if constexpr (INT_PANELS == 4)
        if (panels == 4) add_group<ZEROS, 4>(in, g, p);
}

inline void multiply_int_tiles(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    IntPanels panels = int_panels(w, x, threads);
    RowFactors factors(x, panels.count);
    // Rows of results do not compete for the same lines of the cache.
    int64_t lanes = factors.lanes, ld = lanes + 16, groups = w.groups;
    auto add = !has_zeros(w, x) ? add_group<SYMMETRIC> : w.group <= FLOAT_GROUP ? add_group<SMALL> : add_group<LARGE>;
    const int64_t tile_columns = amx_step(w);
    bool spread = PREFETCHES && !w.bits;
    bool direct = panels.count <= IN_PLACE_PANELS && !w.bits && !w.center && w.group % tile_columns == 0;
    // Columns that are decoded together: whole groups, or a part of one.
    int64_t together = w.group < INT_COLUMNS ? INT_COLUMNS / w.group * w.group : INT_COLUMNS;
    parallel((w.n + INT_ROWS - 1) / INT_ROWS, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, scale_scratch, zero_scratch, total_scratch, sum_scratch;
        Code* decoded = code_scratch.get<Code>(INT_ROWS * INT_LD);
        float* scale = scale_scratch.get<float>(INT_ROWS * groups);
        int32_t* zero = zero_scratch.get<int32_t>(INT_ROWS * groups);
        int32_t* total = total_scratch.get<int32_t>(INT_ROWS * ld);
        float* c = sum_scratch.get<float>(INT_ROWS * ld);
        TileConfig config(tile_columns);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = task * INT_ROWS, count = w.n - start < INT_ROWS ? w.n - start : INT_ROWS;
            bool whole = direct && count == INT_ROWS;
            GroupSums group_sums{total, c, ld, count, scale, zero, groups, panels.sums, lanes, factors.zero, x.zero ? x.rows : -1};
            scales(w, start, scale, count);
            for (int64_t r = 0; r < count; r++) zeros(w, start + r, zero + r * groups);
            // What the sums of the groups are added to; 0 + -0 would not be -0.
            for (int64_t i = 0; i < count * ld; i += LANES) store(c + i, broadcast(-0.0f));
            for (int64_t k = 0; k < w.k;) {
                int64_t rest = w.group < INT_COLUMNS ? w.k - k : w.group - k % w.group;
                int64_t columns = whole ? w.k : rest < together ? rest : together;
                // What comes next: more columns of these rows, or the rows of the task that mostly follows.
                Lines next{w.codes + start * w.row_bytes + k + columns, w.row_bytes, count, columns};
                if (k + columns == w.k) next.row += count * w.row_bytes - w.k, next.rows = w.n - start - count;
                if (next.rows > INT_ROWS) next.rows = INT_ROWS;
                for (int64_t r = 0; !whole && r < count; r++) {
                    if (!spread) prefetch_codes(w, start + r, k + columns, columns);
                    decode_row(w, start + r, k, columns, tile_columns, decoded, r);
                }
                // Columns of one group at a time, and so few that x stays in the nearest cache.
                GroupEdge at(k, w.group);
                for (int64_t i = 0, length; i < columns; i += length, at.pass(length)) {
                    length = at.left < columns - i ? at.left : columns - i;
                    if (length > INT_NEAR) length = INT_NEAR;
                    // The last panel, with the row of ones, comes first, and then is wanted by all others.
                    for (int64_t p = panels.count; p > 0;) {
                        int64_t step = panels_at_once(p, INT_PANELS);
                        Columns<Code> part{decoded + i * INT_STEP, count, k + i, length};
                        if (whole) part.codes = (const Code*)(w.codes + start * w.row_bytes) + i, part.in_place = w.row_bytes;
                        if (spread && p == panels.count) part.next = &next;
                        p -= step;
                        multiply_columns(w, part, panels, p, step, total + p * LANES, ld, at.left < w.group);
                        if (length == at.left) add(group_sums, at.group, p, step);
                    }
                }
                k += columns;
            }
            factors.finish(c, ld, count);
            y.write_transposed(factors.count, start, count, c, ld);
        }
    });
}

}  // namespace
