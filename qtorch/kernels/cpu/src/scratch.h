// Working memory, aligned to cache lines, kept by each thread from call to call while it is small.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t KEEP_BYTES = 16 << 20;

class Scratch {
public:
    ~Scratch() { free(data_); }

    // At least this many elements and 256 bytes behind them, so that whole vectors may run over the end.
    template <class T>
    T* get(int64_t count) {
        int64_t bytes = (count * (int64_t)sizeof(T) + 256 + 63) / 64 * 64;
        if (bytes > bytes_) {
            free(data_);
            data_ = aligned_alloc(64, bytes);
            if (!data_) abort();
            bytes_ = bytes;
        }
        return (T*)data_;
    }

    void trim() {
        if (bytes_ <= KEEP_BYTES) return;
        free(data_);
        data_ = nullptr;
        bytes_ = 0;
    }

private:
    void* data_ = nullptr;
    int64_t bytes_ = 0;
};

}  // namespace
