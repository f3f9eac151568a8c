// One row of codes, and packed 4-bit codes in groups, exactly: dot products along K, with LANES rows of the weight at once. The
// equation is that of int_channels.h, which transposes the codes; that pays from two rows of x on.
#pragma once

#include "int_channels.h"

namespace {

#if defined(__AVX2__) && (defined(HAS_VNNI) || !defined(__AVX512F__))

#if defined(HAS_VNNI)

constexpr int64_t ROW_STEP = WIDTH / 2;  // columns of a vector that belong to one group

inline bool row_by_channels(const Codes&) { return false; }

// sums[g] (LANES) += the products of the codes of LANES rows in group g with x (DIGITS, K), whose digits are added up. PER vectors
// of a group at a time.
template <int PER, int DIGITS>
void add_row_products(const Weight& w, const uint8_t* codes, const int8_t* x, Ahead codes_ahead, Ahead scales_ahead, int32_t* sums) {
    constexpr int R = LANES / 2;  // of these rows at a time, since each vector of codes needs two sums
    typedef int32_t Half __attribute__((vector_size(WIDTH / 2)));
    const Bytes mask = Bytes{} + (uint8_t)15;
    int64_t run = w.k / 8;
    for (int64_t row = 0; row < LANES; row += R, codes += R * w.row_bytes) {
        for (int64_t start = 0; start < w.k; start += 2 * run) {
            GroupEdge edges[2] = {{start, w.group}, {start + run, w.group}};
            for (int64_t k = 0; k < run; k += PER * WIDTH) {
                Ints part[LANES] = {};
                UNROLL for (int i = 0; i < PER; i++) {
                    const int8_t* column = x + start + k + i * WIDTH;
                    UNROLL for (int r = 0; r < R; r++) {
                        Bytes bytes = load<Bytes>(codes + start / 2 + r * w.row_bytes + k + i * WIDTH);
                        if (r % (64 / WIDTH) == 0) codes_ahead.fetch_after<false>(bytes);
                        if (r % 4 == 1) scales_ahead.fetch_after(bytes);
                        Ints low = (Ints)(bytes & mask), high = (Ints)((Bytes)((Shorts)bytes >> 4) & mask);
                        UNROLL for (int s = 0; s < DIGITS; s++) {
                            part[r] = dot4(part[r], low, load<Ints>(column + s * w.k));
                            part[R + r] = dot4(part[R + r], high, load<Ints>(column + s * w.k + run));
                        }
                    }
                }
                sum_halves(part);
                UNROLL for (int half = 0; half < 2; half++) {
                    UNROLL for (int nibble = 0; nibble < 2; nibble++) {
                        int32_t* to = sums + edges[nibble].group * LANES + row;
                        store(to, load<Half>(to) + load<Half>((const int32_t*)&part[half * R] + nibble * R));
                        edges[nibble].pass(PER * WIDTH / 2);
                    }
                }
            }
        }
    }
}

#else

constexpr int64_t ROW_STEP = WIDTH;

// Where a row does not fit, the channels are next: three to five times as fast as dot products, which the tables name, because
// they are measured where it fits.
inline bool row_by_channels(const Codes& x) { return x.rows == 1; }

// The sums of the lanes of each vector, those of 2 COUNT products of at most 15 * 128 each. 16 such products stay within 16 bits.
template <int COUNT>
INLINE Ints add_lanes(const Shorts (&part)[LANES]) {
    const __m256i one = _mm256_set1_epi16(1);
    auto add_two = [&](__m256i a, __m256i b) {  // sums of two lanes, in 32 bits if those of 8 products need them
        return COUNT <= 2 ? _mm256_hadd_epi16(a, b) : _mm256_hadd_epi32(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one));
    };
    __m256i fours[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i* p = (const __m256i*)part + 4 * i;
        if (COUNT <= 4) {
            __m256i a = _mm256_hadd_epi16(p[0], p[1]), b = _mm256_hadd_epi16(p[2], p[3]);
            fours[i] = COUNT <= 2 ? _mm256_madd_epi16(add_two(a, b), one) : add_two(a, b);
        } else {
            fours[i] = _mm256_hadd_epi32(add_two(p[0], p[1]), add_two(p[2], p[3]));
        }
    }
    return (Ints)_mm256_permute2x128_si256(fours[0], fours[1], 0x20) + (Ints)_mm256_permute2x128_si256(fours[0], fours[1], 0x31);
}

// As above; the codes are read once for the low halves of bytes, and once for the high ones.
template <int PER, int DIGITS>
void add_row_products(const Weight& w, const uint8_t* codes, const int8_t* x, Ahead codes_ahead, Ahead scales_ahead, int32_t* sums) {
    const Bytes mask = Bytes{} + (uint8_t)15;
    int64_t run = w.k / 8;
    for (int64_t start = 0; start < w.k; start += 2 * run, codes += run) {
        GroupEdge edges[2] = {{start, w.group}, {start + run, w.group}};
        for (int64_t k = 0; k < run; k += PER * WIDTH) {
            UNROLL for (int half = 0; half < 2; half++) {
                Shorts part[LANES] = {};
                UNROLL for (int i = 0; i < PER; i++) {
                    Ints xs[DIGITS];
                    UNROLL for (int s = 0; s < DIGITS; s++) xs[s] = load<Ints>(x + s * w.k + start + half * run + k + i * WIDTH);
                    UNROLL for (int r = 0; r < LANES; r++) {
                        Bytes bytes = load<Bytes>(codes + r * w.row_bytes + k + i * WIDTH);
                        if (r % 4 == 1) codes_ahead.fetch_after<false>(bytes);
                        if (r % 4 == 3 && half) scales_ahead.fetch_after(bytes);
                        Ints c = (Ints)((half ? (Bytes)((Shorts)bytes >> 4) : bytes) & mask);
                        UNROLL for (int s = 0; s < DIGITS; s++) part[r] += (Shorts)multiply_bytes(c, xs[s]);
                    }
                }
                int32_t* to = sums + edges[half].group * LANES;
                store(to, load<Ints>(to) + add_lanes<PER * DIGITS>(part));
                edges[half].pass(PER * WIDTH);
            }
        }
    }
}

#endif

inline bool fits_int_row(const Weight& w, const Codes& x) {
    return x.rows == 1 && w.bits == 4 && w.n >= LANES && w.k % (8 * WIDTH) == 0 && w.group % ROW_STEP == 0;
}

template <int DIGITS>
void multiply_int_row(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    static thread_local Scratch sum_scratch, digit_scratch;
    int64_t groups = w.groups, group_ld = round_up(groups, LANES), blocks = (w.n + LANES - 1) / LANES;
    int32_t x_zero = x.zero ? *x.zero : 0, *x_sums = sum_scratch.get<int32_t>(groups);
    for (int64_t g = 0; g < groups; g++) x_sums[g] = sum_codes(x.codes + g * w.group, w.group) - (int32_t)w.group * x_zero;
    const int8_t* digits = x.codes;
    // Two bytes add up to a code less the zero point, or to what is negative of it: -255 fits, 255 does not.
    int32_t sign = x_zero < 0 ? -1 : 0;
    if (DIGITS == 2) {
        int8_t* halves = digit_scratch.get<int8_t>(2 * w.k);
        for (int64_t k = 0; k < w.k; k++) {
            int32_t code = ((x.codes[k] - x_zero) ^ sign) - sign;
            halves[k] = code >> 1;
            halves[w.k + k] = code - (code >> 1);
        }
        digits = halves;
    }
    int64_t scale_bytes = w.scale_stride * size_of(w.scale_type), fetches = w.k / (2 * WIDTH) * (LANES / 4);
    auto whole = [&](int64_t vectors) { return w.group % (vectors * WIDTH) == 0 && w.k % (8 * vectors * WIDTH) == 0; };
    auto add_products = whole(4) ? add_row_products<4, DIGITS> : whole(2) ? add_row_products<2, DIGITS> : add_row_products<1, DIGITS>;
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
            Ahead scales_ahead{(const uint8_t*)w.scale + (start + LANES) * scale_bytes, LANES * scale_bytes / fetches};
            add_products(w, codes, digits, {codes + LANES * w.row_bytes, 64}, scales_ahead, sums);
            Floats total = {};
            for (int64_t g = 0; g < groups; g++) {  // in the order of the groups
                Ints exact = ((load<Ints>(sums + g * LANES) ^ sign) - sign) + to_ints(load<Floats>(zero + g * LANES)) * x_sums[g];
                total += to_floats(exact) * load<Floats>(scale + g * LANES);
            }
            float result[LANES];
            store(result, total * broadcast(*x.scale));
            y.write(0, task * LANES, LANES - skip, result + skip);
        }
    });
}

inline void multiply_int_row(const Weight& w, const Codes& x, const Output& y, int64_t threads) {
    (x.zero ? multiply_int_row<2> : multiply_int_row<1>)(w, x, y, threads);
}

#else

inline bool row_by_channels(const Codes&) { return false; }
inline bool fits_int_row(const Weight&, const Codes&) { return false; }
inline void multiply_int_row(const Weight&, const Codes&, const Output&, int64_t) {}

#endif

}  // namespace
