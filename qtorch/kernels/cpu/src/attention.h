// Attention of a few queries on keys and values in codes.
//
//     y[m] = sum_t p[m, t] v[t],    p[m] = softmax_t(scaling * q[m] . k[t] + mask[m, t])
//
// The heads of queries that share a head of keys are its rows, so that each code is read once. Tokens are cut into parts
// of fixed length, which threads take; a part is read in blocks that stay in the nearest cache. Parts are joined by their
// maxima and sums. Products are in fp32: scales of tokens are multiplied into sums, scales of channels into queries.
#pragma once

#include "attention_softmax.h"
#include "parallel.h"
#include "scratch.h"

namespace {
namespace attention {

constexpr int64_t PART = 1024, PARTS = 32;  // tokens of a part, or more, so that there are as many parts at most
constexpr int64_t TILE_ROWS = 4;

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
            if (!hidden(t, count)) block(t, count, stop, running);
        }
    }

private:
    // Whether the mask hides these tokens from all queries, as in a cache of fixed length that is not full.
    bool hidden(int64_t t, int64_t count) const {
        if (!call_.mask || call_.mask_type != UINT8) return false;
        for (int64_t r = 0; r < rows_; r++) {
            auto seen = (const uint8_t*)call_.mask_of(b_, h_, r, at_ + t);
            for (int64_t i = 0; i < count; i++) if (seen[i]) return false;
        }
        return true;
    }

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
        const Products &of_keys = products_of(keys_.read_format()), &of_values = products_of(values_.read_format());
        const float* query = keys_.block ? scaled_ : query_;
        const float* constant = scaled_ + rows_ * ld_;
        // The keys of the next block are fetched with the values of this one.
        int64_t more = stop - t - count < count ? 0 : count;
        const uint8_t *k = keys_.rows(b_, h_, t), *v = values_.rows(b_, h_, t);
        static thread_local Scratch key_scratch, value_scratch;
        Rows of_k = rows_of(keys_, k, values_, v, count, key_scratch);
        Rows of_v = rows_of(values_, v, keys_, more ? k + more * keys_.code_token : nullptr, count, value_scratch);
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

    // Rows as they are multiplied; those of another tensor are fetched meanwhile.
    static Rows rows_of(
        const Cached& in, const uint8_t* rows, const Cached& next_in, const uint8_t* next, int64_t count, Scratch& scratch
    ) {
        int64_t stride = in.code_token;
        if (in.unpacked()) {
            stride = in.read_bytes();
            uint8_t* out = scratch.get<uint8_t>(BLOCK * stride);
            in.unpack(rows, count, out);
            rows = out;
        }
        return {rows, next, stride, in.read_bytes(), next_in.code_token, next_in.row_bytes(), count};
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
    constexpr int64_t SHARE = 1 << 18;  // products of a thread
    int64_t heads = call.batch * call.heads, rows = call.group * call.rows;
    // Sums, and so their bits, do not depend on the number of threads.
    int64_t length = round_up((call.tokens + PARTS - 1) / PARTS, BLOCK);
    length = length < PART ? PART : length;
    int64_t of_codes = (call.tokens + length - 1) / length, of_recent = (call.recent + length - 1) / length;
    int64_t parts = of_codes + of_recent, ld = slots_of(call.values);
    if (call.recent && slots_of(call.recent_values) > ld) ld = slots_of(call.recent_values);
    int64_t size = Running::size(rows, ld);
    float* memory = scratch.get<float>(heads * parts * size);
    int64_t threads = threads_for(heads * rows * (call.tokens + call.recent) * call.values.width, call.threads, SHARE);
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
