// A step of Adam on one parameter, bit for bit as kernels/ops/adam.py computes it; its equations are there.
#pragma once

#include "adam_moment.h"
#include "parallel.h"
#include "scratch.h"

namespace {
namespace adam {

// As in qtorch/kernels/cpu/adam.py.
enum Form : int64_t { FLOATS, CODES8, CODES4, FLOAT8 };

struct Adam {
    void* weight;
    int64_t weight_type;
    const void* grad;
    int64_t grad_type;
    int64_t rows, length, block;  // as FlatBlocks
    int64_t form;
    void* first;
    float* first_scale;
    void* second;
    float* second_scale;
    void* highest;  // or null, without amsgrad
    float* highest_scale;
    double beta1, beta2, rest1, rest2;  // rest = 1 - beta
    double eps, decay, l2, step_size, correction;
    double largest;  // scale; the smallest is the smallest normal number
    int64_t random, key, first_element;
    int64_t threads;
};

struct Numbers {
    Floats beta1, beta2, rest1, rest2, eps, decay, l2, step_size, correction;

    explicit Numbers(const Adam& in)
        : beta1(broadcast(in.beta1)), beta2(broadcast(in.beta2)), rest1(broadcast(in.rest1)), rest2(broadcast(in.rest2)),
          eps(broadcast(in.eps)), decay(broadcast(in.decay)), l2(broadcast(in.l2)), step_size(broadcast(in.step_size)),
          correction(broadcast(in.correction)) {}

    INLINE Floats updated(Floats w, Floats m, Floats s) const {
        return w * decay - m / (s * correction + eps) * step_size;
    }
};

// Adds 16 random bits to those of LANES numbers from number `at` of the weight, and truncates them to bf16.
INLINE Floats round_at_random(Floats w, const Adam& in, int64_t at) {
    Words x = Words{} + (uint32_t)(in.first_element + at);
    for (int i = 0; i < LANES; i++) x[i] += i;
    x = x * 0x9E3779B9u + (uint32_t)in.key;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    x = (x ^ x >> 16) >> 16;
    Words bits = (Words)w, up = (bits + x) & 0xFFFF0000u;
    Words finite = (Words)((bits & (uint32_t)INFINITE_BITS) != (uint32_t)INFINITE_BITS);
    return (Floats)((up & finite) | (bits & ~finite));
}

// The numbers of a block in fp32, padded to whole vectors with zeros.
struct Block {
    float *w, *g, *m, *s, *h;
    uint8_t *codes1, *codes2, *codes3;
};

// The largest magnitude of a block, as bits: ordered as the numbers are, with what is not finite above them.
struct Range {
    Ints high = {};

    INLINE void add(Floats x) {
        Ints size = (Ints)x & MAGNITUDE_BITS;
        high = size > high ? size : high;
    }

    template <class Codec>
    INLINE float scale(const Adam& in) const {
        constexpr float SMALLEST = 0x1p-126f;
        int32_t bits = largest(high);
        float most = load<float>(&bits), scale = Codec::IS_FLOAT8 ? most / 448.0f : most, limit = in.largest;
        scale = scale < SMALLEST ? SMALLEST : scale > limit ? limit : scale;
        return bits >= INFINITE_BITS ? __builtin_nanf("") : scale;
    }
};

template <class Codec, bool IS_ROOT>
INLINE void quantize(const float* x, float scale, int64_t padded, uint8_t* codes) {
    Floats by = broadcast(1.0f / scale);
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = load<Floats>(x + i), place = v * by;
        if constexpr (Codec::IS_FLOAT8) place = smaller(larger(place, broadcast(-448)), broadcast(448));
        Ints code = Codec::code(place);
        if constexpr (IS_ROOT) code -= (code == 0) & (Ints)(v > Floats{});
        store_codes(codes + i, code);
    }
}

constexpr int64_t AHEAD = 512;  // elements that are fetched early

// One block. PACKED: two codes share a byte. PLAIN: neither amsgrad, nor l2, nor random bits.
template <class First, class Second, bool PACKED, bool PLAIN>
void step_block(const Adam& in, const Numbers& numbers, int64_t number, int64_t row, int64_t start, const Block& at) {
    Numbers by = numbers;
    int64_t count = in.length - start < in.block ? in.length - start : in.block, from = row * in.length + start;
    int64_t padded = round_up(in.block, LANES), run = (in.block + 7) / 8, bytes = PACKED ? run * 4 : in.block;
    bool whole = count % LANES == 0 && count == padded;
    char* weight = (char*)in.weight + from * size_of(in.weight_type);
    const char* grad = (const char*)in.grad + from * size_of(in.grad_type);

    float *w = at.w, *g = at.g;
    if (whole && in.grad_type == FLOAT32) g = (float*)grad;
    else to_float(grad, in.grad_type, count, g);
    if (whole && in.weight_type == FLOAT32) w = (float*)weight;
    else to_float(weight, in.weight_type, count, w);
    if (!whole)
        for (int64_t i = count; i < padded; i++) w[i] = g[i] = 0;

    bool direct = !PACKED && padded == in.block;
    auto read = [&](void* codes, int zero, uint8_t* to) {
        auto p = (uint8_t*)codes + number * bytes;
        if (direct) return p;
        if constexpr (PACKED) unpack_nibbles(p, run, to);
        else memcpy(to, p, bytes);
        if (padded > in.block) memset(to + in.block, zero, padded - in.block);
        return to;
    };
    uint8_t *codes1 = read(in.first, First::ZERO, at.codes1), *codes2 = read(in.second, Second::ZERO, at.codes2);
    bool amsgrad = !PLAIN && in.highest, has_l2 = !PLAIN && in.l2 != 0, random = !PLAIN && in.random;
    uint8_t* codes3 = amsgrad ? read(in.highest, Second::ZERO, at.codes3) : nullptr;
    float *means = at.m, *roots = at.s, *highest = at.h;
    Floats scale1 = broadcast(in.first_scale[number]), scale2 = broadcast(in.second_scale[number]), scale3 = scale2;
    if (amsgrad) scale3 = broadcast(in.highest_scale[number]);

    Range range1, range2, range3;
    for (int64_t i = 0; i < padded; i += LANES) {
        // For a block to come, while the codes of this one are computed.
        prefetch<false>(w + i + AHEAD);
        prefetch<false>(g + i + AHEAD);
        Floats x = load<Floats>(w + i), d = load<Floats>(g + i);
        Floats m = First::value(widen(codes1 + i)) * scale1, s = Second::value(widen(codes2 + i)) * scale2;
        if (has_l2) d = d + x * by.l2;
        m = m * by.beta1 + d * by.rest1;
        const Floats v = s * s * by.beta2 + d * d * by.rest2, most = broadcast(__FLT_MAX__);
        s = root((v > most) & (larger(d, -d) <= most) ? most : v);
        store(means + i, m);
        store(roots + i, s);
        range1.add(m);
        range2.add(s);
        if (amsgrad) {
            s = larger(Second::value(widen(codes3 + i)) * scale3, s);
            store(highest + i, s);
            range3.add(s);
        }
        x = by.updated(x, m, s);
        if (random) x = round_at_random(x, in, from + i);
        store(w + i, x);
    }
    if (w == at.w) from_float(w, in.weight_type, count, weight);

    auto write = [&](auto codec, auto is_root, const float* x, float scale, void* codes, uint8_t* scratch) {
        auto p = (uint8_t*)codes + number * bytes;
        quantize<decltype(codec), is_root.value>(x, scale, padded, direct ? p : scratch);
        if constexpr (PACKED) {
            if (run * 8 > in.block) memset(scratch + in.block, 0, run * 8 - in.block);
            pack_nibbles(scratch, run, p);
        } else if (!direct) {
            memcpy(p, scratch, bytes);
        }
    };
    std::false_type no;
    std::true_type yes;
    in.first_scale[number] = range1.scale<First>(in);
    write(First{}, no, at.m, in.first_scale[number], in.first, at.codes1);
    in.second_scale[number] = range2.scale<Second>(in);
    write(Second{}, yes, at.s, in.second_scale[number], in.second, at.codes2);
    if (!amsgrad) return;
    in.highest_scale[number] = range3.scale<Second>(in);
    write(Second{}, yes, at.h, in.highest_scale[number], in.highest, at.codes3);
}

template <class First, class Second, bool PACKED>
INLINE void step_any(const Adam& in, const Numbers& by, int64_t number, int64_t row, int64_t start, const Block& at) {
    bool plain = !in.highest && in.l2 == 0 && !in.random;
    auto run = plain ? step_block<First, Second, PACKED, true> : step_block<First, Second, PACKED, false>;
    run(in, by, number, row, start, at);
}

// Moments in fp32: elements from `from`.
inline void step_floats(const Adam& in, const Numbers& by, int64_t from, int64_t count, const Block& at) {
    char* weight = (char*)in.weight + from * size_of(in.weight_type);
    const char* grad = (const char*)in.grad + from * size_of(in.grad_type);
    float *first = (float*)in.first + from, *second = (float*)in.second + from, *highest = (float*)in.highest + from;
    bool whole = count % LANES == 0, direct = whole && in.weight_type == FLOAT32;
    float *w = direct ? (float*)weight : at.w, *g = whole && in.grad_type == FLOAT32 ? (float*)grad : at.g;
    float *m = whole ? first : at.m, *s = whole ? second : at.s, *h = whole ? highest : at.h;
    if (!direct) to_float(weight, in.weight_type, count, w);
    if (g == at.g) to_float(grad, in.grad_type, count, g);
    if (!whole) {
        memcpy(m, first, count * 4);
        memcpy(s, second, count * 4);
        if (in.highest) memcpy(h, highest, count * 4);
        for (int64_t i = count; i < round_up(count, LANES); i++) w[i] = g[i] = m[i] = s[i] = h[i] = 0;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        Floats x = load<Floats>(w + i), d = load<Floats>(g + i);
        if (in.l2 != 0) d = d + x * by.l2;
        Floats mean = load<Floats>(m + i) * by.beta1 + d * by.rest1;
        Floats v = load<Floats>(s + i) * by.beta2 + d * d * by.rest2;
        store(m + i, mean);
        store(s + i, v);
        if (in.highest) {
            v = larger(load<Floats>(h + i), v);
            store(h + i, v);
        }
        x = by.updated(x, mean, root(v));
        if (in.random) x = round_at_random(x, in, from + i);
        store(w + i, x);
    }
    if (!direct) from_float(w, in.weight_type, count, weight);
    if (whole) return;
    memcpy(first, m, count * 4);
    memcpy(second, s, count * 4);
    if (in.highest) memcpy(highest, h, count * 4);
}

inline void step(const Adam& in) {
    constexpr int64_t TASK = 1 << 14;  // elements
    int64_t total = in.rows * in.length, of_row = (in.length + in.block - 1) / in.block;
    bool floats = in.form == FLOATS;
    int64_t size = floats ? 512 : in.block, units = floats ? (total + size - 1) / size : in.rows * of_row;
    int64_t run = TASK / size < 1 ? 1 : TASK / size, tasks = (units + run - 1) / run;
    Numbers by(in);
    parallel(tasks, in.threads, [&](Tasks& mine) {
        static thread_local Scratch float_scratch, code_scratch;
        int64_t padded = round_up(size, LANES), room = round_up(size, 8) + WIDTH;
        float* x = float_scratch.get<float>(5 * padded);
        uint8_t* c = code_scratch.get<uint8_t>(3 * room);
        Block at{x, x + padded, x + 2 * padded, x + 3 * padded, x + 4 * padded, c, c + room, c + 2 * room};
        for (int64_t task; (task = mine.next()) >= 0;) {
            int64_t stop = (task + 1) * run < units ? (task + 1) * run : units;
            int64_t row = task * run / of_row, start = task * run % of_row * size;
            for (int64_t unit = task * run; unit < stop; unit++) {
                int64_t rest = total - unit * size;
                switch (in.form) {
                    case FLOATS: step_floats(in, by, unit * size, rest < size ? rest : size, at); break;
                    case CODES8: step_any<Power<4, 127, 128>, Power<4, 255, 0>, false>(in, by, unit, row, start, at); break;
                    case CODES4: step_any<Power<2, 7, 8>, Power<2, 15, 0>, true>(in, by, unit, row, start, at); break;
                    default: step_any<Float8, Float8, false>(in, by, unit, row, start, at);
                }
                start += size;
                if (start >= in.length) row++, start = 0;
            }
        }
        float_scratch.trim();
        code_scratch.trim();
    });
}

}  // namespace adam
}  // namespace
