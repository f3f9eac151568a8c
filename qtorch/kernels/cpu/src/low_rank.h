// What a branch of low rank adds to a product, in fp32, rounded once:
//
//     y[m, n] += sum_r (sum_k x[m, k] * down[r, k]) * up[n, r]
//
// The inner sums are made for pieces of K, and then added up in their order, so that a row depends neither on the number of
// rows nor on that of threads.
#pragma once

#include "attention_rows.h"
#include "matrix.h"

namespace {

struct LowRank {
    Input down, up;  // (R, K), (N, R), in 16 bits
    int64_t k;
    Input x;   // (M, K)
    Output y;  // (M, N)
    int64_t threads;
};

// Products of `count` rows of a factor, from `first` on, with rows of q, which are zero behind `columns` up to whole units:
// write(i, products) gets those of row i, one for each row of the factor.
template <class Write>
INLINE void multiply_factor(const Input& factor, int64_t first, int64_t start, int64_t columns, int64_t count, const float* q,
                            int64_t ld, int64_t rows, const Write& write) {
    using attention::BLOCK;
    constexpr int64_t AHEAD = 4;  // rows that are prefetched: hardware sees too little of each
    const attention::Products& products = attention::products_of(factor.type);
    int64_t stride = 2 * factor.stride, bytes = 2 * columns;
    auto data = (const uint8_t*)factor.data + first * stride + 2 * start;
    alignas(64) float result[4 * BLOCK];
    for (int64_t i = 0; i < rows;) {
        int64_t log = rows - i >= 4 ? 2 : rows - i >= 2 ? 1 : 0;
        attention::Rows in{data, i ? nullptr : data + AHEAD * stride, stride, bytes, stride, bytes, count};
        products.dot[log](in, q + i * ld, ld, result);
        for (int64_t j = 0; j < 1 << log; j++) write(i + j, result + j * BLOCK);
        i += 1 << log;
    }
}

// sums (pieces, rows, rank) of the products with `down` for pieces of PIECE columns.
constexpr int64_t PIECE = 512;

inline void multiply_down(const Input& x, const Input& down, int64_t k, float* sums, int64_t threads) {
    constexpr int64_t ROWS = 16;
    int64_t pieces = (k + PIECE - 1) / PIECE, blocks = (x.rows + ROWS - 1) / ROWS, rank = down.rows;
    parallel(blocks * pieces, threads, [&](Tasks& tasks) {
        static thread_local Scratch scratch;
        float* q = scratch.get<float>(ROWS * PIECE);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            int64_t m = task / pieces * ROWS, piece = task % pieces, start = piece * PIECE;
            int64_t rows = x.rows - m < ROWS ? x.rows - m : ROWS, columns = k - start < PIECE ? k - start : PIECE;
            Input part = x.part(m, rows);
            part.data = (const char*)part.data + start * size_of(x.type);
            part.to_floats(columns, q, PIECE, 1);
            for (int64_t r = 0; r < rank; r += attention::BLOCK) {
                int64_t count = rank - r < attention::BLOCK ? rank - r : attention::BLOCK;
                multiply_factor(down, r, start, columns, count, q, PIECE, rows, [&](int64_t i, const float* products) {
                    memcpy(sums + (piece * x.rows + m + i) * rank + r, products, count * 4);
                });
            }
        }
    });
}

inline void add_up(const Input& up, int64_t rank, const float* z, int64_t ld, int64_t rows, const Output& y, int64_t threads) {
    constexpr int64_t BLOCK = attention::BLOCK;
    parallel_for((y.n + BLOCK - 1) / BLOCK, threads, [&](int64_t task) {
        int64_t start = task * BLOCK, count = y.n - start < BLOCK ? y.n - start : BLOCK;
        multiply_factor(up, start, 0, rank, count, z, ld, rows, [&](int64_t i, const float* products) {
            float total[BLOCK];
            char* to = (char*)y.data + (i * y.n + start) * size_of(y.type);
            to_float(to, y.type, count, total);
            for (int64_t j = 0; j < count; j++) total[j] += products[j];
            from_float(total, y.type, count, to);
        });
    });
}

inline void add_low_rank(const LowRank& q) {
    constexpr int64_t SHARE = 1 << 14;  // products of a thread, which also reads a part of the factors
    static thread_local Scratch sum_scratch, row_scratch;
    int64_t rank = q.down.rows, ld = round_up(rank, 2 * LANES), pieces = (q.k + PIECE - 1) / PIECE;
    for (int64_t m = 0; m < q.x.rows; m += MAX_CHUNK) {
        Input x = q.x.part(m, q.x.rows - m < MAX_CHUNK ? q.x.rows - m : MAX_CHUNK);
        float *sums = sum_scratch.get<float>(pieces * x.rows * rank), *z = row_scratch.get<float>(x.rows * ld);
        multiply_down(x, q.down, q.k, sums, threads_for(x.rows * q.k * rank, q.threads, SHARE));
        memset(z, 0, x.rows * ld * 4);
        for (int64_t piece = 0; piece < pieces; piece++)
            for (int64_t i = 0; i < x.rows; i++)
                for (int64_t r = 0; r < rank; r++) z[i * ld + r] += sums[(piece * x.rows + i) * rank + r];
        add_up(q.up, rank, z, ld, x.rows, q.y.part(m), threads_for(x.rows * q.y.n * rank, q.threads, SHARE));
    }
    sum_scratch.trim();
}

}  // namespace
