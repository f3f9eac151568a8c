// The library of kernels that operators call, and which variant of multiplying it takes.
#pragma once

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

#include "attention_softmax.h"
#include "cpu_features.h"
#include "low_rank.h"
#include "operator_variants.h"
#include "torch_abi.h"

namespace {

struct Kernels {
    std::string instruction_set;
    int64_t (*weight_only_mm)(const Call*) = nullptr;  // these two give whether a result is not finite
    int64_t (*int8_mm)(const IntCall*) = nullptr;
    int64_t (*embed)(const EmbedCall*) = nullptr;
    void (*attention)(const attention::Attention*) = nullptr;
    void (*low_rank_mm)(const LowRank*) = nullptr;
    Variants variants;
    bool copies = false;  // whether Python may keep dequantized copies of weights
};

// Null: none. Never destroyed, for threads may run while the process ends.
auto& in_use = *new std::shared_ptr<const Kernels>;

inline void use(const std::string& path, const std::string& name, const std::string& variants, const std::string& variant, bool copies) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    auto next = std::make_shared<Kernels>();
    auto find = [&](const char* symbol, auto& function) {
        function = (std::remove_reference_t<decltype(function)>)dlsym(library, symbol);
        if (!function) throw std::runtime_error(path + " has no " + symbol);
    };
    const char* (*fingerprint)();
    int (*ready)();
    find("qtorch_fingerprint", fingerprint);
    find("qtorch_ready", ready);
    if (strcmp(fingerprint(), QTORCH_FINGERPRINT) != 0) throw std::runtime_error(path + " is of other sources");
    if (!ready()) throw std::runtime_error("the system does not let this process use " + name);
    find("qtorch_weight_only_mm", next->weight_only_mm);
    find("qtorch_int8_mm", next->int8_mm);
    find("qtorch_embed", next->embed);
    find("qtorch_attention", next->attention);
    find("qtorch_low_rank_mm", next->low_rank_mm);
    next->instruction_set = name;
    // As in ../variants.py: choices measured on a processor of this vendor count more, and those for Arm are another's.
    std::string measured = name == "dotprod" || name == "i8mm" ? "avx2_vnni" : name;
    for (const std::string& words : {measured, measured + " on " + vendor(), name}) next->variants.read(variants, words);
    next->variants.force(variant);
    next->copies = copies;
    std::atomic_store(&in_use, std::shared_ptr<const Kernels>(next));
}

// The folder of this library.
inline std::string folder() {
    Dl_info info;
    if (!dladdr((void*)&use, &info) || !info.dli_fname) return ".";
    std::string path = info.dli_fname;
    size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

// Kernels are linked without OpenMP: make the runtime that torch has loaded visible to them.
inline void share_threads() {
    for (const char* name : {"libgomp", "libiomp5", "libomp"})
        if (torch_abi::find_library(name, RTLD_NOW | RTLD_GLOBAL)) return;
    dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
}

constexpr const char* VARIANTS_JSON =
#include "variants.inc"
    ;

inline void use_best() {
    const char *wanted = getenv("QTORCH_CPU_ISA"), *own = getenv("QTORCH_CPU_CHOICES");
    std::string variants = VARIANTS_JSON, reasons;
    if (own && *own) {
        std::stringstream more;
        more << std::ifstream(own).rdbuf();
        variants += more.str();
    }
    share_threads();
    for (const char* name : instruction_sets()) {
        if (wanted && *wanted && strcmp(wanted, name) != 0) continue;
        try {
            return use(folder() + "/libqtorch_" + name + ".so", name, variants, "", false);
        } catch (const std::exception& error) { reasons += std::string("; ") + error.what(); }
    }
    throw std::runtime_error("no library of the CPU kernels can be used" + reasons);
}

}  // namespace
