// The arguments of the entry points that `operators.cpp` shares with Python; see ../structs.py.
#pragma once

#include "embed.h"
#include "matrix.h"
#include "quantize.h"

namespace {

// As in qtorch/kernels/cpu/variants.py.
enum Variant : int64_t { DOT, TILE, AMX, FIXED, CHANNELS };

struct Call {
    Weight weight;
    Input x;
    Output y;
    int64_t variant, threads;
};

struct IntCall {
    Weight weight;
    Input x;  // int8: codes already
    Output y;
    Quantizer quantizer;
    // Per row, of codes, or those that the quantizer is given; zero (int32) or null.
    float* scale;
    int32_t* zero;
    int64_t variant, threads;
};

struct EmbedCall {
    Weight weight;
    Ids ids;
    Output y;
    int64_t threads;
};

}  // namespace
