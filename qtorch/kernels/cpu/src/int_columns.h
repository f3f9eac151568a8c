// Sums of products of codes, exactly, for some columns of the weight and of x: by matrix tiles (AMX), products of bytes
// (VNNI) or of 16-bit numbers (AVX2), or fp32 products over so few columns that they are exact.
#pragma once

#include "amx.h"
#include "float_tile.h"
#include "int_dot.h"

namespace {

// Panels of x for this machine, with one more row of ones where the sums of the weight's codes are needed.
struct IntPanels {
    int64_t count;     // of panels
    int64_t panel;     // units of one
    const void* data;  // units, for each panel, by column
    int32_t* sums;     // (groups, count * LANES): of x less its zero points
};

// Columns of a matrix tile.
inline int64_t amx_step(const Weight& w) { return w.group == w.k || w.group % 64 == 0 ? 64 : w.group % 32 == 0 ? 32 : 16; }

// Decoded rows of the weight, and some columns of them that belong to one group.
template <class Code>
struct Columns {
    const Code* codes;
    int64_t rows, k, count;  // from column k of x on
    const int32_t* blocks = nullptr;  // or these blocks of columns of x
    int64_t block_size = INT64_MAX;
    Lines* next = nullptr;  // is prefetched meanwhile
    int64_t in_place = 0;  // for matrix tiles: codes from one row to the next of rows that are no block, but the weight's own

    // body(first, column of x, count) for each run of columns that follow one another in x.
    template <class Body>
    INLINE void each_run(const Body& body) const {
        for (int64_t i = 0; i < count;) {
            int64_t length = count - i < block_size ? count - i : block_size;
            body(i, blocks ? blocks[i / block_size] * block_size : k + i, length);
            i += length;
        }
    }
};

// Each of these has: rows of a block (INT_ROWS), columns that are decoded together (INT_COLUMNS), codes of a block from one row
// to the next and from a step of columns to one a column behind (INT_LD, INT_STEP), panels that are multiplied together
// (INT_PANELS) and columns of them that stay in the nearest cache (INT_NEAR), what is added to a code (TILE_SHIFT), whether it
// prefetches `Columns::next` (PREFETCHES), a decoded code, a unit of a panel and how many codes it has, and
//
//     decode_row            columns of row n to row r of a block, for tiles of `step` columns
//     multiply_columns<V>   total (rows, ld) (+)= codes times V panels of x, from `p` on; up to INT_ROWS are written
#if defined(__AMX_INT8__)

// A block is of tiles of 16 rows, one behind the other: those of rows that lie apart would compete for lines of the cache.
constexpr int INT_ROWS = 32;
constexpr int INT_COLUMNS = 4096;
constexpr int INT_LD = INT_COLUMNS;
constexpr int INT_STEP = 16;
constexpr int64_t IN_PLACE_PANELS = 6;  // of x, with which no block is made of rows that can be read where they lie
constexpr int INT_PANELS = 2;
constexpr int64_t INT_NEAR = INT64_MAX;
constexpr int32_t TILE_SHIFT = 0;
constexpr bool PREFETCHES = false;
using Code = int8_t;
using Unit = uint32_t;
constexpr int64_t UNIT_CODES = 4;

inline void decode_row(const Weight& w, int64_t n, int64_t k, int64_t columns, int64_t step, Code* block, int64_t r) {
    alignas(64) int8_t decoded[INT_COLUMNS + 64];
    const int8_t* codes = (const int8_t*)w.codes + n * w.row_bytes + k;
    if (w.bits || w.center || columns % step) {
        decode(w, n, k, columns, decoded);
        memset(decoded + columns, 0, 64);
        codes = decoded;
    }
    Code* to = block + r / 16 * 16 * INT_LD + r % 16 * step;
    using Quarter = Code __attribute__((vector_size(16)));
    if (step == 64)
        for (int64_t i = 0; i < columns; i += 64) store(to + i * INT_STEP, load<Bytes>(codes + i));
    else
        for (int64_t i = 0; i < columns; i += step)
            for (int64_t j = 0; j < step; j += 16) store(to + i * INT_STEP + j, load<Quarter>(codes + i + j));
}

template <int V>
void multiply_columns(const Weight& w, const Columns<Code>& a, const IntPanels& x, int64_t p, int32_t* total, int64_t ld,
                      bool add) {
    int64_t step = amx_step(w);
    if (add) {
        load_tile<0>(total, ld * 4);
        load_tile<2>(total + 16 * ld, ld * 4);
        if (V == 2) load_tile<1>(total + 16, ld * 4);
        if (V == 2) load_tile<3>(total + 16 * ld + 16, ld * 4);
    } else {
        zero_tile<0>();
        zero_tile<1>();
        zero_tile<2>();
        zero_tile<3>();
    }
    a.each_run([&](int64_t first, int64_t column, int64_t count) {
        const int64_t row = a.in_place ? a.in_place : step, along = a.in_place ? 1 : INT_STEP;
        const Code *codes = a.codes + first * along, *lower = codes + 16 * (a.in_place ? row : INT_LD);
        const Unit* b = (const Unit*)x.data + p * x.panel + column * 4;
        for (int64_t k = 0; k < count; k += step) {
            // Far enough for memory; a block is in the cache. After the last columns come the first of the next rows.
            int64_t ahead = k + 16 * step;
            if (column + ahead >= w.k) ahead += INT_ROWS * row - w.k;
            for (int r = 0; a.in_place && r < INT_ROWS; r++) prefetch<false>(codes + r * row + ahead);
            load_tile<4>(codes + k * along, row);
            load_tile<6>(b + k * 4, 64);
            multiply_bytes<0, 4, 6>();
            load_tile<5>(lower + k * along, row);
            multiply_bytes<2, 5, 6>();
            if (V == 1) continue;
            load_tile<7>(b + x.panel + k * 4, 64);
            multiply_bytes<1, 4, 7>();
            multiply_bytes<3, 5, 7>();
        }
    });
    store_tile<0>(total, ld * 4);
    store_tile<2>(total + 16 * ld, ld * 4);
    if (V == 2) store_tile<1>(total + 16, ld * 4);
    if (V == 2) store_tile<3>(total + 16 * ld + 16, ld * 4);
}

#elif defined(HAS_VNNI) || defined(__AVX2__)

constexpr int INT_ROWS = 2 * TILE_ROWS;  // whole vectors, as the result is written
constexpr int INT_COLUMNS = 1024;
constexpr int INT_LD = INT_COLUMNS + 64;
constexpr int INT_STEP = 1;
constexpr int64_t IN_PLACE_PANELS = 0;
constexpr int INT_PANELS = REGISTERS == 32 ? 4 : 2;
constexpr bool PREFETCHES = true;
using Unit = uint32_t;

#if defined(HAS_VNNI)

constexpr int32_t TILE_SHIFT = 128;
using Code = int8_t;
constexpr int64_t UNIT_CODES = 4;

inline void decode_row(const Weight& w, int64_t n, int64_t k, int64_t columns, int64_t, Code* block, int64_t r) {
    Code* out = block + r * INT_LD;
    decode(w, n, k, columns, out);
    for (int64_t i = 0; i < columns; i += WIDTH) store(out + i, load<Bytes>(out + i) ^ (Bytes{} + (uint8_t)TILE_SHIFT));
}

// Unsigned times signed bytes.
INLINE Ints add_unit(Ints total, Ints codes, Ints x) { return dot4(total, codes, x); }

#else

constexpr int32_t TILE_SHIFT = 0;
using Code = int16_t;
constexpr int64_t UNIT_CODES = 2;

inline void decode_row(const Weight& w, int64_t n, int64_t k, int64_t columns, int64_t, Code* block, int64_t r) {
    alignas(64) int8_t codes[INT_COLUMNS + 64];
    decode(w, n, k, columns, codes);
    for (int64_t i = 0; i < columns; i += WIDTH / 2) store(block + r * INT_LD + i, widen_to_shorts(codes + i));
}

INLINE Ints add_unit(Ints total, Ints codes, Ints x) { return total + multiply_pairs(codes, x); }

#endif

constexpr int64_t INT_NEAR = near_units(INT_PANELS) * UNIT_CODES;

// Not a part of its caller, whose variables would take registers.
template <int V>
__attribute__((noinline)) void multiply_columns(const Weight&, const Columns<Code>& a, const IntPanels& x, int64_t p, int32_t* to,
                                                int64_t ld, bool add) {
    constexpr int R = SUMS / V;
    for (int64_t row = 0; row < a.rows; row += R, to += R * ld) {
        Ints total[R][V] = {};
        if (add) {
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < V; v++) total[r][v] = load<Ints>(to + r * ld + v * LANES);
        }
        a.each_run([&](int64_t first, int64_t column, int64_t count) {
            const Code* codes = a.codes + row * INT_LD + first;
            const Unit* b = (const Unit*)x.data + p * x.panel + column / UNIT_CODES * LANES;
            constexpr int STEPS = REGISTERS == 32 ? 2 : 1;  // whose operands registers hold
            int64_t units = (count + UNIT_CODES - 1) / UNIT_CODES;
            for (int64_t step = 0; step < units; step += STEPS) {
                // A line or two at a time: many prefetches at once delay the loads that are needed now.
                UNROLL for (int i = 0; i < R; i += 16 / STEPS)
                    if (a.next) a.next->prefetch_next();
                UNROLL for (int64_t k = step; k < step + STEPS && k < units; k++) {
                    Ints xs[V];
                    UNROLL for (int v = 0; v < V; v++) xs[v] = load<Ints>(b + v * x.panel + k * LANES);
                    UNROLL for (int r = 0; r < R; r++) {
                        Ints c = Ints{} + load<int32_t>(codes + r * INT_LD + UNIT_CODES * k);
                        UNROLL for (int v = 0; v < V; v++) total[r][v] = add_unit(total[r][v], c, xs[v]);
                    }
                }
            }
        });
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store(to + r * ld + v * LANES, total[r][v]);
    }
}

#else

constexpr int INT_ROWS = 96;
constexpr int INT_COLUMNS = TILE_COLUMNS;  // sums of so many products stay within 2^24
constexpr int INT_LD = TILE_LD;
constexpr int INT_STEP = 1;
constexpr int64_t IN_PLACE_PANELS = 0;
constexpr int INT_PANELS = MAX_PANELS;
constexpr int64_t INT_NEAR = INT_COLUMNS;
constexpr int32_t TILE_SHIFT = 0;
constexpr bool PREFETCHES = false;
using Code = float;
using Unit = float;
constexpr int64_t UNIT_CODES = 1;

inline void decode_row(const Weight& w, int64_t n, int64_t k, int64_t columns, int64_t, Code* block, int64_t r) {
    alignas(64) int8_t codes[INT_COLUMNS + 64];
    decode(w, n, k, columns, codes);
    scale_codes(codes, columns, 1, 0, block + r * INT_LD);
}

template <int V>
void multiply_columns(const Weight&, const Columns<Code>& a, const IntPanels& x, int64_t p, int32_t* to, int64_t ld, bool add) {
    constexpr int R = SUMS / V;
    alignas(64) float sums[R * V * LANES];
    for (int64_t row = 0; row < a.rows; row += R, to += R * ld) {
        a.each_run([&](int64_t first, int64_t column, int64_t count) {
            const Unit* b = (const Unit*)x.data + p * x.panel + column * LANES;
            multiply_tile<R, V>(a.codes + row * INT_LD + first, b, x.panel, count, sums, V * LANES, first > 0);
        });
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < V; v++) {
                Ints exact = to_ints(load<Floats>(sums + (r * V + v) * LANES));
                int32_t* at = to + r * ld + v * LANES;
                store(at, add ? load<Ints>(at) + exact : exact);
            }
        }
    }
}

#endif

inline void multiply_columns(const Weight& w, const Columns<Code>& a, const IntPanels& x, int64_t p, int64_t panels,
                             int32_t* total, int64_t ld, bool add) {
    if (panels == 1) multiply_columns<1>(w, a, x, p, total, ld, add);
    if (panels == 2) multiply_columns<2>(w, a, x, p, total, ld, add);
    if constexpr (INT_PANELS >= 3)
        if (panels == 3) multiply_columns<3>(w, a, x, p, total, ld, add);
    if constexpr (INT_PANELS == 4)
        if (panels == 4) multiply_columns<4>(w, a, x, p, total, ld, add);
}

}  // namespace
