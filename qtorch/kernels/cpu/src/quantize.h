// Rows of an activation to signed 8-bit codes, one scale and zero point per row, bit for bit as primitives/qparams.py and
// primitives/affine.py compute them.
//
//     symmetric     scale = max |x| / ((high - low) / 2),    q = round(x / scale)
//     asymmetric    scale = (max - min) / (high - low),    zero = low - round(min / scale),    q = round(x / scale) + zero
//     given         q = round(x / scale) + zero
//
// Codes have no NaN and no infinity; the scale of a row that holds one is NaN, and so are all of its results.
#pragma once

#include "matrix.h"

namespace {

struct Quantizer {
    int64_t low, high, asymmetric, given;
    double smallest, largest;  // scale
};

// An activation as codes (rows, ld), zero beyond its columns, with the zero points of its rows, or null. With more slices
// than one, row m of it is the sum of rows m, m + rows / slices, ...
struct Codes {
    int8_t* codes;
    int64_t ld, rows, columns;
    float* scale;
    int32_t* zero;
    int64_t slices = 1;
};

// Of the range from `low` to `high`, which contains zero; the zero point only where there is one.
inline float scale_of(const Quantizer& q, float low, float high, float* zero_out) {
    float scale, steps = q.high - q.low;
    if (q.asymmetric) {
        scale = (high - low) / steps;
        if (__builtin_isinf(scale)) scale = high / steps - low / steps;
    } else {
        scale = (-low > high ? -low : high) / (steps / 2);
    }
    if (scale < (float)q.smallest) scale = q.smallest;
    if (scale > (float)q.largest) scale = q.largest;
    if (q.asymmetric) {
        float zero = (float)q.low - __builtin_rintf(low / scale);
        *zero_out = zero < q.low ? q.low : zero > q.high ? q.high : zero;
    }
    return scale;
}

// A given scale and zero point are read from where the results are written.
inline void quantize_row(const Quantizer& q, const float* x, int64_t k, int64_t ld, int8_t* codes, float* scale_out,
                         int32_t* zero_out) {
    Floats lows = {}, highs = {};
    Ints lost = {};
    // Rows are padded with zeros, which the range contains.
    for (int64_t i = 0; i < k; i += LANES) {
        Floats v = load<Floats>(x + i);
        lows = smaller(lows, v);
        highs = larger(highs, v);
        lost |= ((Ints)v & MAGNITUDE) >= INFINITE;
    }
    float low = 0, high = 0;
    for (int i = 0; i < LANES; i++) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
    float scale, zero = 0;
    if (q.given) {
        scale = *scale_out;
        if (zero_out) zero = *zero_out;
    } else {
        scale = scale_of(q, low, high, &zero);
        if (q.asymmetric) *zero_out = zero;
    }
    *scale_out = sum(lost) ? __builtin_nanf("") : scale;
    Floats inverse = broadcast(1.0f / scale), zeros = broadcast(zero);
    Floats least = broadcast(q.low), most = broadcast(q.high);
    for (int64_t i = 0; i < k; i += LANES) {
        Floats code = round_even(load<Floats>(x + i) * inverse) + zeros;
        store_bytes(codes + i, to_ints(smaller(larger(code, least), most)));
    }
    memset(codes + k, 0, ld - k);
}

// `out.codes` has `out.ld` bytes a row and at least LANES behind the last.
inline void quantize_rows(const Quantizer& q, const Input& x, const Codes& out, int64_t threads) {
    parallel(x.rows, threads, [&](Tasks& tasks) {
        static thread_local Scratch row_scratch, code_scratch;
        int64_t padded = round_up(out.columns, LANES);
        float* row = row_scratch.get<float>(padded);
        int8_t* codes = code_scratch.get<int8_t>(padded);
        for (int64_t m; (m = tasks.next()) >= 0;) {
            x.part(m, 1).to_floats(out.columns, row, padded, 1);
            quantize_row(q, row, out.columns, out.columns, codes, out.scale + m, out.zero ? out.zero + m : nullptr);
            memcpy(out.codes + m * out.ld, codes, out.columns);
            memset(out.codes + m * out.ld + out.columns, 0, out.ld - out.columns);
        }
    });
}

// A row in fixed point, by slices of a byte:
//
//     x = scale (q[0] + q[1] / 254 + q[2] / 254^2 + ...),    scale = max |x| / 127
//
// Each is what the ones before have left over, rounded; three are as exact as fp32 is for the largest number. There are as
// many as hold the geometric mean of the magnitudes, which a few large ones do not move, to 16 bits, or to three more than
// the numbers of a 16-bit type have; or 0 where four do not. A row that holds a NaN or an infinity asks for one, and gets NaN
// for a scale.
inline int64_t slices_of(const float* x, int64_t k, int64_t type) {
    Floats highs = {};
    Ints exponents = {}, count = {}, special = {};
    for (int64_t i = 0; i < k; i += LANES) {
        Ints bits = load<Ints>(x + i) & MAGNITUDE;
        highs = larger(highs, (Floats)bits);
        exponents += bits >> 23;
        count -= bits > 0;
        special |= bits >= INFINITE;
    }
    float high = largest(highs);
    int64_t two = type == BFLOAT16 ? 5 : type == FLOAT16 ? 2 : -1;
    if (sum(special)) return 1;
    if (high == 0) return two < 0 ? 3 : 2;
    // Scales of all slices are to be normal numbers.
    if (high < 0x1p-90f) return 0;
    int32_t apart = (load<int32_t>(&high) >> 23) - sum(exponents) / sum(count);
    return apart <= two ? 2 : apart <= 8 ? 3 : apart <= 16 ? 4 : 0;
}

// Of whole vectors; NaN where one is NaN or infinite.
inline float largest_magnitude(const float* x, int64_t k) {
    Ints highs = {};
    for (int64_t i = 0; i < k; i += LANES) highs = larger(highs, load<Ints>(x + i) & MAGNITUDE);
    int32_t high = largest(highs);
    return high >= INFINITE ? __builtin_nanf("") : load<float>(&high);
}

// put(i, slice, codes) for each vector of k columns, and the scales of the slices.
template <class Put>
INLINE void each_slice(const float* x, int64_t k, int64_t slices, float* scale, const Put& put) {
    float high = largest_magnitude(x, k), inverse[4];
    for (int64_t s = 0; s < slices; s++) {
        scale[s] = s ? scale[s - 1] / 254 : high ? high / 127 : 1;
        inverse[s] = 1 / scale[s];
    }
    for (int64_t i = 0; i < k; i += LANES) {
        Floats rest = load<Floats>(x + i);
        for (int64_t s = 0; s < slices; s++) {
            Floats q = round_even(rest * broadcast(inverse[s]));
            rest = fma(q, broadcast(-scale[s]), rest);
            put(i, s, to_ints(q));
        }
    }
}

inline void slice_row(const float* x, int64_t k, int64_t m, const Codes& out) {
    float scale[4];
    int64_t rows = out.rows / out.slices;
    auto row = [&](int64_t s) { return out.codes + (s * rows + m) * out.ld; };
    // Rows are padded with zeros, whose bytes are zero.
    each_slice(x, k, out.slices, scale, [&](int64_t i, int64_t s, Ints codes) { store_bytes(row(s) + i, codes); });
    for (int64_t s = 0; s < out.slices; s++) {
        out.scale[s * rows + m] = scale[s];
        memset(row(s) + k, 0, out.ld - k);
    }
}

}  // namespace
