// LANES numbers to codes of float8 and back, as torch converts them.
#pragma once

#include "simd.h"

namespace {

struct Float8 {
    int mantissa, bias;  // bits, and what is added to an exponent
    float largest;

    // The largest code of a number, and NaN above it; e5m2 has an infinity between them.
    int32_t special() const { return mantissa == 3 ? 0x7f : 0x7c; }
};

constexpr Float8 E4M3_FORMAT{3, 7, 448}, E5M2_FORMAT{2, 15, 57344};

constexpr int32_t FLOAT_MAGNITUDE = 0x7fffffff, FLOAT_INFINITE = 0x7f800000;

// Of numbers of at most the largest magnitude, to nearest even, or NaN.
INLINE Ints to_float8(const Float8& format, Floats x) {
    Ints bits = (Ints)x, magnitude = bits & FLOAT_MAGNITUDE;
    int shift = 23 - format.mantissa;
    Ints normal = ((magnitude + ((1 << (shift - 1)) - 1) + (magnitude >> shift & 1)) >> shift) - ((127 - format.bias) << format.mantissa);
    // Below the smallest normal number, multiples of the smallest of all.
    int32_t unit_bits = (127 + format.bias - 1 + format.mantissa) << 23;
    Ints small = magnitude < ((128 - format.bias) << 23), nan = magnitude > FLOAT_INFINITE;
    // Others are too large to be rounded to an integer.
    Ints subnormal = round_to_ints((Floats)(magnitude & small) * broadcast(load<float>(&unit_bits)));
    Ints code = (subnormal & small) | (normal & ~small);
    return (code & ~nan) | (nan & 0x7f) | (bits >> 24 & 0x80);
}

// LANES codes.
INLINE Floats from_float8(const Float8& format, const uint8_t* p) {
#if defined(__AVX512F__)
    if (format.mantissa == 3) {  // moved to where fp16 has exponent and mantissa; its exponent begins 8 lower
        __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
        __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(bits, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x3f80));
        Floats x = (Floats)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbf80))) * broadcast(256);
        return (Floats)_mm512_mask_or_epi32((__m512i)x, nan, (__m512i)x, _mm512_set1_epi32(FLOAT_MAGNITUDE));
    }
#endif
    Ints code = widen(p), magnitude = code & 0x7f;
    int32_t unit_bits = (128 - format.bias - format.mantissa) << 23;
    Ints subnormal = (Ints)(to_floats(magnitude) * broadcast(load<float>(&unit_bits)));
    Ints normal = (magnitude << (23 - format.mantissa)) + ((127 - format.bias) << 23);
    Ints small = magnitude < (1 << format.mantissa), special = magnitude >= format.special();
    Ints bits = (subnormal & small) | (normal & ~small & ~special);
    bits |= special & (FLOAT_INFINITE | (magnitude - 0x7c) << 21);
    return (Floats)(bits | (code & 0x80) << 24);
}

}  // namespace
