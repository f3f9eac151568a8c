// Codes that are no integers: numbers of a table, among them floating-point numbers of few bits.
//
//     w[n, k] = values[n, code[n, k]] * scale[n, g]
//
// A reader turns LANES codes into fp32 numbers. Up to 4 bits the table lies in registers; numbers of 5 to 8 bits with an
// exponent are computed; those of other tables are loaded.
#pragma once

#include "weight.h"

namespace {

// Up to 16 numbers, multiplied by a scale.
struct Sixteen {
#if defined(__AVX512F__)
    Floats numbers;

    Sixteen() = default;

    explicit Sixteen(const float* table) : numbers(load<Floats>(table)) {}

    INLINE Sixteen(const Sixteen& unscaled, float scale) : numbers(unscaled.numbers * broadcast(scale)) {}

    // Those of the lowest 4 bits of each lane, all others of which may be anything.
    INLINE Floats low(Ints bits) const { return (Floats)_mm512_permutexvar_ps((__m512i)bits, (__m512)numbers); }
#elif defined(__AVX2__)
    Floats first, second;

    Sixteen() = default;

    explicit Sixteen(const float* table) : first(load<Floats>(table)), second(load<Floats>(table + 8)) {}

    INLINE Sixteen(const Sixteen& unscaled, float scale) : first(unscaled.first * broadcast(scale)), second(unscaled.second * broadcast(scale)) {}

    INLINE Floats low(Ints bits) const {
        __m256 a = _mm256_permutevar8x32_ps((__m256)first, (__m256i)bits), b = _mm256_permutevar8x32_ps((__m256)second, (__m256i)bits);
        return (Floats)_mm256_blendv_ps(a, b, (__m256)(bits << 28));
    }
#else
    float numbers[16];

    Sixteen() = default;

    explicit Sixteen(const float* table) { memcpy(numbers, table, sizeof numbers); }

    INLINE Sixteen(const Sixteen& unscaled, float scale) {
        for (int i = 0; i < 16; i++) numbers[i] = unscaled.numbers[i] * scale;
    }

    INLINE Floats low(Ints bits) const {
        Floats out;
        for (int i = 0; i < LANES; i++) out[i] = numbers[bits[i] & 15];
        return out;
    }
#endif

    INLINE Floats at(const int8_t* codes) const { return low(widen((const uint8_t*)codes)); }
};

// The codes themselves.
struct IntegerCodes {
    INLINE Floats at(const int8_t* codes) const { return to_floats(widen(codes)); }
};

// Sign, exponent and mantissa in the lowest bits.
#if defined(__AVX2__)
// They are moved to where fp16 has them, whose exponent begins elsewhere: numbers are `factor` times as large as those.
struct ComputedCodes {
    __m128i to_sign, to_exponent, kept, special;  // the last: magnitudes in fp16 above this one are no numbers
    Floats factor;

    ComputedCodes() = default;

    explicit ComputedCodes(const Weight& w) {
        to_sign = _mm_cvtsi64_si128(15 - w.mantissa - w.exponent);
        to_exponent = _mm_cvtsi64_si128(5 - w.exponent);
        kept = _mm_set1_epi16((short)(0x8000 | ((1 << (10 + w.exponent)) - 1)));
        special = _mm_set1_epi16(w.exponent < 5 ? (short)((w.special << (10 - w.mantissa)) - 1) : 0x7fff);
        Ints power = Ints{} + (int)((127 + 15 - w.bias) << 23);
        memcpy(&factor, &power, sizeof factor);
    }

    INLINE Floats at(const int8_t* codes) const {
#if defined(__AVX512F__)
        __m256i bits = _mm256_sra_epi16(_mm256_sll_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes)), to_sign), to_exponent);
        bits = _mm256_and_si256(bits, _mm256_broadcastsi128_si256(kept));
        __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff));
        __m256i lost = _mm256_cmpgt_epi16(magnitude, _mm256_broadcastsi128_si256(special));
        return (Floats)_mm512_cvtph_ps(_mm256_or_si256(bits, _mm256_srli_epi16(lost, 1))) * factor;
#else
        __m128i bits = _mm_sra_epi16(_mm_sll_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)codes)), to_sign), to_exponent);
        bits = _mm_and_si128(bits, kept);
        __m128i lost = _mm_cmpgt_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x7fff)), special);
        return (Floats)_mm256_cvtph_ps(_mm_or_si128(bits, _mm_srli_epi16(lost, 1))) * factor;
#endif
    }
};
#else
struct ComputedCodes {
    int mantissa, sign, bias;
    Ints special;  // magnitudes from here on are infinite, or no numbers
    Floats smallest;  // normal number

    ComputedCodes() = default;

    explicit ComputedCodes(const Weight& w)
        : mantissa(w.mantissa), sign(w.mantissa + w.exponent), bias((127 - w.bias) << 23), special(Ints{} + (int)w.special),
          smallest(broadcast(1)) {
        Ints bits = Ints{} + (bias + (1 << 23));
        memcpy(&smallest, &bits, sizeof bits);
    }

    INLINE Floats at(const int8_t* codes) const {
        Ints code = widen((const uint8_t*)codes), magnitude = code & ((1 << sign) - 1);
        Ints normal = (magnitude << (23 - mantissa)) + bias;
        // Below the normal numbers the leading one, which is not there, is subtracted.
        Floats below = (Floats)(normal + (1 << 23)) - smallest;
        Ints small = magnitude < (1 << mantissa), lost = magnitude >= special;
        Ints bits = ((Ints)below & small) | (normal & ~small) | (lost & INFINITE);
        return (Floats)(bits | (code >> sign) << 31);
    }
};
#endif

struct LoadedCodes {
    const float* numbers;

    INLINE Floats at(const int8_t* codes) const { return look_up(numbers, widen((const uint8_t*)codes)); }
};

// body(reader) with the reader of row n.
template <class Body>
INLINE void with_reader(const Weight& w, int64_t n, const Body& body) {
    const float* table = w.values + n * w.values_stride;
    if (w.exponent) body(ComputedCodes(w));
    else if (w.values_count <= 16) body(Sixteen(table));
    else body(LoadedCodes{table});
}

// `count` decoded codes of row n in numbers, times scale.
inline void scale_values(const Weight& w, int64_t n, const int8_t* codes, int64_t count, float scale, float* out) {
    const float* table = w.values + n * w.values_stride;
    int64_t i = 0;
    with_reader(w, n, [&](const auto& reader) {
        Floats s = broadcast(scale);
        for (; i + LANES <= count; i += LANES) store(out + i, reader.at(codes + i) * s);
    });
    for (; i < count; i++) out[i] = table[(uint8_t)codes[i]] * scale;
}

}  // namespace
