// Vectors of the width that this file is compiled for, and the few operations that the kernels need.
//
// GCC's vector extensions give the arithmetic on any machine; intrinsics are used where those give bad code.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 16;
constexpr int REGISTERS = 32;
#else
constexpr int WIDTH = 16;
constexpr int REGISTERS = 16;
#endif
constexpr int LANES = WIDTH / 4;

typedef float Floats __attribute__((vector_size(WIDTH)));
typedef int32_t Ints __attribute__((vector_size(WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(WIDTH)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

template <class V, class T>
INLINE V load(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
INLINE void store(T* p, V v) {
    memcpy(p, &v, sizeof v);
}

INLINE Floats broadcast(float a) {
    // Subtracting zero changes nothing, which compilers know; adding it would turn -0 into 0.
    return a - Floats{};
}

// All bits of the first `count` bytes, none of the others.
INLINE Bytes first_bytes(int64_t count) {
    Bytes order;
    for (int i = 0; i < WIDTH; i++) order[i] = i;
    return order < Bytes{} + (uint8_t)count;
}

INLINE Floats to_floats(Ints a) {
    return __builtin_convertvector(a, Floats);
}

INLINE Ints to_ints(Floats a) {
    return __builtin_convertvector(a, Ints);
}

// Into all caches, or all but the nearest.
template <bool NEAREST = true>
INLINE void prefetch(const void* p) {
    __builtin_prefetch(p, 0, NEAREST ? 3 : 2);
}

// The same once `at` is computed. Compilers put the prefetches of a loop together, and many at once delay the loads that are
// needed now.
template <bool NEAREST = true, class T>
INLINE void prefetch_after(T& at, const void* p) {
#if defined(__x86_64__)
    if (NEAREST) asm volatile("prefetcht0 %1" : "+v"(at) : "m"(*(const char*)p));
    else asm volatile("prefetcht1 %1" : "+v"(at) : "m"(*(const char*)p));
#else
    prefetch<NEAREST>(p);
#endif
}

// a * b + c, rounded once where the machine can.
INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE Floats round_even(Floats x) {
    // Adding 1.5 * 2^23 leaves no bits for a fraction; exact for what is within the range of a code, and more.
    Floats magic = broadcast(12582912.0f);
    return (x + magic) - magic;
}

// b where either is NaN, as the instructions have it.
INLINE Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return (Floats)(((Ints)a & (a < b)) | ((Ints)b & ~(a < b)));
#endif
}

INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (Floats)(((Ints)a & (a > b)) | ((Ints)b & ~(a > b)));
#endif
}

// To the nearest integer, to the even one of two.
INLINE Ints round_to_ints(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
    return to_ints(round_even(x));
#endif
}

INLINE Ints larger(Ints a, Ints b) {
    return (a & (a > b)) | (b & ~(a > b));
}

// The LANES lowest bytes of all lanes.
INLINE void store_bytes(int8_t* to, Ints a) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)a));
#elif defined(__AVX2__)
    __m256i bytes = _mm256_shuffle_epi8((__m256i)a, _mm256_set1_epi32(0x0c080400));
    _mm_storel_epi64((__m128i*)to, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
    for (int i = 0; i < LANES; i++) to[i] = a[i];
#endif
}

// LANES signed bytes.
INLINE Ints widen(const int8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__SSE4_1__)
    return (Ints)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(load<int32_t>(p)));
#elif defined(__aarch64__)
    int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(load<int32_t>(p)));
    return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
#else
    Ints v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

// LANES unsigned bytes.
INLINE Ints widen(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return widen((const int8_t*)p) & 255;
#endif
}

// LANES unsigned 16-bit numbers.
INLINE Ints widen(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    Ints v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

// numbers[at[lane]]
INLINE Floats look_up(const float* numbers, Ints at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_i32gather_ps((__m512i)at, numbers, 4);
#elif defined(__AVX2__)
    return (Floats)_mm256_i32gather_ps(numbers, (__m256i)at, 4);
#else
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = numbers[at[i]];
    return out;
#endif
}

// Numbers of 4-bit codes: (code - center) * scale.
struct Nibbles {
#if defined(__AVX512F__)
    Floats numbers;

    Nibbles() = default;

    explicit Nibbles(int center) {
        for (int i = 0; i < LANES; i++) numbers[i] = i - center;
    }

    INLINE Nibbles(const Nibbles& unscaled, float scale) : numbers(unscaled.numbers * broadcast(scale)) {}

    // Those of the lowest 4 bits of each lane, all others of which may be anything.
    INLINE Floats low(Ints bits) const { return (Floats)_mm512_permutexvar_ps((__m512i)bits, (__m512)numbers); }
#else
    Floats scale, offset;

    Nibbles() = default;

    explicit Nibbles(int center) : scale(broadcast(1)), offset(broadcast(-center)) {}

    INLINE Nibbles(const Nibbles& unscaled, float scale_) : scale(broadcast(scale_)), offset(unscaled.offset * scale) {}

    INLINE Floats low(Ints bits) const { return fma(to_floats(bits & 15), scale, offset); }
#endif
};

INLINE float sum(Floats a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)a);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += a[i];
    return total;
#endif
}

// to[i] = sum(rows[i]), bit for bit; four at once where that takes fewer instructions.
INLINE void sum_rows(const Floats* rows, int count, float* to) {
    int i = 0;
#if defined(__AVX512F__)
    auto quarter = [](Floats a) {
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1));
        return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    };
    auto pairs = [](__m128 a, __m128 b) { return _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)); };
    UNROLL for (; i + 4 <= count; i += 4) {
        __m128 a = pairs(quarter(rows[i]), quarter(rows[i + 1])), b = pairs(quarter(rows[i + 2]), quarter(rows[i + 3]));
        _mm_storeu_ps(to + i, _mm_add_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd)));
    }
#endif
    for (; i < count; i++) to[i] = sum(rows[i]);
}

INLINE float largest(Floats a) {
    float high = a[0];
    for (int i = 1; i < LANES; i++) high = a[i] > high ? a[i] : high;
    return high;
}

INLINE int32_t largest(Ints a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)a);
#endif
    int32_t high = a[0];
    for (int i = 1; i < LANES; i++) high = a[i] > high ? a[i] : high;
    return high;
}

INLINE int32_t sum(Ints a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)a);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += a[i];
    return total;
#endif
}

#if defined(__SSSE3__)
// In 16 bits, the sums of two products each of unsigned bytes with signed ones, which have to fit.
INLINE Ints multiply_bytes(Ints unsigned_bytes, Ints signed_bytes) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVX2__)
    return (Ints)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
#else
    return (Ints)_mm_maddubs_epi16((__m128i)unsigned_bytes, (__m128i)signed_bytes);
#endif
}

// Sums of two products each of signed 16-bit numbers.
INLINE Ints multiply_pairs(Ints a, Ints b) {
#if defined(__AVX512F__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

#if defined(__AVX2__)
// Lane i is lane order[i] of v.
INLINE Floats permute(Floats v, Ints order) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)order, (__m512)v);
#else
    return (Floats)_mm256_permutevar8x32_ps((__m256)v, (__m256i)order);
#endif
}

// The bytes that codes below 16 stand for.
INLINE Bytes look_up(const uint8_t (&bytes)[16], Bytes codes) {
    __m128i table = _mm_loadu_si128((const __m128i*)bytes);
#if defined(__AVX512F__)
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#else
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#endif
}

// WIDTH / 2 signed bytes to 16 bits.
INLINE Shorts widen_to_shorts(const int8_t* p) {
#if defined(__AVX512F__)
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#else
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#endif
}
#endif

// Swaps what lies off the diagonal of each 2 x 2 block of blocks of D lanes, in rows a and b that are D apart.
template <int D, class V, int... J>
INLINE void swap_blocks(V& a, V& b, std::integer_sequence<int, J...>) {
    V top = __builtin_shufflevector(a, b, (J & D ? LANES + (J ^ D) : J)...);
    b = __builtin_shufflevector(a, b, (J & D ? LANES + J : J ^ D)...);
    a = top;
}

template <int D = 1, class V>
INLINE void transpose(V (&rows)[LANES]) {
    UNROLL for (int i = 0; i < LANES; i++)
        if (!(i & D)) swap_blocks<D>(rows[i], rows[i | D], std::make_integer_sequence<int, LANES>{});
    if constexpr (2 * D < LANES) transpose<2 * D>(rows);
}

// The sums of the first halves of the lanes of rows[i], and of the second ones, in lane i of rows[0] and of rows[LANES / 2].
template <int D = 1, class V>
INLINE void sum_halves(V (&rows)[LANES]) {
    UNROLL for (int i = 0; i < LANES; i += 2 * D) {
        swap_blocks<D>(rows[i], rows[i + D], std::make_integer_sequence<int, LANES>{});
        if constexpr (2 * D < LANES) rows[i] += rows[i + D];
    }
    if constexpr (2 * D < LANES) sum_halves<2 * D>(rows);
}

// A vector whose lane i is the sum of the lanes of rows[i]; the rows are used up.
template <class V>
INLINE V sum_each(V (&rows)[LANES]) {
    sum_halves(rows);
    return rows[0] + rows[LANES / 2];
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_VNNI 1
// To each lane of `total`, the products of four unsigned bytes with four signed ones. Exact: it wraps, never saturates.
INLINE Ints dot4(Ints total, Ints unsigned_bytes, Ints signed_bytes) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
#endif
}
#endif

}  // namespace

#if defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#endif
