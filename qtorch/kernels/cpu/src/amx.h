// Many rows of x on a processor with matrix tiles (AMX): bf16 products, added up in fp32.
//
//     y[m, n] = sum_g scale[n, g] * (sum_{k in g} c[n, k] * x[m, k]) + sum_g offset[n, g] * (sum_{k in g} x[m, k])
//
// Codes are exact in bf16, and x is the exact sum of slices that are: three for fp32, two for fp16. Each slice is
// multiplied in turn. A tile of the weight, 16 rows of 32 codes, is the left operand as it lies in memory.
//
// For bf16 x the weight is dequantized to bf16 instead, as `dequantize` would, and sums run over all groups.
#pragma once

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include "dot.h"
#include "matrix.h"

namespace {

constexpr int AMX_COLUMNS = 512;  // decoded at a time
constexpr int AMX_LD = AMX_COLUMNS + 32;

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

// Instructions on tiles, whose numbers are part of them. The compiler knows that they read and write memory.
template <int T>
INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// 16 rows, or as many as the tile has, `stride` bytes apart.
template <int T>
INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}

template <int T>
INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}

// C += A times B: signed bytes, and bf16.
template <int C, int A, int B>
INLINE void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
INLINE void multiply_bfloats() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

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
    int64_t k32 = round_up(w.k, AMX_STEP), panels = (x.rows + 15) / 16, ld = x.stride;
    const float* rows = (const float*)x.data;
    if (x.type != FLOAT32 || w.k != k32) {
        float* converted = row_scratch.get<float>(x.rows * k32);
        x.to_floats(w.k, converted, k32, threads);
        rows = converted;
        ld = k32;
    }
    if (sums) {
        parallel_for(panels, threads, [&](int64_t panel) {
            for (int64_t m = panel * 16; m < panel * 16 + 16; m++)
                for (int64_t g = 0; g < w.groups; g++)
                    sums[g * panels * 16 + m] = m < x.rows ? sum_of(rows + m * ld + g * w.group, w.group) : 0;
        });
    }
    int64_t steps = k32 / AMX_STEP;
    parallel_for(panels * steps, threads, [&](int64_t task) {
        int64_t panel = task / steps, k = task % steps * AMX_STEP;
        Ints pairs[3][16];
        for (int64_t m = 0; m < 16; m++) {
            Floats low = {}, high = {};
            if (panel * 16 + m < x.rows) {
                const float* p = rows + (panel * 16 + m) * ld + k;
                low = load<Floats>(p);
                high = load<Floats>(p + 16);
            }
            for (int s = 0; s < slices; s++) {
                // The upper halves of all 32 numbers, in order.
                const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                       29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
                __m512i a = next_slice(low), b = next_slice(high);
                pairs[s][m] = (Ints)_mm512_permutex2var_epi16(a, order, b);
            }
        }
        for (int s = 0; s < slices; s++) {
            uint16_t* to = out + ((s * panels + panel) * k32 + k) * 16;
            transpose(pairs[s]);
            for (int64_t i = 0; i < 16; i++) store(to + i * 32, pairs[s][i]);
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

// The same of c * scale + offset.
INLINE void to_bfloat(const int8_t* codes, int64_t count, float scale, float offset, uint16_t* out) {
    Floats s = broadcast(scale), o = broadcast(offset);
    for (int64_t i = 0; i < count; i += 32) {
        Floats low = fma(to_floats(widen(codes + i)), s, o), high = fma(to_floats(widen(codes + i + 16)), s, o);
        store(out + i, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
}

// c (32, 32) += a (32 rows) times two panels of `b`, over `columns`.
inline void add_bfloat(const uint16_t* a, const uint16_t* b, int64_t panel, int64_t columns, float* c, int64_t ldc) {
    load_tile<0>(c, ldc * 4);
    load_tile<1>(c + 16, ldc * 4);
    load_tile<2>(c + 16 * ldc, ldc * 4);
    load_tile<3>(c + 16 * ldc + 16, ldc * 4);
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        load_tile<4>(a + k, AMX_LD * 2);
        load_tile<6>(b + k * 16, 64);
        multiply_bfloats<0, 4, 6>();
        load_tile<5>(a + 16 * AMX_LD + k, AMX_LD * 2);
        multiply_bfloats<2, 5, 6>();
        load_tile<7>(b + panel + k * 16, 64);
        multiply_bfloats<1, 4, 7>();
        multiply_bfloats<3, 5, 7>();
    }
    store_tile<0>(c, ldc * 4);
    store_tile<1>(c + 16, ldc * 4);
    store_tile<2>(c + 16 * ldc, ldc * 4);
    store_tile<3>(c + 16 * ldc + 16, ldc * 4);
}

// products (32, 32) = sum over slices and `columns` of two tiles at `a` and of the panels at `b`. One panel alone has its
// result in two halves, to be added: a product takes three times as long to finish as the next takes to start.
template <int PANELS>
void multiply_bfloat(const uint16_t* a, const uint16_t* b, int64_t panel, int slices, int64_t slice, int64_t columns,
                     float* products) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    int odd = 0;
    for (int64_t k = 0; k < columns; k += AMX_STEP) {
        load_tile<4>(a + k, AMX_LD * 2);
        load_tile<5>(a + 16 * AMX_LD + k, AMX_LD * 2);
        for (int s = 0; s < slices; s++) {
            const uint16_t* from = b + s * slice + k * 16;
            load_tile<6>(from, 64);
            if (PANELS == 2) load_tile<7>(from + panel, 64);
            if (PANELS == 2 || !odd) {
                multiply_bfloats<0, 4, 6>();
                multiply_bfloats<2, 5, 6>();
            }
            if (PANELS == 2) {
                multiply_bfloats<1, 4, 7>();
                multiply_bfloats<3, 5, 7>();
            } else if (odd) {
                multiply_bfloats<1, 4, 6>();
                multiply_bfloats<3, 5, 6>();
            }
            odd = !odd;
        }
    }
    store_tile<0>(products, 128);
    store_tile<1>(products + 16, 128);
    store_tile<2>(products + 512, 128);
    store_tile<3>(products + 528, 128);
}

// c[r] += products[r] * scale[r], PANELS vectors each.
template <int PANELS>
INLINE void add_scaled(const float* products, const float* scale, int64_t groups, float* c, int64_t ldc) {
    for (int r = 0; r < 32; r++) {
        Floats s = broadcast(scale[r * groups]), left = load<Floats>(products + 32 * r), right = load<Floats>(products + 32 * r + 16);
        float* to = c + r * ldc;
        if (PANELS == 1) left += right;
        store(to, fma(left, s, load<Floats>(to)));
        if (PANELS == 2) store(to + 16, fma(right, s, load<Floats>(to + 16)));
    }
}

inline void multiply_amx(const Weight& w, const Input& x, const Output& y, int64_t threads) {
    static thread_local Scratch panel_scratch, group_scratch;
    int slices = x.type == BFLOAT16 ? 1 : x.type == FLOAT16 ? 2 : 3;
    int64_t k32 = round_up(w.k, AMX_STEP), m16 = round_up(x.rows, 16), panels = m16 / 16;
    int64_t panel = k32 * 16, slice = panels * panel;
    uint16_t* packed = panel_scratch.get<uint16_t>(slices * slice);
    bool dequantizes = slices == 1;
    float* sums = w.has_offset() && !dequantizes ? group_scratch.get<float>(w.groups * m16) : nullptr;
    bfloat_panels(w, x, slices, packed, sums, threads);
    int64_t rows = task_rows(w.n, x.rows <= 32 ? 32 : 256, 32, threads);
    parallel((w.n + rows - 1) / rows, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, tile_scratch, scale_scratch, sum_scratch;
        int8_t* codes = code_scratch.get<int8_t>(AMX_COLUMNS);
        uint16_t* tile = tile_scratch.get<uint16_t>(rows * AMX_LD);
        float* scale = scale_scratch.get<float>(2 * rows * w.groups);
        float* offset = scale + rows * w.groups;
        float* c = sum_scratch.get<float>(rows * m16);
        alignas(64) float products[32 * 32];
        float ones[32];
        for (float& one : ones) one = 1;
        TileConfig config(64);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t start = task * rows, count = w.n - start < rows ? w.n - start : rows;
            for (int64_t r = 0; r < count; r++) {
                scales(w, start + r, scale + r * w.groups);
                if (sums || dequantizes) offsets(w, start + r, scale + r * w.groups, offset + r * w.groups);
            }
            memset(c, 0, rows * m16 * 4);
            for (int64_t k = 0; k < w.k; k += AMX_COLUMNS) {
                int64_t columns = w.k - k < AMX_COLUMNS ? w.k - k : AMX_COLUMNS;
                const GroupEdge edge(k, w.group);
                for (int64_t r = 0; r < count; r++) {
                    prefetch_codes(w, start + r, k + columns, AMX_COLUMNS);
                    decode(w, start + r, k, columns, codes);
                    memset(codes + columns, 0, AMX_STEP);
                    if (!dequantizes) to_bfloat(codes, columns, tile + r * AMX_LD);
                    GroupEdge at = edge;
                    for (int64_t i = 0, length; dequantizes && i < columns; i += length, at.pass(length)) {
                        length = at.left < columns - i ? at.left : columns - i;
                        const float *s = scale + r * w.groups, *o = offset + r * w.groups;
                        to_bfloat(codes + i, length, s[at.group], o[at.group], tile + r * AMX_LD + i);
                    }
                }
                for (int64_t p = 0; p < panels; p += 2) {
                    const uint16_t* b = packed + p * panel + k * 16;
                    GroupEdge at = edge;
                    for (int64_t i = 0, length; i < columns; i += length, at.pass(length)) {
                        length = dequantizes || at.left > columns - i ? columns - i : at.left;
                        for (int64_t r = 0; r < count; r += 32) {
                            const uint16_t* a = tile + r * AMX_LD + i;
                            const float* s = scale + r * w.groups + at.group;
                            float* to = c + r * m16 + p * 16;
                            if (dequantizes && p + 1 < panels) {
                                add_bfloat(a, b + i * 16, panel, length, to, m16);
                            } else if (p + 1 < panels) {
                                multiply_bfloat<2>(a, b + i * 16, panel, slices, slice, length, products);
                                add_scaled<2>(products, s, w.groups, to, m16);
                            } else {
                                multiply_bfloat<1>(a, b + i * 16, panel, slices, slice, length, products);
                                add_scaled<1>(products, dequantizes ? ones : s, dequantizes ? 1 : w.groups, to, m16);
                            }
                        }
                    }
                }
            }
            for (int64_t r = 0; sums && r < count; r++) {
                for (int64_t m = 0; m < m16; m += 16) {
                    Floats total = load<Floats>(c + r * m16 + m);
                    for (int64_t g = 0; g < w.groups; g++)
                        total = fma(broadcast(offset[r * w.groups + g]), load<Floats>(sums + g * m16 + m), total);
                    store(c + r * m16 + m, total);
                }
            }
            y.write_transposed(x.rows, start, count, c, m16);
        }
    });
    panel_scratch.trim();
    group_scratch.trim();
}

}  // namespace
#endif
