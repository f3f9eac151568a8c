// The tensors of a quantized weight as the `Weight` that kernels read, after the checks of ../weight.py: a caller in C++
// can pass anything.
#pragma once

#include "operator_arguments.h"
#include "weight.h"

namespace {

// What operators are told about a weight besides its tensors.
struct WeightForm {
    int64_t n, k;
    bool packed;
    int64_t dtype, domain;  // by `number_of`
    double middle;  // (low + high + 1) / 2
};

// As in ../../custom_ops.py.
constexpr int64_t number_of(const char* name) {
    uint32_t number = 0x811C9DC5;
    for (; *name; name++) number = (number ^ (uint8_t)*name) * 0x01000193;
    return number;
}

// Domains of zero points: whether they are added to scaled codes; see ZeroPointDomain.
struct Domain {
    int64_t number;
    bool adds;
};
constexpr int64_t INT = number_of("INT"), FLOAT = number_of("FLOAT");
constexpr Domain DOMAINS[] = {
    {INT, false}, {FLOAT, true}, {number_of("NONE"), false}, {number_of("OFFSET"), true}, {number_of("FRACTIONAL"), false}};

// Integers of at most 8 bits.
struct Integer {
    const char* name;
    int64_t bits, number = number_of(name);
};
constexpr Integer INTEGERS[] = {{"int1", 1},  {"int2", 2},  {"int3", 3},  {"int4", 4},  {"int5", 5},  {"int6", 6},
                                {"int7", 7},  {"int8", 8},  {"uint1", 1}, {"uint2", 2}, {"uint3", 3}, {"uint4", 4},
                                {"uint5", 5}, {"uint6", 6}, {"uint7", 7}, {"uint8", 8}};

template <class T, size_t N>
inline const T* find(const T (&all)[N], int64_t number) {
    for (const T& each : all)
        if (each.number == number) return &each;
    return nullptr;
}

inline std::string shape_of(const WeightForm& form) {
    int64_t shape[] = {form.n, form.k};
    return "a weight of shape " + shape_text(shape, 2) + " in " + find(INTEGERS, form.dtype)->name;
}

// Whether kernels read these tensors as they lie in memory; `weight` is then theirs. Raises if they are no such weight.
inline bool read_weight(const Tensor& codes, const Tensor& scale, const Tensor& zero, const WeightForm& form, Weight* weight) {
    const Integer* integer = find(INTEGERS, form.dtype);
    const Domain* domain = find(DOMAINS, form.domain);
    if (!integer || !domain) return false;
    bool is_signed = integer->name[0] == 'i';
    int64_t bits = integer->bits, n = form.n, k = form.k;
    int64_t length = form.packed ? (k + 7) / 8 * bits : k, type = form.packed || !is_signed ? UINT8 : INT8;
    if (!codes.has_shape(n, length) || codes.type != type) {
        int64_t wanted[] = {n, length};
        refuse("the codes of " + shape_of(form) + " have shape " + shape_text(wanted, 2) + " and dtype " + TYPE_NAMES[type] +
               ", got " + codes.text());
    }
    int64_t groups = scale.dim == 2 ? scale.sizes[1] : 0;
    if (!(groups > 0 && k % groups == 0 && scale.sizes[0] == n) && !scale.has_shape(1, 1))
        refuse("the scale of " + shape_of(form) + " has shape (N, groups) or (1, 1), got " + scale.text());
    if (zero && !zero.has_shape(scale.sizes[0], groups))
        refuse("a zero point has the shape of the scale, " + scale.text() + ", got " + zero.text());
    if (codes.strides[1] != 1 || (n > 1 && codes.strides[0] < length) || !scale.is_contiguous() || scale.type >= INT64) return false;
    if (!n || !k) return false;
    if (zero && (!zero.is_contiguous() || zero.type >= INT64)) return false;
    int64_t half = 1 << (bits - 1);
    *weight = {};
    weight->codes = (const uint8_t*)codes.data;
    weight->row_bytes = codes.strides[0];
    weight->bits = form.packed ? bits : 0;
    weight->center = form.packed || !is_signed ? half : 0;
    weight->n = n, weight->k = k;
    weight->group = k / groups, weight->groups = groups;
    weight->scale = scale.data, weight->scale_type = scale.type;
    weight->scale_stride = scale.sizes[0] > 1 ? groups : 0;
    weight->zero = zero.data, weight->zero_type = zero ? zero.type : 0;
    weight->zero_is_code = !domain->adds;
    weight->shift = (is_signed ? 0 : half) - (form.domain == FLOAT ? form.middle : 0.0);
    return true;
}

// Whether kernels can add the bias, which is checked; so they can where there is none.
inline void check_bias(const Tensor& bias, int64_t type, int64_t n) {
    if (bias && !(bias.type == type && bias.dim == 1 && bias.sizes[0] == n && bias.is_contiguous()))
        refuse("takes a contiguous bias of shape (" + std::to_string(n) + ",) in " + TYPE_NAMES[type] + ", got " + bias.text());
}

}  // namespace
