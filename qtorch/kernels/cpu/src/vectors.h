// Weights whose bytes stand for vectors of four columns, entries of a codebook (primitives/vector_spec.py):
//
//     w[n, 4 j + i] = vectors[byte[n, j]][i] * scale[n, g]
//
// The input is rotated first where the weight is: each block times S H S, with signs S and a Hadamard matrix H.
//
// Few rows are multiplied in fixed point: x in slices of a byte, as in quantize.h. The entries are 32 vectors of odd integers,
// each with its signs flipped in pairs, so registers hold them, and a vector of bytes gives the codes of every fourth column at
// once. A code is 2 v - 63 with v of six bits, and flipping all bits of v changes its sign.
#pragma once

#include "float_dot.h"
#include "quantize.h"

namespace {

// A block of x times Sylvester's matrix.
inline void transform(float* x, int64_t size) {
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t start = 0; start < size; start += 2 * half)
            for (int64_t i = start; i < start + half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}

// A row of x, block by block times S H S.
inline void rotate(const Weight& w, float* x) {
    float factor = 1 / __builtin_sqrtf(w.rotation);
    for (int64_t k = 0; k < w.k; k += w.rotation) {
        for (int64_t i = 0; i < w.rotation; i++) x[k + i] *= w.signs[i] * factor;
        transform(x + k, w.rotation);
        for (int64_t i = 0; i < w.rotation; i++) x[k + i] *= w.signs[i];
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)

constexpr int64_t VECTOR_STEP = 4 * WIDTH;  // columns of a vector of bytes
constexpr int VECTOR_ROWS = 2;  // of the weight that are multiplied together
constexpr int VECTOR_TASK = 8;  // rows, one pair after the other
constexpr int64_t VECTOR_MAX_ROWS = 4;  // of x

inline bool fits_vector_dot(const Weight& w, int64_t rows) {
    return rows <= VECTOR_MAX_ROWS && w.n >= VECTOR_TASK && w.group % VECTOR_STEP == 0;
}

// Of every fourth column, what 16 bytes of bits 0 to 3, 16 with bit 7 set, and bits 4 to 6 contribute to v.
struct VectorCodes {
    __m256i low[4], high[4], flips[4];

    explicit VectorCodes(const uint32_t* vectors) {
        for (int i = 0; i < 4; i++) {
            alignas(16) uint8_t bytes[3][16];
            auto v = [&](int byte) { return ((int8_t)(vectors[byte] >> 8 * i) + 63) / 2; };
            for (int b = 0; b < 16; b++) bytes[0][b] = v(b), bytes[1][b] = v(b + 128), bytes[2][b] = v(b % 8 * 16) ^ v(0);
            auto both = [&](int t) { return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes[t])); };
            low[i] = both(0), high[i] = both(1), flips[i] = both(2);
        }
    }
};

// x in slices: bytes (M, slices, 4, K / 4), the columns i, i + 4, ... together; shifts (M, slices, groups), 63 times the sums
// of x in the lanes where those of its products are; scale (M), of the last slice.
struct VectorInput {
    int8_t* bytes;
    Ints* shifts;
    float* scale;
};

INLINE __m256i bytes_at(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Row m of x, in the slices of quantize.h, each 254 times as large as the next.
template <int SLICES>
void slice_vectors(const Weight& w, const float* x, int64_t m, const VectorInput& out) {
    int64_t quarter = w.k / 4;
    int8_t* bytes = out.bytes + m * SLICES * w.k;
    float scale[SLICES];
    each_slice(x, w.k, SLICES, scale, [&](int64_t k, int64_t s, Ints codes) {
        for (int i = 0; i < LANES; i++) bytes[(s * 4 + i % 4) * quarter + (k + i) / 4] = codes[i];
    });
    out.scale[m] = scale[SLICES - 1];
    const Ints ones = (Ints)(Bytes{} + (uint8_t)1), pairs = (Ints)(Shorts{} + (uint16_t)63);
    for (int64_t s = 0; s < SLICES; s++)
        for (int64_t g = 0; g < w.groups; g++) {
            Ints sum = {};
            for (int64_t j = g * w.group / 4; j < (g + 1) * w.group / 4; j += WIDTH)
                for (int i = 0; i < 4; i++) sum += multiply_pairs(multiply_bytes(ones, load<Ints>(bytes + (s * 4 + i) * quarter + j)), pairs);
            out.shifts[(m * SLICES + s) * w.groups + g] = sum;
        }
}

// VECTOR_ROWS rows of the weight with M of x; result (R, M).
template <int M, int SLICES>
void vector_block(const Weight& w, const VectorCodes& table, const uint8_t* codes, const float* scale, Ahead ahead,
                  const VectorInput& in, float* result) {
    constexpr int R = VECTOR_ROWS;
    const __m256i ones = _mm256_set1_epi16(1), of_base = _mm256_set1_epi8((char)0x8f), top = _mm256_set1_epi8((char)0x80),
                  of_signs = _mm256_set1_epi8(7);
    int64_t quarter = w.k / 4;
    Floats total[R][M] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        __m256i sums[R][M][SLICES] = {};
        for (int64_t j = g * w.group / 4; j < (g + 1) * w.group / 4; j += WIDTH) {
            __m256i first[R], signs[R];
            ahead.fetch<1>();
            UNROLL for (int r = 0; r < R; r++) {
                __m256i byte = bytes_at(codes + r * w.row_bytes + j);
                first[r] = _mm256_and_si256(byte, of_base);
                signs[r] = _mm256_and_si256(_mm256_srli_epi16(byte, 4), of_signs);
            }
            UNROLL for (int half = 0; half < 4; half += 2) {
                // Four products of at most 61 and 127 fit into 16 bits.
                __m256i pairs[R][M][SLICES];
                UNROLL for (int i = 0; i < 2; i++)
                    UNROLL for (int r = 0; r < R; r++) {
                        // Where the uppermost bit is set, a shuffle gives zero.
                        __m256i low = _mm256_shuffle_epi8(table.low[half + i], first[r]);
                        __m256i high = _mm256_shuffle_epi8(table.high[half + i], _mm256_xor_si256(first[r], top));
                        __m256i flips = _mm256_shuffle_epi8(table.flips[half + i], signs[r]);
                        __m256i v = _mm256_xor_si256(_mm256_xor_si256(low, high), flips);
                        UNROLL for (int m = 0; m < M; m++)
                            UNROLL for (int s = 0; s < SLICES; s++) {
                                __m256i product = _mm256_maddubs_epi16(v, bytes_at(in.bytes + ((m * SLICES + s) * 4 + half + i) * quarter + j));
                                pairs[r][m][s] = i ? _mm256_add_epi16(pairs[r][m][s], product) : product;
                            }
                    }
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int s = 0; s < SLICES; s++) sums[r][m][s] = _mm256_add_epi32(sums[r][m][s], _mm256_madd_epi16(pairs[r][m][s], ones));
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++) {
                Floats sum = {};
                UNROLL for (int s = 0; s < SLICES; s++) {
                    Ints exact = 2 * (Ints)sums[r][m][s] - in.shifts[(m * SLICES + s) * w.groups + g];
                    sum = s ? fma(sum, broadcast(254), to_floats(exact)) : to_floats(exact);
                }
                total[r][m] = fma(sum, broadcast(scale[r * w.groups + g]), total[r][m]);
            }
    }
    finish_block(total, in.scale, nullptr, nullptr, w.groups, result);
}

template <int M, int SLICES>
void vector_dot(const Weight& w, const VectorInput& in, const Output& y, int64_t threads) {
    constexpr int R = VECTOR_TASK;
    VectorCodes table(w.vectors);
    parallel((w.n + R - 1) / R, threads, [&](Tasks& tasks) {
        static thread_local Scratch scale_scratch;
        float* scale = scale_scratch.get<float>(R * w.groups);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            // The last block begins earlier, so that it is whole.
            int64_t start = task * R + R <= w.n ? task * R : w.n - R, skip = task * R - start;
            scales(w, start, scale, R);
            float result[R * M];
            for (int r = 0; r < R; r += VECTOR_ROWS) {
                Ahead ahead{w.codes + (start + r + R) * w.row_bytes, VECTOR_ROWS * WIDTH};
                vector_block<M, SLICES>(w, table, w.codes + (start + r) * w.row_bytes, scale + r * w.groups, ahead, in, result + r * M);
            }
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
    static thread_local Scratch byte_scratch, shift_scratch;
    float scale[VECTOR_MAX_ROWS];
    VectorInput in{byte_scratch.get<int8_t>(rows * slices * w.k), shift_scratch.get<Ints>(rows * slices * w.groups), scale};
    for (int64_t m = 0; m < rows; m++) (slices == 2 ? slice_vectors<2> : slice_vectors<3>)(w, x + m * ld, m, in);
    using Multiply = void (*)(const Weight&, const VectorInput&, const Output&, int64_t);
    static constexpr Multiply BY_ROWS[2][4] = {{vector_dot<1, 2>, vector_dot<2, 2>, vector_dot<3, 2>, vector_dot<4, 2>},
                                               {vector_dot<1, 3>, vector_dot<2, 3>, vector_dot<3, 3>, vector_dot<4, 3>}};
    BY_ROWS[slices - 2][rows - 1](w, in, y, threads);
    return true;
}

#else

inline bool multiply_vector_dot(const Weight&, const float*, int64_t, int64_t, int64_t, const Output&, int64_t) { return false; }

#endif

}  // namespace
