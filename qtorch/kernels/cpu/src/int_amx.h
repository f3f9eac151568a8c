// Codes in groups of few columns, exactly, on matrix tiles (AMX).
//
//     y[m, n] = (sum_g float(sum_{k in g} (xq[m, k] - xz[m]) (c[n, k] - z[n, g])) * scale[n, g]) * xs[m]
//
// A group fills a tile or two, so that what follows the products counts: sums leave the tiles through memory and are added
// up in registers, 16 rows of the weight by 16 of x, while the tiles multiply the next groups.
#pragma once

#include "amx.h"
#include "int_tile.h"

namespace {

#if defined(__AMX_INT8__)

constexpr int GROUP_COLUMNS = 1024;  // decoded together
constexpr int GROUP_LD = GROUP_COLUMNS + 64;

// Whether the groups of the weight fill matrix tiles, of which even a few rows make good use.
inline bool has_tile_groups(const Weight& w) { return w.groups > 1 && w.group <= FLOAT_GROUP && w.group % AMX_STEP == 0; }

// How the sum of a group is added: as the reference does, or with a rounding less for weight-only layers.
struct Exactly {
    static INLINE Floats add(Floats to, Floats sum, Floats scale) { return to + sum * scale; }
};

struct Fused {
    static INLINE Floats add(Floats to, Floats sum, Floats scale) { return fma(sum, scale, to); }
};

// 16 rows of the weight and 16 of x, and some groups.
template <class Add, bool ZEROS, bool X_ZEROS>
struct GroupBlock {
    const int8_t* codes;  // (16, GROUP_LD)
    const Unit* x;        // panel
    int64_t group, step, count;
    // By row of the weight and group: scale, and zero point, negative. By group and row of x: x_sums. By row of x: zero
    // points. By group and row of the weight: sums of its codes, negative, which the row of ones gives.
    const float *scale, *zero;
    int64_t groups;
    const float* x_sums;
    int64_t lanes;
    const float* x_zero;
    float* ones;
    int64_t ones_lane;     // of the row of ones in this panel, or -1
    const uint8_t* ahead;  // memory that is wanted next, `lines` of it for each group
    int64_t lines;

    // c (16, ldc) += the sums of all groups. Products take long: those of the group after the next start before the sums of
    // this one leave their tile; then those of the one before are added.
    void run(float* c, int64_t ldc) const {
        alignas(64) int32_t sums[4][16 * LANES];
        Floats total[16];
        UNROLL for (int r = 0; r < 16; r++) total[r] = load<Floats>(c + r * ldc);
        multiply<0>(0);
        if (count > 1) multiply<1>(1);
        for (int64_t g = 0; g <= count; g += 4) {
            next<0>(g, sums, total);
            if (g + 1 <= count) next<1>(g + 1, sums, total);
            if (g + 2 <= count) next<2>(g + 2, sums, total);
            if (g + 3 <= count) next<3>(g + 3, sums, total);
        }
        UNROLL for (int r = 0; r < 16; r++) store(c + r * ldc, total[r]);
    }

    template <int T>
    INLINE void next(int64_t g, int32_t (&sums)[4][16 * LANES], Floats (&total)[16]) const {
        if (g + 2 < count) multiply<(T + 2) % 4>(g + 2);
        if (g < count) store_tile<T>(sums[T], 64);
        if (!g) return;
        const int32_t* last = sums[(T + 3) % 4];
        if (X_ZEROS && ones_lane >= 0) add_ones(g - 1, last + ones_lane);
        if (!X_ZEROS || ones_lane) add(g - 1, last, total);  // a panel that begins with the ones has nothing else
    }

    // Tile T is the products of group g.
    template <int T>
    INLINE void multiply(int64_t g) const {
        constexpr int A = 4 + T % 2, B = 6 + T % 2;
        zero_tile<T>();
        for (int64_t k = g * group; k < (g + 1) * group; k += step) {
            load_tile<A>(codes + k, GROUP_LD);
            load_tile<B>(x + k * 4, 64);
            multiply_bytes<T, A, B>();
        }
        for (int64_t i = g * lines; i < (g + 1) * lines; i++) prefetch<false>(ahead + 64 * i);
    }

    INLINE void add_ones(int64_t g, const int32_t* sums) const {
        const __m512i rows = _mm512_set_epi32(240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 0);
        store(ones + g * 16, to_floats(-(Ints)_mm512_i32gather_epi32(rows, sums, 4)));
    }

    INLINE void add(int64_t g, const int32_t* sums, Floats (&total)[16]) const {
        const float *s = scale + g, *z = zero + g;
        Floats x_sum = ZEROS ? load<Floats>(x_sums + g * lanes) : Floats{};
        UNROLL for (int r = 0; r < 16; r++, s += groups, z += groups) {
            Floats sum = to_floats(load<Ints>(sums + r * LANES));
            if (X_ZEROS) sum = fma(broadcast(ones[g * 16 + r]), load<Floats>(x_zero), sum);
            if (ZEROS) sum = fma(broadcast(*z), x_sum, sum);
            total[r] = Add::add(total[r], sum, broadcast(*s));
        }
    }
};

// x_sums (rows of the result, groups), for weight-only layers with zero points: sums of the input.
template <class Add, bool ZEROS, bool X_ZEROS>
void multiply_groups(const Weight& w, const Codes& x, const float* x_sums, const Output& y, int64_t threads) {
    static thread_local Scratch x_scratch;
    Weight products = w;
    if (x_sums) products.zero = nullptr, products.shift = 0;
    IntPanels panels = int_panels(products, x, threads);
    RowFactors rows(x, panels.count);
    int64_t lanes = rows.lanes, groups = w.groups, step = amx_step(w), last = panels.count - 1;
    int64_t together = GROUP_COLUMNS / w.group * w.group;
    float* x_code_sums = x_scratch.get<float>(groups * lanes);
    if (ZEROS) to_float(panels.sums, INT32, groups * lanes, x_code_sums);
    parallel((w.n + 15) / 16, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, factor_scratch, zero_scratch, sum_scratch;
        int8_t* codes = code_scratch.get<int8_t>(16 * GROUP_LD);
        float* scale = factor_scratch.get<float>(3 * 16 * groups);
        float *zero = scale + 16 * groups, *ones = zero + 16 * groups;
        int32_t* zero_codes = zero_scratch.get<int32_t>(groups);
        float* c = sum_scratch.get<float>(16 * lanes);
        TileConfig config(step);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = task * 16, count = w.n - start < 16 ? w.n - start : 16;
            scales(w, start, scale, count);
            if (x_sums) offsets(w, start, scale, zero, count);
            for (int64_t r = 0; ZEROS && r < count; r++) {
                zeros(w, start + r, zero_codes);
                for (int64_t g = 0; g < groups; g++) zero[r * groups + g] = -zero_codes[g];
            }
            // 0 + -0 would not be -0.
            for (int64_t i = 0; i < 16 * lanes; i += LANES) store(c + i, broadcast(-0.0f));
            for (int64_t k = 0; k < w.k; k += together) {
                int64_t columns = w.k - k < together ? w.k - k : together, g = k / w.group, count_g = columns / w.group;
                // Meanwhile a share of the next 16 rows is fetched: a third as these are decoded, the rest as they are
                // multiplied, so that there is always something on its way.
                const uint8_t* ahead = w.codes + (start + 16) * w.row_bytes + k * 16 * w.row_bytes / w.k;
                int64_t lines = 16 * columns * w.row_bytes / w.k / 64, by_row = lines / 48;
                for (int64_t r = 0; r < count; r++) {
                    for (int64_t i = 0; i < by_row; i++, ahead += 64) prefetch<false>(ahead);
                    prefetch_scales(w, start + 16 + r, g, count_g);
                    decode(w, start + r, k, columns, codes + r * GROUP_LD);
                }
                int64_t by_group = (lines - 16 * by_row + count_g - 1) / count_g;
                // The last panel first, which has the row of ones.
                for (int64_t p = last; p >= 0; p--) {
                    const Unit* panel = (const Unit*)panels.data + p * panels.panel + k * 4;
                    int64_t lane = x.zero && p == last ? x.rows % LANES : -1;
                    GroupBlock<Add, ZEROS, X_ZEROS>{codes, panel, w.group, step, count_g, scale + g, zero + g, groups,
                                                    x_code_sums + g * lanes + p * LANES, lanes, rows.zero + p * LANES,
                                                    ones + g * 16, lane, ahead, p == last ? by_group : 0}
                        .run(c + p * LANES, lanes);
                }
            }
            rows.finish(c, lanes, count);
            for (int64_t r = 0; x_sums && r < count; r++)
                for (int64_t m = 0; m < rows.count; m++) c[r * lanes + m] += inner(zero + r * groups, x_sums + m * groups, groups);
            y.write_transposed(rows.count, start, count, c, lanes);
        }
    });
}

inline void multiply_groups_amx(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    bool shifted = w.has_offset();
    auto multiply = x.zero ? (shifted ? multiply_groups<Exactly, true, true> : multiply_groups<Exactly, false, true>)
                           : (shifted ? multiply_groups<Exactly, true, false> : multiply_groups<Exactly, false, false>);
    multiply(w, x, nullptr, y, threads);
}

// Weight-only: x in slices.
inline void multiply_slices_amx(const Weight& w, const Codes& x, const float* x_sums, const Output& y, int64_t threads) {
    multiply_groups<Fused, false, false>(w, x, x_sums, y, threads);
}

#else

inline bool has_tile_groups(const Weight&) { return false; }
inline void multiply_groups_amx(const Weight&, const Codes&, const Output&, int64_t) {}
inline void multiply_slices_amx(const Weight&, const Codes&, const float*, const Output&, int64_t) {}

#endif

}  // namespace
