// Rows of an activation to signed 8-bit codes, one scale and zero point per row, bit for bit as primitives/qparams.py and
// primitives/affine.py compute them.
//
//     symmetric     scale = max |x| / ((high - low) / 2),    q = round(x / scale)
//     asymmetric    scale = (max - min) / (high - low),    zero = low - round(min / scale),    q = round(x / scale) + zero
#pragma once

#include "matrix.h"

namespace {

struct Quantizer {
    int64_t low, high, asymmetric;
    double smallest, largest;  // scale
};

// An activation as codes (rows, ld), zero beyond its columns, with the zero points of its rows, or none.
struct Codes {
    int8_t* codes;
    int64_t ld, rows, columns;
    float* scale;
    int32_t* zero;
};

INLINE Floats round_even(Floats x) {
    // Adding 1.5 * 2^23 leaves no bits for a fraction; exact for what is within the range of a code, and more.
    Floats magic = broadcast(12582912.0f);
    return (x + magic) - magic;
}

INLINE Floats smaller(Floats a, Floats b) {
    return (Floats)(((Ints)a & (a < b)) | ((Ints)b & ~(a < b)));
}

INLINE Floats larger(Floats a, Floats b) {
    return (Floats)(((Ints)a & (a > b)) | ((Ints)b & ~(a > b)));
}

inline void quantize_row(const Quantizer& q, const float* x, int64_t k, int64_t ld, int8_t* codes, float* scale_out,
                         int32_t* zero_out) {
    Floats lows = {}, highs = {};
    Ints nan = {};
    // Rows are padded with zeros, which the range contains.
    for (int64_t i = 0; i < k; i += LANES) {
        Floats v = load<Floats>(x + i);
        lows = smaller(lows, v);
        highs = larger(highs, v);
        nan |= v != v;
    }
    float low = 0, high = 0;
    for (int i = 0; i < LANES; i++) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
    float scale, steps = q.high - q.low;
    if (q.asymmetric) {
        scale = (high - low) / steps;
        if (__builtin_isinf(scale)) scale = high / steps - low / steps;
    } else {
        scale = (-low > high ? -low : high) / (steps / 2);
    }
    if (scale < (float)q.smallest) scale = q.smallest;
    if (scale > (float)q.largest) scale = q.largest;
    float zero = 0;
    if (q.asymmetric) {
        zero = (float)q.low - __builtin_rintf(low / scale);
        zero = zero < q.low ? q.low : zero > q.high ? q.high : zero;
        *zero_out = zero;
    }
    // Codes have no NaN, the scale does.
    *scale_out = sum(nan) ? __builtin_nanf("") : scale;
    Floats inverse = broadcast(1.0f / scale), zeros = broadcast(zero);
    Floats least = broadcast(q.low), most = broadcast(q.high);
    alignas(64) int32_t wide[LANES];
    for (int64_t i = 0; i < k; i += LANES) {
        Floats code = round_even(load<Floats>(x + i) * inverse) + zeros;
        Ints rounded = to_ints(smaller(larger(code, least), most));
#if defined(__AVX512F__)
        _mm_storeu_si128((__m128i*)(codes + i), _mm512_cvtepi32_epi8((__m512i)rounded));
#else
        store(wide, rounded);
        for (int j = 0; j < LANES; j++) codes[i + j] = wide[j];
#endif
    }
    (void)wide;
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

}  // namespace
