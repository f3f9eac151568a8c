// Codes of the moments of Adam and the numbers that they stand for, bit for bit as primitives/power_codebook.py and
// primitives/affine.py compute them.
#pragma once

#include "number.h"

namespace {
namespace adam {

typedef uint32_t Words __attribute__((vector_size(WIDTH)));

constexpr int32_t SIGN = 0x80000000, MAGNITUDE_BITS = 0x7fffffff, INFINITE_BITS = 0x7f800000;

// The square root, rounded to nearest.
INLINE Floats root(Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (Floats)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
    return (Floats)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

// 1 / root(x) to 11 bits or more; that of 0 is infinite, of infinity 0.
INLINE Floats rough_inverse_root(Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_rsqrt14_ps((__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_rsqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (Floats)_mm_rsqrt_ps((__m128)x);
#else
    return broadcast(1) / root(x);
#endif
}

INLINE Floats magnitude(Floats x) {
    return (Floats)((Ints)x & MAGNITUDE_BITS);
}

// Nearly x^(1 / POWER): codes are exact if it is wrong by less than the distance from a code to the next middle.
template <int POWER>
INLINE Floats rough_root(Floats x) {
    if constexpr (POWER == 4) return rough_inverse_root(rough_inverse_root(x));
    Floats positive = larger(x, broadcast(1e-30f));
    return positive * rough_inverse_root(positive);
}

// PowerSpec: (k / STEPS)^POWER; codes of signed values have their zero at CENTER.
template <int POWER, int STEPS, int CENTER>
struct Power {
    static constexpr bool IS_FLOAT8 = false;
    static constexpr int ZERO = CENTER;
    static constexpr float INVERSE = 1.0f / STEPS, LARGEST = POWER == 4 ? (float)STEPS * STEPS * STEPS * STEPS : STEPS * STEPS;

    static INLINE Floats value(Ints code) {
        Ints k = code - CENTER;
        Floats u = to_floats(k) * INVERSE, size = u * u;
        if constexpr (POWER == 4) size = size * size;
        return CENTER ? (Floats)((Ints)size | (k & SIGN)) : size;
    }

    // Of x in [-1, 1]: the nearest value, of two the one nearer to zero.
    static INLINE Ints code(Floats x) {
        Floats size = (CENTER ? magnitude(x) : x) * LARGEST;
        Ints k = to_ints(smaller(larger(rough_root<POWER>(size), Floats{}), broadcast(STEPS - 1)));
        Floats half = to_floats(k) + 0.5f, square = half * half;
        // The middle of k^POWER and (k + 1)^POWER.
        Floats middle = POWER == 4 ? (square + 1.5f) * square + 0.0625f : square + 0.25f;
        k -= (Ints)(size > middle);
        if constexpr (CENTER == 0) return k;
        Ints negative = (Ints)x >> 31;
        return ((k ^ negative) - negative) + CENTER;
    }
};

// e4m3, the bytes of torch.float8_e4m3fn.
struct Float8 {
    static constexpr bool IS_FLOAT8 = true;
    static constexpr int ZERO = 0;

    static INLINE Floats value(Ints code) {
        Ints size = code & 0x7f;
        Floats normal = (Floats)((size << 20) + (120 << 23));
        Floats small = to_floats(size) * 0x1p-9f;
        Ints is_small = size < 8, is_nan = size == 0x7f;
        Ints bits = ((Ints)small & is_small) | ((Ints)normal & ~is_small);
        return (Floats)(bits | (is_nan & 0x7fc00000) | (code << 24 & SIGN));
    }

    // Of x in [-448, 448].
    static INLINE Ints code(Floats x) {
        Ints size = (Ints)x & MAGNITUDE_BITS;
        // 2^-6 is the smallest normal number, 2^-9 the smallest of all.
        Ints normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
        Ints small = round_to_ints((Floats)size * 512.0f), is_small = size < 0x3c800000;
        return (small & is_small) | (normal & ~is_small) | ((Ints)((Words)x >> 24) & 0x80);
    }
};

// LANES bytes.
INLINE void store_codes(uint8_t* to, Ints codes) {
    store_bytes((int8_t*)to, codes);
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// Codes of 4 bits in the order of layouts/packed.py, to bytes and back. `bytes` has room for 8 runs.
INLINE void unpack_nibbles(const uint8_t* packed, int64_t run, uint8_t* bytes) {
    for (int64_t item = 0; item < 8; item += 2, packed += run) {
        uint8_t *low = bytes + item * run, *high = low + run;
        int64_t i = 0;
        for (; i + 16 <= run; i += 16) {
            auto both = load<Bytes16>(packed + i);
            store(low + i, both & 15);
            store(high + i, both >> 4);
        }
        for (; i < run; i++) {
            low[i] = packed[i] & 15;
            high[i] = packed[i] >> 4;
        }
    }
}

INLINE void pack_nibbles(const uint8_t* bytes, int64_t run, uint8_t* packed) {
    for (int64_t item = 0; item < 8; item += 2, packed += run) {
        const uint8_t *low = bytes + item * run, *high = low + run;
        int64_t i = 0;
        for (; i + 16 <= run; i += 16) store(packed + i, load<Bytes16>(low + i) | load<Bytes16>(high + i) << 4);
        for (; i < run; i++) packed[i] = low[i] | high[i] << 4;
    }
}

}  // namespace adam
}  // namespace
