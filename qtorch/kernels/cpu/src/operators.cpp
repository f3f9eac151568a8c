// Operators of the `qtorch::` namespace for torch's dispatcher: the calls of compiled graphs, and of packages of
// AOTInductor in processes without Python. A library of its own, for the baseline of the machine, which calls the kernels
// of the library that is in use.
//
// In Python, ../operators.py calls `qtorch_attach` and says with `qtorch_use` which library that is; calls that only Python
// supports are passed on to it. Other processes call `qtorch_load`.
#if defined(__linux__)
#include "old_glibc.h"
#endif
#include <pthread.h>

#include <atomic>

#include "operator_kernels.h"
#include "operator_weight.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<void (*)(const char*)> listener;  // is told what runs
std::atomic<int64_t> calls;                   // that ran here
std::atomic<bool> has_python, forked;

int64_t thread_count() {
    uint32_t count = 1;
    if (!forked) functions.torch_get_num_threads(&count);
    return count;
}

// Tell the listener the operator, and its kernel: library and variant.
void note(const char* name, const Kernels& kernels, const char* variant = nullptr) {
    calls++;
    auto tell = listener.load();
    if (!tell) return;
    tell(name);
    std::string kernel = std::string(name) + "." + kernels.instruction_set;
    tell((variant ? kernel + "." + variant : kernel).c_str());
}

// The variant, or -1 if only Python has it.
int64_t choose(const Kernels& kernels, int64_t type, const Weight& w, int64_t rows) {
    if (kernels.copies && type != INT8 && kernels.variants.choose(type, w, rows, true) == FLOAT_VARIANT) return -1;
    int64_t variant = kernels.variants.choose(type, w, rows, false);
    if (variant >= 0 && variant <= CHANNELS) return variant;
    return has_python ? -1 : (int64_t)TILE;
}

// x (M, K) as kernels read it, copied into `memory` if its rows are not, and whether they can.
bool read_input(const Tensor& x, std::vector<char>* memory, Input* input, const char* name = "x") {
    if (x.dim != 2) refuse(std::string(name) + " is a matrix, got shape " + x.text());
    if (x.type > UINT8 || !x.sizes[1]) return false;
    int64_t rows = x.sizes[0], k = x.sizes[1], size = size_of(x.type);
    *input = {x.data, x.type, x.strides[0], rows};
    if (x.strides[1] == 1) return true;
    memory->resize(rows * k * size);
    for (int64_t i = 0; i < rows * k; i++)
        memcpy(memory->data() + i * size, x.data + (i / k * x.strides[0] + i % k * x.strides[1]) * size, size);
    *input = {memory->data(), x.type, k, rows};
    return true;
}

// Each of these runs the call and gives its result, or false if only Python supports it.

bool weight_only_mm(const Arguments& arguments, const Kernels& kernels, Value* result) {
    enum { X, CODES, N, SCALE, ZERO, PACKED, DTYPE, LOW, HIGH, DOMAIN_NAME, BIAS };
    Tensor x = arguments.tensor(X, "x"), bias = arguments.tensor(BIAS, "bias");
    Call call;
    std::vector<char> memory;
    if (!read_input(x, &memory, &call.x) || !is_float(x.type)) return false;
    WeightForm form{arguments.integer(N),     x.sizes[1],
                    arguments.boolean(PACKED), arguments.integer(DTYPE),
                    arguments.integer(DOMAIN_NAME), (arguments.real(LOW) + arguments.real(HIGH) + 1) / 2};
    check_bias(bias, x.type, form.n);
    Tensor codes = arguments.tensor(CODES, "codes"), scale = arguments.tensor(SCALE, "scale"), zero = arguments.tensor(ZERO, "zero_point");
    if (!read_weight(codes, scale, zero, form, &call.weight)) return false;
    call.variant = choose(kernels, x.type, call.weight, call.x.rows);
    if (call.variant < 0) return false;
    Result y({call.x.rows, form.n}, x.type);
    call.y = {y.data, x.type, form.n, bias.data};
    call.threads = thread_count();
    // Python does it again; see `where_finite`.
    if (kernels.weight_only_mm(&call) && has_python) return false;
    note("cpu_weight_only_mm", kernels, VARIANT_NAMES[call.variant]);
    *result = y.release();
    return true;
}

// Scales or zero points (M, 1) or (1, 1), one for each of the m rows.
template <class T>
bool read_rows(const Tensor& given, int64_t type, int64_t m, std::vector<T>* rows) {
    if (given.type != type || !(given.has_shape(m, 1) || given.has_shape(1, 1))) return false;
    int64_t step = given.sizes[0] > 1 ? given.strides[0] : 0;
    for (int64_t i = 0; i < m; i++) rows->push_back(((const T*)given.data)[i * step]);
    return true;
}

// How x is quantized; see `row_quantizer` in ../int8_linear.py.
Quantizer read_quantizer(const Arguments& arguments, size_t first, bool codes, bool given) {
    if (codes) {
        if (!given) refuse("x in int8 codes needs xs, the scales of its rows");
        return {};
    }
    double numbers[6];
    for (int i = 0; i < 6; i++) numbers[i] = arguments.real(first + i);
    if (!(-128 <= numbers[0] && numbers[0] < numbers[1] && numbers[1] <= 127)) refuse("a quantizer's codes are between -128 and 127");
    if ((numbers[3] != 0) != given) refuse("a quantizer with given scales takes xs, and only such a one");
    return {(int64_t)numbers[0], (int64_t)numbers[1], numbers[2] != 0, given, numbers[4], numbers[5]};
}

bool int8_mm(const Arguments& arguments, const Kernels& kernels, Value* result) {
    enum { X, XS, XZ, QUANTIZER, CODES = QUANTIZER + 6, N, WS, WZ, PACKED, WEIGHT_DTYPE, DTYPE, BIAS };
    Tensor x = arguments.tensor(X, "x"), bias = arguments.tensor(BIAS, "bias");
    Tensor xs = arguments.tensor(XS, "xs"), xz = arguments.tensor(XZ, "xz");
    IntCall call;
    std::vector<char> memory;
    if (!read_input(x, &memory, &call.x) || !(is_float(x.type) || x.type == INT8)) return false;
    int64_t m = call.x.rows, type = arguments.type(DTYPE);
    if (!is_float(type)) return false;
    WeightForm form{arguments.integer(N), x.sizes[1], arguments.boolean(PACKED), arguments.integer(WEIGHT_DTYPE), INT, 0.0};
    check_bias(bias, type, form.n);
    Tensor codes = arguments.tensor(CODES, "codes"), scale = arguments.tensor(WS, "ws"), zero = arguments.tensor(WZ, "wz");
    if (!read_weight(codes, scale, zero, form, &call.weight)) return false;
    if (!has_whole_groups(call.weight))
        refuse("takes groups of a multiple of " + std::to_string(AMX_STEP) + ", the weight has " + std::to_string(call.weight.group));
    call.quantizer = read_quantizer(arguments, QUANTIZER, x.type == INT8, (bool)xs);
    std::vector<float> scales;
    std::vector<int32_t> zeros;
    if (xz && !xs) refuse("xz needs xs");
    if (xs && !read_rows(xs, FLOAT32, m, &scales)) return false;
    if (xz && !read_rows(xz, INT32, m, &zeros)) return false;
    call.scale = xs ? scales.data() : nullptr;
    call.zero = xz ? zeros.data() : nullptr;
    call.variant = choose(kernels, INT8, call.weight, m);
    if (call.variant < 0) return false;
    Result y({m, form.n}, type);
    call.y = {y.data, type, form.n, bias.data};
    call.threads = thread_count();
    if (kernels.int8_mm(&call) && has_python) return false;
    note("cpu_int8_mm", kernels, VARIANT_NAMES[call.variant]);
    *result = y.release();
    return true;
}

bool embedding(const Arguments& arguments, const Kernels& kernels, Value* result) {
    enum { IDS, CODES, N, K, SCALE, ZERO, PACKED, DTYPE, LOW, HIGH, DOMAIN_NAME, OUTPUT_DTYPE };
    Tensor ids = arguments.tensor(IDS, "ids");
    if (ids.dim != 1) refuse("ids is a vector, got shape " + ids.text());
    int64_t type = arguments.type(OUTPUT_DTYPE);
    if (!is_float(type) || !ids.is_contiguous() || !(ids.type == INT64 || ids.type == INT32)) return false;
    WeightForm form{arguments.integer(N),      arguments.integer(K),
                    arguments.boolean(PACKED), arguments.integer(DTYPE),
                    arguments.integer(DOMAIN_NAME), (arguments.real(LOW) + arguments.real(HIGH) + 1) / 2};
    Tensor codes = arguments.tensor(CODES, "codes"), scale = arguments.tensor(SCALE, "scale"), zero = arguments.tensor(ZERO, "zero_point");
    EmbedCall call;
    if (!read_weight(codes, scale, zero, form, &call.weight)) return false;
    call.ids = {ids.data, ids.type == INT64, ids.sizes[0]};
    Result y({call.ids.count, form.k}, type);
    call.y = {y.data, type, form.k, nullptr};
    call.threads = thread_count();
    int64_t wrong = kernels.embed(&call);
    if (wrong >= 0)
        throw std::out_of_range("embedding: index out of range: " + std::to_string(call.ids[wrong]) + ", the table has " +
                                std::to_string(form.n) + " rows");
    note("cpu_embedding", kernels);
    *result = y.release();
    return true;
}

bool low_rank_mm(const Arguments& arguments, const Kernels& kernels, Value* result) {
    enum { Y, X, DOWN, UP };
    Tensor y = arguments.tensor(Y, "y"), x = arguments.tensor(X, "x"), down = arguments.tensor(DOWN, "down"), up = arguments.tensor(UP, "up");
    LowRank call;
    Input read;
    std::vector<char> memory[4];
    if (!read_input(y, &memory[Y], &read, "y") || !read_input(x, &memory[X], &call.x) || !read_input(down, &memory[DOWN], &call.down, "down") ||
        !read_input(up, &memory[UP], &call.up, "up") || !is_float(y.type) || !is_float(x.type))
        return false;
    int64_t m = y.sizes[0], n = y.sizes[1], size = size_of(y.type);
    auto is_half = [](const Tensor& t) { return t.type == BFLOAT16 || t.type == FLOAT16; };
    if (!x.has_shape(m, down.sizes[1]) || !up.has_shape(n, down.sizes[0]) || !is_half(down) || !is_half(up))
        refuse("takes factors (R, " + std::to_string(x.sizes[1]) + ") and (" + std::to_string(n) + ", R) in 16 bits, got " +
               down.text() + " and " + up.text());
    Result out({m, n}, y.type);
    for (int64_t i = 0; i < m; i++) memcpy((char*)out.data + i * n * size, read.part(i, 1).data, n * size);
    call.k = x.sizes[1], call.y = {out.data, y.type, n, nullptr}, call.threads = thread_count();
    kernels.low_rank_mm(&call);
    note("cpu_low_rank_mm", kernels);
    *result = out.release();
    return true;
}

// Keys or values in floating point.
attention::Cached cached(const Tensor& t) {
    int64_t size = size_of(t.type);
    return {(const uint8_t*)t.data, t.type, t.sizes[3], size * t.strides[0], size * t.strides[1], size * t.strides[2]};
}

// Python says what is wrong with tensors that do not fit each other.
bool float_attention(const Arguments& arguments, const Kernels& kernels, Value* result) {
    enum { QUERY, KEYS, VALUES, MASK, SINKS, SCALING, SOFTCAP, CAUSAL };
    constexpr int64_t MANY_ROWS = 256;  // as in ../kv_attention.py
    Tensor query = arguments.tensor(QUERY, "query"), keys = arguments.tensor(KEYS, "keys"), values = arguments.tensor(VALUES, "values");
    Tensor mask = arguments.tensor(MASK, "mask"), sinks = arguments.tensor(SINKS, "sinks");
    for (const Tensor* each : {&query, &keys, &values}) {
        if (each->dim != 4 || each->type != query.type || each->strides[3] != 1) return false;
        for (int64_t i = 0; i < 4; i++) if (!each->sizes[i]) return false;
    }
    int64_t batch = query.sizes[0], rows = query.sizes[2], heads = values.sizes[1], tokens = values.sizes[2], group = query.sizes[1] / heads;
    bool fits = keys.sizes[0] == batch && values.sizes[0] == batch && keys.sizes[1] == heads && keys.sizes[2] == tokens &&
                keys.sizes[3] == query.sizes[3] && query.sizes[1] == group * heads;
    if (!fits || sinks || !is_float(query.type) || group * rows >= MANY_ROWS) return false;
    attention::Attention call = {};
    if (mask) {
        if (mask.dim != 4 || mask.sizes[3] < tokens || mask.strides[3] != 1 || !(is_float(mask.type) || mask.type == BOOL)) return false;
        int64_t *steps[] = {&call.mask_batch, &call.mask_head, &call.mask_row};
        for (int64_t i = 0; i < 3; i++) {
            if (mask.sizes[i] != 1 && mask.sizes[i] != query.sizes[i]) return false;
            *steps[i] = mask.sizes[i] > 1 ? mask.strides[i] : 0;
        }
        call.mask = mask.data, call.mask_type = mask.type == BOOL ? (int64_t)UINT8 : mask.type;
    }
    call.keys = cached(keys), call.values = cached(values);
    call.batch = batch, call.heads = heads, call.group = group, call.rows = rows, call.tokens = tokens;
    call.query = query.data, call.query_type = query.type;
    call.query_batch = query.strides[0], call.query_head = query.strides[1], call.query_row = query.strides[2];
    call.causal = rows > 1 && arguments.boolean(CAUSAL);
    call.scaling = arguments.real(SCALING), call.softcap = arguments.real(SOFTCAP);
    call.threads = thread_count();
    Result y({batch, query.sizes[1], rows, values.sizes[3]}, query.type);
    call.out = y.data;
    kernels.attention(&call);
    note("float_attention", kernels);
    *result = y.release();
    return true;
}

// The schemas are those of the functions in Python, which `operators.py` compares.
struct Operator {
    const char *name, *schema;
    bool (*run)(const Arguments&, const Kernels&, Value*);
    const std::vector<Parameter>* parameters;  // of the schema, once attached
};

Operator operators[] = {
    {"qtorch::cpu_weight_only_mm",
     "cpu_weight_only_mm(Tensor x, Tensor codes, int n, Tensor scale, Tensor? zero_point, bool packed, int dtype, float low, "
     "float high, int domain, Tensor? bias) -> Tensor",
     weight_only_mm,
     nullptr},
    {"qtorch::cpu_int8_mm",
     "cpu_int8_mm(Tensor x, Tensor? xs, Tensor? xz, float low, float high, float asymmetric, float given, float smallest, "
     "float largest, Tensor codes, int n, Tensor ws, Tensor? wz, bool packed, int weight_dtype, ScalarType dtype, "
     "Tensor? bias) -> Tensor",
     int8_mm,
     nullptr},
    {"qtorch::cpu_embedding",
     "cpu_embedding(Tensor ids, Tensor codes, int n, int k, Tensor scale, Tensor? zero_point, bool packed, int dtype, "
     "float low, float high, int domain, ScalarType output_dtype) -> Tensor",
     embedding,
     nullptr},
    {"qtorch::float_attention",
     "float_attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, Tensor? sinks, float scaling, float softcap, bool causal) "
     "-> Tensor",
     float_attention,
     nullptr},
    {"qtorch::cpu_low_rank_mm", "cpu_low_rank_mm(Tensor y, Tensor x, Tensor down, Tensor up) -> Tensor", low_rank_mm, nullptr},
};
constexpr int COUNT = sizeof operators / sizeof *operators;

template <int I>
void boxed(Value* stack, uint64_t, uint64_t) {
    const Operator& called = operators[I];
    Value result = 0;
    {
        Arguments arguments(stack, *called.parameters);
        auto kernels = std::atomic_load(&in_use);
        if (!kernels || !called.run(arguments, *kernels, &result)) {
            if (!has_python) refuse(std::string(called.name) + " takes these arguments only where Python has imported qtorch");
            arguments.pass_on(called.name, "fallback");
            return;
        }
    }
    stack[0] = result;
}

constexpr torch_abi::Kernel KERNELS[] = {boxed<0>, boxed<1>, boxed<2>, boxed<3>, boxed<4>};
static_assert(sizeof KERNELS / sizeof *KERNELS == COUNT, "each operator has a function");

// Registrations last as long as the process.
void attach(bool define) {
    Handle definitions = nullptr, implementations = nullptr;
    if (const char* name = torch_abi::find_functions()) throw std::runtime_error(std::string("this torch has no ") + name);
    find_dtypes();
    if (define) {
        torch_abi::check(functions.aoti_torch_library_init_fragment("qtorch", "operators.cpp", __LINE__, &definitions), "a library");
        for (Operator& each : operators)
            torch_abi::check(functions.aoti_torch_library_def(definitions, each.schema), each.name);
    }
    torch_abi::check(functions.aoti_torch_library_init_impl("qtorch", "CPU", "operators.cpp", __LINE__, &implementations), "a library");
    for (int i = 0; i < COUNT; i++) {
        operators[i].parameters = new std::vector<Parameter>(parameters_of(operators[i].schema));
        torch_abi::check(functions.torch_library_impl(implementations, operators[i].name, KERNELS[i], torch_abi::VERSION), operators[i].name);
    }
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

// Null, or what went wrong, valid until the thread's next call.
template <class Body>
const char* guarded(const Body& body) {
    static thread_local std::string message;
    try {
        body();
        return nullptr;
    } catch (const std::exception& error) { message = error.what(); }
    return message.c_str();
}

}  // namespace

EXPORT const char* qtorch_fingerprint() { return QTORCH_FINGERPRINT; }

// For programs without Python, after torch is loaded: define and implement the operators, with the best library of
// kernels beside this one. May be called again. Gives null, or what went wrong.
EXPORT const char* qtorch_load() {
    static const std::string error = [] {
        const char* message = guarded([] {
            use_best();
            attach(true);
        });
        return std::string(message ? message : "");
    }();
    return error.empty() ? nullptr : error.c_str();
}

// For Python, which has defined the operators and an overload "fallback" of each.
EXPORT const char* qtorch_attach() {
    return guarded([] {
        attach(false);
        has_python = true;
    });
}

// The schema of an operator, null beyond the last.
EXPORT const char* qtorch_schema(int i) { return i < COUNT ? operators[i].schema : nullptr; }

// Use a library of kernels, with a table of variants in JSON; `variant` is for all calls, unless empty. Without a path all calls
// are passed on.
EXPORT const char* qtorch_use(const char* path, const char* name, const char* variants, const char* variant, int copies) {
    return guarded([&] {
        if (path) use(path, name, variants, variant, copies);
        else std::atomic_store(&in_use, std::shared_ptr<const Kernels>());
    });
}

// Tell this function what runs; null: no more.
EXPORT void qtorch_listen(void (*tell)(const char*)) { listener = tell; }

// Calls that ran here.
EXPORT int64_t qtorch_calls() { return calls; }
