// Codes that are no integers: numbers of a table, among them floating-point numbers of few bits.
//
//     w[n, k] = values[n, g, code[n, k]] * scale[n, g]
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

    INLINE void use(const float* table) { *this = Sixteen(table); }

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
        __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes)), all = _mm256_set1_epi16(0x7fff);
        bits = _mm256_srav_epi16(_mm256_sllv_epi16(bits, _mm256_broadcastw_epi16(to_sign)), _mm256_broadcastw_epi16(to_exponent));
        bits = _mm256_and_si256(bits, _mm256_broadcastsi128_si256(kept));
        __mmask16 lost = _mm256_cmpgt_epi16_mask(_mm256_and_si256(bits, all), _mm256_broadcastsi128_si256(special));
        return (Floats)_mm512_cvtph_ps(_mm256_mask_mov_epi16(bits, lost, all)) * factor;
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
    int last;  // of them; damaged codes may be larger

    INLINE void use(const float* table) { numbers = table; }

    INLINE Floats at(const int8_t* codes) const { return look_up(numbers, widen((const uint8_t*)codes) & last); }
};

// The tables of row n for `columns` from `at` on, `values_stride` numbers apart. What is read behind them is memory.
inline const float* tables_of(const Weight& w, int64_t n, GroupEdge at, int64_t columns, Scratch& scratch) {
    if (!w.values_stride) return (const float*)w.values;
    int64_t skipped = n * w.groups + at.group, groups = 1;
    if (columns > at.left) groups += (uint32_t)(columns - at.left + at.size - 1) / (uint32_t)at.size;
    int64_t count = groups * w.values_stride;
    float* tables = scratch.get<float>(count);
    to_float((const char*)w.values + skipped * w.values_stride * size_of(w.values_type), w.values_type, count, tables);
    return tables;
}

// How many vectors of numbers `read` gives at once: one, or those of WIDTH bytes.
template <class Reader>
constexpr int VECTORS = 1;

template <class Reader>
INLINE void read(Reader& reader, const int8_t* codes, Floats (&out)[1]) {
    out[0] = reader.at(codes);
}

// Columns of x in the order in which `read` gives those of codes.
template <class Reader>
INLINE void order_columns(float*, int64_t) {}

// A reader that is made anew for each group, from the tables of a row; of one table all are the first.
template <class Reader>
struct OfTables : Reader {
    const float* tables;
    int64_t step;

    OfTables() = default;

    OfTables(const Reader& reader, const float* tables_, int64_t step_) : Reader(reader), tables(tables_), step(step_) {}

    INLINE OfTables(const OfTables& unscaled, float scale) : Reader(unscaled, scale) {}
};

template <class Reader>
constexpr int VECTORS<OfTables<Reader>> = VECTORS<Reader>;

template <class Reader>
INLINE void enter_group(Reader&, int64_t) {}

template <class Reader>
INLINE void enter_group(OfTables<Reader>& reader, int64_t g) {
    if (reader.step) reader.use(reader.tables + g * reader.step);
}

// What is left to do with a sum when all codes of a row are read.
template <class Reader>
INLINE void finish(const Reader&, Floats&) {}

#if defined(__AVX2__) && !defined(__AVX512F__)

// As `Sixteen`. A permutation of floats takes four times as long as one of bytes, on a Zen 2.
struct WideSixteen {
    __m256i planes[4];  // a byte of each number, twice

    WideSixteen() = default;

    explicit WideSixteen(const float* table) {
        const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        __m128i four[4];
        UNROLL for (int i = 0; i < 4; i++) four[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table + i), order);
        __m128i a = _mm_unpacklo_epi32(four[0], four[1]), b = _mm_unpacklo_epi32(four[2], four[3]);
        __m128i c = _mm_unpackhi_epi32(four[0], four[1]), d = _mm_unpackhi_epi32(four[2], four[3]);
        planes[0] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(a, b));
        planes[1] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(a, b));
        planes[2] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(c, d));
        planes[3] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(c, d));
    }

    INLINE void use(const float* table) { *this = WideSixteen(table); }

    INLINE void at(__m256i codes, Floats (&out)[4]) const {
        const __m256i* p = planes;
        asm("" : "+r"(p));  // they are read again: keeping them would take registers
        __m256i bytes[4];
        UNROLL for (int i = 0; i < 4; i++) bytes[i] = _mm256_shuffle_epi8(p[i], codes);
        UNROLL for (int i = 0; i < 2; i++) {
            __m256i low = i ? _mm256_unpackhi_epi8(bytes[0], bytes[1]) : _mm256_unpacklo_epi8(bytes[0], bytes[1]);
            __m256i high = i ? _mm256_unpackhi_epi8(bytes[2], bytes[3]) : _mm256_unpacklo_epi8(bytes[2], bytes[3]);
            out[2 * i] = (Floats)_mm256_unpacklo_epi16(low, high);
            out[2 * i + 1] = (Floats)_mm256_unpackhi_epi16(low, high);
        }
    }
};

template <>
constexpr int VECTORS<WideSixteen> = 4;

INLINE void read(const WideSixteen& reader, const int8_t* codes, Floats (&out)[4]) {
    reader.at(_mm256_loadu_si256((const __m256i*)codes), out);
}

// Of packed 4-bit codes, those in the low or the high halves of bytes.
INLINE void read_half(const WideSixteen& reader, const int8_t* codes, int half, Floats (&out)[4]) {
    asm("" : "+r"(codes));  // as above
    __m256i bytes = _mm256_loadu_si256((const __m256i*)codes);
    reader.at(_mm256_and_si256(half ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15)), out);
}

template <>
INLINE void order_columns<WideSixteen>(float* x, int64_t count) {
    for (; count > 0; x += WIDTH, count -= WIDTH) {
        __m256 v[4];
        UNROLL for (int i = 0; i < 4; i++) v[i] = _mm256_loadu_ps(x + 8 * i);
        UNROLL for (int i = 0; i < 2; i++) {
            _mm256_storeu_ps(x + 16 * i, _mm256_permute2f128_ps(v[i], v[i + 2], 0x20));
            _mm256_storeu_ps(x + 16 * i + 8, _mm256_permute2f128_ps(v[i], v[i + 2], 0x31));
        }
    }
}

// As `ComputedCodes`. Codes that are no numbers are found when all of a row are read.
struct WideComputed {
    __m128i to_sign, to_exponent;
    __m256i kept, special, largest = {};  // magnitudes in the highest bits: the least that is no number, and the largest so far
    Floats factor;

    WideComputed() = default;

    explicit WideComputed(const Weight& w) : factor(ComputedCodes(w).factor) {
        int64_t unused = 7 - w.mantissa - w.exponent, least = w.special << (unused + 1);
        to_sign = _mm_cvtsi64_si128(unused);
        to_exponent = _mm_cvtsi64_si128(5 - w.exponent);
        kept = _mm256_set1_epi16((short)(0x8000 | ((1 << (10 + w.exponent)) - 1)));
        special = _mm256_set1_epi8((char)(w.exponent < 5 && least < 256 ? least : 255));
    }
};

template <>
constexpr int VECTORS<WideComputed> = 4;

INLINE void read(WideComputed& reader, const int8_t* codes, Floats (&out)[4]) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i bytes = _mm256_sll_epi16(_mm256_loadu_si256((const __m256i*)codes), reader.to_sign);
    reader.largest = _mm256_max_epu8(reader.largest, _mm256_add_epi8(bytes, bytes));
    alignas(32) __m256i halves[2];
    UNROLL for (int i = 0; i < 2; i++) {
        __m256i bits = i ? _mm256_unpackhi_epi8(zero, bytes) : _mm256_unpacklo_epi8(zero, bytes);
        halves[i] = _mm256_and_si256(_mm256_sra_epi16(bits, reader.to_exponent), reader.kept);
    }
    asm("" : "+m"(halves));  // through memory: the port that takes vectors apart is the one that converts them
    UNROLL for (int i = 0; i < 4; i++) out[i] = (Floats)_mm256_cvtph_ps(((const __m128i*)halves)[i % 2 * 2 + i / 2]) * reader.factor;
}

INLINE void finish(const WideComputed& reader, Floats& sum) {
    __m256i lost = _mm256_cmpeq_epi8(_mm256_max_epu8(reader.largest, reader.special), reader.largest);
    if (_mm256_movemask_epi8(lost)) sum = broadcast(__builtin_nanf(""));
}

#elif defined(__AVX512F__)

using WideSixteen = Sixteen;

// As `ComputedCodes`, WIDTH / 2 at a time. Codes that are no numbers are found when all of a row are read.
struct WideComputed {
    __m512i to_sign, to_exponent, kept, largest = {};  // the last: of all magnitudes so far
    int16_t special;
    Floats factor;

    WideComputed() = default;

    explicit WideComputed(const Weight& w) {
        ComputedCodes c(w);
        to_sign = _mm512_broadcastw_epi16(c.to_sign), to_exponent = _mm512_broadcastw_epi16(c.to_exponent);
        kept = _mm512_broadcastw_epi16(c.kept), special = _mm_extract_epi16(c.special, 0), factor = c.factor;
    }
};

template <>
constexpr int VECTORS<WideComputed> = 2;

INLINE void read(WideComputed& reader, const int8_t* codes, Floats (&out)[2]) {
    __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
    bits = _mm512_and_si512(_mm512_srav_epi16(_mm512_sllv_epi16(bits, reader.to_sign), reader.to_exponent), reader.kept);
    reader.largest = _mm512_max_epi16(reader.largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
    alignas(64) __m512i halves = bits;
    asm("" : "+m"(halves));  // through memory: the port that takes vectors apart is one of two
    UNROLL for (int i = 0; i < 2; i++) out[i] = (Floats)_mm512_cvtph_ps(((const __m256i*)&halves)[i]) * reader.factor;
}

INLINE void finish(const WideComputed& reader, Floats& sum) {
    if (_mm512_cmpgt_epi16_mask(reader.largest, _mm512_set1_epi16(reader.special))) sum = broadcast(__builtin_nanf(""));
}

#else

using WideSixteen = Sixteen;
using WideComputed = ComputedCodes;

#endif

// body(make), where make(table) is a reader.
template <class Body>
INLINE void with_reader(const Weight& w, const Body& body) {
    if (w.values_count <= 16) body([](const float* table) { return Sixteen(table); });
    else if (w.exponent) body([&](const float*) { return ComputedCodes(w); });
    else body([&](const float* table) { return LoadedCodes{table, (int)w.values_count - 1}; });
}

// `count` decoded codes of row n, the first of which is at `at`, in numbers: times the scales of their groups.
inline void scale_values(const Weight& w, int64_t n, GroupEdge at, const int8_t* codes, int64_t count, const float* scale, float* out) {
    const float* tables = (const float*)w.values;
    if (w.values_stride) {  // asked here too, since memory of a thread costs 8 ns a call
        static thread_local Scratch table_scratch;
        tables = tables_of(w, n, at, count, table_scratch);
    }
    auto scale_group = [&](const auto& reader, const float* table, int64_t i, int64_t stop, float factor) {
        Floats s = broadcast(factor);
        for (; i + LANES <= stop; i += LANES) store(out + i, reader.at(codes + i) * s);
        for (; i < stop; i++) out[i] = table[codes[i] & (w.values_count - 1)] * factor;
    };
    with_reader(w, [&](const auto& make) {
        if (w.values_stride)
            return each_group(at, count, [&](int64_t i, int64_t stop, int64_t g) {
                const float* own = tables + (g - at.group) * w.values_stride;
                scale_group(make(own), own, i, stop, scale[g]);
            });
        const auto shared = make(tables);
        each_group(at, count, [&](int64_t i, int64_t stop, int64_t g) { scale_group(shared, tables, i, stop, scale[g]); });
    });
}

}  // namespace
