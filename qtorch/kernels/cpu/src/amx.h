// Matrix tiles (AMX): how a process gets them, and the instructions on them.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

namespace {

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

}  // namespace

#else

namespace {

struct TileConfig {
    explicit TileConfig(int) {}
};

}  // namespace

#endif
