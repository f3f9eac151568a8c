// Attention of a few queries on keys and values in codes.
//
//     y[m] = sum_t p[m, t] v[t],    p[m] = softmax_t(scaling * q[m] . k[t] + mask[m, t])
//
// The heads of queries that share a head of keys are its rows, so that each code is read once. Tokens are cut into parts
// of fixed length, which threads take; a part is read in blocks that stay in the nearest cache, with the running maximum
// and sum of the softmax (Milakov and Gimelshein, arXiv 1805.02867). Parts are joined by their maxima and sums. Products
// are in fp32: scales of tokens are multiplied into sums, scales of channels into queries.
#pragma once

#include <cmath>

#include "cached_rows.h"
#include "parallel.h"
#include "scratch.h"

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
};

constexpr int64_t PART = 1024, PARTS = 32;  // tokens of a part, or more, so that there are as many parts at most
constexpr int64_t BLOCK = 64;   // tokens; a multiple of LANES
constexpr int64_t TILE_ROWS = 4;

// exp(x) of x <= 0, to 2 units in the last place; 0 below the normal numbers, NaN of NaN.
INLINE Floats exp_negative(Floats x) {
    Floats n = round_even(x * broadcast(1.44269504f));
    Floats r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Floats p = broadcast(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, broadcast(c));
    p = fma(p, r * r, r) + broadcast(1);
    Ints low = x < broadcast(-87.0f);
    Ints power = (to_ints((Floats)((Ints)n & ~low)) + 127) << 23;
    return (Floats)((Ints)(p * (Floats)power) & ~low);
}

inline float exp_negative(float x) {
    return exp_negative(broadcast(x))[0];
}

INLINE float most_of(Floats a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a);
#else
    return largest(a);
#endif
}

// tanh(x), to 4 units in the last place.
INLINE Floats tanh_of(Floats x) {
    Floats size = (Floats)((Ints)x & 0x7fffffff), square = x * x;
    // Lambert's continued fraction.
    Floats p = fma(square, fma(square, square + broadcast(378), broadcast(17325)), broadcast(135135));
    Floats q = fma(square, fma(square, fma(square, broadcast(28), broadcast(3150)), broadcast(62370)), broadcast(135135));
    Floats near = x * p / q, e = exp_negative(size * broadcast(-2));
    Floats far = (broadcast(1) - e) / (broadcast(1) + e);
    far = (Floats)((Ints)far | ((Ints)x & (int32_t)0x80000000));
    Ints small = size < broadcast(0.5f);
    return (Floats)(((Ints)near & small) | ((Ints)far & ~small));
}

// Rows of codes in memory. While they are read, those at `next` are fetched: the hardware sees too little of each block
// to fetch ahead.
struct Rows {
    const uint8_t *rows, *next;
    int64_t stride, bytes, count;

    INLINE void fetch(int64_t t) const {
        if (next) for (int64_t i = 0; i < bytes; i += 64) prefetch(next + t * stride + i);
    }
};

// Sums of products of rows of codes with R rows of q, to out + r * BLOCK; what is beyond them to a multiple of LANES is
// written.
template <int FORMAT, int R>
void dot_rows(const Rows& in, const float* q, int64_t ld, float* out) {
    const auto [codes, next, stride, bytes, count] = in;
    int64_t units = bytes / UNIT_BYTES<FORMAT>, rest = bytes % UNIT_BYTES<FORMAT>;
    for (int64_t t = 0; t < count; t += LANES) {
        Floats sums[R][LANES];
        for (int64_t i = 0; i < LANES; i++) {
            // Behind the last row, it is read again.
            const uint8_t* row = codes + (t + i < count ? t + i : count - 1) * stride;
            if (t + i < count) in.fetch(t + i);
            Floats a[R] = {}, b[R] = {};
            auto add = [&](const Unit<FORMAT>& unit, int64_t u) {
                UNROLL for (int r = 0; r < R; r++) {
                    a[r] = fma(unit.a, load<Floats>(q + r * ld + 2 * u * LANES), a[r]);
                    b[r] = fma(unit.b, load<Floats>(q + r * ld + (2 * u + 1) * LANES), b[r]);
                }
            };
            for (int64_t u = 0; u < units; u++) add(Unit<FORMAT>(row + u * UNIT_BYTES<FORMAT>), u);
            if (rest) add(Unit<FORMAT>(Rest<FORMAT>(row + units * UNIT_BYTES<FORMAT>, rest).bytes), units);
            UNROLL for (int r = 0; r < R; r++) sums[r][i] = a[r] + b[r];
        }
        UNROLL for (int r = 0; r < R; r++) store(out + r * BLOCK + t, sum_each(sums[r]));
    }
}

// Adds to R rows of y the sums of units of rows of codes times weights w + r * BLOCK.
template <int FORMAT, int R, int U>
INLINE void add_units(const Rows& in, int64_t first, int64_t rest, const float* w, float* y, int64_t ld) {
    const uint8_t* codes = in.rows + first * UNIT_BYTES<FORMAT>;
    const int64_t stride = in.stride, count = in.count;
    y += 2 * first * LANES;
    Floats sums[R][2 * U];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int u = 0; u < 2 * U; u++) sums[r][u] = load<Floats>(y + r * ld + u * LANES);
    for (int64_t t = 0; t < count; t++) {
        const uint8_t* row = codes + t * stride;
        if (!first) in.fetch(t);
        UNROLL for (int u = 0; u < U; u++) {
            auto add = [&](const Unit<FORMAT>& unit) {
                UNROLL for (int r = 0; r < R; r++) {
                    Floats weight = broadcast(w[r * BLOCK + t]);
                    sums[r][2 * u] = fma(unit.a, weight, sums[r][2 * u]);
                    sums[r][2 * u + 1] = fma(unit.b, weight, sums[r][2 * u + 1]);
                }
            };
            if (rest) add(Unit<FORMAT>(Rest<FORMAT>(row, rest).bytes));
            else add(Unit<FORMAT>(row + u * UNIT_BYTES<FORMAT>));
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int u = 0; u < 2 * U; u++) store(y + r * ld + u * LANES, sums[r][u]);
}

template <int FORMAT, int R>
void add_rows(const Rows& in, const float* w, float* y, int64_t ld) {
    constexpr int U = REGISTERS >= 32 ? 2 : 1;
    int64_t units = in.bytes / UNIT_BYTES<FORMAT>, rest = in.bytes % UNIT_BYTES<FORMAT>, u = 0;
    for (; u + U <= units; u += U) add_units<FORMAT, R, U>(in, u, 0, w, y, ld);
    for (; u < units; u++) add_units<FORMAT, R, 1>(in, u, 0, w, y, ld);
    if (rest) add_units<FORMAT, R, 1>(in, u, rest, w, y, ld);
}

using DotRows = void (*)(const Rows&, const float*, int64_t, float*);
using AddRows = void (*)(const Rows&, const float*, float*, int64_t);

// For 1, 2 and 4 rows.
struct Products {
    DotRows dot[3];
    AddRows add[3];
};

template <int FORMAT>
constexpr Products PRODUCTS = {
    {dot_rows<FORMAT, 1>, dot_rows<FORMAT, 2>, dot_rows<FORMAT, 4>},
    {add_rows<FORMAT, 1>, add_rows<FORMAT, 2>, add_rows<FORMAT, 4>},
};

inline const Products& products_of(int64_t format) {
    switch (format) {
        case UINT4: return PRODUCTS<UINT4>;
        case FLOAT8: return PRODUCTS<FLOAT8>;
        case INT8: return PRODUCTS<INT8>;
        case FLOAT32: return PRODUCTS<FLOAT32>;
        case BFLOAT16: return PRODUCTS<BFLOAT16>;
        default: return PRODUCTS<FLOAT16>;
    }
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
        int64_t row = r % call_.rows, head = h_ * call_.group + r / call_.rows;
        if (call_.mask) {
            int64_t at = b_ * call_.mask_batch + head * call_.mask_head + row * call_.mask_row + at_ + first_;
            auto from = (const char*)call_.mask + at * size_of(call_.mask_type);
            if (call_.mask_type == UINT8) {
                for (int64_t t = 0; t < count_; t++) score[t] = from[t] ? score[t] : -INFINITY;
            } else {
                float add[BLOCK];
                to_float(from, call_.mask_type, count_, add);
                for (int64_t t = 0; t < count_; t++) score[t] = add[t] == -INFINITY ? -INFINITY : score[t] + add[t];
            }
        }
        if (call_.causal) {
            int64_t seen = call_.tokens + call_.recent - call_.rows + row + 1 - at_ - first_;
            for (int64_t t = seen < 0 ? 0 : seen; t < count_; t++) score[t] = -INFINITY;
        }
    }

    const Attention& call_;
    int64_t b_, h_, first_, count_, at_;
};

// One head of keys and its queries, on some of its tokens. `at` is the number of tokens before those of `keys`.
class Part {
public:
    Part(const Attention& call, const Cached& keys, const Cached& values, int64_t at, int64_t b, int64_t h)
        : call_(call), keys_(keys), values_(values), at_(at), b_(b), h_(h), rows_(call.group * call.rows) {
        static thread_local Scratch query_scratch, scaled_scratch, sum_scratch;
        static thread_local Scratch slot_scratch;
        slots_ = slot_scratch.get<int32_t>(keys.width);
        for (int64_t d = 0; d < keys.width; d++) slots_[d] = slot_of(keys, d);
        ld_ = slots_of(keys);
        query_ = query_scratch.get<float>(rows_ * ld_);
        sums_ = sum_scratch.get<float>(rows_);
        // Slots without a channel stay zero.
        int64_t numbers = (rows_ + 3) * ld_ + round_up(rows_, 16);
        scaled_ = keys.block ? scaled_scratch.get<float>(numbers) : nullptr;
        if (scaled_) memset(scaled_, 0, numbers * sizeof *scaled_);
        load_queries();
    }

    void run(int64_t first, int64_t stop, const Running& running) {
        for (int64_t t = first, count; t < stop; t += count) {
            count = stop - t < BLOCK ? stop - t : BLOCK;
            if (keys_.block) {
                int64_t left = keys_.block - t % keys_.block;
                count = left < count ? left : count;
                if (t == first || t % keys_.block == 0) scale_queries(t);
            }
            block(t, count, stop, running);
        }
    }

private:
    // In the order of the keys, times the scaling.
    void load_queries() {
        static thread_local Scratch row_scratch;
        int64_t width = keys_.width;
        float* row = row_scratch.get<float>(width);
        memset(query_, 0, rows_ * ld_ * sizeof *query_);
        for (int64_t r = 0; r < rows_; r++) {
            int64_t head = h_ * call_.group + r / call_.rows;
            int64_t from = b_ * call_.query_batch + head * call_.query_head + r % call_.rows * call_.query_row;
            to_float((const char*)call_.query + from * size_of(call_.query_type), call_.query_type, width, row);
            sums_[r] = 0;
            for (int64_t d = 0; d < width; d++) {
                float x = row[d] * (float)call_.scaling;
                query_[r * ld_ + slots_[d]] = x;
                sums_[r] += x;
            }
        }
    }

    // Queries times the scales of the channels in the block of token t; their products with the zeros.
    void scale_queries(int64_t t) {
        int64_t width = keys_.width, at = keys_.scale_at(b_, h_, t);
        float *constant = scaled_ + rows_ * ld_, *scale = constant + round_up(rows_, 16), *zero = scale + ld_;
        float* ordered = zero + ld_;
        auto spread = [&](const void* numbers, float unit, float* out) {
            scales_of(keys_, numbers, at, width, ordered);
            for (int64_t d = 0; d < width; d++) out[slots_[d]] = ordered[d] * unit;
        };
        spread(keys_.scale, keys_.format == FLOAT8 ? FLOAT8_UNIT : 1, scale);
        if (keys_.zero) spread(keys_.zero, 1, zero);
        for (int64_t r = 0; r < rows_; r++) {
            Floats total = {};
            for (int64_t i = 0; i < ld_; i += LANES) {
                Floats q = load<Floats>(query_ + r * ld_ + i);
                store(scaled_ + r * ld_ + i, q * load<Floats>(scale + i));
                if (keys_.zero) total = fma(q, load<Floats>(zero + i), total);
            }
            constant[r] = sum(total);
        }
    }

    void block(int64_t t, int64_t count, int64_t stop, const Running& running) {
        alignas(64) float scale[BLOCK], zero[BLOCK], weight[BLOCK], offset[BLOCK];
        bool of_tokens = keys_.scale && !keys_.block;
        if (of_tokens) load_scales(keys_, t, count, scale, zero);
        if (values_.scale) load_scales(values_, t, count, weight, offset);
        const Products &of_keys = products_of(keys_.format), &of_values = products_of(values_.format);
        const float* query = keys_.block ? scaled_ : query_;
        const float* constant = scaled_ + rows_ * ld_;
        // The keys of the next block are fetched with the values of this one.
        int64_t more = stop - t - count < count ? 0 : count;
        const uint8_t *k = keys_.rows(b_, h_, t), *v = values_.rows(b_, h_, t);
        Rows of_k{k, v, keys_.code_token, keys_.row_bytes(), count};
        Rows of_v{v, more ? k + more * keys_.code_token : nullptr, values_.code_token, values_.row_bytes(), count};
        Block scores(call_, b_, h_, t, count, at_);
        for (int64_t r = 0, some; r < rows_; r += some) {
            int kind = rows_ - r >= TILE_ROWS ? 2 : rows_ - r >= 2 ? 1 : 0;
            some = 1 << kind;
            alignas(64) float score[TILE_ROWS * BLOCK];
            of_keys.dot[kind](of_k, query + r * ld_, ld_, score);
            for (int64_t i = 0; i < some; i++) {
                float* row = score + i * BLOCK;
                Floats sum = broadcast(sums_[r + i]), add = broadcast(keys_.block && keys_.zero ? constant[r + i] : 0);
                for (int64_t j = 0; j < count; j += LANES) {
                    Floats x = load<Floats>(row + j);
                    if (of_tokens) x *= load<Floats>(scale + j);
                    x = of_tokens && keys_.zero ? fma(load<Floats>(zero + j), sum, x) : x + add;
                    store(row + j, x);
                }
                scores.softmax(r + i, row, running);
                running.constant[r + i] += weigh(row, count, weight, offset);
            }
            float* y = running.y + r * running.ld;
            of_values.add[kind](of_v, score, y, running.ld);
            of_k.next = of_v.next = nullptr;
        }
    }

    void load_scales(const Cached& rows, int64_t t, int64_t count, float* scale, float* zero) const {
        int64_t at = rows.scale_at(b_, h_, t);
        scales_of(rows, rows.scale, at, count, scale);
        if (rows.format == FLOAT8) for (int64_t j = 0; j < count; j++) scale[j] *= FLOAT8_UNIT;
        if (rows.zero) scales_of(rows, rows.zero, at, count, zero);
    }

    // Probabilities, -1 where hidden, become the weights of codes; gives their sum with the zeros of the values.
    float weigh(float* p, int64_t count, const float* scale, const float* zero) const {
        Floats constant = {};
        for (int64_t j = 0; j < count; j += LANES) {
            Floats x = load<Floats>(p + j);
            Ints seen = ~(x < Floats{});
            if (values_.zero) constant += (Floats)((Ints)(x * load<Floats>(zero + j)) & seen);
            if (values_.scale) x *= load<Floats>(scale + j);
            store(p + j, (Floats)((Ints)x & seen));
        }
        return sum(constant);
    }

    const Attention& call_;
    const Cached &keys_, &values_;
    int64_t at_, b_, h_, rows_, ld_;
    float *query_, *scaled_, *sums_;
    int32_t* slots_;
};

// Joins the parts of a head of keys, and writes the results of its queries.
inline void join(const Attention& call, int64_t b, int64_t h, const float* memory, int64_t parts, int64_t ld, int64_t recent_parts) {
    static thread_local Scratch scratch;
    const Cached& values = call.values;
    int64_t rows = call.group * call.rows, width = values.width, size = Running::size(rows, ld);
    float* y = scratch.get<float>(width);
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = h * call.group + r / call.rows;
        float high = call.sinks ? call.sinks[head] : -INFINITY, sum = 0;
        for (int64_t part = 0; part < parts; part++) {
            Running running((float*)memory + part * size, rows, ld);
            high = running.high[r] > high ? running.high[r] : high;
        }
        if (call.sinks) sum = exp_negative(call.sinks[head] - high);
        memset(y, 0, width * sizeof *y);
        for (int64_t part = 0; part < parts; part++) {
            Running running((float*)memory + part * size, rows, ld);
            if (running.high[r] == -INFINITY) {
                sum += running.sum[r];  // 0, or NaN
                continue;
            }
            float factor = exp_negative(running.high[r] - high);
            sum += factor * running.sum[r];
            const Cached& order = part < parts - recent_parts ? values : call.recent_values;
            const float* from = running.y + r * ld;
            for (int64_t d = 0; d < width; d++) y[d] += factor * (from[slot_of(order, d)] + running.constant[r]);
        }
        // Where no token is seen, the result is zero.
        float inverse = sum == 0 ? 0 : 1 / sum;
        for (int64_t d = 0; d < width; d++) y[d] *= inverse;
        int64_t at = ((b * call.heads * call.group + head) * call.rows + r % call.rows) * width;
        from_float(y, call.query_type, width, (char*)call.out + at * size_of(call.query_type));
    }
}

inline void attend(const Attention& call) {
    static thread_local Scratch scratch;
    constexpr int64_t THREAD_PRODUCTS = 1 << 18;  // that are worth waking a thread for
    int64_t heads = call.batch * call.heads, rows = call.group * call.rows;
    // Sums, and so their bits, do not depend on the number of threads.
    int64_t length = round_up((call.tokens + PARTS - 1) / PARTS, BLOCK);
    length = length < PART ? PART : length;
    int64_t of_codes = (call.tokens + length - 1) / length, of_recent = (call.recent + length - 1) / length;
    int64_t parts = of_codes + of_recent, ld = slots_of(call.values);
    if (call.recent && slots_of(call.recent_values) > ld) ld = slots_of(call.recent_values);
    int64_t size = Running::size(rows, ld);
    float* memory = scratch.get<float>(heads * parts * size);
    int64_t most = heads * rows * (call.tokens + call.recent) * call.values.width / THREAD_PRODUCTS + 1;
    int64_t threads = call.threads < most ? call.threads : most;
    parallel_for(heads * parts, threads, [&](int64_t task) {
        int64_t head = task / parts, part = task % parts, b = head / call.heads, h = head % call.heads;
        Running running(memory + task * size, rows, ld);
        running.clear();
        bool recent = part >= of_codes;
        int64_t first = (recent ? part - of_codes : part) * length, count = recent ? call.recent : call.tokens;
        int64_t stop = first + length < count ? first + length : count;
        if (recent) Part(call, call.recent_keys, call.recent_values, call.tokens, b, h).run(first, stop, running);
        else Part(call, call.keys, call.values, 0, b, h).run(first, stop, running);
    });
    parallel_for(heads, threads, [&](int64_t head) {
        join(call, head / call.heads, head % call.heads, memory + head * parts * size, parts, ld, of_recent);
    });
    scratch.trim();
}

}  // namespace attention
}  // namespace
