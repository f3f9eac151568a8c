// Keys or values of a cache as they lie in memory, and the numbers of their rows.
//
//     k[t, d] = code[t, d] * scale + zero,    one scale and zero a token, or a channel of `block` tokens
#pragma once

#include "number.h"

namespace {
namespace attention {

// Formats of a row: a type of `Type`, or one of these. Codes of less than 8 bits lie in the order of layouts/packed.py.
enum Format : int64_t { UINT4 = 16, FLOAT8, UINT3, UINT2 };

// Bits of packed codes, 0 of others.
inline int64_t packed_bits(int64_t format) { return format == UINT4 ? 4 : format == UINT3 ? 3 : format == UINT2 ? 2 : 0; }

struct Cached {
    const uint8_t* codes;  // (batch, heads, tokens, bytes of a row)
    int64_t format, width;
    int64_t code_batch, code_head, code_token;  // strides in bytes
    const void* scale;                          // (batch, heads, tokens), or (batch, heads, blocks, width), or null: 1
    const void* zero;                           // like scale, or null
    int64_t scale_type, scale_batch, scale_head, scale_token;  // strides in elements, those of zero too
    int64_t block;                                             // tokens that share the scales of channels, or 0

    const uint8_t* rows(int64_t b, int64_t h, int64_t t) const {
        return codes + b * code_batch + h * code_head + t * code_token;
    }

    int64_t scale_at(int64_t b, int64_t h, int64_t t) const {
        return b * scale_batch + h * scale_head + (block ? t / block : t) * scale_token;
    }

    // Codes in a run of PackedLayout.
    int64_t run() const { return (width + 7) / 8; }

    int64_t row_bytes() const {
        if (int64_t bits = packed_bits(format)) return run() * bits;
        return format == FLOAT8 ? width : width * size_of(format);
    }

    // Rows of 2 and 3 bits are unpacked to 4 bits before they are multiplied.
    bool unpacked() const { return format == UINT3 || format == UINT2; }
    int64_t read_format() const { return unpacked() ? UINT4 : format; }
    int64_t read_bytes() const { return unpacked() ? run() * 4 : row_bytes(); }

    // `count` rows of 2 or 3 bits as contiguous ones of 4 bits, eight bytes at a time: byte b of each run holds its items
    // 2 b and 2 b + 1. Up to 7 bytes behind the last row are written.
    void unpack(const uint8_t* row, int64_t count, uint8_t* out) const {
        constexpr uint64_t EACH = 0x0101010101010101;
        int64_t size = run();
        auto eight = [&](const uint8_t* p, int64_t i) {
            uint64_t word = 0;
            if (size - i >= 8) memcpy(&word, p + i, 8);
            else memcpy(&word, p + i, size - i);
            return word;
        };
        for (int64_t t = 0; t < count; t++, row += code_token)
            for (int64_t b = 0; b < 4; b++, out += size)
                for (int64_t i = 0; i < size; i += 8) {
                    uint64_t two = eight(row + b / 2 * size, i) >> b % 2 * 4;
                    uint64_t codes = (two & 3 * EACH) | (two & 12 * EACH) << 2;
                    if (format == UINT3) {
                        uint64_t one = eight(row + 2 * size, i) >> 2 * b;
                        codes |= (one & EACH) << 2 | (one & 2 * EACH) << 5;
                    }
                    memcpy(out + i, &codes, 8);
                }
    }
};

// A row is read in units of two vectors of numbers. Their order is that in which the bytes are met: of 4-bit codes, the
// low halves of a vector's bytes come before the high ones. Queries are brought into this order, results out of it.
template <int FORMAT>
constexpr int UNIT_BYTES = FORMAT == UINT4 ? LANES : FORMAT == FLOAT32 ? 8 * LANES : FORMAT >= INT8 ? 2 * LANES : 4 * LANES;

inline int64_t unit_bytes(int64_t format) {
    return format == UINT4 ? LANES : 2 * LANES * (format == FLOAT8 ? 1 : size_of(format));
}

// Numbers of a row, in whole units.
inline int64_t slots_of(const Cached& rows) {
    int64_t unit = unit_bytes(rows.read_format());
    return round_up(rows.read_bytes(), unit) / unit * 2 * LANES;
}

// The slot of channel d.
inline int64_t slot_of(const Cached& rows, int64_t d) {
    if (rows.read_format() != UINT4) return d;
    int64_t run = rows.run(), item = d / run, byte = item / 2 * run + d % run;
    return byte / LANES * 2 * LANES + item % 2 * LANES + byte % LANES;
}

// 2^-8 times the numbers of LANES codes of e4m3, NaN apart, whose rows have scales that are NaN: as fp16 they have the
// same significand, and an exponent that is less by 8.
constexpr float FLOAT8_UNIT = 256;

INLINE Floats eighths(const uint8_t* p) {
#if defined(__AVX512F__)
    __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7f)), 7);
    return (Floats)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x7f)), 7);
    return (Floats)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    return v;
#endif
}

INLINE Floats halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

// The numbers of a unit at p.
template <int FORMAT>
struct Unit {
    Floats a, b;

    INLINE explicit Unit(const uint8_t* p) {
        if constexpr (FORMAT == UINT4) {
            Ints bits = widen(p);
#if defined(__AVX512F__)
            const Nibbles numbers(0);
            a = numbers.low(bits);
            b = numbers.low(bits >> 4);
#else
            a = to_floats(bits & 15);
            b = to_floats(bits >> 4);
#endif
        } else if constexpr (FORMAT == INT8) {
            a = to_floats(widen((const int8_t*)p));
            b = to_floats(widen((const int8_t*)p + LANES));
        } else if constexpr (FORMAT == FLOAT8) {
            a = eighths(p);
            b = eighths(p + LANES);
        } else if constexpr (FORMAT == FLOAT32) {
            a = load<Floats>(p);
            b = load<Floats>(p + 4 * LANES);
        } else if constexpr (FORMAT == BFLOAT16) {
            a = (Floats)(widen((const uint16_t*)p) << 16);
            b = (Floats)(widen((const uint16_t*)p + LANES) << 16);
        } else {
            a = halves((const uint16_t*)p);
            b = halves((const uint16_t*)p + LANES);
        }
    }
};

// The end of a row that is no whole unit, with zeros behind it.
template <int FORMAT>
struct Rest {
    uint8_t bytes[UNIT_BYTES<FORMAT>] = {};

    INLINE Rest(const uint8_t* p, int64_t count) { memcpy(bytes, p, count); }
};

// Scales, or zeros, of a number of tokens, or of the channels of a block. FLOAT8_UNIT is in the scales.
inline void scales_of(const Cached& rows, const void* numbers, int64_t at, int64_t count, float* out) {
    to_float((const char*)numbers + at * size_of(rows.scale_type), rows.scale_type, count, out);
}

}  // namespace attention
}  // namespace
