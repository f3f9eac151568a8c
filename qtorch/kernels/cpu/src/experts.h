// Products with experts: a weight (E * N, K) is the matrices of E experts one below the other, and each row of the result is
// the product of a row of x with the matrix of one of them.
//
//     y[s] = x[s / share] w[ids[s]]^T,    0 where ids[s] is no expert
//
// Rows are sorted by expert, and each matrix is read once for all of its rows. A task is a run of output channels of one
// expert, multiplied by the variants of the other headers as a weight of its own, so that threads share one row of x as well as
// many, whoever the rows belong to.
#pragma once

#include "quantize.h"

namespace {

struct Experts {
    const int64_t* ids;  // (rows of y)
    int64_t rows, count;
    int64_t share;       // rows of y for each row of x
    const int64_t* variants;  // (steps, 2): most rows of an expert, and the variant that they are multiplied
    int64_t steps;

    int64_t variant(int64_t length) const {
        int64_t step = 0;
        while (step + 1 < steps && variants[2 * step] < length) step++;
        return variants[2 * step + 1];
    }
};

// Fewest output channels of a task, and tasks that there are for each thread, or more.
constexpr int64_t EXPERT_CHANNELS = 64, TASKS_PER_THREAD = 16;

// Rows of y in the order of their experts. Those of expert e are order[first[e]] to order[first[e + 1]]; those of none follow.
struct ByExpert {
    int64_t *first, *order;

    explicit ByExpert(const Experts& experts) {
        static thread_local Scratch first_scratch, order_scratch, next_scratch;
        int64_t count = experts.count;
        first = first_scratch.get<int64_t>(count + 2);
        order = order_scratch.get<int64_t>(experts.rows);
        int64_t* next = next_scratch.get<int64_t>(count + 1);
        auto expert = [&](int64_t s) {
            int64_t e = experts.ids[s];
            return e < 0 || e >= count ? count : e;
        };
        memset(first, 0, (count + 2) * sizeof *first);
        for (int64_t s = 0; s < experts.rows; s++) first[expert(s) + 1]++;
        for (int64_t e = 0; e <= count; e++) next[e] = first[e + 1] += first[e];
        for (int64_t s = experts.rows; s-- > 0;) order[--next[expert(s)]] = s;
    }
};

// A run of output channels of one expert.
struct ExpertTask {
    int64_t expert, start, channels;
};

// The tasks: an expert is cut into as many as its share of the rows asks for. Gives their number.
inline int64_t expert_tasks(const Experts& experts, const ByExpert& by, int64_t n, int64_t threads, const ExpertTask*& out) {
    static thread_local Scratch scratch;
    int64_t most = n / EXPERT_CHANNELS, wanted = threads > 1 ? TASKS_PER_THREAD * threads : 1, total = 0;
    auto pieces = [&](int64_t e) {
        int64_t length = by.first[e + 1] - by.first[e], fair = (length * wanted + experts.rows - 1) / experts.rows;
        return !length ? 0 : fair > most ? (most ? most : 1) : fair;
    };
    for (int64_t e = 0; e < experts.count; e++) total += pieces(e);
    ExpertTask* tasks = scratch.get<ExpertTask>(total);
    out = tasks;
    for (int64_t e = 0; e < experts.count; e++) {
        int64_t count = pieces(e), step = count ? round_up((n + count - 1) / count, 32) : n;
        for (int64_t start = 0; count && start < n; start += step)
            *tasks++ = {e, start, n - start < step ? n - start : step};
    }
    return tasks - out;
}

// body(weight, first, length, start): some channels of an expert, from `start` on, for rows order[first] to order[first +
// length] of y. Rows of no expert become zero.
template <class Body>
void for_each_expert(const Weight& w, const Experts& experts, const ByExpert& by, const Output& y, int64_t threads, const Body& body) {
    int64_t n = w.n / experts.count;
    const ExpertTask* tasks;
    int64_t count = expert_tasks(experts, by, n, threads, tasks), bytes = y.n * size_of(y.type);
    for (int64_t i = by.first[experts.count]; i < experts.rows; i++) memset((char*)y.data + by.order[i] * bytes, 0, bytes);
    parallel_for(count, threads, [&](int64_t i) {
        const ExpertTask& task = tasks[i];
        int64_t first = by.first[task.expert];
        body(rows_of(w, task.expert * n + task.start, task.channels), first, by.first[task.expert + 1] - first, task.start);
    });
}

// Whether these rows of y follow one another, and so do those of x.
inline bool in_a_run(const int64_t* order, int64_t length, int64_t share) {
    return length == 1 || (share == 1 && order[length - 1] - order[0] == length - 1);
}

// Some channels, from `start` on, of rows order[0] to order[length] of y: where `multiply(output)` writes them.
template <class Multiply>
void write_rows_of(const Output& y, const int64_t* order, int64_t length, int64_t start, int64_t channels, const Multiply& multiply) {
    static thread_local Scratch scratch;
    int64_t size = size_of(y.type), bytes = channels * size;
    auto to = [&](int64_t i) { return (char*)y.data + (order[i] * y.n + start) * size; };
    // Rows of `Output` are n apart, of which the kernel writes those of its weight.
    if (in_a_run(order, length, 1)) return multiply(Output{to(0), y.type, y.n, nullptr});
    char* part = scratch.get<char>(length * bytes);
    multiply(Output{part, y.type, channels, nullptr});
    for (int64_t i = 0; i < length; i++) memcpy(to(i), part + i * bytes, bytes);
    scratch.trim();
}

// multiply(weight, x, y, variant) for the rows and some channels of each expert, x in floating point.
template <class Multiply>
void multiply_experts(const Weight& w, const Experts& experts, const Input& x, const Output& y, int64_t threads, const Multiply& multiply) {
    ByExpert by(experts);
    for_each_expert(w, experts, by, y, threads, [&](const Weight& part, int64_t first, int64_t length, int64_t start) {
        static thread_local Scratch scratch;
        const int64_t* order = by.order + first;
        int64_t step = x.stride * size_of(x.type), bytes = w.k * size_of(x.type);
        Input rows{(const char*)x.data + order[0] / experts.share * step, x.type, x.stride, length};
        if (!in_a_run(order, length, experts.share)) {
            char* gathered = scratch.get<char>(length * bytes);
            for (int64_t i = 0; i < length; i++)
                memcpy(gathered + i * bytes, (const char*)x.data + order[i] / experts.share * step, bytes);
            rows = {gathered, x.type, w.k, length};
        }
        write_rows_of(y, order, length, start, part.n, [&](const Output& to) { multiply(part, rows, to, experts.variant(length)); });
        scratch.trim();
    });
}

// The same for x in codes.
template <class Multiply>
void multiply_experts(const Weight& w, const Experts& experts, const Codes& x, const Output& y, int64_t threads, const Multiply& multiply) {
    ByExpert by(experts);
    for_each_expert(w, experts, by, y, threads, [&](const Weight& part, int64_t first, int64_t length, int64_t start) {
        static thread_local Scratch code_scratch, factor_scratch;
        const int64_t* order = by.order + first;
        int64_t m = order[0] / experts.share;
        Codes rows{x.codes + m * x.ld, x.ld, length, x.columns, x.scale + m, x.zero ? x.zero + m : nullptr};
        if (!in_a_run(order, length, experts.share)) {
            rows.ld = round_up(w.k, 64);
            rows.codes = code_scratch.get<int8_t>(length * rows.ld);
            rows.scale = factor_scratch.get<float>(2 * length);
            rows.zero = x.zero ? (int32_t*)rows.scale + length : nullptr;
            for (int64_t i = 0; i < length; i++) {
                m = order[i] / experts.share;
                memcpy(rows.codes + i * rows.ld, x.codes + m * x.ld, w.k);
                memset(rows.codes + i * rows.ld + w.k, 0, rows.ld - w.k);
                rows.scale[i] = x.scale[m];
                if (x.zero) rows.zero[i] = x.zero[m];
            }
        }
        write_rows_of(y, order, length, start, part.n, [&](const Output& to) { multiply(part, rows, to, experts.variant(length)); });
        code_scratch.trim();
    });
}

}  // namespace
