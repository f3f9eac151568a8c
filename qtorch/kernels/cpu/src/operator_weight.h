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
    std::string dtype, domain;
    double middle;  // (low + high + 1) / 2
};

// Domains of zero points: whether they are added to scaled codes; see ZeroPointDomain.
struct Domain {
    const char* name;
    bool adds;
};
constexpr Domain DOMAINS[] = {{"INT", false}, {"FLOAT", true}, {"NONE", false}, {"OFFSET", true}, {"FRACTIONAL", false}};

inline const Domain* find_domain(const std::string& name) {
    for (const Domain& domain : DOMAINS)
        if (name == domain.name) return &domain;
    return nullptr;
}

// Bits of "int4", "uint8", ...; 0 for what is no integer of at most 8 bits.
inline int64_t bits_of(const std::string& dtype) {
    size_t digit = dtype.rfind("uint", 0) == 0 ? 4 : dtype.rfind("int", 0) == 0 ? 3 : std::string::npos;
    bool one = dtype.size() == digit + 1 && dtype[digit] >= '1' && dtype[digit] <= '8';
    return one ? dtype[digit] - '0' : 0;
}

inline std::string shape_of(const WeightForm& form) {
    int64_t shape[] = {form.n, form.k};
    return "a weight of shape " + shape_text(shape, 2) + " in " + form.dtype;
}

// Whether kernels read these tensors as they lie in memory; `weight` is then theirs. Raises if they are no such weight.
inline bool read_weight(const Tensor& codes, const Tensor& scale, const Tensor& zero, const WeightForm& form, Weight* weight) {
    int64_t bits = bits_of(form.dtype), n = form.n, k = form.k;
    const Domain* domain = find_domain(form.domain);
    if (!bits || !domain) return false;
    bool is_signed = form.dtype[0] == 'i';
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
    weight->shift = (is_signed ? 0 : half) - (form.domain == "FLOAT" ? form.middle : 0.0);
    return true;
}

// Whether kernels can add the bias, which is checked; so they can where there is none.
inline void check_bias(const Tensor& bias, int64_t type, int64_t n) {
    if (bias && !(bias.type == type && bias.dim == 1 && bias.sizes[0] == n && bias.is_contiguous()))
        refuse("takes a contiguous bias of shape (" + std::to_string(n) + ",) in " + TYPE_NAMES[type] + ", got " + bias.text());
}

}  // namespace
