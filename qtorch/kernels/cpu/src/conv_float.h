// Convolutions of fp32 images with int8 weights: the same tiles, with weights dequantized to fp32 a block at a time.
//
//     y[b, n, p] = sum_{c, t} x[b, c, stride p + dilation t] (w[n, t, c] * scale[n]) + bias[n]
#pragma once

#include "conv_finish.h"

namespace {

struct ConvFloatCall {
    ConvShape shape;
    // Images (image, channel, row, column), or channels last; each contiguous.
    const float* x;
    int64_t image, channels_last, height, width, padding_h, padding_w;
    const int8_t* packed;
    const float *scale, *bias;  // bias or null
    float* out;                 // in the order of the images
    int64_t threads;
};

// Images in a border of zeros, channels last and padded with zeros.
inline const float* pad_images(const ConvFloatCall& c, int64_t padded) {
    static thread_local Scratch scratch;
    int64_t channels = c.shape.groups * c.shape.channels, area = c.height * c.width;
    if (c.channels_last && !c.padding_h && !c.padding_w && channels == padded && c.image == area * channels) return c.x;
    int64_t rows = c.height + 2 * c.padding_h, row = (c.width + 2 * c.padding_w) * padded, left = c.padding_w * padded;
    float* out = scratch.get<float>(c.shape.images * rows * row);
    parallel_for(c.shape.images * rows, c.threads, [&](int64_t task) {
        int64_t h = task % rows - c.padding_h;
        float* to = out + task * row;
        bool inside = h >= 0 && h < c.height;
        memset(to, 0, (inside ? left : row) * 4);
        if (!inside) return;
        memset(to + left + c.width * padded, 0, left * 4);
        to += left;
        const float* from = c.x + task / rows * c.image;
        if (c.channels_last) {
            from += h * c.width * channels;
            if (channels == padded) return (void)memcpy(to, from, c.width * channels * 4);
            for (int64_t w = 0; w < c.width; w++, to += padded, from += channels) {
                memcpy(to, from, channels * 4);
                memset(to + channels, 0, (padded - channels) * 4);
            }
            return;
        }
        from += h * c.width;
        for (int64_t i = 0; i < padded; i += LANES) {
            int64_t count = padded - i < LANES ? padded - i : LANES;
            for (int64_t w = 0; w < c.width; w += LANES) {
                int64_t pixels = c.width - w < LANES ? c.width - w : LANES;
                Floats block[LANES];
                for (int j = 0; j < LANES; j++) block[j] = i + j < channels ? load_first(from + (i + j) * area + w, pixels) : Floats{};
                transpose(block);
                for (int64_t j = 0; j < pixels; j++) store_first(to + (w + j) * padded + i, block[j], count);
            }
        }
    });
    return out;
}

template <int P, int V>
void conv_float_tile(const float* const* windows, const float* weights, const int64_t* offset, int64_t runs, int64_t length,
                     float* sums, int64_t ld) {
    Floats total[P][V] = {};
    for (int64_t r = 0; r < runs; r++) {
        const float* x[P];
        UNROLL for (int p = 0; p < P; p++) x[p] = windows[p] + offset[r];
        for (int64_t k = 0; k < length; k++, weights += V * LANES) {
            Floats w[V];
            UNROLL for (int v = 0; v < V; v++) w[v] = load<Floats>(weights + v * LANES);
            UNROLL for (int p = 0; p < P; p++) {
                Floats u = broadcast(x[p][k]);
                UNROLL for (int v = 0; v < V; v++) total[p][v] = fma(u, w[v], total[p][v]);
            }
        }
    }
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int v = 0; v < V; v++) store(sums + p * ld + v * LANES, total[p][v]);
}

constexpr int conv_float_windows(int vectors) {
    int most = (REGISTERS - 2 - vectors) / vectors;
    return most > 8 ? 8 : most;
}

template <int V, int... P>
auto conv_float_tile_of(int64_t windows, std::integer_sequence<int, P...>) {
    static constexpr decltype(&conv_float_tile<1, V>) TILES[] = {conv_float_tile<P + 1, V>...};
    return TILES[windows - 1];
}

template <int V>
void conv_float_strip(const float* const* windows, int64_t count, const float* weights, const int64_t* offset, int64_t runs,
                      int64_t length, float* sums, int64_t ld) {
    constexpr int MOST = conv_float_windows(V);
    int64_t tiles = (count + MOST - 1) / MOST;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t start = count * t / tiles, size = count * (t + 1) / tiles - start;
        conv_float_tile_of<V>(size, std::make_integer_sequence<int, MOST>{})(windows + start, weights, offset, runs, length,
                                                                           sums + start * ld, ld);
    }
}

// Sums (count, ld) written, with the bias.
inline void finish_floats(const ConvFloatCall& c, const ConvStrip& strip, const ConvBlock& block, float* sums, int64_t ld) {
    const ConvShape& s = c.shape;
    int64_t features = s.all_features(), pixel = strip.image * s.pixels() + strip.start;
    for (int64_t v = 0; v < block.count; v += LANES) {
        int64_t count = block.count - v;
        Floats bias = {};
        if (c.bias) bias = load_first(c.bias + block.first + v, count);
        for (int64_t i = 0; i < strip.count; i++) {
            Floats y = load<Floats>(sums + i * ld + v) + bias;
            if (c.channels_last) store_first(c.out + (pixel + i) * features + block.first + v, y, count);
            else store(sums + i * ld + v, y);
        }
    }
    if (c.channels_last) return;
    ConvFinish f{};
    f.out = c.out;
    write_planes(s, f, strip, block, sums, ld);
}

// Packed weights of a block, four channels to a lane, dequantized: [tap][channel][vector].
inline void convert_block(const ConvShape& s, const ConvBlock& block, const int8_t* packed, const float* scale, float* out) {
    int64_t steps = s.taps() * s.padded() / 4, size = block.vectors * LANES;
    const int8_t* from = packed + block.weights;
    for (int64_t i = 0; i < steps; i++, out += 4 * size) {
        for (int64_t v = 0; v < block.vectors; v++, from += WIDTH) {
            Ints four = load<Ints>(from);
            Floats of_features = load<Floats>(scale + block.first + v * LANES);
            UNROLL for (int j = 0; j < 4; j++) store(out + j * size + v * LANES, to_floats(four << (24 - 8 * j) >> 24) * of_features);
        }
    }
}

// The channels of a group are a multiple of 4, or there is one group.
inline void multiply_conv_float(const ConvFloatCall& c) {
    const ConvShape& s = c.shape;
    int64_t pixel = s.groups * s.padded(), row = (c.width + 2 * c.padding_w) * pixel;
    int64_t image_size = (c.height + 2 * c.padding_h) * row;
    const float* x = pad_images(c, pixel);
    static thread_local Scratch offset_scratch, block_scratch;
    bool joined = s.groups == 1 && s.dilation_w == 1;
    int64_t runs = joined ? s.kernel_h : s.taps(), length = joined ? s.kernel_w * s.padded() : s.padded();
    int64_t* offset = offset_scratch.get<int64_t>(runs);
    for (int64_t r = 0; r < runs; r++) {
        int64_t h = joined ? r : r / s.kernel_w, w = joined ? 0 : r % s.kernel_w;
        offset[r] = h * s.dilation_h * row + w * s.dilation_w * pixel;
    }
    int64_t blocks = 0;
    conv_blocks(s, [&](const ConvBlock&) { blocks++; });
    ConvBlock* of_blocks = block_scratch.get<ConvBlock>(blocks);
    blocks = 0;
    conv_blocks(s, [&](const ConvBlock& block) { of_blocks[blocks++] = block; });
    constexpr int64_t STRIP = 48;
    int64_t area = s.pixels(), strips = (area + STRIP - 1) / STRIP, all_strips = s.images * strips;
    parallel(blocks * all_strips, c.threads, [&](Tasks& tasks) {
        static thread_local Scratch weight_scratch;
        alignas(64) float sums[STRIP * CONV_BLOCK];
        const float* windows[STRIP];
        int64_t converted = -1, ld = CONV_BLOCK;
        float* weights = weight_scratch.get<float>(s.taps() * s.padded() * CONV_VECTORS * LANES);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            const ConvBlock& block = of_blocks[task / all_strips];
            int64_t strip = task % all_strips, image = strip / strips, index = strip % strips;
            int64_t start = area * index / strips, stop = area * (index + 1) / strips;
            if (converted != task / all_strips) convert_block(s, block, c.packed, c.scale, weights);
            converted = task / all_strips;
            const float* from = x + image * image_size + block.channel;
            for (int64_t i = 0, h = start / s.out_w, w = start % s.out_w; i < stop - start; i++) {
                windows[i] = from + h * s.stride_h * row + w * s.stride_w * pixel;
                if (++w == s.out_w) w = 0, h++;
            }
            if (block.vectors == 1) conv_float_strip<1>(windows, stop - start, weights, offset, runs, length, sums, ld);
            if (block.vectors == 2) conv_float_strip<2>(windows, stop - start, weights, offset, runs, length, sums, ld);
            if constexpr (CONV_VECTORS == 4) {
                if (block.vectors == 3) conv_float_strip<3>(windows, stop - start, weights, offset, runs, length, sums, ld);
                if (block.vectors == 4) conv_float_strip<4>(windows, stop - start, weights, offset, runs, length, sums, ld);
            }
            finish_floats(c, {image, start, stop - start}, block, sums, ld);
        }
    });
}

}  // namespace
