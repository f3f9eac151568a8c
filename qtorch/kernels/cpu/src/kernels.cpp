// Entry points, called from qtorch/kernels/cpu/compiled_library.py. This file is compiled once per instruction set.
#include "adam.h"
#include "block_sparse.h"
#include "attention.h"
#include "calls.h"
#include "conv_call.h"
#include "decoder.h"
#include "dequantize.h"
#include "dequantize_matrix.h"
#include "experts.h"
#include "fixed_dot.h"
#include "float_amx.h"
#include "float_dot.h"
#include "float_tile.h"
#include "int_amx.h"
#include "int_blocks.h"
#include "int_channels.h"
#include "int_dot.h"
#include "int_row.h"
#include "int_tile.h"
#include "low_rank.h"
#include "quantize_matrix.h"
#include "quantize_tokens.h"
#include "vectors.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* qtorch_fingerprint() { return QTORCH_FINGERPRINT; }

// Whether this machine gives the process all that this build needs beyond instructions.
EXPORT int qtorch_ready() {
#if defined(__AMX_BF16__)
    return request_amx();
#else
    return 1;
#endif
}

static void multiply_codes(const Weight& w, const Codes& x, const Output& y, int64_t variant, int64_t threads) {
    if (fits_int_row(w, x)) multiply_int_row(w, x, y, threads);
    else if ((variant == CHANNELS || row_by_channels(x)) && w.has_short_groups()) multiply_channels(w, x, y, threads);
    else if (variant == DOT) multiply_int_dot(w, x, y, threads);
    else if (has_tile_groups(w)) multiply_groups_amx(w, x, y, threads);
    else multiply_int_tiles(w, x, y, threads);
}

// How a row of x is multiplied where x is in fixed point: in 2 to 4 slices, by fixed_dot.h, or in floats, where fixed point
// would not be as exact as fp32. It follows from this row and the number of rows, so that no row depends on another.
enum : int64_t { IN_FLOATS, BY_FIXED_DOT, IN_TWO_DIGITS = 5, ROW_KINDS };  // the others are numbers of slices

// Integers in groups of whole steps. Only matrix tiles take other zero points than integers, and sums that are too long.
static bool takes_slices(const Weight& w) {
    bool real_zero = w.zero && (!w.zero_is_code || w.zero_type < INT32);
    return !w.values && has_whole_groups(w) && ((!real_zero && w.fits_int32()) || has_tile_groups(w));
}

static int64_t row_kind(const Weight& w, const float* row, int64_t type, bool few) {
    int64_t slices = slices_of(row, w.k, type);
    if (few && slices && slices < 4) return slices == 2 ? IN_TWO_DIGITS : BY_FIXED_DOT;
    return !slices || !takes_slices(w) ? IN_FLOATS : slices < 2 ? 2 : slices;
}

static void multiply_in_floats(const Weight& w, const Input& x, const Output& y, int64_t variant, int64_t threads) {
    if (variant == DOT) multiply_dot(w, x, y, threads);
    if (variant == TILE) multiply_tiles(w, x, y, threads);
#if defined(__AMX_BF16__)
    if (variant == AMX) multiply_amx(w, x, y, threads);
#endif
}

// Rows of x that are all of this kind; `rows` are those in fp32.
static void multiply_kind(const Weight& w, const Input& x, const float* rows, int64_t kind, const Output& y, int64_t otherwise,
                          int64_t threads) {
    static thread_local Scratch code_scratch, scale_scratch, sum_scratch;
    if (kind == IN_FLOATS) return multiply_in_floats(w, x, y, otherwise, threads);
    int64_t padded = round_up(w.k, LANES), ld = round_up(w.k, 64), slices = kind;
    bool few = kind == BY_FIXED_DOT || kind == IN_TWO_DIGITS, tiles = has_tile_groups(w);
    float* sums = nullptr;
    if ((few || tiles) && w.has_offset()) {
        sums = sum_scratch.get<float>(x.rows * w.groups);
        parallel_for(x.rows, threads, [&](int64_t m) {
            for (int64_t g = 0; g < w.groups; g++) sums[m * w.groups + g] = sum_of(rows + m * padded + g * w.group, w.group);
        });
    }
    if (few) return (kind == BY_FIXED_DOT ? multiply_fixed_dot<3> : multiply_fixed_dot<2>)(w, rows, padded, x.rows, sums, y, threads);
    int8_t* bytes = code_scratch.get<int8_t>(slices * x.rows * ld);
    Codes codes{bytes, ld, slices * x.rows, w.k, scale_scratch.get<float>(slices * x.rows), nullptr, slices};
    parallel_for(x.rows, threads, [&](int64_t m) { slice_row(rows + m * padded, w.k, m, codes); });
    if (tiles) multiply_slices_amx(w, codes, sums, y, threads);
    else multiply_codes(w, codes, y, w.has_short_groups() ? CHANNELS : codes.rows <= DOT_MAX_ROWS ? DOT : TILE, threads);
}

// Weight-only through integers, with x in fixed point: the rows of each kind together.
static void multiply_fixed(const Weight& w, const Input& x, const Output& y, int64_t otherwise, int64_t threads) {
    static thread_local Scratch row_scratch, part_scratch, result_scratch, kind_scratch;
    int64_t padded = round_up(w.k, LANES), x_bytes = w.k * size_of(x.type), y_bytes = w.n * size_of(y.type);
    float* rows = row_scratch.get<float>(x.rows * padded);
    x.to_floats(w.k, rows, padded, threads);
    int64_t *kinds = kind_scratch.get<int64_t>(x.rows), counts[ROW_KINDS] = {};
    bool few = fits_fixed_dot(w, x.rows);
    for (int64_t m = 0; m < x.rows; m++) counts[kinds[m] = row_kind(w, rows + m * padded, x.type, few)]++;
    if (x.rows && counts[*kinds] == x.rows) return multiply_kind(w, x, rows, *kinds, y, otherwise, threads);
    for (int64_t kind = 0; kind < ROW_KINDS; kind++) {
        if (!counts[kind]) continue;
        char* part = part_scratch.get<char>(counts[kind] * x_bytes);
        char* result = result_scratch.get<char>(counts[kind] * y_bytes);
        // Each row with the number of its result.
        auto each_row = [&](const auto& body) {
            for (int64_t m = 0, i = 0; m < x.rows; m++) if (kinds[m] == kind) body(m, i++);
        };
        Input some{part, x.type, w.k, counts[kind]};
        each_row([&](int64_t m, int64_t i) { memcpy(part + i * x_bytes, x.part(m, 1).data, x_bytes); });
        some.to_floats(w.k, rows, padded, threads);
        multiply_kind(w, some, rows, kind, {result, y.type, w.n, y.bias}, otherwise, threads);
        each_row([&](int64_t m, int64_t i) { memcpy(y.part(m).data, result + i * y_bytes, y_bytes); });
    }
}

static void multiply_floats(const Weight& w, const Input& all, const Output& out, int64_t wanted, int64_t threads) {
    int64_t rows = all.rows;
    if (!w.n) return;
    int64_t variant = wanted == CHANNELS || !w.k ? TILE : wanted;
    if (variant == FIXED && !fits_fixed_dot(w, rows) && !takes_slices(w)) variant = rows <= DOT_MAX_ROWS ? DOT : TILE;
    // What is behind the end of a row may stand for an infinity.
    if (variant == DOT && ((w.group != w.k && w.group % LANES) || (w.values && w.k % LANES))) variant = TILE;
#if defined(__AMX_BF16__)
    // Where scales cannot be in the tile, groups are multiplied one by one.
    if (variant == AMX && all.type != BFLOAT16 && !takes_bfloat_slices(w, rows)) variant = TILE;
    constexpr int64_t OTHERWISE = AMX;
#else
    constexpr int64_t OTHERWISE = TILE;
    if (variant == AMX) variant = TILE;
#endif
    int64_t step = variant == DOT ? DOT_MAX_ROWS : variant == FIXED ? MAX_CHUNK / 4 : MAX_CHUNK;
    for (int64_t m = 0; m < rows; m += step) {
        Input x = all.part(m, rows - m < step ? rows - m : step);
        if (variant == FIXED) multiply_fixed(w, x, out.part(m), w.values ? (int64_t)TILE : OTHERWISE, threads);
        else multiply_in_floats(w, x, out.part(m), variant, threads);
    }
}

// The functions below give whether a result was NaN or infinite.
template <class Body>
static int64_t watched(const Body& body) {
    int64_t before = __atomic_load_n(&non_finite_results, __ATOMIC_RELAXED);
    body();
    return __atomic_load_n(&non_finite_results, __ATOMIC_RELAXED) != before;
}

// Of vectors, with x rotated where the weight is.
static void multiply_vectors(const Weight& w, const Input& all, const Output& out, int64_t variant, int64_t threads) {
    static thread_local Scratch row_scratch;
    int64_t ld = round_up(w.k, LANES);
    for (int64_t m = 0; m < all.rows; m += MAX_CHUNK) {
        Input x = all.part(m, all.rows - m < MAX_CHUNK ? all.rows - m : MAX_CHUNK);
        float* rows = row_scratch.get<float>(x.rows * ld);
        x.to_floats(w.k, rows, ld, threads);
        if (w.signs) parallel_for(x.rows, threads, [&](int64_t i) { rotate(w, rows + i * ld); });
        if (variant == FIXED && multiply_vector_dot(w, rows, ld, x.rows, x.type, out.part(m), threads)) continue;
        int64_t otherwise = variant != FIXED ? variant : x.rows <= DOT_MAX_ROWS ? (int64_t)DOT : (int64_t)TILE;
        multiply_floats(w, {rows, FLOAT32, ld, x.rows}, out.part(m), otherwise, threads);
    }
}

EXPORT int64_t qtorch_weight_only_mm(const Call* call) {
    auto multiply = call->weight.vectors ? multiply_vectors : multiply_floats;
    return watched([&] { multiply(call->weight, call->x, call->y, call->variant, call->threads); });
}

struct ExpertsCall {
    Weight weight;
    Experts experts;
    Input x;
    Output y;
    int64_t threads;
};

EXPORT int64_t qtorch_experts_mm(const ExpertsCall* call) {
    auto multiply = [](const Weight& w, const Input& x, const Output& y, int64_t variant) { multiply_floats(w, x, y, variant, 1); };
    return watched([&] { multiply_experts(call->weight, call->experts, call->x, call->y, call->threads, multiply); });
}

// Groups are whole rows, or multiples of AMX_STEP columns.
static void multiply_int8(const IntCall* call) {
    static thread_local Scratch code_scratch, scale_scratch;
    const Weight& w = call->weight;
    int64_t rows = call->x.rows, variant = call->variant, step = variant == DOT ? DOT_MAX_ROWS : MAX_CHUNK;
    for (int64_t m = 0; m < rows; m += step) {
        Input x = call->x.part(m, rows - m < step ? rows - m : step);
        Codes codes{(int8_t*)x.data, x.stride, x.rows, w.k, call->scale + m, call->zero ? call->zero + m : nullptr};
        if (x.type != INT8) {
            int64_t ld = round_up(w.k, 64);
            codes.codes = code_scratch.get<int8_t>(x.rows * ld);
            codes.ld = ld;
            if (!call->quantizer.given) {
                codes.scale = scale_scratch.get<float>(2 * x.rows);
                codes.zero = call->quantizer.asymmetric ? (int32_t*)codes.scale + x.rows : nullptr;
            }
            quantize_rows(call->quantizer, x, codes, call->threads);
        }
        multiply_codes(w, codes, call->y.part(m), variant, call->threads);
    }
}

EXPORT int64_t qtorch_int8_mm(const IntCall* call) {
    return watched([&] { multiply_int8(call); });
}

struct BlockCall {
    Weight weight;  // what is stored, (n, kept * size)
    Input x;        // (rows, k); int8: codes
    Output y;
    Blocks blocks;
    int64_t k;
    // Of codes, per row; zero or null.
    float* scale;
    int32_t* zero;
    int64_t threads;
};

static void multiply_block_sparse(const BlockCall* call) {
    int64_t rows = call->x.rows, step = rows <= DOT_MAX_ROWS ? DOT_MAX_ROWS : MAX_CHUNK;
    for (int64_t m = 0; m < rows; m += step) {
        Input x = call->x.part(m, rows - m < step ? rows - m : step);
        Output y = call->y.part(m);
        if (x.type == INT8) {
            Codes codes{(int8_t*)x.data, x.stride, x.rows, call->k, call->scale + m, call->zero ? call->zero + m : nullptr};
            auto multiply = x.rows <= DOT_MAX_ROWS ? multiply_blocks_int_dot : multiply_blocks_int_tiles;
            multiply(call->weight, call->blocks, call->k, codes, y, call->threads);
            continue;
        }
        multiply_blocks_float(call->weight, call->blocks, x, y, call->threads);
        spread_non_finite(x, call->k, y);
    }
}

EXPORT int64_t qtorch_block_sparse_mm(const BlockCall* call) {
    return watched([&] { multiply_block_sparse(call); });
}

struct ExpertsIntCall {
    Weight weight;
    Experts experts;
    Input x;
    Output y;
    Quantizer quantizer;
    float* scale;  // these two as in IntCall
    int32_t* zero;
    int64_t threads;
};

// Each row of x is quantized once, for all of its experts.
EXPORT int64_t qtorch_experts_int8_mm(const ExpertsIntCall* call) {
    static thread_local Scratch code_scratch, scale_scratch;
    const Weight& w = call->weight;
    const Input& x = call->x;
    Codes codes{(int8_t*)x.data, x.stride, x.rows, w.k, call->scale, call->zero};
    if (x.type != INT8) {
        codes.ld = round_up(w.k, 64);
        codes.codes = code_scratch.get<int8_t>(x.rows * codes.ld);
        if (!call->quantizer.given) {
            codes.scale = scale_scratch.get<float>(2 * x.rows);
            codes.zero = call->quantizer.asymmetric ? (int32_t*)codes.scale + x.rows : nullptr;
        }
        quantize_rows(call->quantizer, x, codes, call->threads);
    }
    auto multiply = [](const Weight& part, const Codes& of, const Output& y, int64_t variant) {
        int64_t step = variant == DOT ? DOT_MAX_ROWS : MAX_CHUNK;
        for (int64_t m = 0; m < of.rows; m += step) {
            int64_t rows = of.rows - m < step ? of.rows - m : step;
            Codes some{of.codes + m * of.ld, of.ld, rows, of.columns, of.scale + m, of.zero ? of.zero + m : nullptr};
            multiply_codes(part, some, y.part(m), variant, 1);
        }
    };
    int64_t lost = watched([&] { multiply_experts(w, call->experts, codes, call->y, call->threads, multiply); });
    code_scratch.trim();
    return lost;
}

// Codes (rows, k), contiguous, scale and zero point (rows).
EXPORT void qtorch_quantize_rows(const IntCall* call) {
    Codes out{(int8_t*)call->y.data, call->y.n, call->x.rows, call->y.n, call->scale, call->zero};
    quantize_rows(call->quantizer, call->x, out, call->threads);
}

// The weight in floating point: y (n, k).
EXPORT void qtorch_dequantize(const Call* call) {
    dequantize(call->weight, call->y, call->threads);
}

// y.data: double (n, 2); y.type: that of the weight in floating point.
EXPORT void qtorch_sum_squared_errors(const Call* call) {
    sum_squared_errors(call->weight, call->x, call->y.type, (double*)call->y.data, call->threads);
}

// Rows `ids` of the weight in floating point: y (count, k). Gives the first index of an id out of range, or -1.
EXPORT int64_t qtorch_embed(const EmbedCall* call) {
    return embed(call->weight, call->ids, call->y, call->threads);
}

// See attention.h.
EXPORT void qtorch_attention(const attention::Attention* call) {
    attention::attend(*call);
}

// See quantize_tokens.h.
EXPORT void qtorch_quantize_tokens(const attention::Tokens* call) {
    attention::quantize_tokens(*call);
}

// See quantize_matrix.h.
EXPORT void qtorch_quantize_matrix(const operand::QuantizeMatrix* call) {
    operand::quantize_matrix(*call);
}

// See dequantize_matrix.h.
EXPORT void qtorch_dequantize_matrix(const operand::DequantizeMatrix* call) {
    operand::dequantize_matrix(*call);
}

// See int_blocks.h.
EXPORT void qtorch_block_product(const operand::BlockProduct* call) {
    operand::multiply_blocks(*call);
}

EXPORT void qtorch_scale_sums(const operand::ScaleSums* call) {
    operand::scale_sums(*call);
}

// See low_rank.h.
EXPORT void qtorch_low_rank_mm(const LowRank* call) {
    add_low_rank(*call);
}

// See decoder.h.
EXPORT void qtorch_rms_norm(const RmsNorm* call) {
    normalize(*call);
}

EXPORT void qtorch_rotate_halves(const Rotation* call) {
    rotate_halves(*call);
}

// See adam.h.
EXPORT void qtorch_adam(const adam::Adam* call) {
    adam::step(*call);
}

// Bytes of a packed weight; see ConvPackCall.
EXPORT int64_t qtorch_conv_pack(const ConvPackCall* call) {
    return pack_conv(*call);
}

// Whether there is a NaN or an infinity.
EXPORT int64_t qtorch_conv_codes(const ConvCodesCall* call) {
    return quantize_images(*call);
}

EXPORT void qtorch_conv(const ConvCall* call) {
    run_conv(*call);
}

EXPORT void qtorch_conv_pool(const ConvPoolCall* call) {
    pool_images(*call);
}

EXPORT void qtorch_conv_float(const ConvFloatCall* call) {
    multiply_conv_float(*call);
}
