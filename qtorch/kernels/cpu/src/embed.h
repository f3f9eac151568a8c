// Rows of a weight, in floating point.
//
//     y[i] = dequantize(w)[ids[i]]
#pragma once

#include "dequantize.h"

namespace {

struct Ids {
    const void* data;
    int64_t is_64_bit, count;

    int64_t operator[](int64_t i) const { return is_64_bit ? ((const int64_t*)data)[i] : ((const int32_t*)data)[i]; }
};

// Prefetch what `dequantize_row` will read: the hardware cannot predict which rows come next.
INLINE void prefetch_row(const Weight& w, int64_t n) {
    int64_t length = w.bits ? (w.k + 7) / 8 * w.bits : w.k, at = n * w.scale_stride;
    for (int64_t i = 0; i < length; i += 64) prefetch(w.codes + n * w.row_bytes + i);
    prefetch((const char*)w.scale + at * size_of(w.scale_type));
    if (w.zero) prefetch((const char*)w.zero + at * size_of(w.zero_type));
}

// Gives the first index of an id that the weight does not have, and then writes nothing; or else -1.
inline int64_t embed(const Weight& w, const Ids& ids, const Output& y, int64_t threads) {
    constexpr int64_t AHEAD = 2;
    for (int64_t i = 0; i < ids.count; i++)
        if (ids[i] < 0 || ids[i] >= w.n) return i;
    parallel_for(ids.count, threads_for(ids.count * w.k, threads), [&](int64_t i) {
        if (i + AHEAD < ids.count) prefetch_row(w, ids[i + AHEAD]);
        dequantize_row(w, ids[i], y, i);
    });
    return -1;
}

}  // namespace
