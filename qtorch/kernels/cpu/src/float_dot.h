// Few rows of x (M <= 8): each result is a dot product along K, where both operands are contiguous.
//
//     y[m, n] = sum_g scale[n, g] * (sum_{k in g} c[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// R rows of the weight times M rows of x are kept in registers, one vector of partial sums each.
#pragma once

#include "matrix.h"
#include "values.h"

namespace {

constexpr int DOT_MAX_ROWS = 8;

// Rows of the weight that are multiplied together, such that the sums, and for M <= 2 those of a group too, fit.
constexpr int dot_width(int m) {
    int sums = REGISTERS == 32 ? 24 : 10;
    return m == 1 ? 4 : m == 2 ? (REGISTERS == 32 ? 4 : 2) : sums / m ? sums / m : 1;
}

struct DotInput {
    float* x;           // (M, ld), zero beyond K
    const float* sums;  // (M, groups) of x
    int64_t ld;
};

// result[r] = sum_i a[r, i] * b[i] for the rows of a (R, length), at once.
template <int R>
INLINE void inner_rows(const float* a, const float* b, int64_t length, float* result) {
    Floats total[R] = {};
    float rest[R] = {};
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES)
        UNROLL for (int r = 0; r < R; r++) total[r] = fma(load<Floats>(a + r * length + i), load<Floats>(b + i), total[r]);
    for (; i < length; i++)
        UNROLL for (int r = 0; r < R; r++) rest[r] += a[r * length + i] * b[i];
    sum_rows(total, R, result);
    UNROLL for (int r = 0; r < R; r++) result[r] += rest[r];
}

inline float inner(const float* a, const float* b, int64_t length) {
    float result;
    inner_rows<1>(a, b, length, &result);
    return result;
}

// The end of a block of R rows of the weight and M of x: result (R, M), from the sums in the lanes of `total`, times a scale
// for each row of x if there are any; plus the offsets (R, groups), or null, times the sums (M, groups) of x.
template <int R, int M>
INLINE void finish_block(const Floats (&total)[R][M], const float* scale, const float* offset, const float* sums,
                         int64_t groups, float* result) {
    sum_rows(total[0], R * M, result);
    UNROLL for (int i = 0; scale && i < R * M; i++) result[i] *= scale[i % M];
    if (!offset) return;
    UNROLL for (int m = 0; m < M; m++) {
        float more[R];
        inner_rows<R>(offset, sums + m * groups, groups, more);
        UNROLL for (int r = 0; r < R; r++) result[r * M + m] += more[r];
    }
}

// Prefetches the memory of the next block, a piece at a time, while this one is multiplied.
struct Ahead {
    const uint8_t* p;
    int64_t step;  // bytes per LANES columns

    template <int LINES>
    INLINE void fetch() {
        UNROLL for (int i = 0; i < LINES; i++) prefetch(p + 64 * i);
        p += step;
    }

    template <bool NEAREST = true, class T>
    INLINE void fetch_after(T& at) {
        prefetch_after<NEAREST>(at, p);
        p += step;
    }
};

// One block of rows: codes[r] (K,), scale and offset (R, groups), result (R, M).
template <int R, int M, bool SCALE_SUMS, class Reader>
void dot_block(const Weight& w, const Reader* readers, const int8_t* const* codes, Ahead ahead, const DotInput& in,
               const float* scale, const float* offset, float* result) {
    constexpr int V = VECTORS<Reader>, LINES = (R * V * LANES + 63) / 64;
    int64_t groups = w.groups;
    Reader row[R];
    UNROLL for (int r = 0; r < R; r++) row[r] = readers[r];
    Floats total[R][M] = {};
    for (int64_t g = 0; g < groups; g++) {
        int64_t start = g * w.group, stop = start + w.group;
        Floats s[R], part[R][M] = {};
        UNROLL for (int r = 0; r < R; r++) s[r] = broadcast(scale[r * groups + g]), enter_group(row[r], g);
        auto& sums = *(SCALE_SUMS ? &part : &total);
        for (int64_t k = start; k < stop; k += V * LANES) {
            ahead.fetch<LINES>();
            UNROLL for (int r = 0; r < R; r++) {
                Floats c[V];
                read(row[r], codes[r] + k, c);
                UNROLL for (int v = 0; v < V; v++) {
                    const float* p = in.x + k + v * LANES;
                    if (!SCALE_SUMS) c[v] *= s[r];
                    UNROLL for (int m = 0; m < M; m++) sums[r][m] = fma(c[v], load<Floats>(p + m * in.ld), sums[r][m]);
                }
            }
        }
        if (!SCALE_SUMS) continue;
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++) total[r][m] = fma(part[r][m], s[r], total[r][m]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) finish(row[r], total[r][m]);
    finish_block(total, nullptr, offset, in.sums, groups, result);
}

// The same for packed 4-bit codes, whose bytes have one code of each of two runs, K / 8 columns apart. Scales are in the
// numbers that stand for codes.
template <int R, int M, class Numbers>
void nibble_block(const Weight& w, const Numbers* numbers, const int8_t* const* codes, Ahead ahead, const DotInput& in,
                  const float* scale, const float* offset, float* result) {
    constexpr int LINES = (R * LANES + 63) / 64;
    int64_t groups = w.groups, run = w.k / 8;
    Floats total[R][M] = {};
    for (int64_t start = 0; start < w.k; start += 2 * run) {
        GroupEdge first(start, w.group), second(start + run, w.group);
        const float* x = in.x + start;
        for (int64_t k = 0; k < run;) {
            int64_t columns = first.left < second.left ? first.left : second.left;
            int64_t stop = k + columns < run ? k + columns : run;
            Numbers low[R], high[R];
            auto of_group = [&](int r, int64_t g) {
                Numbers own = numbers[r];
                enter_group(own, g);
                return Numbers(own, scale[r * groups + g]);
            };
            UNROLL for (int r = 0; r < R; r++) low[r] = of_group(r, first.group), high[r] = of_group(r, second.group);
            for (; k < stop; k += LANES) {
                ahead.fetch<LINES>();
                UNROLL for (int r = 0; r < R; r++) {
                    Ints bytes = widen((const uint8_t*)codes[r] + start / 2 + k);
                    Floats a = low[r].low(bytes), b = high[r].low(bytes >> 4);
                    UNROLL for (int m = 0; m < M; m++) {
                        const float* p = x + m * in.ld + k;
                        total[r][m] = fma(b, load<Floats>(p + run), fma(a, load<Floats>(p), total[r][m]));
                    }
                }
            }
            first.pass(columns);
            second.pass(columns);
        }
    }
    finish_block(total, nullptr, offset, in.sums, groups, result);
}

// The same where vectors of one group are read together: their sum is scaled. The low halves of all rows come before the high
// ones, because the vectors of a row wait for one another.
template <int R, int M, class Reader>
void wide_nibble_block(const Weight& w, const Reader* readers, const int8_t* const* codes, Ahead ahead, const DotInput& in,
                       const float* scale, const float* offset, float* result) {
    constexpr int V = VECTORS<Reader>, LINES = (R * V * LANES + 63) / 64;
    int64_t groups = w.groups, run = w.k / 8;
    Floats total[R][M] = {};
    Reader own[2][R];
    for (int64_t start = 0; start < w.k; start += 2 * run) {
        GroupEdge edges[2] = {{start, w.group}, {start + run, w.group}};
        for (int64_t k = 0; k < run; k += V * LANES) {
            ahead.fetch<LINES>();
            UNROLL for (int half = 0; half < 2; half++) {
                bool enters = readers->step && (!k || edges[half].left == w.group);
                for (int r = 0; enters && r < R; r++) own[half][r].use(readers[r].tables + edges[half].group * readers->step);
                const Reader* row = readers->step ? own[half] : readers;
                UNROLL for (int r = 0; r < R; r++) {
                    Floats c[V], s = broadcast(scale[r * groups + edges[half].group]);
                    read_half(row[r], codes[r] + start / 2 + k, half, c);
                    UNROLL for (int m = 0; m < M; m++) {
                        const float* x = in.x + m * in.ld + start + half * run + k;
                        Floats part = c[0] * load<Floats>(x);
                        UNROLL for (int v = 1; v < V; v++) part = fma(c[v], load<Floats>(x + v * LANES), part);
                        total[r][m] = fma(part, s, total[r][m]);
                    }
                }
                edges[half].pass(V * LANES);
            }
        }
    }
    finish_block(total, nullptr, offset, in.sums, groups, result);
}

inline float sum_of(const float* a, int64_t length) {
    Floats total = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) total += load<Floats>(a + i);
    for (; i < length; i++) rest += a[i];
    return sum(total) + rest;
}

// reader(tables, step): of a row with tables that are `step` apart, for `NIBBLES` the numbers of its codes.
template <int M, bool NIBBLES, class MakeReader>
void dot_rows(const Weight& w, const DotInput& in, const Output& y, int64_t threads, const MakeReader& reader) {
    constexpr int R = dot_width(M);
    using Reader = decltype(reader(nullptr, 0));
    int64_t groups = w.groups, ld = round_up(w.k, 64) + 64;
    bool scale_sums = M <= 2 || w.group >= 256;
    // Rows are read in place, except for codes that have to be decoded, and rows near the end of the tensor.
    bool direct = NIBBLES || (!w.bits && !w.center);
    auto block = [] {
        if constexpr (NIBBLES && VECTORS<Reader> > 1) return [](bool) { return wide_nibble_block<R, M, Reader>; };
        else if constexpr (NIBBLES) return [](bool) { return nibble_block<R, M, Reader>; };
        else return [](bool sums) { return sums ? dot_block<R, M, true, Reader> : dot_block<R, M, false, Reader>; };
    }()(scale_sums);
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, scale_scratch, table_scratch[R];
        int8_t* decoded = code_scratch.get<int8_t>(R * ld);
        float* scale = scale_scratch.get<float>(2 * R * groups);
        float* offset = w.has_offset() ? scale + R * groups : nullptr;
        for (int64_t task; (task = tasks.next()) >= 0;) {
            const int8_t* codes[R];
            float result[R * M];
            Reader readers[R];
            int64_t start = task * R, count = w.n - start < R ? w.n - start : R;
            prefetch_scales(w, start + R, 0, R * groups);
            scales(w, start, scale, count);
            if (offset) offsets(w, start, scale, offset, count);
            for (int r = 0; r < R; r++) {
                // Rows beyond the last repeat it.
                bool is_there = r < count;
                int64_t n = start + (is_there ? r : count - 1);
                for (int64_t i = 0; !is_there && i < groups; i++) {
                    scale[r * groups + i] = scale[(r - 1) * groups + i];
                    if (offset) offset[r * groups + i] = offset[(r - 1) * groups + i];
                }
                readers[r] = reader(tables_of(w, n, {0, w.group}, w.k, table_scratch[r]), w.values_stride);
                codes[r] = (const int8_t*)w.codes + n * w.row_bytes;
                if (!direct || (!NIBBLES && w.k % LANES && w.ends_within(n, LANES))) {
                    codes[r] = decoded + r * ld;
                    decode(w, n, 0, w.k, decoded + r * ld);
                }
            }
            Ahead ahead{w.codes + (task + 1) * R * w.row_bytes, R * w.row_bytes * VECTORS<Reader> * LANES / (NIBBLES ? w.k / 2 : w.k)};
            block(w, readers, codes, ahead, in, scale, offset, result);
            y.write_transposed(M, start, count, result, M);
        }
    });
}

template <int M>
void dot(const Weight& w, const DotInput& in, const Output& y, int64_t threads) {
    bool nibbles = w.bits == 4 && w.k % (8 * LANES) == 0 && w.group % LANES == 0, few = w.values_count <= 16;
    auto sixteen = [](const float* tables, int64_t step) { return OfTables<Sixteen>(Sixteen(tables), tables, step); };
    bool wide = w.values && w.group % WIDTH == 0;
    if constexpr (VECTORS<WideSixteen> > 1) {
        if (wide && few) {
            order_columns<WideSixteen>(in.x, M * in.ld);
            auto reader = [](const float* tables, int64_t step) { return OfTables<WideSixteen>(WideSixteen(tables), tables, step); };
            if (w.bits == 4 && w.group < 256 && w.k % (8 * WIDTH) == 0) return dot_rows<M, true>(w, in, y, threads, reader);
            return dot_rows<M, false>(w, in, y, threads, reader);
        }
    }
    if constexpr (VECTORS<WideComputed> > 1)
        if (wide && w.exponent && !few) return dot_rows<M, false>(w, in, y, threads, [&](const float*, int64_t) { return WideComputed(w); });
    if (!w.values && nibbles) dot_rows<M, true>(w, in, y, threads, [&](const float*, int64_t) { return Nibbles(w.center); });
    else if (!w.values) dot_rows<M, false>(w, in, y, threads, [](const float*, int64_t) { return IntegerCodes{}; });
    else if (nibbles) dot_rows<M, true>(w, in, y, threads, sixteen);
    else if (few) dot_rows<M, false>(w, in, y, threads, sixteen);
    else if (w.exponent) dot_rows<M, false>(w, in, y, threads, [&](const float*, int64_t) { return ComputedCodes(w); });
    else dot_rows<M, false>(w, in, y, threads, [&](const float* tables, int64_t step) {
        return OfTables<LoadedCodes>({tables, (int)w.values_count - 1}, tables, step);
    });
}

inline void multiply_dot(const Weight& w, const Input& x, const Output& y, int64_t threads) {
    static thread_local Scratch row_scratch, group_scratch;
    int64_t ld = round_up(w.k, LANES), rows = x.rows;
    float* packed = row_scratch.get<float>(rows * ld);
    float* sums = group_scratch.get<float>(rows * w.groups);
    x.to_floats(w.k, packed, ld, 1);
    for (int64_t i = 0; w.has_offset() && i < rows * w.groups; i++)
        sums[i] = sum_of(packed + i / w.groups * ld + i % w.groups * w.group, w.group);
    DotInput in{packed, sums, ld};
    using Multiply = void (*)(const Weight&, const DotInput&, const Output&, int64_t);
    static constexpr Multiply BY_ROWS[] = {dot<1>, dot<2>, dot<3>, dot<4>, dot<5>, dot<6>, dot<7>, dot<8>};
    BY_ROWS[rows - 1](w, in, y, threads);
}

}  // namespace
