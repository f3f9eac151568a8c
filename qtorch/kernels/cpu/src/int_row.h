// One row of codes, and packed 4-bit codes in groups, exactly: dot products along K, with LANES rows of the weight at once. The
// equation is that of int_channels.h, which transposes the codes; that pays from two rows of x on.
#pragma once

#include "int_channels.h"

namespace {

#if defined(__AVX2__) && !defined(HAS_VNNI) && !defined(__AVX512F__)

// Where a row does not fit, the channels are next: three to five times as fast as dot products, which the tables name, because
// they are measured where it fits.
inline bool row_by_channels(const Codes& x) { return x.rows == 1; }

// Whole vectors of codes belong to one group.
inline bool fits_int_row(const Weight& w, const Codes& x) {
    return x.rows == 1 && w.bits == 4 && w.n >= LANES && w.k % (8 * WIDTH) == 0 && w.group % WIDTH == 0;
}

// The sums of the lanes of each vector, whose numbers are at most 15 * 128 * MOST. 16 such products stay within 16 bits.
template <int MOST>
INLINE Ints add_lanes(const Shorts (&part)[LANES]) {
    const __m256i one = _mm256_set1_epi16(1);
    auto add_two = [&](__m256i a, __m256i b) {  // sums of two lanes, in 32 bits if those of 4 * MOST products need them
        return MOST <= 4 ? _mm256_hadd_epi16(a, b) : _mm256_hadd_epi32(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one));
    };
    __m256i fours[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i* p = (const __m256i*)part + 4 * i;
        if (MOST <= 8) {
            __m256i a = _mm256_hadd_epi16(p[0], p[1]), b = _mm256_hadd_epi16(p[2], p[3]);
            fours[i] = MOST <= 4 ? _mm256_madd_epi16(add_two(a, b), one) : add_two(a, b);
        } else {
            fours[i] = _mm256_hadd_epi32(add_two(p[0], p[1]), add_two(p[2], p[3]));
        }
    }
    return (Ints)_mm256_permute2x128_si256(fours[0], fours[1], 0x20) + (Ints)_mm256_permute2x128_si256(fours[0], fours[1], 0x31);
}

// sums[g] (LANES) += the products of the codes of LANES rows in group g with x, less x_zero if it has one. PER vectors of a group
// at a time.
template <int PER, bool HAS_ZERO>
void add_row_products(const Weight& w, const uint8_t* codes, const int8_t* x, int32_t x_zero, Ahead ahead, int32_t* sums) {
    const Bytes mask = Bytes{} + (uint8_t)15, zero = Bytes{} + (uint8_t)x_zero;
    int64_t run = w.k / 8;
    for (int64_t start = 0; start < w.k; start += 2 * run, codes += run) {
        GroupEdge edges[2] = {{start, w.group}, {start + run, w.group}};
        for (int64_t k = 0; k < run; k += PER * WIDTH) {
            // The low halves of bytes, then the high ones.
            UNROLL for (int half = 0; half < 2; half++) {
                Shorts part[LANES] = {};
                UNROLL for (int i = 0; i < PER; i++) {
                    Ints xs = load<Ints>(x + start + half * run + k + i * WIDTH);
                    UNROLL for (int r = 0; r < LANES; r++) {
                        // One line at a time: many prefetches at once delay the loads that are needed now.
                        if (r % 4 == 1) ahead.fetch<1, false>();
                        Bytes bytes = load<Bytes>(codes + r * w.row_bytes + k + i * WIDTH);
                        Ints c = (Ints)((half ? (Bytes)((Shorts)bytes >> 4) : bytes) & mask);
                        part[r] += (Shorts)multiply_bytes(c, xs);
                        if (HAS_ZERO) part[r] -= (Shorts)multiply_bytes(c, (Ints)zero);
                    }
                }
                int32_t* to = sums + edges[half].group * LANES;
                store(to, load<Ints>(to) + add_lanes<2 * PER * (1 + HAS_ZERO)>(part));
                edges[half].pass(PER * WIDTH);
            }
        }
    }
}

template <bool HAS_ZERO>
void multiply_int_row(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    static thread_local Scratch x_scratch;
    int64_t groups = w.groups, group_ld = round_up(groups, LANES), blocks = (w.n + LANES - 1) / LANES;
    int32_t x_zero = HAS_ZERO ? *x.zero : 0, *x_sums = x_scratch.get<int32_t>(groups);
    for (int64_t g = 0; g < groups; g++) x_sums[g] = sum_codes(x.codes + g * w.group, w.group) - (int32_t)w.group * x_zero;
    auto whole = [&](int64_t vectors) { return w.group % (vectors * WIDTH) == 0 && w.k % (8 * vectors * WIDTH) == 0; };
    auto add_products = whole(4) ? add_row_products<4, HAS_ZERO> : whole(2) ? add_row_products<2, HAS_ZERO> : add_row_products<1, HAS_ZERO>;
    parallel(blocks, threads, [&](Tasks& tasks) {
        static thread_local Scratch factor_scratch, sum_scratch;
        float* scale = factor_scratch.get<float>(2 * LANES * group_ld);
        float* zero = scale + LANES * group_ld;
        int32_t* sums = sum_scratch.get<int32_t>(LANES * groups);
        // Without zero points, all are the code of zero.
        for (int64_t i = 0; i < LANES * group_ld; i++) zero[i] = (float)w.shift - w.center;
        for (int64_t task; (task = tasks.next()) >= 0;) {
            // The last block begins earlier, so that it is whole.
            int64_t start = task * LANES + LANES <= w.n ? task * LANES : w.n - LANES, skip = task * LANES - start, row[LANES];
            for (int64_t i = 0; i < LANES; i++) row[i] = start + i;
            lane_factors(w, row, group_ld, scale, zero);
            memset(sums, 0, LANES * groups * sizeof *sums);
            const uint8_t* codes = w.codes + start * w.row_bytes;
            add_products(w, codes, x.codes, x_zero, {codes + LANES * w.row_bytes, 64}, sums);
            Floats total = {};
            for (int64_t g = 0; g < groups; g++) {  // in the order of the groups
                Ints exact = load<Ints>(sums + g * LANES) + to_ints(load<Floats>(zero + g * LANES)) * x_sums[g];
                total += to_floats(exact) * load<Floats>(scale + g * LANES);
            }
            float result[LANES];
            store(result, total * broadcast(*x.scale));
            y.write(0, task * LANES, LANES - skip, result + skip);
        }
    });
}

inline void multiply_int_row(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    (x.zero ? multiply_int_row<true> : multiply_int_row<false>)(w, x, y, threads);
}

#else

inline bool row_by_channels(const Codes&) { return false; }
inline bool fits_int_row(const Weight&, const Codes&) { return false; }
inline void multiply_int_row(const Weight&, const Codes&, const Output&, int64_t) {}

#endif

}  // namespace
