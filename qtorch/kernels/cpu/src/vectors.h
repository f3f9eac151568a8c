// Weights whose bytes stand for vectors of four columns, entries of a codebook (primitives/vector_codebook.py):
//
//     w[n, 4 j + i] = vectors[byte[n, j]][i] * scale[n, g]
//
// The input is rotated first where the weight is: each group times S H S, with signs S and a Hadamard matrix H.
//
// Few rows are multiplied in fixed point: x in slices of a byte, as in quantize.h. The entries are 32 vectors, each with its
// signs flipped in pairs, so registers hold them all, and a vector of bytes gives the codes of every fourth column at once.
#pragma once

#include "float_dot.h"
#include "quantize.h"

namespace {

// One block of x times H / sqrt(size), H being Sylvester's matrix.
inline void transform(float* x, int64_t size) {
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t start = 0; start < size; start += 2 * half)
            for (int64_t i = start; i < start + half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}

// A row of x, group by group times S H S.
inline void rotate(const Weight& w, float* x) {
    float factor = 1 / __builtin_sqrtf(w.group);
    for (int64_t k = 0; k < w.k; k += w.group) {
        for (int64_t i = 0; i < w.group; i++) x[k + i] *= w.signs[i] * factor;
        transform(x + k, w.group);
        for (int64_t i = 0; i < w.group; i++) x[k + i] *= w.signs[i];
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)

constexpr int64_t VECTOR_STEP = 4 * WIDTH;  // columns of a vector of bytes
constexpr int VECTOR_ROWS = 4;  // of the weight that are multiplied together
constexpr int64_t VECTOR_MAX_ROWS = 4;  // of x

inline bool fits_vector_dot(const Weight& w, int64_t rows) {
    return rows <= VECTOR_MAX_ROWS && w.n >= VECTOR_ROWS && w.group % VECTOR_STEP == 0;
}

// The codes of every fourth column that 32 bytes stand for.
struct VectorCodes {
    __m256i low[4], high[4], signs[4];  // of the first and the last 16 vectors; of the pairs of flips

    explicit VectorCodes(const uint32_t* vectors) {
        alignas(16) int8_t bytes[3][16];
        for (int i = 0; i < 4; i++) {
            auto at = [&](int b) { return (int8_t)(vectors[b] >> 8 * i); };
            for (int b = 0; b < 16; b++) {
                bytes[0][b] = at(b), bytes[1][b] = at(b + 16);
                int flips = b & 7;
                bool negative = i < 3 ? flips >> i & 1 : __builtin_parity(flips);
                bytes[2][b] = negative ? -1 : 1;
            }
            auto both = [&](int t) { return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes[t])); };
            low[i] = both(0), high[i] = both(1), signs[i] = both(2);
        }
    }
};

// x in slices: bytes (M, slices, 4, K / 4), the columns i, i + 4, ... together; scale (M), of the last slice.
struct VectorInput {
    const int8_t* bytes;
    const float* scale;
};

// The slices of quantize.h, from the last to the first 254 times as large, and the scale of the last.
template <int SLICES>
float slice_vectors(const float* x, int64_t k, int8_t* bytes) {
    float high = largest_magnitude(x, k), first = high ? high / 127 : 1;
    for (int64_t j = 0; j < k; j++) {
        float rest = x[j], scale = first;
        for (int s = 0; s < SLICES; s++, scale /= 254) {
            float q = __builtin_rintf(rest / scale);
            rest -= q * scale;
            bytes[(s * 4 + j % 4) * (k / 4) + j / 4] = q;
        }
    }
    for (int s = 1; s < SLICES; s++) first /= 254;
    return first;
}

// VECTOR_ROWS rows of the weight with M of x; result (R, M).
template <int M, int SLICES>
void vector_block(const Weight& w, const VectorCodes& table, const uint8_t* codes, const float* scale, Ahead ahead,
                  const VectorInput& in, float* result) {
    constexpr int R = VECTOR_ROWS;
    const __m256i ones = _mm256_set1_epi16(1), lows = _mm256_set1_epi8(31), flips = _mm256_set1_epi8(7);
    int64_t quarter = w.k / 4, steps = w.group / VECTOR_STEP;
    Floats total[R][M] = {};
    for (int64_t g = 0; g < w.groups; g++)
        UNROLL for (int r = 0; r < R; r++) {
            __m256i sums[M][SLICES] = {};
            for (int64_t j = g * w.group / 4; j < g * w.group / 4 + steps * WIDTH; j += WIDTH) {
                ahead.fetch<1>();
                __m256i byte = _mm256_loadu_si256((const __m256i*)(codes + r * w.row_bytes + j));
                __m256i base = _mm256_and_si256(byte, lows), sign = _mm256_and_si256(_mm256_srli_epi16(byte, 5), flips);
                // Where the uppermost bit is set, a shuffle gives zero.
                __m256i first = _mm256_adds_epu8(base, _mm256_set1_epi8(0x70)), second = _mm256_sub_epi8(base, _mm256_set1_epi8(16));
                __m256i pairs[M][SLICES];
                UNROLL for (int i = 0; i < 4; i++) {
                    __m256i code = _mm256_or_si256(_mm256_shuffle_epi8(table.low[i], first), _mm256_shuffle_epi8(table.high[i], second));
                    __m256i magnitude = _mm256_abs_epi8(code);
                    code = _mm256_sign_epi8(code, _mm256_shuffle_epi8(table.signs[i], sign));
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int s = 0; s < SLICES; s++) {
                            const int8_t* x = in.bytes + ((m * SLICES + s) * 4 + i) * quarter + j;
                            __m256i product = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(_mm256_loadu_si256((const __m256i*)x), code));
                            // Four times two products of at most 27 and 127 fit into 16 bits.
                            pairs[m][s] = i ? _mm256_add_epi16(pairs[m][s], product) : product;
                        }
                }
                UNROLL for (int m = 0; m < M; m++)
                    UNROLL for (int s = 0; s < SLICES; s++) sums[m][s] = _mm256_add_epi32(sums[m][s], _mm256_madd_epi16(pairs[m][s], ones));
            }
            UNROLL for (int m = 0; m < M; m++) {
                Floats sum = to_floats((Ints)sums[m][0]);
                UNROLL for (int s = 1; s < SLICES; s++) sum = fma(sum, broadcast(254), to_floats((Ints)sums[m][s]));
                total[r][m] = fma(sum, broadcast(scale[r * w.groups + g]), total[r][m]);
            }
        }
    finish_block(total, in.scale, nullptr, nullptr, w.groups, result);
}

template <int M, int SLICES>
void vector_dot(const Weight& w, const VectorInput& in, const Output& y, int64_t threads) {
    constexpr int R = VECTOR_ROWS;
    VectorCodes table(w.vectors);
    int64_t steps = w.groups * (w.group / VECTOR_STEP) * R;
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch scale_scratch;
        float* scale = scale_scratch.get<float>(R * w.groups);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            // The last block begins earlier, so that it is whole.
            int64_t start = task * R + R <= w.n ? task * R : w.n - R, skip = task * R - start;
            scales(w, start, scale, R);
            float result[R * M];
            Ahead ahead{w.codes + (task + 1) * R * w.row_bytes, R * w.row_bytes / steps};
            vector_block<M, SLICES>(w, table, w.codes + start * w.row_bytes, scale, ahead, in, result);
            y.write_transposed(M, task * R, R - skip, result + skip * M, M);
        }
    });
}

// x (rows, ld), of numbers that had this type before they were rotated. Gives whether it could.
inline bool multiply_vector_dot(const Weight& w, const float* x, int64_t ld, int64_t rows, int64_t type, const Output& y, int64_t threads) {
    if (!fits_vector_dot(w, rows)) return false;
    int64_t slices = 2;
    for (int64_t m = 0; m < rows; m++) {
        int64_t own = slices_of(x + m * ld, w.k, type);
        if (own != 2 && own != 3) return false;
        slices = own > slices ? own : slices;
    }
    static thread_local Scratch byte_scratch;
    int8_t* bytes = byte_scratch.get<int8_t>(rows * slices * w.k);
    float scale[VECTOR_MAX_ROWS];
    for (int64_t m = 0; m < rows; m++)
        scale[m] = (slices == 2 ? slice_vectors<2> : slice_vectors<3>)(x + m * ld, w.k, bytes + m * slices * w.k);
    using Multiply = void (*)(const Weight&, const VectorInput&, const Output&, int64_t);
    static constexpr Multiply BY_ROWS[2][4] = {{vector_dot<1, 2>, vector_dot<2, 2>, vector_dot<3, 2>, vector_dot<4, 2>},
                                               {vector_dot<1, 3>, vector_dot<2, 3>, vector_dot<3, 3>, vector_dot<4, 3>}};
    BY_ROWS[slices - 2][rows - 1](w, {bytes, scale}, y, threads);
    return true;
}

#else

inline bool multiply_vector_dot(const Weight&, const float*, int64_t, int64_t, int64_t, const Output&, int64_t) { return false; }

#endif

}  // namespace
