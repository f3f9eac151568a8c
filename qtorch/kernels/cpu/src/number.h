// The types of numbers that tensors hold, and their conversion to and from fp32.
#pragma once

#include "simd.h"

namespace {

// As in qtorch/kernels/cpu/compiled_library.py and weight.py.
// EXPONENT, of scales alone: 2^(byte - 127), 255 is no number.
enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT32, INT8, UINT8, EXPONENT = 8 };

// Magnitudes as integers are in the same order, with infinity and then NaN above all numbers.
constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

// Powers of two that scales of weights are divided by, and products multiplied with in the end; as in
// ../../ops/int8_grouped_mm.py.
INLINE Floats scale_up(Floats scale) { return scale > 0x1p80f ? broadcast(0x1p48f) : broadcast(1); }

INLINE float half_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    // Exponents are moved by a multiplication, which makes subnormal numbers normal too.
    uint32_t shifted = magnitude << 13;
    float value = load<float>(&shifted) * 0x1p112f;
    uint32_t out = load<uint32_t>(&value) | sign;
    if (magnitude >= 0x7c00) out = shifted | 0x7f800000 | sign;
    return load<float>(&out);
}

INLINE uint16_t float_to_half(float value) {
    uint32_t bits = load<uint32_t>(&value);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {
        // Subnormal: adding 0.5 leaves the units of 2^-24 in the low bits, rounded to nearest even.
        float moved = load<float>(&magnitude) + 0.5f;
        return sign | (load<uint32_t>(&moved) - 0x3f000000);
    }
    uint32_t odd = magnitude >> 13 & 1;
    return sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13;
}

INLINE float bfloat_to_float(uint16_t bits) {
    uint32_t out = (uint32_t)bits << 16;
    return load<float>(&out);
}

INLINE uint16_t float_to_bfloat(float value) {
    uint32_t bits = load<uint32_t>(&value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// `count` numbers of a type as fp32.
inline void to_float(const void* from, int64_t type, int64_t count, float* to) {
    int64_t i = 0;
    switch (type) {
        case FLOAT32: memcpy(to, from, count * 4); return;
        case BFLOAT16: {
            auto p = (const uint16_t*)from;
            for (; i + LANES <= count; i += LANES) store(to + i, widen(p + i) << 16);
            for (; i < count; i++) to[i] = bfloat_to_float(p[i]);
            return;
        }
        case FLOAT16: {
            auto p = (const uint16_t*)from;
#if defined(__AVX512F__)
            for (; i + 16 <= count; i += 16) store(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + i))));
#elif defined(__F16C__)
            for (; i + 8 <= count; i += 8) store(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i))));
#endif
            for (; i < count; i++) to[i] = half_to_float(p[i]);
            return;
        }
        case INT32:
            for (; i < count; i++) to[i] = ((const int32_t*)from)[i];
            return;
        case INT8:
            for (; i + LANES <= count; i += LANES) store(to + i, to_floats(widen((const int8_t*)from + i)));
            for (; i < count; i++) to[i] = ((const int8_t*)from)[i];
            return;
        case EXPONENT: {
            auto p = (const uint8_t*)from;
            for (; i + LANES <= count; i += LANES) {
                Ints byte = widen(p + i);
                store(to + i, byte << 23 | (((byte == 0) | (byte == 255)) & 1 << 22));
            }
            for (; i < count; i++) {
                uint32_t bits = p[i] << 23 | (p[i] == 0 || p[i] == 255) << 22;
                memcpy(to + i, &bits, 4);
            }
            return;
        }
        default:
            for (; i + LANES <= count; i += LANES) store(to + i, to_floats(widen((const uint8_t*)from + i)));
            for (; i < count; i++) to[i] = ((const uint8_t*)from)[i];
    }
}

// LANES fp32 numbers to bf16 and fp16, where the machine does it at once; how many were converted.
INLINE int64_t round_vector(const float* from, int64_t type, uint16_t* to) {
#if defined(__AVX2__)
    if (type == BFLOAT16) {
        Ints bits = load<Ints>(from);
        Ints rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff, nan = (bits & 0x7fffffff) > 0x7f800000;
        rounded = (rounded & ~nan) | (nan & 0x7fc0);
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
        __m256i packed = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
        _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#endif
        return LANES;
    }
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
    return LANES;
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
    return LANES;
#endif
#endif
    return 0;
}

// `count` fp32 numbers, rounded to a floating-point type.
inline void from_float(const float* from, int64_t type, int64_t count, void* to) {
    if (type == FLOAT32) {
        memcpy(to, from, count * 4);
        return;
    }
    auto out = (uint16_t*)to;
    int64_t i = 0;
    while (i + LANES <= count) {
        int64_t done = round_vector(from + i, type, out + i);
        if (!done) break;
        i += done;
    }
    for (; type == BFLOAT16 && i < count; i++) out[i] = float_to_bfloat(from[i]);
    for (; type == FLOAT16 && i < count; i++) out[i] = float_to_half(from[i]);
}

INLINE int64_t size_of(int64_t type) {
    return type == FLOAT32 || type == INT32 ? 4 : type == INT8 || type == UINT8 || type == EXPONENT ? 1 : 2;
}

INLINE int64_t round_up(int64_t a, int64_t b) {
    return (a + b - 1) / b * b;
}

}  // namespace
