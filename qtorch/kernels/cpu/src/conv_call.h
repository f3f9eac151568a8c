// Entry points of convolutions: called from qtorch/kernels/cpu/conv.py.
#pragma once

#include "conv_depthwise.h"
#include "conv_float.h"
#include "conv_pool.h"
#include "conv_tile.h"

namespace {

struct ConvCall {
    ConvShape shape;
    ConvImages x;
    const int8_t* packed;
    ConvFinish finish;
    int64_t threads;
};

inline void run_conv(const ConvCall& c) {
    (c.shape.depthwise() ? multiply_depthwise : multiply_conv)(c.shape, c.x, c.packed, c.finish, c.threads);
}

}  // namespace
