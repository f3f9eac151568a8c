// Symbols as old as glibc 2.28, which torch's own wheels run on, although a newer one compiles this. Included before any
// other header of the system.
#pragma once

#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
// Since 2.34 they have a new version, with the same behaviour.
__asm__(".symver dladdr, dladdr@GLIBC_2.2.5");
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif

#if defined(__GLIBC__)
// Of 2.32: what libstdc++ asks before it counts references without atomic operations. There are threads here.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
