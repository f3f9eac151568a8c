// Convolutions of codes: the geometry, and the weight as the kernels read it.
//
//     sum[b, n, p] = sum_{t, c} (u[b, c, stride p + dilation t] - zero) w[n, t, c]
//
// u are bytes without a sign: those of signed codes are shifted by 128. Images lie channels last, in a border of zero points
// as wide as the padding, so that a tap is a constant distance from its window. Nothing is gathered: for each window the
// kernels have the address of its first byte, for each tap its distance (indirect convolution, Dukhan, arXiv 1907.02129).
#pragma once

#include "quantize.h"

namespace {

// Per group: `channels` of the input, `features` of the result.
struct ConvShape {
    int64_t images, groups, channels, features;
    int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, out_h, out_w;

    int64_t taps() const { return kernel_h * kernel_w; }
    int64_t all_features() const { return groups * features; }
    int64_t pixels() const { return out_h * out_w; }
    // One channel for each group: its products run along the channels.
    bool depthwise() const { return groups > 1 && channels == 1 && features == 1; }
    // Channels of a group in memory.
    int64_t padded() const { return round_up(channels, 4); }
};

// Codes (image, row, pixel, channel), distances in bytes; `data` is the byte below the first tap of the first window.
struct ConvImages {
    const uint8_t* data;
    int64_t image, row, pixel;
};

// To each lane of `total`, the products of four unsigned bytes with four signed ones, exactly.
INLINE Ints add_dot4(Ints total, Ints unsigned_bytes, Ints signed_bytes) {
#if defined(HAS_VNNI)
    return dot4(total, unsigned_bytes, signed_bytes);
#elif defined(__SSE4_1__)
    // Pairs of 16-bit numbers: pairs of bytes would saturate.
    typedef int16_t Signed __attribute__((vector_size(WIDTH)));
    Ints even_x = unsigned_bytes & 0x00ff00ff, odd_x = (Ints)((Shorts)unsigned_bytes >> 8);
    Signed odd_w = (Signed)signed_bytes >> 8, even_w = (Signed)((Shorts)signed_bytes << 8) >> 8;
#if defined(__AVX512BW__)
    Ints even = (Ints)_mm512_madd_epi16((__m512i)even_x, (__m512i)even_w);
    Ints odd = (Ints)_mm512_madd_epi16((__m512i)odd_x, (__m512i)odd_w);
#elif defined(__AVX2__)
    Ints even = (Ints)_mm256_madd_epi16((__m256i)even_x, (__m256i)even_w);
    Ints odd = (Ints)_mm256_madd_epi16((__m256i)odd_x, (__m256i)odd_w);
#else
    Ints even = (Ints)_mm_madd_epi16((__m128i)even_x, (__m128i)even_w);
    Ints odd = (Ints)_mm_madd_epi16((__m128i)odd_x, (__m128i)odd_w);
#endif
    return total + even + odd;
#else
    Ints x = unsigned_bytes, w = signed_bytes;
    return total + (x & 255) * (w << 24 >> 24) + (x >> 8 & 255) * (w << 16 >> 24) + (x >> 16 & 255) * (w << 8 >> 24) +
           (x >> 24 & 255) * (w >> 24);
#endif
}

// Vectors of features that are multiplied together.
constexpr int CONV_VECTORS = REGISTERS == 32 ? 4 : 2;
// Features or channels of a block, at most.
constexpr int CONV_BLOCK = CONV_VECTORS * LANES > WIDTH ? CONV_VECTORS * LANES : WIDTH;

// Features that are multiplied together: [tap][channel / 4][vector][lane][4] from `weights` on. For depthwise convolutions,
// channels: [tap / 4][4][WIDTH], in the order in which four taps are interleaved.
struct ConvBlock {
    int64_t first, count, vectors, channel, weights;
};

// The blocks in order; calls body(block), and returns the bytes of the packed weight.
template <class Body>
int64_t conv_blocks(const ConvShape& s, const Body& body) {
    int64_t at = 0;
    if (s.depthwise()) {
        int64_t size = round_up(s.taps(), 4) * WIDTH;
        for (int64_t first = 0; first < s.groups; first += WIDTH, at += size)
            body(ConvBlock{first, s.groups - first < WIDTH ? s.groups - first : WIDTH, 4, first, at});
        return at;
    }
    int64_t vectors = (s.features + LANES - 1) / LANES, blocks = (vectors + CONV_VECTORS - 1) / CONV_VECTORS;
    for (int64_t g = 0; g < s.groups; g++) {
        for (int64_t b = 0; b < blocks; b++) {
            int64_t start = vectors * b / blocks, width = vectors * (b + 1) / blocks - start, left = s.features - start * LANES;
            int64_t count = left < width * LANES ? left : width * LANES;
            body(ConvBlock{g * s.features + start * LANES, count, width, g * s.padded(), at});
            at += s.taps() * s.padded() * width * LANES;
        }
    }
    return at;
}

inline int32_t sum_codes_of(const int8_t* codes, int64_t count) {
    int32_t total = 0;
    for (int64_t i = 0; i < count; i++) total += codes[i];
    return total;
}

struct ConvPackCall {
    ConvShape shape;
    const int8_t* codes;  // (features, taps * channels)
    int64_t row_bytes;
    int8_t* packed;  // or null: only its size is wanted
    int32_t* sums;   // (features): of the codes
};

inline int64_t pack_conv(const ConvPackCall& call) {
    const ConvShape& s = call.shape;
    int64_t size = conv_blocks(s, [](const ConvBlock&) {});
    if (!call.packed) return size;
    memset(call.packed, 0, size);
    int64_t taps = s.taps();
    for (int64_t n = 0; n < s.all_features(); n++) call.sums[n] = sum_codes_of(call.codes + n * call.row_bytes, taps * s.channels);
    conv_blocks(s, [&](const ConvBlock& block) {
        int8_t* to = call.packed + block.weights;
        for (int64_t i = 0; i < block.count; i++) {
            const int8_t* from = call.codes + (block.first + i) * call.row_bytes;
            for (int64_t t = 0; t < taps; t++) {
                if (s.depthwise()) {
                    int64_t vector = i % 16 / 4, lane = i / 16 * 4 + i % 4;
                    to[(t / 4 * 4 + vector) * WIDTH + lane * 4 + t % 4] = from[t];
                    continue;
                }
                for (int64_t c = 0; c < s.channels; c++) {
                    int64_t step = (t * s.padded() + c) / 4;
                    to[(step * block.vectors * LANES + i) * 4 + c % 4] = from[t * s.channels + c];
                }
            }
        }
    });
    return size;
}

}  // namespace
