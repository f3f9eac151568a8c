// Convolutions of codes in which each channel is by itself: vectors run along the channels, and the bytes of four taps are
// interleaved, so that one instruction multiplies and adds them.
#pragma once

#include "conv_finish.h"

namespace {

constexpr int64_t DEPTHWISE_STRIP = 32;

// Lowest and highest halves of each 16 bytes of a and b, interleaved by bytes, and by pairs.
template <bool HIGH>
INLINE Bytes interleave_bytes(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
    return (Bytes)(HIGH ? _mm512_unpackhi_epi8((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi8((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    return (Bytes)(HIGH ? _mm256_unpackhi_epi8((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi8((__m256i)a, (__m256i)b));
#elif defined(__SSE4_1__)
    return (Bytes)(HIGH ? _mm_unpackhi_epi8((__m128i)a, (__m128i)b) : _mm_unpacklo_epi8((__m128i)a, (__m128i)b));
#else
    Bytes out;
    for (int i = 0; i < WIDTH; i++) out[i] = (i % 2 ? b : a)[i / 16 * 16 + (HIGH ? 8 : 0) + i % 16 / 2];
    return out;
#endif
}

template <bool HIGH>
INLINE Ints interleave_pairs(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
    return (Ints)(HIGH ? _mm512_unpackhi_epi16((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    return (Ints)(HIGH ? _mm256_unpackhi_epi16((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi16((__m256i)a, (__m256i)b));
#elif defined(__SSE4_1__)
    return (Ints)(HIGH ? _mm_unpackhi_epi16((__m128i)a, (__m128i)b) : _mm_unpacklo_epi16((__m128i)a, (__m128i)b));
#else
    Shorts x = (Shorts)a, y = (Shorts)b, out;
    for (int i = 0; i < WIDTH / 2; i++) out[i] = (i % 2 ? y : x)[i / 8 * 8 + (HIGH ? 4 : 0) + i % 8 / 2];
    return (Ints)out;
#endif
}

// WIDTH channels of one window. Lane 4 i + j of vector v has channel 16 i + 4 v + j.
INLINE void depthwise_window(const uint8_t* window, const int64_t* offset, int64_t quads, const int8_t* weights, Ints (&total)[4]) {
    for (int64_t q = 0; q < quads; q++, offset += 4, weights += 4 * WIDTH) {
        Bytes a = load<Bytes>(window + offset[0]), b = load<Bytes>(window + offset[1]);
        Bytes c = load<Bytes>(window + offset[2]), d = load<Bytes>(window + offset[3]);
        Bytes low_ab = interleave_bytes<false>(a, b), high_ab = interleave_bytes<true>(a, b);
        Bytes low_cd = interleave_bytes<false>(c, d), high_cd = interleave_bytes<true>(c, d);
        total[0] = add_dot4(total[0], interleave_pairs<false>(low_ab, low_cd), load<Ints>(weights));
        total[1] = add_dot4(total[1], interleave_pairs<true>(low_ab, low_cd), load<Ints>(weights + WIDTH));
        total[2] = add_dot4(total[2], interleave_pairs<false>(high_ab, high_cd), load<Ints>(weights + 2 * WIDTH));
        total[3] = add_dot4(total[3], interleave_pairs<true>(high_ab, high_cd), load<Ints>(weights + 3 * WIDTH));
    }
}

// Whole vectors are read: there are WIDTH bytes behind the last pixel.
inline void multiply_depthwise(const ConvShape& s, const ConvImages& x, const int8_t* packed, const ConvFinish& f, int64_t threads) {
    static thread_local Scratch offset_scratch;
    int64_t taps = s.taps(), quads = (taps + 3) / 4, blocks = (s.groups + WIDTH - 1) / WIDTH;
    int64_t* offset = offset_scratch.get<int64_t>(quads * 4);
    for (int64_t t = 0; t < quads * 4; t++)  // those that are too many have weights of zero
        offset[t] = t < taps ? t / s.kernel_w * s.dilation_h * x.row + t % s.kernel_w * s.dilation_w * x.pixel : 0;
    int64_t area = s.pixels(), strips = (area + DEPTHWISE_STRIP - 1) / DEPTHWISE_STRIP;
    parallel_for(s.images * strips * blocks, threads, [&](int64_t task) {
        alignas(64) int32_t sums[DEPTHWISE_STRIP * WIDTH];
        int64_t b = task % blocks, strip = task / blocks, image = strip / strips, index = strip % strips;
        int64_t start = area * index / strips, stop = area * (index + 1) / strips, first = b * WIDTH;
        ConvBlock block{first, s.groups - first < WIDTH ? s.groups - first : WIDTH, 4, first, b * quads * 4 * WIDTH};
        const uint8_t* from = x.data + image * x.image + first;
        for (int64_t i = 0, h = start / s.out_w, w = start % s.out_w; i < stop - start; i++) {
            Ints total[4] = {};
            depthwise_window(from + h * s.stride_h * x.row + w * s.stride_w * x.pixel, offset, quads, packed + block.weights, total);
            if (++w == s.out_w) w = 0, h++;
            UNROLL for (int v = 0; v < 4; v++)
                UNROLL for (int j = 0; j < WIDTH / 16; j++)
                    memcpy(sums + i * WIDTH + j * 16 + v * 4, (const char*)&total[v] + j * 16, 16);
        }
        finish_strip(s, f, {image, start, stop - start}, block, sums, WIDTH);
    });
}

}  // namespace
