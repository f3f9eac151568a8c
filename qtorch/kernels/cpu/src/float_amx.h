// Many rows of x on a processor with matrix tiles (AMX): bf16 products, added up in fp32.
//
//     y[m, n] = sum_g scale[n, g] * (sum_{k in g} c[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// Codes are exact in bf16, and x is the exact sum of slices that are: three for fp32, two for fp16. Each slice is
// multiplied in turn. A tile of the weight, 16 rows of 32 codes, is the left operand as it lies in memory.
//
// For bf16 x the weight is dequantized to bf16 instead, as `dequantize` would, and sums run over all groups.
#pragma once

#if defined(__AMX_BF16__)
#include "amx.h"
#include "float_dot.h"
#include "matrix.h"

namespace {

constexpr int AMX_COLUMNS = 512;  // decoded at a time
constexpr int AMX_LD = AMX_COLUMNS + 32;

// The next bf16 slice of 16 numbers; `x` keeps what is left. Truncated, so that huge numbers do not become infinite.
INLINE __m512i next_slice(Floats& x) {
    constexpr int32_t HIGH = (int32_t)0xffff0000, EXPONENT = 0x7f800000;
    Ints bits = (Ints)x & HIGH;
    // Nothing is left of infinity.
    x = (Floats)((Ints)(x - (Floats)bits) & ((bits & EXPONENT) != EXPONENT));
    return (__m512i)bits;
}

// x to panels of 16 rows, [slice][panel][k / 2][row][2] bf16, and the sums of its groups, [group][row].
inline void bfloat_panels(const Weight& w, const Input& x, int slices, uint16_t* out, float* sums, int64_t threads) {
    static thread_local Scratch row_scratch;
    int64_t k32 = round_up(w.k, AMX_STEP), panels = (x.rows + 15) / 16, ld = x.stride;
    const float* rows = (const float*)x.data;
    if (x.type != FLOAT32 || w.k != k32) {
        float* converted = row_scratch.get<float>(x.rows * k32);
        x.to_floats(w.k, converted, k32, threads);
        rows = converted;
        ld = k32;
    }
    if (sums) {
        parallel_for(panels, threads, [&](int64_t panel) {
            for (int64_t m = panel * 16; m < panel * 16 + 16; m++)
                for (int64_t g = 0; g < w.groups; g++)
                    sums[g * panels * 16 + m] = m < x.rows ? sum_of(rows + m * ld + g * w.group, w.group) : 0;
        });
    }
    int64_t steps = k32 / AMX_STEP;
    parallel_for(panels * steps, threads, [&](int64_t task) {
        int64_t panel = task / steps, k = task % steps * AMX_STEP;
        Ints pairs[3][16];
        for (int64_t m = 0; m < 16; m++) {
            Floats low = {}, high = {};
            if (panel * 16 + m < x.rows) {
                const float* p = rows + (panel * 16 + m) * ld + k;
                low = load<Floats>(p);
                high = load<Floats>(p + 16);
            }
            for (int s = 0; s < slices; s++) {
                // The upper halves of all 32 numbers, in order.
                const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                       29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
                __m512i a = next_slice(low), b = next_slice(high);
                pairs[s][m] = (Ints)_mm512_permutex2var_epi16(a, order, b);
            }
        }
        for (int s = 0; s < slices; s++) {
            uint16_t* to = out + ((s * panels + panel) * k32 + k) * 16;
            transpose(pairs[s]);
            for (int64_t i = 0; i < 16; i++) store(to + i * 32, pairs[s][i]);
        }
    });
    row_scratch.trim();
}

INLINE void to_bfloat(const int8_t* codes, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; i += 32) {
        __m512 low = (__m512)to_floats(widen(codes + i)), high = (__m512)to_floats(widen(codes + i + 16));
        store(out + i, _mm512_cvtne2ps_pbh(high, low));
    }
}

// The same of c * scale + offset.
INLINE void to_bfloat(const int8_t* codes, int64_t count, float scale, float offset, uint16_t* out) {
    Floats s = broadcast(scale), o = broadcast(offset);
    for (int64_t i = 0; i < count; i += 32) {
        Floats low = fma(to_floats(widen(codes + i)), s, o), high = fma(to_floats(widen(codes + i + 16)), s, o);
        store(out + i, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
}

// c (32, 32) += a (32 rows) times two panels of `b`, over `columns`.
inline void add_bfloat(const uint16_t* a, const uint16_t* b, int64_t panel, int64_t columns, float* c, int64_t ldc) {
    load_tile<0>(c, ldc * 4);
    load_tile<1>(c + 16, ldc * 4);
    load_tile<2>(c + 16 * ldc, ldc * 4);
    load_tile<3>(c + 16 * ldc + 16, ldc * 4);
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        load_tile<4>(a + k, AMX_LD * 2);
        load_tile<6>(b + k * 16, 64);
        multiply_bfloats<0, 4, 6>();
        load_tile<5>(a + 16 * AMX_LD + k, AMX_LD * 2);
        multiply_bfloats<2, 5, 6>();
        load_tile<7>(b + panel + k * 16, 64);
        multiply_bfloats<1, 4, 7>();
        multiply_bfloats<3, 5, 7>();
    }
    store_tile<0>(c, ldc * 4);
    store_tile<1>(c + 16, ldc * 4);
    store_tile<2>(c + 16 * ldc, ldc * 4);
    store_tile<3>(c + 16 * ldc + 16, ldc * 4);
}

// products (32, 32) = sum over slices and `columns` of two tiles at `a` and of the panels at `b`. One panel alone has its
// result in two halves, to be added: a product takes three times as long to finish as the next takes to start.
template <int PANELS>
void multiply_bfloat(const uint16_t* a, const uint16_t* b, int64_t panel, int slices, int64_t slice, int64_t columns,
                     float* products) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    int odd = 0;
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        load_tile<4>(a + k, AMX_LD * 2);
        load_tile<5>(a + 16 * AMX_LD + k, AMX_LD * 2);
        for (int s = 0; s < slices; s++) {
            const uint16_t* from = b + s * slice + k * 16;
            load_tile<6>(from, 64);
            if (PANELS == 2) load_tile<7>(from + panel, 64);
            if (PANELS == 2 || !odd) {
                multiply_bfloats<0, 4, 6>();
                multiply_bfloats<2, 5, 6>();
            }
            if (PANELS == 2) {
                multiply_bfloats<1, 4, 7>();
                multiply_bfloats<3, 5, 7>();
            } else if (odd) {
                multiply_bfloats<1, 4, 6>();
                multiply_bfloats<3, 5, 6>();
            }
            odd = !odd;
        }
    }
    store_tile<0>(products, 128);
    store_tile<1>(products + 16, 128);
    store_tile<2>(products + 512, 128);
    store_tile<3>(products + 528, 128);
}

// c[r] += products[r] * scale[r], PANELS vectors each.
template <int PANELS>
INLINE void add_scaled(const float* products, const float* scale, int64_t groups, float* c, int64_t ldc) {
    for (int r = 0; r < 32; r++) {
        Floats s = broadcast(scale[r * groups]), left = load<Floats>(products + 32 * r), right = load<Floats>(products + 32 * r + 16);
        float* to = c + r * ldc;
        if (PANELS == 1) left += right;
        store(to, fma(left, s, load<Floats>(to)));
        if (PANELS == 2) store(to + 16, fma(right, s, load<Floats>(to + 16)));
    }
}

// x as bf16, for all threads: `panels` of 16 rows, missing ones zero, in slices.
struct BfloatPanels {
    const uint16_t* values;  // [slice][panel][k / 2][row][2]
    const float* sums;       // of its groups, [group][row], where the weight has offsets that are added at the end
    int slices;
    int64_t panels, panel, slice;  // panel, slice: numbers from one to the next

    // Then the weight is dequantized to bf16 too, and its scales are in the tile.
    bool is_bfloat() const { return slices == 1; }
};

// A run of rows of the weight times all of x: what a thread works in.
struct AmxBlock {
    const Weight& w;
    const BfloatPanels& x;
    int64_t rows, ld;      // most rows of the weight; of c
    int8_t* codes;         // of a row, AMX_COLUMNS
    uint16_t* tile;        // (rows, AMX_LD)
    float *scale, *offset;  // (rows, groups)
    float* c;              // (rows, ld): sums, transposed
    alignas(64) float products[32 * 32];

    void read_scales(int64_t start, int64_t count) {
        scales(w, start, scale, count);
        if (x.sums || x.is_bfloat()) offsets(w, start, scale, offset, count);
    }

    // A row of the tile from its codes, dequantized: group by group.
    INLINE void dequantize_row(int64_t r, GroupEdge at, int64_t columns) {
        const float *s = scale + r * w.groups, *o = offset + r * w.groups;
        for (int64_t i = 0, length; i < columns; i += length, at.pass(length)) {
            length = at.left < columns - i ? at.left : columns - i;
            to_bfloat(codes + i, length, s[at.group], o[at.group], tile + r * AMX_LD + i);
        }
    }

    // The tile: columns from k on of rows from `start` on.
    INLINE void decode_columns(int64_t start, int64_t count, int64_t k, int64_t columns) {
        const GroupEdge edge(k, w.group);
        for (int64_t r = 0; r < count; r++) {
            prefetch_codes(w, start + r, k + columns, AMX_COLUMNS);
            decode(w, start + r, k, columns, codes);
            memset(codes + columns, 0, AMX_STEP);
            if (x.is_bfloat()) dequantize_row(r, edge, columns);
            else to_bfloat(codes, columns, tile + r * AMX_LD);
        }
    }

    // 32 rows, `length` columns that have one scale, and one or two panels of x: added to c.
    template <int PANELS>
    INLINE void multiply_block(const uint16_t* a, const uint16_t* b, int64_t length, const float* s, float* to) {
        const float one = 1;
        if (PANELS == 2 && x.is_bfloat()) return add_bfloat(a, b, x.panel, length, to, ld);
        multiply_bfloat<PANELS>(a, b, x.panel, x.slices, x.slice, length, products);
        if (x.is_bfloat()) add_scaled<PANELS>(products, &one, 0, to, ld);
        else add_scaled<PANELS>(products, s, w.groups, to, ld);
    }

    // The tile times one or two panels of x from p on: a group at a time, or all columns where scales are in the tile.
    template <int PANELS>
    INLINE void multiply_panels(int64_t p, int64_t count, int64_t k, int64_t columns) {
        const uint16_t* b = x.values + p * x.panel + k * 16;
        GroupEdge at(k, w.group);
        for (int64_t i = 0, length; i < columns; i += length, at.pass(length)) {
            length = x.is_bfloat() || at.left > columns - i ? columns - i : at.left;
            for (int64_t r = 0; r < count; r += 32)
                multiply_block<PANELS>(tile + r * AMX_LD + i, b + i * 16, length, scale + r * w.groups + at.group,
                                       c + r * ld + p * 16);
        }
    }

    void multiply_columns(int64_t count, int64_t k, int64_t columns) {
        int64_t p = 0;
        for (; p + 1 < x.panels; p += 2) multiply_panels<2>(p, count, k, columns);
        if (p < x.panels) multiply_panels<1>(p, count, k, columns);
    }

    void add_offsets(int64_t count) {
        for (int64_t r = 0; r < count; r++) {
            for (int64_t m = 0; m < ld; m += 16) {
                Floats total = load<Floats>(c + r * ld + m);
                for (int64_t g = 0; g < w.groups; g++)
                    total = fma(broadcast(offset[r * w.groups + g]), load<Floats>(x.sums + g * ld + m), total);
                store(c + r * ld + m, total);
            }
        }
    }

    // c for `count` rows of the weight from `start` on.
    void multiply(int64_t start, int64_t count) {
        read_scales(start, count);
        memset(c, 0, rows * ld * 4);
        for (int64_t k = 0; k < w.k; k += AMX_COLUMNS) {
            int64_t columns = w.k - k < AMX_COLUMNS ? w.k - k : AMX_COLUMNS;
            decode_columns(start, count, k, columns);
            multiply_columns(count, k, columns);
        }
        if (x.sums) add_offsets(count);
    }
};

inline void multiply_amx(const Weight& w, const Input& x, const Output& y, int64_t threads) {
    static thread_local Scratch panel_scratch, group_scratch;
    int slices = x.type == BFLOAT16 ? 1 : x.type == FLOAT16 ? 2 : 3;
    int64_t m16 = round_up(x.rows, 16), panel = round_up(w.k, AMX_STEP) * 16, slice = m16 / 16 * panel;
    uint16_t* packed = panel_scratch.get<uint16_t>(slices * slice);
    float* sums = w.has_offset() && slices > 1 ? group_scratch.get<float>(w.groups * m16) : nullptr;
    bfloat_panels(w, x, slices, packed, sums, threads);
    const BfloatPanels panels{packed, sums, slices, m16 / 16, panel, slice};
    const RowTasks shares(w.n, 32, x.rows <= 32 ? 32 : 256, threads);
    const int64_t rows = shares.most();
    parallel(shares.count, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, tile_scratch, scale_scratch, sum_scratch;
        float* scale = scale_scratch.get<float>(2 * rows * w.groups);
        AmxBlock block{w, panels, rows, m16, code_scratch.get<int8_t>(AMX_COLUMNS), tile_scratch.get<uint16_t>(rows * AMX_LD),
                       scale, scale + rows * w.groups, sum_scratch.get<float>(rows * m16)};
        TileConfig config(64);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = shares.start(task), count = shares.start(task + 1) - start;
            block.multiply(start, count);
            y.write_transposed(x.rows, start, count, block.c, m16);
        }
    });
    panel_scratch.trim();
    group_scratch.trim();
}

}  // namespace
#endif
