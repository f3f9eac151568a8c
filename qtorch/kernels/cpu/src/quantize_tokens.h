// Tokens (batch, heads, tokens, width) to the codes of a cache, one scale a token and head, bit for bit as
// kernels/cache_form.py computes them with the primitives.
//
//     INT8, FLOAT8   scale = max |x| / largest code,       q = round(x / scale)
//     UINT4, 3, 2    scale = (max - min) / (2^bits - 1), zero = min, q = round((x - zero) / scale)
//
// The scale of a token that holds a NaN or an infinity is NaN.
#pragma once

#include "cached_rows.h"
#include "parallel.h"
#include "quantize.h"

namespace {
namespace attention {

struct Tokens {
    const void* data;
    int64_t type, step_batch, step_head, step_token;  // in elements; rows are contiguous
    int64_t batch, heads, tokens, width;
    int64_t format;
    uint8_t* codes;  // contiguous, as are the others
    void* scale;
    void* zero;
    int64_t scale_type;        // of zero too
    double smallest, largest;  // scale
    int64_t threads;
};

// A number of at most the largest magnitude of e4m3.
INLINE uint8_t float_to_e4m3(float x) {
    uint32_t bits = load<uint32_t>(&x), sign = bits >> 24 & 0x80, magnitude = bits & MAGNITUDE;
    if (magnitude >= INFINITE) return sign | 0x7f;
    // 2^-6 is the smallest normal number, 2^-9 the smallest of all.
    if (magnitude < 0x3c800000) return sign | (uint8_t)__builtin_rintf(load<float>(&magnitude) * 512.0f);
    return sign | ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
}

// A number as it is in the type of the scales, and fp32 again.
INLINE float rounded(float x, int64_t type, void* to) {
    from_float(&x, type, 1, to);
    to_float(to, type, 1, &x);
    return x;
}

// x is padded to whole vectors with copies of its first number; so are the codes.
inline void quantize_token(const Tokens& in, const float* x, uint8_t* codes, void* scale_out, void* zero_out) {
    int64_t padded = round_up(in.width, LANES);
    Floats lows = load<Floats>(x), highs = lows;
    Ints lost = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = load<Floats>(x + i);
        lows = smaller(lows, v);
        highs = larger(highs, v);
        lost |= ((Ints)v & MAGNITUDE) >= INFINITE;
    }
    float low = lows[0], high = highs[0], scale, zero = 0;
    for (int i = 1; i < LANES; i++) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
    const int64_t bits = packed_bits(in.format);
    const float top = (1 << bits) - 1;
    if (bits) {
        scale = (high - low) / top;
        if (__builtin_isinf(scale)) scale = high / top - low / top;
    } else {
        scale = (-low > high ? -low : high) / (in.format == INT8 ? 127.0f : 448.0f);
    }
    if (scale < (float)in.smallest) scale = in.smallest;
    if (scale > (float)in.largest) scale = in.largest;
    scale = rounded(sum(lost) ? __builtin_nanf("") : scale, in.scale_type, scale_out);
    if (bits) zero = rounded(low, in.scale_type, zero_out);
    Floats inverse = broadcast(1.0f / scale), s = broadcast(scale), z = broadcast(zero);
    Floats least = broadcast(bits ? 0 : in.format == INT8 ? -127 : -448);
    Floats most = broadcast(bits ? top : in.format == INT8 ? 127 : 448);
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = load<Floats>(x + i);
        if (in.format == FLOAT8) {
            Floats code = smaller(larger(v * inverse, least), most);
            for (int j = 0; j < LANES; j++) codes[i + j] = float_to_e4m3(code[j]);
        } else {
            Floats code = round_even(bits ? (v - z) / s : v * inverse);
            store_bytes((int8_t*)codes + i, to_ints(smaller(larger(code, least), most)));
        }
    }
}

// Codes of 2, 3 or 4 bits in the order of layouts/packed.py: parts of 4, 2 and 1 bits, the low ones first.
inline void pack_row(const uint8_t* codes, int64_t width, int64_t bits, uint8_t* out) {
    int64_t run = (width + 7) / 8, low = 0;
    auto code = [&](int64_t i) { return i < width ? codes[i] >> low : 0; };
    for (int64_t part = 4; part; low += bits & part, part /= 2)
        for (int64_t item = 0; bits & part && item < 8; item += 8 / part, out += run)
            for (int64_t i = 0; i < run; i++) {
                out[i] = 0;
                for (int64_t s = 0; s < 8 / part; s++)
                    out[i] |= (code((item + s) * run + i) & ((1 << part) - 1)) << part * s;
            }
}

inline void quantize_tokens(const Tokens& in) {
    int64_t rows = in.batch * in.heads * in.tokens;
    int64_t bits = packed_bits(in.format), bytes = bits ? (in.width + 7) / 8 * bits : in.width, unit = size_of(in.scale_type);
    parallel(rows, threads_for(rows * in.width, in.threads), [&](Tasks& tasks) {
        static thread_local Scratch row_scratch, code_scratch;
        int64_t padded = round_up(in.width, LANES);
        float* row = row_scratch.get<float>(padded);
        uint8_t* codes = code_scratch.get<uint8_t>(padded);
        for (int64_t m; (m = tasks.next()) >= 0;) {
            int64_t t = m % in.tokens, h = m / in.tokens % in.heads, b = m / in.tokens / in.heads;
            int64_t at = b * in.step_batch + h * in.step_head + t * in.step_token;
            to_float((const char*)in.data + at * size_of(in.type), in.type, in.width, row);
            for (int64_t i = in.width; i < padded; i++) row[i] = row[0];
            quantize_token(in, row, codes, (char*)in.scale + m * unit, (char*)in.zero + m * unit);
            if (bits) pack_row(codes, in.width, bits, in.codes + m * bytes);
            else memcpy(in.codes + m * bytes, codes, bytes);
        }
    });
}

}  // namespace attention
}  // namespace
