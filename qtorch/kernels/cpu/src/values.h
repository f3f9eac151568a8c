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

struct LoadedCodes {
    const float* numbers;

    INLINE Floats at(const int8_t* codes) const {
        Ints code = widen((const uint8_t*)codes);
#if defined(__AVX512F__)
        return (Floats)_mm512_i32gather_ps((__m512i)code, numbers, 4);
#elif defined(__AVX2__)
        return (Floats)_mm256_i32gather_ps(numbers, (__m256i)code, 4);
#else
        Floats out;
        for (int i = 0; i < LANES; i++) out[i] = numbers[code[i]];
        return out;
#endif
    }
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
