// The largest number of each window, channels last: what lies between convolutions.
#pragma once

#include "conv.h"

namespace {

struct ConvPoolCall {
    const float* x;  // (images, height, width, channels)
    float* out;      // (images, out_h, out_w, channels)
    int64_t images, channels, height, width, out_h, out_w;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
    int64_t threads;
};

inline void pool_images(const ConvPoolCall& c) {
    parallel_for(c.images * c.out_h, c.threads, [&](int64_t task) {
        int64_t image = task / c.out_h, h = task % c.out_h, top = h * c.stride_h - c.padding_h;
        int64_t first = top < 0 ? 0 : top, last = top + c.kernel_h < c.height ? top + c.kernel_h : c.height;
        for (int64_t w = 0; w < c.out_w; w++) {
            int64_t left = w * c.stride_w - c.padding_w, from = left < 0 ? 0 : left;
            int64_t to = left + c.kernel_w < c.width ? left + c.kernel_w : c.width;
            float* out = c.out + (task * c.out_w + w) * c.channels;
            auto at = [&](int64_t y, int64_t x) { return c.x + ((image * c.height + y) * c.width + x) * c.channels; };
            int64_t i = 0;
            for (; i + LANES <= c.channels; i += LANES) {
                Floats most = load<Floats>(at(first, from) + i);
                for (int64_t y = first; y < last; y++)
                    for (int64_t x = from; x < to; x++) most = larger(load<Floats>(at(y, x) + i), most);
                store(out + i, most);
            }
            for (; i < c.channels; i++) {
                float most = at(first, from)[i];
                for (int64_t y = first; y < last; y++)
                    for (int64_t x = from; x < to; x++) most = at(y, x)[i] > most ? at(y, x)[i] : most;
                out[i] = most;
            }
        }
    });
}

}  // namespace
