// A block-sparse weight: what is stored of each row of blocks is a dense matrix, multiplied with those columns of x.
#pragma once

#include "float_tile.h"
#include "int_tile.h"

namespace {

struct Blocks {
    const int32_t* columns;  // (rows of blocks, kept)
    int64_t size, kept;
};

// The columns of x that a row of blocks reads, side by side.
inline Input gather(const Input& x, const Blocks& blocks, const int32_t* columns, Scratch& scratch) {
    int64_t bytes = blocks.size * size_of(x.type), row = blocks.kept * bytes, of_x = x.stride * size_of(x.type);
    char* out = scratch.get<char>(x.rows * row);
    for (int64_t m = 0; m < x.rows; m++)
        for (int64_t j = 0; j < blocks.kept; j++)
            memcpy(out + m * row + j * bytes, (const char*)x.data + m * of_x + columns[j] * bytes, bytes);
    return {out, x.type, blocks.kept * blocks.size, x.rows};
}

// body(weight, columns of blocks, y) for each row of blocks, with its part of each.
template <class Body>
void each_row_of_blocks(const Weight& w, const Blocks& blocks, const Output& y, int64_t threads, const Body& body) {
    parallel_for(w.n / blocks.size, threads, [&](int64_t row) {
        int64_t start = row * blocks.size, at = start * size_of(y.type);
        Output to{(char*)y.data + at, y.type, y.n, y.bias ? (const char*)y.bias + at : nullptr};
        body(rows_of(w, start, blocks.size), blocks.columns + row * blocks.kept, to);
    });
}

// Columns of x whose sums are needed together: a group of the weight, or, where a row is one, a block.
inline int64_t unit_of(const Weight& w, const Blocks& blocks) { return w.groups > 1 ? w.group : blocks.size; }

// out[g] = the sums of the columns of x that group g of a row of blocks multiplies, from `sums` of each unit; both with
// `lanes` numbers for each.
inline void gather_sums(const Weight& w, const Blocks& blocks, const int32_t* columns, const int32_t* sums, int64_t lanes,
                        int32_t* out) {
    int64_t of_block = blocks.size / unit_of(w, blocks);
    memset(out, 0, w.groups * lanes * 4);
    for (int64_t j = 0; j < blocks.kept * of_block; j++) {
        const int32_t* from = sums + (columns[j / of_block] * of_block + j % of_block) * lanes;
        int32_t* to = out + (w.groups > 1 ? j : 0) * lanes;
        for (int64_t i = 0; i < lanes; i++) to[i] += from[i];
    }
}

// Few rows of codes; the equation of int_dot.h.
inline void multiply_blocks_int_dot(const Weight& w, const Blocks& blocks, int64_t k, const Codes& x, const Output& y,
                                    int64_t threads) {
    static thread_local Scratch by_unit_scratch;
    IntDotInput in = int_dot_input(x, k, unit_of(w, blocks));
    int64_t units = k / unit_of(w, blocks), rows = x.rows;
    int32_t* by_unit = by_unit_scratch.get<int32_t>(units * rows);
    for (int64_t i = 0; i < units * rows; i++) by_unit[i] = in.sums[i % rows * units + i / rows];
    each_row_of_blocks(w, blocks, y, threads, [&](const Weight& part, const int32_t* columns, const Output& to) {
        static thread_local Scratch sum_scratch;
        int32_t* by_group = sum_scratch.get<int32_t>(2 * w.groups * rows);
        int32_t* sums = by_group + w.groups * rows;
        gather_sums(w, blocks, columns, by_unit, rows, by_group);
        for (int64_t i = 0; i < w.groups * rows; i++) sums[i] = by_group[i % w.groups * rows + i / w.groups];
        multiply_int_dot(part, {in.x, in.ld, sums, x, columns, blocks.size}, to, 1);
    });
}

// Many rows of codes; the equation and the tiles of int_tile.h.
inline void multiply_blocks_int_tiles(const Weight& w, const Blocks& blocks, int64_t k, const Codes& x, const Output& y,
                                      int64_t threads) {
    // x as the weight's whole rows would meet it, with a group for each unit.
    Weight whole = w;
    whole.k = k;
    whole.group = unit_of(w, blocks);
    whole.groups = k / whole.group;
    IntPanels panels = int_panels(whole, x, threads);
    RowFactors factors(x, panels.count);
    int64_t lanes = factors.lanes, ld = lanes + 16, unit = whole.group, units = blocks.kept * blocks.size / unit;
    bool summed = has_zeros(w, x);
    const int64_t tile_columns = amx_step(whole);
    auto add = !summed ? add_group<SYMMETRIC> : w.group <= FLOAT_GROUP ? add_group<SMALL> : add_group<LARGE>;
    each_row_of_blocks(w, blocks, y, threads, [&](const Weight& part, const int32_t* columns, const Output& to) {
        static thread_local Scratch code_scratch, scale_scratch, zero_scratch, total_scratch, sum_scratch, group_scratch;
        Code* decoded = code_scratch.get<Code>(INT_ROWS * INT_LD);
        float* scale = scale_scratch.get<float>(INT_ROWS * w.groups);
        int32_t* zero = zero_scratch.get<int32_t>(INT_ROWS * w.groups);
        int32_t* total = total_scratch.get<int32_t>(INT_ROWS * ld);
        float* c = sum_scratch.get<float>(INT_ROWS * ld);
        int32_t* x_sums = group_scratch.get<int32_t>(w.groups * lanes);
        if (summed) gather_sums(w, blocks, columns, panels.sums, lanes, x_sums);
        TileConfig config(tile_columns);
        for (int64_t start = 0; start < part.n; start += INT_ROWS) {
            int64_t count = part.n - start < INT_ROWS ? part.n - start : INT_ROWS;
            GroupSums group_sums{total, c, ld, count, scale, zero, w.groups, x_sums, lanes, factors.zero, x.zero ? x.rows : -1};
            for (int64_t r = 0; r < count; r++) {
                scales(part, start + r, scale + r * w.groups);
                zeros(part, start + r, zero + r * w.groups);
            }
            for (int64_t i = 0; i < count * ld; i += LANES) store(c + i, broadcast(-0.0f));
            int64_t together = INT_COLUMNS / unit;  // units that are decoded at once
            for (int64_t first = 0; first < units; first += together) {
                int64_t last = first + together < units ? first + together : units, columns_at_once = (last - first) * unit;
                for (int64_t r = 0; r < count; r++)
                    decode_row(part, start + r, first * unit, columns_at_once, tile_columns, decoded, r);
                // The last panel, with the row of ones, comes first, and then is wanted by all others.
                auto each_panel = [&](auto body) {
                    for (int64_t p = panels.count; p > 0;) {
                        int64_t step = panels_at_once(p, INT_PANELS);
                        p -= step;
                        body(p, step);
                    }
                };
                if (w.groups == 1) {
                    Columns<Code> all{decoded, count, 0, columns_at_once, columns + first, unit};
                    each_panel([&](int64_t p, int64_t step) {
                        multiply_columns(whole, all, panels, p, step, total + p * LANES, ld, first > 0);
                        if (last == units) add(group_sums, 0, p, step);
                    });
                    continue;
                }
                for (int64_t u = first; u < last; u++) {
                    int64_t column = columns[u * unit / blocks.size] * blocks.size + u * unit % blocks.size;
                    Columns<Code> group{decoded + (u - first) * unit * INT_STEP, count, column, unit};
                    each_panel([&](int64_t p, int64_t step) {
                        multiply_columns(whole, group, panels, p, step, total + p * LANES, ld, false);
                        add(group_sums, u, p, step);
                    });
                }
            }
            factors.finish(c, ld, count);
            to.write_transposed(factors.count, start, count, c, ld);
        }
    });
}

// x in floating point; the equations of float_dot.h and float_tile.h.
inline void multiply_blocks_float(const Weight& w, const Blocks& blocks, const Input& x, const Output& y, int64_t threads) {
    each_row_of_blocks(w, blocks, y, threads, [&](const Weight& part, const int32_t* columns, const Output& to) {
        static thread_local Scratch scratch;
        Input gathered = gather(x, blocks, columns, scratch);
        if (x.rows <= DOT_MAX_ROWS) multiply_dot(part, gathered, to, 1);
        else multiply_tiles(part, gathered, to, 1);
    });
}

// NaN for all results of a row of x that holds a NaN or an infinity, also where no block reads it.
inline void spread_non_finite(const Input& x, int64_t k, const Output& y) {
    static thread_local Scratch row_scratch, nan_scratch;
    int64_t padded = round_up(k, LANES);
    for (int64_t m = 0; m < x.rows; m++) {
        float* row = row_scratch.get<float>(padded);
        x.part(m, 1).to_floats(k, row, padded, 1);
        if (!__builtin_isnan(largest_magnitude(row, k))) continue;
        float* nans = nan_scratch.get<float>(y.n);
        for (int64_t n = 0; n < y.n; n++) nans[n] = __builtin_nanf("");
        y.write(m, 0, y.n, nans);
    }
}

}  // namespace
