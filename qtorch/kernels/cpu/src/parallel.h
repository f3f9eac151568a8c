// Threads: those of torch's OpenMP pool. Work is assigned in runs of consecutive tasks: a slow core gets fewer of them, and
// rows that a task prefetches for the next one mostly land in the cache of the core that uses them. Assigned one at a time,
// they would land in another core's cache.
#pragma once

#include <cstdint>

namespace {

// The tasks of a thread.
class Tasks {
public:
    Tasks(int64_t count, int64_t run, int64_t* taken) : count_(count), run_(run), taken_(taken) {}

    // The next task, or -1.
    int64_t next() {
        if (next_ == stop_) {
            next_ = __atomic_fetch_add(taken_, run_, __ATOMIC_RELAXED);
            stop_ = next_ + run_;
        }
        return next_ < count_ ? next_++ : -1;
    }

private:
    int64_t count_, run_, *taken_, next_ = 0, stop_ = 0;
};

// Runs body(tasks) on up to `threads` threads; each calls tasks.next() until it gives -1.
template <class Body>
void parallel(int64_t count, int64_t threads, const Body& body) {
    constexpr int64_t RUNS = 8;  // for each thread, or more: short runs, so that no thread waits long for another
    int64_t taken = 0, run = count / (threads * RUNS);
    run = run < 1 ? 1 : run > 16 ? 16 : run;
    if (threads > count) threads = count;
    // A forked child must not use OpenMP: it lacks the threads of its parent's pool.
    if (threads <= 1) {
        Tasks tasks(count, run, &taken);
        body(tasks);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Tasks tasks(count, run, &taken);
        body(tasks);
    }
}

template <class Body>
void parallel_for(int64_t count, int64_t threads, const Body& body) {
    parallel(count, threads, [&](Tasks& tasks) {
        for (int64_t task; (task = tasks.next()) >= 0;) body(task);
    });
}

}  // namespace
