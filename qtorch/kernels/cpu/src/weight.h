// A quantized weight (N, K) as it lies in memory, and its rows as centered codes with a scale and an offset per group:
//
//     w[n, k] = c[n, k] * scale[n, g] + offset[n, g],    c = code - center, a signed byte, g = k / group
#pragma once

#include "float8.h"
#include "number.h"

namespace {

constexpr int64_t SHORT_GROUP = 128;  // with so few columns all that is added to a sum is exact in fp32

struct Weight {
    const uint8_t* codes;  // int8 or uint8 (N, K), or packed by `pack_bits`; see layouts/packed.py
    int64_t row_bytes;     // from one row to the next
    int64_t bits;          // of a packed code; 0 where each has a byte
    int64_t center;        // what is subtracted from a stored code, read as unsigned; 0: it is signed
    int64_t n, k, group, groups;
    const void* scale;  // (N, G), or one for all
    int64_t scale_type, scale_stride;
    const void* zero;  // like scale, or null
    int64_t zero_type;
    int64_t zero_is_code;  // code - zero, or else code * scale + zero
    double shift;          // code of the real zero where its zero point is 0, less center, negated; see `offsets`
    // Codes that are no integers, see values.h: the numbers of all codes, in fp32 and at least 16, or tables (N, G) of them,
    // or null; numbers from one table to the next, 0 if there is but one; and how many each has, a power of two.
    const void* values;
    int64_t values_type, values_stride, values_count;
    // Of codes that are computed: bits of the exponent, 0 for others, and of the mantissa, what is subtracted from the
    // exponent, the least magnitude that is no number.
    int64_t exponent, mantissa, bias, special;
    // Of numbers that are integers times a unit, at most 31 apart: the unit, 0 for others, and what makes them positive.
    double unit;
    int64_t unit_center;
    // Of scales that are quantized themselves, to bytes; all null or 0 for others. The numbers of the bytes; the scales of
    // `scale_group` scales each, in the order of memory, and of zero points; how many scales are before those of `scale`;
    // what is added; and whether scales are positive.
    const float *scale_values, *scale_scale;
    const float* zero_scale;
    int64_t scale_group, first_scale;
    double scale_mean;
    int64_t scale_is_positive;
    // Of bytes that stand for four codes each, see vectors.h: the codes of all bytes, or null; and of a weight whose rows
    // are rotated in blocks, their length and signs.
    const uint32_t* vectors;
    const float* signs;
    int64_t rotation;

    int64_t table_bytes() const { return groups * values_stride * size_of(values_type); }  // of one row

    bool has_offset() const { return zero || shift != 0; }

    // Whether an int32 holds the sums of a group times signed bytes: a code is at most 128 from zero, 255 from a zero point.
    bool fits_int32() const { return group <= INT32_MAX / (128 * (has_offset() ? 255 : 128)); }

    // Codes of 4 bits in groups that int_channels.h multiplies with; as in ../weight.py.
    bool has_short_groups() const { return bits == 4 && group > 0 && group <= SHORT_GROUP && group % 32 == 0; }

    // Whether the tensor ends less than `length` bytes behind row `r`.
    bool ends_within(int64_t r, int64_t length) const { return (n - 1 - r) * row_bytes < length; }
};

// `count` rows of a weight, from `start` on.
inline Weight rows_of(const Weight& w, int64_t start, int64_t count) {
    Weight part = w;
    int64_t skipped = start * w.scale_stride;
    part.codes += start * w.row_bytes;
    part.n = count;
    part.scale = (const char*)w.scale + skipped * size_of(w.scale_type);
    if (w.zero) part.zero = (const char*)w.zero + skipped * size_of(w.zero_type);
    if (w.values) part.values = (const char*)w.values + start * w.table_bytes();
    part.first_scale += skipped;
    return part;
}

// Where a run of codes, from column k on, goes from one group to the next.
struct GroupEdge {
    int64_t group, left, size;

    // Divided in 32 bits: a division in 64 takes as long as dozens of vectors.
    GroupEdge(int64_t k, int64_t size_) : group((uint32_t)k / (uint32_t)size_), left(size_ - (uint32_t)k % (uint32_t)size_), size(size_) {}

    void pass(int64_t columns) {
        left -= columns;
        if (left) return;
        group++;
        left = size;
    }
};

// use(i, stop, group) for the columns, of the `count` behind `at`, of each group.
template <class Use>
INLINE void each_group(GroupEdge at, int64_t count, const Use& use) {
    for (int64_t i = 0, stop; i < count; i = stop, at.group++, at.left = at.size) {
        stop = i + at.left < count ? i + at.left : count;
        use(i, stop, at.group);
    }
}

// put(i, bits) for each vector of `count` codes: those of `mask`, after a shift to the right. Nothing is read beyond `end`.
template <class Put>
INLINE void unpack(const uint8_t* from, const uint8_t* end, int64_t count, int right, uint8_t mask, const Put& put) {
    // Shifts of 16-bit lanes; the mask removes what came from the neighbour.
    auto part = [&](Bytes v) { return (Bytes)((Shorts)v >> right) & mask; };
    int64_t i = 0, whole = end - from - WIDTH < count - 1 ? end - from - WIDTH : count - 1;
    _Pragma("GCC unroll 4") for (; i <= whole; i += WIDTH) put(i, part(load<Bytes>(from + i)));
    for (; i < count; i += WIDTH) {
        Bytes v = {};
        memcpy(&v, from + i, end - from - i);
        put(i, part(v));
    }
}

// Codes of a whole row, less `center`: each vector of its eight runs is read once. Runs have at least WIDTH codes; what is behind
// the last whole vector of a run is read together with the codes before it. A code is cut into parts of 4, 2 and 1 bits; a part
// of p bits fills p runs of bytes.
template <int BITS>
void decode_row(const uint8_t* row, int64_t run, uint8_t center, int8_t* out) {
    for (int64_t i = 0; i < run; i += WIDTH) {
        if (i > run - WIDTH) i = run - WIDTH;
        UNROLL for (int item = 0; item < 8; item++) {
            Bytes code = {};
            int first = 0;
            UNROLL for (int part = 4; part; part /= 2) {
                if (!(BITS & part)) continue;
                Shorts bits = load<Shorts>(row + (first + item * part / 8) * run + i);
                uint8_t mask = ((1 << part) - 1) << first;
                int left = first - item % (8 / part) * part;
                code |= (Bytes)(left < 0 ? bits >> -left : bits << left) & mask;
                first += part;
            }
            store(out + item * run + i, code - center);
        }
    }
}

// `count` codes of one of the eight runs, from `start` on, as in `decode_row`; nothing is read beyond `end`.
template <int BITS, int ITEM>
void decode_run(const uint8_t* row, const uint8_t* end, int64_t run, int64_t start, int64_t count, uint8_t center, int8_t* out) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        Bytes code = {};
        int first = 0;
        UNROLL for (int part = 4; part; part /= 2) {
            if (!(BITS & part)) continue;
            const uint8_t* at = row + (first + ITEM * part / 8) * run + start + i;
            Shorts bits = {};
            if (end - at >= WIDTH) bits = load<Shorts>(at);
            else memcpy(&bits, at, end - at);
            uint8_t mask = ((1 << part) - 1) << first;
            int left = first - ITEM % (8 / part) * part;
            code |= (Bytes)(left < 0 ? bits >> -left : bits << left) & mask;
            first += part;
        }
        store(out + i, code - center);
    }
}

using DecodeRun = void (*)(const uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, uint8_t, int8_t*);

template <int BITS>
struct DecodeRuns {
    static constexpr DecodeRun OF[] = {decode_run<BITS, 0>, decode_run<BITS, 1>, decode_run<BITS, 2>, decode_run<BITS, 3>,
                                       decode_run<BITS, 4>, decode_run<BITS, 5>, decode_run<BITS, 6>, decode_run<BITS, 7>};
};

// Codes from k to k + length of row n, centered; whole vectors are written, those behind the end with anything.
inline void decode(const Weight& w, int64_t n, int64_t k, int64_t length, int8_t* out) {
    const uint8_t* row = w.codes + n * w.row_bytes;
    const uint8_t center = w.center;
    if (w.vectors) {  // k and length are multiples of 4
        for (int64_t i = 0; i < length; i += 4) memcpy(out + i, w.vectors + row[(k + i) / 4], 4);
        return;
    }
    if (!w.bits) {
        // Not beyond the row, which may be the last.
        memcpy(out, row + k, length);
        for (int64_t i = 0; center && i < length; i += WIDTH) store(out + i, load<Bytes>(out + i) - center);
        return;
    }
    using DecodeRow = void (*)(const uint8_t*, int64_t, uint8_t, int8_t*);
    static constexpr DecodeRow ROWS[] = {nullptr, decode_row<1>, decode_row<2>, decode_row<3>, decode_row<4>, decode_row<5>, decode_row<6>, decode_row<7>};
    if (!k && length == w.k && w.k % 8 == 0 && w.k >= 8 * WIDTH) return ROWS[w.bits](row, w.k / 8, center, out);
    static constexpr const DecodeRun* RUNS[] = {nullptr, DecodeRuns<1>::OF, DecodeRuns<2>::OF, DecodeRuns<3>::OF,
                                                nullptr, DecodeRuns<5>::OF, DecodeRuns<6>::OF, DecodeRuns<7>::OF};
    // Codes lie in eight runs.
    int64_t run = (w.k + 7) / 8, stop = k + length, item = 0, from = 0;
    const uint8_t* end = row + run * w.bits;
    for (; from + run <= k; from += run) item++;
    for (; from < stop; from += run, item++) {
        int64_t start = from < k ? k - from : 0, count = (from + run < stop ? run : stop - from) - start;
        int8_t* to = out + from + start - k;
        if (w.bits == 4 && item % 2 == 0 && !start && from + 2 * run <= stop && run % WIDTH == 0) {
            // Both runs of the same bytes, which are read once.
            const uint8_t* at = row + item / 2 * run;
            const Bytes mask = Bytes{} + (uint8_t)15;
            for (int64_t i = 0; i < run; i += WIDTH) {
                Bytes v = load<Bytes>(at + i);
                store(to + i, (v & mask) - center);
                store(to + run + i, ((Bytes)((Shorts)v >> 4) & mask) - center);
            }
            from += run;
            item++;
            continue;
        }
        if (w.bits == 4) {  // as below, a quarter faster
            unpack(row + item / 2 * run + start, end, count, item % 2 * 4, 15, [&](int64_t i, Bytes v) { store(to + i, v - center); });
            continue;
        }
        RUNS[w.bits][item](row, end, run, start, count, center, to);
    }
}

// Prefetch what `decode` will read.
INLINE void prefetch_codes(const Weight& w, int64_t n, int64_t k, int64_t length) {
    const uint8_t* row = w.codes + n * w.row_bytes;
    if (!w.bits || w.vectors) {
        if (w.vectors) k /= 4, length /= 4;
        for (int64_t i = 0; i < length; i += 64) prefetch(row + k + i);
        return;
    }
    int64_t run = (w.k + 7) / 8, first = 0, item = 0;
    for (; k >= run; k -= run) item++;  // a division would take longer
    for (int64_t part = 4; part; part /= 2) {
        if (!(w.bits & part)) continue;
        for (int64_t i = 0; i < length; i += 64) prefetch(row + (first + item * part / 8) * run + k + i);
        first += part;
    }
}

// The cache lines of some columns of rows of the weight, one after the other.
struct Lines {
    const uint8_t* row;
    int64_t row_bytes, rows, bytes, done = 0;

    INLINE void prefetch_next() {
        if (rows <= 0) return;
        prefetch(row + done);
        done += 64;
        if (done >= bytes) done = 0, row += row_bytes, rows--;
    }
};

// Prefetch scales and zero points of row n, from group g on.
INLINE void prefetch_scales(const Weight& w, int64_t n, int64_t g, int64_t count) {
    const char* from = (const char*)w.scale + (w.scale_stride * n + g) * size_of(w.scale_type);
    for (int64_t i = 0; i < count * size_of(w.scale_type); i += 64) prefetch(from + i);
    if (!w.zero) return;
    from = (const char*)w.zero + (w.scale_stride * n + g) * size_of(w.zero_type);
    for (int64_t i = 0; i < count * size_of(w.zero_type); i += 64) prefetch(from + i);
}

// use(i, stop, group): of `count` scales that are quantized themselves, from element `at` on, those of one group at a time.
template <class Use>
INLINE void each_scale_group(const Weight& w, int64_t at, int64_t count, const Use& use) {
    int64_t group = (w.first_scale + at) / w.scale_group, left = (group + 1) * w.scale_group - w.first_scale - at;
    for (int64_t i = 0; i < count; i += left, left = w.scale_group, group++) use(i, left < count - i ? i + left : count, group);
}

// `count` scales, from element `at` on. Quantized ones are those of `dequantize_scale` of primitives/double_quant.py, bit for
// bit: values[code] * scale_scale[group] + mean.
inline void read_scales(const Weight& w, int64_t at, int64_t count, float* scale) {
    if (!w.scale_values) return to_float((const char*)w.scale + at * size_of(w.scale_type), w.scale_type, count, scale);
    const uint8_t* codes = (const uint8_t*)w.scale + at;
    float mean = w.scale_mean, least = w.scale_is_positive ? __FLT_MIN__ : -__builtin_inff();
    // Integers and float8_e4m3 are converted, which is faster than to look them up; a code tells each from other types.
    bool is_integer = w.scale_values[1] == 1, is_signed = w.scale_values[255] < 0, is_e4m3 = w.scale_values[126] == E4M3_FORMAT.largest;
    auto numbers = [&](const uint8_t* p) {
        if (is_e4m3) return from_float8(E4M3_FORMAT, p);
        Ints bits = is_integer && is_signed ? widen((const int8_t*)p) : widen(p);
        return is_integer ? to_floats(bits) : look_up(w.scale_values, bits);
    };
    each_scale_group(w, at, count, [&](int64_t i, int64_t stop, int64_t group) {
        float factor = w.scale_scale[group];
        for (; i + LANES <= stop; i += LANES)
            store(scale + i, larger(broadcast(least), numbers(codes + i) * broadcast(factor) + broadcast(mean)));
        for (; i < stop; i++) {
            float number = w.scale_values[codes[i]] * factor + mean;
            scale[i] = number < least ? least : number;
        }
    });
}

// use(at, count, i): the scales of `rows` rows of the weight, from row n on, are `count` elements from `at` on, and become
// the result from element i on. Rows that lie one behind the other are one piece.
template <class Use>
INLINE void each_piece(const Weight& w, int64_t n, int64_t rows, const Use& use) {
    int64_t pieces = w.scale_stride == w.groups ? 1 : rows, count = rows / pieces * w.groups;
    for (int64_t i = 0; i < pieces; i++) use(w.scale_stride * (n + i), count, i * count);
}

// Scales of `rows` rows from row n on, one per group (rows, groups).
inline void scales(const Weight& w, int64_t n, float* scale, int64_t rows = 1) {
    each_piece(w, n, rows, [&](int64_t at, int64_t count, int64_t i) { read_scales(w, at, count, scale + i); });
}

// Zero points of the same rows.
inline void zeros(const Weight& w, int64_t n, float* zero, int64_t rows = 1) {
    if (!w.zero) {
        memset(zero, 0, rows * w.groups * sizeof *zero);
        return;
    }
    each_piece(w, n, rows, [&](int64_t at, int64_t count, int64_t i) {
        to_float((const char*)w.zero + at * size_of(w.zero_type), w.zero_type, count, zero + i);
        if (w.zero_scale)
            each_scale_group(w, at, count, [&](int64_t g, int64_t stop, int64_t group) {
                for (; g < stop; g++) zero[i + g] *= w.zero_scale[group];
            });
    });
}

// Offsets of the same rows, given their scales.
inline void offsets(const Weight& w, int64_t n, const float* scale, float* offset, int64_t rows = 1) {
    int64_t count = rows * w.groups;
    float shift = w.shift;
    zeros(w, n, offset, rows);
    if (w.zero_is_code)
        for (int64_t g = 0; g < count; g++) offset[g] = (shift - offset[g]) * scale[g];
    else
        for (int64_t g = 0; g < count; g++) offset[g] += shift * scale[g];
}

}  // namespace
