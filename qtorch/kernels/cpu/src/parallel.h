// Threads: those of torch's OpenMP pool. Each has a share of consecutive tasks, which lies in its caches from the last call
// and in which rows that a task prefetches are the next one's. Work is taken in short runs: who is done takes of the others'.
#pragma once

#include <cstdint>

extern "C" {
// Of OpenMP's library, as GCC calls it; those of LLVM and Intel have it too. `#pragma omp` would need the library of the compiler.
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
}

namespace {

// Tasks of a thread that nobody has taken yet; on a line of the cache of its own.
struct alignas(64) Share {
    int64_t taken, stop;
};

// The tasks of a thread.
class Tasks {
public:
    Tasks(Share* shares, int64_t threads, int64_t own, int64_t run)
        : shares_(shares), threads_(threads), left_(threads), at_(own), run_(run) {}

    // The next task, or -1.
    int64_t next() {
        while (next_ == stop_) {
            Share& share = shares_[at_];
            int64_t first = __atomic_fetch_add(&share.taken, run_, __ATOMIC_RELAXED);
            if (first < share.stop) {
                next_ = first;
                stop_ = first + run_ < share.stop ? first + run_ : share.stop;
            } else if (left_ == 1) {
                return -1;
            } else {
                left_--;
                at_ = at_ + 1 < threads_ ? at_ + 1 : 0;
            }
        }
        return next_++;
    }

private:
    Share* shares_;
    int64_t threads_, left_, at_, run_, next_ = 0, stop_ = 0;
};

// Threads that are worth waking for so many numbers: one for each `share` of them that is begun.
inline int64_t threads_for(int64_t numbers, int64_t threads, int64_t share = 1 << 15) {
    int64_t most = numbers / share + 1;
    return threads < most ? threads : most;
}

// Runs body(tasks) on up to `threads` threads; each calls tasks.next() until it gives -1.
template <class Body>
void parallel(int64_t count, int64_t threads, const Body& body) {
    constexpr int64_t RUNS = 8;  // for each thread, or more: short runs, so that no thread waits long for another
    int64_t run = count / (threads * RUNS);
    run = run < 1 ? 1 : run > 16 ? 16 : run;
    if (threads > count) threads = count;
    // A forked child must not use OpenMP: it lacks the threads of its parent's pool.
    if (threads <= 1) {
        Share all{0, count};
        Tasks tasks(&all, 1, 0, run);
        body(tasks);
        return;
    }
    Share* shares = (Share*)__builtin_alloca_with_align(threads * sizeof(Share), 8 * alignof(Share));
    for (int64_t t = 0; t < threads; t++) shares[t] = {t * count / threads, (t + 1) * count / threads};
    auto work = [&] {
        Tasks tasks(shares, threads, omp_get_thread_num(), run);
        body(tasks);
    };
    GOMP_parallel([](void* data) { (*(decltype(work)*)data)(); }, &work, threads, 0);
}

template <class Body>
void parallel_for(int64_t count, int64_t threads, const Body& body) {
    parallel(count, threads, [&](Tasks& tasks) {
        for (int64_t task; (task = tasks.next()) >= 0;) body(task);
    });
}

}  // namespace
