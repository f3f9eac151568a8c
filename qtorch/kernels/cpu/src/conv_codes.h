// Images to codes, channels last in a border of zero points; bit for bit as rows are (quantize.h).
#pragma once

#include "conv.h"

namespace {

struct ConvCodesCall {
    // Images (image, channel, row, column) in floating point, or channels last; each is contiguous.
    const void* x;
    int64_t type, image, channels_last;
    int64_t images, groups, channels, height, width;  // channels: of a group
    // Codes, channels of a group padded to a multiple of 4; distances in bytes. Pixel (0, 0) lies behind the border.
    uint8_t* codes;
    int64_t code_image, code_row, code_pixel, padded, top, bottom, left, right;
    Quantizer quantizer;
    int64_t shift;  // from codes to bytes
    float* scale;   // of each image, or of all if given
    int32_t* zero;
    int64_t threads;
};

// What rounds numbers to bytes: clamping before rounding gives what clamping after it would.
struct CodeMaker {
    Floats inverse, least, most;
    Ints zeros;

    CodeMaker(const Quantizer& q, float scale, int32_t zero, int64_t shift)
        : inverse(broadcast(1.0f / scale)), least(broadcast(q.low - zero)), most(broadcast(q.high - zero)),
          zeros(Ints{} + (int32_t)(zero + shift)) {}

    INLINE Ints of(Floats x) const { return round_to_ints(smaller(larger(x * inverse, least), most)) + zeros; }
};

struct Extremes {
    float low = 0, high = 0;
    int32_t lost = 0;
};

INLINE Ints is_lost(Floats x) { return ((Ints)x & MAGNITUDE) >= INFINITE; }

// Of `count` numbers and zero.
inline Extremes extremes_of(const float* x, int64_t count) {
    Floats lows = {}, highs = {};
    Ints lost = {};
    int64_t i = 0;
    auto add = [&](Floats v) {
        lows = smaller(lows, v);
        highs = larger(highs, v);
        lost |= is_lost(v);
    };
    for (; i + LANES <= count; i += LANES) add(load<Floats>(x + i));
    if (i < count) {
        float last[LANES] = {};
        memcpy(last, x + i, (count - i) * 4);
        add(load<Floats>(last));
    }
    Extremes out;
    for (int j = 0; j < LANES; j++) {
        out.low = lows[j] < out.low ? lows[j] : out.low;
        out.high = highs[j] > out.high ? highs[j] : out.high;
        out.lost |= lost[j];
    }
    return out;
}

constexpr int64_t CONV_CHUNK = 4096;  // numbers that are converted to fp32 at a time

// A scale for each image: NaN for those that hold a NaN or an infinity.
inline void choose_image_scales(const ConvCodesCall& c) {
    static thread_local Scratch scratch;
    int64_t size = c.groups * c.channels * c.height * c.width, pieces = (size + 4 * CONV_CHUNK - 1) / (4 * CONV_CHUNK);
    Extremes* found = scratch.get<Extremes>(c.images * pieces);
    parallel_for(c.images * pieces, c.threads, [&](int64_t task) {
        alignas(64) float buffer[CONV_CHUNK];
        int64_t start = task % pieces * 4 * CONV_CHUNK, stop = start + 4 * CONV_CHUNK < size ? start + 4 * CONV_CHUNK : size;
        Extremes all;
        for (; start < stop; start += CONV_CHUNK) {
            int64_t count = stop - start < CONV_CHUNK ? stop - start : CONV_CHUNK;
            const char* from = (const char*)c.x + (task / pieces * c.image + start) * size_of(c.type);
            if (c.type != FLOAT32) to_float(from, c.type, count, buffer);
            Extremes one = extremes_of(c.type == FLOAT32 ? (const float*)from : buffer, count);
            all.low = one.low < all.low ? one.low : all.low;
            all.high = one.high > all.high ? one.high : all.high;
            all.lost |= one.lost;
        }
        found[task] = all;
    });
    for (int64_t b = 0; b < c.images; b++) {
        Extremes all;
        for (int64_t i = b * pieces; i < (b + 1) * pieces; i++) {
            all.low = found[i].low < all.low ? found[i].low : all.low;
            all.high = found[i].high > all.high ? found[i].high : all.high;
            all.lost |= found[i].lost;
        }
        float zero = 0, scale = scale_of(c.quantizer, all.low, all.high, &zero);
        c.scale[b] = all.lost ? __builtin_nanf("") : scale;
        c.zero[b] = zero;
    }
}

// The border of one image: the code of zero.
inline void fill_border(const ConvCodesCall& c, uint8_t* image, int value) {
    int64_t left = c.left * c.code_pixel, right = c.right * c.code_pixel, inner = c.width * c.code_pixel;
    uint8_t* first = image - c.top * c.code_row - left;
    if (c.code_row == left + inner + right) {
        memset(first, value, c.top * c.code_row + left);
        // The right end of a row and the left one of the next are one piece.
        for (int64_t h = 0; h + 1 < c.height; h++) memset(image + h * c.code_row + inner, value, left + right);
        memset(image + (c.height - 1) * c.code_row + inner, value, right + c.bottom * c.code_row);
        return;
    }
    for (int64_t h = -c.top; h < c.height + c.bottom; h++) {
        uint8_t* row = image + h * c.code_row;
        bool inside = h >= 0 && h < c.height;
        memset(row - left, value, inside ? left : left + inner + right);
        if (inside) memset(row + inner, value, right);
    }
}

constexpr int64_t CONV_PIXELS = 64;  // that are quantized at a time

// Pixels `start` to `stop` of an image whose channels lie apart: four channels of a pixel are written at once.
inline int32_t quantize_planes(const ConvCodesCall& c, const char* x, uint8_t* image, const CodeMaker& make, int value,
                               int64_t start, int64_t stop) {
    alignas(64) float planes[4][CONV_PIXELS + LANES];
    alignas(64) int32_t words[CONV_PIXELS + LANES];
    uint8_t* to[CONV_PIXELS];
    Ints lost = {};
    int64_t count = stop - start, area = c.height * c.width;
    for (int64_t i = 0, h = start / c.width, w = start % c.width; i < count; i++) {
        to[i] = image + h * c.code_row + w * c.code_pixel;
        if (++w == c.width) w = 0, h++;
    }
    for (int64_t g = 0; g < c.groups; g++) {
        for (int64_t quad = 0; quad < c.padded; quad += 4) {
            const float* rows[4];
            int64_t real = c.channels - quad < 4 ? c.channels - quad : 4;
            for (int64_t j = 0; j < real; j++) {
                const char* from = x + ((g * c.channels + quad + j) * area + start) * size_of(c.type);
                rows[j] = (const float*)from;
                // Whole vectors are read.
                if (c.type != FLOAT32 || count % LANES) {
                    to_float(from, c.type, count, planes[j]);
                    for (int64_t i = count; i < round_up(count, LANES); i++) planes[j][i] = 0;
                    rows[j] = planes[j];
                }
            }
            uint32_t rest = 0;
            for (int64_t j = real; j < 4; j++) rest |= (uint32_t)value << 8 * j;
            for (int64_t i = 0; i < count; i += LANES) {
                Ints word = Ints{} + (int32_t)rest;
                for (int64_t j = 0; j < real; j++) {
                    Floats v = load<Floats>(rows[j] + i);
                    lost |= is_lost(v);
                    word |= make.of(v) << (int)(8 * j);
                }
                store(words + i, word);
            }
            int64_t at = g * c.padded + quad;
            for (int64_t i = 0; i < count; i++) memcpy(to[i] + at, words + i, 4);
        }
    }
    return sum(lost);
}

// The same where channels come last.
inline int32_t quantize_pixels(const ConvCodesCall& c, const char* x, uint8_t* image, const CodeMaker& make, int value,
                               int64_t start, int64_t stop) {
    alignas(64) float buffer[CONV_CHUNK + LANES];
    alignas(64) uint8_t bytes[CONV_CHUNK + LANES];
    Ints lost = {};
    int64_t all = c.groups * c.channels;
    bool dense = c.groups * c.padded == all && c.code_pixel == all;
    for (int64_t p = start; p < stop;) {
        int64_t h = p / c.width, w = p % c.width, left = c.width - w < stop - p ? c.width - w : stop - p;
        uint8_t* to = image + h * c.code_row + w * c.code_pixel;
        // Channels of a pixel in pieces, or several pixels at once.
        int64_t room = CONV_CHUNK / all, pixels = room < 1 ? 1 : left < room ? left : room;
        for (int64_t first = 0; first < pixels * all; first += CONV_CHUNK) {
            int64_t count = pixels * all - first < CONV_CHUNK ? pixels * all - first : CONV_CHUNK;
            const char* from = x + (p * all + first) * size_of(c.type);
            const float* values = (const float*)from;
            int64_t tail = count % LANES, whole = count - tail;
            if (c.type != FLOAT32) {
                to_float(from, c.type, count, buffer);
                values = buffer;
            }
            uint8_t* out = dense ? to + first : bytes;
            for (int64_t i = 0; i < whole; i += LANES) {
                Floats v = load<Floats>(values + i);
                lost |= is_lost(v);
                store_bytes((int8_t*)out + i, make.of(v));
            }
            if (tail) {
                float last[LANES] = {};
                int8_t codes[LANES];
                memcpy(last, values + whole, tail * 4);
                Floats v = load<Floats>(last);
                lost |= is_lost(v);
                store_bytes(codes, make.of(v));
                memcpy(out + whole, codes, tail);
            }
            if (dense) continue;
            for (int64_t i = 0; i < count;) {
                int64_t channel = (first + i) % all, g = channel / c.channels, inside = channel % c.channels;
                int64_t length = c.channels - inside < count - i ? c.channels - inside : count - i;
                uint8_t* at = to + (first + i) / all * c.code_pixel + g * c.padded + inside;
                memcpy(at, bytes + i, length);
                if (inside + length == c.channels) memset(at + length, value, c.padded - c.channels);
                i += length;
            }
        }
        p += pixels;
    }
    return sum(lost);
}

// Codes, and the scales of images if they are not given. Gives whether there is a NaN or an infinity.
inline int64_t quantize_images(const ConvCodesCall& c) {
    bool given = c.quantizer.given;
    if (!given) choose_image_scales(c);
    int64_t area = c.height * c.width, pieces = (area + CONV_PIXELS - 1) / CONV_PIXELS, lost = 0;
    parallel_for(c.images * pieces, c.threads, [&](int64_t task) {
        int64_t b = task / pieces, start = task % pieces * CONV_PIXELS, stop = start + CONV_PIXELS < area ? start + CONV_PIXELS : area;
        int64_t at = given ? 0 : b;
        int value = c.zero[at] + c.shift;
        CodeMaker make(c.quantizer, c.scale[at], c.zero[at], c.shift);
        uint8_t* image = c.codes + b * c.code_image;
        const char* x = (const char*)c.x + b * c.image * size_of(c.type);
        auto quantize = c.channels_last ? quantize_pixels : quantize_planes;
        if (quantize(c, x, image, make, value, start, stop)) __atomic_store_n(&lost, 1, __ATOMIC_RELAXED);
        if (start == 0) fill_border(c, image, value);
    });
    return lost;
}

}  // namespace
