// The arguments of a call from torch's dispatcher, owned until the call ends, and tensors whose memory is checked.
#pragma once

#include <vector>

#include "number.h"
#include "torch_abi.h"

namespace {

using torch_abi::functions;
using torch_abi::Handle;
using torch_abi::Value;

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

inline std::string shape_text(const int64_t* sizes, int64_t dim) {
    std::string text = "(";
    for (int64_t i = 0; i < dim; i++) text += std::to_string(sizes[i]) + (i + 1 < dim || dim == 1 ? "," : "") + (i + 1 < dim ? " " : "");
    return text + ")";
}

// torch's numbers of dtypes, by Type; then int64, which only indices have, and bool, which only masks have.
constexpr int64_t INT64 = UINT8 + 1, BOOL = INT64 + 1, OTHER_TYPE = BOOL + 1;
inline int32_t dtypes[OTHER_TYPE];
constexpr const char* TYPE_NAMES[] = {"torch.float32", "torch.bfloat16", "torch.float16", "torch.int32",
                                      "torch.int8",    "torch.uint8",    "torch.int64",   "torch.bool",
                                      "another dtype"};

inline void find_dtypes() {
    int32_t found[] = {functions.aoti_torch_dtype_float32(), functions.aoti_torch_dtype_bfloat16(),
                       functions.aoti_torch_dtype_float16(), functions.aoti_torch_dtype_int32(),
                       functions.aoti_torch_dtype_int8(),    functions.aoti_torch_dtype_uint8(),
                       functions.aoti_torch_dtype_int64(),   functions.aoti_torch_dtype_bool()};
    memcpy(dtypes, found, sizeof dtypes);
}

inline int64_t type_of(int32_t dtype) {
    int64_t type = 0;
    while (type < OTHER_TYPE && dtypes[type] != dtype) type++;
    return type;
}

constexpr bool is_float(int64_t type) { return type <= FLOAT16; }

// A strided tensor on the CPU that lies within its storage; or none, for an optional argument.
struct Tensor {
    char* data = nullptr;
    int64_t dim = -1, type = OTHER_TYPE;
    const int64_t *sizes = nullptr, *strides = nullptr;

    explicit operator bool() const { return dim >= 0; }
    std::string text() const { return shape_text(sizes, dim) + " in " + TYPE_NAMES[type]; }
    bool has_shape(int64_t rows, int64_t columns) const { return dim == 2 && sizes[0] == rows && sizes[1] == columns; }

    bool is_contiguous() const {
        int64_t step = 1;
        for (int64_t i = dim - 1; i >= 0; i--) {
            if (!sizes[i]) return true;
            if (sizes[i] != 1 && strides[i] != step) return false;
            step *= sizes[i];
        }
        return true;
    }
};

inline Tensor look_at(Handle handle, const char* name) {
    using torch_abi::check;
    Tensor t;
    int32_t dtype, device, layout;
    int64_t offset, bytes, *sizes, *strides;
    void* data;
    check(functions.aoti_torch_get_device_type(handle, &device), name);
    if (device != functions.aoti_torch_device_type_cpu()) refuse(std::string(name) + " must be on the CPU");
    check(functions.aoti_torch_get_layout(handle, &layout), name);
    if (layout != functions.aoti_torch_layout_strided()) refuse(std::string(name) + " must be strided, not sparse");
    check(functions.aoti_torch_get_dim(handle, &t.dim), name);
    check(functions.aoti_torch_get_sizes(handle, &sizes), name);
    check(functions.aoti_torch_get_strides(handle, &strides), name);
    check(functions.aoti_torch_get_dtype(handle, &dtype), name);
    check(functions.aoti_torch_get_data_ptr(handle, &data), name);
    check(functions.aoti_torch_get_storage_offset(handle, &offset), name);
    check(functions.aoti_torch_get_storage_size(handle, &bytes), name);
    t.sizes = sizes, t.strides = strides, t.data = (char*)data, t.type = type_of(dtype);
    bool empty = false;
    for (int64_t i = 0; i < t.dim; i++) empty = empty || !sizes[i];
    if (empty || t.type == OTHER_TYPE) return t;
    int64_t last = offset;
    for (int64_t i = 0; i < t.dim; i++) last += (sizes[i] - 1) * strides[i];
    int64_t size = t.type == INT64 ? 8 : t.type == BOOL ? 1 : size_of(t.type);
    if (last >= bytes / size) refuse(std::string(name) + " has memory that was given back by a resized storage");
    if (!data) refuse(std::string(name) + " has no memory of its own");
    return t;
}

// What the schema says an argument is.
struct Parameter {
    bool is_tensor, optional;  // else a number
};

// The parameters of "name(Tensor x, Tensor? y, int n, float low, ...) -> Tensor".
inline std::vector<Parameter> parameters_of(const std::string& schema) {
    std::vector<Parameter> found;
    size_t at = schema.find('(') + 1, end = schema.find(')');
    while (at < end) {
        std::string type = schema.substr(at, schema.find(' ', at) - at);
        bool optional = type.back() == '?';
        if (optional) type.pop_back();
        found.push_back({type == "Tensor", optional});
        size_t comma = schema.find(", ", at);
        at = comma < end ? comma + 2 : end;
    }
    return found;
}

// The arguments on the stack, which are taken off it and freed at the end unless they are passed on.
class Arguments {
public:
    Arguments(Value* stack, const std::vector<Parameter>& parameters) : stack_(stack), parameters_(parameters) {}
    Arguments(const Arguments&) = delete;

    ~Arguments() {
        for (size_t i = 0; owned_ && i < parameters_.size(); i++) {
            auto [is_tensor, optional] = parameters_[i];
            if (optional && !stack_[i]) continue;
            if (is_tensor) functions.aoti_torch_delete_tensor_object((Handle)get(i));
            if (optional) delete (Value*)stack_[i];
        }
    }

    // Call another operator with the same arguments; its results are then on the stack.
    void pass_on(const char* name, const char* overload) {
        owned_ = false;
        torch_abi::check(functions.torch_call_dispatcher(name, overload, stack_, torch_abi::VERSION), name);
    }

    Tensor tensor(size_t i, const char* name) const {
        return parameters_[i].optional && !stack_[i] ? Tensor{} : look_at((Handle)get(i), name);
    }

    int64_t integer(size_t i) const { return (int64_t)stack_[i]; }
    bool boolean(size_t i) const { return stack_[i] & 1; }
    int64_t type(size_t i) const { return type_of((int32_t)stack_[i]); }

    double real(size_t i) const {
        double number;
        memcpy(&number, &stack_[i], sizeof number);
        return number;
    }

private:
    Value get(size_t i) const { return parameters_[i].optional ? *(Value*)stack_[i] : stack_[i]; }

    Value* stack_;
    const std::vector<Parameter>& parameters_;
    bool owned_ = true;
};

// A new contiguous tensor, and its memory.
struct Result {
    Handle handle = nullptr;
    void* data = nullptr;

    Result(const std::vector<int64_t>& sizes, int64_t type) {
        std::vector<int64_t> strides(sizes.size(), 1);
        for (size_t i = sizes.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
        int32_t cpu = functions.aoti_torch_device_type_cpu();
        torch_abi::check(functions.aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtypes[type], cpu, 0, &handle),
                         "a result");
        functions.aoti_torch_get_data_ptr(handle, &data);
    }
    Result(const Result&) = delete;
    ~Result() {
        if (handle) functions.aoti_torch_delete_tensor_object(handle);
    }

    Value release() {
        auto value = (Value)handle;
        handle = nullptr;
        return value;
    }
};

}  // namespace
