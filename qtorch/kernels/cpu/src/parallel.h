// Threads: those of torch's OpenMP pool. Work is handed out a task at a time, so that a slow core gets less of it.
#pragma once

#include <cstdint>

namespace {

class Tasks {
public:
    explicit Tasks(int64_t count) : count_(count) {}

    // The next task, or -1.
    int64_t next() {
        int64_t task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
        return task < count_ ? task : -1;
    }

private:
    int64_t count_, next_ = 0;
};

// Runs body(tasks) on up to `threads` threads; each calls tasks.next() until it gives -1.
template <class Body>
void parallel(int64_t count, int64_t threads, const Body& body) {
    Tasks tasks(count);
    if (threads > count) threads = count;
    // Without this, a forked child would ask the pool of its parent, whose threads it does not have.
    if (threads <= 1) {
        body(tasks);
        return;
    }
#pragma omp parallel num_threads(threads)
    body(tasks);
}

template <class Body>
void parallel_for(int64_t count, int64_t threads, const Body& body) {
    parallel(count, threads, [&](Tasks& tasks) {
        for (int64_t task; (task = tasks.next()) >= 0;) body(task);
    });
}

}  // namespace
