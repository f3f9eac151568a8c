// What follows the sums of a convolution: scales, the bias, an addition, a clamp, and codes for the layer that comes next.
//
//     y = sum * scale[n] * x_scale + bias[n] (+ other), clamped;      code = round(y / next_scale) + next_zero
//
// Each step is rounded on its own, in this order: the bits are those of the steps taken one by one.
#pragma once

#include "conv_codes.h"

namespace {

struct ConvFinish {
    const float* scale;   // (features), and room for whole vectors
    const int32_t* sums;  // the same
    int64_t shift;        // from codes to bytes
    const float* x_scale;
    const int32_t* x_zero;
    int64_t per_image;  // 1: x_scale and x_zero of each image; 0: of all
    const void* bias;   // (features) in the type of the result, or null
    void* out;          // contiguous, or channels last; or null
    int64_t type, channels_last;
    const float* other;  // channels last, or null
    double low, high;
    // Codes of the result, or null; distances in bytes.
    uint8_t* codes;
    int64_t code_image, code_row, code_pixel;
    double code_scale;
    int64_t code_zero, code_low, code_high;  // of bytes
};

// `values` as they are in another type.
INLINE void round_through(float* values, int64_t type, int64_t count) {
    uint16_t rounded[CONV_BLOCK];
    from_float(values, type, count, rounded);
    to_float(rounded, type, count, values);
}

// The first `count` lanes, or all if there are more.
INLINE Floats load_first(const float* from, int64_t count) {
    if (count >= LANES) return load<Floats>(from);
    float lanes[LANES] = {};
    memcpy(lanes, from, count * 4);
    return load<Floats>(lanes);
}

INLINE void store_first(float* to, Floats values, int64_t count) {
    if (count >= LANES) return store(to, values);
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)values);
#else
    memcpy(to, &values, count * 4);
#endif
}

// A strip of pixels of one image, and the features of a block.
struct ConvStrip {
    int64_t image, start, count;
};

// Pixels by features (count, ld), both whole vectors, to contiguous planes.
inline void write_planes(const ConvShape& s, const ConvFinish& f, const ConvStrip& strip, const ConvBlock& block,
                         const float* values, int64_t ld) {
    int64_t area = s.pixels(), size = size_of(f.type);
    for (int64_t c = 0; c < block.count; c += LANES) {
        int64_t channels = block.count - c < LANES ? block.count - c : LANES;
        for (int64_t p = 0; p < strip.count; p += LANES) {
            int64_t pixels = strip.count - p < LANES ? strip.count - p : LANES;
            Floats rows[LANES];
            UNROLL for (int i = 0; i < LANES; i++) rows[i] = load<Floats>(values + (p + (i < pixels ? i : 0)) * ld + c);
            transpose(rows);
            char* to = (char*)f.out + ((strip.image * s.all_features() + block.first + c) * area + strip.start + p) * size;
            for (int64_t i = 0; i < channels; i++) {
                if (f.type == FLOAT32) store_first((float*)(to + i * area * size), rows[i], pixels);
                else from_float((const float*)&rows[i], f.type, pixels, to + i * area * size);
            }
        }
    }
}

// What is done with each vector of features.
struct FinishVector {
    Floats scale, up, bias;  // scale * up: a scale near the largest number is multiplied in two steps
    Ints less;
};

// Codes alone: the clamp is one of codes, since rounding keeps the order.
inline void finish_codes(const ConvShape& s, const ConvFinish& f, const ConvStrip& strip, const ConvBlock& block,
                         const FinishVector* about, Floats x_scale, const int32_t* sums, int64_t ld) {
    CodeMaker make({f.code_low, f.code_high, 0, 1, 0, 0}, f.code_scale, f.code_zero, 0);
    make.least = larger(broadcast(f.low) * make.inverse, make.least);
    make.least = smaller(to_floats(round_to_ints(make.least)), make.most);
    make.most = smaller(broadcast(f.high) * make.inverse, make.most);
    make.most = larger(to_floats(round_to_ints(make.most)), make.least);
    int64_t whole = block.count / LANES, tail = block.count % LANES;
    uint8_t* image = f.codes + strip.image * f.code_image + block.first;
    for (int64_t i = 0, h = strip.start / s.out_w, w = strip.start % s.out_w; i < strip.count; i++, sums += ld) {
        uint8_t* to = image + h * f.code_row + w * f.code_pixel;
        if (++w == s.out_w) w = 0, h++;
        auto codes = [&](int64_t v) {
            return make.of(to_floats(load<Ints>(sums + v * LANES) - about[v].less) * about[v].scale * x_scale * about[v].up + about[v].bias);
        };
        for (int64_t v = 0; v < whole; v++) store_bytes((int8_t*)to + v * LANES, codes(v));
        if (tail) {
            int8_t last[LANES];
            store_bytes(last, codes(whole));
            memcpy(to + whole * LANES, last, tail);
        }
    }
}

// `sums` (pixels, ld), which are used up.
inline void finish_strip(const ConvShape& s, const ConvFinish& f, const ConvStrip& strip, const ConvBlock& block,
                         int32_t* sums, int64_t ld) {
    int64_t vectors = (block.count + LANES - 1) / LANES, at = f.per_image ? strip.image : 0;
    Floats x_scale = broadcast(f.x_scale[at]), low = broadcast(f.low), high = broadcast(f.high);
    int32_t zero = f.x_zero[at] + (int32_t)f.shift;
    alignas(64) float bias[CONV_BLOCK + LANES] = {};
    bool clamps = f.low > -__builtin_inf() || f.high < __builtin_inf(), rounds = f.type != FLOAT32;
    if (f.bias) to_float((const char*)f.bias + block.first * size_of(f.type), f.type, block.count, bias);
    FinishVector about[CONV_BLOCK / LANES];
    for (int64_t v = 0; v < vectors; v++) {
        int64_t n = block.first + v * LANES;
        Floats scale = load<Floats>(f.scale + n), up = scale_up(scale);
        about[v] = {scale / up, up, load<Floats>(bias + v * LANES), zero * load<Ints>(f.sums + n)};
    }
    if (f.codes && !f.out && !f.other && f.bias) return finish_codes(s, f, strip, block, about, x_scale, sums, ld);
    float* values = (float*)sums;
    int64_t pixel = strip.image * s.pixels() + strip.start, features = s.all_features();
    bool direct = f.out && f.channels_last && !rounds;
    bool keeps = f.codes || (f.out && !direct);
    for (int64_t i = 0; i < strip.count; i++) {
        float* row = values + i * ld;
        const float* other = f.other + (pixel + i) * features + block.first;
        float* to = (float*)f.out + (pixel + i) * features + block.first;
        auto scaled = [&](int64_t v) {
            return to_floats(load<Ints>(sums + i * ld + v * LANES) - about[v].less) * about[v].scale * x_scale * about[v].up;
        };
        if (f.bias && rounds) {
            for (int64_t v = 0; v < vectors; v++) store(row + v * LANES, scaled(v));
            round_through(row, f.type, block.count);
        }
        for (int64_t v = 0; v < vectors; v++) {
            int64_t count = block.count - v * LANES;
            Floats y = f.bias && rounds ? load<Floats>(row + v * LANES) : scaled(v);
            if (f.bias) y += about[v].bias;
            if (f.other) y += load_first(other + v * LANES, count);
            if (clamps) y = smaller(larger(y, low), high);
            if (keeps) store(row + v * LANES, y);
            if (direct) store_first(to + v * LANES, y, count);
        }
    }
    if (f.out && !f.channels_last) {
        write_planes(s, f, strip, block, values, ld);
    } else if (f.out && !direct) {
        char* to = (char*)f.out + (pixel * features + block.first) * size_of(f.type);
        for (int64_t i = 0; i < strip.count; i++)
            from_float(values + i * ld, f.type, block.count, to + i * features * size_of(f.type));
    }
    if (!f.codes) return;
    CodeMaker make({f.code_low, f.code_high, 0, 1, 0, 0}, f.code_scale, f.code_zero, 0);
    uint8_t* image = f.codes + strip.image * f.code_image + block.first;
    bool whole = block.count % LANES == 0;
    for (int64_t i = 0, h = strip.start / s.out_w, w = strip.start % s.out_w; i < strip.count; i++) {
        uint8_t* to = image + h * f.code_row + w * f.code_pixel;
        if (++w == s.out_w) w = 0, h++;
        for (int64_t v = 0; v < vectors; v++) {
            Ints codes = make.of(load<Floats>(values + i * ld + v * LANES));
            if (whole || v + 1 < vectors) {
                store_bytes((int8_t*)to + v * LANES, codes);
            } else {
                int8_t last[LANES];
                store_bytes(last, codes);
                memcpy(to + v * LANES, last, block.count - v * LANES);
            }
        }
    }
}

}  // namespace
