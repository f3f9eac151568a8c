// Many rows of codes, exactly: tiles of the weight times panels of x, whose vectors run over the rows of x.
//
// The equation is that of int_dot.h. The sums of the products of a group are made in integers by one of three ways: matrix
// tiles (AMX), products of bytes (VNNI), or fp32 products over so few columns that they are exact.
#pragma once

#include "amx.h"
#include "int_dot.h"
#include "tile.h"

namespace {

// Panels of x for this machine, with one more row of ones where the sums of the weight's codes are needed.
struct IntPanels {
    int64_t columns, rows, count;  // rows with the ones; count of panels
    int64_t step;                  // columns that a unit of a panel holds
    const void* data;
    int32_t* sums;  // (groups, count * LANES): of x less its zero points
};

// What a thread works with on a block of rows of the weight.
struct IntBlock {
    const Weight& w;
    const IntPanels& x;
    int8_t* codes;   // scratch
    int32_t* total;  // (rows, ld)
    int64_t ld;
};

// What is decoded together of a block's rows, from column k on, where `columns` are left of a group: the rest of the
// group, or several whole groups, of which this is one.
struct Piece {
    int64_t columns;  // of this group
    int64_t decoded;  // 0: they are there
    int64_t at;       // of column k in what is decoded

    Piece(const Weight& w, int64_t k, int64_t left, int64_t most) {
        int64_t together = w.group < most ? most / w.group * w.group : most;
        columns = left < most ? left : most;
        at = w.group < most ? k % together : 0;
        decoded = at ? 0 : w.group >= most ? columns : w.k - k < together ? w.k - k : together;
    }
};

#if defined(__AMX_INT8__)

constexpr int INT_ROWS = 32;
constexpr int INT_COLUMNS = 1024;  // decoded at a time
constexpr int INT_LD = INT_COLUMNS + 64;
constexpr int32_t TILE_SHIFT = 0;
using Unit = uint32_t;

// products[i][j] (16, 16) = sum over `columns` of the tiles a[i] and the panels b[j].
template <int PANELS>
INLINE void multiply_bytes(const int8_t* a, int64_t ld, const int8_t* b, int64_t panel, int64_t columns, int64_t step,
                           int32_t* products) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < columns; k += step) {
        for (int r = 0; r < 32; r++) prefetch(a + r * ld + k + 8 * step);
        _tile_loadd(4, a + k, ld);
        _tile_loadd(6, b + k * 16, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, a + 16 * ld + k, ld);
        _tile_dpbssd(2, 5, 6);
        if (PANELS == 1) continue;
        _tile_loadd(7, b + panel + k * 16, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, products, PANELS * 64);
    _tile_stored(2, products + PANELS * 256, PANELS * 64);
    if (PANELS == 1) return;
    _tile_stored(1, products + 16, PANELS * 64);
    _tile_stored(3, products + PANELS * 256 + 16, PANELS * 64);
}

// The sums of group g, into block.total.
inline void multiply_group(const IntBlock& block, int64_t start, int64_t count, int64_t g) {
    const Weight& w = block.w;
    const IntPanels& x = block.x;
    int64_t step = w.group % 64 && w.group != w.k ? 32 : 64, panel = round_up(w.k, 64) * 16;
    bool direct = !w.bits && !w.center && count == INT_ROWS && w.group % step == 0;
    alignas(64) int32_t products[INT_ROWS * 32];
    for (int64_t i = 0; i < w.group;) {
        int64_t k = g * w.group + i, columns = w.group - i;
        const int8_t* a = (const int8_t*)w.codes + start * w.row_bytes + k;
        int64_t ld = w.row_bytes;
        if (!direct) {
            Piece piece(w, k, columns, INT_COLUMNS);
            columns = piece.columns;
            for (int64_t r = 0; piece.decoded && r < count; r++) {
                prefetch_codes(w, start + r, k + piece.decoded, piece.decoded);
                decode(w, start + r, k, piece.decoded, block.codes + r * INT_LD);
                memset(block.codes + r * INT_LD + piece.decoded, 0, 64);
            }
            a = block.codes + piece.at;
            ld = INT_LD;
        }
        for (int64_t p = 0; p < x.count; p += 2) {
            bool two = p + 1 < x.count;
            const int8_t* b = (const int8_t*)x.data + p * panel + k * 16;
            if (two) multiply_bytes<2>(a, ld, b, panel, columns, step, products);
            else multiply_bytes<1>(a, ld, b, panel, columns, step, products);
            for (int64_t r = 0; r < count; r++) {
                for (int64_t j = 0; j < (two ? 2 : 1); j++) {
                    int32_t* to = block.total + r * block.ld + (p + j) * 16;
                    Ints more = load<Ints>(products + r * (two ? 32 : 16) + j * 16);
                    store(to, i ? load<Ints>(to) + more : more);
                }
            }
        }
        i += columns;
    }
}

#elif defined(HAS_VNNI)

constexpr int INT_ROWS = TILE_ROWS;
constexpr int INT_COLUMNS = 1024;
constexpr int INT_LD = INT_COLUMNS + 64;
constexpr int32_t TILE_SHIFT = 128;
using Unit = uint32_t;

// c[r, v] (+)= sum_k w[r, k] * x[v][k], unsigned times signed bytes.
template <int R, int V>
void multiply_int_tile(const int8_t* w, const uint32_t* x, int64_t panel, int64_t quads, int32_t* c,
                       int64_t ldc, bool add) {
    Ints total[R][V] = {};
    for (int64_t k = 0; k < quads; k++) {
        Ints xs[V];
        UNROLL for (int v = 0; v < V; v++) xs[v] = load<Ints>(x + v * panel + k * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            Ints a = Ints{} + load<int32_t>(w + r * INT_LD + 4 * k);
            UNROLL for (int v = 0; v < V; v++) total[r][v] = dot4(total[r][v], a, xs[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) {
            int32_t* to = c + r * ldc + v * LANES;
            store(to, add ? load<Ints>(to) + total[r][v] : total[r][v]);
        }
    }
}

template <int V>
void multiply_int_rows(const int8_t* w, const uint32_t* x, int64_t panel, int64_t quads, int32_t* c,
                       int64_t ldc, bool add) {
    constexpr int R = SUMS / V;
    for (int r = 0; r < INT_ROWS; r += R)
        multiply_int_tile<R, V>(w + r * INT_LD, x, panel, quads, c + r * ldc, ldc, add);
}

inline void multiply_group(const IntBlock& block, int64_t start, int64_t count, int64_t g) {
    const Weight& w = block.w;
    int64_t panel = round_up(w.k, 64) / 4 * LANES;
    Bytes shift = Bytes{} + (uint8_t)128;
    for (int64_t i = 0; i < w.group;) {
        int64_t k = g * w.group + i;
        Piece piece(w, k, w.group - i, INT_COLUMNS);
        for (int64_t r = 0; piece.decoded && r < count; r++) {
            int8_t* row = block.codes + r * INT_LD;
            prefetch_codes(w, start + r, k + piece.decoded, piece.decoded);
            decode(w, start + r, k, piece.decoded, row);
            for (int64_t j = 0; j < piece.decoded; j += WIDTH) store(row + j, load<Bytes>(row + j) ^ shift);
        }
        const int8_t* codes = block.codes + piece.at;
        const uint32_t* x = (const uint32_t*)block.x.data + k / 4 * LANES;
        int64_t quads = (piece.columns + 3) / 4;
        for (int64_t p = 0; p < block.x.count;) {
            int64_t left = block.x.count - p;
            int64_t v = left == MAX_PANELS + 1 ? (left + 1) / 2 : left < MAX_PANELS ? left : MAX_PANELS;
            int32_t* to = block.total + p * LANES;
            if (v == 1) multiply_int_rows<1>(codes, x + p * panel, panel, quads, to, block.ld, i > 0);
            if (v == 2) multiply_int_rows<2>(codes, x + p * panel, panel, quads, to, block.ld, i > 0);
            if constexpr (MAX_PANELS == 4) {
                if (v == 3) multiply_int_rows<3>(codes, x + p * panel, panel, quads, to, block.ld, i > 0);
                if (v == 4) multiply_int_rows<4>(codes, x + p * panel, panel, quads, to, block.ld, i > 0);
            }
            p += v;
        }
        i += piece.columns;
    }
}

#else

constexpr int INT_ROWS = 96;
constexpr int INT_COLUMNS = TILE_COLUMNS;
constexpr int32_t TILE_SHIFT = 0;
using Unit = float;

inline void multiply_group(const IntBlock& block, int64_t start, int64_t count, int64_t g) {
    static thread_local Scratch tile_scratch, sum_scratch;
    const Weight& w = block.w;
    float* tile = tile_scratch.get<float>(INT_ROWS * TILE_LD);
    float* c = sum_scratch.get<float>(INT_ROWS * block.ld);
    // Sums stay within 2^24 for 1024 products.
    for (int64_t i = 0; i < w.group; i += 1024) {
        int64_t stop = i + 1024 < w.group ? i + 1024 : w.group;
        for (int64_t j = i; j < stop;) {
            int64_t k = g * w.group + j;
            Piece piece(w, k, stop - j, TILE_COLUMNS);
            for (int64_t r = 0; piece.decoded && r < count; r++) {
                prefetch_codes(w, start + r, k + piece.decoded, piece.decoded);
                decode(w, start + r, k, piece.decoded, block.codes);
                scale_codes(block.codes, piece.decoded, 1, 0, tile + r * TILE_LD);
            }
            multiply_panels(tile + piece.at, round_up(count, TILE_ROWS), (const float*)block.x.data, block.x.count, w.k, k,
                            piece.columns, c, block.ld, j > i);
            j += piece.columns;
        }
        for (int64_t at = 0; at < count * block.ld; at += LANES) {
            Ints part = to_ints(load<Floats>(c + at));
            store(block.total + at, i ? load<Ints>(block.total + at) + part : part);
        }
    }
}

#endif

// Panels of x (rows, ld) for `multiply_group`, into `out`, and their sums.
inline IntPanels int_panels(const Weight& w, const Codes& x, int64_t threads) {
    static thread_local Scratch row_scratch, panel_scratch, group_scratch;
    int64_t rows = x.rows + (x.zero ? 1 : 0), count = (rows + LANES - 1) / LANES, lanes = count * LANES;
    int32_t* sums = group_scratch.get<int32_t>(w.groups * lanes);
    parallel_for(w.groups, threads, [&](int64_t g) {
        for (int64_t m = 0; m < lanes; m++) {
            int32_t total = m < x.rows ? sum_codes(x.codes + m * x.ld + g * w.group, w.group) : 0;
            sums[g * lanes + m] = total - (m < x.rows && x.zero ? (int32_t)w.group * x.zero[m] : 0);
        }
    });
    if constexpr ((Unit)0.5f == 0) {
        // Four codes are a unit; rows are padded to whole ones.
        int64_t ld = round_up(w.k, 64);
        int8_t* codes = row_scratch.get<int8_t>(rows * ld);
        for (int64_t m = 0; m < x.rows; m++) {
            memcpy(codes + m * ld, x.codes + m * x.ld, w.k);
            memset(codes + m * ld + w.k, 0, ld - w.k);
        }
        if (x.zero) {
            memset(codes + x.rows * ld, 1, w.k);
            memset(codes + x.rows * ld + w.k, 0, ld - w.k);
        }
        Unit* out = panel_scratch.get<Unit>(count * LANES * ld / 4);
        to_panels((const int32_t*)codes, ld / 4, rows, ld / 4, (int32_t*)out, threads);
        return {w.k, rows, count, 4, out, sums};
    } else {
        Unit* values = row_scratch.get<Unit>(rows * w.k);
        for (int64_t m = 0; m < x.rows; m++) to_float(x.codes + m * x.ld, INT8, w.k, (float*)values + m * w.k);
        for (int64_t k = 0; x.zero && k < w.k; k++) values[x.rows * w.k + k] = 1;
        Unit* out = panel_scratch.get<Unit>(lanes * w.k);
        to_panels((const int32_t*)values, w.k, rows, w.k, (int32_t*)out, threads);
        return {w.k, rows, count, 1, out, sums};
    }
}

inline void multiply_int_tiles(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    static thread_local Scratch row_scratch;
    IntPanels panels = int_panels(w, x, threads);
    int64_t ld = panels.count * LANES;
    // Scale and zero point of each row of x, in vectors.
    float* row_scale = row_scratch.get<float>(2 * ld);
    float* row_zero = row_scale + ld;
    // No sum over so few columns, or part of it, has more than 24 bits: fp32 is exact, and multiplies faster than integers.
    bool small = w.group <= 128;
    for (int64_t m = 0; m < ld; m++) {
        row_scale[m] = m < x.rows ? x.scale[m] : 0;
        row_zero[m] = m < x.rows && x.zero ? x.zero[m] : 0;
    }
    parallel((w.n + INT_ROWS - 1) / INT_ROWS, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, scale_scratch, zero_scratch, total_scratch, sum_scratch;
        int8_t* codes = code_scratch.get<int8_t>(INT_ROWS * (INT_COLUMNS + 64));
        float* scale = scale_scratch.get<float>(INT_ROWS * w.groups);
        int32_t* zero = zero_scratch.get<int32_t>(INT_ROWS * w.groups);
        float* c = sum_scratch.get<float>(INT_ROWS * ld);
        IntBlock block{w, panels, codes, total_scratch.get<int32_t>(INT_ROWS * ld), ld};
#if defined(__AMX_INT8__)
        TileConfig config(w.group % 64 && w.group != w.k ? 32 : 64);
#endif
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = task * INT_ROWS, count = w.n - start < INT_ROWS ? w.n - start : INT_ROWS;
            for (int64_t r = 0; r < count; r++) {
                scales(w, start + r, scale + r * w.groups);
                zeros(w, start + r, zero + r * w.groups);
            }
            for (int64_t g = 0; g < w.groups; g++) {
                multiply_group(block, start, count, g);
                for (int64_t r = 0; r < count; r++) {
                    const int32_t* total = block.total + r * ld;
                    int32_t z = zero[r * w.groups + g] + TILE_SHIFT, ones = x.zero ? total[x.rows] : 0;
                    Floats s = broadcast(scale[r * w.groups + g]);
                    for (int64_t m = 0; m < ld; m += LANES) {
                        Floats exact;
                        if (small) {
                            Floats sums = to_floats(load<Ints>(panels.sums + g * ld + m));
                            exact = fma(broadcast(-z), sums, to_floats(load<Ints>(total + m)));
                            exact = fma(broadcast(-ones), load<Floats>(row_zero + m), exact);
                        } else {
                            Ints sum = load<Ints>(total + m) - z * load<Ints>(panels.sums + g * ld + m);
                            exact = to_floats(sum - ones * to_ints(load<Floats>(row_zero + m)));
                        }
                        float* to = c + r * ld + m;
                        Floats scaled = exact * s;
                        store(to, g ? load<Floats>(to) + scaled : scaled);
                    }
                }
            }
            for (int64_t r = 0; r < count; r++)
                for (int64_t m = 0; m < ld; m += LANES)
                    store(c + r * ld + m, load<Floats>(c + r * ld + m) * load<Floats>(row_scale + m));
            y.write_transposed(x.rows, start, count, c, ld);
        }
    });
}

}  // namespace
