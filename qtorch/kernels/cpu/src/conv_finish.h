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
                float one[LANES];
                store(one, rows[i]);
                from_float(one, f.type, pixels, to + i * area * size);
            }
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
    float* values = (float*)sums;
    int64_t pixel = strip.image * s.pixels() + strip.start, features = s.all_features();
    for (int64_t v = 0; v < vectors; v++) {
        Ints less = zero * load<Ints>(f.sums + block.first + v * LANES);
        Floats scale = load<Floats>(f.scale + block.first + v * LANES), more = load<Floats>(bias + v * LANES);
        for (int64_t i = 0; i < strip.count; i++) {
            Floats y = to_floats(load<Ints>(sums + i * ld + v * LANES) - less) * scale * x_scale;
            if (f.bias && !rounds) y += more;
            store(values + i * ld + v * LANES, y);
        }
    }
    if (f.bias && rounds) {
        for (int64_t i = 0; i < strip.count; i++) {
            round_through(values + i * ld, f.type, block.count);
            for (int64_t v = 0; v < vectors; v++)
                store(values + i * ld + v * LANES, load<Floats>(values + i * ld + v * LANES) + load<Floats>(bias + v * LANES));
        }
    }
    if (f.other || clamps) {
        for (int64_t i = 0; i < strip.count; i++) {
            const float* other = f.other + (pixel + i) * features + block.first;
            for (int64_t v = 0; v < vectors; v++) {
                float* to = values + i * ld + v * LANES;
                Floats y = load<Floats>(to);
                if (f.other) {
                    Floats more = {};
                    if (block.count - v * LANES >= LANES) more = load<Floats>(other + v * LANES);
                    else memcpy(&more, other + v * LANES, (block.count - v * LANES) * 4);
                    y += more;
                }
                store(to, smaller(larger(y, low), high));
            }
        }
    }
    if (f.out && f.channels_last) {
        char* to = (char*)f.out + (pixel * features + block.first) * size_of(f.type);
        for (int64_t i = 0; i < strip.count; i++)
            from_float(values + i * ld, f.type, block.count, to + i * features * size_of(f.type));
    } else if (f.out) {
        write_planes(s, f, strip, block, values, ld);
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
