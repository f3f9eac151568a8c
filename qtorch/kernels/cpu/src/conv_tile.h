// Convolutions of codes: tiles of a few windows by a few vectors of features, exact in int32.
#pragma once

#include "amx.h"
#include "conv_finish.h"

namespace {

constexpr int64_t CONV_STRIP = 48;  // pixels whose sums are held at a time

// Where the bytes of a window lie: `runs` pieces of `bytes`, each at its distance.
struct ConvTaps {
    const int64_t* offset;
    int64_t runs, bytes;
};

// Windows of a tile: as many as there are registers for sums.
constexpr int conv_windows(int vectors) {
#if defined(HAS_VNNI) || !defined(__SSE4_1__)
    int most = (REGISTERS - 2 - vectors) / vectors;
#else
    int most = vectors == 1 ? 4 : 3;  // the factors take registers too
#endif
    return most > 8 ? 8 : most;
}

template <int P, int V>
void conv_tile(const uint8_t* const* windows, const int8_t* weights, const ConvTaps& taps, int32_t* sums, int64_t ld) {
    Ints total[P][V] = {};
    for (int64_t r = 0; r < taps.runs; r++) {
        const uint8_t* x[P];
        UNROLL for (int p = 0; p < P; p++) x[p] = windows[p] + taps.offset[r];
        for (int64_t k = 0; k < taps.bytes; k += 4, weights += V * WIDTH) {
            Ints w[V];
            UNROLL for (int v = 0; v < V; v++) w[v] = load<Ints>(weights + v * WIDTH);
            UNROLL for (int p = 0; p < P; p++) {
                Ints u = Ints{} + load<int32_t>(x[p] + k);
                UNROLL for (int v = 0; v < V; v++) total[p][v] = add_dot4(total[p][v], u, w[v]);
            }
        }
    }
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int v = 0; v < V; v++) store(sums + p * ld + v * LANES, total[p][v]);
}

using ConvTile = void (*)(const uint8_t* const*, const int8_t*, const ConvTaps&, int32_t*, int64_t);

template <int V, int... P>
ConvTile conv_tile_of(int64_t windows, std::integer_sequence<int, P...>) {
    static constexpr ConvTile TILES[] = {conv_tile<P + 1, V>...};
    return TILES[windows - 1];
}

// All windows of a strip, in tiles of about the same size.
template <int V>
void conv_strip(const uint8_t* const* windows, int64_t count, const int8_t* weights, const ConvTaps& taps, int32_t* sums,
                int64_t ld) {
    constexpr int MOST = conv_windows(V);
    int64_t tiles = (count + MOST - 1) / MOST;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t start = count * t / tiles, stop = count * (t + 1) / tiles;
        conv_tile_of<V>(stop - start, std::make_integer_sequence<int, MOST>{})(windows + start, weights, taps, sums + start * ld, ld);
    }
}

#if defined(__AMX_INT8__)

// Bytes of a run that fill a row of a matrix tile: most of those that divide it; 0 where they are few.
inline int64_t conv_amx_step(int64_t bytes) {
    for (int64_t step = 64; step >= 24; step -= 4)
        if (bytes % step == 0) return step;
    return 0;
}

template <int C, int B>
INLINE void multiply_unsigned_bytes() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm4, %%tmm%c0" ::"i"(C), "i"(4), "i"(B));
}

// 16 windows by V times 16 features; the windows are read where they lie if their distance is constant.
template <int V>
void conv_amx_tile(const uint8_t* const* windows, int64_t step, const int8_t* weights, const ConvTaps& taps, int32_t* sums,
                   int64_t ld) {
    alignas(64) uint8_t gathered[16 * 64];
    int64_t apart = windows[1] - windows[0];
    bool regular = true;
    for (int i = 2; i < 16; i++) regular &= windows[i] - windows[i - 1] == apart;
    zero_tile<0>();
    if (V > 1) zero_tile<1>();
    if (V > 2) zero_tile<2>();
    if (V > 3) zero_tile<3>();
    for (int64_t r = 0; r < taps.runs; r++) {
        for (int64_t k = 0; k < taps.bytes; k += step, weights += step / 4 * V * WIDTH) {
            int64_t at = taps.offset[r] + k;
            if (regular) {
                load_tile<4>(windows[0] + at, apart);
            } else {
                UNROLL for (int i = 0; i < 16; i++) store(gathered + i * 64, load<Bytes>(windows[i] + at));
                load_tile<4>(gathered, 64);
            }
            load_tile<6>(weights, V * WIDTH);
            multiply_unsigned_bytes<0, 6>();
            if (V > 1) {
                load_tile<7>(weights + WIDTH, V * WIDTH);
                multiply_unsigned_bytes<1, 7>();
            }
            if (V > 2) {
                load_tile<6>(weights + 2 * WIDTH, V * WIDTH);
                multiply_unsigned_bytes<2, 6>();
            }
            if (V > 3) {
                load_tile<7>(weights + 3 * WIDTH, V * WIDTH);
                multiply_unsigned_bytes<3, 7>();
            }
        }
    }
    store_tile<0>(sums, ld * 4);
    if (V > 1) store_tile<1>(sums + 16, ld * 4);
    if (V > 2) store_tile<2>(sums + 32, ld * 4);
    if (V > 3) store_tile<3>(sums + 48, ld * 4);
}

template <int V>
void conv_amx_strip(const uint8_t* const* windows, int64_t count, int64_t step, const int8_t* weights, const ConvTaps& taps,
                    int32_t* sums, int64_t ld) {
    for (int64_t i = 0; i < count; i += 16) conv_amx_tile<V>(windows + i, step, weights, taps, sums + i * ld, ld);
}

#endif

inline void multiply_block(const ConvBlock& block, const uint8_t* const* windows, int64_t count, int64_t amx_step,
                           const int8_t* weights, const ConvTaps& taps, int32_t* sums, int64_t ld) {
#if defined(__AMX_INT8__)
    if (amx_step) {
        if (block.vectors == 1) conv_amx_strip<1>(windows, count, amx_step, weights, taps, sums, ld);
        if (block.vectors == 2) conv_amx_strip<2>(windows, count, amx_step, weights, taps, sums, ld);
        if (block.vectors == 3) conv_amx_strip<3>(windows, count, amx_step, weights, taps, sums, ld);
        if (block.vectors == 4) conv_amx_strip<4>(windows, count, amx_step, weights, taps, sums, ld);
        return;
    }
#endif
    if (block.vectors == 1) conv_strip<1>(windows, count, weights, taps, sums, ld);
    if (block.vectors == 2) conv_strip<2>(windows, count, weights, taps, sums, ld);
    if constexpr (CONV_VECTORS == 4) {
        if (block.vectors == 3) conv_strip<3>(windows, count, weights, taps, sums, ld);
        if (block.vectors == 4) conv_strip<4>(windows, count, weights, taps, sums, ld);
    }
}

constexpr int64_t CONV_WEIGHT_BYTES = 512 << 10;  // of a weight that stays in cache while windows come and go

inline void multiply_conv(const ConvShape& s, const ConvImages& x, const int8_t* packed, const ConvFinish& f, int64_t threads) {
    static thread_local Scratch offset_scratch, block_scratch;
    // A row of the kernel is one piece where its pixels are neighbours in memory.
    bool joined = s.groups == 1 && s.dilation_w == 1 && x.pixel == s.padded();
    ConvTaps taps{nullptr, joined ? s.kernel_h : s.taps(), joined ? s.kernel_w * s.padded() : s.padded()};
    if (joined && s.kernel_h == 1) taps.runs = 1;
    int64_t* offset = offset_scratch.get<int64_t>(taps.runs);
    for (int64_t r = 0; r < taps.runs; r++) {
        int64_t h = joined ? r : r / s.kernel_w, w = joined ? 0 : r % s.kernel_w;
        offset[r] = h * s.dilation_h * x.row + w * s.dilation_w * x.pixel;
    }
    taps.offset = offset;
    int64_t blocks = 0;
    int64_t bytes = conv_blocks(s, [&](const ConvBlock&) { blocks++; });
    ConvBlock* of_blocks = block_scratch.get<ConvBlock>(blocks);
    blocks = 0;
    conv_blocks(s, [&](const ConvBlock& block) { of_blocks[blocks++] = block; });
    int64_t amx_step = 0;
#if defined(__AMX_INT8__)
    amx_step = conv_amx_step(taps.bytes);
#endif
    int64_t area = s.pixels(), strips = (area + CONV_STRIP - 1) / CONV_STRIP, tasks = s.images * strips * blocks;
    bool windows_outside = bytes <= CONV_WEIGHT_BYTES;
    parallel(tasks, threads, [&](Tasks& all) {
        alignas(64) int32_t sums[CONV_STRIP * CONV_BLOCK];
        const uint8_t* windows[CONV_STRIP];
        int64_t last = -1, ld = CONV_BLOCK;
#if defined(__AMX_INT8__)
        TileConfig config(amx_step ? amx_step : 64);
#endif
        for (int64_t task; (task = all.next()) >= 0;) {
            int64_t b = windows_outside ? task % blocks : task / (s.images * strips);
            int64_t strip = windows_outside ? task / blocks : task % (s.images * strips);
            int64_t image = strip / strips, index = strip % strips;
            // Whole strips fill matrix tiles, equal ones the others.
            int64_t start = amx_step ? index * CONV_STRIP : area * index / strips;
            int64_t stop = amx_step ? start + CONV_STRIP : area * (index + 1) / strips;
            if (stop > area) stop = area;
            const ConvBlock& block = of_blocks[b];
            if (last != strip || s.groups > 1) {
                const uint8_t* from = x.data + image * x.image + block.channel;
                int64_t h = start / s.out_w, w = start % s.out_w;
                for (int64_t i = 0; i < CONV_STRIP; i++) {
                    windows[i] = from + h * s.stride_h * x.row + w * s.stride_w * x.pixel;
                    if (start + i + 1 >= stop) continue;  // the last one fills the tile
                    if (++w == s.out_w) w = 0, h++;
                }
                last = strip;
            }
            multiply_block(block, windows, stop - start, amx_step, packed + block.weights, taps, sums, ld);
            finish_strip(s, f, {image, start, stop - start}, block, sums, ld);
        }
    });
}

}  // namespace
