// One binary for all CPUs: functions between K3_TARGET_BEGIN and K3_TARGET_END are compiled for
// the named instruction sets, the rest of the file for the baseline.
#pragma once

#if defined(__x86_64__)
#define K3_X86 1
#else
#define K3_X86 0
#endif

#define K3_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define K3_TARGET_BEGIN(isa) \
    K3_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define K3_TARGET_END K3_PRAGMA(clang attribute pop)
#else
#define K3_TARGET_BEGIN(isa) \
    K3_PRAGMA(GCC push_options)   \
    K3_PRAGMA(GCC target(isa))
#define K3_TARGET_END K3_PRAGMA(GCC pop_options)
#endif
