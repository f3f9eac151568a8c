// Codes of 4 bits in groups of few columns, exactly: output channels lie across the lanes of a vector.
//
//     y[m, n] = (sum_g float(sum_{k in g} (xq[m, k] - xz[m]) (c[n, k] - z[n, g])) * scale[n, g]) * xs[m]
//
// A unit is a vector of four neighbouring columns of LANES rows of the weight, multiplied by the same columns of a row of x,
// broadcast. So the sums of a group are a vector, which is scaled by one of scales, and no lanes are added up: a group costs
// little, however short. Rows of the weight are transposed to units as they are read, from the packed codes in place, once
// for up to MAX_CHUNK rows of x.
#pragma once

#include "int_dot.h"

namespace {

constexpr int CHANNEL_VECTORS = 2;  // that are transposed together
constexpr int BLOCK_CHANNELS = CHANNEL_VECTORS * LANES;
constexpr int STEP_UNITS = 8;  // whose sums of products of 4-bit codes stay within 16 bits; groups are whole steps

// Rows of x that are multiplied together, such that the sums fit into registers, and enough of them do not wait for another.
#if defined(HAS_VNNI) && defined(__AVX512F__)
constexpr int CHANNEL_ROWS = 6;
#else
constexpr int CHANNEL_ROWS = 4;
#endif

// Sums over up to STEP_UNITS units, whose codes are below 16: they begin with a total, or are added to it at the end.
#if defined(HAS_VNNI)
using StepSums = Ints;
INLINE StepSums add_products(StepSums sums, Ints codes, Ints x) { return dot4(sums, codes, x); }
INLINE StepSums begin_step(Ints total) { return total; }
INLINE Ints end_step(Ints, StepSums sums) { return sums; }
#elif defined(__SSSE3__)
using StepSums = Shorts;
INLINE StepSums add_products(StepSums sums, Ints codes, Ints x) { return sums + (Shorts)multiply_bytes(codes, x); }
INLINE StepSums begin_step(Ints) { return StepSums{}; }
INLINE Ints end_step(Ints total, StepSums sums) { return total + multiply_pairs((Ints)sums, (Ints)(Shorts{} + (uint16_t)1)); }
#else
using StepSums = Ints;
INLINE StepSums add_products(StepSums sums, Ints codes, Ints x) {
    UNROLL for (int byte = 0; byte < 32; byte += 8) sums += (codes >> byte & 15) * (x << (24 - byte) >> 24);
    return sums;
}
INLINE StepSums begin_step(Ints total) { return total; }
INLINE Ints end_step(Ints, StepSums sums) { return sums; }
#endif

// LANES rows of `bytes` bytes, a multiple of 4, to units (bytes / 4, LANES). At least LANES units are written.
inline void to_units(const uint8_t* const* rows, int64_t bytes, int32_t* out) {
    for (int64_t next = 0; next < bytes; next += WIDTH) {
        // The last vector begins earlier, so that it is whole.
        int64_t at = next + WIDTH <= bytes ? next : bytes < WIDTH ? 0 : bytes - WIDTH;
        Ints block[LANES] = {};
        if (bytes < WIDTH) {
            for (int i = 0; i < LANES; i++) memcpy(&block[i], rows[i], bytes);
        } else {
            UNROLL for (int i = 0; i < LANES; i++) block[i] = load<Ints>(rows[i] + at);
        }
        transpose(block);
        UNROLL for (int i = 0; i < LANES; i++) store(out + (at / 4 + i) * LANES, block[i]);
    }
}

// What comes next: codes of the next run of columns, a line for each unit, and scales of the next block.
struct Next {
    Lines codes;
    Ahead scales;
};

// Of the input.
struct ChannelInput {
    const Codes& codes;
    const float* sums;   // (groups, rows): less the zero points
    const float* zeros;  // (rows): negative zero points
    int64_t ld;          // of sums
};

// Of BLOCK_CHANNELS rows of the weight.
struct ChannelBlock {
    const int32_t* units;  // (CHANNEL_VECTORS, unit_ld, LANES), packed: of one run of bytes
    int64_t unit_ld;
    int64_t group;
    const float *scale, *zero;  // (CHANNEL_VECTORS, group_ld, LANES); zero points are negative
    int64_t group_ld;
    float* sums;     // (rows, BLOCK_CHANNELS): of the groups before
    int32_t* total;  // (2 * rows, BLOCK_CHANNELS): of the group that is not finished, for each row and for the sums of codes
};

// The products of a unit of each of V vectors, `ld` apart, with M rows of x; then those with ones.
template <int M, int V, bool ONES, int RIGHT>
INLINE void add_unit(const int32_t* unit, int64_t ld, const int8_t* x, int64_t x_ld, StepSums (&sums)[V][M + ONES]) {
    const Ints mask = (Ints)(Bytes{} + (uint8_t)15), ones = (Ints)(Bytes{} + (uint8_t)1);
    Ints codes[V];
    UNROLL for (int c = 0; c < V; c++) codes[c] = (load<Ints>(unit + c * ld) >> RIGHT) & mask;
    UNROLL for (int i = 0; i < M; i++) {
        Ints xs = Ints{} + load<int32_t>(x + i * x_ld);
        UNROLL for (int c = 0; c < V; c++) sums[c][i] = add_products(sums[c][i], codes[c], xs);
    }
    UNROLL for (int c = 0; ONES && c < V; c++) sums[c][M] = add_products(sums[c][M], codes[c], ones);
}

// Adds the products of columns k to `stop`, the halves of bytes after a shift of RIGHT, for M rows of x from m on, and V
// vectors of channels from v on. With ONES x has zero points, and the codes are added up too.
template <int M, int V, bool ONES, int RIGHT>
void multiply_units(const ChannelBlock& w, const ChannelInput& in, int64_t m, int v, int64_t k, int64_t stop, Next* ahead) {
    constexpr int COLUMNS = M + ONES;
    const int8_t* x = in.codes.codes + m * in.codes.ld;
    int64_t group = w.group;
    const int32_t* unit = w.units + v * w.unit_ld * LANES;
    float* sums = w.sums + m * BLOCK_CHANNELS + v * LANES;
    int32_t* unfinished = w.total + m * (BLOCK_CHANNELS * 2) + v * LANES;
    Floats sum[V][M];
    Ints total[V][COLUMNS];
    UNROLL for (int c = 0; c < V; c++) {
        UNROLL for (int i = 0; i < M; i++) sum[c][i] = load<Floats>(sums + i * BLOCK_CHANNELS + c * LANES);
        UNROLL for (int i = 0; i < COLUMNS; i++) total[c][i] = load<Ints>(unfinished + i * BLOCK_CHANNELS + c * LANES);
    }
    for (int64_t g = k / group; k < stop; g++) {
        int64_t end = (g + 1) * group, next = end < stop ? end : stop;
        while (k < next) {
            StepSums part[V][COLUMNS];
            UNROLL for (int c = 0; c < V; c++)
                UNROLL for (int i = 0; i < COLUMNS; i++) part[c][i] = begin_step(total[c][i]);
            if (ahead) ahead->scales.fetch<2>();
            int64_t count = (next - k) / 4;
            if (count >= STEP_UNITS) {
                UNROLL for (int i = 0; i < STEP_UNITS; i++, k += 4, unit += LANES) {
                    // One line at a time: many prefetches at once delay the loads that are needed now.
                    if (ahead) ahead->codes.prefetch_next();
                    add_unit<M, V, ONES, RIGHT>(unit, w.unit_ld * LANES, x + k, in.codes.ld, part);
                }
            } else {
                for (; k < next; k += 4, unit += LANES)
                    add_unit<M, V, ONES, RIGHT>(unit, w.unit_ld * LANES, x + k, in.codes.ld, part);
            }
            UNROLL for (int c = 0; c < V; c++)
                UNROLL for (int i = 0; i < COLUMNS; i++) total[c][i] = end_step(total[c][i], part[c][i]);
        }
        if (next < end) break;
        UNROLL for (int c = 0; c < V; c++) {
            int64_t at = ((v + c) * w.group_ld + g) * LANES;
            Floats scale = load<Floats>(w.scale + at), zero = load<Floats>(w.zero + at);
            UNROLL for (int i = 0; i < M; i++) {
                Floats exact = to_floats(total[c][i]);
                if (ONES) exact = fma(to_floats(total[c][M]), broadcast(in.zeros[m + i]), exact);
                exact = fma(zero, broadcast(in.sums[g * in.ld + m + i]), exact);
                sum[c][i] += exact * scale;
            }
            UNROLL for (int i = 0; i < COLUMNS; i++) total[c][i] = Ints{};
        }
    }
    UNROLL for (int c = 0; c < V; c++) {
        UNROLL for (int i = 0; i < M; i++) store(sums + i * BLOCK_CHANNELS + c * LANES, sum[c][i]);
        UNROLL for (int i = 0; i < COLUMNS; i++) store(unfinished + i * BLOCK_CHANNELS + c * LANES, total[c][i]);
    }
}

// Vectors of channels that are multiplied together with so many rows of x.
constexpr int channel_vectors(int rows) { return REGISTERS == 32 || rows <= 2 ? CHANNEL_VECTORS : 1; }

// `multiply_units` for `count` rows of x, at most M.
using MultiplyUnits = void (*)(const ChannelBlock&, const ChannelInput&, int64_t, int, int64_t, int64_t, Next*);

template <bool ONES, int RIGHT, int M>
MultiplyUnits rows_of_x(int64_t count) {
    if constexpr (M > 1) {
        if (count < M) return rows_of_x<ONES, RIGHT, M - 1>(count);
    }
    return multiply_units<M, channel_vectors(M), ONES, RIGHT>;
}

// One run of columns, for all rows of x.
template <bool ONES, int RIGHT>
void multiply_run(const ChannelBlock& w, const ChannelInput& in, int64_t k, int64_t stop, Next& ahead) {
    int64_t rows = in.codes.rows, steps = (rows + CHANNEL_ROWS - 1) / CHANNEL_ROWS;
    for (int64_t m = 0; steps; steps--) {
        int64_t count = (rows - m + steps - 1) / steps;
        for (int v = 0; v < CHANNEL_VECTORS; v += channel_vectors(count))
            rows_of_x<ONES, RIGHT, CHANNEL_ROWS>(count)(w, in, m, v, k, stop, m || v ? nullptr : &ahead);
        m += count;
    }
}

// Scales and negative zero points of LANES rows of the weight, rows[i] in lane i.
inline void lane_factors(const Weight& w, const int64_t* rows, int64_t ld, float* scale, float* zero) {
    static thread_local Scratch scale_scratch, zero_scratch, code_scratch;
    float* row_scale = scale_scratch.get<float>(LANES * ld);
    float* row_zero = zero_scratch.get<float>(LANES * ld);
    int32_t* codes = code_scratch.get<int32_t>(ld);
    const uint8_t *scales_of[LANES], *zeros_of[LANES];
    bool as_they_are = w.scale_type == FLOAT32 && w.scale_stride == w.groups;
    for (int i = 0; i < LANES; i++) {
        if (!as_they_are) scales(w, rows[i], row_scale + i * ld);
        if (w.zero) zeros(w, rows[i], codes);
        for (int64_t g = 0; w.zero && g < w.groups; g++) row_zero[i * ld + g] = -(codes[g] + (int32_t)w.center);
        scales_of[i] = as_they_are ? (const uint8_t*)w.scale + rows[i] * w.groups * 4 : (const uint8_t*)(row_scale + i * ld);
        zeros_of[i] = (const uint8_t*)(row_zero + i * ld);
    }
    to_units(scales_of, w.groups * 4, (int32_t*)scale);
    if (w.zero) to_units(zeros_of, w.groups * 4, (int32_t*)zero);
}

template <bool ONES>
void multiply_channels(const Weight& w, const ChannelInput& in, const Output& y, int64_t threads) {
    int64_t rows = in.codes.rows, results = rows / in.codes.slices, group_ld = round_up(w.groups, LANES);
    int64_t run = w.k / 8, unit_ld = round_up(run / 4, LANES), steps = w.k / (4 * STEP_UNITS);
    parallel((w.n + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, threads, [&](Tasks& tasks) {
        static thread_local Scratch unit_scratch, factor_scratch, sum_scratch, total_scratch;
        int32_t* units = unit_scratch.get<int32_t>(BLOCK_CHANNELS * unit_ld);
        float* scale = factor_scratch.get<float>(2 * BLOCK_CHANNELS * group_ld);
        float* zero = scale + BLOCK_CHANNELS * group_ld;
        float* sums = sum_scratch.get<float>(rows * BLOCK_CHANNELS);
        int32_t* total = total_scratch.get<int32_t>(2 * rows * BLOCK_CHANNELS);
        // Without zero points, all are the code of zero.
        for (int64_t i = 0; i < BLOCK_CHANNELS * group_ld; i++) zero[i] = (float)w.shift - w.center;
        ChannelBlock block{units, unit_ld, w.group, scale, zero, group_ld, sums, total};
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = task * BLOCK_CHANNELS, count = w.n - start < BLOCK_CHANNELS ? w.n - start : BLOCK_CHANNELS;
            int64_t row[BLOCK_CHANNELS];
            for (int64_t i = 0; i < BLOCK_CHANNELS; i++) row[i] = start + (i < count ? i : count - 1);
            for (int v = 0; v < CHANNEL_VECTORS; v++) {
                int64_t at = v * group_ld * LANES;
                lane_factors(w, row + v * LANES, group_ld, scale + at, zero + at);
            }
            memset(total, 0, 2 * rows * BLOCK_CHANNELS * sizeof *total);
            // 0 + -0 would not be -0.
            for (int64_t i = 0; i < rows * BLOCK_CHANNELS; i += LANES) store(sums + i, broadcast(-0.0f));
            int64_t scale_bytes = w.scale_stride * size_of(w.scale_type), next = start + BLOCK_CHANNELS;
            Next ahead{{}, {(const uint8_t*)w.scale + next * scale_bytes, BLOCK_CHANNELS * scale_bytes / steps}};
            for (int64_t k = 0; k < w.k; k += 2 * run) {
                for (int v = 0; v < CHANNEL_VECTORS; v++) {
                    const uint8_t* from[LANES];
                    for (int i = 0; i < LANES; i++) from[i] = w.codes + row[v * LANES + i] * w.row_bytes + k / 2;
                    to_units(from, run, units + v * unit_ld * LANES);
                }
                bool last = k + 2 * run == w.k;
                int64_t from = last ? next : start, left = w.n - from;
                ahead.codes = {w.codes + from * w.row_bytes + (last ? 0 : k / 2 + run), w.row_bytes,
                               left < BLOCK_CHANNELS ? left : BLOCK_CHANNELS, run};
                multiply_run<ONES, 0>(block, in, k, k + run, ahead);
                multiply_run<ONES, 4>(block, in, k + run, k + 2 * run, ahead);
            }
            for (int64_t m = 0; m < rows; m++) {
                float *of_row = sums + m * BLOCK_CHANNELS, *result = of_row - m / results * results * BLOCK_CHANNELS;
                for (int i = 0; i < BLOCK_CHANNELS; i++) of_row[i] *= in.codes.scale[m];
                for (int i = 0; m >= results && i < BLOCK_CHANNELS; i++) result[i] += of_row[i];
            }
            for (int64_t m = 0; m < results; m++) y.write(m, start, count, sums + m * BLOCK_CHANNELS);
        }
    });
}

inline void multiply_channels(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    static thread_local Scratch sum_scratch, zero_scratch;
    float* sums = sum_scratch.get<float>(w.groups * x.rows);
    float* zeros = zero_scratch.get<float>(x.rows);
    parallel_for(x.rows, threads, [&](int64_t m) {
        int32_t zero = x.zero ? x.zero[m] : 0;
        zeros[m] = -zero;
        for (int64_t g = 0; g < w.groups; g++)
            sums[g * x.rows + m] = sum_codes(x.codes + m * x.ld + g * w.group, w.group) - (int32_t)w.group * zero;
    });
    (x.zero ? multiply_channels<true> : multiply_channels<false>)(w, {x, sums, zeros, x.rows}, y, threads);
}

}  // namespace
