// Products of codes that both have scales for blocks of the contracted axis, and what follows a product that has one.
//
//     y[m, n] = sum_g (sum_{k in g} x[m, k] w[n, k]) * ws[n, g] * xs[m, g]
//
// The inner sum is exact; the outer one runs in fp32, in the order of the groups, each product rounded by itself.
//
// Vectors run over n: panels of LANES rows of w, whose codes a number of x multiplies, four bytes at a time on VNNI and
// otherwise one, in fp32.
#pragma once

#include "parallel.h"
#include "scratch.h"
#include "number.h"

namespace {
namespace operand {

struct BlockProduct {
    const int8_t* x;  // (m, k), contiguous
    const int8_t* w;  // (n, k), one of the steps is 1
    int64_t w_row_step, w_column_step;
    int64_t m, n, k, group;  // group: a multiple of 4, of at most 1024
    const float* x_scale;    // for x_rows rows and x_groups groups each, so those of w
    int64_t x_scale_row_step, x_scale_column_step, x_rows, x_groups;
    const float* w_scale;
    int64_t w_scale_row_step, w_scale_column_step, w_rows, w_groups;
    void* out;  // (m, n)
    int64_t type, threads;
};

#if defined(HAS_VNNI)
using BlockUnit = int32_t;  // four codes
using BlockSum = Ints;
constexpr int64_t UNIT_CODES = 4;

INLINE BlockSum add_product(BlockSum total, BlockSum w, BlockUnit x) { return dot4(total, w, Ints{} + x); }
INLINE Floats real(BlockSum a) { return to_floats(a); }
#else
using BlockUnit = float;
using BlockSum = Floats;
constexpr int64_t UNIT_CODES = 1;

INLINE BlockSum add_product(BlockSum total, BlockSum w, BlockUnit x) { return fma(w, broadcast(x), total); }
INLINE Floats real(BlockSum a) { return a; }
#endif

// Rows of the result whose sums stay in registers.
constexpr int BLOCK_ROWS = 6;

// What a task multiplies with: panels of w [k / UNIT_CODES][LANES], and their scales [group][LANES].
struct BlockPanels {
    const BlockUnit* codes;
    const float* scale;
    int64_t panel, scale_panel;  // from one to the next
};

// Panel p: rows p LANES to (p + 1) LANES, zero beyond the last. On VNNI codes are unsigned, 128 more.
inline void make_panel(const BlockProduct& q, int64_t p, BlockUnit* out) {
    int64_t first = p * LANES, count = q.n - first < LANES ? q.n - first : LANES;
    const int8_t* from = q.w + first * q.w_row_step;
#if defined(HAS_VNNI)
    if (q.w_column_step == 1) {
        int64_t units = q.k / 4, u = 0;
        for (; u + LANES <= units; u += LANES) {
            Ints block[LANES] = {};
            for (int64_t i = 0; i < count; i++) block[i] = load<Ints>(from + i * q.w_row_step + 4 * u);
            transpose(block);
            for (int64_t i = 0; i < LANES; i++) store(out + (u + i) * LANES, block[i] ^ (int32_t)0x80808080);
        }
        for (; u < units; u++)
            for (int64_t i = 0; i < LANES; i++)
                out[u * LANES + i] = (i < count ? load<int32_t>(from + i * q.w_row_step + 4 * u) : 0) ^ (int32_t)0x80808080;
        return;
    }
    for (int64_t u = 0; u < q.k / 4; u++) {
        Ints unit = {};
        for (int64_t i = 0; i < 4; i++) {
            alignas(64) int8_t codes[LANES] = {};
            const int8_t* at = from + (4 * u + i) * q.w_column_step;
            if (count < LANES) memcpy(codes, at, count);
            unit |= (widen(count < LANES ? codes : at) & 255) << (8 * i);
        }
        store(out + u * LANES, unit ^ (int32_t)0x80808080);
    }
#else
    int64_t k = 0;
    for (; q.w_column_step == 1 && k + LANES <= q.k; k += LANES) {
        Floats block[LANES] = {};
        for (int64_t i = 0; i < count; i++) block[i] = to_floats(widen(from + i * q.w_row_step + k));
        transpose(block);
        UNROLL for (int i = 0; i < LANES; i++) store(out + (k + i) * LANES, block[i]);
    }
    for (; q.w_row_step == 1 && count == LANES && k < q.k; k++) store(out + k * LANES, to_floats(widen(from + k * q.w_column_step)));
    for (; k < q.k; k++)
        for (int64_t i = 0; i < LANES; i++) out[k * LANES + i] = i < count ? from[i * q.w_row_step + k * q.w_column_step] : 0;
#endif
}

// x as the kernel reads it: rows of units, and what sums start from, which undoes the 128.
struct BlockRows {
    const BlockUnit* codes;
    int64_t ld;
    const int32_t* start;  // (m, groups)
    const float* scale;    // (m, groups)
};

inline BlockRows block_rows(const BlockProduct& q, int64_t groups) {
    static thread_local Scratch code_scratch, start_scratch, scale_scratch;
    float* scale = scale_scratch.get<float>(q.m * groups);
    int32_t* start = start_scratch.get<int32_t>(UNIT_CODES > 1 ? q.m * groups : 0);  // fp32 products start from zero
    parallel_for(q.m, q.threads, [&](int64_t m) {
        for (int64_t g = 0; g < groups; g++) {
            scale[m * groups + g] = q.x_scale[m / q.x_rows * q.x_scale_row_step + g / q.x_groups * q.x_scale_column_step];
#if defined(HAS_VNNI)
            int32_t sum = 0;
            for (int64_t k = g * q.group; k < (g + 1) * q.group; k++) sum += q.x[m * q.k + k];
            start[m * groups + g] = -128 * sum;
#endif
        }
    });
#if defined(HAS_VNNI)
    return {(const int32_t*)q.x, q.k / 4, start, scale};
#else
    float* codes = code_scratch.get<float>(q.m * q.k);
    parallel_for(q.m, q.threads, [&](int64_t m) { to_float(q.x + m * q.k, INT8, q.k, codes + m * q.k); });
    return {codes, q.k, start, scale};
#endif
}

// R rows from `m` on times V panels, the first of which makes columns of the result from `start` on.
template <int R, int V>
void multiply_block(const BlockProduct& q, const BlockRows& x, const BlockPanels& w, int64_t m, int64_t groups, int64_t start) {
    int64_t units = q.group / UNIT_CODES;
    int64_t count = q.n - start < V * LANES ? q.n - start : V * LANES, size = size_of(q.type);
    char* out = (char*)q.out + (m * q.n + start) * size;
    // Sums are added up where the result lies, if they fit there.
    bool in_place = q.type == FLOAT32 && count == V * LANES;
    alignas(64) float sums[R * V * LANES];
    float* c = in_place ? (float*)out : sums;
    int64_t ld = in_place ? q.n : V * LANES;
    for (int64_t g = 0; g < groups; g++) {
        BlockSum total[R][V] = {};
#if defined(HAS_VNNI)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) total[r][v] += x.start[(m + r) * groups + g];
#endif
        for (int64_t u = g * units; u < (g + 1) * units; u++) {
            BlockSum codes[V];
            UNROLL for (int v = 0; v < V; v++) codes[v] = load<BlockSum>(w.codes + v * w.panel + u * LANES);
            UNROLL for (int r = 0; r < R; r++) {
                BlockUnit factor = load<BlockUnit>(x.codes + (m + r) * x.ld + u);
                UNROLL for (int v = 0; v < V; v++) total[r][v] = add_product(total[r][v], codes[v], factor);
            }
        }
        Floats ws[V];
        UNROLL for (int v = 0; v < V; v++) ws[v] = load<Floats>(w.scale + v * w.scale_panel + g * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            Floats xs = broadcast(x.scale[(m + r) * groups + g]);
            UNROLL for (int v = 0; v < V; v++) {
                Floats part = real(total[r][v]) * ws[v] * xs;
                float* to = c + r * ld + v * LANES;
                store(to, g ? load<Floats>(to) + part : part);
            }
        }
    }
    for (int64_t r = 0; !in_place && r < R; r++) from_float(c + r * ld, q.type, count, out + r * q.n * size);
}

// R rows times `count` panels from p on.
template <int R>
void multiply_panels(const BlockProduct& q, const BlockRows& x, const BlockPanels& w, int64_t m, int64_t p, int64_t count) {
    int64_t groups = q.k / q.group;
    for (int64_t v = 0; v < count; v += 2) {
        BlockPanels two{w.codes + v * w.panel, w.scale + v * w.scale_panel, w.panel, w.scale_panel};
        if (count - v == 1) multiply_block<R, 1>(q, x, two, m, groups, (p + v) * LANES);
        else multiply_block<R, 2>(q, x, two, m, groups, (p + v) * LANES);
    }
}

inline void multiply_blocks(const BlockProduct& q) {
    constexpr int64_t CACHED = 1 << 18;  // bytes of panels that a task multiplies with
    int64_t groups = q.k / q.group, panels = (q.n + LANES - 1) / LANES;
    int64_t panel = q.k / UNIT_CODES * LANES, scale_panel = groups * LANES;
    int64_t most = CACHED / (panel * (int64_t)sizeof(BlockUnit)) / 2 * 2, together = most < 2 ? 2 : most < panels ? most : panels;
    int64_t steps = (panels + together - 1) / together;
    BlockRows x = block_rows(q, groups);
    // Enough tasks for all threads, though each makes its panels anew.
    int64_t parts = steps >= 4 * q.threads ? 1 : (4 * q.threads + steps - 1) / steps;
    int64_t rows = round_up((q.m + parts - 1) / parts, BLOCK_ROWS);
    parts = (q.m + rows - 1) / rows;
    parallel(steps * parts, q.threads, [&](Tasks& tasks) {
        static thread_local Scratch panel_scratch, scale_scratch;
        BlockUnit* codes = panel_scratch.get<BlockUnit>(together * panel);
        float* scale = scale_scratch.get<float>(together * scale_panel);
        int64_t made = -1;
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t p = task / parts * together, first = task % parts * rows, stop = first + rows < q.m ? first + rows : q.m;
            int64_t count = panels - p < together ? panels - p : together;
            for (int64_t v = 0; made != p && v < count; v++) {
                make_panel(q, p + v, codes + v * panel);
                for (int64_t i = 0; i < LANES; i++) {
                    int64_t row = (p + v) * LANES + i;
                    const float* from = q.w_scale + row / q.w_rows * q.w_scale_row_step;
                    for (int64_t g = 0; g < groups; g++)
                        scale[v * scale_panel + g * LANES + i] = row < q.n ? from[g / q.w_groups * q.w_scale_column_step] : 0;
                }
            }
            made = p;
            BlockPanels w{codes, scale, panel, scale_panel};
            for (int64_t m = first; m < stop;) {
                int64_t left = stop - m, step = left >= BLOCK_ROWS ? BLOCK_ROWS : left >= 3 ? 3 : 1;
                if (step == BLOCK_ROWS) multiply_panels<BLOCK_ROWS>(q, x, w, m, p, count);
                else if (step == 3) multiply_panels<3>(q, x, w, m, p, count);
                else multiply_panels<1>(q, x, w, m, p, count);
                m += step;
            }
        }
    });
}

// y[m, n] = sums[m, n] * ws[n] * xs[m]; y may lie where the sums do.
struct ScaleSums {
    const int32_t* sums;
    int64_t rows, columns;
    const float* x_scale;
    int64_t x_step;  // 0: one for all
    const float* w_scale;
    int64_t w_step;
    void* out;
    int64_t type, threads;
};

inline void scale_sums(const ScaleSums& q) {
    int64_t most = q.rows * q.columns / (1 << 15) + 1;
    parallel_for(q.rows, q.threads < most ? q.threads : most, [&](int64_t m) {
        Floats xs = broadcast(q.x_scale[m * q.x_step]);
        const int32_t* from = q.sums + m * q.columns;
        char* to = (char*)q.out + m * q.columns * size_of(q.type);
        for (int64_t n = 0; n < q.columns; n += LANES) {
            int64_t count = q.columns - n < LANES ? q.columns - n : LANES;
            Ints sums = {};
            Floats ws = broadcast(*q.w_scale);
            if (count == LANES) {
                sums = load<Ints>(from + n);
                if (q.w_step) ws = load<Floats>(q.w_scale + n);
            } else {
                memcpy(&sums, from + n, count * 4);
                if (q.w_step) memcpy(&ws, q.w_scale + n, count * 4);
            }
            Floats up = scale_up(ws);
            Floats y = to_floats(sums) * (ws / up) * xs * up;
            if (q.type == FLOAT32 && count == LANES) store((float*)to + n, y);
            else from_float((const float*)&y, q.type, count, to + n * size_of(q.type));
        }
    });
}

}  // namespace operand
}  // namespace
