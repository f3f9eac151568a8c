// Runs a package of AOTInductor in a process without Python: run_package LIBRARY PACKAGE ROWS COLUMNS INPUT OUTPUT, with
// fp32 numbers in the files.
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iostream>

#include <ATen/Functions.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::cerr << dlerror() << "\n", 1;
    auto load = (const char* (*)())dlsym(library, "qtorch_load");
    auto calls = (int64_t (*)())dlsym(library, "qtorch_calls");
    if (const char* error = load()) return std::cerr << error << "\n", 1;
    if (dlsym(RTLD_DEFAULT, "Py_IsInitialized")) return std::cerr << "there is Python\n", 1;

    torch::inductor::AOTIModelPackageLoader package(arguments[2]);
    at::Tensor x = at::empty({std::stoll(arguments[3]), std::stoll(arguments[4])});
    std::ifstream(arguments[5], std::ios::binary).read((char*)x.data_ptr(), x.nbytes());
    at::Tensor y = package.run({x})[0].contiguous();
    std::ofstream(arguments[6], std::ios::binary).write((const char*)y.data_ptr(), y.nbytes());
    std::cout << calls() << "\n";
}
