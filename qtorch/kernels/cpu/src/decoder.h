// What a decoder does around its products, in fp32; numbers of 16 bits are rounded where torch's operators round them.
#pragma once

#include "matrix.h"

namespace {

// y[m, k] = x[m, k] / sqrt(mean_k x[m, k]^2 + eps) * (weight[k] + offset)
struct RmsNorm {
    Input x;             // (M, K)
    const void* weight;  // (K), like x
    void* y;             // (M, K), contiguous, like x
    int64_t k, rounds;   // rounds: x over its root mean square is rounded before it is multiplied
    double eps, offset;
    int64_t threads;
};

// The sum of squares; the order of additions is the same on every machine.
inline float sum_squares(const float* x, int64_t count) {
    constexpr int64_t SUMS = 64, VECTORS = SUMS / LANES;
    Floats sums[VECTORS] = {};
    int64_t i = 0;
    for (; i + SUMS <= count; i += SUMS)
        UNROLL for (int64_t v = 0; v < VECTORS; v++) {
            Floats part = load<Floats>(x + i + v * LANES);
            sums[v] += part * part;
        }
    float all[SUMS];
    for (int64_t v = 0; v < VECTORS; v++) store(all + v * LANES, sums[v]);
    for (int64_t j = 0; i < count; i++, j++) all[j] += x[i] * x[i];
    for (int64_t half = SUMS / 2; half; half /= 2)
        for (int64_t j = 0; j < half; j++) all[j] += all[j + half];
    return all[0];
}

inline void normalize(const RmsNorm& q) {
    static thread_local Scratch weight_scratch;
    float* weight = weight_scratch.get<float>(q.k);
    to_float(q.weight, q.x.type, q.k, weight);
    for (int64_t i = 0; i < q.k && q.offset; i++) weight[i] += (float)q.offset;
    int64_t size = size_of(q.x.type);
    parallel_for(q.x.rows, threads_for(q.x.rows * q.k, q.threads), [&](int64_t m) {
        static thread_local Scratch scratch;
        float* row = scratch.get<float>(q.k);
        char* y = (char*)q.y + m * q.k * size;
        to_float((const char*)q.x.data + m * q.x.stride * size, q.x.type, q.k, row);
        float factor = 1 / __builtin_sqrtf(sum_squares(row, q.k) / (float)q.k + (float)q.eps);
        for (int64_t i = 0; i < q.k; i++) row[i] *= factor;
        if (q.rounds && q.x.type != FLOAT32) {
            from_float(row, q.x.type, q.k, y);
            to_float(y, q.x.type, q.k, row);
        }
        for (int64_t i = 0; i < q.k; i++) row[i] *= weight[i];
        from_float(row, q.x.type, q.k, y);
    });
    weight_scratch.trim();
}

// (batch, heads, rows, width) in memory; the last axis is contiguous.
struct Heads {
    const void* data;
    int64_t batch_step, head_step, row_step, heads;
    void* out;  // (batch, rows, heads, width), contiguous
};

// y[i] = x[i] cos[i] - x[i + width / 2] sin[i],  y[i + width / 2] = x[i + width / 2] cos[i + width / 2] + x[i] sin[i + width / 2]
struct Rotation {
    Heads query, key;
    // (batch, rows, width), like x
    const void *cos, *sin;
    int64_t cos_batch, cos_row, sin_batch, sin_row;
    int64_t type, batch, rows, width, threads;
};

inline void rotate_halves(const Rotation& q) {
    int64_t size = size_of(q.type), half = q.width / 2, heads = q.query.heads + q.key.heads;
    parallel_for(q.batch * q.rows, threads_for(q.batch * q.rows * heads * q.width, q.threads), [&](int64_t task) {
        static thread_local Scratch scratch;
        float* cos = scratch.get<float>(5 * q.width);
        float *sin = cos + q.width, *x = sin + q.width, *y = x + q.width, *z = y + q.width;
        int64_t b = task / q.rows, m = task % q.rows;
        to_float((const char*)q.cos + (b * q.cos_batch + m * q.cos_row) * size, q.type, q.width, cos);
        to_float((const char*)q.sin + (b * q.sin_batch + m * q.sin_row) * size, q.type, q.width, sin);
        for (const Heads* each : {&q.query, &q.key})
            for (int64_t h = 0; h < each->heads; h++) {
                char* out = (char*)each->out + ((b * q.rows + m) * each->heads + h) * q.width * size;
                to_float((const char*)each->data + (b * each->batch_step + h * each->head_step + m * each->row_step) * size, q.type,
                         q.width, x);
                for (int64_t i = 0; i < q.width; i++) y[i] = x[i] * cos[i];
                for (int64_t i = 0; i < half; i++) {
                    z[i] = -x[i + half] * sin[i];
                    z[i + half] = x[i] * sin[i + half];
                }
                if (q.type != FLOAT32)
                    for (float* product : {y, z}) {
                        from_float(product, q.type, q.width, out);
                        to_float(out, q.type, q.width, product);
                    }
                for (int64_t i = 0; i < q.width; i++) y[i] += z[i];
                from_float(y, q.type, q.width, out);
            }
    });
}

}  // namespace
