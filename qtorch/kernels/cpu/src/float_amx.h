// Many rows of x on a processor with matrix tiles (AMX): bf16 products, added up in fp32.
//
//     y[m, n] = sum_g scale[n, g] * (sum_{k in g} c[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// Codes are exact in bf16, and so are most numbers that they stand for. x, and other numbers, are the exact sum of slices that
// are: three for fp32, two for fp16. Slices are multiplied in turn, but for those whose products fp32 would not hold. A tile of
// the weight, 16 rows of 32 codes, is the left operand. Tiles of the weight, of x and of c lie one behind the other, so that each
// is read and written in one piece.
//
// For bf16 x the weight is dequantized to bf16 instead, as `dequantize` would, and sums run over all groups.
#pragma once

#if defined(__AMX_BF16__)
#include "amx.h"
#include "float_dot.h"
#include "float_tile.h"

namespace {

constexpr int AMX_COLUMNS = 512;  // decoded at a time
constexpr int AMX_NEAR = 256;  // of bf16 x multiplied at a time: so many of two panels stay in the nearest cache
constexpr int AMX_AHEAD = 8;  // rows
constexpr int BFLOAT_TILE = 16 * AMX_STEP, FLOAT_TILE = 16 * 16;  // numbers in a tile

// Whether the numbers of all codes, times each of `scales`, are bf16.
inline bool are_bfloat(const Weight& w, const float* scales, int64_t count) {
    bool exact = !w.values_stride && w.values_type == FLOAT32;
    for (int64_t j = 0; exact && j < count; j++)
        for (int64_t i = 0; i < w.values_count; i++) {
            float number = ((const float*)w.values)[i] * scales[j];
            exact &= number != number || !(load<uint32_t>(&number) & 0xffff);
        }
    return exact;
}

// What all scales of a weight are multiples of, as in NVFP4, if the multiples times the numbers of codes are bf16; or null.
inline const float* common_scale(const Weight& w) {
    if (!w.values || !w.scale_values || w.scale_mean || !w.n) return nullptr;
    int64_t count = w.scale_stride * (w.n - 1) + w.groups;
    int64_t first = w.first_scale / w.scale_group, last = (w.first_scale + count - 1) / w.scale_group;
    bool normal = w.scale_scale[first] >= 0x1p-100f;  // and so are its multiples: that of the least float8 is 2^-9
    return first == last && normal && are_bfloat(w, w.scale_values, 256) ? w.scale_scale + first : nullptr;
}

// How many slices the numbers of codes have.
inline int number_slices(const Weight& w) {
    constexpr float one = 1;
    return !w.values || are_bfloat(w, &one, 1) ? 1 : 3;
}

// Whether slices of x are multiplied: of groups one by one, or where scales are in the tiles. Few rows do not pay for slices
// of numbers.
inline bool takes_bfloat_slices(const Weight& w, int64_t rows) {
    return common_scale(w) || (has_whole_groups(w) && (rows > 32 || number_slices(w) == 1));
}

// The next bf16 slice of 16 numbers; `x` keeps what is left. Truncated, so that huge numbers do not become infinite.
INLINE __m512i next_slice(Floats& x) {
    constexpr int32_t HIGH = (int32_t)0xffff0000, EXPONENT = 0x7f800000;
    Ints bits = (Ints)x & HIGH;
    // Nothing is left of infinity.
    x = (Floats)((Ints)(x - (Floats)bits) & ((bits & EXPONENT) != EXPONENT));
    return (__m512i)bits;
}

// The same of 32 numbers, in order.
INLINE __m512i next_slices(Floats& low, Floats& high) {
    const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                                  23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512i a = next_slice(low), b = next_slice(high);
    return _mm512_permutex2var_epi16(a, upper_halves, b);
}

// x to panels of 16 rows, [slice][panel][k / 2][row][2] bf16, and the sums of its groups, [group][row].
inline void slice_panels(const Weight& w, const Input& x, int slices, uint16_t* out, float* sums, int64_t threads) {
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
            for (int s = 0; s < slices; s++) pairs[s][m] = (Ints)next_slices(low, high);
        }
        for (int s = 0; s < slices; s++) {
            uint16_t* to = out + ((s * panels + panel) * k32 + k) * 16;
            transpose(pairs[s]);
            for (int64_t i = 0; i < 16; i++) store(to + i * 32, pairs[s][i]);
        }
    });
    row_scratch.trim();
}

// The same of bf16 x, which is one slice.
inline void bfloat_panels(const Weight& w, const Input& x, uint16_t* out, int64_t threads) {
    static thread_local Scratch row_scratch;
    int64_t k32 = round_up(w.k, AMX_STEP), ld = x.stride;
    const uint16_t* rows = (const uint16_t*)x.data;
    if (w.k != k32 || ld % 2) {
        uint16_t* padded = row_scratch.get<uint16_t>(x.rows * k32);
        for (int64_t m = 0; m < x.rows; m++) {
            memcpy(padded + m * k32, rows + m * ld, w.k * 2);
            memset(padded + m * k32 + w.k, 0, (k32 - w.k) * 2);
        }
        rows = padded;
        ld = k32;
    }
    to_panels((const int32_t*)rows, ld / 2, x.rows, k32 / 2, (int32_t*)out, threads);
    row_scratch.trim();
}

// The first 16 of `count` numbers, from element `at` on; zeros behind them. `to_float` and a load would wait for each other.
INLINE Floats load_numbers(const void* from, int64_t type, int64_t at, int64_t count) {
    const __mmask16 real = count < 16 ? (1 << count) - 1 : 0xffff;
    if (type == FLOAT32) return (Floats)_mm512_maskz_loadu_ps(real, (const float*)from + at);
    __m256i bits = _mm256_maskz_loadu_epi16(real, (const uint16_t*)from + at);
    return type == FLOAT16 ? (Floats)_mm512_cvtph_ps(bits) : (Floats)((Ints)_mm512_cvtepu16_epi32(bits) << 16);
}

// `count` numbers, 32 of them to each tile of a row, of which `out` is in the first one.
template <class Number>
INLINE void to_tiles(int64_t count, uint16_t* out, const Number& number) {
    for (int64_t i = 0; i < count; i += AMX_STEP)
        store(out + i * 16, _mm512_cvtne2ps_pbh((__m512)number(i + 16), (__m512)number(i)));
}

// c (32, 32) += tiles at `a`, `columns` of 32 rows, times two panels of `b`. Its right half is `right` behind the left one.
INLINE void add_bfloat(const uint16_t* a, const uint16_t* b, int64_t panel, int64_t columns, float* c, int64_t right) {
    load_tile<0>(c, 64);
    load_tile<1>(c + right, 64);
    load_tile<2>(c + FLOAT_TILE, 64);
    load_tile<3>(c + right + FLOAT_TILE, 64);
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        load_tile<4>(a + k * 16, 64);
        load_tile<6>(b + k * 16, 64);
        multiply_bfloats<0, 4, 6>();
        load_tile<5>(a + 16 * AMX_COLUMNS + k * 16, 64);
        multiply_bfloats<2, 5, 6>();
        load_tile<7>(b + panel + k * 16, 64);
        multiply_bfloats<1, 4, 7>();
        multiply_bfloats<3, 5, 7>();
    }
    store_tile<0>(c, 64);
    store_tile<1>(c + right, 64);
    store_tile<2>(c + FLOAT_TILE, 64);
    store_tile<3>(c + right + FLOAT_TILE, 64);
}

// Slices of numbers, and how far one is from the next.
struct Slices {
    int count;
    int64_t step;
};

// products (32, 32) = sum over slices and `columns` of tiles at `a` and of the panels at `b`. One panel alone has its
// result in two halves, to be added: a product takes three times as long to finish as the next takes to start.
template <int PANELS>
void multiply_bfloat(const uint16_t* a, Slices of_a, const uint16_t* b, Slices of_b, int64_t panel, int64_t columns, float* products) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    int odd = 0;
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        for (int t = 0; t < of_a.count; t++) {
            const uint16_t* tiles = a + t * of_a.step + k * 16;
            load_tile<4>(tiles, 64);
            load_tile<5>(tiles + 16 * AMX_COLUMNS, 64);
            for (int s = 0; s < of_b.count - t; s++) {
                const uint16_t* from = b + s * of_b.step + k * 16;
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
    }
    store_tile<0>(products, 64);
    store_tile<1>(products + 2 * FLOAT_TILE, 64);
    store_tile<2>(products + FLOAT_TILE, 64);
    store_tile<3>(products + 3 * FLOAT_TILE, 64);
}

// c[r] += products[r] * scale[r], PANELS vectors each.
template <int PANELS>
INLINE void add_scaled(const float* products, const float* scale, int64_t groups, float* c, int64_t right) {
    for (int r = 0; r < 32; r++, products += 16, c += 16) {
        Floats s = broadcast(scale[r * groups]), first = load<Floats>(products), second = load<Floats>(products + 2 * FLOAT_TILE);
        if (PANELS == 1) first += second;
        store(c, fma(first, s, load<Floats>(c)));
        if (PANELS == 2) store(c + right, fma(second, s, load<Floats>(c + right)));
    }
}

// x as bf16, for all threads: `panels` of 16 rows, missing ones zero, in slices.
struct BfloatPanels {
    const uint16_t* values;  // [slice][panel][k / 2][row][2]
    const float* sums;       // of its groups, [group][row], where the weight has offsets that are added at the end
    Slices slices;
    int64_t panels, panel;  // panel: numbers from one to the next

    // Then the weight is dequantized to bf16 too, and its scales are in the tile.
    bool is_bfloat() const { return slices.count == 1; }
};

// A run of rows of the weight times all of x: what a thread works in.
struct AmxBlock {
    const Weight& w;
    const BfloatPanels& x;
    int64_t rows;           // most of the weight, a multiple of 32
    int8_t* decoded;        // AMX_COLUMNS codes of a row
    float* numbers;         // the same, dequantized
    uint16_t* tiles;        // [slice][row / 16][k / 32][row % 16][32]
    Slices slices;          // of the weight
    float *scale, *offset;  // (rows, groups)
    const float* factor;    // of all products, whose other scales are in the tiles; or null, and groups are scaled one by one
    float* ones;            // (groups)
    float* c;               // sums, [panel][row][16]
    alignas(64) float products[4 * FLOAT_TILE], integers[16];  // the latter by the lowest bits of a code

    void read_scales(int64_t start, int64_t count) {
        scales(w, start, scale, count);
        if (x.sums || x.is_bfloat()) offsets(w, start, scale, offset, count);
    }

    // What numbers of row r are multiplied with in the tiles.
    const float* tile_scale(int64_t r) const { return factor ? scale + r * w.groups : ones; }

    bool looks_up_groups() const { return has_whole_groups(w) || w.group == 16; }

    // How many columns of a row are decoded alike: a run of packed 4-bit codes that are looked up where they are, or all.
    int64_t run() const {
        bool looked_up = (x.is_bfloat() || w.values) && slices.count == 1 && w.values_count <= 16 && looks_up_groups();
        return looked_up && w.bits == 4 && w.k % (8 * AMX_STEP) == 0 ? w.k / 8 : w.k;
    }

    // Codes of row `start + r`, from `edge` on, to bf16 numbers. Up to 6 bits those of a group are a table in one register, or two,
    // in which an instruction looks up 32, by the lowest bits of bytes that are shifted to the `right`.
    template <bool TWO>
    void look_up_row(int64_t start, int64_t r, const GroupEdge& edge, const int8_t* codes, int right, int64_t columns, uint16_t* out) {
        const float *s = tile_scale(r), *o = offset + r * w.groups;
        const __m512i shift = _mm512_set1_epi16(right);
        auto bytes = [&](int64_t i) { return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(codes + i))), shift); };
        auto table_of = [&](Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); };
        auto look_up = [&](const auto& numbers) {  // (group, first code)
            if (TWO || w.group != 16) {
                each_group(edge, columns, [&](int64_t i, int64_t stop, int64_t g) {
                    const Floats low = numbers(g, 0);
                    const __m512i table = table_of(low, TWO ? numbers(g, 16) : low), more = TWO ? table_of(numbers(g, 32), numbers(g, 48)) : table;
                    for (; i < stop; i += AMX_STEP)
                        store(out + i * 16, TWO ? _mm512_permutex2var_epi16(table, bytes(i), more) : _mm512_permutexvar_epi16(bytes(i), table));
                });
                return;
            }
            // The first 16 codes have the lower half of the table, the others the upper one.
            const __m512i halves = _mm512_inserti64x4(__m512i{}, _mm256_set1_epi16(16), 1), low_bits = _mm512_set1_epi16(15);
            for (int64_t i = 0, g = edge.group; i < columns; i += AMX_STEP, g += 2) {
                const __m512i table = table_of(numbers(g, 0), numbers(i + 16 < columns ? g + 1 : g, 0));
                store(out + i * 16, _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_and_si512(bytes(i), low_bits), halves), table));
            }
        };
        const Floats one = load<Floats>(w.values && !w.values_stride ? (const float*)w.values : integers);
        if (!w.values) return look_up([&](int64_t g, int) { return fma(one, broadcast(s[g]), broadcast(o[g])); });
        if (!TWO && !w.values_stride) return look_up([&](int64_t g, int) { return one * broadcast(s[g]); });
        const void* values = w.values;
        const int64_t type = w.values_type, stride = w.values_stride, first = (start + r) * w.groups * stride, all = w.values_count;
        look_up([=](int64_t g, int i) {
            return i < all ? load_numbers(values, type, first + g * stride + i, all - i) * broadcast(s[g]) : Floats{};
        });
    }

    // The same of numbers that are computed.
    INLINE void compute_row(int64_t r, const GroupEdge& at, const int8_t* codes, int64_t columns, uint16_t* out) {
        WideComputed reader(w);
        each_group(at, columns, [&](int64_t i, int64_t stop, int64_t g) {
            Floats factor = broadcast(tile_scale(r)[g]), both[2];
            for (; i < stop; i += AMX_STEP) {
                read(reader, codes + i, both);
                store(out + i * 16, _mm512_cvtne2ps_pbh((__m512)(both[1] * factor), (__m512)(both[0] * factor)));
            }
        });
        Floats lost = {};
        finish(reader, lost);
        if (lost[0] != 0) *out = 0x7fc0;  // one is enough: NaN for all of x
    }

    // The same in whichever way is fastest.
    INLINE void dequantize_row(int64_t start, int64_t r, const GroupEdge& at, const int8_t* codes, int64_t columns, uint16_t* out) {
        const int64_t count = w.values ? w.values_count : w.bits && w.bits <= 4 ? 16 : INT64_MAX;
        if (count <= 16 && looks_up_groups()) return look_up_row<false>(start, r, at, codes, 0, columns, out);
        if (count <= 64 && has_whole_groups(w)) return look_up_row<true>(start, r, at, codes, 0, columns, out);
        if (w.values && w.exponent && has_whole_groups(w)) return compute_row(r, at, codes, columns, out);
        const float *s = tile_scale(r), *o = offset + r * w.groups;
        // Groups that end within a row of a tile take one more step.
        if (w.values || !has_whole_groups(w)) {
            if (w.values) scale_values(w, start + r, at, codes, columns, s, numbers);
            else each_group(at, columns, [&](int64_t i, int64_t stop, int64_t g) {
                scale_codes(codes + i, stop - i, s[g], o[g], numbers + i);
            });
            return to_tiles(columns, out, [&](int64_t i) { return load<Floats>(numbers + i); });
        }
        each_group(at, columns, [&](int64_t i, int64_t stop, int64_t g) {
            Floats factor = broadcast(s[g]), shift = broadcast(o[g]);
            to_tiles(stop - i, out + i * 16, [&](int64_t j) { return fma(to_floats(widen(codes + i + j)), factor, shift); });
        });
    }

    // Codes to the numbers that they stand for, in slices.
    void slice_row(int64_t n, const GroupEdge& at, const int8_t* codes, int64_t columns, uint16_t* out) {
        scale_values(w, n, at, codes, columns, ones, numbers);
        for (int64_t i = 0; i < columns; i += AMX_STEP) {
            Floats low = load<Floats>(numbers + i), high = load<Floats>(numbers + i + 16);
            for (int s = 0; s < slices.count; s++) store(out + s * slices.step + i * 16, next_slices(low, high));
        }
    }

    // Tiles, from `to` on: columns from k on, which are part of one run, of rows from `start` on.
    void decode_columns(int64_t start, int64_t count, int64_t k, int64_t columns, int64_t item, uint16_t* to) {
        const GroupEdge edge(k, w.group);
        const bool packed = run() < w.k, direct = !w.bits && !w.center && !w.vectors && columns % AMX_STEP == 0;
        const int64_t at = k - (item + 1) / 2 * run();  // where packed codes are in a row: two runs share their bytes
        for (int i = 0; i < 16; i++) integers[i] = packed ? i - w.center : ((i + w.center) & 15) - w.center;
        for (int64_t r = 0; r < count; r++) {
            prefetch_ahead(start, count, k, columns, r + AMX_AHEAD);
            uint16_t* out = to + r / 16 * 16 * AMX_COLUMNS + r % 16 * AMX_STEP;
            const int8_t* codes = (const int8_t*)w.codes + (start + r) * w.row_bytes;
            if (packed) {
                look_up_row<false>(start, r, edge, codes + at, item % 2 * 4, columns, out);
                continue;
            }
            if (!direct) {
                decode(w, start + r, k, columns, decoded);
                memset(decoded + columns, 0, AMX_STEP);  // which is a number
            }
            codes = direct ? codes + k : decoded;
            if (slices.count > 1) slice_row(start + r, edge, codes, columns, out);
            else if (x.is_bfloat() || w.values) dequantize_row(start, r, edge, codes, columns, out);
            else to_tiles(columns, out, [&](int64_t i) { return to_floats(widen(codes + i)); });
            // What is behind the end of the row may stand for an infinity.
            int64_t rest = columns % AMX_STEP;
            for (int s = 0; rest && s < slices.count; s++)
                memset(out + s * slices.step + (columns - rest) * 16 + rest, 0, (AMX_STEP - rest) * 2);
        }
    }

    // Prefetches row r of these, or what is behind them: more columns of the same rows, or rows of the task that mostly follows.
    INLINE void prefetch_ahead(int64_t start, int64_t count, int64_t k, int64_t columns, int64_t r) const {
        bool more = k + columns < w.k;
        int64_t row = r < count || !more ? start + r : start + r - count, column = r < count ? k : more ? k + columns : 0;
        if (row >= w.n) return;
        prefetch_codes(w, row, column, AMX_COLUMNS);
        if (!w.values_stride) return;
        const int64_t table = w.values_stride * size_of(w.values_type);
        const uint32_t group = w.group, first = (uint32_t)column / group;
        const char* tables = (const char*)w.values + (row * w.groups + first) * table;
        for (int64_t i = 0; i < (AMX_COLUMNS + group - 1) / group * table; i += 64) prefetch(tables + i);
    }

    // One or two panels of x from p on times the tiles of all rows, added to c: a group at a time, or so many columns as stay
    // in the nearest cache where scales are in the tiles.
    template <int PANELS>
    INLINE void multiply_panels(int64_t p, int64_t count, int64_t k, int64_t columns) {
        const uint16_t* b = x.values + p * x.panel + k * 16;
        const int64_t right = rows * 16;
        GroupEdge at(k, !factor ? w.group : PANELS == 2 ? AMX_NEAR : AMX_COLUMNS);
        for (int64_t i = 0, length; i < columns; i += length, at.pass(length)) {
            length = at.left > columns - i ? columns - i : at.left;
            for (int64_t r = 0; r < count; r += 32) {
                const uint16_t *a = tiles + r * AMX_COLUMNS + i * 16, *from = b + i * 16;
                float* to = c + p * right + r * 16;
                if (PANELS == 2 && x.is_bfloat()) {
                    add_bfloat(a, from, x.panel, length, to, right);
                    continue;
                }
                multiply_bfloat<PANELS>(a, slices, from, x.slices, x.panel, length, products);
                if (factor) add_scaled<PANELS>(products, factor, 0, to, right);
                else add_scaled<PANELS>(products, scale + r * w.groups + at.group, w.groups, to, right);
            }
        }
    }

    void multiply_columns(int64_t count, int64_t k, int64_t columns) {
        int64_t p = 0;
        for (; p + 1 < x.panels; p += 2) multiply_panels<2>(p, count, k, columns);
        if (p < x.panels) multiply_panels<1>(p, count, k, columns);
    }

    void add_offsets(int64_t count) {
        for (int64_t p = 0; p < x.panels; p++) {
            float* to = c + p * rows * 16;
            for (int64_t r = 0; r < count; r++, to += 16) {
                Floats total = load<Floats>(to);
                for (int64_t g = 0; g < w.groups; g++)
                    total = fma(broadcast(offset[r * w.groups + g]), load<Floats>(x.sums + (g * x.panels + p) * 16), total);
                store(to, total);
            }
        }
    }

    // c for `count` rows of the weight from `start` on.
    void multiply(int64_t start, int64_t count) {
        read_scales(start, count);
        memset(c, 0, rows * x.panels * 64);
        for (int64_t k = 0; k < w.k; k += AMX_COLUMNS) {
            int64_t columns = w.k - k < AMX_COLUMNS ? w.k - k : AMX_COLUMNS;
            each_group(GroupEdge(k, run()), columns, [&](int64_t i, int64_t stop, int64_t item) {
                decode_columns(start, count, k + i, stop - i, item, tiles + i * 16);
            });
            multiply_columns(count, k, columns);
        }
        if (x.sums) add_offsets(count);
    }
};

inline void multiply_amx(const Weight& all, const Input& x, const Output& y, int64_t threads) {
    static thread_local Scratch panel_scratch, group_scratch;
    static constexpr float ONE = 1;
    Weight w = all;
    const float* factor = x.type == BFLOAT16 ? &ONE : common_scale(w);
    if (factor && factor != &ONE) w.scale_scale = &ONE, w.first_scale = 0, w.scale_group = INT64_MAX;
    int slices = x.type == BFLOAT16 ? 1 : x.type == FLOAT16 ? 2 : 3;
    int64_t m16 = round_up(x.rows, 16), panel = round_up(w.k, AMX_STEP) * 16, slice = m16 / 16 * panel;
    uint16_t* packed = panel_scratch.get<uint16_t>(slices * slice);
    float* sums = w.has_offset() && slices > 1 ? group_scratch.get<float>(w.groups * m16) : nullptr;
    if (slices == 1) bfloat_panels(w, x, packed, threads);
    else slice_panels(w, x, slices, packed, sums, threads);
    const BfloatPanels panels{packed, sums, {slices, slice}, m16 / 16, panel};
    const int parts = factor ? 1 : number_slices(w);
    const RowTasks shares(w.n, 32, x.rows <= 32 ? 32 : 256, threads);
    const int64_t rows = shares.most();
    parallel(shares.count, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, number_scratch, tile_scratch, scale_scratch, sum_scratch;
        const int64_t tiles = rows * AMX_COLUMNS, factors = rows * w.groups;
        float *scale = scale_scratch.get<float>(2 * factors + w.groups), *ones = scale + 2 * factors;
        for (int64_t g = 0; g < w.groups; g++) ones[g] = 1;
        AmxBlock block{w, panels, rows, code_scratch.get<int8_t>(AMX_COLUMNS), number_scratch.get<float>(AMX_COLUMNS),
                       tile_scratch.get<uint16_t>(parts * tiles), {parts, tiles}, scale, scale + factors, factor, ones,
                       sum_scratch.get<float>(rows * m16)};
        TileConfig config(64);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = shares.start(task), count = shares.start(task + 1) - start;
            block.multiply(start, count);
            for (int64_t m = 0; m < x.rows; m += 16)
                y.part(m).write_transposed(x.rows - m < 16 ? x.rows - m : 16, start, count, block.c + m * rows, 16);
        }
    });
    panel_scratch.trim();
    group_scratch.trim();
}

}  // namespace
#endif
