// Which builds of the kernels this machine has the instructions for, the best first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)

struct Leaf {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    Leaf(uint32_t leaf, uint32_t part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

inline bool all(uint32_t word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(word >> bit & 1)) return false;
    return true;
}

inline std::vector<const char*> instruction_sets() {
    Leaf basic(1, 0), more(7, 0), extended(7, 1);
    uint64_t saved = 0;  // registers that the system saves
    if (all(basic.c, {27})) {
        uint32_t low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        saved = (uint64_t)high << 32 | low;
    }
    auto saves = [&](uint64_t mask) { return (saved & mask) == mask; };
    bool avx2 = saves(0x6) && all(basic.c, {12, 29}) && all(more.b, {5, 8});             // FMA, F16C; AVX2, BMI2
    bool avx512 = avx2 && saves(0xe6) && all(more.b, {16, 17, 30, 31});                  // F, DQ, BW, VL
    bool avx512_vnni = avx512 && all(more.c, {11});
    bool amx = avx512_vnni && saves(0x60000) && all(more.d, {22, 24, 25}) && all(extended.a, {5});  // BF16 of both
    std::vector<const char*> found;
    if (amx) found.push_back("amx");
    if (avx512_vnni) found.push_back("avx512_vnni");
    if (avx512) found.push_back("avx512");
    if (avx2 && all(extended.a, {4})) found.push_back("avx2_vnni");
    if (avx2) found.push_back("avx2");
    if (all(basic.c, {20})) found.push_back("portable");
    return found;
}

// As in /proc/cpuinfo.
inline std::string vendor() {
    uint32_t a, words[3];
    __cpuid(0, a, words[0], words[2], words[1]);
    return std::string((const char*)words, sizeof words);
}

#elif defined(__aarch64__) && defined(__linux__)

inline std::vector<const char*> instruction_sets() {
    std::vector<const char*> found;
    bool dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
    if (dotprod && getauxval(AT_HWCAP2) & HWCAP2_I8MM) found.push_back("i8mm");
    if (dotprod) found.push_back("dotprod");
    found.push_back("portable");
    return found;
}

inline std::string vendor() { return "unknown"; }

#else

inline std::vector<const char*> instruction_sets() { return {"portable"}; }

inline std::string vendor() { return "unknown"; }

#endif

}  // namespace
