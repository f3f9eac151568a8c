// Many rows of x on a processor with matrix tiles (AMX): bf16 products, added up in fp32.
//
//     y[m, n] = sum_g scale[n, g] * (sum_{k in g} c[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// Codes are exact in bf16, and x is the exact sum of slices that are: three for fp32, two for fp16. Each slice is so
// many more rows of x. A tile of the weight, 16 rows of 32 codes, is the left operand as it lies in memory.
#pragma once

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include "dot.h"
#include "matrix.h"

namespace {

constexpr int AMX_ROWS = 32;      // of the weight, in two tiles
constexpr int AMX_COLUMNS = 512;  // decoded at a time


// The operating system gives the tiles to processes that ask.
inline bool request_amx() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static bool granted = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return granted;
}

// All eight tiles of 16 rows, those of the left operand (4, 5) `bytes` wide, those of the right one (6, 7) as high.
struct TileConfig {
    explicit TileConfig(int bytes) {
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t width[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) {
            config.width[i] = i == 4 || i == 5 ? bytes : 64;
            config.rows[i] = i >= 6 ? bytes / 4 : 16;
        }
        _tile_loadconfig(&config);
    }
    ~TileConfig() { _tile_release(); }
};

// The next bf16 slice of 16 numbers; `x` keeps what is left. Truncated, so that huge numbers do not become infinite.
INLINE __m512i next_slice(Floats& x) {
    constexpr int32_t HIGH = (int32_t)0xffff0000, EXPONENT = 0x7f800000;
    Ints bits = (Ints)x & HIGH;
    // Nothing is left of infinity.
    x = (Floats)((Ints)(x - (Floats)bits) & ((bits & EXPONENT) != EXPONENT));
    return (__m512i)bits;
}

// x to panels of 16 rows, [slice][panel][k / 2][row][2] bf16, and the sums of its groups, [group][row].
inline void bfloat_panels(const Weight& w, const Input& x, int slices, uint16_t* out, float* sums, int64_t threads) {
    static thread_local Scratch row_scratch;
    int64_t k32 = round_up(w.k, AMX_STEP), panels = (x.rows + 15) / 16;
    float* rows = row_scratch.get<float>(panels * 16 * k32);
    x.to_floats(w.k, rows, k32, threads);
    memset(rows + x.rows * k32, 0, (panels * 16 - x.rows) * k32 * 4);
    if (sums) {
        parallel_for(w.groups, threads, [&](int64_t g) {
            for (int64_t m = 0; m < panels * 16; m++) sums[g * panels * 16 + m] = sum_of(rows + m * k32 + g * w.group, w.group);
        });
    }
    parallel_for(panels * (k32 / AMX_STEP), threads, [&](int64_t task) {
        int64_t panel = task % panels, k = task / panels * AMX_STEP;
        alignas(64) uint32_t pairs[3][16][16];
        for (int64_t m = 0; m < 16; m++) {
            const float* p = rows + (panel * 16 + m) * k32 + k;
            Floats low = load<Floats>(p), high = load<Floats>(p + 16);
            for (int s = 0; s < slices; s++) {
                // The upper halves of all 32 numbers, in order.
                const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                       29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
                __m512i a = next_slice(low), b = next_slice(high);
                _mm512_store_si512(pairs[s][m], _mm512_permutex2var_epi16(a, order, b));
            }
        }
        for (int s = 0; s < slices; s++) {
            uint32_t* to = (uint32_t*)out + ((s * panels + panel) * k32 / 2 + k / 2) * 16;
            for (int64_t i = 0; i < 16; i++)
                for (int64_t m = 0; m < 16; m++) to[i * 16 + m] = pairs[s][m][i];
        }
    });
    row_scratch.trim();
}

INLINE void to_bfloat(const int8_t* codes, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; i += 32) {
        __m512 low = (__m512)to_floats(widen(codes + i)), high = (__m512)to_floats(widen(codes + i + 16));
        store(out + i, _mm512_cvtne2ps_pbh(high, low));
    }
}

// products[i][j] (16, 16) = sum over `columns` of the tiles a[i] (16, ld) and the panels b[j], i < 2, j < PANELS.
template <int PANELS>
INLINE void multiply_bfloat(const uint16_t* a, int64_t ld, const uint16_t* b, int64_t panel, int64_t columns,
                            float* products) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        _tile_loadd(4, a + k, ld * 2);
        _tile_loadd(6, b + k * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + 16 * ld + k, ld * 2);
        _tile_dpbf16ps(2, 5, 6);
        if (PANELS == 1) continue;
        _tile_loadd(7, b + panel + k * 16, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, products, PANELS * 64);
    _tile_stored(2, products + PANELS * 256, PANELS * 64);
    if (PANELS == 1) return;
    _tile_stored(1, products + 16, PANELS * 64);
    _tile_stored(3, products + PANELS * 256 + 16, PANELS * 64);
}

inline void multiply_amx(const Weight& w, const Input& x, const Output& y, int64_t threads) {
    static thread_local Scratch panel_scratch, group_scratch;
    int slices = x.type == BFLOAT16 ? 1 : x.type == FLOAT16 ? 2 : 3;
    int64_t k32 = round_up(w.k, AMX_STEP), m16 = round_up(x.rows, 16);
    int64_t panels = slices * m16 / 16, ldc = panels * 16, panel = k32 * 16;
    uint16_t* packed = panel_scratch.get<uint16_t>(panels * panel);
    float* sums = w.has_offset() ? group_scratch.get<float>(w.groups * m16) : nullptr;
    bfloat_panels(w, x, slices, packed, sums, threads);
    parallel((w.n + AMX_ROWS - 1) / AMX_ROWS, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, tile_scratch, scale_scratch, sum_scratch;
        int8_t* codes = code_scratch.get<int8_t>(AMX_COLUMNS);
        uint16_t* tile = tile_scratch.get<uint16_t>(AMX_ROWS * AMX_COLUMNS);
        float* scale = scale_scratch.get<float>(2 * AMX_ROWS * w.groups);
        float* offset = scale + AMX_ROWS * w.groups;
        float* c = sum_scratch.get<float>(AMX_ROWS * ldc);
        alignas(64) float products[AMX_ROWS * 32];
        TileConfig config(64);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = task * AMX_ROWS, count = w.n - start < AMX_ROWS ? w.n - start : AMX_ROWS;
            for (int64_t r = 0; r < count; r++) {
                scales(w, start + r, scale + r * w.groups);
                if (sums) offsets(w, start + r, scale + r * w.groups, offset + r * w.groups);
            }
            memset(c, 0, AMX_ROWS * ldc * 4);
            for (int64_t k = 0; k < w.k; k += AMX_COLUMNS) {
                int64_t columns = w.k - k < AMX_COLUMNS ? w.k - k : AMX_COLUMNS;
                for (int64_t r = 0; r < count; r++) {
                    decode(w, start + r, k, columns, codes);
                    memset(codes + columns, 0, AMX_STEP);
                    to_bfloat(codes, columns, tile + r * AMX_COLUMNS);
                }
                for (int64_t p = 0; p < panels; p += 2) {
                    bool two = p + 1 < panels;
                    const uint16_t* b = packed + p * panel + k * 16;
                    for (int64_t i = 0; i < columns;) {
                        int64_t g = (k + i) / w.group, left = (g + 1) * w.group - k - i;
                        int64_t length = left < columns - i ? left : columns - i;
                        auto multiply = two ? multiply_bfloat<2> : multiply_bfloat<1>;
                        multiply(tile + i, AMX_COLUMNS, b + i * 16, panel, length, products);
                        for (int64_t r = 0; r < count; r++) {
                            Floats s = broadcast(scale[r * w.groups + g]);
                            float* to = c + r * ldc + p * 16;
                            const float* from = products + r * (two ? 32 : 16);
                            store(to, fma(load<Floats>(from), s, load<Floats>(to)));
                            if (two) store(to + 16, fma(load<Floats>(from + 16), s, load<Floats>(to + 16)));
                        }
                        i += length;
                    }
                }
            }
            for (int64_t r = 0; r < count; r++) {
                for (int64_t m = 0; m < m16; m += 16) {
                    float* to = c + r * ldc + m;
                    Floats total = load<Floats>(to);
                    for (int s = 1; s < slices; s++) total += load<Floats>(to + s * m16);
                    for (int64_t g = 0; sums && g < w.groups; g++)
                        total = fma(broadcast(offset[r * w.groups + g]), load<Floats>(sums + g * m16 + m), total);
                    store(to, total);
                }
            }
            y.write_transposed(x.rows, start, count, c, ldc);
        }
    });
    panel_scratch.trim();
    group_scratch.trim();
}

}  // namespace
#endif
