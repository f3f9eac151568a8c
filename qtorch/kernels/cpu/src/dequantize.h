// A weight in floating point, for a product of torch's.
//
//     y[n, k] = c[n, k] * scale[n, g] + offset[n, g]
#pragma once

#include "tile.h"

namespace {

inline void dequantize(const Weight& w, const Output& y, int64_t threads) {
    constexpr int64_t COLUMNS = 2048;  // at a time, to stay in cache
    bool direct = !w.bits && !w.center;
    parallel(w.n, threads, [&](Tasks& tasks) {
        static thread_local Scratch code_scratch, row_scratch, scale_scratch;
        int8_t* decoded = code_scratch.get<int8_t>(COLUMNS);
        float* row = row_scratch.get<float>(COLUMNS);
        float* scale = scale_scratch.get<float>(2 * w.groups);
        float* offset = scale + w.groups;
        for (int64_t n; (n = tasks.next()) >= 0;) {
            scales(w, n, scale);
            offsets(w, n, scale, offset);
            for (int64_t k = 0; k < w.k; k += COLUMNS) {
                int64_t columns = w.k - k < COLUMNS ? w.k - k : COLUMNS;
                const int8_t* codes = (const int8_t*)w.codes + n * w.row_bytes + k;
                if (!direct) {
                    decode(w, n, k, columns, decoded);
                    codes = decoded;
                }
                for (int64_t i = 0; i < columns;) {
                    int64_t g = (k + i) / w.group, left = (g + 1) * w.group - k - i;
                    int64_t length = left < columns - i ? left : columns - i;
                    scale_codes(codes + i, length, scale[g], offset[g], row + i);
                    i += length;
                }
                y.write(n, k, columns, row);
            }
        }
    });
}

}  // namespace
