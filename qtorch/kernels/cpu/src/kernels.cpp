// Entry points, called from qtorch/kernels/cpu/library.py. This file is compiled once per instruction set.
#include "amx.h"
#include "dot.h"
#include "int_tile.h"
#include "tile.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

enum Path : int64_t { DOT, TILE, AMX };

struct Call {
    Weight weight;
    Input x;
    Output y;
    int64_t path, threads;
};

EXPORT const char* qtorch_fingerprint() { return QTORCH_FINGERPRINT; }

// Whether this machine gives the process all that this build needs beyond instructions.
EXPORT int qtorch_ready() {
#if defined(__AMX_BF16__)
    return request_amx();
#else
    return 1;
#endif
}

EXPORT void qtorch_weight_only_mm(const Call* call) {
    const Weight& w = call->weight;
    int64_t rows = call->x.rows;
    if (!w.n) return;
    // The other paths work on whole vectors of a group.
    bool whole = w.group == w.k || w.group % AMX_STEP == 0;
    int64_t path = whole && w.k ? call->path : TILE;
#if !defined(__AMX_BF16__)
    if (path == AMX) path = TILE;
#endif
    int64_t step = path == DOT ? DOT_MAX_ROWS : MAX_CHUNK;
    for (int64_t m = 0; m < rows; m += step) {
        Input x = call->x.part(m, rows - m < step ? rows - m : step);
        Output y = call->y.part(m);
        if (path == DOT) multiply_dot(w, x, y, call->threads);
        if (path == TILE) multiply_tiles(w, x, y, call->threads);
#if defined(__AMX_BF16__)
        if (path == AMX) multiply_amx(w, x, y, call->threads);
#endif
    }
}

struct IntCall {
    Weight weight;
    Input x;  // int8: codes already, with a scale and perhaps a zero point (int32) per row
    Output y;
    Quantizer quantizer;
    float* scale;
    int32_t* zero;
    int64_t path, threads;
};

// Groups are whole rows, or multiples of AMX_STEP columns.
EXPORT void qtorch_int8_mm(const IntCall* call) {
    static thread_local Scratch code_scratch, scale_scratch;
    const Weight& w = call->weight;
    int64_t rows = call->x.rows, path = call->path, step = path == DOT ? DOT_MAX_ROWS : MAX_CHUNK;
    for (int64_t m = 0; m < rows; m += step) {
        Input x = call->x.part(m, rows - m < step ? rows - m : step);
        Codes codes{(int8_t*)x.data, x.stride, x.rows, w.k, call->scale + m, call->zero ? call->zero + m : nullptr};
        if (x.type != INT8) {
            int64_t ld = round_up(w.k, 64);
            codes.codes = code_scratch.get<int8_t>(x.rows * ld);
            codes.ld = ld;
            codes.scale = scale_scratch.get<float>(2 * x.rows);
            codes.zero = call->quantizer.asymmetric ? (int32_t*)codes.scale + x.rows : nullptr;
            quantize_rows(call->quantizer, x, codes, call->threads);
        }
        if (path == DOT) multiply_int_dot(w, codes, call->y.part(m), call->threads);
        else multiply_int_tiles(w, codes, call->y.part(m), call->threads);
    }
}

// Codes (rows, k), contiguous, scale and zero point (rows).
EXPORT void qtorch_quantize_rows(const IntCall* call) {
    Codes out{(int8_t*)call->y.data, call->y.n, call->x.rows, call->y.n, call->scale, call->zero};
    quantize_rows(call->quantizer, call->x, out, call->threads);
}
