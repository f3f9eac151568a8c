// The softmax of attention, block by block, with the running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867).
#pragma once

#include <cmath>

#include "attention_rows.h"
#include "exponential.h"

namespace {
namespace attention {

struct Attention {
    Cached keys, values, recent_keys, recent_values;
    int64_t batch, heads, group, rows;  // heads of keys; heads of queries for each; tokens that query
    int64_t tokens, recent;             // in codes, and behind them in floating point
    const void* query;                  // (batch, heads * group, rows, keys.width)
    int64_t query_type, query_batch, query_head, query_row;
    void* out;  // (batch, heads * group, rows, values.width), contiguous, of the query's type
    const void* mask;  // UINT8: whether a token is seen; or numbers to add
    int64_t mask_type, mask_batch, mask_head, mask_row;
    const float* sinks;  // (heads * group) or null: exp(sink) is added to the sum of the softmax
    int64_t causal;      // whether the query in row m sees the tokens up to tokens + recent - rows + m only
    double scaling, softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
    int64_t threads;

    // The mask of token t and those behind it, for row r of the queries of head h of the keys.
    const char* mask_of(int64_t b, int64_t h, int64_t r, int64_t t) const {
        int64_t head = h * group + r / rows;
        return (const char*)mask + (b * mask_batch + head * mask_head + r % rows * mask_row + t) * size_of(mask_type);
    }
};

INLINE float most_of(Floats a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a);
#else
    return largest(a);
#endif
}

// What is known of the results of all queries of a head of keys from some of its tokens: the largest score, the sum of
// exp(score - high), and that sum with the zeros and with the codes of the values.
struct Running {
    float *high, *sum, *constant, *y;  // (rows), (rows), (rows), (rows, ld)
    int64_t rows, ld;

    Running(float* memory, int64_t rows_, int64_t ld_)
        : high(memory), sum(high + rows_), constant(sum + rows_), y(memory + round_up(3 * rows_, 16)), rows(rows_), ld(ld_) {}

    static int64_t size(int64_t rows, int64_t ld) { return round_up(3 * rows, 16) + rows * ld; }

    void scale(int64_t r, float factor) const {
        sum[r] *= factor;
        constant[r] *= factor;
        for (int64_t i = 0; i < ld; i++) y[r * ld + i] *= factor;
    }

    void clear() const {
        memset(high, 0, size(rows, ld) * sizeof *high);
        for (int64_t r = 0; r < rows; r++) high[r] = -INFINITY;
    }
};

// The scores of one block: masks, the softmax so far, and the weights of the values.
class Block {
public:
    Block(const Attention& call, int64_t b, int64_t h, int64_t first, int64_t count, int64_t at)
        : call_(call), b_(b), h_(h), first_(first), count_(count), at_(at) {}

    // Scores of row r become exp(score - high); high and sum go on, and y is scaled with them.
    void softmax(int64_t r, float* score, const Running& running) const {
        int64_t whole = round_up(count_, LANES);
        if (call_.softcap)
            for (int64_t t = 0; t < whole; t += LANES) {
                Floats cap = broadcast(call_.softcap), inverse = broadcast(1 / call_.softcap);
                store(score + t, tanh_of(load<Floats>(score + t) * inverse) * cap);
            }
        hide(r, score);
        for (int64_t t = count_; t < whole; t++) score[t] = -INFINITY;
        Floats most = broadcast(-INFINITY);
        for (int64_t t = 0; t < whole; t += LANES) most = larger(load<Floats>(score + t), most);
        float high = most_of(most), before = running.high[r];
        high = high > before ? high : before;
        Floats less = broadcast(high == -INFINITY ? 0 : high), total = {};
        for (int64_t t = 0; t < whole; t += LANES) {
            Floats x = load<Floats>(score + t), p = exp_negative(x - less);
            total += p;
            // A token that is not seen keeps its mark: its values may be NaN.
            Ints hidden = x == broadcast(-INFINITY);
            store(score + t, (Floats)(((Ints)p & ~hidden) | ((Ints)broadcast(-1) & hidden)));
        }
        if (high != before && before != -INFINITY) running.scale(r, exp_negative(before - high));
        running.high[r] = high;
        running.sum[r] += sum(total);
    }

private:
    // Tokens that row r does not see get -inf; numbers of the mask are added.
    void hide(int64_t r, float* score) const {
        if (call_.mask) {
            const char* from = call_.mask_of(b_, h_, r, at_ + first_);
            if (call_.mask_type == UINT8) {
                for (int64_t t = 0; t < count_; t++) score[t] = from[t] ? score[t] : -INFINITY;
            } else {
                float add[BLOCK];
                to_float(from, call_.mask_type, count_, add);
                for (int64_t t = 0; t < count_; t++) score[t] = add[t] == -INFINITY ? -INFINITY : score[t] + add[t];
            }
        }
        if (call_.causal) {
            int64_t seen = call_.tokens + call_.recent - call_.rows + r % call_.rows + 1 - at_ - first_;
            for (int64_t t = seen < 0 ? 0 : seen; t < count_; t++) score[t] = -INFINITY;
        }
    }

    const Attention& call_;
    int64_t b_, h_, first_, count_, at_;
};

}  // namespace attention
}  // namespace
