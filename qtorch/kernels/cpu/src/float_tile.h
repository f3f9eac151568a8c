// Many rows of x: a tile of the weight is dequantized into cache and multiplied with panels of x, whose vectors run
// over the rows of x.
//
//     y[m, n] = sum_k x[m, k] * (c[n, k] * scale[n, g] + offset[n, g])
#pragma once

#include "matrix.h"
#include "values.h"

namespace {

constexpr int TILE_ROWS = 24;  // of the weight, multiplied together
constexpr int TASK_ROWS = 192;
constexpr int TILE_COLUMNS = 256;
constexpr int TILE_LD = TILE_COLUMNS + 16;  // rows of a tile do not compete for the same lines of the cache
constexpr int MAX_PANELS = REGISTERS == 32 ? 3 : 2;  // of x, multiplied together
// Units of four bytes of so many panels, from one column of units on, that stay in the nearest cache.
constexpr int64_t near_units(int panels) { return 24 * 1024 / (panels * WIDTH); }
constexpr int64_t SUMS = REGISTERS == 32 ? 24 : 12;  // vectors of sums that registers hold

// c[r, v] (+)= sum_k w[r, k] * x[v][k], a vector over the rows of a panel.
template <int R, int V>
void multiply_tile(const float* w, const float* x, int64_t panel, int64_t columns, float* c, int64_t ldc,
                   bool add) {
    Floats total[R][V] = {};
    if (add) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) total[r][v] = load<Floats>(c + r * ldc + v * LANES);
    }
    for (int64_t k = 0; k < columns; k++) {
        Floats xs[V];
        UNROLL for (int v = 0; v < V; v++) xs[v] = load<Floats>(x + v * panel + k * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            Floats a = broadcast(w[r * TILE_LD + k]);
            UNROLL for (int v = 0; v < V; v++) total[r][v] = fma(a, xs[v], total[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(c + r * ldc + v * LANES, total[r][v]);
}

template <int V>
void multiply_rows(const float* w, const float* x, int64_t panel, int64_t columns, float* c, int64_t ldc, bool add) {
    constexpr int R = SUMS / V;
    for (int r = 0; r < TILE_ROWS; r += R)
        multiply_tile<R, V>(w + r * TILE_LD, x, panel, columns, c + r * ldc, ldc, add);
}

// `rows` (a multiple of TILE_ROWS) x columns of the weight, from column k on, with all panels of x (columns of a panel:
// k_all).
inline void multiply_panels(const float* w, int64_t rows, const float* x, int64_t panels, int64_t k_all, int64_t k, int64_t columns,
                            float* c, int64_t ldc, bool add) {
    constexpr int64_t NEAR = near_units(MAX_PANELS);
    int64_t panel = k_all * LANES;
    for (int64_t p = 0; p < panels;) {
        int64_t v = panels_at_once(panels - p, MAX_PANELS);
        for (int64_t i = 0; i < columns; i += NEAR) {
            int64_t here = columns - i < NEAR ? columns - i : NEAR;
            const float* from = x + p * panel + (k + i) * LANES;
            for (int64_t r = 0; r < rows; r += TILE_ROWS) {
                const float* tile = w + r * TILE_LD + i;
                float* to = c + r * ldc + p * LANES;
                if (v == 1) multiply_rows<1>(tile, from, panel, here, to, ldc, add || i);
                if (v == 2) multiply_rows<2>(tile, from, panel, here, to, ldc, add || i);
                if constexpr (MAX_PANELS == 3)
                    if (v == 3) multiply_rows<3>(tile, from, panel, here, to, ldc, add || i);
            }
        }
        p += v;
    }
}

// `count` codes as c * scale + offset.
INLINE void scale_codes(const int8_t* codes, int64_t count, float scale, float offset, float* out) {
    Floats s = broadcast(scale), o = broadcast(offset);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, fma(to_floats(widen(codes + i)), s, o));
    for (; i < count; i++) out[i] = codes[i] * scale + offset;
}

inline void multiply_tiles(const Weight& w, const Input& x, const Output& y, int64_t threads) {
    static thread_local Scratch row_scratch, panel_scratch;
    int64_t panels = (x.rows + LANES - 1) / LANES, ldc = panels * LANES, ld = x.type == FLOAT32 ? x.stride : w.k;
    const float* rows = (const float*)x.data;
    if (x.type != FLOAT32) {
        float* converted = row_scratch.get<float>(x.rows * w.k);
        x.to_floats(w.k, converted, w.k, threads);
        rows = converted;
    }
    float* packed = panel_scratch.get<float>(ldc * w.k);
    to_panels((const int32_t*)rows, ld, x.rows, w.k, (int32_t*)packed, threads);
    const RowTasks shares(w.n, TILE_ROWS, x.rows <= 64 ? TILE_ROWS : TASK_ROWS, threads);
    parallel(shares.count, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, tile_scratch, scale_scratch, sum_scratch;
        int8_t* codes = code_scratch.get<int8_t>(TILE_COLUMNS);
        float* tile = tile_scratch.get<float>(shares.most() * TILE_LD);
        float* scale = scale_scratch.get<float>(2 * shares.most() * w.groups);
        float* offset = scale + shares.most() * w.groups;
        float* c = sum_scratch.get<float>(shares.most() * ldc);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = shares.start(task), count = shares.start(task + 1) - start;
            scales(w, start, scale, count);
            offsets(w, start, scale, offset, count);
            for (int64_t k = 0; k < w.k; k += TILE_COLUMNS) {
                int64_t columns = w.k - k < TILE_COLUMNS ? w.k - k : TILE_COLUMNS;
                const GroupEdge at(k, w.group);
                for (int64_t r = 0; r < count; r++) {
                    // What comes next: more columns of this row, or a row of the task that mostly follows.
                    if (k + columns < w.k) prefetch_codes(w, start + r, k + columns, TILE_COLUMNS);
                    else if (start + count + r < w.n) prefetch_codes(w, start + count + r, 0, TILE_COLUMNS);
                    decode(w, start + r, k, columns, codes);
                    float* out = tile + r * TILE_LD;
                    const float *s = scale + r * w.groups, *o = offset + r * w.groups;
                    if (w.values) scale_values(w, start + r, at, codes, columns, s, out);
                    else each_group(at, columns, [&](int64_t i, int64_t stop, int64_t g) {
                        scale_codes(codes + i, stop - i, s[g], o[g], out + i);
                    });
                }
                multiply_panels(tile, round_up(count, TILE_ROWS), packed, panels, w.k, k, columns, c, ldc, k > 0);
            }
            y.write_transposed(x.rows, start, count, c, ldc);
        }
    });
    row_scratch.trim();
    panel_scratch.trim();
}

}  // namespace
