// Calls one function of a library, for tests/kernels/cpu/emulated.py: a program for the machine that is emulated.
//
//     emulated_call LIBRARY FUNCTION < request > answer
//
// All numbers are 64 bits. The request: the count of buffers, each with its size and its bytes; the size and the bytes of
// the struct that the function takes; the count of its pointers, each as (place in the struct, buffer, offset in that). The
// answer: what the function gives, and all buffers.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void fail(const char* what) {
    fprintf(stderr, "emulated_call: %s\n", what);
    exit(1);
}

static void read_bytes(void* to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) fail("the request is too short");
}

static int64_t read_number() {
    int64_t number;
    read_bytes(&number, sizeof number);
    return number;
}

static std::vector<char> read_block() {
    std::vector<char> block(read_number());
    read_bytes(block.data(), block.size());
    return block;
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fail(dlerror());
    auto function = (int64_t(*)(const void*))dlsym(library, arguments[2]);
    if (!function) fail(dlerror());
    // The pool of threads that the library takes from this program, as it takes torch's elsewhere.
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    threads++;
    std::vector<std::vector<char>> buffers(read_number());
    for (auto& buffer : buffers) buffer = read_block();
    std::vector<char> call = read_block();
    for (int64_t count = read_number(); count; count--) {
        int64_t place = read_number(), buffer = read_number();
        char* pointer = buffers[buffer].data() + read_number();
        memcpy(call.data() + place, &pointer, sizeof pointer);
    }
    int64_t result = function(call.data());
    fwrite(&result, sizeof result, 1, stdout);
    for (auto& buffer : buffers) fwrite(buffer.data(), 1, buffer.size(), stdout);
    return threads < 1;
}
