// The functions of torch's stable C ABI that operators need, found in the process at run time: the library then loads
// wherever a compiler has built it, and one build serves every torch since 2.11, where all of these exist.
//
// A kernel takes a stack of 64-bit values that it owns: numbers as they are, in the low bytes; handles of tensors;
// for an optional argument null, or the address of its value, made by `new`. Results replace the arguments.
#pragma once

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace torch_abi {

using Value = uint64_t;
using Handle = void*;
using Status = int32_t;  // 0: success
using Kernel = void (*)(Value* stack, uint64_t arguments, uint64_t results);

constexpr uint64_t VERSION = 2ull << 56 | 11ull << 48;  // whose conventions these are

#define QTORCH_TORCH_FUNCTIONS(F)                                                                                      \
    F(int32_t, aoti_torch_device_type_cpu, ())                                                                         \
    F(int32_t, aoti_torch_layout_strided, ())                                                                          \
    F(int32_t, aoti_torch_dtype_float32, ())                                                                           \
    F(int32_t, aoti_torch_dtype_bfloat16, ())                                                                          \
    F(int32_t, aoti_torch_dtype_float16, ())                                                                           \
    F(int32_t, aoti_torch_dtype_int64, ())                                                                             \
    F(int32_t, aoti_torch_dtype_int32, ())                                                                             \
    F(int32_t, aoti_torch_dtype_int8, ())                                                                              \
    F(int32_t, aoti_torch_dtype_uint8, ())                                                                             \
    F(int32_t, aoti_torch_dtype_bool, ())                                                                              \
    F(Status, aoti_torch_get_dim, (Handle, int64_t*))                                                                  \
    F(Status, aoti_torch_get_sizes, (Handle, int64_t**))                                                               \
    F(Status, aoti_torch_get_strides, (Handle, int64_t**))                                                             \
    F(Status, aoti_torch_get_dtype, (Handle, int32_t*))                                                                \
    F(Status, aoti_torch_get_layout, (Handle, int32_t*))                                                               \
    F(Status, aoti_torch_get_device_type, (Handle, int32_t*))                                                          \
    F(Status, aoti_torch_get_data_ptr, (Handle, void**))                                                               \
    F(Status, aoti_torch_get_storage_offset, (Handle, int64_t*))                                                       \
    F(Status, aoti_torch_get_storage_size, (Handle, int64_t*))                                                         \
    F(Status, aoti_torch_empty_strided,                                                                                \
      (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*))                                   \
    F(Status, aoti_torch_delete_tensor_object, (Handle))                                                               \
    F(Status, torch_get_num_threads, (uint32_t*))                                                                      \
    F(Status, torch_call_dispatcher, (const char*, const char*, Value*, uint64_t))                                     \
    F(Status, aoti_torch_library_init_fragment, (const char*, const char*, uint32_t, Handle*))                         \
    F(Status, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, Handle*))                \
    F(Status, aoti_torch_library_def, (Handle, const char*))                                                           \
    F(Status, torch_library_impl, (Handle, const char*, Kernel, uint64_t))

#define QTORCH_POINTER(result, name, arguments) result(*name) arguments = nullptr;
struct Functions {
    QTORCH_TORCH_FUNCTIONS(QTORCH_POINTER)
    const char* (*torch_exception_get_what_without_backtrace)() = nullptr;  // since 2.13, or null
};
#undef QTORCH_POINTER

inline Functions functions;

// A handle of the library of this process whose file name contains `part`, also where its symbols are not global; or null.
inline void* find_library(const char* part, int flags) {
#if defined(__linux__)
    struct Search {
        const char* part;
        std::string path;
    } search{part, {}};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto* wanted = (Search*)data;
            const char* slash = strrchr(info->dlpi_name, '/');
            if (!strstr(slash ? slash : info->dlpi_name, wanted->part)) return 0;
            wanted->path = info->dlpi_name;
            return 1;
        },
        &search);
    if (!search.path.empty()) return dlopen(search.path.c_str(), flags | RTLD_NOLOAD);
#endif
    (void)part, (void)flags;
    return nullptr;
}

// Fills `functions`. Gives null, or the name of what this process lacks.
inline const char* find_functions() {
    void* library = find_library("libtorch_cpu.", RTLD_LAZY);
    if (!library) library = RTLD_DEFAULT;  // linked into the program
    auto find = [library](const char* name, auto& function) {
        function = (std::remove_reference_t<decltype(function)>)dlsym(library, name);
        return function != nullptr;
    };
#define QTORCH_FIND(result, name, arguments) \
    if (!find(#name, functions.name)) return #name;
    QTORCH_TORCH_FUNCTIONS(QTORCH_FIND)
#undef QTORCH_FIND
    find("torch_exception_get_what_without_backtrace", functions.torch_exception_get_what_without_backtrace);
    return nullptr;
}

inline void check(Status status, const char* what) {
    if (!status) return;
    auto why = functions.torch_exception_get_what_without_backtrace;
    throw std::runtime_error(std::string("qtorch: ") + what + (why ? std::string(": ") + why() : " failed"));
}

}  // namespace torch_abi
