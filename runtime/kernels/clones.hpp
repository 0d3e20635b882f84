// ZSHARD_CLONES compiles a function once for plain x86-64 and once each for machines with AVX2 and
// AVX-512; the loader picks at start, so one binary serves every build and run host. The bits are
// the same: no clone contracts a multiplication and an addition, and IEEE division and square root
// are exact to the last bit at every width. Empty where the loader's choice is not to be had: it
// runs before a sanitizer's own start and crashes there.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(ZSHARD_SANITIZER)
#define ZSHARD_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define ZSHARD_CLONES
#endif

// For what a clone or a GPU's kernel calls. Inlined, it is compiled for the caller's machine: no
// copy of it with another machine's instructions can be left for the linker to pick.
#if defined(__CUDACC__)
#define ZSHARD_INLINE __host__ __device__ __forceinline__
#else
#define ZSHARD_INLINE inline __attribute__((always_inline))
#endif
